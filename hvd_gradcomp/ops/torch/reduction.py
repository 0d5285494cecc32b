"""Reductions, and ops that depend on the order of values."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.torch.base import Base, walked
from hvd_gradcomp.ops.torch.kernels import walkable

_EVEN_BYTES, _EACH_PAIR = 0x00FF00FF00FF00FF, 0x0001000100010001  # of a word of eight bytes


class Reduction(Base):
    """Reductions, and ops that depend on the order of values."""

    def sum(self, x: Tensor, axis: int | None = None) -> Tensor:
        return x.sum() if axis is None else x.sum(axis)

    def max(self, x: Tensor, axis: int | None = None) -> Tensor:
        return x.amax() if axis is None else x.amax(axis)

    def min(self, x: Tensor, axis: int) -> Tensor:
        return x.amin(axis)

    def cumsum(self, x: Tensor) -> Tensor:
        return torch.cumsum(x, 0)

    def sort(self, x: Tensor) -> Tensor:
        if self.native is None:
            return torch.sort(x).values
        x = x.clone()
        self.native("sort", (), (x,))
        return x

    def count_below(self, ascending: Tensor, x: Tensor) -> Tensor:
        return torch.searchsorted(ascending, x)

    def largest(self, x: Tensor, k: int) -> Tensor:
        return torch.topk(x, k).values

    def top_of_rows(self, x: Tensor, k: int) -> Tensor:
        return torch.topk(x, k, sorted=False).values

    def finite(self, x: Tensor) -> Any:
        if self.native is not None and walked(x):
            fine = array("B", (0,))
            self.native("finite", (x,), (fine,))
            return bool(fine[0])
        total = x.sum()  # a NaN or an infinity survives a sum, but large numbers may overflow too
        if not self.dynamic_shapes:
            return torch.isfinite(x).all()
        return bool(torch.isfinite(total)) or bool(torch.isfinite(x).all())

    def nonzero(self, mask: Tensor) -> Tensor:
        return mask.nonzero().view(-1)

    def segment_max(self, x: Tensor, segment: Tensor, count: int) -> Tensor:
        return self.zeros((count,), "int64").scatter_reduce_(0, segment, x, "amax")

    def segment_sum(self, x: Tensor, segment: Tensor, count: int) -> Tensor:
        return self.zeros((count,), "int64").index_add_(0, segment, x)

    def count(self, flags: Tensor) -> Tensor:
        if flags.shape[-1] % 8 or flags.shape[-1] > 8 * 255:
            return super().count(flags)
        # Eight flags are one word: words add up byte by byte, and then their bytes in pairs.
        total = flags.view(torch.int64).sum(-1)
        total = (total & _EVEN_BYTES) + (total >> 8 & _EVEN_BYTES)
        return (total * _EACH_PAIR >> 48) & 0xFFFF

    def layer_histograms(self, layout: Layout, x: Tensor, bins: int) -> Tensor:
        if self.native is None or not all(layout.sizes):
            return super().layer_histograms(layout, x, bins)
        x, counts = x.contiguous(), self._empty(bins, len(layout.names), dtype=torch.int64)
        pieces = [n for start, size in zip(layout.offsets, layout.sizes) for n in (start, 1, size)]
        row_groups = array("q", pieces)
        self.native("layer_histograms", (row_groups, x), (counts,), (bins,))
        return counts

    def largest_of_rows(self, x: Tensor, length: int, k: int) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().largest_of_rows(x, length, k)
        rows = -(-x.shape[0] // length)
        index, values = self._empty(rows, k, dtype=torch.int64), self._empty(rows, k)
        self.native("largest_of_rows", (x.contiguous(),), (index, values), (length, k))
        return index, values

    def accumulate_largest(
        self, x: Tensor, factor: float, y: Tensor, length: int, k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.native is None:
            return super().accumulate_largest(x, factor, y, length, k)
        room, rows = self.room(y), -(-x.shape[0] // length)
        index, values = self._empty(rows, k, dtype=torch.int64), self._empty(rows, k)
        given, found = (x.contiguous(), y.contiguous()), (room, index, values)
        self.native("accumulate_largest", given, found, (length, k), (factor,))
        return found

    def add_in_rows(
        self,
        base: Tensor | None,
        room: Tensor,
        length: int,
        index: Sequence[Tensor],
        values: Sequence[Tensor],
        weights: Tensor,
    ) -> Tensor:
        if self.native is None:
            return super().add_in_rows(base, room, length, index, values, weights)
        room = self.room(room)
        start = room if base is None else base.contiguous()
        ranks = [x.contiguous() for pair in zip(index, values) for x in pair]
        given = start, weights.contiguous(), *ranks
        self.native("add_in_rows", given, (room,), (length, base is None))
        return room

    def merge_rows(self, index: Tensor, values: Tensor, sink: int) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().merge_rows(index, values, sink)
        places = self._empty(index.numel(), dtype=torch.int64)
        total = self._empty(index.numel())
        given = index.contiguous(), values.contiguous()
        self.native("merge_rows", given, (places, total), (sink,))
        return places, total

    def peaks(self, x: Tensor) -> Tensor:
        if self.native is None:
            return super().peaks(x)
        x, out = walkable(x), self._empty(x.shape[0])
        self.native("peaks", (x,), (out,))
        return out
