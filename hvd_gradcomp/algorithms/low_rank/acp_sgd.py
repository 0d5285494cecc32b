"""ACP-SGD (Zhang et al. 2023): PowerSGD that sends one of its two factors in each step."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from hvd_gradcomp.codecs.factors import FactorCompressor, Factors, between_matrices
from hvd_gradcomp.core.collectives import Allreduce, Switch
from hvd_gradcomp.core.cost_model import Exchange
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns
from hvd_gradcomp.method.compressor import Context, Program
from hvd_gradcomp.ops import Ops, Tensor


@dataclass(frozen=True)
class ACPSGDCompressor(FactorCompressor):
    """Sends one thin factor of each layer's matrix, the two in turn (Zhang et al. 2023).

    Each step, for a layer M [rows, columns] with its outputs as rows: `M += r`. In even steps Q of
    the step before is orthonormalized, and the mean of `P = M Q` over ranks travels; in odd steps
    P is, and the mean of `Q = M^T P` travels. The result is `P Q^T`, and r what the rank's own
    factor misses of its M.

    What travels: half of what PowerSGD sends, by one allreduce. State: r, 4 bytes for each element,
    and the factors.

    Default: `ACPSGDCompressor(rank=4)`, as trained in docs/papers.md, where it lost more than
    PowerSGD.

    Args:
        rank, min_ratio, seed, max_norm: as for `PowerSGDCompressor`.

    Differs from the paper: P travels first.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> ACPSGDCompressor(rank=2)
    ACPSGDCompressor(rank=2, min_ratio=2.0, seed=0, max_norm=None)
    """

    def exchange_of(self, layout: Layout, ranks: int) -> Exchange:
        """Return the mean of even and odd steps, which send one factor each."""
        p_size, q_size, uncompressed = self.sizes(layout)
        mean = 4.0 * ((p_size + q_size) / 2 + uncompressed + 1)
        return Exchange("factors", (("allreduce", mean),))

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: Factors, **extra: Tensor
    ) -> Program:
        matrices = self.matrices(context.layout)
        gradient, _ = self.clipped(ops, context, gradient, extra)
        finite, gradient = patterns.check_storable(ops, gradient)
        gradient = ops.accumulate(gradient, state.r)
        uncompressed = between_matrices(gradient, matrices)
        poison = patterns.poison(ops, finite)

        def exchange(sends_p: bool) -> Generator[Any, Any, tuple[Tensor, ...]]:
            """Send one factor; the other, of the last step, is orthonormalized and fixed."""
            last, thin = (state.q, matrices.q) if sends_p else (state.p, matrices.p)
            fixed = ops.orthogonalize_factors(last, thin)
            own_factors = ops.multiply_factors(gradient, matrices, fixed, transposed=not sends_p)
            message = ops.concat([own_factors, *uncompressed, poison])
            total = yield Allreduce(message, context.prescale, context.postscale)
            total = patterns.strip_poison(ops, total)
            size = (matrices.p if sends_p else matrices.q).size
            mean, mean_uncompressed = total[:size], total[size:]
            own_pair, mean_pair = (own_factors, fixed), (mean, fixed)
            if not sends_p:
                own_pair, mean_pair = (fixed, own_factors), (fixed, mean)
            r, result = ops.expand_factors(
                gradient, state.r, matrices, own_pair, mean_pair, mean_uncompressed
            )
            return result, r, *mean_pair

        branches = [lambda: exchange(sends_p=True), lambda: exchange(sends_p=False)]
        result, r, p, q = yield Switch(context.step % 2, branches)
        return result, Factors(r, ops.overwrite(state.p, p), ops.overwrite(state.q, q))
