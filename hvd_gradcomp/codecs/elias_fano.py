"""Elias-Fano code of a fixed size, for rows of ascending numbers (Elias 1974, Fano 1971).

Of each of k numbers below n the `low = floor(log2(n / k))` last bits are sent as they are. The
rest, `n >> low` at most, goes into a row of `k + (n >> low)` bits: number i with rest h sets bit
`h + i`.
Some 2 bits a number more than `log2(n / k)`; the bound is 1.44.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvd_gradcomp.core.wire import Part
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP


@dataclass(frozen=True)
class EliasFano:
    """Code of `rows` rows of `count` ascending numbers below `universe`; the last may repeat it."""

    rows: int
    count: int
    universe: int

    @property
    def low(self) -> int:
        """Return the number of bits that are sent as they are."""
        return max((self.universe // max(self.count, 1)).bit_length() - 1, 0)

    @property
    def width(self) -> int:
        """Return the bits of a row that tell the rest of its numbers."""
        return self.count + (self.universe >> self.low)

    def parts(self) -> dict[str, Part]:
        """Return the payload parts."""
        numbers, bits = self.rows * self.count, self.rows * self.width
        return {
            "low": Part("uint32", -(-numbers // GROUP) * self.low),
            "high": Part("uint32", -(-bits // GROUP)),
        }

    def encode(self, ops: Ops, numbers: Tensor) -> dict[str, Tensor]:
        """Encode int64 [rows, count], ascending within each row."""
        rest, low = ops.split_bits(numbers, self.low)
        rows = ops.reshape(ops.arange(self.rows), (-1, 1)) * self.width
        places = ops.reshape(rest + ops.arange(self.count) + rows, (-1,))
        bits = ops.put(ops.full((_padded(self.rows * self.width),), 0), places, 1)
        low = ops.reshape(low, (-1,))
        missing = _padded(self.rows * self.count) - self.rows * self.count
        if missing:
            low = ops.concat((low, ops.full((missing,), 0)))
        packed = ops.pack(low, self.low) if self.low else ops.full((0,), 0)
        return {"low": packed, "high": ops.pack(bits, 1)}

    def decode(self, ops: Ops, payload: Mapping[str, Tensor]) -> Tensor:
        """Decode one rank's parts to int64 [rows, count], each at most `universe`.

        Of a damaged row the numbers are meaningless, but in that range.
        """
        numbers = self.rows * self.count
        bits = ops.unpack(payload["high"], 1)[: self.rows * self.width]
        rank = ops.cumsum(bits) - 1
        slot = ops.where((bits > 0) & (rank < numbers), rank, numbers)
        places = ops.put(ops.full((numbers + 1,), 0), slot, ops.arange(self.rows * self.width))
        rows = ops.reshape(ops.arange(self.rows), (-1, 1)) * self.width
        places = ops.reshape(places[:numbers], (self.rows, self.count))
        rest = ops.maximum(places - rows - ops.arange(self.count), 0)
        if not self.low:
            return ops.minimum(rest, self.universe)
        low = ops.unpack(payload["low"], self.low)[:numbers]
        found = rest * (1 << self.low) + ops.reshape(low, (self.rows, self.count))
        return ops.minimum(found, self.universe)


def _padded(count: int) -> int:
    return -(-count // GROUP) * GROUP
