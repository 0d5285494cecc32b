"""Training and whole exchanges between several hosts on this machine, over links of known rates.

    make hosts                                                   # as root; or, in parts:
    python -m benchmarks.hosts --hosts 2 --rates 1gbit --parts training
    python -m benchmarks.hosts --hosts 2 --rates 100mbit -- python -m examples.pytorch.digits
    python -m benchmarks.hosts --show docs/measured/hosts.json                 # draws it anew

Hosts are network namespaces with an sshd each behind a link that is shaped in both directions; how,
and why nothing of them is left behind, says `benchmarks.rig`. For each number of hosts and each
rate, horovodrun on the first host starts a rank on each: the digits with the variance criterion,
over gloo, over MPI, and with two ranks a host that compress between hosts only; then `hvd-gradcomp
bench` and `hvd-gradcomp advise`, over gloo. What follows `--` is run there instead, whatever it is.

The table of exchanges has, for each number of hosts and rate, the median in ms, its spread (least
and most) and how many times faster than dense Horovod in the same run that is; sparse methods send
one element in 500, 30 and 8 (at less than 500 Mb/s in 500 alone, for the sake of time). Below stand
the bars of two hosts, and how far the advice's predictions are from what it measured. With
`--check` a bar that does not hold is exit status 1, and so is a command that fails. Where hosts
cannot be made the exit status is 2. Results go to `hosts.json` and `hosts.png` in `--folder`, after
every step, so that what was measured outlives what fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.rig import Hosts, HostsError, JobError, bits_per_second
from hvd_gradcomp.cli import style
from hvd_gradcomp.cli.options import chosen, usual

matplotlib.use("Agg")
from matplotlib import pyplot

TRAINING = ["python", "-m", "examples.pytorch.digits", "--json", "--method", "variance"]
HIERARCHICAL = "gloo, 2 ranks a host, hierarchical"
BENCH = ["python", "-m", "hvd_gradcomp", "bench"]
ADVISE = ["python", "-m", "hvd_gradcomp", "advise"]
ERROR = 0.2  # of predicted exchanges, the median over ways and rates
DRAWN = ("dense", "FP16", "QSGD", "OneBit", "DGC", "SparseGD")
SLOWER = 1.1  # that the predicted fastest may be than the measured fastest

# Usual settings, but of Variance and Hybrid those that send one element in 500 of bench's noise, as
# others do; and settings that send one in so many of it, or fewer.
RARE = [
    *(name for name in usual() if name not in ("variance", "hybrid")),
    "VarianceCompressor(alpha=4.3)",
    "HybridCompressor(tau=0.1, alpha=11.9)",
]
DENSER = {
    30: (
        "VarianceCompressor(alpha=1.7)",
        "HybridCompressor(tau=0.1, alpha=6.8)",
        "StromCompressor(tau=5.1)",
        "DGCCompressor(density=0.033)",
        "EGCCompressor(K=30)",
        "SparseGDCompressor(density=0.033)",
    ),
    8: (
        "VarianceCompressor(alpha=1.0)",
        "HybridCompressor(tau=0.1, alpha=3.6)",
        "StromCompressor(tau=2.4)",
        "DGCCompressor(density=0.125)",
        "EGCCompressor(K=8)",
        "SparseGDCompressor(density=0.125)",
    ),
}
USUAL = 500  # one element in so many is sent
SPARSE = ("Variance(", "Hybrid(", "Strom(", "DGC(", "EGC(", "SparseGD(")
QUANTIZED = ("QSGD()", "TernGrad(")  # 4 bits are QSGD's default
BARS = {  # on two hosts: times faster than dense, by the ratio that sparse methods were set to
    "1gbit": {USUAL: 9.0, 30: 6.0, 8: 3.0},
    "100mbit": {USUAL: 60.0},
}
QUANTIZED_BARS = {"1gbit": 2.5, "100mbit": 6.0}

Result = dict[str, Any]


def train(hosts: Hosts, how: str, options: argparse.Namespace) -> Result:
    command, ranks = [*TRAINING, "--epochs", str(options.epochs)], 1
    if how == HIERARCHICAL:
        command, ranks = [*command, "--two-level"], 2
    backend, timeout = how.partition(",")[0], options.timeout
    output = hosts.horovodrun(command, backend=backend, ranks_per_host=ranks, timeout=timeout)
    row = next(line for line in output.splitlines() if '"accuracy"' in line)
    return dict(json.loads(row[row.index("{") :]))


def figures(hosts: Hosts, command: list[str], options: argparse.Namespace) -> Result:
    """Run a command of the package and return its JSON."""
    # At 100 Mb/s a dense exchange of ResNet-50's gradients takes 9 s, at 1 Gb/s 1 s.
    slow = hosts.rate is not None and bits_per_second(hosts.rate) < 5e8
    rounds = options.rounds or (5 if slow else 9)
    texts = options.compression or [*RARE, *(() if slow else chain(*DENSER.values()))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [*command, "--json", str(path), "--rounds", str(rounds)]
        command += [*(f"--compression={text}" for text in texts), *options.bench]
        hosts.horovodrun(command, timeout=options.timeout)
        return dict(json.loads(path.read_text()))


def title(run: Result) -> str:
    rate = "unshaped" if run["rate"] is None else run["rate"]
    return f"{run['hosts']} hosts, {rate}"


def training_table(runs: list[Result]) -> Table:
    table = Table(title="The digits, compressed by the variance criterion", box=box.MARKDOWN)
    for head in ("hosts, rate", "backend", "accuracy, %", "one element in", "bytes /", "ms a step"):
        table.add_column(head, justify="left" if head in ("hosts, rate", "backend") else "right")
    for run in runs:
        for how, row in run["training"].items():
            ratios = [f"{row[name]:.1f}" for name in ("element_ratio", "ratio")]
            step = f"{1e3 * row['seconds_per_step']:.1f}"
            table.add_row(title(run), how, f"{row['accuracy']:.1f}", *ratios, step)
    return table


def exchange_table(runs: list[Result]) -> Table:
    def cell(row: Result) -> str:
        spread = f"{row['min']:.1f}-{row['max']:.1f}"
        return f"{row['ms']:.1f} ({spread}), {row['times_faster']:.1f}"

    columns = [(title(run), run["exchange"]) for run in runs]
    return by_way("ms an exchange (spread), times faster than dense", columns, cell)


def advice_table(runs: list[Result]) -> Table:
    def cell(row: Result) -> str:
        return f"{row['predicted_ms']:.0f} / {row['measured_ms']:.0f} ({row['error']:+.0%})"

    columns = [(title(run), run["advice"]["rows"]) for run in runs]
    return by_way("ms an exchange, predicted / measured", columns, cell)


def by_way(
    heading: str, columns: list[tuple[str, list[Result]]], cell: Callable[[Result], str]
) -> Table:
    """A line for each method, a column for each run."""
    table = Table(title=heading, box=box.MARKDOWN)
    table.add_column("method")
    for head, _ in columns:
        table.add_column(head, justify="right")
    by_run = [{row["method"]: cell(row) for row in rows} for _, rows in columns]
    for name in dict.fromkeys(name for cells in by_run for name in cells):
        table.add_row(name, *(cells.get(name, "") for cells in by_run))
    return table


def asked_ratio(method: str) -> int:
    """One in how many elements a sparse method was set to send."""
    for ratio, texts in DENSER.items():
        if method in [each.name for each in chosen(texts)]:
            return ratio
    return USUAL


def prediction(runs: list[Result]) -> tuple[list[str], bool]:
    """Return the errors of predicted exchanges, by number of hosts and by ratio."""
    lines, hold = [], True
    for count in sorted({run["hosts"] for run in runs}):
        errors: dict[int, list[float]] = {}
        for run in (run for run in runs if run["hosts"] == count):
            rows = [row for row in run["advice"]["rows"] if row["element_ratio"]]
            for row in rows:
                errors.setdefault(asked_ratio(row["method"]), []).append(abs(row["error"]))
            picked = min(rows, key=lambda row: row["predicted_ms"])
            fastest = min(rows, key=lambda row: row["measured_ms"])
            times = picked["measured_ms"] / fastest["measured_ms"]
            lines.append(
                f"{title(run)}: fastest by prediction {picked['method']}, by measurement "
                f"{fastest['method']}: {times:.2f} of its time; advice for a step: "
                f"{run['advice']['use'] or run['advice']['answer']}"
            )
            hold = hold and (count != 2 or times <= SLOWER)
        for ratio, some in sorted(errors.items()):
            settings = "usual settings" if ratio == USUAL else f"one element in {ratio}"
            middle = statistics.median(some)
            lines.append(f"{count} hosts, {settings}: median error of predictions {middle:.0%}")
            hold = hold and (count != 2 or middle <= ERROR)
    return lines, hold


def draw(runs: list[Result], path: Path) -> None:
    """Draw medians and spreads of six methods: a panel a rate, a mark a number of hosts."""
    rates = list(dict.fromkeys(run["rate"] for run in runs))
    counts = sorted({run["hosts"] for run in runs})
    first: dict[str, str] = {}  # of each method; usual settings come before denser ones
    for name in (row["method"] for run in runs for row in run["exchange"]):
        first.setdefault(re.split(r"\W", name)[0], name)
    drawn = [first[name] for name in DRAWN if name in first] or [*first.values()][: len(DRAWN)]
    size = (2.0 + 3.0 * len(rates), 1.4 + 0.3 * len(drawn) * len(counts))
    with pyplot.rc_context(style.SETTINGS):
        figure, panels = pyplot.subplots(
            1, len(rates), figsize=size, sharey=True, squeeze=False, layout="constrained"
        )
        marks: dict[str, Any] = {}
        for axes, rate in zip(panels[0], rates):
            for run in (run for run in runs if run["rate"] == rate):
                place = counts.index(run["hosts"])
                rows = [row for row in run["exchange"] if row["method"] in drawn]
                low, high = ([abs(row[end] - row["ms"]) for row in rows] for end in ("min", "max"))
                aside = 0.25 * (place - (len(counts) - 1) / 2)
                heights = [drawn.index(row["method"]) + aside for row in rows]
                marks[f"{run['hosts']} hosts"] = axes.errorbar(
                    [row["ms"] for row in rows],
                    heights,
                    xerr=(low, high),
                    fmt=style.MARKS[place],
                    markersize=4,
                    color=style.COLOURS[place],
                )
                for row, height in zip(rows, heights):
                    axes.annotate(
                        f"{row['ms']:,.0f} ms",
                        (row["max"], height),
                        (5, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=8,
                    )
            axes.set_xscale("log")
            axes.set_title("unshaped" if rate is None else re.sub(r"([mg])bit", _unit, rate))
            axes.set_xlabel("ms an exchange")
            axes.set_xlim(right=5 * axes.get_xlim()[1])  # space for the numbers
        panels[0][0].set_yticks(range(len(drawn)), drawn)
        panels[0][0].invert_yaxis()
        if len(counts) > 1:
            figure.legend(
                marks.values(), marks.keys(), loc="outside lower center", ncols=len(counts)
            )
        figure.savefig(path)
        pyplot.close(figure)


def _unit(letter: re.Match[str]) -> str:
    return f" {letter[1].upper()}b/s"


def bars(runs: list[Result]) -> tuple[list[str], bool]:
    """A line for each bar of two hosts, and whether all hold."""
    lines, hold = [], True
    for run in (run for run in runs if run["hosts"] == 2 and run["rate"] in BARS):
        by_setting: dict[str, list[tuple[Result, float]]] = {}
        for row in run["exchange"]:
            ratio, method = asked_ratio(row["method"]), row["method"]
            if method.startswith(SPARSE) and ratio in BARS[run["rate"]]:
                setting = f"one element in {ratio}"
                by_setting.setdefault(setting, []).append((row, BARS[run["rate"]][ratio]))
                if row["element_ratio"] < ratio:
                    lines.append(
                        f"{title(run)}, {method}: sent one element in {row['element_ratio']:.1f}, "
                        f"not in {ratio}"
                    )
            elif method.startswith(QUANTIZED):
                by_setting.setdefault("quantized", []).append((row, QUANTIZED_BARS[run["rate"]]))
        for setting, rows in by_setting.items():
            least = rows[0][1]
            speeds = ", ".join(f"{row['method']} {row['times_faster']:.1f}" for row, _ in rows)
            holds = all(row["times_faster"] >= bar for row, bar in rows)
            lines.append(
                f"{title(run)}, {setting}: {least:g} times faster than dense "
                f"{'holds' if holds else 'FAILS'}: {speeds}"
            )
            hold = hold and holds
    return lines, hold


def measure(options: argparse.Namespace, console: Console) -> bool:
    """Runs everything, prints and writes what was found; whether all bars hold."""
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "hosts.json"
    machine = {"cores": os.cpu_count(), "kernel": platform.release(), "system": platform.machine()}
    runs: list[Result] = []
    for count in options.hosts:
        with Hosts(count) as hosts:
            for rate in options.rates:
                hosts.set_rate(rate)
                run: Result = {"hosts": count, "rate": rate, "training": {}, "exchange": []}
                runs.append(run)
                ways = [*options.backends, HIERARCHICAL]
                for how in ways if "training" in options.parts else ():
                    console.print(f"{title(run)}: training over {how}")
                    run["training"][how] = train(hosts, how, options)
                    path.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1))
                if "exchange" in options.parts:
                    console.print(f"{title(run)}: exchanges over gloo")
                    run["exchange"] = figures(hosts, BENCH, options)["rows"]
                    path.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1))
                if "advice" in options.parts:
                    console.print(f"{title(run)}: advice over gloo")
                    run["advice"] = figures(hosts, ADVISE, options)
                    path.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1))
    lines: list[str] = []
    hold = True
    if "training" in options.parts:
        console.print(training_table(runs))
    if "exchange" in options.parts:
        console.print(exchange_table(runs))
        draw(runs, path.with_suffix(".png"))
        lines, hold = bars(runs)
    if "advice" in options.parts:
        console.print(advice_table(runs))
        more, true = prediction(runs)
        lines, hold = lines + more, hold and true
    console.print(*lines, sep="\n", markup=False)
    console.print(f"results: {options.folder}")
    return hold


def run(command: list[str], options: argparse.Namespace) -> None:
    """Runs any command, everywhere."""
    for count in options.hosts:
        with Hosts(count) as hosts:
            for rate in options.rates:
                hosts.set_rate(rate)
                for backend in options.backends:
                    hosts.horovodrun(
                        command,
                        ranks_per_host=options.ranks_per_host,
                        backend=backend,
                        timeout=options.timeout,
                        stream=True,
                    )


def rate(text: str) -> str | None:
    if text == "none":
        return None
    try:
        bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], usage="%(prog)s [options] [-- COMMAND ...]"
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", type=rate, nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--backends", nargs="+", choices=("gloo", "mpi"), default=["gloo", "mpi"])
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds a command may take")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="of COMMAND")
    parts = ("training", "exchange", "advice")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--epochs", type=int, default=10, help="of the training")
    parser.add_argument("--rounds", type=int, help="of the bench; fewer at low rates if not given")
    parser.add_argument(
        "-c", "--compression", action="append", help="for bench and advise, instead of all"
    )
    parser.add_argument(
        "--bench", type=shlex.split, default=[], help="options for bench and advise, as one word"
    )
    parser.add_argument("--check", action="store_true", help="exit status 1 if a bar does not hold")
    parser.add_argument("--folder", type=Path, default=Path("results/hosts"))
    parser.add_argument("--show", type=Path, metavar="JSON", help="draws what was measured before")
    arguments, command = sys.argv[1:], []
    if "--" in arguments:
        place = arguments.index("--")
        arguments, command = arguments[:place], arguments[place + 1 :]
    options = parser.parse_args(arguments)

    if options.show:
        draw(json.loads(options.show.read_text())["runs"], options.show.with_suffix(".png"))
        return 0
    # The hosts end with this process in any case; this way it also ends what it has begun itself.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if command:
            run(command, options)
        elif not measure(options, Console(width=160 if len(options.hosts) > 1 else 120)):
            return int(options.check)
    except HostsError as error:
        print(error, file=sys.stderr)
        return 2
    except JobError as error:
        # What it printed is on the screen already, if it was not one of ours.
        print(str(error).splitlines()[0] if command else error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
