"""What the demo says beside its table, without training."""

from __future__ import annotations

import importlib
import io
import json
import sys

import pytest
from rich.console import Console

pytest.importorskip("matplotlib")
from benchmarks.worth import slow_link
from examples import demo

ROW = {
    "accuracy": 97.0,
    "element_ratio": 20.0,
    "ratio": 10.0,
    "bytes_sent": 1e6,
    "steps": 10,
    "seconds_per_step": 0.01,
}


def printed(monkeypatch, tmp_path, *words):
    output = io.StringIO()
    rows = lambda module, method, *_: {**ROW, "framework": "PyTorch", "method": method}  # noqa: E731
    monkeypatch.delenv("HVD_GRADCOMP_HOSTS", raising=False)
    monkeypatch.setattr(sys, "argv", ["demo", "--output", str(tmp_path / "results"), *words])
    monkeypatch.setattr(demo, "run", rows)
    monkeypatch.setattr(slow_link, "refusal", lambda: "no hosts here")
    monkeypatch.setattr(demo, "plot", lambda rows, path: path.parent.mkdir())
    monkeypatch.setattr(demo, "Console", lambda: Console(file=output, width=100))
    demo.main()
    return " ".join(output.getvalue().split())


def test_it_says_why_compressed_steps_are_slower_and_what_a_link_makes_of_them(
    monkeypatch, tmp_path
):
    text = printed(monkeypatch, tmp_path)
    assert demo.ONE_MACHINE in text
    runs = {run["rate"]: run["exchange"] for run in json.loads(demo.HOSTS.read_text())["runs"]}
    for rate, name in (("1gbit", "QSGD()"), ("100mbit", "Variance(alpha=4.3)")):
        (one,) = [one for one in runs[rate] if one["method"] == name]
        assert f"{one['ms']:,.0f} ({one['times_faster']:.1f}x)" in text
    assert text.index("dense") < text.index("QSGD()") < text.index("Variance(alpha=1.0)")


def test_it_ends_with_what_a_slow_link_makes_of_a_training(monkeypatch, tmp_path):
    """Predicted where no hosts can be made, and it says so."""
    text = printed(monkeypatch, tmp_path)
    last = text[text.index("A transformer to one loss") :]
    assert "predicted from docs/measured" in last
    sooner = [
        last.partition(f"{name} │")[2].split("│")[3]
        for name in ("dense", "every 15, averaged, Int8")
    ]
    assert float(sooner[0]) == 1.0 and float(sooner[1]) > 2.0


def test_hosts_that_fail_do_not_end_the_demo(monkeypatch, capsys):
    def fail(*_, **__):
        raise slow_link.JobError("a rank is gone", "")

    monkeypatch.setattr(slow_link, "refusal", lambda: None)
    monkeypatch.setattr(slow_link.shutil, "which", lambda name: name)
    monkeypatch.setattr(slow_link, "Hosts", fail)
    assert "predicted" in str(slow_link.training(demo.WORTH).title)
    assert "a rank is gone" in capsys.readouterr().err


def test_it_needs_no_benchmarks_where_hosts_are_given(monkeypatch, tmp_path):
    """As in an image, which has none."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.setitem(sys.modules, name, None)
    importlib.reload(demo)
    assert "plot:" in printed(monkeypatch, tmp_path, "--hosts", "one:1,two:1")


def test_between_hosts_it_says_no_such_thing(monkeypatch, tmp_path):
    assert demo.ONE_MACHINE not in printed(monkeypatch, tmp_path, "--hosts", "one:1,two:1")
