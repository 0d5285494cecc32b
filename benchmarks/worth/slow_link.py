"""Time of a training over a slow link, for the end of the demo."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from rich.table import Table

from benchmarks.rig import Hosts, HostsError, JobError, bits_per_second, refusal
from benchmarks.worth.methods import DENSE, METHODS
from benchmarks.worth.recipes import RECIPES, SMALL
from benchmarks.worth.results import Results, usual
from benchmarks.worth.timings import predicted, timed

SETTING, LINK = usual(SMALL), "100mbit"
SLOW = (DENSE, "accumulate-4", "hook", "qsgd", "local-int8", "eighth-5")


def timed_here() -> dict[str, float]:
    """Time a step over the slow link, ms by method; empty where there are no hosts, or no text."""
    if refusal() is not None or shutil.which("bible") is None:
        return {}
    try:
        with Hosts(SETTING.hosts, LINK) as hosts:
            rows = timed(hosts, SETTING, SLOW, None, turns=1, limit=300.0)
    except (HostsError, JobError) as error:
        print(f"A step over the slow link cannot be timed here. {error}", file=sys.stderr)
        return {}
    return {method: ms for method, (ms, _) in rows.items()}


def training(path: Path) -> Table:
    """Tabulate a training to one loss over a slow link, timed here if there can be hosts.

    Else the time of a step is predicted from what was measured on another machine. The number of
    steps was measured there in any case: it takes trainings of some minutes each.

    Args:
        path: of what `make worth` has measured.
    """
    known = Results(path)
    ms = timed_here()
    how = "measured here, now" if ms else "predicted from docs/measured"
    rate = bits_per_second(LINK)
    ms = ms or {method: predicted(known, SETTING, method, rate) for method in SLOW}
    title = f"A transformer to one loss, {SETTING.hosts} hosts at 100 Mb/s: {how}"
    shown = Table(title=title)
    for head in ("method", "ms/step", "steps", "minutes", "times sooner"):
        shown.add_column(head, justify="left" if head == "method" else "right")
    dense = None
    for method in SLOW:
        length = known.needed(SETTING, method)
        if length is None:
            shown.add_row(METHODS[method].title, f"{ms[method]:,.0f}", "not reached", "", "")
            continue
        steps = length * RECIPES[SETTING.recipe].steps
        minutes = ms[method] * steps / 6e4
        dense = dense or minutes
        cells = f"{ms[method]:,.0f}", f"{steps:,.0f}", f"{minutes:.1f}", f"{dense / minutes:.1f}"
        shown.add_row(METHODS[method].title, *cells)
    return shown
