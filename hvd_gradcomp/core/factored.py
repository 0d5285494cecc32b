"""Matrices of a bucket that are sent by thin factors, and where both lie.

A matrix M [rows, columns] has the factors P [rows, rank] and Q [columns, rank], and M is P Q^T.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Matrix(NamedTuple):
    """Layer that is sent by its factors, and where it lies in the bucket."""

    start: int
    rows: int
    columns: int
    rank: int


@dataclass(frozen=True)
class ThinMatrices:
    """Thin matrices one after another in a vector.

    Args:
        shapes: (rows, rank) of each.
    """

    shapes: tuple[tuple[int, int], ...]

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Return two numbers for each matrix, as C takes them."""
        return tuple(number for shape in self.shapes for number in shape)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return the start of each matrix."""
        starts, end = [], 0
        for rows, rank in self.shapes:
            starts.append(end)
            end += rows * rank
        return tuple(starts)

    @cached_property
    def size(self) -> int:
        """Return the elements of all."""
        return sum(rows * rank for rows, rank in self.shapes)

    @cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """Return the matrices of each shape, by their numbers."""
        return _alike(self.shapes)


@dataclass(frozen=True)
class FactoredMatrices:
    """Matrices of a vector that have thin factors.

    Args:
        matrices: in the vector's order, without overlap.

    >>> two = FactoredMatrices((Matrix(0, 5, 4, 2), Matrix(23, 5, 4, 2)))
    >>> two.p.size, two.q.starts, two.between(50), two.alike
    (20, (0, 8), ((20, 23), (43, 50)), ((0, 1),))
    """

    matrices: tuple[Matrix, ...]

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Return four numbers for each matrix, as C takes them."""
        return tuple(number for matrix in self.matrices for number in matrix)

    @cached_property
    def p(self) -> ThinMatrices:
        """Return where the factors P lie, one after another."""
        return ThinMatrices(tuple((m.rows, m.rank) for m in self.matrices))

    @cached_property
    def q(self) -> ThinMatrices:
        """Return where the factors Q lie, one after another."""
        return ThinMatrices(tuple((m.columns, m.rank) for m in self.matrices))

    @cached_property
    def elements(self) -> int:
        """Return the elements of all matrices."""
        return sum(m.rows * m.columns for m in self.matrices)

    @cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """Return the matrices of each shape and rank, by their numbers."""
        return _alike(m[1:] for m in self.matrices)

    def between(self, size: int) -> tuple[tuple[int, int], ...]:
        """Return (start, end) of what no matrix covers in a vector of a size."""
        ends = [0, *(m.start + m.rows * m.columns for m in self.matrices)]
        starts = [*(m.start for m in self.matrices), size]
        return tuple((end, start) for end, start in zip(ends, starts) if end < start)


def _alike(kinds: Iterable[Hashable]) -> tuple[tuple[int, ...], ...]:
    groups: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(number)
    return tuple(map(tuple, groups.values()))
