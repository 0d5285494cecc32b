"""Layers as a bucket, and the capacity schedule, each as one custom op."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import tensorflow as tf

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.tensorflow.base import Base


class Buckets(Base):
    """Layers as a bucket, and the capacity schedule, each as one custom op."""

    @property
    def next_level(self) -> Any:
        """`CapacitySchedule.next_level` in a graph, as one custom op in place of sixty ops."""
        return None if self.native is None or tf.executing_eagerly() else self._climb

    def _climb(self, capacities: Sequence[int], patience: int, state: Sequence[Tensor]) -> Any:
        outputs = [self.flag() if i == 2 else self.number() for i in range(6)]
        return self.native("next_level", (*state, list(capacities)), outputs, (patience,))

    def flatten(self, layout: Layout, values: Sequence[Tensor | None], dtype: str) -> Tensor:
        """Flatten the layers' values into the bucket: [layout.size], zeros where there are none."""
        known = [
            (tf.cast(value, dtype), axes[::-1], start)
            for value, axes, start in zip(values, layout.axes, layout.offsets)
            if value is not None
        ]
        if not known:
            return tf.zeros((layout.size,), dtype)
        if self.native is not None and dtype == "float32":
            pieces, axes, offsets = zip(*known)
            return self.native.flatten(
                pieces, offsets=offsets, axes=sum(axes, ()), size=layout.size
            )
        flat, end = [], 0
        for value, axes, start in known:
            flat += [tf.zeros((start - end,), dtype)] if start > end else []
            flat.append(tf.reshape(_reversed(value, axes), (prod(axes),)))
            end = start + prod(axes)
        flat += [tf.zeros((layout.size - end,), dtype)] if layout.size > end else []
        return tf.concat(flat, 0)

    def cut(self, layout: Layout, bucket: Tensor) -> Sequence[Tensor]:
        """Invert `flatten`."""
        if self.native is not None and bucket.dtype == tf.float32:
            return self.native.cut(
                bucket,
                count=len(layout.stored),
                offsets=layout.offsets,
                axes=sum(layout.axes, ()),
                shapes=layout.stored,
            )
        return [
            tf.reshape(_reversed(tf.slice(bucket, [start], [size]), axes), shape)
            for size, start, axes, shape in zip(
                layout.sizes, layout.offsets, layout.axes, layout.stored
            )
        ]


def _reversed(x: Tensor, axes: tuple[int, int, int]) -> Tensor:
    """Reverse the order of the three axes that x runs through."""
    return x if axes.count(1) > 1 else tf.transpose(tf.reshape(x, axes), (2, 1, 0))
