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
MARKS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)  # nats


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


def draw_bytes(results: Results, settings: dict[str, Setting], path: Path) -> None:
    """Draw how far each method ends behind dense, against how many times fewer bytes it sends."""
    with pyplot.rc_context(style.SETTINGS):
        figure, axes = pyplot.subplots(
            1,
            len(settings),
            figsize=(3.6 + 3.2 * len(settings), 4.4),
            layout="constrained",
            sharey=True,
        )
        methods = {
            method for setting in settings.values() for method in results.methods(setting)
        } - {DENSE}
        looks = dict(zip([w for w in METHODS if w in methods], style.lines(len(methods))))
        handles = {}
        for axis, (title, setting) in zip([axes] if len(settings) == 1 else axes, settings.items()):
            goal = results.goal(setting)
            for method in results.methods(setting):
                at_best = results.at_best(setting, method)
                if method == DENSE or goal is None or not at_best:
                    continue
                look = {k: v for k, v in looks[method].items() if k != "linestyle"}
                behind = statistics.median(at_best) - goal
                fewer = results.fewer_bytes(setting, method)
                (handles[method],) = axis.plot([fewer], [behind], linestyle="", **look)
            axis.axhline(0.0, color=style.INK, linewidth=1.5)
            axis.axhline(0.02, color=style.INK, linewidth=1, linestyle=":")
            axis.set_xscale("log")
            axis.set_yscale("symlog", linthresh=0.05)
            axis.set_yticks(MARKS, [f"{mark:g}" for mark in MARKS])
            axis.set_xlabel("times fewer bytes")
            axis.set_title(title, fontsize=9)
            axis.set_ylabel("nats behind dense, each at its best rate")
            axis.label_outer()
        labels = {method: METHODS[method].title for method in looks if method in handles}
        figure.legend(
            [handles[method] for method in labels], [*labels.values()],
            loc="outside right upper", fontsize=7,
        )  # fmt: skip
        figure.savefig(path)
        pyplot.close(figure)
