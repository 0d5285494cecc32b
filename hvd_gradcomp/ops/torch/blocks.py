"""Layers on a CPU whose memory order is the reverse of their axes, processed in blocks.

PyTorch stores a convolution filters first, but its slices traverse it filters last. The C library
transposes blocks of it, and they are multiplied while they are in cache, so that memory is
traversed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, prod
from typing import Any, NamedTuple

import torch

_BLOCK = 1 << 18  # elements of a block, per thread
_LINE = 16  # elements of a cache line: blocks end on a line's end, so that it is written once


def _empty(*shape: int) -> torch.Tensor:
    """Return memory for C to write to, regardless of PyTorch's default device and dtype."""
    return torch.empty(*shape, dtype=torch.float32, device="cpu")


class Axes(NamedTuple):
    """A layer [first, middle, last] as it is in memory; it is needed as [last, middle, first]."""

    first: int
    middle: int
    last: int

    @classmethod
    def of(cls, x: torch.Tensor) -> Axes | None:
        """Return the axes of a host tensor in the reverse memory order; None for other tensors.

        Axes that are adjacent in memory, in the order of x, are merged; a matrix has a middle axis
        of 1.
        """
        if x.dim() < 2 or x.is_contiguous() or x.requires_grad or x.dtype != torch.float32:
            return None
        axes: list[tuple[int, int]] = []
        for size, stride in zip(x.shape, x.stride()):
            if axes and axes[-1][1] == size * stride:
                axes[-1] = axes[-1][0] * size, stride
            elif size > 1:
                axes.append((size, stride))
        sizes = [size for size, _ in axes]
        contiguous = all(s == prod(sizes[:i]) for i, (_, s) in enumerate(axes))
        if x.is_cuda or len(axes) not in (2, 3) or not contiguous:
            return None
        return cls(sizes[-1], sizes[1] if len(axes) == 3 else 1, sizes[0])


class Blocks:
    """A layer in rows of a length, each of whole columns of `first`, cut along `middle`."""

    def __init__(self, native: Any, axes: Axes, length: int) -> None:
        first, middle, last = axes
        if middle == 1:  # a matrix is cut along its last axis
            middle, last = last, middle
        self.native, self.length = native, length
        self.axes, self.deep = Axes(first, middle, last), length // first  # columns per row

    @classmethod
    def of(cls, native: Any, axes: Axes | None, length: int) -> Blocks | None:
        """Return the blocks, or None if a row would not begin and end with a column."""
        if axes is None:
            return None
        blocks = cls(native, axes, length)
        fits = length % axes.first == 0 and blocks.axes.middle % max(blocks.deep, 1) == 0
        return blocks if fits else None

    @property
    def across(self) -> int:
        """Rows that begin at one position of `last`."""
        return self.axes.middle // self.deep

    def each(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield each block's first row, the row after its last, and memory shared by all blocks."""
        fit = _BLOCK * torch.get_num_threads() // (self.axes.last * self.length)
        count = -(-self.across // max(1, fit))
        step = -(-self.across // count)
        line = _LINE // gcd(_LINE, self.deep * self.axes.last)
        step = -(-step // line) * line
        memory = _empty(step * self.axes.last * self.length)
        for start in range(0, self.across, step):
            stop = min(start + step, self.across)
            size = (stop - start) * self.axes.last * self.length
            yield start, stop, memory[:size].view(-1, self.length)

    def read(self, layer: int, start: int, stop: int, rows: torch.Tensor) -> None:
        """Copy the rows of a block from the layer at an address."""
        first, middle, last = self.axes
        deep, address = (stop - start) * self.deep, layer + 4 * start * self.deep * last
        where = (address, first, deep, last, middle * last, rows.data_ptr(), deep * first)
        self.native.reverse(*where, False, torch.get_num_threads())

    def write(self, rows: torch.Tensor, layer: int, start: int, stop: int) -> None:
        """Invert `read`."""
        first, middle, last = self.axes
        deep, address = (stop - start) * self.deep, layer + 4 * start * self.deep * last
        where = (rows.data_ptr(), last, deep, first, deep * first, address, middle * last)
        self.native.reverse(*where, True, torch.get_num_threads())

    def project(
        self, x: torch.Tensor, basis: torch.Tensor, row: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute `Ops.project`."""
        last, dimension = self.axes.last, basis.shape[1]
        code = _empty(last, self.across, dimension)
        energy, beside = [], []
        for start, stop, rows in self.each():
            self.read(x.data_ptr(), start, stop, rows)
            part = torch.mm(rows, basis)
            code[:, start:stop] = part.view(last, stop - start, dimension)
            energy.append(torch.dot(rows.view(-1), rows.view(-1)))
            beside.append(torch.mv(rows, row[0]).sum())
        return code.view(-1, dimension), torch.stack(energy).sum(), torch.stack(beside).sum()


class Lifted(NamedTuple):
    """Deferred `Ops.lift`, computed once the destination of the layer is known."""

    blocks: Blocks
    code: torch.Tensor
    basis: torch.Tensor
    row: torch.Tensor

    def numel(self) -> int:
        return prod(self.blocks.axes)

    def into(self, place: torch.Tensor) -> None:
        """Write the layer to its destination."""
        blocks, dimension = self.blocks, self.basis.shape[1]
        code = self.code.view(blocks.axes.last, blocks.across, dimension)
        for start, stop, rows in blocks.each():
            part = code[:, start:stop].reshape(-1, dimension)
            with torch.autocast("cpu", enabled=False):
                torch.addmm(self.row, part, self.basis.t(), out=rows)
            blocks.write(rows, place.data_ptr(), start, stop)
