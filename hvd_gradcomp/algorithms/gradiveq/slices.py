"""Cuts of layers into slices, and their sizes in the state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hvd_gradcomp.ops import Ops, Tensor


class Slices(NamedTuple):
    """Cut of one layer into slices."""

    start: int  # in the bucket
    size: int  # elements
    shape: tuple[int, ...]  # as the framework stores them
    order: tuple[int, ...]  # of axes, so that filters come last and depth before them
    length: int  # of a slice
    slices: int  # number of them; the last one is padded with zeros
    reuse: int  # neighbours that share a basis
    rows: int  # slices of each basis that a sampling step records
    room: int  # maximum number of dimensions of a basis

    @property
    def groups(self) -> int:
        """Number of bases."""
        return -(-self.slices // self.reuse)

    def members(self, group: int) -> int:
        """Return the number of slices that share a basis."""
        return min(self.reuse, self.slices - group * self.reuse)

    def turned(self, ops: Ops, bucket: Tensor) -> Tensor:
        """Return the layer transposed to slice order and padded with zeros, for `ops.project`."""
        layer = bucket[self.start : self.start + self.size]
        if self.order != tuple(range(len(self.order))):
            layer = ops.transpose(ops.reshape(layer, self.shape), self.order)
        missing = self.slices * self.length - self.size
        if missing:
            layer = ops.concat((ops.reshape(layer, (self.size,)), ops.zeros((missing,))))
        return layer

    def cut(self, ops: Ops, bucket: Tensor) -> Tensor:
        """Return the layer's slices; [count, length]."""
        return ops.reshape(self.turned(ops, bucket), (self.slices, self.length))


class Sizes(NamedTuple):
    """Numbers of elements of several layers in a state, or in the broadcast of their bases."""

    samples: int  # of one step, the energy of each group among them
    basis: int
    offset: int
    groups: int


def sizes_of(cuts: Iterable[Slices]) -> Sizes:
    """Sum the sizes over layers."""
    sizes = Sizes(0, 0, 0, 0)
    for s in cuts:
        of_group = Sizes(s.rows * s.length + 1, s.length * s.room, s.length, 1)
        sizes = Sizes(*(total + s.groups * size for total, size in zip(sizes, of_group)))
    return sizes
