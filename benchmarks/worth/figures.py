"""Figures of what `make worth` has measured."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib

from benchmarks.worth.methods import DENSE, METHODS
from benchmarks.worth.results import Results, Setting
from hvd_gradcomp.cli import style

matplotlib.use("Agg")
from matplotlib import pyplot

SHOWN = ("eighth-5", "local-int8", "local-int8-5", "post-local", "qsgd", "nesterov-int8")
MARKS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # nats
FEWER = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # times


def draw_sooner(results: Results, setting: Setting, title: str, path: Path) -> None:
    """Draw the times sooner than dense or accumulated against how communication-bound a step is."""
    ratios = results.ratios(setting)
    lines = {}
    for method in SHOWN:
        points = [(ratio, results.sooner(setting, method, ratio)) for ratio in ratios]
        known = [(ratio, sooner) for ratio, sooner in points if sooner is not None]
        if known:
            lines[method] = known
    with pyplot.rc_context(style.SETTINGS):
        figure, axes = pyplot.subplots(figsize=(7.2, 4.4), layout="constrained")
        for look, (method, points) in zip(style.lines(len(lines)), lines.items()):
            axes.plot(*zip(*points), label=METHODS[method].title, markersize=4, **look)
        axes.axhline(1.0, color=style.INK, linewidth=1.5)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
        low, high = axes.get_ylim()
        marks = [y for y in (0.5, 1, 2, 5, 10, 20) if low <= y <= 1.1 * high]
        axes.set_yticks(marks, [f"{y:g}" for y in marks])
        axes.minorticks_off()
        axes.set_xlabel("dense exchange / step without an exchange")
        axes.set_ylabel("times sooner than dense or accumulated")
        axes.set_title(title, fontsize=9)
        style.label_ends(axes, fontsize=8)
        figure.savefig(path)
        pyplot.close(figure)


def family(method: str) -> str:
    """Return what a method is in the figure's legend."""
    how = METHODS[method]
    if how.peer:
        return "PyTorch's own"
    if how.passes > 1:
        return "accumulated gradients"
    return "local steps" if how.local else "compressed gradients"


def draw_bytes(results: Results, settings: dict[str, Setting], path: Path) -> None:
    """Draw how far each method ends behind dense, against how many times fewer bytes it sends.

    A panel for each setting, one above the other; points have their methods' titles beside them.
    """
    chosen = {
        title: [method for method in results.methods(setting) if method != DENSE]
        for title, setting in settings.items()
    }
    families = sorted({family(method) for methods in chosen.values() for method in methods})
    looks = dict(zip(families, style.lines(len(families))))
    heights = [1.6 + 0.2 * len(methods) for methods in chosen.values()]
    with pyplot.rc_context(style.SETTINGS):
        figure, axes = pyplot.subplots(
            len(settings),
            1,
            figsize=(7.2, sum(heights)),
            height_ratios=heights,
            layout="constrained",
            sharex=True,
            squeeze=False,
        )
        handles = {}
        for axis, (title, setting) in zip(axes[:, 0], settings.items()):
            axis.set_xscale("log")
            axis.set_yscale("symlog", linthresh=0.05)
            axis.margins(y=0.1)
            goal = results.goal(setting)
            for method in chosen[title]:
                at_best = results.at_best(setting, method)
                if goal is None or not at_best:
                    continue
                kind = family(method)
                look = looks[kind] | {"linestyle": "", "markersize": 5}
                point = results.fewer_bytes(setting, method), statistics.median(at_best) - goal
                (handles[kind],) = axis.plot(*zip(point), label=METHODS[method].title, **look)
            axis.axhline(0.0, color=style.INK, linewidth=1.5)
            axis.axhline(0.02, color=style.INK, linewidth=1, linestyle=":")
            marks = [mark for mark in MARKS if mark <= axis.get_ylim()[1]]
            axis.set_yticks(marks, [f"{mark:g}" for mark in marks])
            low, high = axis.get_xlim()
            ticks = [times for times in FEWER if low <= times <= high]
            axis.set_xticks(ticks, [f"{times:g}" for times in ticks])
            axis.minorticks_off()
            axis.set_title(title, fontsize=9)
            axis.set_ylabel("nats behind dense")
        axes[-1, 0].set_xlabel("times fewer bytes")
        figure.legend(
            [*handles.values()],
            [*handles],
            loc="outside upper left",
            ncols=len(handles),
            fontsize=8,
        )
        for axis in axes[:, 0]:
            style.label_ends(axis)
        figure.savefig(path)
        pyplot.close(figure)
