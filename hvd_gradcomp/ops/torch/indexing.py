"""Shape and indexing ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.torch.base import Base
from hvd_gradcomp.ops.torch.blocks import Axes, Lifted

_CACHED = 1 << 18  # elements; larger tensors are written past the caches


class Indexing(Base):
    """Shape and indexing ops."""

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        if Axes.of(x):
            across, x = x, self.empty(x.shape)
            self._copy(x, across)
        return x.reshape(tuple(shape))

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(xs), dim=-1)

    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        return torch.stack(tuple(xs))

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        if self.native is not None and self.traversable(x):
            return self.native("gather", (x, index), (self.empty(index.shape),))
        # On a CPU several times faster than x[index].
        return x.index_select(0, index.reshape(-1)).view(index.shape)

    def gather_rows(self, x: Tensor, index: Tensor) -> Tensor:
        return torch.gather(x, 1, index)

    def put(self, x: Tensor, index: Tensor, values: Any) -> Tensor:
        x = self.writable_copy(x)
        if isinstance(values, torch.Tensor):
            if not x.is_cuda and values.shape == index.shape and values.dtype == x.dtype:
                return x.scatter_(0, index, values)  # in a third of the time
            return x.index_put_((index,), values)
        if self.native is not None and self.traversable(x):
            return self.native("fill_at", (index,), (x,), (), (values,))
        return x.index_fill_(0, index, values)

    def overwrite(self, x: Tensor, y: Tensor) -> Tensor:
        return self.writable(x).copy_(y)

    def assemble(self, out: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        out, start = self.writable_copy(out), 0
        for piece in pieces:
            place = out[start : start + piece.numel()]
            if isinstance(piece, Lifted):
                piece.into(place)
            elif piece.dim() > 1:
                self._copy(place.view(piece.shape), piece)
            elif place.shape[0] and place.data_ptr() != piece.data_ptr():
                place.copy_(piece[: place.shape[0]])
            start += piece.numel()
        return out

    def add_slice(self, x: Tensor, start: int, y: Tensor) -> Tensor:
        x, rest = self.writable_copy(x), max(x.shape[0] - start, 0)
        x[start : start + y.shape[0]].add_(y[:rest])
        return x

    def add_at(self, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        x = self.writable_copy(x)
        if self.native is not None and self.traversable(x):
            return self.native("add_at", (index, values), (x,))
        if x.is_cuda:  # an atomic addition there takes denormals for zeros
            return x.index_copy_(0, index, x.index_select(0, index) + values)
        return x.index_add_(0, index, values)

    def clear_last(self, x: Tensor) -> Tensor:
        x = self.writable_copy(x)
        x[-1:].zero_()
        return x

    def _copy(self, into: Tensor, x: Tensor) -> None:
        """Copy x to a contiguous tensor; read reversed axes in blocks or rows, not in strides."""
        axes = Axes.of(x)
        if axes is None:
            into.copy_(x)
            return
        first, middle, last = axes
        if self.native is not None:
            memory = (x.data_ptr(), *axes, middle * last, into.data_ptr(), middle * first)
            self.native.reverse(*memory, x.numel() > _CACHED, torch.get_num_threads())
        else:
            stored = x.as_strided(axes, (middle * last, last, 1))
            if last < first:
                rows = stored.view(first, -1).t().contiguous().view(middle, last, first)
                into.view(last, middle, first).copy_(rows.transpose(0, 1))
            else:
                into.view(last, -1).copy_(stored.transpose(0, 1).reshape(-1, last).t())
