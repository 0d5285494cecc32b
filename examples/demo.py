"""Trains the digits on two ranks, plain and compressed: first without Horovod, then with it.

    make demo

The first table is that of `hvd-gradcomp demo`, over `torch.distributed`; it needs PyTorch and
scikit-learn alone, and `--no-horovod` stops there. For the second, on PyTorch and on Keras 3, each
run is `horovodrun --gloo -np 2` with the same seed and epochs; `results/demo.png` has accuracy
against bytes sent. On other machines over ssh, each with the same Python at the same place:
`--hosts one:1,two:1`, without the first table. On one machine it ends with what a training takes
over a link of 100 Mb/s, timed on hosts of this machine where it can make some, else predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

FRAMEWORKS = {"PyTorch": "examples.pytorch.digits", "Keras 3": "examples.keras.digits"}
METHODS = ("none", "variance", "hybrid")
EPOCHS = 60  # of each run over Horovod
MEASURED = Path(__file__).resolve().parents[1] / "docs/measured"
HOSTS, WORTH = MEASURED / "hosts.json", MEASURED / "worth.json"
WAYS = ("dense", "QSGD(", "Variance(", "Hybrid(")
RATES = {"1gbit": "1 Gb/s", "100mbit": "100 Mb/s"}
ONE_MACHINE = (
    "A compressed step is slower here. The ranks of one machine exchange by its memory, so what "
    "compressing costs shows and what it saves does not."
)


def first_table(options: argparse.Namespace) -> None:
    """Train over `torch.distributed`, without Horovod; a training that fails ends the demo."""
    command = [sys.executable, "-m", "hvd_gradcomp", "demo", "--seed", str(options.seed)]
    command += ["-np", str(options.ranks)] if options.ranks else []
    command += ["--epochs", str(options.epochs)] if options.epochs else []
    code = subprocess.run(command).returncode
    if code:
        sys.exit(code)


def run(
    module: str, method: str, options: argparse.Namespace, advance: Callable[[], None]
) -> dict[str, Any]:
    """One training run; `advance` is called after each epoch of rank 0.

    The row comes by rank 0's output, which works from any host.
    """
    launcher = Path(sys.executable).with_name("horovodrun")
    command = [str(launcher), "--gloo", "-np", str(options.ranks)]
    command += ["-H", options.hosts] if options.hosts else []
    command += [sys.executable, "-m", module, "--json", "--method", method]
    command += ["--epochs", str(options.epochs or EPOCHS), "--seed", str(options.seed)]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", **os.environ}
    row = None
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as job:
            assert job.stdout is not None
            for line in job.stdout:
                if "epoch " in line:
                    advance()
                elif "{" in line:
                    row = json.loads(line[line.index("{") :])
        if job.returncode or row is None:
            log.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{''.join(log.readlines()[-60:])}")
    return dict(row)


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="Handwritten digits over Horovod, same seed and epochs on all ranks")
    shown.add_column("framework")
    shown.add_column("method")
    for title in ("test accuracy", "element ratio", "byte ratio", "ms/step"):
        shown.add_column(title, justify="right")
    for row in rows:
        shown.add_row(
            row["framework"],
            row["method"],
            f"{row['accuracy']:.2f} %",
            f"{row['element_ratio']:.1f}",
            f"{row['ratio']:.1f}",
            f"{1e3 * row['seconds_per_step']:.1f}",
        )
    return shown


def links(path: Path = HOSTS) -> Table:
    """Lists exchanges between two hosts: ms, and how many times faster than dense ones."""
    runs = {run["rate"]: run["exchange"] for run in json.loads(path.read_text())["runs"]}
    shown = Table(title="Noise in the shapes of ResNet-50, between two hosts (make hosts)")
    for title in ("method", "one element in", *(f"{rate}, ms" for rate in RATES.values())):
        shown.add_column(title, justify="left" if title == "method" else "right")
    rows = {(rate, one["method"]): one for rate, every in runs.items() for one in every}
    for start in WAYS:
        ratios = {
            name: one["element_ratio"] for (_, name), one in rows.items() if name.startswith(start)
        }
        for name in sorted(ratios, key=lambda name: ratios[name]):
            cells = [
                f"{one['ms']:,.0f} ({one['times_faster']:.1f}x)" if one else ""
                for one in (rows.get((rate, name)) for rate in RATES)
            ]
            shown.add_row(name, f"{ratios[name]:.0f}", *cells)
    return shown


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy against bytes, one marker a run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    markers = dict(zip(FRAMEWORKS, "os"))
    colors = dict(zip(METHODS, ("tab:gray", "tab:blue", "tab:orange")))
    for row in rows:
        axes.scatter(
            row["bytes_sent"] / 1e6,
            row["accuracy"],
            marker=markers[row["framework"]],
            color=colors[row["method"]],
            s=60,
            label=f"{row['framework']}, {row['method']}",
        )
    axes.set_xscale("log")
    axes.set_xlabel("MB that one rank handed to collectives")
    axes.set_ylabel("test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="default: as many as hosts have slots, or 2")
    parser.add_argument(
        "--hosts",
        default=os.environ.get("HVD_GRADCOMP_HOSTS"),
        help="where they run, as `horovodrun -H` takes it: NAME:SLOTS,... (default: "
        "$HVD_GRADCOMP_HOSTS, or this machine)",
    )
    parser.add_argument("--epochs", type=int, help=f"of each run; default: {EPOCHS} over Horovod")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--no-ddp", action="store_true", help="leave the first table out")
    parser.add_argument("--no-horovod", action="store_true", help="stop after the first table")
    options = parser.parse_args()
    if not (options.no_ddp or options.hosts):
        first_table(options)
    if options.no_horovod:
        return
    if find_spec("horovod") is None:
        sys.exit("Horovod is not installed: `make demo` builds it, and so does `make setup`")
    if options.ranks is None:
        hosts = options.hosts.split(",") if options.hosts else ["localhost:2"]
        options.ranks = sum(int(host.rpartition(":")[2]) for host in hosts)
    console = Console()
    rows = []
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for framework, module in FRAMEWORKS.items():
            for method in METHODS:
                title = f"{framework}, {method}"
                task = progress.add_task(f"{title:<18}", total=options.epochs or EPOCHS)
                rows.append(run(module, method, options, lambda task=task: progress.advance(task)))
    plot(rows, options.output / "demo.png")
    (options.output / "demo.json").write_text(json.dumps(rows, indent=1))
    console.print(table(rows))
    if not options.hosts and HOSTS.exists():
        console.print(ONE_MACHINE)
        console.print(links())
    if not options.hosts and WORTH.exists():
        from benchmarks.worth.slow_link import training  # an image has neither

        console.print(training(WORTH))
    console.print(f"plot: {options.output / 'demo.png'}")


if __name__ == "__main__":
    main()
