"""Time to a target loss between hosts on this machine: what compressing gains, end to end.

    make worth                                             # as root; says first how long it takes
    python -m benchmarks.worth --task images --ratios 3 10
    python -m benchmarks.worth --show docs/measured/worth-transformer.json      # draws it anew

Hosts are those of `benchmarks.rig`: network namespaces with real sockets, and a rank on each. What
carries over to other machines is how communication-bound a step is: the time that the link needs
for the dense gradients, divided by the time of a step without any exchange. The rate of the links
is set to make that 0.3, 1, 3, 10 and 30.

1. `train`: with each method and seed, to the loss that uncompressed Horovod has after so many
   steps. Their number does not depend on the link: the same bits arrive at any rate.
2. `time`: with each method and rate, some steps of the same training over the shaped link.
3. `whole`: whole trainings over the shaped link at one ratio, to check the product of the two.
4. `advise`: what `hvd-gradcomp advise` recommends on each link, beside the best that was measured.

Time to the target is steps times the time of a step. Looks at the loss, and the beginning of a
training, do not count. What is there already is not measured again (`--again` does).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.papers import data
from benchmarks.rig import Hosts, HostsError, JobError
from benchmarks.worth import advised
from benchmarks.worth.methods import LIMIT, MARK, SEPARATE, STOCK, TASKS, TIMED, Training
from hvd_gradcomp.cli import style

matplotlib.use("Agg")
from matplotlib import pyplot

WORKER = ["python", "-m", "benchmarks.worth.worker"]
RATIOS = (0.3, 1.0, 3.0, 10.0, 30.0)
CHECKED = 10.0  # the ratio of whole trainings
Rows = list[dict[str, Any]]


class Measured:
    """Results of a measurement, in a file that each is written to at once.

    Args:
        path: of the file.
        training: what is trained.
        hosts: number of hosts.
    """

    def __init__(self, path: Path, training: Training, hosts: int) -> None:
        self.path, self.training = path, training
        machine = {"cores": os.cpu_count(), "kernel": platform.release()}
        self.all: dict[str, Any] = {"task": training.task, "hosts": hosts, "machine": machine}
        self.all |= {"goal": training.goal, "compute_ms": None, "parameters": 0}
        self.all |= {"train": [], "time": [], "whole": [], "advise": []}
        if path.exists():
            self.all |= json.loads(path.read_text())
            if self.all["hosts"] != hosts or self.all["goal"] != training.goal:
                raise SystemExit(f"{path} is of another measurement: give another --folder")

    def rows(self, part: str, **which: Any) -> Rows:
        """Return the rows of a part that agree with `which`."""
        return [r for r in self.all[part] if all(r.get(k) == v for k, v in which.items())]

    def add(self, part: str, row: dict[str, Any], **which: Any) -> None:
        """Add a row, in the place of one that has the same method and the same `which`."""
        row = {**which, **row}
        same = {"method": row["method"], **which}
        self.all[part] = [
            r for r in self.all[part] if any(r.get(k) != v for k, v in same.items())
        ] + [row]
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.all, indent=1) + "\n")

    def advised(self, row: dict[str, Any], ratio: float) -> None:
        """Add what was recommended at a ratio, in the place of what was before."""
        kept = [r for r in self.all["advise"] if r["ratio"] != ratio]
        self.all["advise"] = sorted([*kept, {"ratio": ratio, **row}], key=lambda r: r["ratio"])
        self.save()

    def advice(self, ratio: float) -> str:
        """Return what was recommended at a ratio, in words."""
        (row,) = self.rows("advise", ratio=ratio)
        titles = {key: method.title for key, method in self.training.methods.items()}
        text = f"at {ratio:g} advise says {titles[row['method']]}"
        if row["within"] is None:
            return f"{text}, which was not timed"
        return (
            f"{text}: {row['sooner']:.2f} times sooner; the best, {titles[row['best']]}, "
            f"{row['best_sooner']:.2f}, which is {row['within']:.2f} times that"
        )

    @property
    def link_bytes(self) -> float:
        """Return the bytes that dense gradients put on each link, in each direction."""
        hosts = self.all["hosts"]
        return 8.0 * self.all["parameters"] * (hosts - 1) / hosts

    def rate(self, ratio: float) -> str:
        """Return the rate at which a dense exchange takes `ratio` times a step's computation."""
        seconds = ratio * self.all["compute_ms"] / 1e3
        return f"{8e-3 * self.link_bytes / seconds:.0f}kbit"

    def steps(self, method: str) -> list[int | None]:
        """Return the steps to the target, by seed; None for never."""
        return [row["steps"] for row in self.rows("train", method=method)]

    def ms(self, method: str, ratio: float) -> float | None:
        """Return the time of a step; None if it was not measured."""
        rows = self.rows("time", method=method, ratio=ratio)
        return rows[0]["ms"] if rows else None

    def predicted_ms(self, method: str, rate: float) -> float:
        """Return the time of a step at a rate in bits a second, between those that were timed.

        Linear in the time of a dense exchange; beyond the fastest and the slowest link as there.
        """
        ratio = 8e3 * self.link_bytes / rate / self.all["compute_ms"]
        rows = sorted(self.rows("time", method=method), key=lambda row: row["ratio"])
        return float(np.interp(ratio, [r["ratio"] for r in rows], [r["ms"] for r in rows]))

    def speed_ups(self, method: str, ratio: float) -> list[float]:
        """Return how many times sooner than stock Horovod a method is at the target, by seed."""
        ours, stock = self.ms(method, ratio), self.ms(STOCK, ratio)
        if ours is None or stock is None:
            return []
        speed_ups = []
        for row in self.rows("train", method=method):
            base = self.rows("train", method=STOCK, seed=row["seed"])
            if row["steps"] and base:
                speed_ups.append(base[0]["steps"] * stock / (row["steps"] * ours))
        return speed_ups


def job(
    hosts: Hosts,
    task: str,
    mode: str,
    methods: Sequence[str],
    *,
    seed: int = 1,
    target: float | None = None,
    folder_of_data: Path | None = None,
    timeout: float = 7200.0,
) -> Rows:
    """Run a worker on each host; return its results.

    Args:
        hosts: where.
        task: of `methods.TASKS`.
        mode: "train" or "time".
        methods: keys of the task's; "" for no exchange.
        seed, target: see the worker.
        folder_of_data: in the place of Debian's packages.
        timeout: seconds.
    """
    job = {"task": task, "mode": mode, "methods": methods, "seed": seed, "target": target}
    job["data"] = str(folder_of_data) if folder_of_data else None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.json")
        path.write_text(json.dumps(job))
        # The ranks of DistributedDataParallel find each other by this interface.
        env = {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        output = hosts.horovodrun([*WORKER, str(path)], env=env, timeout=timeout)
    return results(output)


def results(output: str) -> Rows:
    """Return what a worker printed."""
    lines = (line.partition(MARK) for line in output.splitlines())
    return [json.loads(row) for _, mark, row in lines if mark]


def measure(measured: Measured, options: argparse.Namespace, console: Console) -> None:
    methods = [
        key for key in measured.training.methods if not options.methods or key in options.methods
    ]
    methods = [STOCK, *(key for key in methods if key != STOCK)]
    how = {"folder_of_data": options.data, "timeout": options.timeout}
    with Hosts(options.hosts) as hosts:
        if measured.all["compute_ms"] is None:
            (alone,) = job(hosts, options.task, "time", [""], **how)
            measured.all |= {"compute_ms": alone["median_ms"], "parameters": alone["parameters"]}
            measured.save()
        compute = measured.all["compute_ms"]
        console.print(
            f"{measured.training.title}: {measured.all['parameters']:,} parameters; a step of "
            f"{compute:.1f} ms without an exchange, the median of {SEPARATE}"
        )
        if "train" in options.parts:
            for seed in options.seeds:
                _train(measured, hosts, options, console, methods, seed)
        for ratio in options.ratios if "time" in options.parts else ():
            known = {row["method"] for row in measured.rows("time", ratio=ratio)}
            left = [method for method in methods if options.again or method not in known]
            hosts.set_rate(measured.rate(ratio))
            seconds = sum(_seconds(measured, method, ratio) for method in left)
            console.print(
                f"link of {measured.rate(ratio)}: dense exchanges take {ratio:g} times a step; "
                f"{len(left)} methods, about {seconds / 60:.0f} minutes"
            )
            for row in job(hosts, options.task, "time", left, **how) if left else ():
                measured.add("time", row, ratio=ratio)
                console.print(f"  {row['method']}: {row['ms']:.1f} ms a step")
        for ratio in options.ratios if "advise" in options.parts else ():
            hosts.set_rate(measured.rate(ratio))
            advice = advised.advice(hosts, options.data, options.timeout)
            sooner = {
                method: measured.speed_ups(method, ratio) for method in measured.training.methods
            }
            measured.advised(advised.compared(advice, sooner), ratio)
            console.print(measured.advice(ratio))
        if "whole" in options.parts:
            hosts.set_rate(measured.rate(CHECKED))
            for method in options.whole:
                if options.again or not measured.rows("whole", method=method):
                    base = measured.rows("train", method=STOCK, seed=1)
                    if not base and method != STOCK:
                        raise SystemExit("`whole` needs the target of seed 1: --parts train whole")
                    target = None if method == STOCK else base[0]["target"]
                    for row in job(hosts, options.task, "train", [method], target=target, **how):
                        measured.add("whole", row, ratio=CHECKED)
                        console.print(f"  {method}, whole: {row['seconds']:.0f} s")


def _train(
    measured: Measured,
    hosts: Hosts,
    options: argparse.Namespace,
    console: Console,
    methods: Sequence[str],
    seed: int,
) -> None:
    """Train to the target with each method that is not known; stock Horovod sets the target."""
    known = {row["method"] for row in measured.rows("train", seed=seed)}
    left = [method for method in methods if options.again or method not in known]
    how = {"folder_of_data": options.data, "timeout": options.timeout}
    steps_at_most = sum(
        measured.training.goal * (LIMIT if method != STOCK else 1) for method in left
    )
    minutes = steps_at_most * measured.all["compute_ms"] / 6e4
    if left:
        console.print(f"seed {seed}: {len(left)} methods to train, at most {minutes:.0f} minutes")
    for method in left:
        base = measured.rows("train", method=STOCK, seed=seed)
        target = base[0]["target"] if base and method != STOCK else None
        for row in job(hosts, options.task, "train", [method], seed=seed, target=target, **how):
            measured.add("train", row, seed=seed)
            console.print(f"  {method}: {row['steps'] or 'never'}, {row['seconds']:.0f} s")


def _seconds(measured: Measured, method: str, ratio: float) -> float:
    """Estimate how long it takes to time a method: computation, link, and the start of ranks."""
    rows = measured.rows("train", method=method)
    share = rows[0]["bytes_a_step"] / (4 * measured.all["parameters"]) if rows else 1.0
    steps = measured.training.methods[method].lead + TIMED
    return 2 + steps * measured.all["compute_ms"] / 1e3 * (1.2 + ratio * share)


def table(measured: Measured) -> Table:
    """Return times faster to the target than stock Horovod, by method and ratio."""
    ratios = sorted({row["ratio"] for row in measured.all["time"]})
    shown = Table(title=f"{measured.training.title}: times sooner", box=box.MARKDOWN)
    heads = ("method", "times fewer bytes", "steps to the target")
    for head in (*heads, *(f"{ratio:g}" for ratio in ratios)):
        shown.add_column(head, justify="left" if head == "method" else "right")
    for key, method in measured.training.methods.items():
        rows = measured.rows("train", method=key)
        if not rows:
            continue
        fewer = statistics.median(4 * r["parameters"] / r["bytes_a_step"] for r in rows)
        steps = "/".join(str(s or "never") for s in measured.steps(key))
        cells = [cell(measured, key, ratio) for ratio in ratios]
        shown.add_row(method.title, f"{fewer:,.1f}", steps, *cells)
    return shown


def cell(measured: Measured, method: str, ratio: float) -> str:
    """Return times sooner at the target, and the time of a step; empty if it was not timed."""
    ms, speed_ups = measured.ms(method, ratio), measured.speed_ups(method, ratio)
    if ms is None:
        return ""
    times = f"{statistics.median(speed_ups):.2f}" if speed_ups else "never"
    return f"{times} ({ms:,.0f} ms)"


def draw(measured: Measured, path: Path) -> None:
    """Draw the times sooner at the target against how communication-bound a step is."""
    ratios = sorted({row["ratio"] for row in measured.all["time"]})
    with pyplot.rc_context(style.SETTINGS):
        figure, axes = pyplot.subplots(figsize=(7.2, 4.6), layout="constrained")
        keys = [
            key
            for key in measured.training.methods
            if key != STOCK and any(measured.speed_ups(key, ratio) for ratio in ratios)
        ]
        for look, key in zip(style.lines(len(keys)), keys):
            points = [(r, measured.speed_ups(key, r)) for r in ratios]
            points = [(r, speed_ups) for r, speed_ups in points if speed_ups]
            middle = [statistics.median(speed_ups) for _, speed_ups in points]
            spread = (
                [m - min(speed_ups) for m, (_, speed_ups) in zip(middle, points)],
                [max(speed_ups) - m for m, (_, speed_ups) in zip(middle, points)],
            )
            where = [r for r, _ in points]
            label = measured.training.methods[key].title
            axes.errorbar(where, middle, yerr=spread, label=label, markersize=4, **look)
        axes.axhline(1.0, color=style.INK, linewidth=1.5)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
        marks = [y for y in (0.5, 1, 2, 5, 10, 20, 50) if y <= 1.2 * axes.get_ylim()[1]]
        axes.set_yticks(marks, [f"{y:g}" for y in marks])
        axes.set_xlabel("time of a dense exchange, in steps without one")
        axes.set_ylabel("times sooner at the target")
        axes.set_title(f"{measured.training.title}, {measured.all['hosts']} hosts", fontsize=9)
        figure.legend(loc="outside right upper", fontsize=7)
        figure.savefig(path)
        pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="transformer")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", default=[], metavar="KEY", help="and stock Horovod")
    parser.add_argument("--parts", nargs="+", choices=("train", "time", "whole", "advise"))
    parser.add_argument("--whole", nargs="+", default=[STOCK, "bf16", "hook", "sparse-5"])
    parser.add_argument("--again", action="store_true", help="also what is there")
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds of a job")
    parser.add_argument("--data", type=Path, help="a folder in the place of Debian's packages")
    parser.add_argument("--folder", type=Path, default=Path("results/worth"))
    parser.add_argument("--show", type=Path, metavar="JSON", help="measures nothing")
    options = parser.parse_args()
    if unknown := {*options.methods, *options.whole} - {*TASKS[options.task].methods}:
        parser.error(f"no methods of {options.task}: {', '.join(sorted(unknown))}")
    options.parts = options.parts or ("train", "time", "whole")
    console = Console(width=200)
    if options.show:
        kept = json.loads(options.show.read_text())
        measured = Measured(options.show, TASKS[kept["task"]], kept["hosts"])
        console.print(table(measured))
        draw(measured, options.show.with_suffix(".png"))
        return 0
    path = options.folder / f"worth-{options.task}.json"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        data.install(options.data)
        measured = Measured(path, TASKS[options.task], options.hosts)
        measure(measured, options, console)
    except (HostsError, data.DataError) as error:
        print(error, file=sys.stderr)
        return 2
    except JobError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    console.print(table(measured))
    draw(measured, path.with_suffix(".png"))
    console.print(f"results: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
