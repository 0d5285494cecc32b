"""Calls of the C kernels as custom ops, by the convention of `c/calls.h`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.ops import PayloadError, Tensor

Output = tuple[Any, Any]  # dtype and shape
FLAG: Output = (tf.bool, ())
NUMBER: Output = (tf.int64, ())


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
        outputs: Sequence[Output],
        ints: Sequence[Any] = (),
        floats: Sequence[float] = (),
    ) -> Any:
        """Run a kernel.

        Args:
            name: in the table of `c/calls.c`, which says what the kernel takes and gives.
            inputs: tensors, or lists of integers, of which some may be scalar tensors.
            outputs: their dtypes, and shapes as far as they are known.
            ints, floats: further arguments; an integer may be a scalar tensor.

        Returns:
            The outputs, a single one by itself. `FLAG` is one of Python's unless in a graph.

        Raises:
            PayloadError: an index points outside of the bucket. In a graph that is TensorFlow's
                error with the same text.
        """
        dtypes, shapes = zip(*outputs)
        lengths = [len(x) if isinstance(x, (list, tuple)) else -1 for x in inputs]
        vectors = [x for x, length in zip(inputs, lengths) if length >= 0]
        known, at, computed = _split([number for some in (*vectors, ints) for number in some])
        try:
            results = self._run(
                inputs=[tf.convert_to_tensor(x) for x, n in zip(inputs, lengths) if n < 0],
                computed=computed,
                kernel=name,
                lengths=lengths,
                ints=known,
                at=at,
                floats=[float(number) for number in floats],
                Tout=dtypes,
                shapes=[tf.TensorShape(shape) for shape in shapes],
            )
        except tf.errors.InvalidArgumentError as error:
            message = error.message.rpartition("hvd_gradcomp: ")[2]
            if message == error.message:
                raise
            raise PayloadError(message) from None
        if tf.executing_eagerly():
            results = [bool(x) if out is FLAG else x for x, out in zip(results, outputs)]
        return results[0] if len(results) == 1 else results


def _split(ints: Sequence[Any]) -> tuple[list[int], list[int], list[Tensor]]:
    """Split integers into the known ones, 0 for others, the places of these, and these.

    In a graph a known integer costs no node. An eager run passes all as one tensor, for TensorFlow
    keeps a kernel for each combination of attributes.
    """
    if tf.executing_eagerly():
        return [0] * len(ints), list(range(len(ints))), [integers(ints)] if ints else []
    at = [place for place, value in enumerate(ints) if not isinstance(value, int)]
    known = [int(value) if isinstance(value, int) else 0 for value in ints]
    return known, at, [tf.cast(ints[place], tf.int64) for place in at]


def integer(value: Any) -> Tensor:
    """Convert to int64; a Python integer becomes one node of a graph."""
    return tf.constant(value, tf.int64) if isinstance(value, int) else tf.cast(value, tf.int64)


def integers(values: Sequence[Any]) -> Tensor:
    """Convert integers, tensors among them, to int64."""
    if all(isinstance(value, int) for value in values):
        return tf.constant([int(value) for value in values], tf.int64)
    return tf.stack([integer(value) for value in values])
