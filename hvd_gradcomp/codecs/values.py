"""Codes of the values that a sparse method sends: float32, or few bits with side values.

Values are coded in groups of neighbours, a group being a run of the payload. Rounding errors are
not lost: whoever keeps a residual subtracts what was decoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from hvd_gradcomp.core.row_groups import RowGroups
from hvd_gradcomp.core.wire import Part
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP
from hvd_gradcomp.ops.interface.quantization import TINY

_NO_BANDS = RowGroups(())
MOST_IN_GROUP = 4096  # values that share side values, where there are more


class ValueCoding(ABC):
    """Code of a fixed number of float32 values, which are all finite."""

    @abstractmethod
    def parts(self, count: int, most: int | None = None) -> dict[str, Part]:
        """Return the payload parts for `count` values.

        With `most`, which is at least `count`: the beginnings of the parts for `most` values that
        hold the first `count`. The groups are those of `most`, so a code of static size serves
        payloads of several sizes.
        """

    @abstractmethod
    def encode(self, ops: Ops, values: Tensor, real: Tensor | None = None) -> dict[str, Tensor]:
        """Encode float32 [count].

        `real`: int64 [count], 0 at values that nobody reads, which must be 0; None if there are
        none. They do not count in the side values.
        """

    @abstractmethod
    def decode(self, ops: Ops, payload: Mapping[str, Tensor], count: int) -> Tensor:
        """Decode one rank's parts; float32 [count]."""


class Float(ValueCoding):
    """Floats of 32 bits, or the 16 of bfloat16.

    Args:
        bits: 32 or 16.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def parts(self, count: int, most: int | None = None) -> dict[str, Part]:
        del most
        if self.bits == 32:
            return {"values": Part("float32", count)}
        return {"values": Part("bytes", 2 * _padded(count, 2))}

    def encode(self, ops: Ops, values: Tensor, real: Tensor | None = None) -> dict[str, Tensor]:
        del real
        if self.bits == 32:
            return {"values": values}
        values = _padded_to(ops, values, 2)
        return {"values": ops.encode_floats(_NO_BANDS, values, None, 16, None)}

    def decode(self, ops: Ops, payload: Mapping[str, Tensor], count: int) -> Tensor:
        if self.bits == 32:
            return payload["values"]
        room, weight = ops.zeros((_padded(count, 2),)), ops.reals((1.0,))
        codes = ops.reshape(payload["values"], (1, -1))
        return ops.add_floats(_NO_BANDS, None, room, codes, None, 16, weight)[:count]


class _Grouped(ValueCoding):
    """Base of codes of `bits` bits with `sides` float32 values for each group.

    Attributes:
        bits: of a code.
        sides: number of side values of a group.
    """

    bits: int
    sides: int

    def shape(self, count: int) -> tuple[int, int]:
        """Return (groups, values in each); the last group may have fewer."""
        groups = max(-(-count // MOST_IN_GROUP), 1)
        return groups, max(-(-count // groups), 1)

    def parts(self, count: int, most: int | None = None) -> dict[str, Part]:
        groups, length = self.shape(count if most is None else most)
        coded = groups * length
        if most is not None and count < most:
            groups, coded = -(-count // length), count
        return {
            "sides": Part("float32", groups * self.sides),
            "codes": Part("bytes", _padded(coded, GROUP) // 8 * self.bits),
        }

    def encode(self, ops: Ops, values: Tensor, real: Tensor | None = None) -> dict[str, Tensor]:
        groups, length = self.shape(values.shape[0])
        rows = ops.reshape(_padded_to(ops, values, groups * length), (groups, length))
        if real is None:
            last = values.shape[0] - (groups - 1) * length
            counts = ops.reals([float(length)] * (groups - 1) + [float(last)])
        else:
            real = _padded_to(ops, real, groups * length, "int64")
            real = ops.reshape(real, (groups, length))
            counts = ops.cast(ops.maximum(ops.sum(real, -1), 1), "float32")
        codes, sides = self.encode_groups(ops, rows, real, ops.reshape(counts, (-1, 1)))
        return {"sides": ops.reshape(sides, (-1,)), "codes": codes}

    def decode(self, ops: Ops, payload: Mapping[str, Tensor], count: int) -> Tensor:
        groups, length = self.shape(count)
        sides = ops.reshape(payload["sides"], (groups, self.sides))
        values = self.decode_groups(ops, payload["codes"], sides, length)
        return ops.reshape(values, (-1,))[:count]

    @abstractmethod
    def encode_groups(
        self, ops: Ops, rows: Tensor, real: Tensor | None, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return packed codes, uint8, and side values, float32 [groups, sides].

        Args:
            ops: the tensor operations.
            rows: float32 [groups, length], zero where there is no value.
            real: int64 [groups, length], 0 where there is none; None: they come first.
            counts: float32 [groups, 1], the number of values, at least 1.
        """

    @abstractmethod
    def decode_groups(self, ops: Ops, codes: Tensor, sides: Tensor, length: int) -> Tensor:
        """Return the values; float32 [groups, length]."""

    def unpacked(self, ops: Ops, codes: Tensor, sides: Tensor, length: int) -> Tensor:
        """Return the codes of the groups; int64 [groups, length]."""
        groups = sides.shape[0]
        codes = ops.unpack_bytes(codes, self.bits)[: groups * length]
        return ops.reshape(codes, (groups, length))


class Codebook(_Grouped):
    """Bins of equal width, each decoded as the mean of its values.

    As SparseLoCo quantizes (Sarfi et al. 2025); see `Ops.encode_bins`.

    Args:
        bits: of a code.
    """

    def __init__(self, bits: int) -> None:
        self.bits, self.sides = bits, 1 << bits

    def encode_groups(
        self, ops: Ops, rows: Tensor, real: Tensor | None, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        return ops.encode_bins(rows, real, counts, self.bits)

    def decode_groups(self, ops: Ops, codes: Tensor, sides: Tensor, length: int) -> Tensor:
        return ops.decode_bins(codes, sides, length, self.bits)


class Levels(_Grouped):
    """Levels of equal distance up to the group's largest magnitude, rounded to the nearest.

    Args:
        bits: of a code; there are `2**(bits-1) - 1` levels and a sign.
    """

    sides = 1

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def encode_groups(
        self, ops: Ops, rows: Tensor, real: Tensor | None, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        del real, counts
        levels = (1 << self.bits - 1) - 1
        scale = ops.reshape(ops.peaks(rows), (-1, 1))
        used = scale >= TINY
        inverse = ops.where(used, 1.0 / ops.where(used, scale, 1.0), 0.0) * float(levels)
        level = ops.cast(ops.minimum(ops.abs(rows) * inverse + 0.5, float(levels)), "int64")
        unit = ops.where(used, scale * (1.0 / levels), 0.0)
        code = ops.where(rows < 0, levels - level, levels + level)
        return ops.pack_bytes(code, self.bits), unit

    def decode_groups(self, ops: Ops, codes: Tensor, sides: Tensor, length: int) -> Tensor:
        levels = (1 << self.bits - 1) - 1
        level = self.unpacked(ops, codes, sides, length) - levels
        return ops.cast(level, "float32") * sides


class Signs(_Grouped):
    """One bit: plus or minus the mean magnitude of the group."""

    bits = sides = 1

    def encode_groups(
        self, ops: Ops, rows: Tensor, real: Tensor | None, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        del real
        codes = ops.pack_bytes(ops.cast(rows < 0, "int64"), self.bits)
        return codes, _sums(ops, ops.abs(rows)) / counts

    def decode_groups(self, ops: Ops, codes: Tensor, sides: Tensor, length: int) -> Tensor:
        sign = 1 - 2 * self.unpacked(ops, codes, sides, length)
        return ops.cast(sign, "float32") * sides


def _sums(ops: Ops, rows: Tensor) -> Tensor:
    return ops.reshape(ops.sum_of_rows(rows), (-1, 1))


def _padded(count: Any, unit: int) -> Any:
    return (count + unit - 1) // unit * unit


def _padded_to(ops: Ops, x: Tensor, unit: int, dtype: str = "float32") -> Tensor:
    """Append zeros up to a multiple of `unit`."""
    count = ops.length(x)
    missing = _padded(count, unit) - count
    if isinstance(missing, int) and missing == 0:
        return x
    return ops.concat((x, ops.zeros((missing,), dtype)))


# By the name that compressors take as `values=`.
VALUES: dict[str, ValueCoding] = {
    "float32": Float(32),
    "bfloat16": Float(16),
    "int8": Levels(8),
    "int4": Codebook(4),
    "int2": Codebook(2),
    "sign": Signs(),
}
