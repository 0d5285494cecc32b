"""Threshold compression (Strom 2015), the baseline of Tsuzuku et al. 2018, Tables 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_gradcomp.codecs.compaction import SentElements
from hvd_gradcomp.codecs.quantizers import Quantizer, Sign
from hvd_gradcomp.codecs.sparse import Residual
from hvd_gradcomp.codecs.threshold import ThresholdCompressor
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import derived
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.kernel_params import Rule


@dataclass(frozen=True)
class StromCompressor(ThresholdCompressor):
    """Strom's method: sends plus or minus a threshold where the residual exceeds it (Strom 2015).

    Each step and element: `r += g`; where `|r| > tau`, `sign(r)` is sent and
    `r -= sign(r) * tau`; the rest stays.

    What travels: a sign and a packed index for each sent element, about `log2(n / k) + 3` bits for
    each of k of n, by allgather; two bits for each element if most are sent. If that is more
    bytes, 4 bytes for each element of the bucket, by allreduce. State: `r`, 4 bytes for each
    element.

    Default: `StromCompressor(tau=0.1)`, as trained in docs/papers.md and docs/papers-long.md.
    Smaller thresholds sent several times more, and were hardly more accurate.

    Args:
        tau: the threshold, in units of the gradient, positive; larger sends less. The variance
            paper's tables use 0.001 to 0.1.
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` before accumulating, so that a bad batch does not fill the
            residual; positive; smaller clips more. None clips nothing.
        capacity: what a payload has room for, "largest" or "latest"; see `VarianceCompressor`.
        index_coding: "elias_fano" or "int32", 31 bits for each; see `VarianceCompressor`.

    Raises:
        ValueError: `tau` is not a positive number.

    >>> StromCompressor()
    StromCompressor(tau=0.1, max_norm=None, capacity='largest', index_coding='elias_fano')
    """

    tau: float = 0.1
    max_norm: float | None = None
    capacity: str = "largest"
    index_coding: str = "elias_fano"

    def __post_init__(self) -> None:
        validate.real(self, "tau", low=0)
        self.validate_max_norm()
        self.validate_payload()

    @property
    def quantizer(self) -> Quantizer:
        return Sign(self.tau)

    def init_memory(self, ops: Ops, layout: Layout) -> Residual:
        return Residual(ops.zeros((layout.size,)))

    def select_mask(
        self, ops: Ops, memory: Residual, gradient: Tensor, moment: Tensor | None
    ) -> tuple[Tensor, Residual]:
        del moment
        r = ops.accumulate(memory.r, gradient)
        return ops.greater(ops.abs(r), self.tau), Residual(r)

    def commit(self, ops: Ops, memory: Residual, sent: SentElements, value: Tensor) -> Residual:
        kept = ops.gather(memory.r, sent.index) - value
        return Residual(ops.put(memory.r, sent.index, kept))

    @derived
    def rule(self) -> Rule:
        return Rule(large=True, subtracts=True, tau=self.tau)
