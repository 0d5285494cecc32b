"""Variance-based gradient compression (Tsuzuku, Imachi, Akiba 2018), Algorithm 1.

An element is delayed until it is unambiguous: until the square of its accumulated gradient exceeds
`alpha` times the accumulated sum of squares of the samples' contributions. This tests "the
estimated variance of the mean is smaller than the squared mean" without computing a variance
(section 4.4 and appendix A).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_gradcomp.codecs.compaction import SentElements
from hvd_gradcomp.codecs.quantizers import PowerOfTwo
from hvd_gradcomp.codecs.threshold import ThresholdCompressor
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import derived
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.kernel_params import Rule

MOMENTS = ("auto", "sample", "microbatch", "step")


def weight_of_passes(passes: int, samples: Any = None) -> Any:
    """Return `a` in `q = a * sum_j c_j**2 + (1 - a) * g**2`, the micro-batch second moment.

    Pass j of `m` contributes `c_j`, and `g` is their sum. If each of `B` samples contributes with
    mean `mu / B` and variance `s / B**2`,

        E sum_j c_j**2 = mu**2 / m + s / B        E g**2 = mu**2 + s / B

    and `q` must have the expectation of the samples' sum of squares, `(mu**2 + s) / B`: so
    `a = (1 - 1/B) / (1 - 1/m)`. With one sample in each pass, `a = 1`. Since
    `g**2 <= m * sum_j c_j**2` (Cauchy), `q >= m/B * sum_j c_j**2`: only rounding makes it
    negative, and clamping it to 0 costs nothing.

    Args:
        passes: `m`, at least 2, of equally many samples.
        samples: `B`, a number or a scalar tensor; None if unknown, which assumes infinitely many.
            Then `q` omits `mu**2 / B` and is too small by that.

    >>> weight_of_passes(4, 32), weight_of_passes(4)
    (1.2916666666666667, 1.3333333333333333)
    """
    return (1.0 - (0.0 if samples is None else 1.0 / samples)) / (1.0 - 1.0 / passes)


class Ambiguity(NamedTuple):
    """Accumulated gradient and squares that were not sent yet."""

    r: Tensor  # float32 [size], the sum of gradients
    v: Tensor  # float32 [size], the decayed sum of squares

    @classmethod
    def none(cls, ops: Ops, layout: Layout) -> Ambiguity:
        """Return the memory before the first step."""
        return cls(ops.zeros((layout.size,)), ops.zeros((layout.size,)))

    def plus(self, ops: Ops, gradient: Tensor, moment: Tensor | None) -> Ambiguity:
        """Accumulate `r += g`, `v += q`; without moments `q = g*g`. Donating."""
        r = ops.accumulate(self.r, gradient)
        if moment is None:
            return Ambiguity(r, ops.accumulate_square(self.v, gradient))
        return Ambiguity(r, ops.accumulate(self.v, moment))


@dataclass(frozen=True)
class VarianceCompressor(ThresholdCompressor):
    """Variance-based compression: sends unambiguous elements (Tsuzuku et al. 2018, Algorithm 1).

    Each step and element: `r += g`, `v += q`; where `r*r > alpha*v` it is sent and `r = v = 0`,
    elsewhere `v *= zeta`. `g` is the gradient averaged over the local batch `B` and
    `q = sum over samples z of (grad_z / B)**2`.

    What travels: a sign, 3 bits of exponent and a packed index for each sent element, about
    `log2(n / k) + 6` bits for each of k of n, and one exponent byte for each layer, by allgather;
    one byte for each element if most are sent. If that is more bytes, 4 bytes for each element of
    the bucket, by allreduce.
    State: `r` and `v`, 8 bytes for each element.

    Default: `VarianceCompressor(alpha=2)`, as trained in docs/papers.md and docs/papers-long.md,
    with moments of samples. With `capacity="latest"` it sent fewer bytes and was as accurate; it is
    not the default, since its time was not measured.

    Args:
        alpha: how unambiguous an element must be; larger sends less. Any positive number; the
            paper uses 1 to 2.
        zeta: decay of `v` each step, in (0, 1]; smaller sends delayed elements sooner.
        moments: source of `q`. "sample": exact, per sample, see `track_moments`; "microbatch":
            estimated from the passes of `backward_passes_per_step`, unbiased if the batch size is
            known (`weight_of_passes`); "step": `q = g*g`, so that an element never passes in its
            first step for `alpha >= 1`; "auto": the first of these that is set up.
        feedback_rounding: keep in `r` the error of rounding to a power of two.
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` before accumulating, so that a bad batch does not fill the
            residual; positive; smaller clips more. None clips nothing.
        capacity: what a payload has room for: "largest", what the largest of the last 16 steps
            needed, so that sizes hardly change; or "latest", three quarters of what the last step
            needed, which moves fewer bytes, of a new size in most steps. What does not fit waits.
        index_coding: "elias_fano", about `log2(n / k) + 2` bits for each of k of n indices; or
            "int32", one 32-bit word for each element, its code above 28 bits of index.

    Differs from the paper: an element that the 4-bit code cannot express (`d > 7`) stays in `r`
    and `v`; the paper drops it. Rounding errors are dropped as in the paper unless
    `feedback_rounding` is set.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> print(VarianceCompressor(alpha=1.5))
    VarianceCompressor(alpha=1.5)
    """

    alpha: float = 2.0
    zeta: float = 0.999
    moments: str = "auto"
    feedback_rounding: bool = False
    max_norm: float | None = None
    capacity: str = "largest"
    index_coding: str = "elias_fano"

    uses_moments = True
    quantizer = PowerOfTwo()

    def __post_init__(self) -> None:
        validate.real(self, "alpha", low=0)
        validate.real(self, "zeta", low=0, high=1, closed="]")
        validate.one_of(self, "moments", MOMENTS)
        validate.boolean(self, "feedback_rounding")
        self.validate_max_norm()
        self.validate_payload()

    def init_memory(self, ops: Ops, layout: Layout) -> Ambiguity:
        return Ambiguity.none(ops, layout)

    def select_mask(
        self, ops: Ops, memory: Ambiguity, gradient: Tensor, moment: Tensor | None
    ) -> tuple[Tensor, Ambiguity]:
        r, v = memory.plus(ops, gradient, moment)
        wanted = ops.square_exceeds(r, v, self.alpha)
        return wanted, Ambiguity(r, ops.scale(v, self.zeta))

    def commit(self, ops: Ops, memory: Ambiguity, sent: SentElements, value: Tensor) -> Ambiguity:
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
