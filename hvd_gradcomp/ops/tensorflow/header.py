"""Frames around payloads, and checks of their content."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.tensorflow.base import Base


class Headers(Base):
    """Ops for frames around payloads, and for checks of their content."""

    def columns(self, x: Tensor, count: int) -> Sequence[Tensor]:
        return tf.unstack(x, count, axis=1)

    def each_row(self, x: Tensor, count: int) -> list[Tensor]:
        return tf.unstack(x, count)
