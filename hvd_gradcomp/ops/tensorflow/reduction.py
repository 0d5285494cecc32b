"""Reductions, and ops that depend on the order of values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.tensorflow.base import Base


class Reduction(Base):
    """Reductions, and ops that depend on the order of values."""

    def sum(self, x: Tensor, axis: int | None = None) -> Tensor:
        return tf.reduce_sum(x, axis)

    def max(self, x: Tensor, axis: int | None = None) -> Tensor:
        return tf.reduce_max(x, axis)

    def min(self, x: Tensor, axis: int) -> Tensor:
        return tf.reduce_min(x, axis)

    def cumsum(self, x: Tensor) -> Tensor:
        return tf.cumsum(x)

    def sort(self, x: Tensor) -> Tensor:
        return tf.sort(x)

    def count_below(self, ascending: Tensor, x: Tensor) -> Tensor:
        return tf.searchsorted(ascending, x, out_type=tf.int64)

    def largest(self, x: Tensor, k: int) -> Tensor:
        return tf.math.top_k(x, k).values

    def top_of_rows(self, x: Tensor, k: int) -> Tensor:
        return tf.math.top_k(x, k, sorted=False).values

    def largest_of_rows(self, x: Tensor, length: Any, k: Any) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().largest_of_rows(x, length, k)
        index, values = self.native("largest_of_rows", (x,), _largest(x, length, k), (length, k))
        return index, values

    def accumulate_largest(
        self, x: Tensor, factor: float, y: Tensor, length: int, k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.native is None:
            return super().accumulate_largest(x, factor, y, length, k)
        outputs = [(tf.float32, x.shape), *_largest(x, length, k)]
        total, index, values = self.native(
            "accumulate_largest", (x, y), outputs, (length, k), (factor,)
        )
        return total, index, values

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
        start = room if base is None else base
        given = start, weights, *(x for pair in zip(index, values) for x in pair)
        outputs = [(tf.float32, start.shape)]
        return self.native("add_in_rows", given, outputs, (length, base is None))[0]

    def merge_rows(self, index: Tensor, values: Tensor, sink: int) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().merge_rows(index, values, sink)
        count = index.shape.num_elements()
        outputs = [(tf.int64, (count,)), (tf.float32, (count,))]
        places, total = self.native("merge_rows", (index, values), outputs, (sink,))
        return places, total

    def finite(self, x: Tensor) -> Any:
        if self.native is not None and x.dtype == tf.float32:
            finite = self.native("finite", (x,), [(tf.bool, ())])[0]
        else:
            finite = tf.reduce_all(tf.math.is_finite(x))
        return bool(finite) if tf.executing_eagerly() else finite

    def nonzero(self, mask: Tensor) -> Tensor:
        return tf.where(mask)[:, 0]

    def segment_max(self, x: Tensor, segment: Tensor, count: int) -> Tensor:
        return tf.maximum(tf.math.unsorted_segment_max(x, segment, count), 0)

    def segment_sum(self, x: Tensor, segment: Tensor, count: int) -> Tensor:
        return tf.math.unsorted_segment_sum(x, segment, count)

    def layer_histograms(self, layout: Layout, x: Tensor, bins: int) -> Tensor:
        if self.native is None or not all(layout.sizes):
            return super().layer_histograms(layout, x, bins)
        row_groups = [
            n for start, size in zip(layout.offsets, layout.sizes) for n in (start, 1, size)
        ]
        outputs = [(tf.int64, (bins, len(layout.sizes)))]
        return self.native("layer_histograms", (row_groups, x), outputs, (bins,))[0]


def _largest(x: Tensor, length: Any, k: Any) -> list[tuple[Any, Sequence[Any]]]:
    """Return dtypes and shapes of what is chosen of rows."""
    known = x.shape[0] is not None and isinstance(length, int)
    rows, k = -(-x.shape[0] // length) if known else None, k if isinstance(k, int) else None
    return [(tf.int64, (rows, k)), (tf.float32, (rows, k))]
