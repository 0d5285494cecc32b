"""What `make bench` does with its points and with what it finds; times are not tested."""

from __future__ import annotations

import json
from functools import partial
from itertools import combinations
from types import SimpleNamespace

import matplotlib
import pytest
import torch
from matplotlib import pyplot

from benchmarks import codecs, curve, points
from hvd_gradcomp import SparseGDCompressor, StromCompressor
from hvd_gradcomp.cli import style

matplotlib.use("Agg")

SMALL = [("a.weight", (64, 700)), ("a.bias", (64,)), ("b.weight", (90, 80))]


def named(*only):
    return [point.name for point in points.chosen(points.every(), only)]


def test_points_are_called_as_one_would():
    every = named()
    assert len({*every}) == len(every)
    assert named("dgc 1") == ["DGC 1 %"]
    assert named("Strom") == ["Strom 500", "Strom 100", "Strom 16", "Strom 4"]
    assert named("QSGD two", "dense") == ["dense", "QSGD, two shots"]
    assert [named(name) for name in every if "," in name] == [[n] for n in every if "," in n]
    assert named("DG") == []


def test_each_method_has_one_point_in_the_middle_and_bars():
    every = points.every()
    middle = [point.method for point in every if point.middle]
    assert middle == [*dict.fromkeys(point.method for point in every)]
    without = ["dense", "half precision", "PowerSGD, rank 4", "DeMo"]  # those multiply matrices
    assert [point.method for point in every if point.copies is None] == without


def test_a_threshold_is_found_that_reaches_the_ratio(monkeypatch):
    monkeypatch.setattr(points, "_SAMPLE", 20_000)
    compressor = points.tuned(lambda t: StromCompressor(tau=t), 16.0)
    assert 16.0 <= points.reached(compressor) < 18.0


def test_noise_has_heavy_tails_and_is_another_in_each_step():
    first, second = torch.empty(2, 100_000)
    noise = points.Noise(100_000, 1)
    noise.fill([first])
    noise.fill([second[:10], second[10:]])
    assert not torch.equal(first, second)
    assert first.abs().max() > 15 * first.abs().median()
    again = torch.empty(100_000)
    points.Noise(100_000, 1).fill([again])
    assert torch.equal(first, again)


@pytest.mark.parametrize("threads", [1, 2])
def test_codecs_measure_a_model(monkeypatch, threads):
    monkeypatch.setattr(codecs, "resnet50", lambda: SMALL)
    begin = partial(codecs.Step, SparseGDCompressor(density=0.01), bucket_bytes=150_000)
    step, row = codecs.measure(begin, 3, threads)
    assert row["buckets"] == len(step.layouts) > 1
    assert row["element_ratio"] == pytest.approx(100, rel=0.02)
    assert row["copies"] > 0 and row["worst"] > 0
    assert (row["speedup"] is None) == (threads == 1)


def result():
    """DGC holds its bars but one; of QSGD half is missing."""
    times = {"dense": 200.0, "PyTorch": 150.0, "tape": 330.0, "Keras": 200.0}
    exchange = {name: {"ms": ms, "first_s": 9.0} for name, ms in times.items()}
    exchange["PyTorch"]["element_ratio"] = 10.0
    codec = {
        "copies": 11.0,
        "worst": 12.0,
        "speedup": 1.7,
        "copy_ms": 5.0,
        "copy_speedup": 1.5,
        "element_ratio": 10.1,
    }
    return {
        "threads": 2,
        "failed": False,
        "rows": {
            "DGC 10 %": {
                "method": "DGC",
                "asked": "10 %",
                "bar": 12.0,
                "codec": codec,
                "exchange": exchange,
            },
            "QSGD": {"method": "QSGD", "asked": "", "bar": 7.0, "exchange": {}},
        },
    }


def test_bars_that_fail_are_named():
    lines, all_hold = curve.verdicts(result())
    assert not all_hold
    assert lines == [
        "DGC 10 %: tape over PyTorch 2.20 FAILS, at most 1.50",
        "7 of 8 bars hold",
    ]


def test_what_is_shown(tmp_path):
    dgc, qsgd = map(curve.cells, result()["rows"].values())
    assert dgc == [
        *("10.0", "11.0", "12.0", "1.7", "150", "0.75"),
        *("330", "2.20", "9.0", "200", "1.33", "9.0"),
    ]
    assert {*qsgd} == {""}
    assert curve.table(result()).row_count == 2
    assert "5.0 ms in one process, 1.50 times" in curve.copies_take(result())
    curve.draw(result(), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_labels_at_the_ends_of_lines_do_not_overlap():
    figure, axes = pyplot.subplots(layout="constrained")
    for place in range(6):
        axes.plot([1, 2], [place, 0.01 * place], label=f"line {place}")
    axes.axhline(0.02, label="base")
    axes.plot([1, 2], [0, 0])  # has no label
    style.label_ends(axes)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    pyplot.close(figure)
    assert len(boxes) == 7
    assert not any(one.overlaps(two) for one, two in combinations(boxes, 2))


def test_rows_that_are_not_asked_for_stay(tmp_path, monkeypatch):
    options = SimpleNamespace(
        folder=tmp_path, only=["QSGD"], parts=["codecs"], threads=1, rounds=1, device="cpu"
    )
    selected = points.chosen(points.every(), options.only)[:1]
    monkeypatch.setattr(curve, "codecs", lambda *_: [(selected[0], {"copies": 3.0})])
    before = {"rows": {"another": {"method": "another"}, selected[0].name: {"method": "old"}}}
    (tmp_path / "curve.json").write_text(json.dumps(before))
    rows = curve.run(selected, options)["rows"]
    assert rows["another"] == {"method": "another"}
    assert rows[selected[0].name]["codec"] == {"copies": 3.0}
    options.only = []
    assert list(curve.run(selected, options)["rows"]) == [selected[0].name]
