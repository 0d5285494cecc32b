"""Traversal of a bucket, without tiles."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.tensorflow.base import Base


class Searching(Base):
    """Ops that traverse a bucket as a whole."""

    def search(
        self,
        body: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
        donated: tuple[Tensor, ...],
        inputs: tuple[Tensor, ...],
        bound: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        flags, after = body(*donated, *inputs)
        if bound is not None:
            return self.find(flags, bound), after
        return (self.nonzero(flags) if self.dynamic_shapes else flags), after

    def sweep(
        self,
        body: Callable[..., tuple[Tensor, ...]],
        donated: tuple[Tensor, ...],
        inputs: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        return body(*donated, *inputs)

    def find(self, x: Tensor, bound: Tensor) -> Tensor:
        magnitude = tf.reshape(tf.abs(x), (bound.shape[0], -1))
        return self.nonzero(tf.reshape((magnitude >= bound[:, None]) & (magnitude > 0), (-1,)))
