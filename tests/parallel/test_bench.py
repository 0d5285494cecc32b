"""The exchanges of `make bench`, of a small model."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks.points import DENSE, FRAMEWORKS, KERAS, PYTORCH, TAPE
from tests.parallel.launch import HOROVODRUN, ROOT, environment

pytestmark = pytest.mark.parallel


def test_exchanges_on_every_framework(tmp_path):
    given, found = tmp_path / "points.json", tmp_path / "result.json"
    points = [
        {"name": DENSE, "compressor": "NoneCompressor()", "frameworks": FRAMEWORKS},
        {"name": "a", "compressor": "SparseGDCompressor(density=0.01)", "frameworks": FRAMEWORKS},
        {"name": "b", "compressor": "StromCompressor(tau=3.0)", "frameworks": [PYTORCH]},
    ]
    layers = [["weight", [100, 200]], ["bias", [100]]]
    given.write_text(json.dumps({"layers": layers, "points": points}))
    worker = ["python", "-m", "benchmarks.exchanges", str(given), str(found), "--rounds", "2"]
    command = [*HOROVODRUN, "--gloo", "-np", "2", *worker]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=300)
    rows = json.loads(found.read_text())["rows"]
    assert [*rows] == [DENSE, "a", "b"]
    assert [*rows["a"]] == [DENSE, PYTORCH, TAPE, KERAS] and [*rows["b"]] == [DENSE, PYTORCH]
    assert all(
        row["ms"] > 0 and row["first_s"] > 0 for point in rows.values() for row in point.values()
    )
    ratios = {rows["a"][name]["element_ratio"] for name in (PYTORCH, TAPE, KERAS)}
    assert ratios == {20_100 / 201}
