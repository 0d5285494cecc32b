"""Calls of the C kernels as custom ops, by the convention of `c/calls.h`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.ops import Tensor


class Kernels:
    """Kernels of a library of custom ops.

    Args:
        library: as `ops.tensorflow.library` loads it.
    """

    def __init__(self, library: Any) -> None:
        self.flatten, self.cut = library.gradcomp_flatten, library.gradcomp_cut
        self._run = library.gradcomp

    def __call__(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[tuple[Any, Sequence[Any] | tf.TensorShape]],
        ints: Sequence[Any] = (),
        floats: Sequence[float] = (),
    ) -> list[Tensor]:
        """Run a kernel.

        Args:
            name: in the table of `c/calls.c`, which says what the kernel takes and gives.
            inputs: tensors, or lists of integers.
            outputs: their dtypes, and shapes as far as they are known.
            ints, floats: further arguments; an integer may be a scalar tensor.
        """
        dtypes, shapes = zip(*outputs)
        return list(
            self._run(
                inputs=[x if isinstance(x, tf.Tensor) else integers(x) for x in inputs],
                ints=integers(ints),
                kernel=name,
                floats=[float(number) for number in floats],
                Tout=dtypes,
                shapes=[tf.TensorShape(shape) for shape in shapes],
            )
        )


def integer(value: Any) -> Tensor:
    """Convert to int64; a Python integer becomes one node of a graph."""
    return tf.constant(value, tf.int64) if isinstance(value, int) else tf.cast(value, tf.int64)


def integers(values: Any) -> Tensor:
    """Convert integers, tensors among them, to int64; `tf.Variable` and arrays too."""
    if not isinstance(values, (list, tuple)):
        return tf.convert_to_tensor(values)
    if all(isinstance(value, int) for value in values):
        return tf.constant([int(value) for value in values], tf.int64)
    return tf.stack([integer(value) for value in values])
