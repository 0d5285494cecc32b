"""Sparse gradient descent: the k largest of each layer, the simplest top-k method.

The "Sparse GD" of the papers' comparisons (Aji and Heafield 2017, by layer).
"""

from __future__ import annotations

from dataclasses import dataclass

from hvd_gradcomp.codecs.sparse import Memory, Residual
from hvd_gradcomp.codecs.topk import TopKCompressor, count_of
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.kernel_params import Collecting


class ResidualTopK(TopKCompressor):
    """Base of Sparse GD and Gradient Dropping: top-k with a residual only."""

    rule = Collecting()

    def init_memory(self, ops: Ops, layout: Layout) -> Residual:
        return Residual(ops.zeros((layout.size,)))

    def collect(self, ops: Ops, memory: Memory, gradient: Tensor) -> Residual:
        return Residual(ops.accumulate(memory.r, gradient))

    def commit(self, ops: Ops, memory: Memory, index: Tensor) -> Residual:
        return Residual(ops.put(memory.r, index, 0.0))


@dataclass(frozen=True)
class SparseGDCompressor(ResidualTopK):
    """Top-k that sends a fixed share of each layer (Aji and Heafield 2017, by layer).

    Each step: `r += g`; of each layer the `k = max(1, round(n * density))` largest `|r|` are sent
    as they are, and `r = 0` there.

    What travels: values, float32 by default, and packed indices, by allgather; about
    `4 + (log2(1/density) + 2) / 8` bytes for each element sent. If a rank would receive more
    bytes than with dense gradients, 4 bytes for each element of the bucket, by allreduce.
    State: `r`, 4 bytes for each element.

    Default: `SparseGDCompressor(density=0.001)`, as trained in docs/papers-long.md behind
    uncompressed steps, a fifth of all: `after(steps, None, SparseGDCompressor())`. From the first
    step 0.01 was trained (docs/papers.md), and lost far more.

    Args:
        density: share of elements to send, in (0, 1]; smaller sends less. At 1 layers are sent
            dense.
        index_coding: "elias_fano", packed, or "int32", plain.
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` before accumulating, so that a bad batch does not fill the
            residual; positive; smaller clips more. None clips nothing.
        values: code of the sent values: "float32", "bfloat16", "int8", "int4", "int2" or "sign";
            fewer bits send less of a layer that sends many. What rounding takes stays in `r`.
            Neighbours in a layer, some 4,096 at most, share a scale or a codebook, which is sent
            too: of a layer that sends few, it may take more than the bits save.

    Differs from the paper: the selection is exact, not by a sampled threshold; zeros are not sent.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> SparseGDCompressor()
    SparseGDCompressor(density=0.001, index_coding='elias_fano', max_norm=None, values='float32')
    """

    density: float = 0.001
    index_coding: str = "elias_fano"
    max_norm: float | None = None
    values: str = "float32"

    def __post_init__(self) -> None:
        validate.real(self, "density", low=0, high=1, closed="]")
        self.validate_codings()
        self.validate_max_norm()

    def count(self, size: int) -> int:
        return count_of(size, self.density)
