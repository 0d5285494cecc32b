"""Shape and indexing ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.tensorflow.base import Base, shape_of


class Indexing(Base):
    """Shape and indexing ops."""

    def reshape(self, x: Tensor, shape: Sequence[Any]) -> Tensor:
        return tf.reshape(x, shape_of(shape))

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        return tf.concat(list(xs), -1)

    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        return tf.stack(list(xs))

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        return tf.gather(x, index)

    def gather_rows(self, x: Tensor, index: Tensor) -> Tensor:
        return tf.gather(x, index, axis=1, batch_dims=1)

    def put(self, x: Tensor, index: Tensor, values: Any) -> Tensor:
        updates = tf.zeros_like(index, x.dtype) + tf.cast(values, x.dtype)
        return tf.tensor_scatter_nd_update(x, index[:, None], updates)

    def overwrite(self, x: Tensor, y: Tensor) -> Tensor:
        del x
        return y

    def assemble(self, out: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        return tf.concat([tf.reshape(x, (-1,)) for x in pieces], 0)[: out.shape[0]]

    def add_slice(self, x: Tensor, start: int, y: Tensor) -> Tensor:
        y = y[: max(x.shape[0] - start, 0)]
        end = start + y.shape[0]
        return tf.concat((x[:start], self.accumulate(x[start:end], y), x[end:]), 0)

    def add_at(self, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        return tf.tensor_scatter_nd_add(x, index[:, None], values)

    def clear_last(self, x: Tensor) -> Tensor:
        return tf.concat((x[:-1], tf.zeros_like(x[-1:])), 0)
