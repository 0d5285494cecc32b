"""Arithmetic on gradients that may be sparse, or missing, and their norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.tensorflow.interop.variables import new_variable


def times(gradient: Any, factor: tf.Tensor) -> Any:
    """Multiply a gradient by a scalar."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return _with_values(gradient, times(gradient.values, factor))
    wide = gradient.dtype if gradient.dtype.size >= 4 else tf.float32
    return tf.cast(tf.cast(gradient, wide) * tf.cast(factor, wide), gradient.dtype)


def as_dtype(gradient: Any, dtype: Any) -> Any:
    """Cast a gradient to a precision; float64 stays as it is."""
    if gradient is None or gradient.dtype == tf.float64:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return _with_values(gradient, tf.cast(gradient.values, dtype))
    return tf.cast(gradient, dtype)


def _with_values(gradient: tf.IndexedSlices, values: tf.Tensor) -> tf.IndexedSlices:
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def values_of(gradient: Any) -> tf.Tensor:
    """Return a gradient, or the rows of a sparse one."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def zero_like(spec: Any, shape: Sequence[int], dtype: str) -> Any:
    """Return a gradient of zero, or of no rows.

    Args:
        spec: the type specification of a gradient; None for a missing one.
        shape, dtype: of the layer.
    """
    if isinstance(spec, tf.IndexedSlicesSpec):
        indices = tf.zeros((0,), spec._indices_dtype)
        return tf.IndexedSlices(tf.zeros((0, *shape[1:]), dtype), indices, tf.constant(shape))
    return None if spec is None else tf.zeros(shape, dtype)


def poisoned(gradients: list[Any], others: Sequence[Any]) -> list[Any]:
    """Make gradients non-finite if `others` are, which are not exchanged themselves.

    So all ranks learn of it, and skip the step together.
    """
    zeros = [tf.cast(tf.reduce_sum(values_of(g) * 0), tf.float32) for g in others if g is not None]
    place = next((i for i, g in enumerate(gradients) if g is not None), None)
    if not zeros or place is None:
        return gradients
    first = times(gradients[place], 1.0 + tf.add_n(zeros))
    return [*gradients[:place], first, *gradients[place + 1 :]]


class GradientNorm:
    """Norm of the gradients of a step, measured in a graph when it is requested."""

    def __init__(self) -> None:
        with tf.init_scope():
            self._value = new_variable("gradcomp_norm", tf.constant(math.nan))
            self._requested = new_variable("gradcomp_asked", tf.constant(False))

    def request(self) -> None:
        """Request the norm of the next step."""
        self._requested.assign(True)

    def measure(self, gradients: Sequence[Any]) -> None:
        """Measure these gradients, if that was requested."""

        def measured() -> None:
            present = [tf.cast(values_of(g), tf.float32) for g in gradients if g is not None]
            self._value.assign(tf.linalg.global_norm(present))
            self._requested.assign(False)

        tf.cond(self._requested, measured, lambda: None)

    def read(self) -> float:
        """Return the last norm that was measured; NaN if there is none."""
        return float(self._value)
