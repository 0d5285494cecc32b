"""Command `hvd-gradcomp bench`: times exchanges by compressor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvd_gradcomp.cli import launching, options, output, style
from hvd_gradcomp.cli.options import figure
from hvd_gradcomp.cli.output import counted
from hvd_gradcomp.cli.progress import Progress
from hvd_gradcomp.core.version import __version__
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.planning.methods import ExchangeMethod

if TYPE_CHECKING:
    from hvd_gradcomp.tuning.job import Job
    from hvd_gradcomp.tuning.measure import Gradients, Row

DENSE = "dense (stock Horovod)"
PARTS = ("encode", "collective", "decode")  # of an exchange, in order
FEW = 3  # methods of which a round is measured first
WARM_UP = 64  # steps until threshold methods send a steady share of noise


_SHARE_OF_ROUNDS = (
    "local(...): a step's share of a round of LocalSteps, in which the ranks also compare what "
    'they do, and the outer optimizer steps; "decode" is all but waiting.'
)


@click.command("bench", short_help="Time exchanges of a model's gradients.")
@launching.with_ranks
@options.with_model
@options.with_methods
@options.with_shards
@options.with_preview
@click.option(
    "-r",
    "--rounds",
    type=click.IntRange(1),
    default=9,
    show_default=True,
    help="Rounds of each method.",
)
@click.option(
    "--settle",
    "uncounted",
    type=click.IntRange(0),
    help=f"Warm-up rounds, not counted. Default: 3, and {WARM_UP} with thresholds.",
)
@options.with_files
def command(
    model_name: str,
    texts: Sequence[str],
    shards: int,
    preview: bool,
    rounds: int,
    uncounted: int | None,
    json_path: Path | None,
    png_path: Path | None,
) -> None:
    """Time whole exchanges of a model's gradients, one method after the other.

    Between several ranks they cross the link between the hosts; alone, what is left is a rank's own
    work. With -np it starts ranks itself; under torchrun and horovodrun it does the same:

    \b
        hvd-gradcomp bench --model lstm
        hvd-gradcomp bench -np 2 --json bench.json --png bench.png
        torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d \\
            --rdzv-endpoint host1:29400 -m hvd_gradcomp bench
        horovodrun -np 2 -H host1:1,host2:1 hvd-gradcomp bench

    Each round begins together and ends with the slowest rank. "ms" is the median, "+-" half of
    least to most; "encode" the time until all gradients are handed over, "wait" for what travels,
    "decode" the rest, as shares of "ms"; "faster" compares medians with the dense allreduce of
    stock Horovod or DistributedDataParallel, of which half the rounds are run at the beginning and
    half at the end; "bytes" and "elements" are those of the gradients over those that were sent.
    Gradients are noise of variance 1, but those of your own model with a loss, and all is on CPUs.
    Second moments are those of samples where your factory calls track_moments, else those of the
    step. Methods that learn have learned nothing useful, which costs the same.
    """
    options.check_png(png_path)
    job = options.job(shards)
    from hvd_gradcomp.tuning.measure import (
        DenseExchange,
        Gradients,
        UnmeasurableError,
        exchange_of,
        measure,
    )
    from hvd_gradcomp.tuning.models import ModelError, load

    try:
        model = load(model_name, shapes_only=True)
        gradients = Gradients(job, model, real=8 if model.real else 0)
    except ModelError as error:
        raise click.UsageError(str(error)) from error
    methods = options.chosen(texts, gradients.scale)
    first, uncompressed = job.rank() == 0, dense_title(job)
    with Progress(len(methods) + 2, first) as progress:
        progress.say(
            f"{model_name}: {counted(len(gradients.layers), 'layer')}, "
            f"{counted(gradients.elements, 'element')}, {counted(job.size(), 'rank')} on "
            f"{counted(job.hosts(), 'host')}, over {job.library}{shards_of(job)}"
        )
        progress.begin(uncompressed)
        dense = measure(DenseExchange(job), gradients, (rounds + 1) // 2, 1)
        progress.end()
        if preview:
            progress.say(_first_look(job, methods, gradients, dense, rounds, uncounted))
        rows: dict[str, Row] = {uncompressed: dense}
        for method in methods:
            progress.begin(method.name)
            before = warm_up_rounds(method.compressor, uncounted)
            try:
                exchange = exchange_of(job, method, gradients)
            except UnmeasurableError as error:
                progress.say(f"left out: {method.name}: {error}")
            else:
                row = measure(exchange, gradients, rounds, before)
                rows[method.name] = row.per_step(method.every)
            progress.end()
        progress.begin(uncompressed)
        if rounds > 1:
            dense.times += measure(DenseExchange(job), gradients, rounds // 2).times
        progress.end()
    if first:
        size = 4 * gradients.elements
        figures = [figures_of(name, row, dense, size) for name, row in rows.items()]
        content = {**about(job, model_name), "moments": gradients.moments, "rows": figures}
        notes = options.moments_used(rows, gradients.moments)
        if any(method.every > 1 and method.name in rows for method in methods):
            notes.append(options.wrapped(_SHARE_OF_ROUNDS))
        output.report(json_path, content, "\n\n".join([table(figures), *notes]))
        if png_path is not None:
            _draw(png_path, figures, f"{model_name}, {counted(job.size(), 'rank')}")


def _first_look(
    job: Job,
    methods: Sequence[ExchangeMethod],
    gradients: Gradients,
    dense: Row,
    rounds: int,
    uncounted: int | None,
) -> str:
    """Measure a round of a few methods; return how long they took, and all of it will take.

    Args:
        job, methods, gradients: to measure.
        dense: rounds without compression.
        rounds, uncounted: of each method.
    """
    from hvd_gradcomp.tuning.measure import UnmeasurableError, exchange_of, measure

    took: dict[str, float] = {}
    for method in methods[:FEW]:
        try:
            exchange = exchange_of(job, method, gradients)
        except UnmeasurableError:
            continue  # which is said when it is its turn
        took[method.name] = measure(exchange, gradients, 1, 1).median() / method.every
    each = [dense.median(), *took.values()]
    count = sum(rounds + warm_up_rounds(method.compressor, uncounted) for method in methods)
    left = count * sum(each) / len(each)
    looks = "; ".join(f"{name} {figure(1e3 * seconds)}" for name, seconds in took.items())
    return (
        f"first look, one round, in ms: without compression {figure(1e3 * dense.median())}; "
        f"{looks}. All of it takes about {output.duration(left)}"
    )


def warm_up_rounds(compressor: Compressor, uncounted: int | None = None) -> int:
    """Return the rounds until the compressor's payloads have their final size, or `uncounted`."""
    if uncounted is not None:
        return uncounted
    return WARM_UP if compressor.sends_any_number else 3


def dense_title(job: Job) -> str:
    """Return the name of the exchange without this package, for tables."""
    if job.library == "Horovod":
        return DENSE
    return "dense (HSDP)" if job.shards > 1 else "dense (DDP)"


def shards_of(job: Job) -> str:
    """Return what to say of a sharded model; "" for one that is not."""
    return f", the shards of {counted(job.shards, 'rank')}" if job.shards > 1 else ""


def about(job: Job, model_name: str) -> dict[str, Any]:
    """Return the model, the job and the version, for JSON."""
    return {
        "model": model_name,
        "ranks": job.size(),
        "hosts": job.hosts(),
        "library": job.library,
        "shards": job.shards,
        "hvd_gradcomp": __version__,
    }


def figures_of(name: str, row: Row, dense: Row, size: int) -> dict[str, Any]:
    """Convert a row to milliseconds and bytes; `size` is the gradients' bytes.

    Parts are scaled to the median: the medians of the parts need not sum to it.
    """
    totals = [t.total for t in row.times]
    parts = {part: row.median(part) for part in PARTS}
    share = row.median() / (sum(parts.values()) or 1.0)
    return {
        "method": name,
        "ms": 1e3 * row.median(),
        "min": 1e3 * min(totals),
        "max": 1e3 * max(totals),
        **{part: 1e3 * share * seconds for part, seconds in parts.items()},
        "times_faster": dense.median() / row.median(),
        "bytes": row.bytes_sent,
        "byte_ratio": size / row.bytes_sent if row.bytes_sent else math.inf,
        "element_ratio": row.element_ratio,
        "rounds": len(totals),
    }


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Format the figures as a table."""
    head = ("method", "ms", "+-", "encode", "wait", "decode", "faster", "bytes", "elem-\nents")
    rows = [
        (
            f["method"],
            figure(f["ms"]),
            f"{figure(50 * (f['max'] - f['min']) / f['ms']).partition('.')[0]}%",
            *(figure(f[key]) for key in ("encode", "collective", "decode", "times_faster")),
            figure(f["byte_ratio"]),
            figure(f["element_ratio"]),
        )
        for f in figures
    ]
    return options.table(head, rows)


def _draw(path: Path, figures: Sequence[dict[str, Any]], title: str) -> None:
    """Draw stacked bars of encode, collective and decode, as long as the median."""
    with options.drawing(path, 9, 0.4 * len(figures) + 1.2) as axes:
        names, left = [f["method"] for f in figures], [0.0] * len(figures)
        for part, colour in zip(PARTS, (style.COLOURS[place] for place in (0, 4, 3))):
            widths = [f[part] for f in figures]
            axes.barh(names, widths, left=left, label=part, color=colour)
            left = [a + b for a, b in zip(left, widths)]
        for place, f in enumerate(figures):
            label = f" {figure(f['ms'])} ms, {f['times_faster']:.2f}x"
            axes.text(left[place], place, label, va="center", fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.25)  # room for the labels
        axes.set(xlabel="ms an exchange, median", title=title)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
