"""Cuts of layers into slices, and their sizes in the state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Ops, Tensor

_SAMPLES = 3  # for each dimension, if there are enough slices
_LEAST_RATIO = 4  # smallest ratio that a loss_threshold may choose with few sampling steps
_USUAL_RATIO = 8  # that a loss_threshold arrives at in the paper
_BASES = 16  # of a layer whose blocks are cut: each is a product of its own
_PART = 4  # parts of blocks that are too long are shorter by this: other inputs have other bases


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
    max_dimensions: int  # maximum number of dimensions of a basis

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
    """Numbers of elements of several layers in a state, or in their bases as one vector."""

    samples: int  # of one step, the energy of each group among them
    basis: int
    offset: int
    groups: int


def sizes_of(cuts: Iterable[Slices]) -> Sizes:
    """Sum the sizes over layers."""
    sizes = Sizes(0, 0, 0, 0)
    for s in cuts:
        of_group = Sizes(s.rows * s.length + 1, s.length * s.max_dimensions, s.length, 1)
        sizes = Sizes(*(total + s.groups * size for total, size in zip(sizes, of_group)))
    return sizes


@dataclass(frozen=True)
class Slicing:
    """Cuts layers into slices that have enough samples for a basis; see `GradiVeQCompressor`."""

    slice_size: int | None
    max_slice: int
    loss_threshold: float | None
    ratio: float | None
    reuse: int | None
    sample_steps: int

    def _rows(self, length: int, members: int) -> int:
        """Return the number of slices that a sampling step records for each basis."""
        wanted = _SAMPLES * self.min_components(length) + 1
        return min(members, -(-wanted // self.sample_steps))

    def min_components(self, length: int) -> int:
        """Return the dimensions of a basis for slices of a length, if there are enough samples."""
        return max(1, int(length / (_LEAST_RATIO if self.ratio is None else self.ratio)))

    def steps_for(self, cut: Slices) -> int:
        """Return the sampling steps that give enough samples for `min_components`."""
        return self.min_components(cut.length) // cut.reuse + 1

    def _max_dimensions(self, length: int, rows: int) -> int:
        """Return the maximum number of dimensions of a basis."""
        samples = rows * self.sample_steps
        if self.ratio is not None:
            return max(1, min(length, samples - 1, self.min_components(length)))
        fitted = self.fitted_steps * rows
        return max(
            1, min(length, fitted - 1, max(self.sample_steps - 1, self.min_components(length)))
        )

    @property
    def fitted_steps(self) -> int:
        """Sampling steps to fit a basis to; the others are held out to choose its dimension."""
        return self.sample_steps - self.sample_steps // 4

    def slices(self, layout: Layout) -> tuple[Slices, ...]:
        """Return the cut of each layer."""
        return _slices_of(self, layout)

    def slices_of(self, shape: tuple[int, ...], filters_last: bool, start: int = 0) -> Slices:
        """Return the cut of a layer of this shape."""
        axes, size = tuple(range(len(shape))), prod(shape)
        order = axes if filters_last else (*axes[2:], *axes[:2][::-1])
        filters = shape[order[-1]] if shape else 1
        depth = shape[order[-2]] if len(shape) > 1 else 1
        length = self._length(filters, depth, size)
        count = -(-size // length)
        parts = 1 if self.slice_size is not None else max(1, filters * depth // length)
        reuse = max(1, min(self.reuse or self._sharing(length, count, parts), count))
        if parts > 1 and reuse < count:
            shape, order = _part_by_part(shape, order, length)
        rows = self._rows(length, reuse)
        max_dimensions = self._max_dimensions(length, rows)
        return Slices(start, size, shape, order, length, count, reuse, rows, max_dimensions)

    def _sharing(self, length: int, count: int, parts: int) -> int:
        """Return the number of slices that share a basis if the user has not said.

        Slices of the same part of a block, at all positions of the kernel, have the same filters
        and inputs. They get a basis of their own, or with parts beside them, if there are samples
        enough, and memory.
        """
        places, dimension = count // parts, self.min_components(length)
        for together in (n for n in range(1, parts) if parts % n == 0 and places > 1):
            bases = parts // together
            few = bases <= _BASES and 16 * bases * length * dimension <= self.max_slice**2
            if few and self.sample_steps * places * together > _SAMPLES * dimension:
                return places * together
        return count

    def _length(self, filters: int, depth: int, size: int) -> int:
        """Return the length of a layer's slices: the longest that has enough samples."""
        if self.slice_size is not None or not size:
            return max(1, min(self.slice_size or 1, size))
        block, longest = filters * depth, self.max_slice
        if block > longest:
            longest = max(1, longest // _PART)
        lengths = (n for n in _aligned(filters, depth, size // block) if n <= longest)
        return next((n for n in lengths if self._suffices(size // n, n)), 1)

    def _suffices(self, slices: int, length: int) -> bool:
        """Return True if a cycle has enough samples for a basis of slices of this length."""
        samples = self.sample_steps * min(self.reuse or slices, slices)
        return samples > max(1, int(length / (self.ratio or _USUAL_RATIO)))

    def coefficient_bytes(self, layout: Layout, dimensions: Sequence[int] | None = None) -> int:
        """Return the bytes that a rank hands to the allreduce of a compressed step.

        Args:
            dimensions: of each basis; None for the maximum.
        """
        counts = iter(
            dimensions or [s.max_dimensions for s in self.slices(layout) for _ in range(s.groups)]
        )
        used = (s.members(g) * next(counts) for s in self.slices(layout) for g in range(s.groups))
        return 4 * (sum(used) + 2)

    def basis_bytes(self, layout: Layout) -> int:
        """Return the bytes of a broadcast of all bases, for ranks whose own differ."""
        sizes = sizes_of(self.slices(layout))
        return 4 * (sizes.basis + sizes.offset + sizes.groups)


def _aligned(filters: int, depth: int, places: int) -> Iterator[int]:
    """Yield the lengths that divide a layer into slices of the same structure, longest first.

    A slice is one block of `filters * depth` elements or several, or an equal part of a block along
    its depth, or of its filters. No slice has the end of a block inside it, or needs padding.
    """
    for unit, count in ((filters * depth, places), (filters, depth), (1, filters)):
        for n in range(count, 0, -1):
            if count % n == 0:
                yield n * unit


def _part_by_part(
    shape: tuple[int, ...], order: tuple[int, ...], length: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and order in which slices of the same part of a block are neighbours.

    The axis that slices cut, of the depth or of the filters, becomes two.
    """
    filters, depth = order[-1], order[-2:][0]
    columns = length // shape[filters]  # of all filters; 0 if the filters are cut
    cut, inner = (depth, columns) if columns else (filters, length)
    shape = (*shape[:cut], shape[cut] // inner, inner, *shape[cut + 1 :])
    moved = [axis + (axis > cut) for axis in order]
    if columns:
        return shape, (cut, *moved[:-2], cut + 1, moved[-1])
    return shape, (*moved[-2:-1], cut, *moved[:-2], cut + 1)


@lru_cache(maxsize=256)
def _slices_of(slicing: Slicing, layout: Layout) -> tuple[Slices, ...]:
    return tuple(
        slicing.slices_of(shape, layout.filters_last, start)
        for start, shape in zip(layout.offsets, layout.shapes)
    )
