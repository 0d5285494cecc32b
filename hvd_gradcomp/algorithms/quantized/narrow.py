"""Narrow numbers on the wire, sums in float32: bfloat16, 8-bit floats, 8-bit integers.

A ring allreduce in half precision rounds each partial sum, so its error grows with the number of
ranks. Here the ranks exchange narrow numbers and add them up in float32, in the order of ranks; in
the two-shot exchange the sum is rounded once more. With any number of ranks the error of the mean
is that of one rounding before the sum and at most one behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from hvd_gradcomp.codecs.quantized import (
    EXCHANGES,
    Accumulator,
    FeedbackCompressor,
    LevelsCompressor,
    Payload,
    rows_of_length,
)
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.row_groups import RowGroups
from hvd_gradcomp.ops import Ops, Tensor

ROUNDINGS = ("nearest", "stochastic")


class _NarrowCompressor(FeedbackCompressor):
    """Base of the three: error feedback, clipping, and the fields that they share."""

    feedback: bool = False
    rounding: str = "nearest"

    @property
    def error_feedback(self) -> bool:  # type: ignore[override]
        return self.feedback

    def validate_common(self) -> None:
        """Raise a ValueError if a field that all three have is out of range."""
        validate.one_of(self, "rounding", ROUNDINGS)
        validate.one_of(self, "exchange", EXCHANGES)
        validate.boolean(self, "feedback")
        validate.whole(self, "seed", low=0)
        self.validate_max_norm()

    def chance(self, key: Tensor) -> Tensor | None:
        """Return the key of the random numbers; None to round to the nearest."""
        return key if self.rounding == "stochastic" else None


@dataclass(frozen=True)
class BF16Compressor(_NarrowCompressor):
    """bfloat16 on the wire, sums in float32.

    What travels: 2 bytes for each element, by allgather; by alltoall and allgather (two-shot) if
    that moves fewer bytes. State: none; with feedback 4 bytes for each element.

    Default: `BF16Compressor()`, to the nearest and without feedback, as trained in docs/papers.md,
    where it lost nothing.

    Args:
        rounding: "nearest", ties to even; or "stochastic", which is unbiased.
        exchange: "allgather", "two_shot", or "auto": the one that moves fewer bytes; for a few
            elements that is an uncompressed allreduce.
        feedback: whether the rounding error is added to the next gradient.
        seed: of the private random numbers, which also depend on step, rank and bucket.
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` first; positive; smaller clips more. None clips nothing.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> BF16Compressor()
    BF16Compressor(rounding='nearest', exchange='auto', feedback=False, seed=0, max_norm=None)
    """

    rounding: str = "nearest"
    exchange: str = "auto"
    feedback: bool = False
    seed: int = 0
    max_norm: float | None = None

    bits = 16
    side = ()
    finite_by = ("largest",)

    def __post_init__(self) -> None:
        self.validate_common()

    def rows(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return rows_of_length(prod(shape), max(prod(shape), 1))

    def encode(self, ops: Ops, row_groups: RowGroups, x: Tensor, key: Tensor) -> Payload:
        if not ops.dynamic_shapes:  # the elements were checked already
            return {"codes": ops.encode_floats(row_groups, x, None, 16, self.chance(key))}
        codes, largest = ops.encode_bfloat16(x, self.chance(key))
        return {"codes": codes, "largest": largest}

    def add_decoded(
        self, ops: Ops, row_groups: RowGroups, payload: Payload, accumulator: Accumulator
    ) -> Tensor:
        base, scratch, weights = accumulator
        return ops.add_floats(row_groups, base, scratch, payload["codes"], None, 16, weights)

    def add_checked(
        self, ops: Ops, row_groups: RowGroups, payload: Payload, accumulator: Accumulator
    ) -> tuple[Tensor, Any]:
        if not ops.dynamic_shapes:  # there one check of the whole is fewer calls
            return super().add_checked(ops, row_groups, payload, accumulator)
        base, scratch, weights = accumulator
        return ops.add_bfloat16(base, scratch, payload["codes"], weights)


@dataclass(frozen=True)
class FP8Compressor(_NarrowCompressor):
    """8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa) on the wire, sums in float32.

    Each block of `block_size` neighbours of a layer is divided by its largest magnitude over 448,
    the largest e4m3 number, and rounded to the nearest, ties to even.

    What travels: 1 byte for each element and one float32 for each block, by allgather; by alltoall
    and allgather (two-shot) if that moves fewer bytes. State: none; with feedback 4 bytes for each
    element.

    Default: `FP8Compressor()`, blocks of 256 without feedback, as trained in docs/papers.md, where
    it lost nothing.

    Args:
        block_size: elements that share a scale, at least 32; larger sends less and rounds small
            elements more coarsely.
        power_of_two: whether scales are rounded up to powers of two, so that scaling is exact.
        exchange, feedback, max_norm: as for `BF16Compressor`.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> print(FP8Compressor(power_of_two=True))
    FP8Compressor(power_of_two=True)
    """

    block_size: int = 256
    power_of_two: bool = False
    exchange: str = "auto"
    feedback: bool = False
    max_norm: float | None = None

    bits = 8
    side = ("unit",)

    @property
    def finite_by(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.power_of_two else self.side  # a NaN is rounded up to zero

    def __post_init__(self) -> None:
        validate.whole(self, "block_size", low=32)
        validate.boolean(self, "power_of_two")
        self.validate_common()

    def rows(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return rows_of_length(prod(shape), self.block_size)

    def encode(self, ops: Ops, row_groups: RowGroups, x: Tensor, key: Tensor) -> Payload:
        del key
        unit, codes = ops.encode_e4m3(row_groups, x, self.power_of_two)
        return {"unit": unit, "codes": codes}

    def add_decoded(
        self, ops: Ops, row_groups: RowGroups, payload: Payload, accumulator: Accumulator
    ) -> Tensor:
        base, scratch, weights = accumulator
        codes, unit = payload["codes"], payload["unit"]
        return ops.add_floats(row_groups, base, scratch, codes, unit, 8, weights)


@dataclass(frozen=True)
class Int8Compressor(_NarrowCompressor, LevelsCompressor):
    """8-bit integers on the wire, sums in float32.

    Each block of `block_size` neighbours of a layer is divided by its largest magnitude over 127,
    and rounded. `QSGDCompressor(bits=8)` does the same with unbiased rounding by default.

    What travels: 1 byte for each element and one float32 for each block, by allgather; by alltoall
    and allgather (two-shot) if that moves fewer bytes. State: none; with feedback 4 bytes for each
    element.

    Default: `Int8Compressor()`, blocks of 256 to the nearest, without feedback, as trained in
    docs/papers.md, where it lost nothing, and with local steps in docs/worth.md.

    Args:
        block_size: elements that share a scale, at least 32; larger sends less and rounds more
            coarsely.
        rounding: "nearest", ties away from zero; or "stochastic", which is unbiased.
        exchange, feedback, seed, max_norm: as for `BF16Compressor`.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> print(Int8Compressor(feedback=True))
    Int8Compressor(feedback=True)
    """

    block_size: int = 256
    rounding: str = "nearest"
    exchange: str = "auto"
    feedback: bool = False
    seed: int = 0
    max_norm: float | None = None

    bits = 8
    finite_by = ("scale",)

    def __post_init__(self) -> None:
        validate.whole(self, "block_size", low=32)
        self.validate_common()

    def rows(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return rows_of_length(prod(shape), self.block_size)

    def scale(self, ops: Ops, row_groups: RowGroups, x: Tensor) -> Tensor:
        return ops.group_maxima(row_groups, x)

    def encode(self, ops: Ops, row_groups: RowGroups, x: Tensor, key: Tensor) -> Payload:
        scale, codes = ops.encode_peaks(row_groups, x, 8, self.chance(key))
        return {"scale": scale, "codes": codes}
