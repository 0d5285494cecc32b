"""Groups of elements that share a scale: bands of rows of one length.

A row is a *group*: a QSGD bucket, a TernGrad layer, a column of 1-bit SGD. Elements in no band are
padding and stay zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Band(NamedTuple):
    """Band of `rows` groups of `length` neighbours each."""

    start: int
    rows: int
    length: int

    @property
    def end(self) -> int:
        """Return the index after the last element."""
        return self.start + self.rows * self.length


@dataclass(frozen=True)
class Bands:
    """Bands in ascending order, without overlap.

    Args:
        bands: at least one row each.
        first: number of the first group in the bands that these were cut from.
    """

    bands: tuple[Band, ...]
    first: int = 0

    @property
    def groups(self) -> int:
        """Return the number of rows."""
        return sum(band.rows for band in self.bands)

    @property
    def lengths(self) -> list[int]:
        """Return the elements of each group."""
        return [band.length for band in self.bands for _ in range(band.rows)]

    def between(self, begin: int, end: int) -> Bands:
        """Return the bands within [begin, end), counted from begin; rows may be cut.

        >>> Bands((Band(0, 3, 10),)).between(5, 22).bands
        (Band(start=0, rows=1, length=5), Band(start=5, rows=1, length=10), \
Band(start=15, rows=1, length=2))
        """
        found: list[Band] = []
        number, first = 0, -1

        def take(start: int, stop: int, rows: int, length: int, group: int) -> None:
            nonlocal first
            if stop > start:
                first = group if first < 0 else first
                found.append(Band(start - begin, rows, length))

        for band in self.bands:
            low, high = max(begin, band.start), min(end, band.end)
            if low < high:
                row, into = divmod(low - band.start, band.length)
                whole = row + (into > 0)
                last, beyond = divmod(high - band.start, band.length)
                if into:
                    stop = min(high, band.start + whole * band.length)
                    take(low, stop, 1, stop - low, number + row)
                if last > whole:
                    start = band.start + whole * band.length
                    stop = band.start + last * band.length
                    take(start, stop, last - whole, band.length, number + whole)
                if beyond and (last >= whole):
                    start = band.start + last * band.length
                    take(start, high, 1, beyond, number + last)
            number += band.rows
        return Bands(tuple(found), max(first, 0))
