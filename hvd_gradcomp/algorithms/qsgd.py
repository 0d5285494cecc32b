"""QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic 2017): unbiased random rounding to few levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hvd_gradcomp.codecs.quantized import EXCHANGES, LevelsCompressor, rows_of_length
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.row_groups import Bands
from hvd_gradcomp.ops import Ops, Tensor


@dataclass(frozen=True)
class QSGDCompressor(LevelsCompressor):
    """Rounds each element at random to a level of its bucket's norm (Alistarh et al. 2017, 3.1).

    A bucket is `bucket_size` neighbours of a layer. There are `s = 2**(bits-1) - 1` levels:
    `|g| / norm * s` is rounded up or down at random so that it is right on average.

    What travels: `bits` an element and one float32 a bucket, by allgather; by alltoall and
    allgather (two-shot) where that moves fewer bytes. State: none.

    Args:
        bits: of a code, its sign included: 2, 3, 4 or 8; fewer send less. 4 is seven levels and a
            sign.
        bucket_size: elements that share a norm, at least 32; larger sends less and is noisier.
            Tsuzuku et al. 2018 use 128 and 512.
        norm: "l2", as the paper's rule has it (section 3.1), or "max", the largest magnitude, as
            the paper's experiments have it.
        exchange: "allgather", "two_shot", or "auto": what moves fewer bytes, which for a few
            elements are those of the elements themselves, by allreduce.
        seed: of the private random numbers, which also depend on step, rank and bucket.

    Differs from the paper: codes have a fixed width, where the paper codes levels by Elias. Tsuzuku
    et al. 2018 count `bits` without the sign (Table 1), here they are what is sent; they do not say
    which norm they took. A bucket whose norm is below 2**-100 counts as zero.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> QSGDCompressor()
    QSGDCompressor(bits=4, bucket_size=512, norm='max', exchange='auto', seed=0)
    """

    bits: int = 4
    bucket_size: int = 512
    norm: str = "max"
    exchange: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        validate.one_of(self, "bits", (2, 3, 4, 8))
        validate.whole(self, "bucket_size", low=32)
        validate.one_of(self, "norm", ("max", "l2"))
        validate.one_of(self, "exchange", EXCHANGES)
        validate.whole(self, "seed", low=0)

    def rows(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return rows_of_length(prod(shape), self.bucket_size)

    def scale(self, ops: Ops, bands: Bands, x: Tensor) -> Tensor:
        if self.norm == "max":
            return ops.group_maxima(bands, x)
        return ops.group_norms(bands, x)
