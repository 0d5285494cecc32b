"""Tables of what `make worth` has measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.worth.methods import DENSE, METHODS
from benchmarks.worth.recipes import RECIPES
from benchmarks.worth.results import LENGTHS, Results, Row, Setting, spread


def _rows(heads: list[str], rows: list[list[str]], texts: int = 1) -> str:
    """Return a table whose first columns are texts, and the others numbers."""
    lines = [heads, [*["---"] * texts, *["--:"] * (len(heads) - texts)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _mark(row: Row) -> str:
    """Return a mark for trainings whose products were not in bfloat16."""
    return "" if row.get("precision", "bfloat16") == "bfloat16" else "\\*"


def losses(results: Results, setting: Setting) -> str:
    """Return a table of losses by rate, at the best one, and behind dense, with bytes."""
    rates = sorted({run.rate for run in results.losses(setting, length=1.0)})
    goal = results.goal(setting)
    rows = []
    for method in results.methods(setting):
        cells = [METHODS[method].title]
        for rate in rates:
            one = results.losses(setting, method=method, length=1.0, rate=rate, seed=1)
            cells.append("".join(f"{x:.3f}{_mark(results.trained[run])}" for run, x in one.items()))
        at_best = results.at_best(setting, method)
        if not at_best:
            continue
        behind = "" if goal is None else f"{statistics.median(at_best) - goal:+.3f}"
        cells += [spread(at_best), behind, f"{results.fewer_bytes(setting, method):,.1f}"]
        rows.append(cells)
    return _rows(
        ["method", *(f"{r:.3g}" for r in rates), "at its best", "behind", "times fewer bytes"], rows
    )


def lockstep(results: Results, setting: Setting, length: float = 1.0) -> str:
    """Return a table of replicas in one process: losses, bytes, and the time of computing."""
    steps = round(length * RECIPES[setting.recipe].steps)
    trained = {run: results.trained[run] for run in results.losses(setting, length=length, seed=1)}
    trained = {run: row for run, row in trained.items() if "lockstep" in row}
    goals = [row["loss"] for run, row in trained.items() if run.method == DENSE]
    lines = []
    for run, row in sorted(trained.items(), key=lambda item: [*METHODS].index(item[0].method)):
        behind = f"{row['loss'] - min(goals):+.3f}" if goals else ""
        fewer = f"{4 * row['parameters'] / row['bytes_a_step']:,.1f}" if row["bytes_a_step"] else ""
        cells = [METHODS[run.method].title, f"{run.rate:.3g}", f"{row['loss']:.3f}", behind, fewer]
        times = 1e3 * row["seconds"] / steps, row["encode_ms"]
        lines.append([*cells, *(f"{ms:.1f}" for ms in times)])
    heads = ["method", "rate", "loss", "behind", "times fewer bytes", "ms a step"]
    return _rows([*heads, "ms to encode and decode"], lines)


def length(results: Results, setting: Setting, method: str) -> str:
    """Return the length of training that reaches the loss of dense ones, or beyond what it is."""
    needed = results.needed(setting, method)
    if needed is not None:
        return f"{needed:.2f}"
    longest = [x for x in LENGTHS if results.at_best(setting, method, x)]
    return f"> {longest[-1]:g}" if longest else ""


def times(results: Results, setting: Setting) -> str:
    """Return a table of times sooner at the loss of dense trainings, by ratio; of timed methods."""
    ratios = results.ratios(setting)
    rows = []
    for method in results.methods(setting):
        cells = [METHODS[method].title, length(results, setting, method)]
        for ratio in ratios:
            ms, sooner = results.ms(setting, method, ratio), results.sooner(setting, method, ratio)
            gain = "later" if sooner is None else f"{sooner:.2f}"
            cells.append("" if ms is None else f"{gain} ({ms:,.0f} ms)")
        if any(cells[2:]):
            rows.append(cells)
    return _rows(["method", "length", *(f"{ratio:g}" for ratio in ratios)], rows)


def gains(results: Results, methods: Sequence[str]) -> str:
    """Return a table of times sooner for some methods, in all settings whose steps were timed."""
    settings = [setting for setting in results.settings() if results.ratios(setting)]
    ratios = sorted({ratio for setting in settings for ratio in results.ratios(setting)})
    rows = []
    for setting in settings:
        for method in methods:
            sooner = [results.sooner(setting, method, ratio) for ratio in ratios]
            if any(sooner):
                cells = ["" if x is None else f"{x:.1f}" for x in sooner]
                model = f"{RECIPES[setting.recipe].title}, {setting.hosts} hosts"
                rows.append([model, METHODS[method].title, *cells])
    heads = ["model, hosts", "method", *(f"at {ratio:g}" for ratio in ratios)]
    return _rows(heads, rows, texts=2)
