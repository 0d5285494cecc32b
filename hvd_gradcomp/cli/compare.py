"""Command `hvd-gradcomp compare`: runs the user's training with each compressor."""

from __future__ import annotations

import importlib
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from hvd_gradcomp.algorithms.combined.local_steps import LocalSchedule
from hvd_gradcomp.cli import launching, options, output, style
from hvd_gradcomp.cli.options import figure
from hvd_gradcomp.cli.output import counted
from hvd_gradcomp.cli.progress import Progress
from hvd_gradcomp.cli.without_horovod import Distributed, OfJob, transport_of
from hvd_gradcomp.core import validate
from hvd_gradcomp.planning.methods import ExchangeMethod

_PACE = 5  # steps after which it says how long all will take
LAST = 0.1  # share of the steps, at the end, to average the loss over


@click.command("compare", short_help="Train with one compressor after the other.")
@launching.with_ranks
@click.argument("function", metavar="[MODULE:FUNCTION]", required=False)
@click.option(
    "-m",
    "--model",
    "model_name",
    metavar="MODULE:FACTORY",
    help="Train this model instead: a function of your own that returns (module, loss, optimizer), "
    "where loss() returns the loss of the next batch.",
)
@options.with_methods
@click.option("-s", "--steps", type=click.IntRange(2), default=100, show_default=True)
@options.with_files
def command(
    function: str | None,
    model_name: str | None,
    texts: Sequence[str],
    steps: int,
    json_path: Path | None,
    png_path: Path | None,
) -> None:
    """Train with one method after the other, for so many steps, and show what came of it.

    With -m it trains your model, by every method, on gradients, momenta or local steps:

    \b
        hvd-gradcomp compare -np 2 -m train:factory -c int8 -c "local(Int8Compressor(), every=15)"

    FUNCTION is your training as a generator instead: it takes the compressor, yields once what
    ddp.compress or fsdp.compress has returned (or the optimizer of Horovod, of LocalSteps or of
    MomentumExchange; with tapes, the list of variables), and after each step the loss:

    \b
        def train(compression, local=None):
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            torch.manual_seed(1)
            ...
            if local is None:
                model = DistributedDataParallel(model)
                yield ddp.compress(model, compression)
            else:  # a dict: every, warmup_steps, outer
                optimizer = ddp.LocalSteps(optimizer, model.named_parameters(),
                                           compression=compression, **local)
                yield optimizer
            for x, y in batches:
                ...
                optimizer.step()
                yield loss.item()

    \b
        hvd-gradcomp compare -np 2 --ddp train:train --steps 200
        torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d \\
            --rdzv-endpoint host1:29400 -m hvd_gradcomp compare train:train
        hvd-gradcomp compare -np 2 -H host1:1,host2:1 train:train_by_horovod

    It is called once for each method, the first time with none, and has to seed what is random.
    Local steps are left out if it takes no argument "local", momenta if it takes no "momentum".
    "loss" is the mean over ranks of the last tenth of the steps, "step" the median of the slowest
    rank, with local steps the mean; "bytes" and "elements" are those of the gradients over those
    that were sent, "sent" what a rank hands over in a step. Give -c with the settings that you
    mean: the defaults fit no training in particular.
    """
    options.check_png(png_path)
    if (function is None) == (model_name is None):
        raise click.UsageError(
            "name either your training, MODULE:FUNCTION, or with -m a model to train, "
            "MODULE:FACTORY"
        )
    title = str(function or model_name)
    horovod: Any = None
    if function is not None:
        train = _generator(function)
    else:
        job = options.job()
        train = importlib.import_module("hvd_gradcomp.tuning.training").training_of(job, model_name)
        horovod = OfJob(job)
    methods = _accepted([ExchangeMethod(), *options.chosen(texts)], train, title, bool(texts))
    rows: list[dict[str, Any]] = []
    for place, method in enumerate(methods):
        more = {method.keyword: method.settings} if method.keyword else {}
        run = train(method.compressor, **more)
        try:
            source = _begun(run, method, horovod if rows else None)
        except ValueError as error:
            if function is not None:
                raise
            raise click.UsageError(str(error)) from error
        if source is None and rows:
            continue
        horovod = horovod or _frontend(source)
        first = horovod.rank() == 0
        with Progress(steps, first) as progress:
            progress.begin(f"{place + 1} of {len(methods)}: {method.name}")
            row = _trained(
                run, source, horovod, method, steps, progress, 0 if rows else len(methods)
            )
        row["times_faster"] = (rows[0] if rows else row)["ms"] / row["ms"]
        rows.append(row)
        progress.say(
            f"{row['method']}: loss {row['loss']:.4g}, {figure(row['ms'])} ms a step, "
            f"{figure(row['ratio'])} times fewer bytes"
        )
    if horovod.rank() == 0:
        about = {"function": title, "steps": steps, "ranks": horovod.size()}
        output.report(json_path, {**about, "rows": rows}, _table(rows))
        if png_path is not None:
            _draw(png_path, rows, f"{title}, {counted(horovod.size(), 'rank')}")
    horovod.shutdown()


def _generator(function: str) -> Callable[..., Iterator[Any]]:
    """Return the training that `module:function` names.

    Raises:
        click.UsageError: it is none.
    """
    try:
        train: Callable[..., Iterator[Any]] = validate.attribute(function, "function")
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
    return train


def _accepted(
    methods: Sequence[ExchangeMethod], train: Callable[..., Any], title: str, named: bool
) -> list[ExchangeMethod]:
    """Return the methods that a training has an argument for.

    Args:
        methods: of the command line, or all.
        train: the training.
        title: its name.
        named: the user has named the methods.

    Raises:
        click.UsageError: one that the user has named is not among them.
    """
    accepted = []
    for method in methods:
        try:
            inspect.signature(train).bind(None, **({method.keyword: {}} if method.keyword else {}))
        except TypeError:
            if named:
                raise click.UsageError(
                    f"{title} takes no argument {method.keyword!r}, in which {method.name} comes "
                    f"as a dict of settings: def train(compression, {method.keyword}=None), "
                    "see --help. With -m a model is trained by every method"
                ) from None
        else:
            accepted.append(method)
    return accepted


def _begun(run: Iterator[Any], method: ExchangeMethod, horovod: Any) -> Any:
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
            f"{method.name}: only ranks {ranks} refuse it: {refusal or 'see what they say'}"
        )
    if refusal is not None and horovod.rank() == 0:
        click.echo(f"  {method.name}: left out: {refusal}", err=True)
    return source


def _trained(
    run: Iterator[Any],
    source: Any,
    horovod: Any,
    method: ExchangeMethod,
    steps: int,
    progress: Progress,
    runs: int = 0,
) -> dict[str, Any]:
    """Train one run from its first step on, and return its row.

    After some steps it says how long as many runs will take.
    """
    losses, seconds = [], []
    for step in range(steps):
        start = time.perf_counter()
        try:
            losses.append(_loss_of(next(run), step))
        except StopIteration:
            raise click.ClickException(
                f"the training with {method.name} ended after {step} steps on rank "
                f"{horovod.rank()}; --steps asks for {steps}"
            ) from None
        seconds.append(time.perf_counter() - start)
        progress.end()
        if step == min(_PACE, steps - 1) and runs > 1:
            pace = statistics.fmean(seconds[1:])
            progress.say(
                f"a step without compression takes {figure(1e3 * pace)} ms: {runs} trainings of "
                f"{counted(steps, 'step')} take about {output.duration(pace * steps * runs)}, "
                "longer where compressing costs more than it saves"
            )
    try:
        stats = horovod.compression_stats(source)
    except TypeError as error:
        raise click.ClickException(f"{method.name}: {error}") from error
    run.close()  # type: ignore[attr-defined]
    everywhere = _gathered((losses, seconds), tuple[list[float], list[float]], horovod)
    losses = [statistics.fmean(step) for step in zip(*(losses for losses, _ in everywhere))]
    slowest = [max(step) for step in zip(*(seconds for _, seconds in everywhere))]
    # With local steps only some of them exchange, which a median would leave out.
    rounds = isinstance(getattr(source, "schedule", None), LocalSchedule)
    middle = statistics.fmean if rounds else statistics.median
    return {
        "method": method.name,
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
    if isinstance(horovod, (Distributed, OfJob)):
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
        "of variables, where it uses tapes; or what ddp.compress or fsdp.compress returned), not "
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
