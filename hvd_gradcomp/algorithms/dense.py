"""No compression, and half precision: the baselines of all comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_gradcomp.codecs.linear import LinearCompressor
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.ops import Ops, Tensor


@dataclass(frozen=True)
class NoneCompressor(LinearCompressor):
    """No compression; the same result as stock Horovod without compression.

    What travels: 4 bytes for each element (8 for float64, 2 for float16 parameters), by allreduce.
    State: none. bfloat16 gradients travel as float32, since no collective supports bfloat16.

    Default: `NoneCompressor()` has no settings; docs/papers.md compares everything with it.

    >>> NoneCompressor()
    NoneCompressor()
    """

    compresses = False
    native_dtypes = frozenset({"float16", "float32", "float64"})

    def to_code(self, ops: Ops, gradient: Tensor) -> Tensor:
        del ops
        return gradient

    def from_code(self, ops: Ops, layout: Layout, code: Tensor) -> Tensor:
        del ops, layout
        return code


@dataclass(frozen=True)
class FP16Compressor(LinearCompressor):
    """Half precision on the wire; the same result as Horovod's `Compression.fp16`.

    What travels: 2 bytes for each element, by allreduce. State: none. Rounding errors are dropped,
    and the sum is computed in half precision: magnitudes above 65504 overflow.

    Default: `FP16Compressor()` has no settings. It was trained on digits
    (docs/algorithms/index.md); on a transformer and on larger images it was not measured.

    >>> FP16Compressor()
    FP16Compressor()
    """

    is_quantizer = True
    itemsize = 2
    native_dtypes = frozenset({"float16", "float32", "float64"})

    def to_code(self, ops: Ops, gradient: Tensor) -> Tensor:
        return ops.cast(gradient, "float16")

    def from_code(self, ops: Ops, layout: Layout, code: Tensor) -> Tensor:
        return ops.cast(code, layout.dtype)


def as_compressor(compression: Any, stock: Any) -> Compressor:
    """Convert a `compression=` argument to a compressor of this package.

    Args:
        compression: a compressor, a compressor class, None, or Horovod's `Compression.none` or
            `.fp16`, which become their counterparts here.
        stock: the frontend's `Compression` of Horovod; None without Horovod.

    Raises:
        TypeError: `compression` is something else.
    """
    if isinstance(compression, Compressor):
        return compression
    if isinstance(compression, type) and issubclass(compression, Compressor):
        return compression()
    if compression is None or (stock and compression is stock.none):
        return NoneCompressor()
    if stock is None:
        raise TypeError(f"compression= takes a compressor of hvd_gradcomp, got {compression!r}")
    if compression is stock.fp16:
        return FP16Compressor()
    raise TypeError(
        "compression must be a compressor of hvd_gradcomp, or hvd.Compression.none or .fp16; "
        f"got {compression!r}"
    )
