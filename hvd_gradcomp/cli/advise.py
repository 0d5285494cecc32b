"""`hvd-gradcomp advise`: whether compression pays, and which."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hvd_gradcomp.cli import advised, launching, options, output
from hvd_gradcomp.cli.advised import HOSTS
from hvd_gradcomp.cli.bench import DENSE, about, warm_up_rounds
from hvd_gradcomp.cli.output import counted
from hvd_gradcomp.cli.progress import Progress
from hvd_gradcomp.core.aggregator import Compressor
from hvd_gradcomp.foundation.cost import Bucket, Dense, Link, Way
from hvd_gradcomp.planning import advice
from hvd_gradcomp.planning.advice import Case, Verdict
from hvd_gradcomp.planning.description import brief

if TYPE_CHECKING:
    from hvd_gradcomp.planning.models import Model
    from hvd_gradcomp.torch.measure import Backward, Gradients

ANCHORS = (2, 4, 16)  # ranks among which the work is measured, to know it among others


@click.command("advise", short_help="Say whether to compress on this link, and how.")
@launching.with_ranks
@options.with_model
@options.with_methods
@click.option(
    "-r",
    "--rounds",
    type=click.IntRange(advice.ROUNDS),
    default=advice.ROUNDS,
    show_default=True,
    help="Of each way; more of them narrow what it may be.",
)
@click.option(
    "-b",
    "--batch-size",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Samples a rank, for the backward pass of a built-in model.",
)
@click.option(
    "--bandwidth",
    type=click.FloatRange(0, min_open=True),
    metavar="MBIT",
    help="Mb/s of a link that is not here; needed without other ranks to measure one with.",
)
@click.option(
    "--latency",
    type=click.FloatRange(0),
    default=50.0,
    show_default=True,
    metavar="MICROSECONDS",
    help="From host to host, for more hosts than are here.",
)
@click.option(
    "--measure/--no-measure",
    "measures",
    default=True,
    show_default=True,
    help="Whether whole exchanges are measured beside what is predicted.",
)
@options.with_files
def command(
    model_name: str,
    texts: Sequence[str],
    rounds: int,
    batch_size: int,
    bandwidth: float | None,
    latency: float,
    measures: bool,
    json_path: Path | None,
    png_path: Path | None,
) -> None:
    """Say which compressor makes a step fastest on this link, or none, or that it cannot say.

    Run it as you train, on the hosts that you train on:

    \b
        hvd-gradcomp advise -np 2 -H host1:1,host2:1 --model resnet50
        hvd-gradcomp advise -np 2 -H host1:1,host2:1 --model train:factory
        hvd-gradcomp advise --model train:factory --bandwidth 1000

    It measures forward and backward, whole exchanges, each compressor's own work without any link,
    and the link by collectives of several sizes, all on CPUs. From the last three a model predicts
    what an exchange takes on other links and numbers of hosts: the cost model of Tsuzuku et al.
    2018, section 5, with work, latency and overlap. Where an exchange was measured, that counts.
    It knows nothing of GPUs, where compressing costs something else: see "On a GPU" on the site.

    "model" is the predicted exchange, "took" the measured one, "step" all but the optimizer's
    update, in ms; "faster" is how many times faster than without compression. From-to is where a
    median lies nine times of ten, or 30 % around a prediction. "pays below" is the bandwidth at
    which a step takes as long as without. A compressor is recommended if it saves a tenth of a step
    in the worst case; if some would in the best case only, it says so.

    The second table is how many times faster a step is on other numbers of hosts, one rank each. Of
    a model of your own with a loss, probes say what is in its gradients. It says nothing about
    accuracy: `hvd-gradcomp compare` trains with each.
    """
    options.check_png(png_path)
    horovod = options.started()
    from hvd_gradcomp.planning.models import ModelError, load
    from hvd_gradcomp.torch.engine import gather_objects
    from hvd_gradcomp.torch.measure import (
        Backward,
        CompressedExchange,
        DenseExchange,
        Gradients,
        UnmeasurableError,
        backward,
        link,
        measure,
    )

    ranks = horovod.size()
    if ranks == 1 and bandwidth is None:
        raise click.UsageError(
            "one rank alone has no link to measure: start it with horovodrun, or give --bandwidth"
        )
    first = horovod.rank() == 0
    if first and horovod.local_size() > 1 and horovod.cross_size() > 1:
        click.echo("several ranks on a host: what is called hosts below are ranks", err=True)
    measures = measures and ranks > 1 and bandwidth is None
    try:
        model = load(model_name, batch_size=batch_size)
        passes = [backward(model)[1] for _ in range(3 if model.loss else 0)]
        probed = _probed(model) if model.real else {}
        gradients = Gradients(model, real=8 if model.real else 0)
    except ModelError as error:
        raise click.UsageError(str(error)) from error
    compressors = options.chosen(texts, gradients.scale)
    everybody = gather_objects(
        passes, list[Backward], "gradcomp.backward", horovod.global_process_set
    )
    pass_ = _middle(everybody, len(gradients.layers))
    sizes = [4.0 * math.prod(shape) for _, shape in gradients.layers]
    ways: list[tuple[Found, list[float]]] = []
    with Progress(len(compressors) + 2, first) as progress:
        size = counted(gradients.elements, "element")
        progress.say(f"{model_name}: {size}, {counted(ranks, 'rank')}")
        progress.begin("the link")
        if bandwidth is None:
            found = link(rounds=rounds, latency=1e-6 * latency)
        else:
            found = Link.of(1e6 * bandwidth, max(ranks, 2), 1e-6 * latency)
        progress.end()
        plain = measure(DenseExchange(), gradients, (rounds + 1) // 2, 1) if measures else None
        for compressor in compressors:
            progress.begin(brief(compressor))
            try:
                way = _way(compressor, gradients, found.ranks, rounds, pass_)
            except UnmeasurableError as error:
                progress.say(f"left out: {error}")
            else:
                times = []
                if measures:
                    exchange = CompressedExchange(compressor, gradients.layers)
                    row = measure(exchange, gradients, rounds, warm_up_rounds(compressor))
                    times = [one.total for one in row.times]
                ways.append((way, times))
            progress.end()
        progress.begin(DENSE)
        if plain is not None:  # half of them at the end: what changes meanwhile is in their spread
            plain.times += measure(DenseExchange(), gradients, rounds // 2).times
        progress.end()
    if first:
        dense = Found(Dense(DENSE, list(zip(pass_.ready, sizes))), 1.0, 1.0)
        times = [one.total for one in plain.times] if plain else []
        content = {
            **about(horovod, model_name),
            "forward_ms": 1e3 * pass_.forward,
            "backward_ms": 1e3 * pass_.seconds,
            "bandwidth": found.bandwidth,
            "link": {"ranks": found.ranks, "latency": found.latency, "curves": found.curves},
            "probes": probed,
        }
        rows, verdict = _advice([(dense, times), *ways], found, pass_)
        content |= {"rows": rows, **_said(rows, verdict)}
        output.report(json_path, content, advised.text(content, verdict))
        if png_path is not None:
            advised.draw(png_path, content)
    horovod.shutdown()


class Found(NamedTuple):
    """A way as it was measured alone.

    Attributes:
        way: what it costs, for the model.
        elements, bytes: of the gradient over those that are sent; inf if nothing is.
    """

    way: Way | Dense
    elements: float
    bytes: float


def _middle(everywhere: Sequence[Sequence[Backward]], layers: int) -> Backward:
    """The median pass of the slowest rank; without any, all gradients are there at once."""
    from hvd_gradcomp.torch.measure import Backward

    if not everywhere[0]:
        return Backward(0.0, 0.0, (0.0,) * layers)
    middle = [sorted(passes, key=lambda p: p.seconds)[len(passes) // 2] for passes in everywhere]
    return max(middle, key=lambda p: p.seconds)


def _way(
    compressor: Compressor, gradients: Gradients, ranks: int, rounds: int, pass_: Backward
) -> Found:
    """What a compressor costs, by all ranks' clocks; and what it saves.

    Raises:
        UnmeasurableError: see `alone`.
    """
    import horovod.torch as horovod

    from hvd_gradcomp.torch.engine import gather_objects
    from hvd_gradcomp.torch.measure import alone

    warm_up = warm_up_rounds(compressor)
    costs = {
        count: alone(compressor, gradients, count, rounds, warm_up, pass_.ready)
        for count in sorted({ranks, *ANCHORS})
    }
    mine = [cost.rounds for cost in costs.values()]
    world = horovod.global_process_set
    everywhere = gather_objects(mine, list[list[list[Bucket]]], "gradcomp.costs", world)
    by_ranks = {count: [found[i] for found in everywhere] for i, count in enumerate(costs)}
    own = {"alltoall": 1 - 1 / ranks}  # a part of an alltoall stays where it is
    sent = [
        sum(size * own.get(kind, 1.0) for bucket in one for kind, size in bucket.asks)
        for one in costs[ranks].rounds
    ]
    mean = statistics.fmean(sent)
    ratio = 4 * gradients.elements / mean if mean else math.inf
    return Found(Way(brief(compressor), by_ranks), costs[ranks].element_ratio, ratio)


def _probed(model: Model, steps: int = 8) -> dict[str, float | None]:
    """What probes find in so many steps' gradients: means over elements; None if unknown."""
    from hvd_gradcomp.torch.probing import Probe

    probe = Probe(model.module.named_parameters(), every=1)
    for _ in range(steps):
        model.module.zero_grad(set_to_none=True)
        model.loss().backward()  # type: ignore[misc]
        probe.step()
    model.module.zero_grad(set_to_none=True)
    last = [reading for reading in probe.readings if reading.step == probe.readings[-1].step]
    weights = [reading.size for reading in last]
    fields: dict[str, list[Any]] = {
        "entropy": [reading.entropy for reading in last],
        "mutual_information": [reading.mutual_information for reading in last],
        "density_variance": [reading.density_variance for reading in last],
        "density_egc": [reading.density_egc for reading in last],
        "density_dgc": [reading.density_dgc for reading in last],
    }
    return {
        name: None if None in found else sum(w * x for w, x in zip(weights, found)) / sum(weights)
        for name, found in fields.items()
    }


def _advice(
    found: Sequence[tuple[Found, Sequence[float]]], link: Link, pass_: Backward
) -> tuple[list[dict[str, Any]], Verdict]:
    """A row for each way, the dense one first, and what to do."""
    ranks, compute = link.ranks, pass_.forward + pass_.seconds

    def case(way: Way | Dense, measured: Sequence[float]) -> Case:
        def step_at(bandwidth: float) -> float:
            there = link.with_bandwidth(bandwidth)
            return pass_.forward + way.seconds(there, ranks, pass_.seconds)

        exchange = way.seconds(link, ranks)
        exposed = way.seconds(link, ranks, pass_.seconds) - pass_.seconds
        hidden = max(exchange - exposed, 0.0)
        return Case(way.name, exchange, hidden, measured, step_at, compute, pass_.seconds)

    cases = [case(one.way, measured) for one, measured in found]
    estimates = [advice.estimate(one, cases[0], link.bandwidth) for one in cases]
    rows = []
    for (one, measured), what, estimate in zip(found, cases, estimates):
        took = statistics.median(measured) if measured else None
        rows.append(
            {
                "way": one.way.name,
                "element_ratio": one.elements if math.isfinite(one.elements) else None,
                "byte_ratio": one.bytes,
                "predicted_ms": 1e3 * what.predicted,
                "measured_ms": None if took is None else 1e3 * took,
                "error": None if took is None else what.predicted / took - 1,
                "exchange_span_ms": [1e3 * x for x in estimate.exchange],
                "step_ms": 1e3 * estimate.step.middle,
                "step_span_ms": [1e3 * x for x in estimate.step],
                "faster": list(estimate.faster) if what is not cases[0] else [1.0, 1.0, 1.0],
                "pays_below": None if what is cases[0] else estimate.pays_below.middle,
                "pays_below_span": None if what is cases[0] else list(estimate.pays_below),
            }
        )
    _elsewhere(rows, [one.way for one, _ in found], link, pass_)
    sending = [
        estimate
        for (one, _), estimate in zip(found[1:], estimates[1:])
        if math.isfinite(one.elements)
    ]
    return rows, advice.decide(sending, link.bandwidth)


def _elsewhere(
    rows: Sequence[dict[str, Any]], ways: Sequence[Way | Dense], link: Link, pass_: Backward
) -> None:
    """How many times faster a step is on other numbers of hosts: by the model, from here on."""

    def steps(place: int) -> dict[int, float]:
        seconds = {n: ways[place].seconds(link, n, pass_.seconds) for n in (*HOSTS, link.ranks)}
        here = 1e-3 * rows[place]["step_ms"]
        least = pass_.forward + pass_.seconds
        return {n: max(here + seconds[n] - seconds[link.ranks], least, 1e-9) for n in HOSTS}

    dense = steps(0)
    for place, row in enumerate(rows):
        mine = steps(place)
        row["hosts"] = {hosts: dense[hosts] / mine[hosts] for hosts in HOSTS}


def _said(rows: Sequence[dict[str, Any]], verdict: Verdict) -> dict[str, Any]:
    """The verdict, for JSON."""
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    best = None if verdict.best is None else verdict.best.name
    return {
        "answer": verdict.answer,
        "use": best if verdict.answer == "use" else None,
        "fastest": best,
        "median_error": statistics.median(errors) if errors else None,
    }
