"""Conversion of numbers to bytes, and of codes to bits.

Codes are packed bit by bit: 32 codes of b bits are b words of 32 bits, word j holding bit j of
each. So no code of any width straddles two words.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from hvd_gradcomp.ops.interface.reduction import Reduction
from hvd_gradcomp.ops.tensors import Tensor

GROUP = 32  # codes that are packed together


class BitPacking(Reduction):
    """Ops that convert numbers to bytes, and codes to bits."""

    @abstractmethod
    def to_bytes(self, x: Tensor, dtype: str) -> Tensor:
        """Convert [..., n] to [..., n * itemsize] uint8, little-endian. "uint32" takes int64."""

    @abstractmethod
    def from_bytes(self, x: Tensor, dtype: str) -> Tensor:
        """Invert `to_bytes`; "uint32", "int8" and "uint8" come back as int64."""

    @abstractmethod
    def length(self, x: Tensor) -> Any:
        """Return the last axis: an int, or an int64 scalar if it is known only at run time."""

    # -- composite ops ---------------------------------------------------------------------

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        """Pack codes below 2**bits into words; int64 [32 m] to int64 [m * bits] below 2**32."""
        return self.reshape(self.bit_planes(self.reshape(codes, (-1, GROUP)), bits), (-1,))

    def unpack(self, words: Tensor, bits: int) -> Tensor:
        """Invert `pack`."""
        return self.reshape(self.from_bit_planes(self.reshape(words, (-1, bits))), (-1,))

    def bit_planes(self, groups: Tensor, bits: int) -> Tensor:
        """Pack bit j of the 32 codes of a group into one word; [m, 32] to [m, bits]."""
        lanes = self.words([1 << lane for lane in range(GROUP)])
        planes = []
        for place in range(bits):
            bit = self.split_bits(groups, place)[0] % 2
            planes.append(self.reshape(self.sum(bit * lanes, -1), (-1, 1)))
        return self.concat(planes)

    def from_bit_planes(self, planes: Tensor) -> Tensor:
        """Invert `bit_planes`; [m, bits] to [m, 32]."""
        lanes = self.arange(GROUP)
        codes = self.shift_right(planes[:, :1], lanes) % 2
        for place in range(1, planes.shape[1]):
            bit = self.shift_right(planes[:, place : place + 1], lanes) % 2
            codes = codes + bit * (1 << place)
        return codes

    def weighted_sum(self, data: Tensor) -> Tensor:
        """Sum 32-bit words, each times 2 * index + 17, modulo 2**32; uint8 [..., n] to [...]."""
        words = self.from_bytes(data, "uint32")
        places = self.arange(self.length(words)) * 2 + 17
        return self.sum(words * places, -1) % (1 << 32)
