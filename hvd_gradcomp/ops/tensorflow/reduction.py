"""Reductions, and ops that depend on the order of values."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

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

    def all_finite(self, x: Tensor) -> Any:
        finite = tf.reduce_all(tf.math.is_finite(x))
        return bool(finite) if tf.executing_eagerly() else finite

    def nonzero(self, mask: Tensor) -> Tensor:
        return tf.where(mask)[:, 0]

    def segment_max(self, x: Tensor, segment: Tensor, count: int) -> Tensor:
        return tf.maximum(tf.math.unsorted_segment_max(x, segment, count), 0)

    def segment_sum(self, x: Tensor, segment: Tensor, count: int) -> Tensor:
        return tf.math.unsorted_segment_sum(x, segment, count)
