"""`make gpu` as far as a CPU can do it: processes without Horovod, deadlines, what is written."""

from __future__ import annotations

import json
import math
import time
from functools import partial
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
main = pytest.importorskip("benchmarks.gpu.__main__")
from benchmarks.gpu import checks, models, ranks, replicas, sharded  # noqa: E402
from benchmarks.gpu.part import Part, Setting  # noqa: E402
from benchmarks.gpu.parts import PARTS  # noqa: E402
from benchmarks.gpu.requirements import NEEDS  # noqa: E402
from benchmarks.gpu.results import Results  # noqa: E402

CPU = Setting("cpu")
FAR = math.inf


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "gpu-cpu.json", {"device": "cpu"})


def test_two_processes_exchange_and_are_written_down(tmp_path, capfd):
    folder, arguments = str(tmp_path), ["--parts", "exchange", "--only", "Strom 16", "--folder"]
    assert main.main(["--device", "cpu", *arguments, folder]) == 0
    result = json.loads((tmp_path / "gpu-cpu.json").read_text())
    (row,) = result["parts"]["exchange"]["rows"]
    assert row["ms"] > 0 and row["name"] == "Strom 16 | gloo | 2" and row["bytes_sent"] > 0
    assert result["parts"]["exchange"]["left"] == []
    assert "| Strom 16 | gloo | 2 |" in (tmp_path / "gpu-cpu.md").read_text()
    assert "results: " in capfd.readouterr().out
    assert main.main(["--device", "cpu", *arguments, folder]) == 0
    assert "exchange: 0 to measure" in capfd.readouterr().out, "it goes on where it ended"


def trained(setting, method):
    """Both kinds of processes in one, which start but once."""
    if method in sharded.METHODS:
        return sharded.trained(setting, method)
    return replicas.trained(models.transformer, setting, method)


def test_local_steps_and_shards_have_a_step_and_a_round():
    local, sharded_local = next(iter(replicas.LOCAL)), sharded.METHODS[2]
    methods = [local, sharded.STOCK, sharded.METHODS[1], sharded_local]
    names = ranks.names_of(methods, [("gloo", 2)])
    rows = {row["method"]: row for row in ranks.measured(CPU, names, FAR, trained)}
    assert [*rows] == methods and not any("error" in row for row in rows.values())
    for method, row in rows.items():
        assert ("round_ms" in row) == ("step_ms" in row) == (method in (local, sharded_local))
    assert rows[local]["bytes_sent"] == rows[sharded_local]["bytes_sent"] > 0


def test_all_parts_have_names_and_needs():
    assert [*PARTS] == [*NEEDS]
    one, two = Setting("cuda", 1), Setting("cuda", 2)
    for part in PARTS.values():
        for setting in (CPU, one, two):
            names = part.names(setting)
            assert names and len({*names}) == len(names)
    fsdp = PARTS["fsdp"].names
    assert {ranks.Job.of(name)[1:] for name in fsdp(one)} == {("gloo", 2)}
    assert {ranks.Job.of(name)[1:] for name in fsdp(two)} == {("nccl", 2)}
    training = PARTS["training"].names
    assert [ranks.Job.of(training(s)[0]) for s in (one, two)] == [
        (replicas.ALONE, "nccl", 1),
        (replicas.ALONE, "nccl", 2),
    ]


def fails_on_one_rank(setting, method):
    if torch.distributed.get_rank():
        raise ValueError("what one rank finds out")
    return trained(setting, method)


def test_a_method_that_fails_on_one_rank_ends_alone(results):
    """Nobody waits for that rank; the next method is tried."""
    names = ranks.names_of([replicas.ALONE, "Random-k"], [("gloo", 2)])
    for row in ranks.measured(CPU, names, FAR, fails_on_one_rank):
        results.add("exchange", row)
    assert [row["name"] for row in results.rows("exchange")] == names
    assert all("error" in row and "ms" not in row for row in results.rows("exchange"))
    assert results.table().count("| gloo | 2 | ") == 2 and results.failed()
    assert results.left("exchange", names) == names, "they are tried again"


def never_ends(setting, method):
    time.sleep(600)


def test_a_method_that_does_not_end_is_stopped(monkeypatch, results):
    monkeypatch.setattr(ranks, "GRACE", 0.0)
    names = ranks.names_of(["QSGD", "DGC 1 %"], [("gloo", 1)])
    (row,) = ranks.measured(CPU, names, time.monotonic() + 0.5, never_ends)
    assert row == {"name": "QSGD | gloo | 1", "cut": "its time was over"}
    results.add("steps", row)
    results.end("steps", names[1:])
    assert results.left("steps", names) == names and not results.failed()
    assert "1 stopped; no time for 1: DGC 1 %" in results.table()


def test_nothing_begins_after_the_deadline():
    names = ranks.names_of(["QSGD"], [("gloo", 2)])
    assert [*ranks.measured(CPU, names, time.monotonic(), never_ends)] == []


@pytest.mark.parametrize("part", ["kernels", "exchange", "training", "horovod"])
def test_what_cannot_run_says_why(part, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(main, "needed", lambda part, device: ("a_module_that_nobody_has",))
    arguments = ["--device", "cpu", "--parts", part, "--folder", str(tmp_path)]
    assert main.main(arguments) == 0
    assert capsys.readouterr().out.startswith("not installed: a_module_that_nobody_has; not run: ")
    line = f"| {part} | not run: a_module_that_nobody_has is not installed |"
    assert line in (tmp_path / "gpu-cpu.md").read_text()


def test_without_what_the_package_needs_nothing_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(main, "ALWAYS", ("torch", "no_such_thing", "nor_that"))
    assert main.main(["--device", "cpu", "--folder", str(tmp_path)]) == 2
    assert "not installed: no_such_thing, nor_that; nothing was run" in capsys.readouterr().err


def test_what_a_gpu_says_of_itself(monkeypatch, tmp_path):
    """That it took no kernels, too: what is measured would be of plain ops."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    for kernels in (object(), None):
        made = partial(SimpleNamespace, kernels=kernels)
        monkeypatch.setattr("hvd_gradcomp.ops.torch.TorchOps", lambda device, made=made: made())
        facts = main.machine("cuda")
        assert facts["gpus"] == ["GPU 0", "GPU 1"] and facts["nccl"] == [2, 29, 7]
        text = Results(tmp_path / "none.json", facts).table()
        assert ("took no kernels" in text) == (kernels is None)


def test_a_part_that_fails_is_written_down(tmp_path, monkeypatch):
    """With the rows before it failed; and the parts behind it are run."""

    def fails(setting, names, deadline):
        yield {"name": names[0], "copies": 3.0, "calls": 8, "buckets": 4, "extra_buckets": 1.0}
        raise RuntimeError("an illegal address")

    def passes(setting, names, deadline):
        yield {"name": "tests", "passed": 2, "failed": 1, "skipped": 2, "error": "1 failed"}

    steps = Part(1, lambda setting: ["QSGD | gloo | 1", "EGC 1 % | gloo | 1"], fails)
    monkeypatch.setitem(PARTS, "steps", steps)
    monkeypatch.setitem(PARTS, "reads", Part(1, lambda setting: ["tests"], passes))
    arguments = ["--device", "cpu", "--parts", "steps", "reads", "--folder", str(tmp_path)]
    assert main.main(arguments) == 1
    written = json.loads((tmp_path / "gpu-cpu.json").read_text())["parts"]
    assert written["steps"]["error"] == "an illegal address"
    assert written["steps"]["left"] == ["EGC 1 % | gloo | 1"]
    text = (tmp_path / "gpu-cpu.md").read_text()
    assert "1 measured; no time for 1: EGC 1 % (an illegal address)" in text
    assert "tests: 2 passed, 1 failed, 2 skipped (1 failed)" in text
    assert "| QSGD | 3.00 | 2.00 | 1.00 |" in text


def test_results_of_another_machine_are_not_mixed(results):
    results.save()
    Results(results.path, {"device": "cpu"})
    with pytest.raises(ValueError, match="another machine: pass another --folder"):
        Results(results.path, {"device": "cuda"})


def test_outcomes_of_tests_are_kept_when_their_time_is_over(monkeypatch):
    monkeypatch.setitem(checks.FILES, "kernels", ("tests/single/test_names.py",))
    monkeypatch.setitem(checks.SELECTED, "kernels", "all_kinds")
    row = checks.tested("kernels", CPU, time.monotonic() + 100)
    assert (row["passed"], row["failed"]) == (1, 0) and "error" not in row and "cut" not in row
    row = checks.tested("kernels", CPU, time.monotonic())
    assert row["cut"] == "its time was over" and "error" not in row
