"""Method x framework x density: copies, ms and the first step, beside the bars they are held to.

    make bench ARGS="--folder docs/measured"               # all of it, about 35 minutes
    python -m benchmarks.curve --quick                     # one density of each method
    python -m benchmarks.curve --only Variance "DGC 1 %" --parts exchanges --frameworks PyTorch tape
    python -m benchmarks.curve --device cuda               # codecs alone, where there is a GPU
    python -m benchmarks.curve --show docs/measured/curve.json     # and draws it anew

Two parts, on this machine. *Codecs* (`benchmarks.codecs`): encode, and decode for two ranks, on
PyTorch in one thread, in copies of the gradient; the worst of the first 30 steps; and how much
faster encode is with `--threads`. *Exchanges* (`benchmarks.exchanges`): ResNet-50's 161 gradients
between two ranks over gloo, one thread each. `/ dense` is PyTorch's time over that of dense
allreduce in the same rounds, `/ PyTorch` a framework's over PyTorch's. Where, and of what noise,
says `benchmarks.points`; `ratio` is the element ratio that was reached. Keras is measured at the
middle density of each method, everywhere with `--full`.

Not measured: a link between hosts (`make hosts`), GPUs, methods that learn (`benchmarks.learned`).
With `--check` a bar that does not hold is exit status 1. Results go to `curve.json` in `--folder`
and are drawn beside it; with `--only` other rows that are there stay.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import points
from benchmarks.points import DENSE, FRAMEWORKS, KERAS, PYTORCH, TAPE, Point
from hvd_gradcomp.cli import style

WORST = 2.0  # times the steady copies, in the first steps
OF_DENSE, RATIOS = 1.3, (4.0, 30.0)  # PyTorch's time, at these element ratios
OF_PYTORCH, FIRST = 1.5, 15.0  # TensorFlow's times, and its first step in seconds
SPEEDUP = 1.6  # of encode by two threads
PARTS = ("codecs", "exchanges")
DRAWN = ("Variance", "Strom", "Sparse GD", "DGC", "EGC")

Result = dict[str, Any]


# -- measuring -------------------------------------------------------------------------------


def codecs(points_: Sequence[Point], options: argparse.Namespace) -> Iterator[tuple[Point, Result]]:
    """Each point's row of `benchmarks.codecs`."""
    import torch

    from benchmarks.codecs import Step, measure

    torch.set_num_threads(1)
    for point in track(points_, "codecs"):
        begin = partial(Step, point.make(), options.device)
        yield point, measure(begin, 2 * options.rounds + 1, options.threads)[1]


def exchanges(points_: Sequence[Point], options: argparse.Namespace) -> Result:
    """Run `benchmarks.exchanges` and return its results, partial ones if it fails."""
    from hvd_gradcomp.tuning.models import resnet50

    listed = [
        {
            "name": point.name,
            "compressor": repr(point.make()),
            "frameworks": frameworks_at(point, options),
        }
        for point in track(points_, "thresholds")
    ]
    with tempfile.TemporaryDirectory() as folder:
        points_path, result_path = Path(folder, "points.json"), Path(folder, "result.json")
        points_path.write_text(json.dumps({"layers": resnet50(), "points": listed}))
        launcher = str(Path(sys.executable).with_name("horovodrun"))
        worker = [sys.executable, "-m", "benchmarks.exchanges", str(points_path), str(result_path)]
        command = [launcher, "--gloo", "-np", "2", *worker, "--rounds", str(options.rounds)]
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", **os.environ}
        code = subprocess.run(command, env=environment).returncode
        result = json.loads(result_path.read_text()) if result_path.exists() else {"rows": {}}
        return {**result, "failed": code != 0}


def frameworks_at(point: Point, options: argparse.Namespace) -> list[str]:
    everywhere = options.full or point.middle
    return [name for name in options.frameworks if name != KERAS or everywhere]


def machine() -> Result:
    packages = {}
    for name in ("hvd_gradcomp", "horovod", "torch", "tensorflow", "tensorflow-cpu", "keras"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"cores": os.cpu_count(), "system": platform.machine(), "packages": packages}


def run(points_: Sequence[Point], options: argparse.Namespace) -> Result:
    """Measures, and writes what there is after every point."""
    path = options.folder / "curve.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    before: Result = json.loads(path.read_text()) if options.only and path.exists() else {}
    kept: Result = before.get("rows", {})
    rows = kept | {
        point.name: {
            "method": point.method,
            "asked": point.density,
            "bar": point.copies,
            "exchange": {},
        }
        for point in points_
    }
    result: Result = {
        "machine": machine(),
        "threads": options.threads,
        "rounds": options.rounds,
        "rows": rows,
        "failed": False,
    }
    if "codecs" in options.parts:
        for point, row in codecs(points_, options):
            rows[point.name]["codec"] = row
            path.write_text(json.dumps(result, indent=1))
    if "exchanges" in options.parts:
        exchanged = exchanges(points_, options)
        for name, row in exchanged["rows"].items():
            rows[name]["exchange"] = row
        result |= {"copy_ms_of_ranks": exchanged.get("copy_ms"), "failed": exchanged["failed"]}
        path.write_text(json.dumps(result, indent=1))
    return result


# -- what was found --------------------------------------------------------------------------


def over(row: Result, framework: str, other: str) -> float | None:
    """Return the time of a framework's exchange divided by another's."""
    times = [row["exchange"].get(name, {}).get("ms") for name in (framework, other)]
    return times[0] / times[1] if all(times) else None


def ratio(row: Result) -> float | None:
    """The element ratio that was reached: between ranks, or else by the codec alone."""
    measurements = [*row["exchange"].values(), row.get("codec", {})]
    return next((each["element_ratio"] for each in measurements if "element_ratio" in each), None)


def bars(row: Result, threads: int) -> Iterator[tuple[str, float | None, float]]:
    """Return the bounds of a row: name, measured value, and maximum."""
    if row["bar"] is None:
        return
    codec = row.get("codec")
    if codec:
        yield "copies", codec["copies"], row["bar"]
        yield "worst step over steady", codec["worst"] / codec["copies"], WORST
        if threads == 2:
            yield "encode, two threads over one", 1 / codec["speedup"], 1 / SPEEDUP
    sent_of = ratio(row)
    if sent_of and RATIOS[0] <= sent_of <= RATIOS[1]:
        yield "PyTorch over dense", over(row, PYTORCH, DENSE), OF_DENSE
    for name in (TAPE, KERAS):
        yield f"{name} over PyTorch", over(row, name, PYTORCH), OF_PYTORCH
        yield f"{name}, first step, s", row["exchange"].get(name, {}).get("first_s"), FIRST


def verdicts(result: Result) -> tuple[list[str], bool]:
    """A line for each bar that does not hold, and how many do; whether all."""
    lines, count = [], 0
    for name, row in result["rows"].items():
        for what, value, bar in bars(row, result["threads"]):
            count += value is not None
            if value is not None and value > bar:
                lines.append(f"{name}: {what} {value:.2f} FAILS, at most {bar:.2f}")
    return [*lines, f"{count - len(lines)} of {count} bars hold"], not lines


def table(result: Result) -> Table:
    shown = Table(box=box.MARKDOWN)
    shown.add_column("method", no_wrap=True)
    heads = ["asked", "ratio", "copies", "worst of 30", f"encode, {result['threads']} threads"]
    heads += ["PyTorch, ms", "/ dense"]
    for name in (TAPE, KERAS):
        heads += [f"{name}, ms", "/ PyTorch", "first, s"]
    for head in heads:
        shown.add_column(head, justify="right")
    for row in result["rows"].values():
        shown.add_row(row["method"], row["asked"], *cells(row))
    return shown


def cells(row: Result) -> list[str]:
    def rounded(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    codec, exchange = row.get("codec", {}), row["exchange"]
    shown = [rounded(ratio(row), 1), *(rounded(codec.get(key), 1) for key in ("copies", "worst"))]
    shown.append(rounded(codec.get("speedup"), 1))
    for name, other in ((PYTORCH, DENSE), (TAPE, PYTORCH), (KERAS, PYTORCH)):
        shown.append(rounded(exchange.get(name, {}).get("ms"), 0))
        shown.append(rounded(over(row, name, other), 2))
        if name != PYTORCH:
            shown.append(rounded(exchange.get(name, {}).get("first_s"), 1))
    return shown


def copies_take(result: Result) -> str:
    """Return the time of a copy of the gradient, the unit of all others."""
    alone = [row["codec"]["copy_ms"] for row in result["rows"].values() if "codec" in row]
    lines = [f"{min(alone):.1f} to {max(alone):.1f} ms in one process"] if alone else []
    gains = [row["codec"]["copy_speedup"] for row in result["rows"].values() if "codec" in row]
    if gains and all(gains):
        gain = statistics.median(gains)
        lines.append(f"{gain:.2f} times as fast in {result['threads']} threads")
    if result.get("copy_ms_of_ranks"):
        lines.append(f"{result['copy_ms_of_ranks']:.1f} ms in two at a time")
    return f"a copy of the gradient (102 MB): {', '.join(lines) or 'not measured'}"


# -- the figure ------------------------------------------------------------------------------


def draw(result: Result, path: Path) -> None:
    """Draw what five methods cost against the share of elements that they send."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def curve(method: str, cost: Callable[[Result], float | None]) -> list[tuple[float, float]]:
        """Return the percentages of elements, and the costs, that were measured."""
        rows = [row for row in result["rows"].values() if row["method"] == method]
        known = [(ratio(row), cost(row)) for row in rows]
        return sorted((100 / sent, value) for sent, value in known if sent and value is not None)

    def exchange(row: Result) -> float | None:
        return row["exchange"].get(PYTORCH, {}).get("ms")

    costs = {
        "work of a rank, copies of the gradient": lambda row: row.get("codec", {}).get("copies"),
        "exchange between two ranks, ms": exchange,
    }
    dense = [row["exchange"].get(DENSE, {}).get("ms") for row in result["rows"].values()]
    with pyplot.rc_context(style.SETTINGS):
        figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
        for axes, (title, cost) in zip(panels, costs.items()):
            for look, method in zip(style.lines(len(DRAWN)), DRAWN):
                if known := curve(method, cost):
                    axes.plot(*zip(*known), label=method, markersize=4, **look)
            axes.set(xscale="log", xlabel="elements sent, percent", title=title)
            axes.set_xticks((0.1, 1, 10), ("0.1", "1", "10"))
        if known_ms := [ms for ms in dense if ms is not None]:
            middle = statistics.median(known_ms)
            panels[1].axhline(middle, color=style.INK, linewidth=1.5, label="no compression")
        for axes in panels:
            axes.set_ylim(bottom=0)
            style.label_ends(axes, fontsize=8)
        figure.savefig(path)
        pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="POINT", help='such as Strom "DGC 1"'
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the codecs")
    parser.add_argument("--quick", action="store_true", help="one density of each method")
    parser.add_argument("--full", action="store_true", help="Keras at every density")
    parser.add_argument("--rounds", type=int, default=7, help="that are measured, of each")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--check", action="store_true", help="exit status 1 if a bar does not hold")
    parser.add_argument("--folder", type=Path, default=Path("results/bench"))
    parser.add_argument("--show", type=Path, metavar="JSON", help="what was measured before")
    options = parser.parse_args()
    if options.device == "cuda":  # no exchange through this machine's memory, and no thread of it
        options.parts, options.threads = ["codecs"], 1
    selected = points.chosen(points.every(), options.only)
    selected = [point for point in selected if point.middle or not options.quick]
    if not selected:
        parser.error(
            f"no point is called so; there are {', '.join(p.name for p in points.every())}"
        )
    path = options.show or options.folder / "curve.json"
    result = json.loads(path.read_text()) if options.show else run(selected, options)
    draw(result, path.with_suffix(".png"))
    names = {point.name for point in selected}
    result["rows"] = {name: row for name, row in result["rows"].items() if name in names}
    lines, all_hold = verdicts(result)
    console = Console(width=180)
    console.print(table(result))
    console.print(*lines, copies_take(result), sep="\n", markup=False, highlight=False)
    print(f"results: {path} and {path.with_suffix('.png').name}")
    return int(result["failed"] or (options.check and not all_hold))


if __name__ == "__main__":
    sys.exit(main())
