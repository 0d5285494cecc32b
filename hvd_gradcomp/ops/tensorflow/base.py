"""Base of all TensorFlow ops."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import tensorflow as tf

from hvd_gradcomp.ops import LOGGER, Ops, Tensor, building, native
from hvd_gradcomp.ops.fused import ThresholdKernels, TopKKernels
from hvd_gradcomp.ops.tensorflow.kernels import FLAG, NUMBER, Kernels, Output

WORD = 1 << 32
UNKNOWN = tf.compat.v1.Dimension(None)  # stays unknown in any arithmetic
ASSERTION = "hvd_gradcomp"  # prefix of the message of a failed check in a graph


@lru_cache(maxsize=1)
def library() -> Any:
    """Return the custom ops in C, or None."""
    if not native.enabled():
        return None
    path = building.HERE / building.operations(tf.__version__)
    if path.exists():
        try:
            return tf.load_op_library(str(path))
        except (tf.errors.OpError, RuntimeError) as error:
            LOGGER.warning(
                "%s does not load, compression is slower without: %s. `hvd-gradcomp build "
                "--anew` builds it for what is installed now",
                path,
                error,
            )
            return None
    others = building.others(tf.__version__)
    built = any(building.HERE.glob("_tensorflow-*.so"))  # and TensorFlow, or the source, is newer
    where = f", only for {', '.join(others)}" if others else ""
    if built and not others:
        where = " and the present source"
    LOGGER.log(
        logging.WARNING if built else logging.INFO,
        "hvd_gradcomp's operations are not built for TensorFlow %s%s: compression is slower. "
        "`hvd-gradcomp build` builds them",
        tf.__version__,
        where,
    )
    return None


class Base(Ops):
    """Base of all TensorFlow ops: the custom ops in C, and the checks of a trace."""

    def __init__(self, static: bool = False) -> None:
        self.dynamic_shapes = not static
        on_host = self.dynamic_shapes and not tf.config.get_visible_devices("GPU")
        loaded = library() if on_host else None
        self.native = None if loaded is None else Kernels(loaded)
        if self.native is not None:
            self.threshold_kernels, self.topk_kernels = ThresholdKernels(self), TopKKernels(self)
        self.verdicts: list[Tensor] | None = None

    # -- inputs and outputs of kernels ---------------------------------------------------------

    def numbers(self, values: Sequence[Any]) -> list[Any]:
        return list(values)

    def numbers_of(self, static: Any, field: str = "numbers") -> list[int]:
        return list(getattr(static, field))

    def rows(self, x: Tensor) -> Tensor:
        return x

    def traversable(self, x: Tensor) -> bool:
        return x.dtype == tf.float32

    def extent(self, n: Any) -> Any:
        return n if isinstance(n, int) else UNKNOWN

    def empty(self, shape: Sequence[Any], dtype: str = "float32") -> Output:
        return tf.as_dtype(dtype), shape

    def body(self, size: Any, front: Any = 0) -> Output:
        return self.empty((size,), "uint8")

    def before(self, last: Tensor, size: Any) -> None:
        return None

    def writable(self, x: Tensor) -> Output:
        return x.dtype, x.shape

    def flag(self) -> Output:
        return FLAG

    def number(self) -> Output:
        return NUMBER

    # -- rounding ------------------------------------------------------------------------------

    def _rounded(self, product: Tensor) -> Tensor:
        """Return the product. Compilers do not look through a choice between it and NaN."""
        if self.dynamic_shapes:
            return product
        return tf.where(product == product, product, float("nan"))


def assertion(condition: Tensor, *message: Any) -> Any:
    """Return the graph op that fails with a message if a condition does not hold."""
    return tf.raw_ops.Assert(condition=condition, data=list(message), summarize=64)


def shape_of(shape: Sequence[Any]) -> Any:
    """Return Python integers as they are, or a vector if one is a tensor."""
    if all(isinstance(extent, int) for extent in shape):
        return tuple(shape)
    return tf.stack([tf.cast(extent, tf.int64) for extent in shape])


def low_word(x: Tensor) -> Tensor:
    """Return the low 32 bits of int64 in [0, 2**32) as int32, by arithmetic without overflow."""
    return tf.cast(tf.where(x > 0x7FFFFFFF, x - WORD, x), tf.int32)
