"""`make gpu` as far as a CPU can do it: two processes without Horovod, and what is written."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
gpu = pytest.importorskip("benchmarks.gpu")


def test_two_processes_exchange_and_are_written_down(tmp_path, capfd):
    folder, arguments = str(tmp_path), ["--parts", "exchange", "--only", "Strom 16", "--folder"]
    assert gpu.main(["--device", "cpu", *arguments, folder]) == 0
    result = json.loads((tmp_path / "gpu-cpu.json").read_text())
    (row,) = result["parts"]["exchange"]["rows"]
    assert row["ms"] > 0 and row["backend"] == "gloo" and row["bytes_sent"] > 0
    assert "| Strom 16 | gloo | 2 |" in (tmp_path / "gpu-cpu.md").read_text()
    assert "results: " in capfd.readouterr().out


def fails_on_one_rank(device):
    if torch.distributed.get_rank():
        raise ValueError("what one rank finds out")
    return gpu.small(device)


def test_a_method_that_fails_on_one_rank_ends_alone():
    """Nobody waits for that rank; the next method is tried."""
    options = SimpleNamespace(device="cpu", only=["Strom 16", "Random-k"])
    rows = gpu.spawned(options, "gloo", 2, fails_on_one_rank)
    assert [row["point"] for row in rows] == ["Strom 16", "Random-k"]
    for row in rows:
        assert "error" in row and "ms" not in row
    text = gpu.table({"machine": {}, "parts": {"exchange": {"rows": rows, "code": 1}}})
    assert text.count("| gloo | 2 | |") == 2


@pytest.mark.parametrize("part", ["kernels", "exchange", "training", "horovod"])
def test_what_cannot_run_says_why(part, tmp_path, monkeypatch):
    monkeypatch.setitem(gpu.NEEDS, part, "a_module_that_nobody_has")
    arguments = ["--device", "cpu", "--parts", part, "--folder", str(tmp_path)]
    assert gpu.main(arguments) == 0
    line = f"| {part} | not run: a_module_that_nobody_has is not installed |"
    assert line in (tmp_path / "gpu-cpu.md").read_text()


def test_what_a_gpu_says_of_itself(monkeypatch):
    """That it took no kernels, too: what is measured would be of plain ops."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    for kernels in (object(), None):
        monkeypatch.setattr(gpu, "TorchOps", lambda device, k=kernels: SimpleNamespace(kernels=k))
        facts = gpu.machine("cuda")
        assert facts["gpus"] == ["GPU 0", "GPU 1"] and facts["nccl"] == [2, 29, 7]
        text = gpu.table({"machine": json.loads(json.dumps(facts)), "parts": {}})
        assert ("took no kernels" in text) == (kernels is None)


def test_a_part_that_fails_is_written_down(tmp_path, monkeypatch):
    """And the parts behind it are run."""

    def fails(options):
        raise RuntimeError("an illegal address")

    passed = {"tests": 5, "failures": 1, "errors": 0, "skipped": 2, "code": 1}
    monkeypatch.setattr(gpu, "steps", fails)
    monkeypatch.setattr(gpu, "tested", lambda part, options: passed)
    arguments = ["--device", "cpu", "--parts", "steps", "reads", "--folder", str(tmp_path)]
    assert gpu.main(arguments) == 1
    written = json.loads((tmp_path / "gpu-cpu.json").read_text())["parts"]
    assert written["steps"]["error"] == "an illegal address" and written["reads"] == passed
    text = (tmp_path / "gpu-cpu.md").read_text()
    assert "| steps | failed |" in text and "| reads | 2 passed, 1 failed, 2 skipped |" in text
