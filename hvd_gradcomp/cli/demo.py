"""Command `hvd-gradcomp demo`: trains on digits with and without compression, for a table."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click
from tabulate import tabulate

from hvd_gradcomp.cli import digits, launching, options, output
from hvd_gradcomp.cli.digits import Row
from hvd_gradcomp.cli.output import counted
from hvd_gradcomp.cli.progress import Progress
from hvd_gradcomp.planning.methods import ExchangeMethod, Local
from hvd_gradcomp.tuning.fewer_exchanges import QSGD

EPOCHS = 40
METHODS = {
    "uncompressed": ExchangeMethod(),
    "QSGD, 4 bits": ExchangeMethod(QSGD.compressor),
    "every 5 steps, 1 element in 8, 4 bits": Local(),
}
CALLS = """\
The first is DistributedDataParallel as it is. What the others add to it:
  ddp.compress(model, QSGDCompressor(bits=4))
  ddp.local_steps(model, optimizer)"""
ONE_MACHINE = (
    "On one machine a compressed exchange is no faster, because ranks exchange through memory: to "
    'see what compression gains on a slow link, read docs/worth.md ("Is it worth it?" on the site).'
)
_PACKAGES = {"torch": "torch", "sklearn": "scikit-learn"}  # by module


@click.command("demo", short_help="Train on digits with and without compression, in a minute.")
@click.option(
    "-np",
    "ranks",
    type=click.IntRange(2),
    default=2,
    show_default=True,
    help="Start so many ranks, all on this machine.",
)
@click.option("--epochs", type=click.IntRange(1), default=EPOCHS, show_default=True)
@click.option(
    "--seed", type=int, default=1, show_default=True, help="Of the network and the batches."
)
@output.with_json
def command(ranks: int, epochs: int, seed: int, json_path: Path | None) -> None:
    """Train a network on handwritten digits, with and without compression, and compare.

    Three trainings of a small convolutional network by DistributedDataParallel over gloo:
    uncompressed; with each gradient in 4 bits; and with local steps, which exchange one element in
    8, in 4 bits, every 5 steps. The ranks are processes of this machine, connected by its loopback.

    It needs PyTorch and scikit-learn, which has the images; no Horovod, no TensorFlow, no download.

    "bytes a step" is what a rank hands to collectives, a mean over steps; "ms a step" is the time
    of the slowest rank, a mean over all epochs but the first.
    """
    library = launching.launcher()
    if library == "Horovod":
        raise click.UsageError(
            "demo starts its ranks itself, by torchrun: call it without horovodrun or mpirun"
        )
    if not library:
        _check_installed()
        launching.on_this_machine(ranks)
    job = options.job()
    first = job.rank() == 0
    rows = []
    with Progress(epochs * len(METHODS), first) as progress:
        progress.say(f"{counted(len(METHODS), 'training')} of {counted(epochs, 'epoch')}")
        for title, method in METHODS.items():
            progress.begin(title)
            row = digits.train(job, title, method, epochs, seed, progress.end)
            rows.append(row)
            progress.say(
                f"{title}: {row.accuracy:.2f} % of the test images are right, "
                f"{row.bytes:,.0f} bytes and {row.ms:.1f} ms a step"
            )
    if first:
        content = {"ranks": job.size(), "epochs": epochs, "seed": seed}
        title = (
            f"handwritten digits: {counted(job.size(), 'rank')} on one machine, "
            f"{counted(epochs, 'epoch')}, {counted(rows[0].steps, 'step')}"
        )
        text = "\n\n".join([title, table(rows), CALLS, options.wrapped(ONE_MACHINE)])
        output.report(json_path, {**content, "rows": [row._asdict() for row in rows]}, text)


def table(rows: Sequence[Row]) -> str:
    """Format the results of all trainings."""
    head = ("method", "test\naccuracy", "bytes\na step", "times\nfewer", "ms\na step")
    cells = [
        (
            row.method,
            f"{row.accuracy:.2f} %",
            f"{row.bytes:,.0f}",
            f"{row.ratio:.1f}",
            f"{row.ms:.1f}",
        )
        for row in rows
    ]
    aligned = ("left", *["right"] * (len(head) - 1))
    return tabulate(cells, head, colalign=aligned, disable_numparse=True)


def _check_installed() -> None:
    """Check for the packages that the trainings need.

    Raises:
        click.ClickException: one is missing.
    """
    missing = [package for name, package in _PACKAGES.items() if find_spec(name) is None]
    if missing:
        raise click.ClickException(
            "the demo trains on PyTorch, with images that come with scikit-learn. Not installed: "
            f"{' and '.join(missing)}. Install with: pip install {' '.join(missing)}"
        )
