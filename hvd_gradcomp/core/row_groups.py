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
    def lengths(self) -> list[int]:
        """Return the elements of each group."""
        return [run.length for run in self.runs for _ in range(run.rows)]

    def between(self, begin: int, end: int) -> RowGroups:
        """Return the runs within [begin, end), counted from begin; rows may be cut.

        >>> RowGroups((RowGroup(0, 3, 10),)).between(5, 22).runs[:2]
        (RowGroup(start=0, rows=1, length=5), RowGroup(start=5, rows=1, length=10))
        """
        found: list[RowGroup] = []
        number, first = 0, -1

        def take(start: int, stop: int, rows: int, length: int, group: int) -> None:
            nonlocal first
            if stop > start:
                first = group if first < 0 else first
                found.append(RowGroup(start - begin, rows, length))

        for run in self.runs:
            low, high = max(begin, run.start), min(end, run.end)
            if low < high:
                row, into = divmod(low - run.start, run.length)
                whole = row + (into > 0)
                last, beyond = divmod(high - run.start, run.length)
                if into:
                    stop = min(high, run.start + whole * run.length)
                    take(low, stop, 1, stop - low, number + row)
                if last > whole:
                    start = run.start + whole * run.length
                    stop = run.start + last * run.length
                    take(start, stop, last - whole, run.length, number + whole)
                if beyond and (last >= whole):
                    start = run.start + last * run.length
                    take(start, high, 1, beyond, number + last)
            number += run.rows
        return RowGroups(tuple(found), max(first, 0))
