"""TernGrad (Wen, Xu, Yan, Wu, Wang, Chen, Li 2017): -1, 0 or 1 times the layer's scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hvd_gradcomp.codecs.quantized import EXCHANGES, LevelsCompressor
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.row_groups import RowGroups
from hvd_gradcomp.ops import Ops, Tensor


@dataclass(frozen=True)
class TernGradCompressor(LevelsCompressor):
    """TernGrad: unbiased codes -1, 0 or 1 times a layer's scale (Wen et al. 2017, Algorithm 1).

    Elements are clipped at `clip` times the layer's root mean square; the scale is the largest
    clipped magnitude; `sign(g) * scale` is sent with probability `|g| / scale`, else zero.

    What travels: 2 bits for each element and one float32 for each layer, by allgather; by alltoall
    and allgather (two-shot) if that moves fewer bytes. State: none.

    Default: `TernGradCompressor(clip=2.5)`, the paper's, as trained in docs/papers.md.

    Args:
        clip: in root mean squares, positive; smaller clips more. The paper uses 2.5.
        exchange: "allgather", "two_shot", or "auto": the one that moves fewer bytes; for a few
            elements that is an uncompressed allreduce.
        seed: of the private random numbers, which also depend on step, rank and bucket.

    Differs from the paper: each rank has its own scale (the paper can share the largest); the mean
    of a layer's gradient is not subtracted before clipping; codes take 2 bits, while the paper
    counts log2 3. The clipped part is dropped, as in the paper.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> TernGradCompressor()
    TernGradCompressor(clip=2.5, exchange='auto', seed=0)
    """

    clip: float = 2.5
    exchange: str = "auto"
    seed: int = 0

    bits = 2

    def __post_init__(self) -> None:
        validate.real(self, "clip", low=0)
        validate.one_of(self, "exchange", EXCHANGES)
        validate.whole(self, "seed", low=0)

    def rows(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return ((1, prod(shape)),)

    def scale(self, ops: Ops, row_groups: RowGroups, x: Tensor) -> Tensor:
        return ops.clipped_maxima(row_groups, x, self.clip)
