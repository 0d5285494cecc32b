"""Groups of elements that share a scale: runs of rows of one length.

A row is a *group*: a QSGD bucket, a TernGrad layer, a column of 1-bit SGD. Elements in no run are
padding and stay zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class RowGroup(NamedTuple):
    """Run of `rows` groups of `length` neighbours each."""

    start: int
    rows: int
    length: int

    @property
    def end(self) -> int:
        """Return the index after the last element."""
        return self.start + self.rows * self.length


@dataclass(frozen=True)
class RowGroups:
    """Runs of rows in ascending order, without overlap.

    Args:
        runs: at least one row each.
        first: number of the first group in the runs that these were cut from.
    """

    runs: tuple[RowGroup, ...]
    first: int = 0

    @property
    def groups(self) -> int:
        """Return the number of rows."""
        return sum(run.rows for run in self.runs)

    @property
    def numbers(self) -> list[int]:
        """Return three numbers for each run, as C takes them."""
        return [number for run in self.runs for number in run]

    @property
    def lengths(self) -> list[int]:
        """Return the elements of each group."""
        return [run.length for run in self.runs for _ in range(run.rows)]

    def between(self, begin: int, end: int) -> RowGroups:
        """Return the runs within [begin, end), counted from begin; rows may be cut.

        >>> RowGroups((RowGroup(0, 3, 10),)).between(5, 22).runs[:2]
        (RowGroup(start=0, rows=1, length=5), RowGroup(start=5, rows=1, length=10))
        """
        runs: list[RowGroup] = []
        number, first = 0, None
        for run in self.runs:
            low, high = max(begin, run.start), min(end, run.end)
            if low < high:
                row, into = divmod(low - run.start, run.length)
                whole, last = row + (into > 0), (high - run.start) // run.length
                head, tail = (run.start + place * run.length for place in (whole, last))
                first = number + row if first is None else first
                # What is cut off at the start, whole rows, what is cut off at the end; or one part.
                parts = [(low, head, 1), (head, tail, last - whole), (tail, high, 1)]
                for start, stop, rows in parts if head <= tail else [(low, high, 1)]:
                    if stop > start:
                        runs.append(RowGroup(start - begin, rows, (stop - start) // rows))
            number += run.rows
        return RowGroups(tuple(runs), first or 0)
