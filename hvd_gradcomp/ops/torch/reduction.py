"""Reductions, and ops that depend on the order of values."""

from __future__ import annotations

from typing import Any

import torch

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.torch.base import Base

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

    def all_finite(self, x: Tensor) -> Any:
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
