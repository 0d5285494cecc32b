"""Ops that create tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.tensorflow.base import Base, shape_of
from hvd_gradcomp.ops.tensorflow.kernels import integers


class Creation(Base):
    """Ops that create tensors."""

    def zeros(self, shape: Sequence[Any], dtype: str = "float32") -> Tensor:
        return tf.zeros(shape_of(shape), tf.as_dtype(dtype))

    def full(self, shape: Sequence[Any], value: Any, dtype: str = "int64") -> Tensor:
        return tf.fill(shape_of(shape), tf.cast(value, tf.as_dtype(dtype)))

    def arange(self, count: Any) -> Tensor:
        return tf.range(tf.cast(count, tf.int64), dtype=tf.int64)

    def table(self, static: Any, field: str) -> Tensor:
        return tf.constant(getattr(static, field), tf.int64)

    def words(self, values: Sequence[Any]) -> Tensor:
        return integers(list(values))

    def reals(self, values: Sequence[float]) -> Tensor:
        return tf.constant(values, tf.float32)

    def host(self, value: Any) -> Tensor:
        return tf.cast(value, tf.int64)
