"""Elementwise ops."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.tensorflow.base import WORD, Base, low_word


class Elementwise(Base):
    """Elementwise ops."""

    def abs(self, x: Tensor) -> Tensor:
        return tf.abs(x)

    def square(self, x: Tensor) -> Tensor:
        return self._rounded(x * x)

    def times(self, x: Tensor, factor: float) -> Tensor:
        return self._rounded(x * factor)

    def log2(self, x: Tensor) -> Tensor:
        return tf.math.log(x) / tf.math.log(tf.constant(2.0, x.dtype))

    def sqrt(self, x: Tensor) -> Tensor:
        return tf.sqrt(x)

    def maximum(self, x: Tensor, y: Any) -> Tensor:
        return tf.maximum(x, y)

    def minimum(self, x: Tensor, y: Any) -> Tensor:
        return tf.minimum(x, y)

    def where(self, condition: Tensor, x: Any, y: Any) -> Tensor:
        return tf.where(condition, *alike(x, y))

    def greater(self, x: Tensor, y: Any) -> Tensor:
        return x > y

    def accumulate(self, x: Tensor, y: Tensor) -> Tensor:
        if tf.executing_eagerly() or not self.dynamic_shapes:
            return x + y
        # TensorFlow's graph optimizer reorders a chain of `+`, but not of these ops.
        if self.native is not None and x.dtype == tf.float32:
            return self.native("accumulate", (x, y), (self.writable(x),))
        row = tf.expand_dims(x, 0)
        return tf.squeeze(tf.tensor_scatter_nd_add(row, [[0]], tf.expand_dims(y, 0)), 0)

    def clear(self, x: Tensor) -> Tensor:
        return tf.zeros_like(x)

    def scale(self, x: Tensor, factor: Any) -> Tensor:
        return self._rounded(x * factor)

    def cast(self, x: Tensor, dtype: Any) -> Tensor:
        return tf.cast(x, dtype)

    def split_bits(self, x: Tensor, low: int) -> tuple[Tensor, Tensor]:
        amount = tf.constant(low, tf.int64)
        return tf.bitwise.right_shift(x, amount), tf.bitwise.bitwise_and(x, (1 << low) - 1)

    def shift_right(self, x: Tensor, amount: Tensor) -> Tensor:
        return tf.bitwise.right_shift(x, amount)

    def xor(self, x: Tensor, y: Any) -> Tensor:
        return tf.bitwise.bitwise_xor(x, tf.cast(y, x.dtype))

    def float_bits(self, x: Tensor) -> Tensor:
        return tf.cast(tf.bitcast(x, tf.int32), tf.int64) % WORD

    def bits_float(self, bits: Tensor) -> Tensor:
        return tf.bitcast(low_word(bits), tf.float32)

    def leaky_relu(self, x: Tensor, slope: float) -> Tensor:
        return tf.nn.leaky_relu(x, slope)


def alike(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Convert both to tensors of the dtype that one of them has."""
    if isinstance(x, tf.Tensor):
        return x, tf.cast(y, x.dtype)
    if isinstance(y, tf.Tensor):
        return tf.cast(x, y.dtype), y
    return tf.constant(x, tf.int64), tf.constant(y, tf.int64)
