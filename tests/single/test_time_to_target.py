"""`make worth`: what follows from steps to the target and from the time of a step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.worth import __main__ as worth
from benchmarks.worth import advised
from benchmarks.worth.methods import LOOK, STOCK, TASKS, TIMED
from hvd_gradcomp import BF16Compressor, Int8Compressor, QSGDCompressor, StromCompressor
from hvd_gradcomp.cli import advise
from hvd_gradcomp.planning.description import brief
from hvd_gradcomp.tuning import fewer_exchanges
from hvd_gradcomp.tuning.recommend import Span

TRAINING = TASKS["transformer"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def measured(tmp_path):
    """Results of two hosts: a step of 100 ms, 1 MB of gradients, two ways at one ratio."""
    measured = worth.Measured(tmp_path / "worth.json", TRAINING, 2)
    measured.all |= {"compute_ms": 100.0, "parameters": 250_000}
    for seed, steps in ((1, 600), (2, None)):
        common = {"parameters": 250_000, "target": 2.0, "looks": [], "seconds": 1.0}
        stock = {"method": STOCK, "steps": 420, "bytes_a_step": 1e6, **common}
        measured.add("train", stock, seed=seed)
        measured.add("train", {**stock, "method": "bf16", "steps": steps}, seed=seed)
    measured.add("time", {"method": STOCK, "ms": 1100.0}, ratio=10.0)
    measured.add("time", {"method": "bf16", "ms": 550.0}, ratio=10.0)
    return measured


def test_the_rate_makes_a_dense_exchange_so_many_times_a_step(measured):
    """Each of two hosts sends all gradients once: 1 MB in 1 s."""
    assert measured.link_bytes == 1e6
    assert measured.rate(10.0) == "8000kbit"


def test_speed_up_is_of_steps_and_of_their_time(measured):
    assert measured.speed_ups("bf16", 10.0) == [420 * 1100.0 / (600 * 550.0)]  # seed 2 never
    assert measured.speed_ups(STOCK, 10.0) == [1.0, 1.0]
    assert measured.speed_ups("bf16", 3.0) == []  # nothing was timed there


def test_a_step_is_predicted_between_links_that_were_timed(measured):
    measured.add("time", {"method": "bf16", "ms": 200.0}, ratio=3.0)
    assert measured.predicted_ms("bf16", 8e6) == 550.0  # 10 times a step
    assert measured.predicted_ms("bf16", 8e7 / 6.5) == 375.0  # half way between 3 and 10
    assert measured.predicted_ms("bf16", 1e9) == 200.0


def test_a_row_takes_the_place_of_the_same_one(measured):
    measured.add("time", {"method": "bf16", "ms": 500.0}, ratio=10.0)
    assert [row["ms"] for row in measured.rows("time", method="bf16")] == [500.0]
    again = worth.Measured(measured.path, TRAINING, 2)
    assert again.all == measured.all
    with pytest.raises(SystemExit, match="another measurement"):
        worth.Measured(measured.path, TRAINING, 4)


def test_what_was_measured_is_shown(measured, monkeypatch, capsys):
    words = ["worth", "--show", str(measured.path)]
    monkeypatch.setattr(sys, "argv", words)
    assert worth.main() == 0
    assert measured.path.with_suffix(".png").exists()
    text = " ".join(capsys.readouterr().out.split())
    assert "600/never" in text and "1.40 (550 ms)" in text


@pytest.mark.parametrize("training", TASKS.values(), ids=TASKS)
def test_the_page_has_what_was_measured(training):
    kept = worth.Measured(ROOT / f"docs/measured/worth-{training.task}.json", training, 2)
    page = (ROOT / "docs/worth.md").read_text()
    transformer, _, images = page.partition("## Images, with SGD")
    images = images.partition("## Four hosts")[0]
    part = images if training.task == "images" else transformer
    rows = [line.strip("| ").split(" | ") for line in part.split("\n")]
    shown = {row[0]: row[3:] for row in rows if len(row) == 8}
    ratios = sorted({row["ratio"] for row in kept.all["time"]})
    for key in {row["method"] for row in kept.all["train"]}:
        cells = [worth.cell(kept, key, ratio) for ratio in ratios]
        assert shown[training.methods[key].title] == cells


def test_the_page_has_what_was_measured_on_four_hosts():
    kept = worth.Measured(ROOT / "docs/measured/worth-transformer-4.json", TRAINING, 4)
    part = (ROOT / "docs/worth.md").read_text().partition("## Four hosts")[2]
    rows = [line.strip("| ").split(" | ") for line in part.split("\n")]
    shown = {row[0]: row[3:] for row in rows if len(row) == 5}
    for key in {row["method"] for row in kept.all["train"]}:
        cells = [worth.cell(kept, key, ratio) for ratio in (10.0, 30.0)]
        assert shown[TRAINING.methods[key].title] == cells


def test_what_advise_says_is_compared_with_the_best_that_was_timed(measured):
    advice = {"forward_ms": 1.0, "backward_ms": 2.0, "bandwidth": 1e9, "local_steps": None}
    sooner = {STOCK: [1.0, 1.0], "bf16": [1.4], "local-int8": [2.0, 3.0, 2.8], "qsgd": []}
    for use, key, within in ((None, STOCK, 2.8), (brief(BF16Compressor()), "bf16", 2.0)):
        row = advised.compared({**advice, "use": use}, sooner)
        assert (row["method"], row["best"], row["within"]) == (
            key,
            "local-int8",
            pytest.approx(within),
        )
    for setting in fewer_exchanges.SETTINGS:  # what advise may say, as it says it
        step = Span(1.0, 1.0, 1.0)
        local = advise.local_steps_of(fewer_exchanges.Choice(setting, step, step))
        assert (
            TASKS["transformer"].methods[advised.method_of({**advice, "local_steps": local})].local
        )
    local = {"use": brief(Int8Compressor()), "every": 15, "sooner": [1.0, 2.0, 3.0]}
    measured.advised(advised.compared({**advice, "local_steps": local, "use": None}, sooner), 10.0)
    assert "LocalSteps, 15, Int8: 2.80 times sooner" in measured.advice(10.0)
    unknown = {**advice, "use": brief(QSGDCompressor(bits=4))}
    measured.advised(advised.compared(unknown, sooner), 10.0)
    assert measured.advice(10.0).endswith("QSGD, 4 bits, which was not timed")
    with pytest.raises(ValueError, match="no method of make worth"):
        advised.method_of({**advice, "use": brief(StromCompressor(tau=1))})


@pytest.mark.parametrize("training", TASKS.values(), ids=TASKS)
def test_looks_and_times_are_of_whole_rounds_of_local_steps(training):
    """Between exchanges ranks have other parameters, and a part of a round another time."""
    assert next(iter(training.methods)) == STOCK and training.goal % LOOK == 0
    for method in training.methods.values():
        if method.local:
            every = int(method.local.partition("every=")[2].partition(",")[0])
            assert LOOK % every == 0 and TIMED % every == 0
