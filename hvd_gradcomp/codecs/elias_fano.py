"""Elias-Fano code of a fixed size, for rows of ascending numbers (Elias 1974, Fano 1971).

Of each of k numbers below n the `low = floor(log2(n / k))` last bits are sent as they are. The
rest, `n >> low` at most, goes into a row of `k + (n >> low)` bits: number i with rest h sets bit
`h + i`.
Some 2 bits a number more than `log2(n / k)`; the bound is 1.44.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_gradcomp.method.wire import Part
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP


def low_bits(count: int, universe: int) -> int:
    """Return how many bits of each of `count` numbers are sent as they are.

    >>> low_bits(1, 1000), low_bits(10, 1000), low_bits(1000, 1000)
    (9, 6, 0)
    """
    return max((universe // max(count, 1)).bit_length() - 1, 0)


@dataclass(frozen=True)
class EliasFano:
    """Code of `rows` rows of `count` ascending numbers below `universe`; the last may repeat it.

    In a graph, `count` and `low` may be scalar tensors.
    """

    rows: int
    count: Any
    universe: int
    low: Any

    @classmethod
    def of(cls, rows: int, count: int, universe: int) -> EliasFano:
        """Return the shortest code."""
        return cls(rows, count, universe, low_bits(count, universe))

    @property
    def width(self) -> Any:
        """Return the bits of a row that tell the rest of its numbers."""
        return self.count + self.universe // 2**self.low

    def parts(self) -> dict[str, Part]:
        """Return the payload parts."""
        numbers, bits = self.rows * self.count, self.rows * self.width
        return {
            "low": Part("uint32", (numbers + GROUP - 1) // GROUP * self.low),
            "high": Part("uint32", (bits + GROUP - 1) // GROUP),
        }

    def encode(self, ops: Ops, numbers: Tensor) -> dict[str, Tensor]:
        """Encode int64 [rows, count], ascending within each row."""
        low, high = ops.encode_ascending(numbers, self.low, self.width, self.universe)
        return {"low": low, "high": high}

    def encode_apart(self, ops: Ops, numbers: Tensor) -> dict[str, Tensor]:
        """Encode rows of int64 [messages, count], each by itself, with a code of one row.

        A row of the parts is a message.
        """
        low, high = ops.encode_ascending(numbers, self.low, self.width, self.universe, apart=True)
        return {"low": low, "high": high}

    def decode(self, ops: Ops, payload: Mapping[str, Tensor]) -> Tensor:
        """Decode one rank's parts to int64 [rows, count], each at most `universe`.

        Parts that have a row for each rank give the rows of all, one rank after another. Of a
        damaged row the numbers are meaningless, but in that range.
        """
        code = payload["low"], payload["high"]
        shape = self.rows, self.count
        return ops.decode_ascending(code, shape, self.low, self.width, self.universe)
