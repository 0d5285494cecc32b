"""File of all results: a row for each training, with its settings, written at once."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.worth.methods import DENSE, METHODS, PLAIN
from benchmarks.worth.recipes import RECIPES, SHAPES, SMALL

Row = dict[str, Any]
LENGTHS = (1.0, 1.25, 1.5, 2.0)  # of trainings, in usual ones


class Run(NamedTuple):
    """A training: what identifies its row.

    Attributes:
        recipe, method: keys of `RECIPES` and `METHODS`.
        hosts: ranks that exchange.
        batch: samples a step of all ranks together.
        length: in usual trainings.
        rate: of learning at its highest.
        seed: of the model and the batches.
    """

    recipe: str
    method: str
    hosts: int
    batch: int
    length: float
    rate: float
    seed: int


class Setting(NamedTuple):
    """Model, hosts and batch of trainings, whatever the method.

    Attributes:
        recipe: a key of `RECIPES`.
        hosts: ranks that exchange.
        batch: samples a step of all ranks together.
    """

    recipe: str
    hosts: int
    batch: int


def setting_of(row: Row) -> Setting:
    return Setting(row["recipe"], row["hosts"], row["batch"])


TUNED_ON = 2  # hosts


def usual(recipe: str, hosts: int = TUNED_ON, grow: bool = False) -> Setting:
    """Return the setting of a recipe whose batch is that of two hosts, or `grow`s with hosts."""
    batch = RECIPES[recipe].batch
    return Setting(recipe, hosts, batch * hosts // TUNED_ON if grow else batch)


class Results:
    """Results of trainings and timings.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.machine = {
            "cores": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__
        }  # fmt: skip
        self.trained: dict[Run, Row] = {}
        self.timed: list[Row] = []
        self.advised: list[Row] = []
        if path.exists():
            kept = json.loads(path.read_text())
            self.machine, self.timed = kept["machine"], kept["timed"]
            self.advised = kept.get("advised", [])
            for row in kept["trained"]:
                self.trained[Run(**{name: row.pop(name) for name in Run._fields})] = row

    def save(self) -> None:
        rows = [{**run._asdict(), **row} for run, row in sorted(self.trained.items())]
        kept = {"machine": self.machine, "trained": rows, "timed": self.timed}
        text = json.dumps({**kept, "advised": self.advised}, indent=1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".part")
        scratch.write_text(text + "\n")
        scratch.replace(self.path)

    def add(self, run: Run, row: Row) -> None:
        self.trained[run] = row
        self.save()

    def add_time(self, setting: Setting, ratio: float, method: str, row: Row) -> None:
        """Add the time of a step, in the place of one of the same setting, ratio and method."""
        which = {**setting._asdict(), "ratio": ratio, "method": method}
        others = [r for r in self.timed if any(r[k] != v for k, v in which.items())]
        self.timed = [*others, {**which, **row}]
        self.save()

    def add_advice(self, setting: Setting, ratio: float, row: Row) -> None:
        """Add what was recommended, in the place of what was at the same setting and ratio."""
        which = {**setting._asdict(), "ratio": ratio}
        others = [r for r in self.advised if any(r[k] != v for k, v in which.items())]
        self.advised = [*others, {**which, **row}]
        self.save()

    def losses(self, setting: Setting, **which: Any) -> dict[Run, float]:
        """Return the losses of the setting's trainings that agree with `which`."""
        which |= setting._asdict()
        return {
            run: row["loss"]
            for run, row in self.trained.items()
            if all(getattr(run, name) == value for name, value in which.items())
        }

    def best_rate(self, setting: Setting, method: str) -> float | None:
        """Return the rate with the lowest loss in trainings of usual length; None if none ran."""
        losses = self.losses(setting, method=method, length=1.0, seed=1)
        losses = {run: loss for run, loss in losses.items() if math.isfinite(loss)}
        return min(losses, key=lambda run: losses[run]).rate if losses else None

    def carried_rate(self, setting: Setting, method: str) -> float | None:
        """Return the rate that follows from the small model's on two hosts; None if none ran.

        It is divided by the square of how many times wider the model is, and multiplied by the root
        of how many times larger the batch of all ranks is.
        """
        if setting.recipe not in SHAPES:
            return self.best_rate(usual(setting.recipe), method)
        rate = self.best_rate(usual(SMALL), method)
        if rate is None:
            return None
        wider = SHAPES[setting.recipe].width / SHAPES[SMALL].width
        return float(f"{rate / wider**2 * (setting.batch / RECIPES[SMALL].batch) ** 0.5:.3g}")

    def at_best(self, setting: Setting, method: str, length: float = 1.0) -> list[float]:
        """Return the losses of all seeds at the method's best rate."""
        rate = self.best_rate(setting, method)
        return list(self.losses(setting, method=method, length=length, rate=rate).values())

    def needed(self, setting: Setting, method: str, goal: float | None = None) -> float | None:
        """Return the length of a training, in usual ones, that ends with the loss of dense ones.

        Between the lengths that were trained, linearly in the loss of medians; None if the longest
        does not reach it.

        Args:
            setting, method: of the training.
            goal: in the place of the loss of dense ones.
        """
        goal, before = self.goal(setting) if goal is None else goal, None
        for length in LENGTHS:
            losses = self.at_best(setting, method, length)
            if not losses or goal is None:
                continue
            loss = statistics.median(losses)
            if loss <= goal:
                if before is None:
                    return length
                share = (before[1] - goal) / (before[1] - loss)
                return float(before[0] + share * (length - before[0]))
            before = length, loss
        return None

    def needed_span(self, setting: Setting, method: str) -> tuple[float, float, float]:
        """Return the length for the highest, the median and the lowest loss of dense seeds.

        Where dense gradients have one seed, they spread as on two hosts: it is the same training.
        A loss that the longest training missed is reached after it, by the line through the last
        two, and not after the next longer one that was not trained.
        """
        dense = self.at_best(setting, DENSE)
        if len(dense) == 1:
            seeds = self.at_best(usual(setting.recipe), DENSE)
            dense = [dense[0] + loss - statistics.median(seeds) for loss in seeds]
        goals = max(dense), statistics.median(dense), min(dense)
        low, middle, high = (self._reaches(setting, method, goal) for goal in goals)
        return low, middle, high

    def _reaches(self, setting: Setting, method: str, goal: float) -> float:
        """Return `needed`, or how long it would be beyond the longest training."""
        needed = self.needed(setting, method, goal)
        if needed is not None:
            return needed
        losses = {length: self.at_best(setting, method, length) for length in LENGTHS}
        known = [(x, statistics.median(each)) for x, each in losses.items() if each]
        longest, loss = known[-1]
        following = next((x for x in LENGTHS if x > longest), 2 * LENGTHS[-1])
        if len(known) == 1 or loss >= known[-2][1]:
            return following
        before, higher = known[-2]
        return min(following, longest + (loss - goal) * (longest - before) / (higher - loss))

    def goal(self, setting: Setting) -> float | None:
        """Return the median loss of dense trainings of usual length at their best rate."""
        losses = self.at_best(setting, DENSE)
        return statistics.median(losses) if losses else None

    def row(self, setting: Setting, method: str, ratio: float) -> Row | None:
        """Return what was timed; None if nothing was."""
        which = {**setting._asdict(), "ratio": ratio, "method": method}
        rows = [r for r in self.timed if all(r[k] == v for k, v in which.items())]
        return rows[0] if rows else None

    def ms(self, setting: Setting, method: str, ratio: float) -> float | None:
        """Return the milliseconds of a step, of which each is a batch; None if it was not timed."""
        row = self.row(setting, method, ratio)
        return None if row is None else float(row["ms"])

    def ratios(self, setting: Setting) -> list[float]:
        """Return the ratios at which steps were timed."""
        rows = (row for row in self.timed if setting_of(row) == setting)
        return sorted({float(row["ratio"]) for row in rows})

    def seconds(self, setting: Setting, method: str, ratio: float) -> float | None:
        """Return the seconds to the loss of dense trainings; None if it is not known or never.

        Steps of a method that begins with dense ones take the time of those.
        """
        length, ms = self.needed(setting, method), self.ms(setting, method, ratio)
        dense = self.ms(setting, DENSE, ratio)
        if length is None or ms is None or dense is None:
            return None
        recipe = RECIPES[setting.recipe]
        first = recipe.warmup_steps if METHODS[method].dense_first else 0
        return (first * dense + (length * recipe.steps - first) * ms) / 1e3

    def plain(self, setting: Setting, ratio: float) -> tuple[str, float] | None:
        """Return the quickest of dense and accumulated gradients, and its seconds."""
        seconds = {method: self.seconds(setting, method, ratio) for method in PLAIN}
        known = {method: each for method, each in seconds.items() if each is not None}
        return min(known.items(), key=lambda item: item[1]) if known else None

    def sooner(self, setting: Setting, method: str, ratio: float) -> float | None:
        """Return how many times sooner than dense or accumulated gradients a method is."""
        seconds, plain = self.seconds(setting, method, ratio), self.plain(setting, ratio)
        return None if seconds is None or plain is None else plain[1] / seconds

    def settings(self) -> list[Setting]:
        return sorted({Setting(run.recipe, run.hosts, run.batch) for run in self.trained})

    def fewer_bytes(self, setting: Setting, method: str) -> float:
        """Return how many times fewer bytes than dense a whole training sent."""
        run = next(iter(self.losses(setting, method=method, length=1.0)))
        row = self.trained[run]
        return float(4 * row["parameters"] / row["bytes_a_step"])

    def methods(self, setting: Setting) -> list[str]:
        """Return the methods that were trained, in the order of `METHODS`."""
        trained = {run.method for run in self.losses(setting)}
        return [method for method in METHODS if method in trained]


def spread(values: Iterable[float]) -> str:
    """Return a median, with the smallest and largest of several values."""
    ordered = sorted(values)
    middle = f"{statistics.median(ordered):.3f}"
    return middle if len(ordered) == 1 else f"{middle} ({ordered[0]:.3f} to {ordered[-1]:.3f})"
