"""Command `hvd-gradcomp compare`: runs the user's training with each compressor."""

from __future__ import annotations

import importlib
import inspect
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from hvd_gradcomp.algorithms.combined.local_steps import LocalSchedule
from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.cli import launching, options, output, style
from hvd_gradcomp.cli.options import figure
from hvd_gradcomp.cli.output import counted
from hvd_gradcomp.cli.progress import Progress
from hvd_gradcomp.cli.without_horovod import Distributed, transport_of
from hvd_gradcomp.core import validate
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.planning.description import brief

LAST = 0.1  # share of the steps, at the end, to average the loss over


@click.command("compare", short_help="Train with one compressor after the other.")
@launching.with_ranks
@click.argument("function", metavar="MODULE:FUNCTION")
@options.with_methods
@click.option("-s", "--steps", type=click.IntRange(2), default=100, show_default=True)
@options.with_files
def command(
    function: str,
    texts: Sequence[str],
    steps: int,
    json_path: Path | None,
    png_path: Path | None,
) -> None:
    """Train with one compressor after the other, for so many steps, and show what came of it.

    FUNCTION is your training as a generator: it takes the compressor, yields the distributed
    optimizer once (with tapes, the list of variables; with DistributedDataParallel the model that
    ddp.compress was given), and after each step the loss:

    \b
        def train(compression):
            hvd.init()
            torch.manual_seed(1)
            ...
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(),
                                                 compression=compression)
            yield optimizer
            for x, y in batches:
                ...
                optimizer.step()
                yield loss.item()

    \b
        hvd-gradcomp compare -np 2 -H host1:1,host2:1 train:train --steps 200
        hvd-gradcomp compare -np 2 --ddp train:train_ddp

    It is called once for each compressor, the first time with none, and has to seed what is random.
    "loss" is the mean over ranks of the last tenth of the steps, "step" the median of the slowest
    rank, with local steps the mean; "bytes" and "elements" are those of the gradients over those
    that were sent, "sent" what a rank hands over in a step. Give -c with the settings that you
    mean: the defaults fit no training in particular.
    """
    options.check_png(png_path)
    try:
        train = validate.attribute(function, "function")
    except validate.NoSuchNameError as error:
        raise click.UsageError(str(error)) from error
    if not inspect.isgeneratorfunction(train):
        raise click.UsageError(f"{function} is no generator function: it has to yield, see --help")
    try:
        inspect.signature(train).bind(None)
    except TypeError as error:
        raise click.UsageError(
            f"{function} has to take one argument, the compressor: {error}"
        ) from error
    compressors = [NoneCompressor(), *options.chosen(texts)]
    rows: list[dict[str, Any]] = []
    horovod: Any = None
    for place, compressor in enumerate(compressors):
        run = train(compressor)
        source = _begun(run, compressor, horovod)
        if source is None and rows:
            continue
        horovod = horovod or _frontend(source)
        first = horovod.rank() == 0
        with Progress(steps, first) as progress:
            progress.begin(f"{place + 1} of {len(compressors)}: {brief(compressor)}")
            row = _trained(run, source, horovod, compressor, steps, progress)
        row["times_faster"] = (rows[0] if rows else row)["ms"] / row["ms"]
        rows.append(row)
        progress.say(f"{row['method']}: loss {row['loss']:.4g}")
    if horovod.rank() == 0:
        about = {"function": function, "steps": steps, "ranks": horovod.size()}
        output.report(json_path, {**about, "rows": rows}, _table(rows))
        if png_path is not None:
            _draw(png_path, rows, f"{function}, {counted(horovod.size(), 'rank')}")
    horovod.shutdown()


def _begun(run: Iterator[Any], compressor: Compressor, horovod: Any) -> Any:
    """Return the run's first item; None if all ranks refuse the compressor (by optimizer, say).

    Raises:
        ValueError: the first run, without compression, refuses.
        click.ClickException: only some ranks refuse.
    """
    source, refusal = None, None
    try:
        source = next(run, None)
    except ValueError as error:
        refusal = error
    if horovod is None:
        if refusal is not None:
            raise refusal
        return source
    refused = _gathered(refusal is not None, bool, horovod)
    if any(refused) and not all(refused):
        ranks = ", ".join(str(rank) for rank, one in enumerate(refused) if one)
        raise click.ClickException(
            f"{brief(compressor)}: only ranks {ranks} refuse it: {refusal or 'see what they say'}"
        )
    if refusal is not None and horovod.rank() == 0:
        click.echo(f"  {brief(compressor)}: left out: {refusal}", err=True)
    return source


def _trained(
    run: Iterator[Any],
    source: Any,
    horovod: Any,
    compressor: Compressor,
    steps: int,
    progress: Progress,
) -> dict[str, Any]:
    """Train one run from its first step on, and return its row."""
    losses, seconds = [], []
    for step in range(steps):
        start = time.perf_counter()
        try:
            losses.append(_loss_of(next(run), step))
        except StopIteration:
            raise click.ClickException(
                f"the training with {brief(compressor)} ended after {step} steps on rank "
                f"{horovod.rank()}; --steps asks for {steps}"
            ) from None
        seconds.append(time.perf_counter() - start)
        progress.end()
    try:
        stats = horovod.compression_stats(source)
    except TypeError as error:
        raise click.ClickException(f"{brief(compressor)}: {error}") from error
    run.close()  # type: ignore[attr-defined]
    everywhere = _gathered((losses, seconds), tuple[list[float], list[float]], horovod)
    losses = [statistics.fmean(step) for step in zip(*(losses for losses, _ in everywhere))]
    slowest = [max(step) for step in zip(*(seconds for _, seconds in everywhere))]
    # With local steps only some of them exchange, which a median would leave out.
    rounds = isinstance(getattr(source, "schedule", None), LocalSchedule)
    middle = statistics.fmean if rounds else statistics.median
    return {
        "method": brief(compressor),
        "first_loss": losses[0],
        "loss": statistics.fmean(losses[-max(round(LAST * steps), 1) :]),
        "losses": losses,
        "ms": 1e3 * middle(slowest[1:]),  # the first one sets up
        "element_ratio": stats.element_ratio,
        "ratio": stats.ratio,
        "bytes": stats.bytes_sent / max(stats.steps, 1),
    }


def _loss_of(item: Any, step: int) -> float:
    """Return what the training has yielded after a step as a number."""
    try:
        return float(item)
    except (TypeError, ValueError, RuntimeError) as error:
        text = output.short(item)
        raise click.ClickException(
            f"the training has to yield the loss after each step, a number; after step {step + 1} "
            f"it was {text}"
        ) from error


def _gathered(item: Any, kind: Any, horovod: Any) -> list[Any]:
    """Gather the items of all ranks; see `hvd_gradcomp.runtime.typed_json`."""
    if isinstance(horovod, Distributed):
        return horovod.gather_objects(item, kind)
    title = horovod.__name__
    place = "comm.horovod" if title == "hvd_gradcomp.torch" else "comm"
    gather = importlib.import_module(f"{title}.{place}").gather_objects
    items = gather(item, kind, "gradcomp.compare", horovod.global_process_set)
    return list(items)


def _frontend(source: Any) -> Any:
    """Return the frontend that the training uses, judged by its first item."""
    distributed = Distributed.of(source)
    if distributed is not None:
        return distributed
    # One of Horovod's optimizers for PyTorch, or around another one.
    if hasattr(source, "_register_hooks") or transport_of(source) == "Horovod":
        return importlib.import_module("hvd_gradcomp.torch")
    if "hvd_gradcomp.tensorflow" in sys.modules:
        return sys.modules["hvd_gradcomp.tensorflow"]
    raise click.ClickException(
        "the training has to yield its hvd_gradcomp optimizer before the first step (or the list "
        "of variables, where it uses tapes; or the model that ddp.compress was given), not "
        f"{output.short(source)}"
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = (
        "method",
        "loss",
        "against\nnone",
        "step\nms",
        "faster",
        "bytes",
        "elem-\nents",
        "sent,\nbytes",
    )
    return options.table(
        head,
        [
            (
                row["method"],
                f"{row['loss']:.4g}",
                f"{row['loss'] - rows[0]['loss']:+.2g}",
                figure(row["ms"]),
                figure(row["times_faster"]),
                figure(row["ratio"]),
                figure(row["element_ratio"]),
                figure(row["bytes"]),
            )
            for row in rows
        ],
    )


def _draw(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Plot the loss by step."""
    with options.drawing(path, 9, 5) as axes:
        for row, line in zip(rows, style.lines(len(rows))):
            every = max(len(row["losses"]) // 8, 1)
            axes.plot(
                row["losses"],
                label=row["method"],
                linewidth=1,
                markevery=every,
                markersize=4,
                **line,
            )
        axes.set(xlabel="step", ylabel="loss, mean over ranks", title=title)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
