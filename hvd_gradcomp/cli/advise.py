"""`hvd-gradcomp advise`: whether compression pays, and which."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import click

from hvd_gradcomp.aggregator import Compressor
from hvd_gradcomp.cli import options
from hvd_gradcomp.cli.bench import DENSE, about, settle_rounds
from hvd_gradcomp.cost import Bucket, Dense, Link, Way, break_even
from hvd_gradcomp.description import brief

if TYPE_CHECKING:
    from hvd_gradcomp.models import Model
    from hvd_gradcomp.torch.measure import Backward, Gradients

Ways = Sequence[Union[Way, Dense]]  # the dense one first

HOSTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ANCHORS = (2, 4, 16)  # ranks among which the work is measured, to know it among others
WORTH = 0.9  # of the dense step's time: what takes more is not worth another method


@click.command("advise")
@options.with_model
@options.with_methods
@click.option(
    "-r", "--rounds", type=click.IntRange(1), default=5, show_default=True, help="Of each way."
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
    """Say which compressor makes a step fastest on this link, or that none does.

    Run it as you train, on the hosts that you train on:

    \b
        horovodrun -np 2 -H host1:1,host2:1 hvd-gradcomp advise --model resnet50
        horovodrun -np 2 -H host1:1,host2:1 hvd-gradcomp advise --model train:factory
        hvd-gradcomp advise --model train:factory --bandwidth 1000

    It measures forward and backward, each compressor's own work without any link, and the link by
    collectives of several sizes, all on CPUs. From these it predicts what an exchange takes, and a
    step but for the optimizer's update: the cost model of Tsuzuku et al. 2018, section 5, with
    work, latency and overlap. Beside the prediction stands what an exchange really took. "pays
    below" is the bandwidth at which a step takes as long as without compression. The second table
    is how many times faster a step is on other numbers of hosts with one rank each. Of a model of
    your own with a loss, probes say what is in its gradients.

    It says nothing about accuracy: `hvd-gradcomp compare` trains with each.
    """
    options.check_png(png_path)
    horovod = options.started()
    from hvd_gradcomp.models import ModelError, load
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
    say = click.echo if horovod.rank() == 0 else (lambda *_, **__: None)
    if horovod.local_size() > 1 and horovod.cross_size() > 1:
        say("several ranks on a host: what is called hosts below are ranks", err=True)
    measures = measures and ranks > 1 and bandwidth is None
    try:
        model = load(model_name, batch_size=batch_size)
        passes = [backward(model)[1] for _ in range(3 if model.loss else 0)]
        probed = _probed(model) if model.real else {}
        gradients = Gradients(model, real=8 if model.real else 0)
    except ModelError as error:
        raise click.UsageError(str(error)) from error
    say(f"{model_name}: {gradients.elements:,} elements, {ranks} ranks; measuring", err=True)
    if bandwidth is None:
        found = link(rounds=rounds, latency=1e-6 * latency)
    else:
        found = Link.of(1e6 * bandwidth, max(ranks, 2), 1e-6 * latency)
    everybody = gather_objects(
        passes, list[Backward], "gradcomp.backward", horovod.global_process_set
    )
    pass_ = _middle(everybody, len(gradients.layers))
    sizes = [4.0 * math.prod(shape) for _, shape in gradients.layers]
    ways: list[Way | Dense] = [Dense(DENSE, list(zip(pass_.ready, sizes)))]
    ratios = [1.0]  # elements over elements sent
    measured = [measure(DenseExchange(), gradients, rounds, 1).median()] if measures else []
    for compressor in options.chosen(texts, gradients.scale):
        say(f"  {brief(compressor)}", err=True)
        try:
            way, ratio = _way(compressor, gradients, found.ranks, rounds, pass_)
        except UnmeasurableError as error:
            say(f"    left out: {error}", err=True)
            continue
        ways.append(way)
        ratios.append(ratio)
        if measures:
            exchange = CompressedExchange(compressor, gradients.layers)
            row = measure(exchange, gradients, rounds, settle_rounds(compressor))
            measured.append(row.median())
    if horovod.rank() == 0:
        advice = {
            **about(horovod, model_name),
            "forward_ms": 1e3 * pass_.forward,
            "backward_ms": 1e3 * pass_.seconds,
            "bandwidth": found.bandwidth,
            "link": {"ranks": found.ranks, "latency": found.latency, "curves": found.curves},
            "probes": probed,
            **_advice(ways, ratios, found, pass_, measured),
        }
        click.echo(_text(advice))
        options.write_json(json_path, advice)
        if png_path is not None:
            _draw(png_path, advice)
    horovod.shutdown()


def _middle(everywhere: Sequence[Sequence[Backward]], layers: int) -> Backward:
    """The median pass of the slowest rank; without any, all gradients are there at once."""
    from hvd_gradcomp.torch.measure import Backward

    if not everywhere[0]:
        return Backward(0.0, 0.0, (0.0,) * layers)
    middle = [sorted(passes, key=lambda p: p.seconds)[len(passes) // 2] for passes in everywhere]
    return max(middle, key=lambda p: p.seconds)


def _way(
    compressor: Compressor, gradients: Gradients, ranks: int, rounds: int, pass_: Backward
) -> tuple[Way, float]:
    """What a compressor costs, by all ranks' clocks; and its element ratio."""
    import horovod.torch as horovod

    from hvd_gradcomp.torch.engine import gather_objects
    from hvd_gradcomp.torch.measure import alone

    settle = settle_rounds(compressor)
    costs = {
        count: alone(compressor, gradients, count, rounds, settle, pass_.ready)
        for count in sorted({ranks, *ANCHORS})
    }
    mine = [cost.rounds for cost in costs.values()]
    world = horovod.global_process_set
    everywhere = gather_objects(mine, list[list[list[Bucket]]], "gradcomp.costs", world)
    by_ranks = {count: [found[i] for found in everywhere] for i, count in enumerate(costs)}
    return Way(brief(compressor), by_ranks), costs[ranks].element_ratio


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
    ways: Ways, ratios: Sequence[float], link: Link, pass_: Backward, measured: Sequence[float]
) -> dict[str, Any]:
    """Predictions, the verdict, and other numbers of hosts."""
    ranks, dense = link.ranks, ways[0]

    def step(way: Way | Dense, ranks: int) -> float:
        return pass_.forward + way.seconds(link, ranks, pass_.seconds)

    rows: list[dict[str, Any]] = []
    for place, way in enumerate(ways):
        exchange = way.seconds(link, ranks)
        rows.append(
            {
                "way": way.name,
                "element_ratio": ratios[place] if math.isfinite(ratios[place]) else None,
                "predicted_ms": 1e3 * exchange,
                "measured_ms": 1e3 * measured[place] if measured else None,
                "error": exchange / measured[place] - 1 if measured else None,
                "step_ms": 1e3 * step(way, ranks),
                "pays_below": None if place == 0 else _pays_below(way, dense, link, pass_.seconds),
                "hosts": {hosts: step(dense, hosts) / step(way, hosts) for hosts in HOSTS},
            }
        )
    fastest = _fastest(rows)
    worth = fastest["step_ms"] < WORTH * rows[0]["step_ms"]
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    return {
        "rows": rows,
        "use": fastest["way"] if worth else None,
        "fastest": fastest["way"],
        "median_error": statistics.median(errors) if errors else None,
    }


def _fastest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of those that send anything."""
    return min((row for row in rows if row["element_ratio"]), key=lambda row: row["step_ms"])


def _pays_below(way: Way | Dense, dense: Way | Dense, link: Link, backward: float) -> float:
    def gain(bandwidth: float) -> float:
        there = link.with_bandwidth(bandwidth)
        return dense.seconds(there, link.ranks, backward) - way.seconds(there, link.ranks, backward)

    return break_even(gain)


def _text(advice: dict[str, Any]) -> str:
    rows, measured = advice["rows"], advice["median_error"] is not None
    dense = rows[0]["step_ms"]
    parts = [
        f"link: {_rate(advice['bandwidth'])} at {advice['link']['ranks']} ranks; forward: "
        f"{advice['forward_ms']:.0f} ms, backward: {advice['backward_ms']:.0f} ms"
        + ("" if advice["backward_ms"] else " (no loss: a step is an exchange)")
    ]
    if advice["probes"]:
        found = advice["probes"]
        parts.append(
            "gradients, by probes: {entropy:.1f} bits an element; would send: Variance "
            "{density_variance:.2%}, EGC {density_egc:.2%}, DGC {density_dgc:.2%}".format(**found)
        )
        if found["mutual_information"] is not None:
            parts[-1] += "; two ranks share {mutual_information:.1f} bits".format(**found)
    head = ["way", "element ratio", "exchange, predicted ms"]
    head += ["measured ms", "error"] if measured else []
    head += ["step, predicted ms", "times faster", "pays below"]
    parts.append(
        options.table(
            head,
            [
                (
                    row["way"],
                    f"{row['element_ratio']:.0f}" if row["element_ratio"] else "sends nothing",
                    f"{row['predicted_ms']:.1f}",
                    *((f"{row['measured_ms']:.1f}", f"{row['error']:+.0%}") if measured else ()),
                    f"{row['step_ms']:.1f}",
                    f"{dense / row['step_ms']:.2f}",
                    "" if row["pays_below"] is None else _rate(row["pays_below"]),
                )
                for row in rows
            ],
        )
    )
    parts.append(
        options.table(
            ("times faster on hosts:", *map(str, HOSTS)),
            [(row["way"], *(f"{row['hosts'][hosts]:.1f}" for hosts in HOSTS)) for row in rows[1:]],
        )
    )
    if measured:
        parts.append(f"median error of the prediction: {advice['median_error']:.0%}")
    parts.append(_verdict(advice))
    return "\n\n".join(parts)


def _verdict(advice: dict[str, Any]) -> str:
    dense, *_ = advice["rows"]
    best = _fastest(advice["rows"])
    if advice["use"] is None:
        return (
            f"Use none: a step takes {dense['step_ms']:.0f} ms without compression, and no "
            f"compressor saves a tenth of that (the fastest: {best['way']}, "
            f"{best['step_ms']:.0f} ms)."
        )
    pays = f"It pays on links slower than {_rate(best['pays_below'])}."
    if math.isinf(best["pays_below"]):
        pays = "It pays on any link."
    written = re.sub(r"\b([A-Z]\w*)\(", r"\1Compressor(", best["way"])  # as in Python
    return (
        f"Use {written}: a step takes {best['step_ms']:.0f} ms instead of "
        f"{dense['step_ms']:.0f} ms. {pays} "
        "Whether accuracy holds: hvd-gradcomp compare."
    )


def _rate(bits_per_second: float) -> str:
    """In the unit that suits it."""
    if bits_per_second == 0:
        return "never"
    if math.isinf(bits_per_second):
        return "any"
    for unit, size in (("Gb/s", 1e9), ("Mb/s", 1e6)):
        if bits_per_second >= size:
            return f"{bits_per_second / size:.3g} {unit}"
    return f"{bits_per_second / 1e3:.3g} kb/s"


def _draw(path: Path, advice: dict[str, Any]) -> None:
    """Times faster by hosts, a line for each way."""
    with options.drawing(path, 9, 5) as axes:
        for row in advice["rows"][1:]:
            axes.plot(HOSTS, [row["hosts"][hosts] for hosts in HOSTS], marker=".", label=row["way"])
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(
            xscale="log", yscale="log", xlabel="hosts", ylabel="times faster than dense, a step"
        )
        axes.set_xticks(HOSTS, [str(hosts) for hosts in HOSTS])
        axes.set_title(f"{advice['model']} at {_rate(advice['bandwidth'])}, predicted")
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
