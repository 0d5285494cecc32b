"""Trace of a training, step by step, and of what it leaves behind: no framework."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

SURVIVED = ("survived", "")
CLOSE = 1e-5  # of weights of about 0.3 whose gradients were summed up in another order


class Trace(NamedTuple):
    """A training of this rank's.

    Attributes:
        weights: after each step, flat; NaN where a step was left out.
        kept: digest of what is saved at the end.
        collectives: in all steps but the first two, in which frameworks set up.
    """

    weights: list[np.ndarray]
    kept: str = ""
    collectives: int = 0


def compare(trace: Trace, oracle: Trace, rounded: float = 0.0) -> tuple[str, str]:
    """Return an outcome, and words: equal to the oracle or not.

    Args:
        trace: of a training with a situation.
        oracle: without it.
        rounded: by how much weights may differ; 0 for equal to the bit, with what is saved.
    """
    for step, (ours, theirs) in enumerate(zip(trace.weights, oracle.weights, strict=True)):
        if ours.tobytes() != theirs.tobytes():
            largest = np.abs(ours.astype("f8") - theirs.astype("f8")).max()
            if not (rounded and largest <= rounded):
                return "altered", f"weights differ by {largest:.2g} after step {step + 1}"
    if trace.kept != oracle.kept and not rounded:
        return "altered", "what is saved at the end differs, the weights do not"
    return SURVIVED


def compare_pair(trace: Trace, alone: Mapping[str, Trace]) -> tuple[str, str]:
    """Return an outcome, and words: as with one of the two exchanges alone or not.

    Args:
        trace: of two exchanges of one model.
        alone: the same training with one exchange, by what exchanges.
    """
    for name, oracle in alone.items():
        pairs = zip(trace.weights, oracle.weights, strict=True)
        if all(np.allclose(x, y, rtol=0, atol=CLOSE) for x, y in pairs):
            if trace.collectives <= oracle.collectives:
                return SURVIVED
            more = f"{trace.collectives} collectives instead of {oracle.collectives}"
            return "doubled", f"weights as with {name} alone, {more}"
    counts = ", ".join(f"{one.collectives} with {name} alone" for name, one in alone.items())
    return "doubled", f"other weights than alone; {trace.collectives} collectives, {counts}"


class Leftovers:
    """Count of what a process has: descriptors, threads, models, and more that a framework says.

    Args:
        more: counts, by name.
    """

    def __init__(self, more: Mapping[str, Callable[[], int]]) -> None:
        self._more = more

    def count(self) -> dict[str, int]:
        gc.collect()
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "threads of Python": threading.active_count(),
            **{name: count() for name, count in self._more.items()},
        }

    def after(self, cycle: Callable[[], Any], times: int) -> tuple[str, str]:
        """Go through cycles; return an outcome, and words: as much is there as behind the second.

        The first ones fill caches.
        """
        counts = []
        for _ in range(times):
            cycle()
            counts.append(self.count())
        end = time.monotonic() + 3.0
        while _grown(counts) and time.monotonic() < end:  # threads take a moment to end
            time.sleep(0.1)
            counts[-1] = self.count()
        grown = _grown(counts)
        if not grown:
            return SURVIVED
        listed = ", ".join(f"{n} {name}" for name, n in grown.items())
        return "leaked", f"{listed} in {times - 2} trainings"


def _grown(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return by how much what is left has grown since the second training."""
    first, last = counts[1], counts[-1]
    return {name: last[name] - n for name, n in first.items() if last[name] > n}
