"""`make worth`: what is trained next, and what follows from losses and from the time of a step."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import traffic
from benchmarks.places import __main__ as places
from benchmarks.places.worker import PLACES
from benchmarks.worth import __main__ as worth
from benchmarks.worth import advised, lockstep, recipes, tables, timings, trainings
from benchmarks.worth.methods import DENSE, MAIN, METHODS, PERIOD, PLAIN
from benchmarks.worth.recipes import RECIPES, SMALL
from benchmarks.worth.results import LENGTHS, Results, Run, Setting, usual
from hvd_gradcomp import QSGDCompressor, StromCompressor
from hvd_gradcomp.cli import advise
from hvd_gradcomp.planning.description import brief
from hvd_gradcomp.tuning import fewer_exchanges
from hvd_gradcomp.tuning.recommend import Span

ROOT = Path(__file__).resolve().parents[2]
SETTING = usual(SMALL)
STEPS, FIRST = RECIPES[SMALL].steps, RECIPES[SMALL].warmup_steps


def trained(results, method, loss, *, setting=SETTING, length=1.0, rate=0.006, seed=1):
    row = {"loss": loss, "parameters": 1_000_000, "bytes_a_step": 1e6, "seconds": 1.0}
    run = Run(setting.recipe, method, setting.hosts, setting.batch, length, rate, seed)
    results.add(run, row)


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "worth.json")


def test_the_page_has_the_times_of_all_places():
    measured = json.loads((ROOT / "docs/measured/places.json").read_text())
    assert {row["place"] for row in measured["rows"]} == PLACES.keys()
    assert places.table(measured) in (ROOT / "docs/worth.md").read_text()


def test_a_file_is_read_as_it_was_written(results):
    trained(results, DENSE, 1.5)
    results.add_time(SETTING, 10.0, DENSE, {"ms": 5.0, "alone_ms": 1.0})
    results.add_time(SETTING, 10.0, DENSE, {"ms": 4.0, "alone_ms": 1.0})  # in its place
    again = Results(results.path)
    assert again.trained == results.trained and again.timed == results.timed
    assert again.ms(SETTING, DENSE, 10.0) == 4.0 and again.ratios(SETTING) == [10.0]
    assert again.settings() == [SETTING]


def test_the_batch_of_all_ranks_stays_or_grows_with_them():
    assert usual(SMALL, 8) == Setting(SMALL, 8, 32)
    assert usual(SMALL, 8, grow=True) == Setting(SMALL, 8, 128)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, len(RECIPES[SMALL].rates) - 1))
def test_rates_are_tried_until_the_best_lies_between_others(tmp_path_factory, best):
    """Whatever the best rate of the ladder is, unless more than five trials would be needed."""
    results = Results(tmp_path_factory.mktemp("trials") / "worth.json")
    ladder = RECIPES[SMALL].rates
    while rates := trainings.trials(RECIPES[SMALL], results, SETTING, DENSE):
        for rate in rates:
            trained(results, DENSE, 1.0 + abs(ladder.index(rate) - best), rate=rate)
    tried = {run.rate for run in results.trained}
    assert 3 <= len(tried) <= trainings.TRIALS
    reach = range(len(ladder) // 2 - 3, len(ladder) // 2 + 4)
    if best in reach:
        assert results.best_rate(SETTING, DENSE) == ladder[best]
        assert {*ladder[max(0, best - 1) : best + 2]} <= tried or len(tried) == trainings.TRIALS


def test_a_rate_is_carried_to_wider_models_and_larger_batches(results):
    trained(results, DENSE, 1.6, rate=0.003)
    trained(results, DENSE, 1.5, rate=0.006)
    assert results.carried_rate(usual("gpt-3"), DENSE) == 0.0015  # twice as wide
    assert results.carried_rate(usual("gpt-10"), DENSE) == 0.000667
    assert results.carried_rate(usual(SMALL, 4), DENSE) == 0.006
    assert results.carried_rate(usual(SMALL, 8, grow=True), DENSE) == 0.012  # 4 times the batch
    assert results.carried_rate(SETTING, "qsgd") is None


def test_the_length_that_is_needed_lies_between_those_that_were_trained(results):
    for seed, loss in ((1, 1.50), (2, 1.52), (3, 1.46)):
        trained(results, DENSE, loss, seed=seed)
    trained(results, DENSE, 1.0, rate=0.012, seed=2)  # not a tuned rate
    assert results.goal(SETTING) == 1.50
    trained(results, "qsgd", 1.49)
    assert results.needed(SETTING, "qsgd") == 1.0
    trained(results, "local", 1.60)
    assert results.needed(SETTING, "local") is None
    trained(results, "local", 1.55, length=1.25)
    trained(results, "local", 1.45, length=1.5)
    assert results.needed(SETTING, "local") == pytest.approx(1.375)


def test_what_is_trained_next(results):
    def planned(part, *methods, **chosen):
        how = trainings.Chosen(**chosen)
        runs = trainings.planned(results, part, SETTING, list(methods), how)
        return [(run.method, run.length, run.rate, run.seed) for run in runs]

    assert [rate for _, _, rate, _ in planned("tune", DENSE)] == [0.003, 0.006, 0.012]
    assert planned("tune", DENSE, rates=[0.1]) == [(DENSE, 1.0, 0.1, 1)]
    assert planned("seeds", DENSE) == planned("lengths", DENSE) == []  # no rate is known
    for method, loss in ((DENSE, 1.5), ("local", 1.6), ("bf16", 1.5)):
        for rate in (0.003, 0.006, 0.012):
            trained(results, method, loss + (rate != 0.006) / 10, rate=rate)
    assert planned("tune", DENSE, "local") == []
    assert planned("seeds", DENSE, "bf16") == [(DENSE, 1.0, 0.006, 2), (DENSE, 1.0, 0.006, 3)]
    assert planned("lengths", DENSE, "local", "bf16") == [("local", 1.25, 0.006, 1)]
    assert planned("lengths", "local", lengths=[2.0]) == [("local", 2.0, 0.006, 1)]
    for length in LENGTHS[1:]:
        trained(results, "local", 1.6, length=length)
    assert planned("lengths", "local") == []
    larger, methods = usual("gpt-3", 4), ["local", "qsgd"]
    more = trainings.planned(results, "tune", larger, methods, trainings.Chosen())
    assert more == [Run("gpt-3", "local", 4, 32, 1.0, 0.0015, 1)]


def test_time_to_a_loss_is_of_steps_and_of_their_time(results):
    """Dense first steps take the time of dense ones."""
    times = {DENSE: 11.0, "accumulate-4": 3.5, "local": 1.5, "nesterov-first": 1.5}
    for method, ms in times.items():
        trained(results, method, 1.5)
        results.add_time(SETTING, 10.0, method, {"ms": ms})
    assert results.seconds(SETTING, DENSE, 10.0) == pytest.approx(STEPS * 11e-3)
    first = FIRST * 11e-3 + (STEPS - FIRST) * 1.5e-3
    assert results.seconds(SETTING, "nesterov-first", 10.0) == pytest.approx(first)
    assert results.plain(SETTING, 10.0) == ("accumulate-4", pytest.approx(STEPS * 3.5e-3))
    assert results.sooner(SETTING, "local", 10.0) == pytest.approx(3.5 / 1.5)
    assert results.sooner(SETTING, "local", 3.0) is None  # nothing was timed there
    trained(results, "accumulate-4", 1.7)
    assert results.plain(SETTING, 10.0)[0] == DENSE
    assert "4.66" not in tables.times(results, SETTING)
    assert "7.33 (2 ms)" in tables.times(results, SETTING)


def test_a_step_is_predicted_between_links_that_were_timed(results):
    trained(results, "bf16", 1.5)
    for ratio, ms in ((3.0, 200.0), (10.0, 550.0)):
        results.add_time(SETTING, ratio, "bf16", {"ms": ms, "alone_ms": 100.0, "parameters": 10**6})
    bits = timings.dense_bits(1_000_000, 2)
    assert bits == 32e6  # each of two hosts sends all gradients once
    for ratio, ms in ((10.0, 550.0), (6.5, 375.0), (0.1, 200.0)):
        rate = bits / (ratio * 0.1)
        assert timings.predicted(results, SETTING, "bf16", rate) == pytest.approx(ms)


def test_what_was_measured_is_shown(results, monkeypatch, capsys):
    for method, loss in ((DENSE, 1.5), ("qsgd", 1.51), ("local", 1.53)):
        trained(results, method, loss)
        trained(results, method, loss - 0.05, length=2.0)
        for ratio in (1.0, 10.0):
            results.add_time(SETTING, ratio, method, {"ms": ratio, "alone_ms": 1.0})
    monkeypatch.setattr(sys, "argv", ["worth", "--show", str(results.path)])
    assert worth.main() == 0
    assert (results.path.parent / "worth-gpt-0.8-2.png").exists()
    assert (results.path.parent / "worth-bytes.png").exists()
    text = capsys.readouterr().out
    assert "| every 15, averaged | 1.530 | 1.530 | +0.030 | 4.0 |" in text


KEPT = Results(ROOT / "docs/measured/worth.json")


@pytest.mark.parametrize("setting", KEPT.settings(), ids=str)
def test_the_page_has_what_was_measured(setting):
    page = (ROOT / "docs/worth.md").read_text()
    assert tables.losses(KEPT, setting) in page
    if KEPT.ratios(setting):
        assert tables.times(KEPT, setting) in page


def test_the_headline_is_what_was_measured():
    def times(recipe, method):
        seconds = [KEPT.seconds(usual(recipe), each, 10.0) for each in (method, "eighth-5")]
        return seconds[0] / seconds[1]

    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"are there {times(SMALL, DENSE):.0f} times sooner than dense training" in text
    peer = times(SMALL, "post-local")
    assert f"and {peer:.1f} times sooner than PyTorch's `PostLocalSGDOptimizer`" in text
    larger = times("gpt-3", DENSE), times("gpt-3", "post-local")
    assert "With 3 million parameters it is {:.1f} and {:.1f} times".format(*larger) in text
    largest, images = times("gpt-10", DENSE), times("resnet-20", DENSE)
    assert f"With 10 million it is there {largest:.1f} times sooner than dense training" in text
    assert f"and ResNet-20 with SGD {images:.1f} times" in text


def test_each_method_is_timed_over_whole_rounds():
    """Between exchanges ranks have other parameters, and a part of a round takes another time."""
    for method in METHODS.values():
        if "every=" in method.local and "Rule" not in method.local:
            every = int(method.local.partition("every=")[2].partition(",")[0])
            assert method.timed % every == 0
        assert method.timed % method.passes == 0
        assert method.peer != "PostLocalSGDOptimizer" or method.timed % PERIOD == 0
    assert {*PLAIN, *MAIN} <= {*METHODS} and STEPS % PERIOD == 0


def test_the_schedule_warms_up_and_falls_to_a_tenth():
    shares = [recipes.share(step, STEPS, FIRST) for step in range(STEPS)]
    assert max(shares) == shares[FIRST - 1] == shares[FIRST] == 1.0
    assert shares[FIRST:] == sorted(shares[FIRST:], reverse=True)
    assert 0.1 <= shares[-1] < 0.101


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text in the place of the Bible."""
    folder = tmp_path_factory.mktemp("text")
    lines = (f"{place:05d} is line {place * place:010d} of a text\n" for place in range(20_000))
    (folder / "bible.txt").write_text("".join(lines))
    return folder


def test_no_text_that_is_held_out_is_trained_on(folder):
    task = recipes.task(SMALL, 4, 0, 1, folder)
    trained_on = bytes(task.train.to(torch.uint8).tolist())
    for window in task.held_out[::50]:
        assert bytes(window.to(torch.uint8).tolist()) not in trained_on


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_what_is_held_out_and_draw_other_batches(folder, size):
    torch.manual_seed(1)
    whole = recipes.task(SMALL, 4, 0, 1, folder)
    model = whole.model()
    tasks = [recipes.task(SMALL, 4, rank, size, folder) for rank in range(size)]
    with torch.no_grad():
        together = sum(task.sums(model) for task in tasks)
        assert together.tolist() == pytest.approx(whole.sums(model).tolist(), rel=1e-3)
        losses = [next(task.batches(model, 1))().item() for task in tasks]
        again = [next(task.batches(model, 1))().item() for task in tasks]
    assert len({*losses}) == size and losses == again


def test_medians_of_seeds_are_what_methods_are_compared_by(results):
    for seed, loss in ((1, 1.40), (2, 1.60), (3, 1.50)):
        trained(results, DENSE, loss, seed=seed)
    assert results.goal(SETTING) == statistics.median((1.4, 1.5, 1.6))
    assert "1.500 (1.400 to 1.600)" in tables.losses(results, SETTING)


def test_advice_is_compared_with_the_best_that_was_timed(results):
    """As `advise` writes it, of each setting of its law, of QSGD and of nothing."""
    for method, ms in ((DENSE, 11.0), ("qsgd", 3.0), ("local-int8", 1.5), ("eighth-5", 1.2)):
        trained(results, method, 1.5)
        results.add_time(SETTING, 10.0, method, {"ms": ms})
    advice = {"forward_ms": 1.0, "backward_ms": 2.0, "bandwidth": 1e9, "local_steps": None}
    uses = (None, DENSE, 11 / 1.2), (brief(QSGDCompressor(bits=4)), "qsgd", 2.5)
    for use, method, within in uses:
        row = advised.compared(results, SETTING, 10.0, {**advice, "use": use})
        assert (row["method"], row["best"]) == (method, "eighth-5")
        assert row["within"] == pytest.approx(within)
    known = set()
    for setting in fewer_exchanges.LAW:
        if setting.every > 1:
            step = Span(1.0, 1.0, 1.0)
            local = advise.local_steps_of(fewer_exchanges.Choice(setting, step, step, step))
            known.add(advised.method_of({**advice, "use": None, "local_steps": local}))
    assert known == {"local-int8", "local-int8-5", "eighth-5"}
    with pytest.raises(ValueError, match="no method of make worth"):
        advised.method_of({**advice, "use": brief(StromCompressor(tau=1))})
    results.add_advice(SETTING, 10.0, row)
    results.add_advice(SETTING, 10.0, row)  # in its place
    assert Results(results.path).advised == [{**SETTING._asdict(), "ratio": 10.0, **row}]


@pytest.mark.parametrize("method", ["hook", "accumulate-4", "muon", "quadratic", "dgc"])
def test_methods_that_need_ranks_are_no_lockstep(folder, method):
    run = Run(SMALL, method, 2, 4, 1.0, 0.006, 1)
    with pytest.raises(SystemExit, match=f"{method} needs ranks"):
        next(lockstep.trained([run], folder))


FIVE = ("dense", "eighth-5", "local-int8", "qsgd", "nesterov-int8")  # of `make worth-gpu`


@pytest.mark.parametrize("method", FIVE)
def test_all_of_lockstep_is_on_its_device(folder, method, monkeypatch):
    """On "meta" a tensor of the host's would be an error, and so would a read by the host."""
    made = {"meta": traffic.WithoutData(kernels=False)}
    monkeypatch.setattr(lockstep, "TorchOps", made.pop)
    monkeypatch.setattr(recipes, "autocast", lambda _: contextlib.nullcontext())
    monkeypatch.setitem(recipes.SHAPES, SMALL, recipes.Shape(32, 1))
    monkeypatch.setitem(RECIPES, SMALL, replace(RECIPES[SMALL], warmup_steps=1))
    tasks = [recipes.task(SMALL, 2, rank, 2, folder) for rank in range(2)]
    training = lockstep.Training(Run(SMALL, method, 2, 4, 1.0, 0.006, 1), tasks, "meta")
    for _ in range(PERIOD + 1 if METHODS[method].local else 2):
        training.step()
    assert {p.device.type for each in training.replicas for p in each.parameters} == {"meta"}


@pytest.mark.parametrize("name", ["amx_bf16", "avx512_bf16", "bf16", "avx2"])
def test_products_are_in_bfloat16_where_it_is_quick(name, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {name: True}, raising=False)
    recipes.precision.cache_clear()
    expected = torch.float32 if name == "avx2" else torch.bfloat16
    with recipes.autocast("cpu"):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert recipes.precision("cpu") == product.dtype == expected
    assert recipes.precision("cuda") == torch.bfloat16
    recipes.precision.cache_clear()


def test_trainings_in_float32_are_marked(results):
    for method, precision in ((DENSE, "bfloat16"), ("qsgd", "float32")):
        trained(results, method, 1.5)
        [run] = results.losses(SETTING, method=method)
        results.trained[run]["precision"] = precision
    lines = tables.losses(results, SETTING).splitlines()
    assert ["1.500\\*" in line for line in lines] == ["QSGD" in line for line in lines]


class Clocked:
    """Stands for a training whose steps take a second each, from now on."""

    def __init__(self, *_):
        self.now = time.monotonic()

    def step(self):
        self.now += 1

    def clock(self):
        return self.now

    def row(self, data):
        return {"loss": 1.0, "parameters": 8, "bytes_a_step": 16.0, "encode_ms": 2.0} | LOCKSTEP


LOCKSTEP = {"lockstep": True}


def test_a_training_that_would_end_too_late_is_left_out(folder, results, monkeypatch, capsys):
    """It ends early, without a row; a shorter one behind it is trained."""
    monkeypatch.setattr(lockstep, "Training", Clocked)
    long, short = (Run(SMALL, "dense", 2, 4, x / STEPS, 0.006, 1) for x in (STEPS, 100))
    deadline = time.monotonic() + STEPS / 2
    rows = dict(lockstep.trained([long, short], folder, deadline))
    assert [*rows] == [short] and rows[short]["seconds"] == 100
    printed = capsys.readouterr().out
    assert f"dense: 1000 ms a step, {STEPS - 20} s to go" in printed
    assert "dense: stopped at step 20, it would end too late" in printed
    assert dict(lockstep.trained([short], folder, time.monotonic() - 1)) == {}


def test_what_is_left_out_is_named(results, monkeypatch, capsys, folder):
    """For want of time, or of a rate; and nothing of it is tried again."""
    monkeypatch.setattr(lockstep, "Training", Clocked)
    small, large = usual(SMALL, 2), usual("gpt-3", 2)
    for method in ("dense", "qsgd"):
        trained(results, method, 1.5, setting=small)
    methods, chosen = ["dense", "qsgd", "muon"], trainings.Chosen(first=30 / STEPS)
    for seconds in (40.0, 0.0):
        run_all = partial(lockstep.trained, deadline=time.monotonic() + seconds)
        now = ["dense", "muon"] if seconds else methods
        trainings.train(results, large, "tune", now, chosen, folder, run_all)
    printed = capsys.readouterr().out
    assert printed.count("has no rate in") == 2 and "for muon" in printed
    assert "left out, as they would take too long: qsgd" in printed
    (run,) = results.losses(large)
    assert trainings.steps_of(run) == 30
    table = tables.lockstep(results, large, chosen.first)
    assert "| dense | 0.0015 | 1.000 | +0.000 | 2.0 | 1000.0 | 2.0 |" in table
