"""Conversion of numbers to bytes, and of codes to bits."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.tensorflow.base import WORD, Base, low_word, shape_of


class BitPacking(Base):
    """Ops that convert numbers to bytes, and codes to bits."""

    def to_bytes(self, x: Tensor, dtype: str) -> Tensor:
        if dtype == "uint8":
            return tf.cast(x, tf.uint8)
        narrow = low_word(x) if dtype == "uint32" else tf.cast(x, tf.as_dtype(dtype))
        data = tf.bitcast(narrow, tf.uint8)
        return data if dtype == "int8" else tf.reshape(data, shape_of((*head_of(x), -1)))

    def from_bytes(self, x: Tensor, dtype: str) -> Tensor:
        if dtype == "uint8":
            return tf.cast(x, tf.int64)
        if dtype == "int8":
            return tf.cast(tf.bitcast(x, tf.int8), tf.int64)
        wide = tf.int32 if dtype == "uint32" else tf.as_dtype(dtype)
        items = tf.bitcast(tf.reshape(x, shape_of((*head_of(x), -1, wide.size))), wide)
        return tf.cast(items, tf.int64) % WORD if dtype == "uint32" else items

    def length(self, x: Tensor) -> Any:
        known = x.shape[-1]
        return tf.shape(x, tf.int64)[-1] if known is None else known


def head_of(x: Tensor) -> tuple[Any, ...]:
    """Return all axes but the last."""
    if x.shape[:-1].is_fully_defined():
        return tuple(x.shape[:-1])
    return tuple(tf.unstack(tf.shape(x, tf.int64)[:-1]))
