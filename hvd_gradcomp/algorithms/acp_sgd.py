"""ACP-SGD (Zhang et al. 2023): PowerSGD that sends one of its two factors in each step."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from hvd_gradcomp.codecs.factors import (
    FactorCompressor,
    Factors,
    cut,
    flat,
    others,
    transposed,
    whole,
)
from hvd_gradcomp.core import patterns
from hvd_gradcomp.core.collectives import Allreduce, Switch
from hvd_gradcomp.core.compressor import Context, Program
from hvd_gradcomp.core.cost_model import Exchange
from hvd_gradcomp.core.layout import Layout
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
        left, right, rest = self.sizes(layout)
        mean = 4.0 * ((left + right) / 2 + rest + 1)
        return Exchange("factors", (("allreduce", mean),))

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: Factors, **extra: Tensor
    ) -> Program:
        layout, found = context.layout, self.matrices(context.layout)
        gradient, _ = self.clipped(ops, context, gradient, extra)
        finite, gradient = patterns.check_storable(ops, gradient)
        there = ops.accumulate(gradient, state.r)
        matrices, rest = whole(ops, there, found), others(ops, there, found, layout.size)
        tall = [(m.rows, m.rank) for m in found]
        wide = [(m.columns, m.rank) for m in found]
        poison = patterns.poison(ops, finite)

        def exchange(left: bool) -> Generator[Any, Any, tuple[Tensor, ...]]:
            kept, shapes = (state.q, wide) if left else (state.p, tall)
            fixed = [ops.orthogonalize(x) for x in cut(ops, kept, shapes)]
            turned = matrices if left else [transposed(ops, m) for m in matrices]
            own = [ops.matmul(m, x) for m, x in zip(turned, fixed)]
            message = ops.concat([flat(ops, own), *rest, poison])
            total = yield Allreduce(message, context.prescale, context.postscale)
            total = patterns.strip_poison(ops, total)
            size = sum(rows * rank for rows, rank in (tall if left else wide))
            other, ours, mean = flat(ops, fixed), flat(ops, own), total[:size]
            own_pair, mean_pair = (ours, other), (mean, other)
            if not left:
                own_pair, mean_pair = (other, ours), (other, mean)
            r, result = ops.expand_factors(there, state.r, found, own_pair, mean_pair, total[size:])
            return result, r, *mean_pair

        ways = [lambda: exchange(True), lambda: exchange(False)]
        result, r, p, q = yield Switch(context.step % 2, ways)
        return result, Factors(r, ops.overwrite(state.p, p), ops.overwrite(state.q, q))
