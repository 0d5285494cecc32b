"""Variance-based gradient compression with Strom's threshold (Tsuzuku et al. 2018, Alg. 2)."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_gradcomp.algorithms.threshold.variance import MOMENTS, Ambiguity
from hvd_gradcomp.codecs.compaction import SentElements
from hvd_gradcomp.codecs.quantizers import Quantizer, Sign
from hvd_gradcomp.codecs.threshold import ThresholdCompressor
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import derived
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.kernel_params import Rule


@dataclass(frozen=True)
class HybridCompressor(ThresholdCompressor):
    """Hybrid: sends a threshold for large and unambiguous elements (Tsuzuku et al. 2018).

    Each step and element: `r += g`, `v += q`; where `|r| > tau` and `r*r > alpha*v`, `sign(r)` is
    sent, `v = max(v - 2*|r|*tau + tau*tau, 0)` and `r -= sign(r)*tau`; then `v *= zeta`
    everywhere. `g` and `q` as in `VarianceCompressor`.

    What travels: a sign and a packed index for each sent element, about `log2(n / k) + 3` bits for
    each of k of n, by allgather; two bits for each element if most are sent. If that is more
    bytes, 4 bytes for each element of the bucket, by allreduce. State: `r` and `v`, 8 bytes for
    each element.

    Default: `HybridCompressor(tau=0.1)`, as trained in docs/papers.md and docs/papers-long.md,
    where `tau=0.01` lost more.

    Args:
        tau: the threshold, in units of the gradient, positive; larger sends less.
        alpha: how unambiguous an element must be, positive; larger sends less.
        zeta: decay of `v` each step, in (0, 1]; smaller sends delayed elements sooner.
        moments: source of `q`; see `VarianceCompressor`.
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` before accumulating, so that a bad batch does not fill the
            residual; positive; smaller clips more. None clips nothing.
        capacity: what a payload has room for, "largest" or "latest"; see `VarianceCompressor`.
        index_coding: "elias_fano" or "int32", 31 bits for each; see `VarianceCompressor`.

    Differs from the paper: Algorithm 2 lists `r -= sign(r)*tau` above the correction of `v`; the
    derivation in section 4.5, the sum of squares of `a - b`, needs the earlier `r`.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> print(HybridCompressor(tau=0.05))
    HybridCompressor(tau=0.05)
    """

    tau: float = 0.1
    alpha: float = 2.0
    zeta: float = 0.999
    moments: str = "auto"
    max_norm: float | None = None
    capacity: str = "largest"
    index_coding: str = "elias_fano"

    uses_moments = True

    def __post_init__(self) -> None:
        validate.real(self, "tau", low=0)
        validate.real(self, "alpha", low=0)
        validate.real(self, "zeta", low=0, high=1, closed="]")
        validate.one_of(self, "moments", MOMENTS)
        self.validate_max_norm()
        self.validate_payload()

    @property
    def quantizer(self) -> Quantizer:
        return Sign(self.tau)

    def init_memory(self, ops: Ops, layout: Layout) -> Ambiguity:
        return Ambiguity.none(ops, layout)

    def select_mask(
        self, ops: Ops, memory: Ambiguity, gradient: Tensor, moment: Tensor | None
    ) -> tuple[Tensor, Ambiguity]:
        r, v = memory.plus(ops, gradient, moment)
        unambiguous = ops.square_exceeds(r, v, self.alpha)
        return unambiguous & ops.greater(ops.abs(r), self.tau), Ambiguity(r, v)

    def commit(self, ops: Ops, memory: Ambiguity, sent: SentElements, value: Tensor) -> Ambiguity:
        r, v = (ops.gather(x, sent.index) for x in memory)
        v = ops.maximum(v - ops.times(ops.abs(r), 2 * self.tau) + self.tau * self.tau, 0.0)
        return Ambiguity(
            ops.put(memory.r, sent.index, r - value),
            ops.scale(ops.put(memory.v, sent.index, v), self.zeta),
        )

    @derived
    def rule(self) -> Rule:
        return Rule(
            ambiguity=True,
            large=True,
            subtracts=True,
            corrects=True,
            alpha=self.alpha,
            tau=self.tau,
            zeta=self.zeta,
        )
