"""Command `hvd-gradcomp advise`: recommends a compressor, or none."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hvd_gradcomp.cli import advise_report, launching, options, output
from hvd_gradcomp.cli.advise_report import EVERY, HOSTS, Row
from hvd_gradcomp.cli.bench import FEW, about, dense_title, shards_of, warm_up_rounds
from hvd_gradcomp.cli.output import counted
from hvd_gradcomp.cli.progress import Progress
from hvd_gradcomp.core.cost_model import Bucket, Dense, Link, Way
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.method.handover import takes_momentum
from hvd_gradcomp.monitoring.probe import Reading
from hvd_gradcomp.planning.description import brief
from hvd_gradcomp.planning.methods import ExchangeMethod
from hvd_gradcomp.tuning import fewer_exchanges, recommend
from hvd_gradcomp.tuning.recommend import Case, Span, Verdict

if TYPE_CHECKING:
    import torch

    from hvd_gradcomp.tuning.job import Job
    from hvd_gradcomp.tuning.measure import Backward, Gradients
    from hvd_gradcomp.tuning.models import Model

_NO_LINK = (
    "one rank alone has no link to measure: give --bandwidth in Mb/s; or start ranks on the hosts "
    "that you train on, by torchrun (see --help) or with -np and -H"
)
_WITH_MOMENTA = ("Adam", "AdamW")  # optimizers that `MomentumExchange` takes
ANCHORS = (2, 4, 16)  # numbers of ranks to measure the work for, to interpolate others


@click.command("advise", short_help="Recommend a compressor for this link, or none.")
@launching.with_ranks
@options.with_model
@options.with_methods
@options.with_shards
@options.with_preview
@click.option(
    "-r",
    "--rounds",
    type=click.IntRange(recommend.ROUNDS),
    default=recommend.ROUNDS,
    show_default=True,
    help="Rounds of each method; more narrow the intervals.",
)
@click.option(
    "-b",
    "--batch-size",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Batch size of each rank, for the backward pass of a built-in model.",
)
@click.option(
    "--bandwidth",
    type=click.FloatRange(0, min_open=True),
    metavar="MBIT",
    help="Bandwidth in Mb/s of a link that is not here; needed where one rank cannot measure it.",
)
@click.option(
    "--latency",
    type=click.FloatRange(0),
    default=50.0,
    show_default=True,
    metavar="MICROSECONDS",
    help="Latency from host to host, for more hosts than are here.",
)
@click.option(
    "--for-hosts",
    type=click.IntRange(2),
    metavar="N",
    help="Predict for so many hosts, one rank each, from what is measured here with fewer.",
)
@click.option(
    "--optimizer",
    metavar="NAME",
    help="Class of torch.optim that you train with, such as sgd or adamw: some methods run with "
    "SGD only. Default: that of your factory, if it returns one.",
)
@click.option(
    "--measure/--no-measure",
    "measures",
    default=True,
    show_default=True,
    help="Measure whole exchanges, beside predicting them.",
)
@options.with_files
def command(
    model_name: str,
    texts: Sequence[str],
    shards: int,
    preview: bool,
    rounds: int,
    batch_size: int,
    bandwidth: float | None,
    latency: float,
    for_hosts: int | None,
    optimizer: str | None,
    measures: bool,
    json_path: Path | None,
    png_path: Path | None,
) -> None:
    """Recommend the compressor that makes a step fastest on this link, or none.

    Run it as you train, on the hosts that you train on, by torchrun or horovodrun; or in one
    process for a link that is not here, whose bandwidth you give:

    \b
        hvd-gradcomp advise --model train:factory --bandwidth 1000
        torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d \\
            --rdzv-endpoint host1:29400 -m hvd_gradcomp advise --model train:factory
        hvd-gradcomp advise -np 2 -H host1:1,host2:1 --model train:factory
        hvd-gradcomp advise -np 2 -H host1:1,host2:1 --model train:factory --for-hosts 16

    It measures forward and backward, whole exchanges, each compressor's own work without any link,
    and the link by collectives of several sizes, all on CPUs. From the last three a model predicts
    what an exchange takes on other links and numbers of hosts: the cost model of Tsuzuku et al.
    2018, section 5, with work, latency and overlap. Where an exchange was measured, that counts.
    It knows nothing of GPUs, where compressing costs something else: see "On a GPU" on the site.

    "model" is the predicted exchange, "took" the measured one, "step" all but the optimizer's
    update, in ms; "faster" is how many times faster than without compression. From-to is where a
    median lies nine times of ten, or 30 % around a prediction, 50 % with --for-hosts. "pays below"
    is the bandwidth at which a step takes as long as without. A compressor is recommended if it
    saves a tenth of a step in the worst case; if some would in the best case only, it says so.

    The second table is how many times faster a step is on other numbers of hosts, one rank each;
    with --for-hosts the first table and the answer are for so many, predicted from what is measured
    here.

    Methods that take the momentum over from the optimizer are measured, and recommended, without
    one where yours has none to give: "adam" and its kind. With these a quantizer that pays goes
    before a faster method, since the latter trained transformers worse. For the rest it says
    nothing about accuracy: `hvd-gradcomp compare` trains with each. Of a model of your own with a
    loss, probes say what is in its gradients.

    It also says whether local steps reach a loss sooner, and which do soonest: their time is
    predicted from the exchanges above, and how many more steps they need is what a small
    transformer needed on two, four and eight hosts ("Is it worth it?" on the site).
    """
    options.check_png(png_path)
    if bandwidth is None and not launching.launcher():
        raise click.UsageError(_NO_LINK)
    job = options.job(shards)
    import torch

    from hvd_gradcomp.tuning.measure import (
        FEW_SIZES,
        Backward,
        DenseExchange,
        Gradients,
        UnmeasurableError,
        backward,
        exchange_of,
        link,
        measure,
    )
    from hvd_gradcomp.tuning.models import USUAL_OPTIMIZERS, ModelError, load, optimizer_of

    ranks, first = job.size(), job.rank() == 0
    if job.group.size() == 1 and bandwidth is None:
        raise click.UsageError(_NO_LINK)
    if first and ranks > job.hosts() > 1:
        click.echo("several ranks on a host: what is called hosts below are ranks", err=True)
    measures = measures and bandwidth is None
    try:
        usual = optimizer or USUAL_OPTIMIZERS.get(model_name)
        trained_with = optimizer_of(usual) if usual else None
        model = load(model_name, batch_size=batch_size)
        trained_with = trained_with or model.optimizer
        # Each rank draws its own batches, even if the factory has set one seed on all ranks.
        torch.manual_seed(1000 + job.rank())
        passes = [backward(model)[1] for _ in range(3 if model.loss else 0)]
        gradients = Gradients(job, model, real=8 if model.real else 0)
        probed = _probed(model, gradients) if model.real and shards == 1 else {}
    except ModelError as error:
        raise click.UsageError(str(error)) from error
    methods = options.chosen(texts, gradients.scale)
    pass_ = _middle(job.gather_objects(passes, list[Backward]), gradients.places)
    sizes = [4.0 * math.prod(shape) for _, shape in gradients.layers]
    uncompressed = dense_title(job)
    dense = MethodResult(
        Dense(uncompressed, job.dense_exchanges(list(zip(pass_.ready, sizes)))),
        ExchangeMethod(),
        1.0,
        1.0,
    )
    results: list[tuple[MethodResult, list[float]]] = []
    known: dict[Compressor, MethodResult] = {}  # by compressor, whatever it is for
    with Progress(len(_suited(methods, trained_with)) + 2, first) as progress:
        size = counted(gradients.elements, "element")
        progress.say(f"{model_name}: {size}, {counted(ranks, 'rank')}{shards_of(job)}")
        methods = _suited(methods, trained_with, progress.say)
        if bandwidth is not None:  # shards travel at the same time
            imagined = max(ranks // shards, 2)
            measured_link = Link.of(1e6 * bandwidth / shards, imagined, 1e-6 * latency)
        if preview and methods:
            rough = link(job, FEW_SIZES, 1, 1e-6 * latency) if bandwidth is None else measured_link
            progress.say(
                _first_look(job, methods, gradients, dense, pass_, rough, rounds, measures)
            )
        progress.begin("the link")
        if bandwidth is None:
            measured_link = link(job, rounds=rounds, latency=1e-6 * latency)
        progress.end()
        plain = measure(DenseExchange(job), gradients, (rounds + 1) // 2, 1) if measures else None
        for method in methods:
            progress.begin(method.name)
            compressor = method.compressor
            try:
                if compressor not in known:
                    known[compressor] = _measure_method(
                        job, compressor, gradients, measured_link.ranks, rounds, pass_
                    )
                times = []
                if measures:
                    exchange = exchange_of(job, method, gradients)
                    row = measure(exchange, gradients, rounds, warm_up_rounds(compressor))
                    times = [one.total for one in row.times]
                results.append((known[compressor].by(method), times))
            except UnmeasurableError as error:
                progress.say(f"left out: {method.name}: {error}")
            progress.end()
        progress.begin(uncompressed)
        if plain is not None:  # half of them at the end, so that drift shows in their spread
            plain.times += measure(DenseExchange(job), gradients, rounds // 2).times
        progress.end()
    if first:
        times = [one.total for one in plain.times] if plain else []
        content = {
            **about(job, model_name),
            "forward_ms": 1e3 * pass_.forward,
            "backward_ms": 1e3 * pass_.seconds,
            "bandwidth": measured_link.bandwidth,
            "link": {
                "ranks": measured_link.ranks,
                "latency": measured_link.latency,
                "curves": measured_link.curves,
            },
            "probes": probed,
            "moments": gradients.moments,
            "optimizer": None if trained_with is None else type(trained_with).__name__,
            "for_hosts": for_hosts,
        }
        everything = [(dense, times), *results]
        gentle = not (trained_with is None or isinstance(trained_with, torch.optim.SGD))
        rows, verdict = _advice(
            everything, measured_link, pass_, for_hosts or measured_link.ranks, gentle
        )
        hosts = for_hosts or measured_link.ranks
        local = _fewer_exchanges([one.method for one, _ in everything], rows, pass_, hosts)
        content |= {"rows": [row._asdict() for row in rows], **_verdict_json(rows, verdict)}
        content["local_steps"] = local
        content["unlike"] = fewer_exchanges.beyond(hosts, shards * gradients.elements)
        content["takes_over"] = trained_with is None and any(
            one.costs.name == content["use"] and takes_momentum(one.method.compressor)
            for one, _ in results
        )
        output.report(json_path, content, advise_report.text(content, rows, verdict))
        if png_path is not None:
            advise_report.draw(png_path, content, rows)


class MethodResult(NamedTuple):
    """Measurement of one compressor's work.

    Attributes:
        costs: for the cost model.
        method: whose costs these are.
        elements, bytes: of the gradients of all steps, divided by those sent; inf if nothing is
            sent.
    """

    costs: Way | Dense
    method: ExchangeMethod
    elements: float
    bytes: float

    def by(self, method: ExchangeMethod) -> MethodResult:
        """Return the same for another method with this compressor."""
        costs, every = replace(self.costs, name=method.name), method.every
        return MethodResult(costs, method, self.elements * every, self.bytes * every)

    def step_seconds(self, link: Link, ranks: int, backward: float) -> float:
        """Predict the time of backward and of what the exchange adds to it, a mean over steps."""
        if self.method.overlaps:
            return self.costs.seconds(link, ranks, backward)
        return backward + self.costs.seconds(link, ranks) / self.method.every


def _middle(everywhere: Sequence[Sequence[Backward]], places: Sequence[int]) -> Backward:
    """Return the slowest rank's median pass; without passes, all gradients are ready at once.

    Args:
        everywhere: passes of each rank.
        places: of the layers that this rank exchanges, among the model's parameters.
    """
    from hvd_gradcomp.tuning.measure import Backward

    if not everywhere[0]:
        return Backward(0.0, 0.0, (0.0,) * len(places))
    middle = [sorted(passes, key=lambda p: p.seconds)[len(passes) // 2] for passes in everywhere]
    slowest = max(middle, key=lambda p: p.seconds)
    return slowest._replace(ready=tuple(slowest.ready[place] for place in places))


def _measure_method(
    job: Job,
    compressor: Compressor,
    gradients: Gradients,
    ranks: int,
    rounds: int,
    pass_: Backward,
    anchors: Sequence[int] = ANCHORS,
    warm_up: int | None = None,
) -> MethodResult:
    """Measure a compressor's costs, by all ranks' clocks, and its compression ratios.

    Args:
        job, compressor, gradients: to measure.
        ranks: number of ranks; costs are measured for these and for `anchors`.
        rounds, warm_up: rounds that count, and rounds before them; None for `warm_up_rounds`.
        pass_: has when gradients are ready.

    Raises:
        UnmeasurableError: see `alone`.
    """
    from hvd_gradcomp.tuning.measure import alone

    warm_up = warm_up_rounds(compressor, warm_up)
    costs = {
        count: alone(job, compressor, gradients, count, rounds, warm_up, pass_.ready)
        for count in sorted({ranks, *anchors})
    }
    rounds_by_count = [cost.rounds for cost in costs.values()]
    everywhere = job.gather_objects(rounds_by_count, list[list[list[Bucket]]])
    everywhere = everywhere[job.shard :: job.shards] if len(everywhere) > 1 else everywhere
    by_ranks = {
        count: [costs_of_rank[i] for costs_of_rank in everywhere] for i, count in enumerate(costs)
    }
    sent_share = {"alltoall": 1 - 1 / ranks}  # a part of an alltoall stays on its rank
    sent = [
        sum(size * sent_share.get(kind, 1.0) for bucket in one for kind, size in bucket.asks)
        for one in costs[ranks].rounds
    ]
    mean = statistics.fmean(sent)
    ratio = 4 * gradients.elements / mean if mean else math.inf
    return MethodResult(
        Way(brief(compressor), by_ranks),
        ExchangeMethod(compressor),
        costs[ranks].element_ratio,
        ratio,
    )


def _first_look(
    job: Job,
    methods: Sequence[ExchangeMethod],
    gradients: Gradients,
    dense: MethodResult,
    pass_: Backward,
    link: Link,
    rounds: int,
    measures: bool,
) -> str:
    """Measure a round of a few methods; return a rough answer, and how long all of it will take.

    Args:
        job, gradients: to measure.
        methods: all of them; first come those that are known to train well with local steps.
        dense: costs without compression.
        pass_, link: as measured.
        rounds: of each method that are to come.
        measures: whole exchanges are to come too.
    """
    from hvd_gradcomp.tuning.measure import UnmeasurableError

    known = {setting.compressor for setting in fewer_exchanges.LAW}
    few = sorted(methods, key=lambda method: method.compressor not in known)[:FEW]
    results: list[tuple[MethodResult, list[float]]] = []
    start = time.perf_counter()
    for method in few:
        with suppress(UnmeasurableError):  # which is said when it is its turn
            result = _measure_method(
                job, method.compressor, gradients, link.ranks, 1, pass_, ANCHORS[:2], 1
            )
            results.append((result.by(method), []))
    each = job.slowest(time.perf_counter() - start) / (2 * 2 * max(len(results), 1))
    rows, _ = _advice([(dense, []), *results], link, pass_, link.ranks)
    warm_ups = {m.compressor: rounds + warm_up_rounds(m.compressor) for m in methods}
    left = len({link.ranks, *ANCHORS}) * each * sum(warm_ups.values())
    if measures:
        exchange = statistics.fmean(1e-3 * row.predicted_ms for row in rows)
        left += (each + exchange) * sum(warm_ups[method.compressor] for method in methods)
    return advise_report.first_look(rows, 1e3 * (pass_.forward + pass_.seconds), left)


def _suited(
    methods: Sequence[ExchangeMethod],
    optimizer: torch.optim.Optimizer | None,
    say: Callable[[str], None] = lambda text: None,
) -> list[ExchangeMethod]:
    """Pick the methods that run with an optimizer, with momentum=0 if necessary; in order.

    Args:
        methods: as requested.
        optimizer: None if unknown.
        say: called with a message for each method that is left out or changed.
    """
    from hvd_gradcomp.torch.reduce.momentum import resolve_compressor

    suited: dict[ExchangeMethod, None] = {}
    kind = type(optimizer).__name__
    for method in methods:
        if method.keyword == "momentum" and optimizer is not None and kind not in _WITH_MOMENTA:
            kinds = " or ".join(_WITH_MOMENTA)
            say(f"left out: {method.name}: it exchanges the momentum of {kinds}")
            continue
        try:
            if optimizer is not None and not method.keyword:
                resolve_compressor(method.compressor, optimizer)
        except ValueError as error:
            if not hasattr(method.compressor, "momentum"):
                say(f"left out: {error}")
                continue
            other = ExchangeMethod(replace(method.compressor, momentum=0.0))  # type: ignore[type-var]
            say(f"{method.name} cannot take {kind}'s momentum over: it is {other.name}")
            method = other
        suited[method] = None
    return list(suited)


def _probed(model: Model, gradients: Gradients, steps: int = 8) -> dict[str, float | None]:
    """Probe the gradients of some steps; return means over elements, None if unknown."""
    from hvd_gradcomp.torch.monitoring.probing import Probe

    trained = [p for p in model.module.parameters() if p.requires_grad]
    probe = Probe(model.module.named_parameters(), every=1)
    for _ in range(steps):
        for p, gradient in zip(trained, gradients.draw()):
            p.grad = gradient
        probe.step(gradients.squares or None)
    model.module.zero_grad(set_to_none=True)
    last = [reading for reading in probe.readings if reading.step == probe.readings[-1].step]
    weights = [reading.size for reading in last]
    means: dict[str, float | None] = {}
    for name in Reading._fields[Reading._fields.index("entropy") :]:
        values = [getattr(reading, name) for reading in last]
        total = None if None in values else sum(w * x for w, x in zip(weights, values))
        means[name] = None if total is None else total / sum(weights)
    return means


def _advice(
    results: Sequence[tuple[MethodResult, Sequence[float]]],
    link: Link,
    pass_: Backward,
    ranks: int,
    gentle: bool = False,
) -> tuple[list[Row], Verdict]:
    """Return a row for each method, the dense one first, and the recommendation.

    Args:
        results: the methods, and measured times of whole exchanges over the link.
        link, pass_: as measured.
        ranks: number of ranks to predict for. If it is not the link's, the prediction is
            corrected by the model's error in seconds on the link.
        gentle: True to prefer quantizers to faster methods.
    """
    compute = pass_.forward + pass_.seconds

    def case(one: MethodResult, measured: Sequence[float]) -> Case:
        costs, every = one.costs, one.method.every
        beyond = ranks != link.ranks
        aside = 0.0
        if beyond and measured:
            aside = statistics.median(measured) - costs.seconds(link, link.ranks)

        def step_at(bandwidth: float) -> float:
            other_link = link.with_bandwidth(bandwidth)
            seconds = one.step_seconds(other_link, ranks, pass_.seconds)
            return pass_.forward + max(seconds + aside / every, pass_.seconds)

        exchange = costs.seconds(link, ranks)
        exposed = one.step_seconds(link, ranks, pass_.seconds) - pass_.seconds
        hidden = max(exchange - every * exposed, 0.0)
        exchange = max(exchange + aside, 1e-9)
        known = () if beyond else measured
        error = recommend.BEYOND if beyond else recommend.ERROR
        return Case(
            costs.name, exchange, hidden, known, step_at, compute, pass_.seconds, error, every
        )

    cases = [case(one, measured) for one, measured in results]
    estimates = [recommend.estimate(one, cases[0], link.bandwidth) for one in cases]
    step_seconds = [estimate.step.middle for estimate in estimates]
    speedups = _by_hosts(step_seconds, [one for one, _ in results], link, pass_, ranks)
    rows = []
    for (one, measured), what, estimate, hosts in zip(results, cases, estimates, speedups):
        took = statistics.median(measured) if measured else None
        is_dense = what is cases[0]
        rows.append(
            Row(
                method=one.costs.name,
                element_ratio=one.elements if math.isfinite(one.elements) else None,
                byte_ratio=one.bytes,
                predicted_ms=1e3 * what.predicted,
                measured_ms=None if took is None else 1e3 * took,
                error=None if took is None else one.costs.seconds(link, link.ranks) / took - 1,
                exchange_span_ms=_milliseconds(estimate.exchange),
                step_ms=1e3 * estimate.step.middle,
                step_span_ms=_milliseconds(estimate.step),
                faster=Span(1.0, 1.0, 1.0) if is_dense else estimate.faster,
                local_ms={n: 1e3 * (compute + estimate.exchange.middle / n) for n in EVERY},
                pays_below=None if is_dense else estimate.pays_below.middle,
                pays_below_span=None if is_dense else estimate.pays_below,
                hosts=hosts,
                every=one.method.every,
            )
        )
    sending = [
        estimate
        for (one, _), estimate in zip(results[1:], estimates[1:])
        if math.isfinite(one.elements) and one.method.every == 1
    ]
    quantizers = [
        one.costs.name for one, _ in results if gentle and one.method.compressor.is_quantizer
    ]
    return rows, recommend.decide(sending, link.bandwidth, quantizers)


def _milliseconds(seconds: Span) -> Span:
    return Span(*(1e3 * x for x in seconds))


def _fewer_exchanges(
    methods: Sequence[ExchangeMethod], rows: Sequence[Row], pass_: Backward, hosts: int
) -> dict[str, Any] | None:
    """Return the local steps to recommend, for JSON; None for an exchange in each step."""
    exchanges: dict[Compressor, Span] = {}
    steps: dict[Compressor, Span] = {}
    for method, row in zip(methods[1:], rows[1:]):
        if method.compressor not in exchanges or method.every > 1:  # a measured round is nearest
            exchanges[method.compressor] = _seconds(row.exchange_span_ms)
        if method.every == 1:
            steps[method.compressor] = _seconds(row.step_span_ms)
    compute = pass_.forward + pass_.seconds
    if not compute:
        return None
    plain = _seconds(rows[0].step_span_ms)
    choice = fewer_exchanges.choose(exchanges, steps, plain, compute, hosts)
    return None if choice is None else local_steps_of(choice)


def _seconds(milliseconds: Sequence[float]) -> Span:
    return Span(*(1e-3 * x for x in milliseconds))


def local_steps_of(choice: fewer_exchanges.Choice) -> dict[str, Any]:
    """Convert recommended local steps for JSON."""
    return {
        "use": brief(choice.setting.compressor),
        "every": choice.setting.every,
        "step_span_ms": [1e3 * x for x in choice.step],
        "steps_needed": list(choice.length),
        "sooner": list(choice.sooner),
    }


def _by_hosts(
    step_seconds: Sequence[float],
    methods: Sequence[MethodResult],
    link: Link,
    pass_: Backward,
    ranks: int,
) -> list[dict[int, float]]:
    """Predict each method's speedup of a step on other numbers of hosts.

    Args:
        step_seconds: estimates for a step of each method among `ranks` ranks.
        methods: the dense one first.
        link, pass_, ranks: as in `_advice`.
    """

    def steps(method: MethodResult, here: float) -> dict[int, float]:
        seconds = {n: method.step_seconds(link, n, pass_.seconds) for n in (*HOSTS, ranks)}
        least = pass_.forward + pass_.seconds
        return {n: max(here + seconds[n] - seconds[ranks], least, 1e-9) for n in HOSTS}

    times = list(map(steps, methods, step_seconds))
    return [{n: times[0][n] / by_hosts[n] for n in HOSTS} for by_hosts in times]


def _verdict_json(rows: Sequence[Row], verdict: Verdict) -> dict[str, Any]:
    """Convert the verdict for JSON."""
    errors = [abs(row.error) for row in rows if row.error is not None]
    best = None if verdict.best is None else verdict.best.name
    faster = None if verdict.faster is None else verdict.faster.name
    return {
        "answer": verdict.answer,
        "use": best if verdict.answer == "use" else None,
        "fastest": faster or best,
        "median_error": statistics.median(errors) if errors else None,
    }
