"""`make gpu` as far as a CPU can do it: two processes without Horovod, and what is written."""

from __future__ import annotations

import json

import pytest

gpu = pytest.importorskip("benchmarks.gpu")


def test_two_processes_exchange_and_are_written_down(tmp_path, capfd):
    folder, asked = str(tmp_path), ["--parts", "exchange", "--only", "Strom 16", "--folder"]
    assert gpu.main(["--device", "cpu", *asked, folder]) == 0
    result = json.loads((tmp_path / "gpu-cpu.json").read_text())
    (row,) = result["parts"]["exchange"]["rows"]
    assert row["equal"] and row["backend"] == "gloo" and row["bytes_sent"] > 0
    assert "| Strom 16 |" in (tmp_path / "gpu-cpu.md").read_text()
    assert "results: " in capfd.readouterr().out


def test_what_cannot_run_says_why(tmp_path, monkeypatch):
    monkeypatch.setitem(gpu.NEEDS, "kernels", "a_module_that_nobody_has")
    given = ["--device", "cpu", "--parts", "kernels", "--folder", str(tmp_path)]
    assert gpu.main(given) == 0
    said = "not run: a_module_that_nobody_has is not installed"
    assert said in (tmp_path / "gpu-cpu.md").read_text()
