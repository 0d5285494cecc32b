"""The commands that measure, on two real ranks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_gradcomp.cost import KINDS
from tests.parallel.launch import HOROVODRUN, ROOT, environment

pytestmark = pytest.mark.parallel

WORKER = "tests.parallel.workers.trained"
PROGRAM = (sys.executable, "-m", "hvd_gradcomp")
METHODS = ("qsgd", "DGCCompressor(density=0.01)", "ScaleComCompressor()")


def command(*arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*((*HOROVODRUN, "--gloo", "-np", "2") if ranks == 2 else ()), *PROGRAM, *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )


def chosen(*methods: str) -> list[str]:
    return [word for method in methods for word in ("-c", method)]


def test_bench(tmp_path: Path):
    figures, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    files = ("--json", str(figures), "--png", str(picture))
    done = command("bench", "-m", f"{WORKER}:factory", "-r", "2", *chosen(*METHODS), *files)
    assert done.returncode == 0, done.stderr
    said = json.loads(figures.read_text())
    dense, qsgd, dgc, _ = said["rows"]
    assert (said["ranks"], dense["way"]) == (2, "dense (stock Horovod)")
    elements = dense["bytes"] / 4
    assert elements == 16 * 9 + 16 + 576 * 64 + 64 + 64 * 10 + 10
    assert qsgd["bytes"] < 0.52 * elements + 1500
    assert 50 < dgc["element_ratio"] < 200
    for row in said["rows"]:
        assert row["min"] <= row["ms"] <= row["max"]
        assert row["way"] in done.stdout
        assert row["encode"] + row["collective"] + row["decode"] <= 1.5 * row["max"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_advise(tmp_path: Path):
    figures, picture = tmp_path / "advice.json", tmp_path / "advice.png"
    files = ("--json", str(figures), "--png", str(picture))
    done = command("advise", "-m", f"{WORKER}:factory", "-r", "2", *chosen(*METHODS), *files)
    assert done.returncode == 0, done.stderr
    said = json.loads(figures.read_text())
    assert said["backward_ms"] > 0
    assert said["bandwidth"] > 1e6
    assert set(said["link"]["curves"]) == set(KINDS)
    assert 0 < said["probes"]["density_variance"] < 1
    assert len(said["rows"]) == 1 + len(METHODS)
    for row in said["rows"]:
        assert row["predicted_ms"] > 0
        assert row["step_ms"] >= said["forward_ms"] + said["backward_ms"]
        assert math.isclose(row["error"], row["predicted_ms"] / row["measured_ms"] - 1)
        assert set(row["hosts"]) == {str(2**k) for k in range(1, 11)}
    assert said["rows"][0]["hosts"] == {str(2**k): 1.0 for k in range(1, 11)}
    assert "Use " in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_advise_for_a_link_that_is_not_here(tmp_path: Path):
    figures = tmp_path / "advice.json"
    done = command(
        *("advise", "-m", f"{WORKER}:factory", "-r", "2", "--bandwidth", "1"),
        *chosen("dgc", "lgc-server"),
        *("--json", str(figures)),
        ranks=1,
    )
    assert done.returncode == 0, done.stderr
    assert "left out" in done.stderr  # the parameter server
    said = json.loads(figures.read_text())
    assert "Use DGCCompressor()" in done.stdout  # 37,000 elements take a second at 1 Mb/s
    assert said["rows"][1]["hosts"]["2"] > 2


def test_compare(tmp_path: Path):
    figures = tmp_path / "compare.json"
    done = command(
        *("compare", f"{WORKER}:train", "--steps", "12", "--json", str(figures)),
        *chosen("QSGDCompressor(bits=8)", "DGCCompressor(density=0.01)"),
    )
    assert done.returncode == 0, done.stderr
    none, qsgd, dgc = json.loads(figures.read_text())["rows"]
    assert none["way"] == "None()"
    assert len(none["losses"]) == 12
    assert none["losses"][0] == qsgd["losses"][0] == dgc["losses"][0]  # all begin alike
    assert abs(qsgd["loss"] - none["loss"]) < 0.1
    assert dgc["element_ratio"] > 50


def test_compare_says_what_the_function_lacks():
    done = command("compare", f"{WORKER}:short", "--steps", "12", ranks=1)
    assert done.returncode != 0
    assert "ended after 3 steps" in done.stderr
