"""Conversion of numbers to bytes, and of codes to bits.

Codes are packed bit by bit: 32 codes of b bits are b words of 32 bits, word j holding bit j of
each. So no code of any width straddles two words.

Each format of bytes on the wire is written in several places, its twins. A change of a format has
to be made in all of them:

    bit planes      `bit_planes`, `_all_planes` and their inverses below; c/bitpack.c, c/planes.h,
                    c/elias_fano.c (of indices), c/signs.c and c/votes.c (of signs); `to_words` and
                    `from_words` of triton/common.py, and the loops over planes around them
    Elias-Fano      `encode_ascending`, `encode_words` and their inverses below; c/elias_fano.c
    levels, signs   `encode_levels`, `add_levels`, `encode_signs`, `add_signs` of quantization.py;
                    c/levels.c, c/signs.c; triton/quantizers.py
    narrow floats   `encode_floats`, `add_floats` of quantization.py; ops/torch/quantization.py (for
                    GPUs); c/floats.c
    powers of two   `encode_powers`, `add_powers` of quantization.py; c/powers.c
    bins            `encode_bins`, `decode_bins` of quantization.py; c/bins.c
    frames          header.py; c/checks.c; triton/common.py
    words, places   codecs/threshold.py; c/threshold.c; triton/threshold.py
    top-k bodies    codecs/topk.py, codecs/indices.py; c/topk.c; triton/topk.py

Groups of 32 (`GROUP`) set the sizes of payloads in codecs/elias_fano.py, quantized.py, threshold.py
and values.py, algorithms/quantized/signum.py and algorithms/lgc/vectors.py. c/powers.c and c/bins.c
use the bit planes too.
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

    # -- composite ops ---------------------------------------------------------------------

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        """Pack codes below 2**bits into words; int64 [32 m] to int64 [m * bits] below 2**32."""
        return self.reshape(self.bit_planes(self.reshape(codes, (-1, GROUP)), bits), (-1,))

    def unpack(self, words: Tensor, bits: int) -> Tensor:
        """Invert `pack`."""
        return self.reshape(self.from_bit_planes(self.reshape(words, (-1, bits))), (-1,))

    def pack_bytes(self, codes: Tensor, bits: int) -> Tensor:
        """Pack codes of any number and shape, filled up with zeros; uint8 [4 * m * bits]."""
        flat = self.reshape(codes, (-1,))
        missing = _whole(flat.shape[0]) - flat.shape[0]
        flat = self.concat((flat, self.full((missing,), 0))) if missing else flat
        return self.to_bytes(self.pack(flat, bits), "uint32")

    def unpack_bytes(self, packed: Tensor, bits: int) -> Tensor:
        """Invert `pack_bytes`; int64 [32 m]."""
        return self.unpack(self.from_bytes(packed, "uint32"), bits)

    def bit_planes(self, groups: Tensor, bits: int) -> Tensor:
        """Pack bit j of the 32 codes of a group into one word; [m, 32] to [m, bits]."""
        if self.native is not None:
            planes = self.empty((groups.shape[0], bits), "int64")
            return self.native("bit_planes", (groups,), (planes,), (bits,))
        lanes = self.words([1 << lane for lane in range(GROUP)])
        planes = []
        for place in range(bits):
            bit = self.split_bits(groups, place)[0] % 2
            planes.append(self.reshape(self.sum(bit * lanes, -1), (-1, 1)))
        return self.concat(planes)

    def from_bit_planes(self, planes: Tensor) -> Tensor:
        """Invert `bit_planes`; [m, bits] to [m, 32]."""
        if self.native is not None:
            groups = self.empty((planes.shape[0], GROUP), "int64")
            return self.native("from_bit_planes", (planes,), (groups,))
        lanes = self.arange(GROUP)
        codes = self.shift_right(planes[:, :1], lanes) % 2
        for place in range(1, planes.shape[1]):
            bit = self.shift_right(planes[:, place : place + 1], lanes) % 2
            codes = codes + bit * (1 << place)
        return codes

    def encode_ascending(
        self, numbers: Tensor, low: Any, width: Any, universe: int, apart: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Encode rows of ascending numbers by Elias-Fano; see `codecs.elias_fano`.

        Args:
            numbers: int64 [rows, count], ascending in each row, from 0 to `universe`.
            low: last bits of each number that are packed as they are; an integer or a scalar.
            width: bits for the rest of a row, more than `count - 1 + (largest >> low)`; likewise.
            universe: an integer.
            apart: make a code of its own of each row.

        Returns:
            The low bits, `low` words for 32 numbers, and the rows of `width` bits, with a bit for
            each number; int64 below 2**32, padded with zeros. If rows are apart, a row for each.
        """
        if self.native is not None:
            rows, count = map(self.extent, numbers.shape)
            codes, rows = (rows, 1) if apart else (1, rows)
            head = (codes,) if apart else ()
            words = _whole(rows * count) // GROUP * self.extent(low)
            wide = _whole(rows * self.extent(width)) // GROUP
            outputs = [self.empty((*head, size), "int64") for size in (words, wide)]
            ints = low, width, apart
            lows, highs = self.native("encode_ascending", (numbers,), outputs, ints)
            return lows, highs
        if apart:
            codes = [
                self.encode_ascending(numbers[row : row + 1], low, width, universe)
                for row in range(numbers.shape[0])
            ]
            lows, highs = (self.stack(part) for part in zip(*codes))
            return lows, highs
        rows, count = numbers.shape[0], self.length(numbers)
        fixed = isinstance(low, int)
        rest = self.split_bits(numbers, low)[0] if fixed else self.shift_right(numbers, low)
        starts = self.reshape(self.arange(rows), (-1, 1)) * width
        places = self.reshape(rest + self.arange(count) + starts, (-1,))
        bits = self.put(self.full((_whole(rows * width),), 0), places, 1)
        last = self.reshape(numbers - rest * self._power(low), (-1,))
        missing = _whole(rows * count) - rows * count
        groups = self.reshape(self.concat((last, self.full((missing,), 0))), (-1, GROUP))
        planes = self._all_planes(groups, _columns(low, universe))[:, :low]
        return self.reshape(planes, (-1,)), self.pack(bits, 1)

    def decode_ascending(
        self,
        code: tuple[Tensor, Tensor],
        shape: tuple[int, Any],
        low: Any,
        width: Any,
        universe: int,
    ) -> Tensor:
        """Invert `encode_ascending` of int64 [rows, count], the `shape`.

        Of codes that are rows of matrices the numbers follow one another. The numbers of a damaged
        row are meaningless, but from 0 to `universe`.
        """
        if self.native is not None:
            codes = self.extent(code[0].shape[0]) if len(code[0].shape) == 2 else 1
            rows, count = map(self.extent, shape)
            numbers = self.empty((codes * rows, count), "int64")
            ints = *shape, low, width, universe
            return self.native("decode_ascending", code, (numbers,), ints)
        if len(code[0].shape) == 2:
            every = [
                self.decode_ascending((code[0][i], code[1][i]), shape, low, width, universe)
                for i in range(code[0].shape[0])
            ]
            return self.reshape(self.stack(every), (len(every) * shape[0], shape[1]))
        rows, count = shape
        numbers, groups = rows * count, _whole(rows * count) // GROUP
        bits = self.unpack(code[1], 1)[: rows * width]
        rank = self.cumsum(bits) - 1
        slot = self.where((bits > 0) & (rank < numbers), rank, numbers)
        places = self.put(self.full((numbers + 1,), 0), slot, self.arange(rows * width))
        starts = self.reshape(self.arange(rows), (-1, 1)) * width
        places = self.reshape(places[:numbers], (rows, count))
        rest = self.maximum(places - starts - self.arange(count), 0)
        columns = _columns(low, universe)
        planes = (self.reshape(code[0], (groups, low)), self.full((groups, columns - low), 0))
        last = self._from_all_planes(self.reshape(self.concat(planes), (-1, 1, columns)))
        last = self.reshape(self.reshape(last, (-1,))[:numbers], (rows, count))
        return self.minimum(rest * self._power(low) + last, universe)

    def encode_pairs(
        self, codes: Tensor, index: Tensor, low: Any, width: Any, universe: int, bits: int
    ) -> Tensor:
        """Encode codes and their ascending indices, apart from each other; uint8.

        The indices' low bits and the rest, see `encode_ascending`; the codes, see `pack`.

        Args:
            codes: int64 [count] below 2**bits.
            index: int64 [count].
            low, width, universe: of `encode_ascending`.
            bits: of a code; 0 for indices alone.
        """
        words = list(self.encode_ascending(self.reshape(index, (1, -1)), low, width, universe))
        if bits:
            unused = _whole(self.length(codes)) - self.length(codes)
            words.append(self.pack(self.concat((codes, self.full((unused,), 0))), bits))
        return self.concat([self.to_bytes(part, "uint32") for part in words])

    def encode_words(
        self, body: Tensor, side: int, count: Any, low: Any, width: Any, universe: int, bits: int
    ) -> Tensor:
        """Encode words, each a code above an index, by `encode_pairs`; uint8, `side` bytes first.

        Args:
            body: uint8 [side + 4 * count].
            side: bytes before the words, which stay as they are.
            count: number of words; an integer or a scalar.
            low, width, universe, bits: of `encode_pairs`.
        """
        if self.native is not None:
            groups = _whole(self.extent(count)) // GROUP
            wide = _whole(self.extent(width)) // GROUP
            coded = self.body(self.extent(side) + 4 * (groups * (self.extent(low) + bits) + wide))
            ints = side, count, low, width, bits
            return self.native("encode_words", (self.rows(body),), (coded,), ints)
        codes, index = self.split_bits(self.from_bytes(body[side:], "uint32"), 32 - bits)
        coded = self.encode_pairs(codes, index, low, width, universe, bits)
        return self.concat((body[:side], coded))

    def decode_words(
        self, bodies: Tensor, side: int, count: Any, low: Any, width: Any, universe: int, bits: int
    ) -> tuple[Tensor, Tensor]:
        """Invert `encode_words` of each row; uint8 [world, side + 4 * count].

        And return whether indices ascend up to those that are `universe`; bool [world].
        """
        if self.native is not None:
            ranks, size = bodies.shape[0], self.extent(side) + 4 * self.extent(count)
            outputs = self.empty((ranks, size), "uint8"), self.empty((ranks,), "bool")
            ints = side, count, low, width, bits, universe
            words, sound = self.native("decode_words", (self.rows(bodies),), outputs, ints)
            return words, sound
        ends = [_whole(count) // GROUP * low, _whole(width) // GROUP, _whole(count) // GROUP * bits]
        cuts = [side]
        for words in ends:
            cuts.append(cuts[-1] + 4 * words)
        lows, highs, planes = (
            self.from_bytes(bodies[:, a:b], "uint32") for a, b in zip(cuts, cuts[1:])
        )
        rows, sound = [], []
        for rank in range(bodies.shape[0]):
            code = lows[rank], highs[rank]
            index = self.decode_ascending(code, (1, count), low, width, universe)
            index = self.reshape(index, (-1,))
            codes = self.unpack(planes[rank], bits)[:count] if bits else 0
            rows.append(self.to_bytes(index + codes * (1 << 32 - bits), "uint32"))
            rises = (index[1:] > index[:-1]) | (index[1:] == universe)
            sound.append(self.reshape(self.sum(1 - self.cast(rises, "int64")), (1,)))
        return self.concat((bodies[:, :side], self.stack(rows))), self.concat(sound) == 0

    def _all_planes(self, groups: Tensor, bits: int) -> Tensor:
        """Return `bit_planes` in as many calls for any number of bits, in more memory."""
        each = self.shift_right(self.reshape(groups, (-1, 1, GROUP)), self._column(bits)) % 2
        return self.sum(each * self.words([1 << lane for lane in range(GROUP)]), -1)

    def _from_all_planes(self, planes: Tensor) -> Tensor:
        """Invert `_all_planes`; [m, 1, bits] to [m, 32]."""
        each = self.shift_right(planes, self._column(GROUP)) % 2
        return self.sum(each * self.words([1 << bit for bit in range(planes.shape[-1])]), -1)

    def _column(self, count: int) -> Tensor:
        return self.reshape(self.arange(count), (-1, 1))

    def _power(self, exponent: Any) -> Any:
        """Return two to the power of an integer or a scalar below 33."""
        if isinstance(exponent, int):
            return 1 << exponent
        return self.gather(self.words([1 << bit for bit in range(33)]), self.words((exponent,)))

    def weighted_sum(self, data: Tensor) -> Tensor:
        """Sum 32-bit words, each times 2 * index + 17, modulo 2**32; uint8 [..., n] to [...]."""
        words = self.from_bytes(data, "uint32")
        places = self.arange(self.length(words)) * 2 + 17
        return self.sum(words * places, -1) % (1 << 32)


def _whole(count: Any) -> Any:
    """Return the count of whole groups."""
    return (count + GROUP - 1) // GROUP * GROUP


def _columns(low: Any, universe: int) -> int:
    """Return the columns for planes of the low bits, at least one."""
    return max(low if isinstance(low, int) else universe.bit_length(), 1)
