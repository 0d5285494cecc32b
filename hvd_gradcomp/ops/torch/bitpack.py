"""Conversion of numbers to bytes, and of codes to bits."""

from __future__ import annotations

import torch

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP
from hvd_gradcomp.ops.torch.base import DTYPES, WORD, Base, low_word
from hvd_gradcomp.ops.torch.kernels import walkable


class BitPacking(Base):
    """Ops that convert numbers to bytes, and codes to bits."""

    def to_bytes(self, x: Tensor, dtype: str) -> Tensor:
        narrow = low_word(x) if dtype == "uint32" else x.to(DTYPES[dtype])
        return narrow.contiguous().view(torch.uint8)

    def from_bytes(self, x: Tensor, dtype: str) -> Tensor:
        if dtype in ("int8", "uint8"):
            return x.view(DTYPES[dtype]).to(torch.int64)
        words = dtype in ("uint32", "float32") and _whole_words(x)
        x = x if words else x.contiguous()
        if dtype == "uint32":
            return x.view(torch.int32).to(torch.int64) & WORD
        return x.view(DTYPES[dtype])

    def length(self, x: Tensor) -> int:
        return x.shape[-1]

    def bit_planes(self, groups: Tensor, bits: int) -> Tensor:
        if self.native is None:
            return super().bit_planes(groups, bits)
        groups = groups.contiguous()
        planes = self._empty(groups.shape[0], bits, dtype=torch.int64)
        self.native("bit_planes", (groups,), (planes,), (bits,))
        return planes

    def from_bit_planes(self, planes: Tensor) -> Tensor:
        if self.native is None:
            return super().from_bit_planes(planes)
        planes = planes.contiguous()
        groups = self._empty(planes.shape[0], GROUP, dtype=torch.int64)
        self.native("from_bit_planes", (planes,), (groups,))
        return groups

    def encode_ascending(
        self, numbers: Tensor, low: int, width: int, universe: int, apart: bool = False
    ) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().encode_ascending(numbers, low, width, universe, apart)
        codes, count = numbers.shape
        rows, head = (1, (codes,)) if apart else (codes, ())
        words = -(-rows * count // GROUP) * low, -(-rows * width // GROUP)
        lows, highs = (self._empty(*head, size, dtype=torch.int64) for size in words)
        ints = low, width, apart
        self.native("encode_ascending", (numbers.contiguous(),), (lows, highs), ints)
        return lows, highs

    def decode_ascending(
        self,
        code: tuple[Tensor, Tensor],
        shape: tuple[int, int],
        low: int,
        width: int,
        universe: int,
    ) -> Tensor:
        if self.native is None:
            return super().decode_ascending(code, shape, low, width, universe)
        codes = code[0].shape[0] if code[0].dim() == 2 else 1
        numbers = self._empty(codes * shape[0], shape[1], dtype=torch.int64)
        words = [words.contiguous() for words in code]
        ints = *shape, low, width, universe
        self.native("decode_ascending", words, (numbers,), ints)
        return numbers

    def encode_words(
        self, body: Tensor, side: int, count: int, low: int, width: int, universe: int, bits: int
    ) -> Tensor:
        if self.word_kernels is not None:
            return self.word_kernels.encode_words(body, side, count, low, width, bits)
        if self.native is None:
            return super().encode_words(body, side, count, low, width, universe, bits)
        groups = -(-count // GROUP)
        coded = self.body(side + 4 * (groups * (low + bits) + -(-width // GROUP)))
        body = body if body.storage_offset() % 4 == 0 else body.clone()
        given = (body.contiguous(),)
        self.native("encode_words", given, (coded,), (side, count, low, width, bits))
        return coded

    def decode_words(
        self, bodies: Tensor, side: int, count: int, low: int, width: int, universe: int, bits: int
    ) -> tuple[Tensor, Tensor]:
        if self.word_kernels is not None:
            form = side, count, low, width, universe, bits
            return self.word_kernels.decode_words(bodies, *form)
        if self.native is None:
            return super().decode_words(bodies, side, count, low, width, universe, bits)
        words = self._empty(bodies.shape[0], side + 4 * count, dtype=torch.uint8)
        sound = self._empty(bodies.shape[0], dtype=torch.bool)
        ints = side, count, low, width, bits, universe
        self.native("decode_words", (walkable(bodies),), (words, sound), ints)
        return words, sound


def _whole_words(x: Tensor) -> bool:
    """Return True if the bytes can be viewed as 32-bit words in place."""
    return x.stride(-1) == 1 and not any(n % 4 for n in (*x.stride()[:-1], x.storage_offset()))
