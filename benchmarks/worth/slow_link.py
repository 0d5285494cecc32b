"""Time of a training over a slow link, for the end of the demo."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from pathlib import Path

from rich.table import Table

from benchmarks.rig import Hosts, HostsError, JobError, bits_per_second, refusal
from benchmarks.worth import __main__ as worth

SLOW, LINK = ("stock", "bf16", "hook", "local-int8", "denser-5"), "100mbit"


def timed_here(known: worth.Measured) -> dict[str, float]:
    """Time a step over the slow link, ms by method; empty where there are no hosts, or no text."""
    if refusal() is not None or shutil.which("bible") is None:
        return {}
    try:
        with Hosts(known.all["hosts"], LINK) as hosts:
            rows = worth.job(hosts, known.all["task"], "time", SLOW, timeout=300.0)
    except (HostsError, JobError) as error:
        print(f"A step over the slow link cannot be timed here. {error}", file=sys.stderr)
        return {}
    return {row["method"]: row["ms"] for row in rows}


def training(path: Path) -> Table:
    """Tabulate a training to one loss over a slow link, timed here if there can be hosts.

    Else the time of a step is predicted from what was measured on another machine. The number of
    steps was measured there in any case: it takes trainings of some minutes each.

    Args:
        path: of what `make worth` has measured.
    """
    kept = json.loads(path.read_text())
    known = worth.Measured(path, worth.TASKS[kept["task"]], kept["hosts"])
    step = timed_here(known)
    how = "measured here, now" if step else "predicted from docs/measured"
    step = step or {method: known.predicted_ms(method, bits_per_second(LINK)) for method in SLOW}
    title = f"A transformer to one loss, {known.all['hosts']} hosts at 100 Mb/s: {how}"
    shown = Table(title=title)
    for head in ("method", "ms/step", "steps", "minutes", "times sooner"):
        shown.add_column(head, justify="left" if head == "method" else "right")
    minutes = {}
    for method in SLOW:
        steps = statistics.median(steps for steps in known.steps(method) if steps)
        minutes[method] = step[method] * steps / 6e4
        cells = f"{step[method]:,.0f}", f"{steps:.0f}", f"{minutes[method]:.1f}"
        times = minutes[SLOW[0]] / minutes[method]
        shown.add_row(known.training.methods[method].title, *cells, f"{times:.1f}")
    return shown
