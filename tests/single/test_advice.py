"""What `advise` says, over all that can be measured: laws, and the case that it got wrong."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hvd_gradcomp
from benchmarks.worth.recipes import SMALL
from benchmarks.worth.results import Results, usual
from hvd_gradcomp import (
    DGCCompressor,
    QSGDCompressor,
    SparseGDCompressor,
    VarianceCompressor,
    after,
)
from hvd_gradcomp.cli import advise, advise_report, options
from hvd_gradcomp.planning.description import brief
from hvd_gradcomp.planning.methods import ExchangeMethod, Local, Momentum
from hvd_gradcomp.tuning import advice, fewer_exchanges, measure
from hvd_gradcomp.tuning.over_c10d import TorchJob
from hvd_gradcomp.tuning.recommend import (
    BEYOND,
    ERROR,
    WORTH,
    Case,
    Estimate,
    Span,
    Verdict,
    decide,
    estimate,
    exchange_of,
    median,
    step_of,
)

ROOT = Path(__file__).resolve().parents[2]
seconds = st.floats(1e-4, 10)
rounds = st.one_of(st.just([]), st.lists(seconds, min_size=5, max_size=12))
HERE = 1e9


@st.composite
def cases(draw, compute, backward, name="method"):
    """Steps that take so long on any link, and so many bits over it."""
    work, bits = draw(st.floats(0, 5)), draw(st.floats(1e3, 1e10))
    predicted = work + bits / HERE
    hidden = draw(st.floats(0, 1)) * min(predicted, backward)
    return Case(
        name,
        predicted,
        hidden,
        draw(rounds),
        lambda b: compute + work + bits / b - hidden,
        compute,
        backward,
    )


@st.composite
def worlds(draw):
    backward = draw(st.floats(0, 5))
    compute = backward + draw(st.floats(0, 5))
    dense = draw(cases(compute, backward, "dense"))
    return dense, draw(st.lists(cases(compute, backward), min_size=1, max_size=5))


@settings(deadline=None)  # by the clock a busy machine would fail
@given(worlds())
def test_never_within_its_error_nor_against_its_own_break_even(world):
    dense, methods = world
    estimates = [estimate(case_, dense, HERE) for case_ in methods]
    answer, best, _ = decide(estimates, HERE)
    if answer == "use":
        assert step_of(dense).low * WORTH >= best.step.high > 0
        assert best.pays_below.low > HERE
    elif answer == "none":
        assert all(one.step.low >= WORTH * step_of(dense).high * (1 - 1e-9) for one in estimates)
    else:
        assert best.faster.low * WORTH < 1 or best.pays_below.low <= HERE
        assert best.faster.high * WORTH > 1


@settings(deadline=None)  # by the clock a busy machine would fail
@given(worlds(), st.floats(0.01, 100))
def test_what_was_measured_beats_what_was_predicted(world, wrong):
    """A prediction that is wrong by any factor changes nothing where an exchange was measured."""
    dense, methods = world
    for method in (dense, *methods):
        if method.measured:
            other = method._replace(predicted=wrong * method.predicted)
            assert exchange_of(other) == exchange_of(method) and step_of(other) == step_of(method)


@settings(deadline=None)  # by the clock a busy machine would fail
@given(worlds())
def test_what_was_slower_in_every_round_is_not_recommended(world):
    dense, methods = world
    slower = [
        method._replace(hidden=0.0)
        for method in methods
        if method.measured and dense.measured and min(method.measured) > max(dense.measured)
    ]
    answer, *_ = decide([estimate(method, dense, HERE) for method in slower], HERE)
    assert answer != "use"


@settings(deadline=None)  # by the clock a busy machine would fail
@given(worlds())
def test_spans_are_in_order_and_agree_with_each_other(world):
    dense, methods = world
    for method in methods:
        estimated = estimate(method, dense, HERE)
        for span in (estimated.exchange, estimated.step, estimated.faster, estimated.pays_below):
            assert span.low <= span.middle <= span.high
        assert estimated.step.low >= method.compute * (1 - 1e-9)
        for gain, below in zip(estimated.faster, estimated.pays_below):
            if abs(gain - 1) > 1e-6 and 0 < below < math.inf and below != pytest.approx(HERE):
                falls = dense.step_at(HERE / 2) > dense.step_at(HERE)
                steeper = dense.step_at(HERE / 2) - dense.step_at(HERE) > (
                    method.step_at(HERE / 2) - method.step_at(HERE)
                )
                if falls and steeper:
                    assert (gain > 1) == (below > HERE)


@settings(deadline=None)  # by the clock a busy machine would fail
@given(st.lists(seconds, min_size=5, max_size=40), seconds)
def test_the_span_of_a_median_follows_its_rounds(samples, more):
    low, middle, high = median(samples)
    assert min(samples) <= low <= middle <= high <= max(samples)
    assert median([more * x for x in samples]) == pytest.approx(
        (more * low, more * middle, more * high)
    )


@pytest.mark.parametrize(("n", "cut"), [(5, 0), (7, 0), (8, 1), (11, 2), (20, 5)])
def test_the_span_of_a_median_holds_it_nine_times_of_ten(n, cut):
    assert median([float(x) for x in range(n)])[::2] == (cut, n - 1 - cut)
    outside = 2 * sum(math.comb(n, k) for k in range(cut + 1)) / 2**n
    assert outside <= 0.1 < outside + 2 * math.comb(n, cut + 1) / 2**n


def test_few_rounds_say_nothing():
    with pytest.raises(ValueError, match="take 5 or more"):
        median([1.0, 2.0])


def test_a_machine_that_is_noisy_is_told_that_it_cannot_be_said():
    """QSGD: predicted to pay, measured to be five times slower than predicted, on a fast link."""

    def case(name, predicted, measured, bits):
        at = lambda b: predicted + bits / b - bits / HERE  # noqa: E731
        return Case(name, predicted, 0.0, measured, at)

    dense = case("dense", 0.10, [0.08, 0.1, 0.12, 0.2, 0.4], 8e7)
    qsgd = case("qsgd", 0.02, [0.05, 0.09, 0.1, 0.11, 0.3], 1e7)
    estimated = estimate(qsgd, dense, HERE)
    assert decide([estimated], HERE).answer == "cannot say"
    unmeasured = [c._replace(measured=[]) for c in (dense, qsgd)]
    assert decide([estimate(unmeasured[1], unmeasured[0], HERE)], HERE).answer == "use"
    slow = qsgd._replace(measured=[2.0] * 5)
    assert decide([estimate(slow, dense, HERE)], HERE).answer == "none"


def test_without_a_measurement_the_error_of_the_model_counts():
    dense = Case("dense", 1.0, 0.0, [], lambda b: 1e9 / b)
    near = Case("near", 0.6, 0.0, [], lambda b: 0.6e9 / b)
    far = Case("far", 0.2, 0.0, [], lambda b: 0.2e9 / b)
    assert (1 - ERROR) / (1 + ERROR) < 0.6
    assert decide([estimate(near, dense, HERE)], HERE).answer == "cannot say"
    assert decide([estimate(c, dense, HERE) for c in (near, far)], HERE).best.name == "far"
    assert decide([], HERE).answer == "none"


def row_of(step: Span, measured: float | None) -> advise_report.Row:
    """Return a row with a step's milliseconds, and whether an exchange was measured."""
    one = Span(1.0, 1.0, 1.0)
    times = (1.0, measured, None, one, step.middle, step)
    return advise_report.Row("dense", 1.0, 1.0, *times, one, {}, None, None, {})


@pytest.mark.parametrize(
    ("answer", "below", "words"),
    [
        ("use", (2e9, 3e9, 4e9), "pays on links slower than 2 Gb/s, perhaps up to 4 Gb/s; this"),
        ("use", (2e9, math.inf, math.inf), "slower than 2 Gb/s, perhaps on any; this one has 1"),
        ("use", (math.inf,) * 3, "Use QSGDCompressor(bits=8): a step takes 10.0 to 30.0 ms"),
        ("none", (0.0, 0.0, 0.0), "Use none: a step takes 50.0 to 70.0 ms without compression"),
        ("cannot say", (0.0, 1e9, 2e9), "Cannot say: with QSGDCompressor(bits=8) a step takes 10"),
    ],
)
def test_the_sentence_at_the_end(answer, below, words):
    step = Span(0.01, 0.02, 0.03)
    best = Estimate("QSGD(bits=8)", step, step, Span(1.6, 3.0, 7.0), Span(*below))
    dense = row_of(Span(50.0, 60.0, 70.0), 60.0)
    assert words in advise_report.recommendation(Verdict(answer, best), dense, HERE)
    assert "nothing" not in advise_report.recommendation(Verdict("none", None), dense, HERE)


@pytest.mark.parametrize("measured", [60.0, None])
def test_more_rounds_are_asked_for_only_where_they_say_more(measured):
    """What was not measured lies 30 % around a prediction, however many rounds there are."""
    span = Span(0.01, 0.02, 0.03)
    best = Estimate("QSGD()", span, span, Span(0.5, 1.0, 2.0), Span(0.0, 1e9, 2e9))
    dense = row_of(Span(50.0, 60.0, 70.0), measured)
    sentence = advise_report.recommendation(Verdict("cannot say", best), dense, HERE)
    assert ("Take more rounds (--rounds 20)" in sentence) is (measured is not None)
    assert ("Let it measure whole exchanges" in sentence) is (measured is None)


@dataclass(frozen=True)
class WithoutTheWord(SparseGDCompressor):
    """Another's, whose class ends otherwise than ours."""


def test_a_method_is_named_as_its_class_is():
    for compressor in (WithoutTheWord(density=0.5), SparseGDCompressor(density=0.5)):
        assert advise_report._written(brief(compressor)).startswith(type(compressor).__name__ + "(")


def test_what_goes_first_goes_before_what_is_faster_if_it_pays():
    dense = Case("dense", 1.0, 0.0, [], lambda b: 1e9 / b)
    methods = [
        Case(name, t, 0.0, [], lambda b, t=t: t * 1e9 / b) for name, t in (("a", 0.1), ("b", 0.2))
    ]
    estimates = [estimate(case, dense, HERE) for case in methods]
    assert decide(estimates, HERE)[:1] == ("use",) and decide(estimates, HERE).best.name == "a"
    verdict = decide(estimates, HERE, {"b"})
    assert (verdict.best.name, verdict.faster.name) == ("b", "a")
    assert decide(estimates, HERE, {"a"}).faster is None
    slow = estimate(methods[1]._replace(predicted=2.0), dense, HERE)
    assert decide([estimates[0], slow], HERE, {"b"}).best.name == "a", "b does not pay"


def test_only_what_runs_with_the_optimizer_is_measured():
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    adam, sgd = torch.optim.AdamW(parameters), torch.optim.SGD(parameters, 0.1, momentum=0.9)
    messages: list[str] = []
    requested = [DGCCompressor(), QSGDCompressor(), after(3, None, DGCCompressor())]
    requested = [ExchangeMethod(each) for each in requested]
    assert advise._suited(requested, None) == advise._suited(requested, sgd) == requested
    plain = [ExchangeMethod(DGCCompressor(momentum=0.0)), ExchangeMethod(QSGDCompressor())]
    assert advise._suited(requested, adam, messages.append) == plain
    assert "DGC() cannot take AdamW's momentum over" in messages[0] and "left out: " in messages[1]
    assert advise._suited([*plain, *requested], adam) == plain, "none twice"
    beside = [Local(DGCCompressor()), Momentum(QSGDCompressor())]
    assert advise._suited(beside, adam) == beside
    assert advise._suited(beside, sgd, messages.append) == beside[:1]
    assert messages[-1].endswith("it exchanges the momentum of Adam or AdamW")


def test_the_cost_of_local_steps_is_a_share_of_a_round():
    """On one link, and on others: 0.1 s of computing, rounds of 0.6 s every 3 steps."""
    dense = Case("dense", 1.0, 0.0, [], lambda b: 0.1 + 1e9 / b, compute=0.1)
    local = dense._replace(predicted=0.6, step_at=lambda b: 0.1 + 0.2e9 / b, every=3)
    made = estimate(local, dense, HERE)
    assert made.exchange.middle == 0.6 and made.step.middle == pytest.approx(0.3)
    assert made.faster.middle == pytest.approx(1.1 / 0.3)
    measured = local._replace(measured=[0.9] * 5)
    assert estimate(measured, dense, HERE).step.middle == pytest.approx(0.4)


def test_usual_settings_are_those_that_people_train_with():
    """An alpha of 4.3 sent one element in 542 of noise, 7 to 50 times less than the advised 2."""
    assert options.usual()["variance"] == VarianceCompressor(alpha=2.0)


@pytest.mark.parametrize(("shared", "all_of_it"), [(3.0, True), (1.0, False), (None, False)])
def test_probes_are_explained(shared, all_of_it):
    densities = dict.fromkeys(("density_variance", "density_egc", "density_dgc"), 0.1)
    text = advise_report.probes(
        {"entropy": 3.1, "mutual_information": shared, "chance": 0.2, **densities}
    )
    assert ("the same batches" in text) == all_of_it
    assert ("0.2 bits are shared by chance" in text) == (shared is not None)


def around(seconds):
    """Give a tenth to both sides."""
    return Span(0.9 * seconds, seconds, 1.1 * seconds)


KEPT = Results(ROOT / "docs/measured/worth.json")
LAW = {
    "qsgd": fewer_exchanges.QSGD,
    "local-int8-5": fewer_exchanges.INT8_EVERY_5,
    "local-int8": fewer_exchanges.INT8_EVERY_15,
    "eighth-5": fewer_exchanges.EIGHTH_EVERY_5,
}


def test_the_law_is_what_was_measured():
    """Lengths for the worst, the median and the best of the dense seeds."""
    for method, setting in LAW.items():
        for hosts, length in setting.lengths.items():
            measured = KEPT.needed_span(usual(SMALL, hosts), method)
            assert length == pytest.approx(measured, abs=0.006), (method, hosts)


@given(st.integers(1, 64), st.sampled_from(fewer_exchanges.LAW))
def test_the_law_lies_between_what_was_measured(hosts, setting):
    known = sorted(setting.lengths)
    length = setting.length(hosts)
    fewest, largest = fewer_exchanges.HOSTS
    place = min(max(hosts, fewest), largest)
    if place > known[-1]:
        assert length is None, "more hosts were measured, but not with it"
        return
    if place in known:
        assert length == setting.lengths[place]
    for place, value in enumerate(length):
        ends = [span[place] for span in setting.lengths.values()]
        assert min(ends) - 1e-9 <= value <= max(ends) + 1e-9


def test_other_hosts_and_models_than_those_of_the_law_are_named():
    run = next(iter(KEPT.losses(usual(SMALL))))
    parameters = KEPT.trained[run]["parameters"]
    assert fewer_exchanges.beyond(run.hosts, parameters) == ""
    assert fewer_exchanges.beyond(64, parameters) == "64 hosts"
    unlike = fewer_exchanges.beyond(64, 124_000_000)
    assert unlike == "64 hosts and 124,000,000 parameters"
    local = {"use": "Int8Compressor()", "every": 15, "steps_needed": [1.2, 1.3, 1.4]}
    local |= {"step_span_ms": [1.0, 1.0, 1.0], "sooner": [2.0, 2.0, 2.0]}
    text = advise_report.recommended_local_steps(local, unlike)
    assert "LocalSteps(every=15) with Int8Compressor()" in text
    assert f"Yours has {unlike}, which was not measured" in text
    assert "Yours has" not in advise_report.recommended_local_steps(local, "")


def test_what_is_soonest_at_a_loss_is_chosen():
    """With 10 ms of computing, and exchanges that take ten times as long uncompressed."""
    eighth, int8 = LAW["eighth-5"], LAW["local-int8"]
    plain = around(0.11)
    exchanges = {eighth.compressor: around(0.002), int8.compressor: around(0.03)}
    choice = fewer_exchanges.choose(exchanges, {}, plain, 0.01, 2)
    assert choice.setting == eighth and choice.length == eighth.length(2)
    assert choice.step.middle == pytest.approx(0.01 + 0.002 / 5)
    needed = choice.length.middle
    assert choice.sooner.middle == pytest.approx(0.11 / (choice.step.middle * needed))
    assert choice.sooner.low < choice.sooner.middle < choice.sooner.high
    # Without exchanges that pay there is nothing, and where each step can exchange for nothing.
    assert fewer_exchanges.choose({}, {}, around(0.011), 0.01, 2) is None
    free = {LAW["qsgd"].compressor: around(0.01)}
    assert fewer_exchanges.choose(exchanges, free, plain, 0.01, 2) is None


@pytest.mark.parametrize("ratio", [0.3, 1.0, 3.0, 10.0, 30.0])
def test_what_is_advised_is_within_a_fifth_of_the_best_that_was_measured(ratio):
    """Methods between two hosts, by how communication-bound a step is; at 0.3 none is advised."""
    results, setting = KEPT, usual(SMALL)
    alone = 1e-3 * results.row(setting, "dense", ratio)["alone_ms"]
    seconds = {
        method: results.seconds(setting, method, ratio) for method in results.methods(setting)
    }
    exchanges, steps = {}, {}
    for method, law in LAW.items():
        step = 1e-3 * results.ms(setting, method, ratio)
        if law.every == 1:
            steps[law.compressor] = around(step)
        else:
            exchanges.setdefault(law.compressor, around(max(0.0, step - alone) * law.every))
    plain = around(1e-3 * results.ms(setting, "dense", ratio))
    choice = fewer_exchanges.choose(exchanges, steps, plain, alone, 2)
    known = {method: each for method, each in seconds.items() if each is not None}
    if ratio == 0.3:
        assert choice is None
        return
    if choice is None:  # what exchanges in each step, if it saves a tenth of one
        saves = results.ms(setting, "qsgd", ratio) < 0.9 * results.ms(setting, "dense", ratio)
        advised = "qsgd" if saves else "dense"
    else:
        (advised,) = (method for method, law in LAW.items() if law == choice.setting)
    assert known[advised] <= 1.2 * min(known.values())


@pytest.mark.parametrize("page", ["README.md", "docs/which.md"])
def test_texts_recommend_what_the_table_does(page):
    assert advice.markdown() in (ROOT / page).read_text()


def test_what_is_typed_is_what_is_recommended():
    """And it is a setting that `advise` knows, and that was measured."""
    for row in advice.TABLE:
        if row.setting is not None:
            assert row.setting in fewer_exchanges.LAW
            names = {**vars(hvd_gradcomp), "local_steps": lambda _, **how: Local(**how)}
            typed = eval(row.typed, names)
            if row.setting.every > 1:
                assert typed == Local(row.setting.compressor, every=row.setting.every)
            else:
                assert typed == row.setting.compressor
    bounds = [(row.above, row.below) for row in advice.TABLE]
    assert bounds[0][0] == 0.0 and bounds[-1][1] == math.inf
    assert all(below == above for (_, below), (above, _) in zip(bounds, bounds[1:-1]))


TIMED = [(setting, ratio) for setting in KEPT.settings() for ratio in KEPT.ratios(setting)]


@pytest.mark.parametrize(("setting", "ratio"), TIMED, ids=str)
def test_what_is_recommended_is_within_a_quarter_of_the_best_that_was_measured(setting, ratio):
    row = next(row for row in advice.TABLE if row.above <= ratio < row.below)
    keys = {"qsgd": fewer_exchanges.QSGD, "eighth-5": fewer_exchanges.EIGHTH_EVERY_5}
    key = next((key for key, known in keys.items() if known == row.setting), "dense")
    seconds = {key: KEPT.seconds(setting, key, ratio) for key in KEPT.methods(setting)}
    assert seconds[key] <= 1.25 * min(each for each in seconds.values() if each is not None)


@settings(deadline=None)  # by the clock a busy machine would fail
@given(st.lists(st.integers(1, 9_000_000), min_size=1, max_size=30))
def test_the_buckets_of_ddp_are_known(elements):
    """PyTorch's own assignment is the oracle; a bucket waits for the last of its layers."""
    backwards = [torch.empty(n, device="meta") for n in reversed(elements)]
    limits = [torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, 25 << 20]
    expected, _ = torch.distributed._compute_bucket_assignment_by_size(backwards, limits)
    last = len(elements) - 1
    layers = [(float(last - place), 4.0 * n) for place, n in enumerate(elements)]
    job = TorchJob()
    try:
        exchanges = job.dense_exchanges(layers)
        job.shards = 2  # of fully_shard, which reduces each of its units by itself
        assert job.dense_exchanges(layers) == layers
    finally:
        job.close()
    of_each = [[layers[last - place] for place in places] for places in expected]
    assert exchanges == [(max(r for r, _ in each), sum(b for _, b in each)) for each in of_each]


def test_predictions_for_more_hosts_are_taken_to_be_less_certain():
    case = Case("method", 1.0, 0.0, [], lambda b: 1.0)
    assert exchange_of(case) == pytest.approx((1 - ERROR, 1.0, 1 + ERROR))
    assert exchange_of(case._replace(error=BEYOND)) == pytest.approx((1 - BEYOND, 1, 1 + BEYOND))
    rows = json.loads((ROOT / "docs/measured/extrapolation.json").read_text())
    beyond = [r["measured_ms"] / r["predicted_ms"] for r in rows if r["from"] < r["to"]]
    within = [1 - BEYOND <= ratio <= 1 + BEYOND for ratio in beyond]
    assert (sum(within), len(within)) == (18, 27)  # what the constant's comment says


@pytest.mark.parametrize("rate", [1e5, 1e7, 1e9])
def test_a_slow_link_is_not_measured_for_minutes(monkeypatch, rate):
    """At 15 Mb/s five kinds of collectives of 16 MB, ten times each, took nine minutes."""
    sizes = []
    monkeypatch.setattr(measure, "_collective", lambda kind, x, *rest: sizes.append(x.numel()))
    two = SimpleNamespace(
        group=SimpleNamespace(size=lambda: 2),
        backend=lambda: None,
        barrier=lambda: None,
        slowest=lambda seconds: 1e-3 + sizes[-1] / rate,
    )
    measured = measure.link(two, rounds=9)
    assert measured.bandwidth == pytest.approx(8 * rate, rel=0.01)
    assert max(sizes) <= max(measure.SIZES[1], 16 * rate * measure.LONG)
    assert sum(sizes) / rate < 60
    full = measure.SIZES[-1] in sizes
    assert full == (rate == 1e9)
