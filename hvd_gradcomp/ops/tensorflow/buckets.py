"""Layers as a bucket, and the ladder, at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.foundation.layout import Layout
from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.tensorflow.base import Base


class Buckets(Base):
    """Layers as a bucket, and the ladder, at once."""

    @property
    def climb(self) -> Any:
        """In a graph one operation in place of sixty."""
        return None if self.native is None or tf.executing_eagerly() else self._climb

    def _climb(self, capacities: Sequence[int], patience: int, state: Sequence[Tensor]) -> Any:
        assert self.native is not None
        return self.native.gradcomp_climb(list(state), capacities=capacities, patience=patience)

    def flatten(self, layout: Layout, values: Sequence[Tensor | None], dtype: str) -> Tensor:
        """The layers' values as the bucket: [layout.size], zeros where there are none."""
        known = [
            (tf.cast(value, dtype), size, start)
            for value, size, start in zip(values, layout.sizes, layout.offsets)
            if value is not None
        ]
        if not known:
            return tf.zeros((layout.size,), dtype)
        if self.native is not None and dtype == "float32":
            pieces, _, offsets = zip(*known)
            return self.native.gradcomp_flatten(pieces, offsets=offsets, size=layout.size)
        flat, end = [], 0
        for value, size, start in known:
            flat += [tf.zeros((start - end,), dtype)] if start > end else []
            flat.append(tf.reshape(value, (size,)))
            end = start + size
        flat += [tf.zeros((layout.size - end,), dtype)] if layout.size > end else []
        return tf.concat(flat, 0)

    def cut(self, layout: Layout, bucket: Tensor) -> Sequence[Tensor]:
        """The inverse of `flatten`."""
        if self.native is not None and bucket.dtype == tf.float32:
            shapes, offsets = list(layout.shapes), list(layout.offsets)
            return self.native.gradcomp_cut(
                bucket, count=len(shapes), offsets=offsets, shapes=shapes
            )
        return [
            tf.reshape(tf.slice(bucket, [start], [size]), shape)
            for size, start, shape in zip(layout.sizes, layout.offsets, layout.shapes)
        ]
