"""The exchanges of `make bench`, of a small model; a few rows of `make papers` and `make worth`."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks.papers.parts import Measured, Scale
from benchmarks.papers.registry import PARTS
from benchmarks.points import DENSE, FRAMEWORKS, KERAS, PYTORCH, TAPE
from benchmarks.worth import __main__ as worth
from tests import fashion
from tests.parallel.launch import HOROVODRUN, ROOT, environment

pytestmark = pytest.mark.parallel


def test_exchanges_on_every_framework(tmp_path):
    points_file, result = tmp_path / "points.json", tmp_path / "result.json"
    points = [
        {"name": DENSE, "compressor": "NoneCompressor()", "frameworks": FRAMEWORKS},
        {"name": "a", "compressor": "SparseGDCompressor(density=0.01)", "frameworks": FRAMEWORKS},
        {"name": "b", "compressor": "StromCompressor(tau=3.0)", "frameworks": [PYTORCH]},
    ]
    layers = [["weight", [100, 200]], ["bias", [100]]]
    points_file.write_text(json.dumps({"layers": layers, "points": points}))
    worker = [
        "python",
        "-m",
        "benchmarks.exchanges",
        str(points_file),
        str(result),
        "--rounds",
        "2",
    ]
    command = [*HOROVODRUN, "--gloo", "-np", "2", *worker]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=300)
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
    worker = ["python", "-m", "benchmarks.papers.worker", str(job_file)]
    command = [*HOROVODRUN, "--gloo", "-np", "2", *worker]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=300)
    measured = Measured(PARTS["egc"], folder)
    assert measured.scale == Scale(images=640, epochs=1)
    assert [*measured.seeds("text-none")] == [2]
    (egc,), (plain,), (text,) = measured["egc-2"], measured["entropy"], measured["text-none"]
    assert egc["element_ratio"] > 500 and len(egc["by_rank"]) == 2
    assert 0 <= plain["score"] <= 100 and plain["element_ratio"] == 1
    assert len(plain["looks"]) == len(plain["sent"]) == 10
    assert [bins for bins, _ in plain["seen"]] == [2, 4, 8, 16, 32, 64]
    assert text["score"] < 128


def test_ways_of_worth_are_timed_and_trained(tmp_path):
    """Stock Horovod sets the target; each library takes its turn in the same processes."""
    data, job_file = tmp_path / "data", tmp_path / "job.json"
    data.mkdir()
    fashion.write(data, train=10, test=10)
    job = {"task": "transformer", "seed": 1, "target": None, "data": str(data)}
    rows = []
    for more in (
        {"mode": "time", "methods": ["", "ddp", "hook", "sparse-5"], "timed": 5},
        {"mode": "train", "methods": ["stock", "local"], "goal": 30},
    ):
        job_file.write_text(json.dumps({**job, **more}))
        worker = ["python", "-m", "benchmarks.worth.worker", str(job_file)]
        command = [*HOROVODRUN, "--gloo", "-np", "2", *worker]
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), check=True, timeout=300, capture_output=True
        )
        rows += worth.results(done.stdout.decode())
    assert [row["method"] for row in rows] == ["", "ddp", "hook", "sparse-5", "stock", "local"]
    assert all(row["ms"] > 0 for row in rows[:4])
    stock, local = rows[4:]
    assert stock["steps"] == 30 and stock["target"] == stock["looks"][0][1] == local["target"]
    assert local["bytes_a_step"] < stock["bytes_a_step"] / 10
    assert (local["looks"][-1][1] <= local["target"]) == (local["steps"] is not None)
