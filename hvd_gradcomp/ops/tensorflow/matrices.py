"""Matrix ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.tensorflow.base import Base


class Matrices(Base):
    """Matrix ops."""

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        return tf.matmul(x, y)

    def matmul_plus(self, x: Tensor, y: Tensor, row: Tensor) -> Tensor:
        return tf.matmul(x, y) + row

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        return tf.reduce_sum(tf.reshape(x, (-1,)) * tf.reshape(y, (-1,)))

    def transpose(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        return tf.transpose(x, list(axes))

    def eigh(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = tf.linalg.eigh(x)
        return values, vectors

    def orthogonalize(self, x: Tensor) -> Tensor:
        q, r = tf.linalg.qr(x)
        turned = tf.cast(tf.linalg.diag_part(r) < 0, q.dtype)[..., tf.newaxis, :]
        return q * (1.0 - 2.0 * turned)

    def value_and_grad(
        self, function: Callable[..., tuple[Tensor, ...]], parameters: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        leaves = [tf.identity(parameter) for parameter in parameters]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(leaves)
            values = function(*leaves)
        return values, list(tape.gradient(values[0], leaves))
