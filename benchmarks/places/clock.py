"""What all places have in common: the model's size, and a clock."""

from __future__ import annotations

import time

FIRST, TIMED = 10, 20  # steps before those that are timed, and of those; whole rounds
STEPS = FIRST + TIMED
WINDOWS, LENGTH, WORDS, WIDTH, BLOCKS, HEADS = 4, 96, 128, 128, 4, 4
RATE = 3e-4


class Clock:
    """Mean time of the steps after the first ones."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def step(self) -> None:
        """Note that a step has ended."""
        self._ends.append(time.perf_counter())

    @property
    def ms(self) -> float:
        return 1e3 * (self._ends[STEPS - 1] - self._ends[FIRST - 1]) / TIMED
