"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): one step of power iteration per gradient."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_gradcomp.codecs.factors import FactorCompressor, Factors, between_matrices
from hvd_gradcomp.core.collectives import Allreduce
from hvd_gradcomp.core.cost_model import Exchange
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns
from hvd_gradcomp.method.compressor import Context, Program
from hvd_gradcomp.ops import Ops, Tensor


@dataclass(frozen=True)
class PowerSGDCompressor(FactorCompressor):
    """Sends two thin factors of each layer's matrix (Vogels et al. 2019, Algorithm 1).

    Each step, for a layer M [rows, columns] with its outputs as rows: `M += r`; `P = M Q`, the mean
    over ranks, orthonormalized; `Q = M^T P`, the mean; the result is `P Q^T`, and r what a rank's
    own `P (M^T P)^T` misses of its M. Q is kept for the next step.

    What travels: `4 * rank * (rows + columns)` bytes for a matrix, by two allreduces; layers that
    would not shrink by `min_ratio`, biases first of all, 4 bytes for each element. State: r, 4
    bytes for each element, and the factors.

    Default: `PowerSGDCompressor(rank=4)` from the first step, as trained in docs/papers.md. Ten
    uncompressed steps before, by `after`, changed no more than another seed does.

    Args:
        rank: columns of the factors, at least 1; smaller sends less.
        min_ratio: a layer is sent as it is unless its factors are so many times smaller; at least
            1.
        seed: of the first Q, the same on all ranks.
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` before accumulating; positive; smaller clips more. None clips
            nothing.

    Differs from the paper: nothing is sent uncompressed at first. On GPUs, and without the C
    library, products of matrices round by machine, so ranks on different processors may drift apart
    by rounding; `verify_every=` notices.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> PowerSGDCompressor()
    PowerSGDCompressor(rank=4, min_ratio=2.0, seed=0, max_norm=None)
    """

    def exchange_of(self, layout: Layout, ranks: int) -> Exchange:
        p_size, q_size, uncompressed = self.sizes(layout)
        sizes = [p_size + uncompressed + 1, *([q_size] if q_size else [])]
        return Exchange("factors", tuple(("allreduce", 4.0 * size) for size in sizes))

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: Factors, **extra: Tensor
    ) -> Program:
        matrices = self.matrices(context.layout)
        gradient, _ = self.clipped(ops, context, gradient, extra)
        finite, gradient = patterns.check_storable(ops, gradient)
        gradient = ops.accumulate(gradient, state.r)

        own_p = ops.multiply_factors(gradient, matrices, state.q, transposed=False)
        uncompressed = between_matrices(gradient, matrices)
        message = ops.concat([own_p, *uncompressed, patterns.poison(ops, finite)])
        total = yield Allreduce(message, context.prescale, context.postscale)
        total = patterns.strip_poison(ops, total)  # raises on all ranks, and the state is as it was
        mean_p, mean_uncompressed = total[: matrices.p.size], total[matrices.p.size :]
        p = ops.orthogonalize_factors(mean_p, matrices.p)

        own_q = mean_q = ops.multiply_factors(gradient, matrices, p, transposed=True)
        if matrices.q.size:
            # A copy is sent: the rank's own Q is needed for what its factors miss.
            mean_q = yield Allreduce(own_q * 1.0, context.prescale, context.postscale)
            mean_q = patterns.check_sum(ops, mean_q)
        r, mean = ops.expand_factors(
            gradient, state.r, matrices, (p, own_q), (p, mean_q), mean_uncompressed
        )
        return mean, Factors(r, ops.overwrite(state.p, p), ops.overwrite(state.q, mean_q))
