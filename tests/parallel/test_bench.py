"""The exchanges of `make bench`, of a small model; a few rows of `make papers` and `make worth`."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks.papers.parts import Measured, Scale
from benchmarks.papers.registry import PARTS
from benchmarks.points import DENSE, FRAMEWORKS, KERAS, PYTORCH, TAPE
from benchmarks.worth import lockstep, trainings
from benchmarks.worth.results import Run
from tests import fashion
from tests.parallel.forkserver import EXECUTABLES, interpreter
from tests.parallel.launch import ROOT, environment, horovodrun, python

pytestmark = pytest.mark.parallel


def on_two_ranks(worker, *arguments):
    """Return what a module prints, run over Horovod as users do."""
    variables = environment()
    command = [*horovodrun(variables), *python("horovod.torch", variables), "-m", worker]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=variables,
        check=True,
        timeout=300,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def test_exchanges_on_every_framework(tmp_path):
    points_file, result = tmp_path / "points.json", tmp_path / "result.json"
    points = [
        {"name": DENSE, "compressor": "NoneCompressor()", "frameworks": FRAMEWORKS},
        {"name": "a", "compressor": "SparseGDCompressor(density=0.01)", "frameworks": FRAMEWORKS},
        {"name": "b", "compressor": "StromCompressor(tau=3.0)", "frameworks": [PYTORCH]},
    ]
    layers = [["weight", [100, 200]], ["bias", [100]]]
    points_file.write_text(json.dumps({"layers": layers, "points": points}))
    on_two_ranks("benchmarks.exchanges", str(points_file), str(result), "--rounds", "2")
    rows = json.loads(result.read_text())["rows"]
    assert [*rows] == [DENSE, "a", "b"]
    assert [*rows["a"]] == [DENSE, PYTORCH, TAPE, KERAS] and [*rows["b"]] == [DENSE, PYTORCH]
    assert all(
        row["ms"] > 0 and row["first_s"] > 0 for point in rows.values() for row in point.values()
    )
    ratios = {rows["a"][name]["element_ratio"] for name in (PYTORCH, TAPE, KERAS)}
    assert ratios == {20_100 / 201}


def test_rows_of_papers_are_trained_and_written(tmp_path):
    """Images and text, on data that is made up."""
    data, folder, job_file = tmp_path / "data", tmp_path / "papers", tmp_path / "job.json"
    data.mkdir()
    fashion.write(data, train=1640, test=1000)
    job = {
        "part": "egc",
        "scale": {"images": 640, "epochs": 1},
        "data": str(data),
        "folder": str(folder),
        "runs": [("egc-2", 1), ("entropy", 1), ("text-none", 2)],
    }
    job_file.write_text(json.dumps(job))
    on_two_ranks("benchmarks.papers.worker", str(job_file))
    measured = Measured(PARTS["egc"], folder)
    assert measured.scale == Scale(images=640, epochs=1)
    assert [*measured.seeds("text-none")] == [2]
    (egc,), (plain,), (text,) = measured["egc-2"], measured["entropy"], measured["text-none"]
    assert egc["element_ratio"] > 500 and len(egc["by_rank"]) == 2
    assert 0 <= plain["score"] <= 100 and plain["element_ratio"] == 1
    assert len(plain["looks"]) == len(plain["sent"]) == 10
    assert [bins for bins, _ in plain["seen"]] == [2, 4, 8, 16, 32, 64]
    assert text["score"] < 128


def test_methods_of_worth_are_trained(tmp_path, monkeypatch):
    """Peers and ours in the same processes; the bytes are those of a whole training."""
    variables = interpreter(tmp_path / "bin", "torch", environment())
    for name in {*EXECUTABLES} & {*variables}:
        monkeypatch.setenv(name, variables[name])
    data = tmp_path / "data"
    data.mkdir()
    fashion.write(data, train=10, test=10)
    methods = ("dense", "accumulate-4", "post-local", "hook", "qsgd", "local-int8", "muon-local")
    runs = [Run("gpt-0.8", method, 2, 8, 0.05, 0.006, 1) for method in methods]
    rows = dict(trainings.trained(runs, data))
    assert [*rows] == runs
    dense, accumulated, rare, hook, qsgd, local, _ = rows.values()
    whole = 4 * dense["parameters"]
    assert dense["bytes_a_step"] == rare["bytes_a_step"] == whole  # 30 steps of warm-up
    assert accumulated["bytes_a_step"] == whole / 4
    assert qsgd["bytes_a_step"] < whole / 7 and local["bytes_a_step"] < whole / 55
    assert whole / 3 < hook["bytes_a_step"] < whole / 2  # 10 steps of 30 are dense
    assert all(len(row["curve"]) >= 20 and 0 < row["loss"] < 6 for row in rows.values())
    alike = [run for run in runs if run.method in ("dense", "qsgd", "local-int8")]
    for run, row in lockstep.trained(alike, data):  # the same training, without ranks
        near = 1e-5 if run.method == "dense" else 0.1
        assert row["loss"] == pytest.approx(rows[run]["loss"], abs=near)
        assert row["bytes_a_step"] == pytest.approx(rows[run]["bytes_a_step"], rel=0.05)


def test_methods_of_worth_are_timed(tmp_path):
    data, job = tmp_path / "data", tmp_path / "job.json"
    data.mkdir()
    fashion.write(data, train=10, test=10)
    methods = ("dense", "nesterov-int8")
    runs = [Run("gpt-0.8", method, 2, 2, 1.0, 0.006, 1) for method in methods]
    job.write_text(trainings.job_of(runs, True, data))
    printed = on_two_ranks(trainings.WORKER, str(job))
    rows = dict(trainings.rows_of(printed.splitlines()))
    assert [*rows] == runs and all(row["ms"] > 0 for row in rows.values())
