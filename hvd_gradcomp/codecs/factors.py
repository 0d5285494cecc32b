"""Layers as matrices, and their thin factors: the common parts of PowerSGD and ACP-SGD.

A layer is a matrix M [rows, columns] with its outputs as rows; its factors are P [rows, rank] and
Q [columns, rank], and M is sent as P Q^T. Layers that would not shrink are sent as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from hvd_gradcomp.codecs.clipping import Clipping
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.factored import FactoredMatrices, Matrix
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Report
from hvd_gradcomp.method.handover import Handover
from hvd_gradcomp.ops import Ops, Tensor


class Factors(NamedTuple):
    """State of one bucket."""

    r: Tensor  # float32 [size], what was not sent yet; rank-local
    p: Tensor  # float32 [rows * rank of all matrices]; replicated
    q: Tensor  # float32 [columns * rank of all matrices]; replicated


@dataclass(frozen=True)
class FactorCompressor(Clipping, Handover):
    """Base of the two methods; see their classes for the arguments."""

    rank: int = 4
    min_ratio: float = 2.0
    seed: int = 0
    max_norm: float | None = None

    block = 1  # no padding
    outputs_first = True
    replicated = frozenset({"p", "q"})

    def __post_init__(self) -> None:
        validate.whole(self, "rank", low=1)
        validate.real(self, "min_ratio", low=1, closed="[")
        validate.whole(self, "seed", low=0)
        self.validate_max_norm()

    def matrix(self, shape: Sequence[int]) -> tuple[int, int, int] | None:
        """Return (rows, columns, rank) of a layer; None if it is sent as it is."""
        if len(shape) < 2 or not prod(shape):
            return None
        rows, columns = shape[0], prod(shape[1:])
        rank = min(self.rank, rows, columns)
        shrinks = (rows + columns) * rank * self.min_ratio <= rows * columns
        return (rows, columns, rank) if shrinks else None

    def matrices(self, layout: Layout) -> FactoredMatrices:
        """Return the layers that are sent by their factors."""
        return _matrices(self, layout)

    def sizes(self, layout: Layout) -> tuple[int, int, int]:
        """Return the sizes of all P, of all Q, and of what lies between the matrices."""
        matrices = self.matrices(layout)
        return matrices.p.size, matrices.q.size, layout.size - matrices.elements

    def layer_bytes(self, shape: Sequence[int]) -> float:
        matrix = self.matrix(shape)
        if matrix is None:
            return 4 * prod(shape)
        rows, columns, rank = matrix
        return 4 * rank * (rows + columns)

    def init(self, ops: Ops, layout: Layout) -> Factors:
        p_size, q_size, _ = self.sizes(layout)
        q = ops.uniform(ops.key(0, self.seed), q_size) - 0.5
        p = ops.zeros((p_size,))
        return Factors(ops.zeros((layout.size,)), p, q)

    def report(self, layout: Layout, state: Factors, steps: int, since: int = 0) -> Report:
        matrices = map(self.matrix, layout.with_outputs_first().shapes)
        sent = [n if m is None else m[2] * (m[0] + m[1]) for n, m in zip(layout.sizes, matrices)]
        return Report([count * (steps - since) for count in sent], state.r)

    def residual(self, state: Factors) -> Tensor:
        return state.r

    def inherit(
        self, ops: Ops, state: Factors, gradient: Tensor, residual: Tensor
    ) -> tuple[Factors, Tensor]:
        del ops
        return state._replace(r=state.r + residual), gradient


@lru_cache(maxsize=1024)  # asked for in each step of each bucket
def _matrices(compressor: FactorCompressor, layout: Layout) -> FactoredMatrices:
    shapes = map(compressor.matrix, layout.with_outputs_first().shapes)
    layers = zip(layout.offsets, shapes)
    return FactoredMatrices(tuple(Matrix(at, *shape) for at, shape in layers if shape))


def between_matrices(x: Tensor, matrices: FactoredMatrices) -> list[Tensor]:
    """Return what lies between the matrices of a bucket's vector, in order."""
    return [x[start:end] for start, end in matrices.between(x.shape[0])]
