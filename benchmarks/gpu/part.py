"""Part of the benchmark, and the setting that it is measured in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Row = dict[str, Any]


class Setting(NamedTuple):
    """Setting of a run: the devices, and what of a part is measured.

    Attributes:
        device: "cuda", or "cpu" for a rehearsal at a small size.
        devices: how many there are.
        only: points of `benchmarks.points` to measure; all if there are none.
        workers: of pytest, by pytest-xdist; 0 for one process.
        whole: all tests, in the place of those that fit into some minutes.
    """

    device: str
    devices: int = 1
    only: tuple[str, ...] = ()
    workers: int = 0
    whole: bool = False

    @property
    def is_small(self) -> bool:
        return self.device == "cpu"


class Part(NamedTuple):
    """Part of the benchmark, whose rows are measured one by one.

    Attributes:
        share: of the time, beside those of other parts.
        names: returns the names of all rows, in the order of their worth.
        measure: yields the rows of some names as they come, each with its "name"; with an "error"
            if it has failed, or why it was "cut" if it was stopped. It leaves out what would end
            after a moment of `time.monotonic()`.
    """

    share: float
    names: Callable[[Setting], list[str]]
    measure: Callable[[Setting, list[str], float], Iterator[Row]]
