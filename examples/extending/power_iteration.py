"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): a step of power iteration instead of a gradient.

A method outside of the package; docs/extending.md walks through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from hvd_gradcomp.core import validate
from hvd_gradcomp.core.collectives import Allreduce
from hvd_gradcomp.method import patterns
from hvd_gradcomp.method.compressor import Report
from hvd_gradcomp.method.handover import Handover
from hvd_gradcomp.ops import Tensor


class Iteration(NamedTuple):
    r: Tensor  # float32 [size], what was not sent yet; rank-local
    q: Tensor  # float32 [columns * rank of all layers], where the next step begins; replicated


@dataclass(frozen=True)
class PowerIterationCompressor(Handover):
    """Sends two thin factors of each layer's matrix, and keeps what they miss for later.

    A layer is a matrix M [rows, columns], with its outputs as rows. The ranks add up `M q`, whose
    columns are made orthonormal: `p`. Then they add up `M^T p`, which is the next step's q, and
    the mean is `p q^T`. Of each rank's M that is `p p^T M`; the rest stays.

    What travels: `4 * rank * (rows + columns)` bytes a layer, by two allreduces. Layers that would
    take no fewer bytes, biases first of all, are sent dense. State: 4 bytes an element, and q.

    Args:
        rank: columns of the factors; smaller sends less.
        seed: of the first q.
    """

    rank: int = 2
    seed: int = 0

    block = 1  # no padding
    replicated = frozenset({"q"})

    def __post_init__(self):
        validate.whole(self, "rank", low=1)
        validate.whole(self, "seed", low=0)

    def init(self, ops, layout):
        count = sum(columns * rank for _, columns, rank in self.matrices(layout))
        q = ops.uniform(ops.key(0, self.seed), count) - 0.5
        return Iteration(ops.zeros((layout.size,)), q)

    def aggregate(self, ops, context, gradient, state, **extra):
        del extra
        layout = context.layout
        finite, gradient = patterns.check_storable(ops, gradient)
        accumulated = ops.accumulate(gradient, state.r)
        shapes = self.matrices(layout)
        matrices = cut(ops, accumulated, [(rows, columns) for rows, columns, _ in shapes])

        q = cut(ops, state.q, [(columns, rank) for _, columns, rank in shapes])
        summand = flat(ops, [ops.matmul(m, x) for m, x in zip(matrices, q)])
        summand = ops.concat((summand, patterns.poison(ops, finite)))
        total = yield Allreduce(summand, context.prescale, context.postscale)
        total = patterns.strip_poison(ops, total)  # raises on all ranks, and the state is as it was
        p = cut(ops, total, [(rows, rank) for rows, _, rank in shapes])
        p = [ops.orthogonalize(x) for x in p]

        summand = flat(ops, [ops.matmul(turned(ops, m), x) for m, x in zip(matrices, p)])
        total = yield Allreduce(summand, context.prescale, context.postscale)
        total = patterns.check_sum(ops, total)

        def product(factor):
            q = cut(ops, factor, [(columns, rank) for _, columns, rank in shapes])
            return flat(ops, [ops.matmul(x, turned(ops, y)) for x, y in zip(p, q)])

        r = ops.overwrite(state.r, accumulated - product(summand))
        return ops.overwrite(accumulated, product(total)), Iteration(
            r, ops.overwrite(state.q, total)
        )

    def matrices(self, layout):
        """(rows, columns, rank) of each layer."""
        return [self.matrix(shape, layout.filters_last) for shape in layout.shapes]

    def matrix(self, shape, filters_last=False):
        rows, columns = (shape or (1,))[0], prod(shape[1:])
        if filters_last:
            rows, columns = prod(shape[:-1]), (shape or (1,))[-1]
        return rows, columns, min(self.rank, rows, columns)

    def layer_bytes(self, shape):
        rows, columns, rank = self.matrix(shape)
        return 4 * rank * (rows + columns)

    def report(self, layout, state, steps, since=0):
        sent = [rank * (rows + columns) for rows, columns, rank in self.matrices(layout)]
        return Report([count * (steps - since) for count in sent], state.r)

    def residual(self, state):
        return state.r


def cut(ops, x, shapes):
    """A vector as matrices, one after another."""
    matrices, start = [], 0
    for shape in shapes:
        matrices.append(ops.reshape(x[start : start + prod(shape)], shape))
        start += prod(shape)
    return matrices


def flat(ops, matrices):
    """Matrices as one vector."""
    return ops.concat([ops.reshape(m, (-1,)) for m in matrices])


def turned(ops, matrix):
    return ops.transpose(matrix, (1, 0))
