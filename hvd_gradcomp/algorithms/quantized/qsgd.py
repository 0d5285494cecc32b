"""QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic 2017): unbiased random rounding to few levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hvd_gradcomp.codecs.quantized import EXCHANGES, LevelsCompressor, Payload, rows_of_length
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.row_groups import RowGroups
from hvd_gradcomp.ops import Ops, Tensor


@dataclass(frozen=True)
class QSGDCompressor(LevelsCompressor):
    """QSGD: rounds elements at random to levels of a bucket's norm (Alistarh et al. 2017, 3.1).

    A bucket is `bucket_size` neighbours of a layer. There are `s = 2**(bits-1) - 1` levels:
    `|g| / norm * s` is rounded up or down at random, unbiased.

    What travels: `bits` for each element and one float32 for each bucket, by allgather; by alltoall
    and allgather (two-shot) if that moves fewer bytes. State: none.

    Default: `QSGDCompressor(bits=4)`, in buckets of 512 with the largest magnitude as norm, as
    trained in docs/papers.md and docs/worth.md. Other `bits` were not trained.

    Args:
        bits: of a code, including its sign: 2, 3, 4 or 8; fewer send less. 4 means seven levels
            and a sign.
        bucket_size: elements that share a norm, at least 32; larger sends less and is noisier.
            Tsuzuku et al. 2018 use 128 and 512.
        norm: "l2", as in the paper's definition (section 3.1), or "max", the largest magnitude, as
            in the paper's experiments.
        exchange: "allgather", "two_shot", or "auto": the one that moves fewer bytes; for a few
            elements that is an uncompressed allreduce.
        seed: of the private random numbers, which also depend on step, rank and bucket.

    Differs from the paper: codes have a fixed width, while the paper uses Elias coding. Tsuzuku
    et al. 2018 count `bits` without the sign (Table 1), here the sign is included; they do not
    say which norm they used. A bucket whose norm is below 2**-100 counts as zero.

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

    @property
    def finite_by(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.side if self.norm == "max" else ()

    def rows(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return rows_of_length(prod(shape), self.bucket_size)

    def scale(self, ops: Ops, row_groups: RowGroups, x: Tensor) -> Tensor:
        if self.norm == "max":
            return ops.group_maxima(row_groups, x)
        return ops.group_norms(row_groups, x)

    def encode(self, ops: Ops, row_groups: RowGroups, x: Tensor, key: Tensor) -> Payload:
        if self.norm != "max":
            return super().encode(ops, row_groups, x, key)
        scale, codes = ops.encode_peaks(row_groups, x, self.bits, key)
        return {"scale": scale, "codes": codes}
