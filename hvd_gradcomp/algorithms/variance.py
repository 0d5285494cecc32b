"""Variance-based gradient compression (Tsuzuku, Imachi, Akiba 2018), Algorithm 1.

An element is delayed until it is unambiguous: until the square of its accumulated gradient exceeds
`alpha` times the accumulated sum of squares of what single samples contributed to it. That is the
test "estimated variance of the mean is smaller than the mean squared" without ever forming a
variance (section 4.4 and appendix A).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_gradcomp.codecs.compaction import SentElements
from hvd_gradcomp.codecs.quantizers import PowerOfTwo
from hvd_gradcomp.codecs.threshold import ThresholdCompressor
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.compressor import derived
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.kernel_params import Rule

MOMENTS = ("auto", "sample", "microbatch", "step")


def weight_of_passes(passes: int, samples: Any = None) -> Any:
    """`a` in `q = a * sum_j c_j**2 + (1 - a) * g**2`, the second moment from micro-batches.

    Pass j of `m` contributes `c_j`, and `g` is their sum. Of `B` samples that contribute with mean
    `mu / B` and variance `s / B**2` each,

        E sum_j c_j**2 = mu**2 / m + s / B        E g**2 = mu**2 + s / B

    and `q` shall have the expectation of their sum of squares, `(mu**2 + s) / B`: so
    `a = (1 - 1/B) / (1 - 1/m)`. As many passes as samples give `a = 1`, each pass a sample. Since
    `g**2 <= m * sum_j c_j**2` (Cauchy), `q >= m/B * sum_j c_j**2`: it is below 0 by rounding only,
    and setting it to 0 there costs nothing.

    Args:
        passes: `m`, at least 2, of equally many samples.
        samples: `B`, a number or a scalar tensor; None where it is unknown, for infinitely many.
            Then `q` leaves out `mu**2 / B`, so it is too small by that.

    >>> weight_of_passes(4, 32), weight_of_passes(4)
    (1.2916666666666667, 1.3333333333333333)
    """
    return (1.0 - (0.0 if samples is None else 1.0 / samples)) / (1.0 - 1.0 / passes)


class Ambiguity(NamedTuple):
    """What was accumulated and not yet sent."""

    r: Tensor  # float32 [size], the sum of gradients
    v: Tensor  # float32 [size], the decayed sum of squares

    @classmethod
    def none(cls, ops: Ops, layout: Layout) -> Ambiguity:
        """Nothing yet."""
        return cls(ops.zeros((layout.size,)), ops.zeros((layout.size,)))

    def plus(self, ops: Ops, gradient: Tensor, moment: Tensor | None) -> Ambiguity:
        """`r += g`, `v += q`; without moments the step is the sample, `q = g*g`. Donating."""
        r = ops.accumulate(self.r, gradient)
        if moment is None:
            return Ambiguity(r, ops.accumulate_square(self.v, gradient))
        return Ambiguity(r, ops.accumulate(self.v, moment))


@dataclass(frozen=True, repr=False)
class VarianceCompressor(ThresholdCompressor):
    """Sends an element once it is unambiguous (Tsuzuku et al. 2018, Algorithm 1).

    Each step and element: `r += g`, `v += q`; where `r*r > alpha*v` it is sent and `r = v = 0`,
    elsewhere `v *= zeta`. `g` is the gradient averaged over the local batch `B` and
    `q = sum over samples z of (grad_z / B)**2`.

    What travels: one 32-bit word an element (sign, 3 bits of exponent, 28 bits of index) and one
    exponent byte a layer, by allgather; one byte an element when most are sent. Where
    that would bring a rank more, 4 bytes an element of the bucket, by allreduce.
    State: `r` and `v`, 8 bytes an element.

    Args:
        alpha: how unambiguous an element must be; larger sends less. Any positive number; the
            paper uses 1 to 2.
        zeta: decay of `v` each step, in (0, 1]; smaller sends delayed elements sooner.
        moments: where `q` comes from. "sample": exact, per sample, see `track_moments`;
            "microbatch": estimated from the passes of `backward_passes_per_step`, right on average
            where the batch size is known (`weight_of_passes`); "step": `q = g*g`, the
            step is the sample, and then the first step of an element never passes for
            `alpha >= 1`; "auto": the first of these that is set up.
        feedback_rounding: keep in `r` what rounding to a power of two takes.
        max_norm: before it is accumulated, a layer of a rank's own gradient whose norm exceeds
            `max_norm / sqrt(ranks)` is scaled down to it, so that a bad batch does not fill the
            residual; positive; smaller clips more. None clips nothing.

    Differs from the paper: an element that the 4-bit code cannot express (`d > 7`) stays in `r`
    and `v`; the paper drops it. Rounding errors are dropped as in the paper unless
    `feedback_rounding` is set.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> VarianceCompressor(alpha=1.5)
    VarianceCompressor(alpha=1.5, zeta=0.999, moments='auto', feedback_rounding=False)
    """

    alpha: float = 2.0
    zeta: float = 0.999
    moments: str = "auto"
    feedback_rounding: bool = False
    max_norm: float | None = None

    uses_moments = True
    stated = frozenset({"alpha"})
    quantizer = PowerOfTwo()

    def __post_init__(self) -> None:
        validate.real(self, "alpha", low=0)
        validate.real(self, "zeta", low=0, high=1, closed="]")
        validate.one_of(self, "moments", MOMENTS)
        validate.boolean(self, "feedback_rounding")
        self.validate_max_norm()

    def remember(self, ops: Ops, layout: Layout) -> Ambiguity:
        return Ambiguity.none(ops, layout)

    def gate(
        self, ops: Ops, memory: Ambiguity, gradient: Tensor, moment: Tensor | None
    ) -> tuple[Tensor, Ambiguity]:
        r, v = memory.plus(ops, gradient, moment)
        wanted = ops.square_exceeds(r, v, self.alpha)
        return wanted, Ambiguity(r, ops.scale(v, self.zeta))

    def settle(self, ops: Ops, memory: Ambiguity, sent: SentElements, value: Tensor) -> Ambiguity:
        kept = ops.gather(memory.r, sent.index) - value if self.feedback_rounding else 0.0
        return Ambiguity(ops.put(memory.r, sent.index, kept), ops.put(memory.v, sent.index, 0.0))

    @derived
    def rule(self) -> Rule:
        return Rule(
            ambiguity=True,
            powers=True,
            subtracts=self.feedback_rounding,
            alpha=self.alpha,
            zeta=self.zeta,
        )
