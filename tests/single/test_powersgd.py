"""What `python -m benchmarks.archive.powersgd` counts, of one rank."""

from __future__ import annotations

import pytest

from hvd_gradcomp import QSGDCompressor

powersgd = pytest.importorskip("benchmarks.archive.powersgd", exc_type=ImportError)


def test_bytes_of_a_step_are_counted_alike(one_process):
    matrices, vectors = ((64, 256), (256, 256), (256, 10)), 256 + 256 + 10
    dense = 4 * (sum(a * b for a, b in matrices) + vectors)
    results = {
        name: powersgd.train(method, "Adam", powersgd.WARM_UP + 2, 0).bytes
        for name, method in (("none", "allreduce_hook"), ("rank 2", 2), ("ours", QSGDCompressor()))
    }
    assert results["none"] == dense == 340_008
    assert results["rank 2"] == 4 * (2 * sum(a + b for a, b in matrices) + vectors)
    assert dense / 7.95 < results["ours"] < dense / 7.8


def test_times_are_shown_beside_the_hooks():
    steps = {"DDP's powerSGD_hook, rank 4": [0.02, 0.01, 0.03], "ours": [0.01, 0.01, 0.05]}
    lines = powersgd.table_of_times(
        {name: [(seconds, seconds / 4) for seconds in times] for name, times in steps.items()}
    ).splitlines()
    assert "20.0" in lines[2] and "10.0 to 30.0" in lines[2] and lines[2].count("1.00") == 2
    assert "10.0 to 50.0" in lines[3] and lines[3].count("0.50") == 2
    assert "| 5.0 " in lines[2] and "| 2.5 " in lines[3]


def test_what_is_shown():
    runs = {name: [[97.0, 0.1, 400.0], [95.0, 0.3, 400.0]] for name in powersgd.OPTIMIZERS}
    few = {name: [[90.0, 0.1, 40.0]] for name in powersgd.OPTIMIZERS}
    lines = powersgd.table({"none": runs, "other": few}).splitlines()
    assert "96.0 (95.0 to 97.0)" in lines[2] and "0.2000" in lines[2]
    assert "| 40 " in lines[3] and "| 10.0 " in lines[3]
