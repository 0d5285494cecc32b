"""Quantization of every element, and the random numbers for rounding.

Number i of a key is a hash of i and the key; there is no state besides the step, and the user's
random generators are not touched. The hash is two rounds of a 32-bit finalizer (xor-shift,
multiply), one for each half of the key, in arithmetic that stays below 2**63.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_gradcomp.core.row_groups import Band, Bands
from hvd_gradcomp.ops.interface.bitpack import BitPacking
from hvd_gradcomp.ops.tensors import Tensor

TINY = 2.0**-100  # a group with a smaller scale counts as zero: its inverse would overflow
FACTOR = 0x45D9F3B


class Quantization(BitPacking):
    """Ops that quantize every element, and the random numbers for rounding."""

    def key(self, step: Any, salt: int) -> Tensor:
        """Return a step's key; int64 [2] below 2**32. `salt` separates ranks, buckets and uses."""
        first = self.mix(self.xor(self.mix(self.words((step % (1 << 32),))), salt))
        return self.concat((first, self.mix(self.xor(first, 0x9E3779B9))))

    def uniform(self, key: Tensor, count: Any) -> Tensor:
        """Return a key's numbers 0 to count - 1: multiples of 2**-24 in [0, 1); float32 [count]."""
        hashed = self.mix((self.arange(count) + key[:1]) % (1 << 32))
        hashed = self.mix(self.xor(hashed, key[1:]))
        return self.cast(self.split_bits(hashed, 8)[0], "float32") * 2.0**-24

    def mix(self, x: Tensor) -> Tensor:
        """Hash x in [0, 2**32) by a bijection that looks random."""
        for _ in range(2):
            x = self.xor(x, self.split_bits(x, 16)[0]) * FACTOR % (1 << 32)
        return self.xor(x, self.split_bits(x, 16)[0])

    def group_maxima(self, bands: Bands, x: Tensor) -> Tensor:
        """Return the largest |x| of each group; float32 [groups]."""
        return self._joined([self.max(self.abs(rows), -1) for rows in self._rows(bands, x)])

    def group_squares(self, bands: Bands, x: Tensor) -> Tensor:
        """Return the sum of squares of each group; float32 [groups]."""
        return self._joined([self.sum_of_rows(self.square(rows)) for rows in self._rows(bands, x)])

    def group_norms(self, bands: Bands, x: Tensor) -> Tensor:
        """Return the root of the sum of squares of each group; float32 [groups]."""
        squares = self.cast(self.group_squares(bands, x), "float64")
        return self.cast(self.sqrt(squares), "float32")

    def clipped_maxima(self, bands: Bands, x: Tensor, clip: float) -> Tensor:
        """Return each group's largest |x|, at most `clip` root mean squares; float32 [groups]."""
        squares = self.cast(self.group_squares(bands, x), "float64")
        sigma = self.sqrt(squares / self.cast(self.words(bands.lengths), "float64"))
        bound = self.cast(sigma * clip, "float32")
        return self.minimum(self.group_maxima(bands, x), bound)

    def encode_levels(
        self, bands: Bands, x: Tensor, scale: Tensor, bits: int, key: Tensor
    ) -> Tensor:
        """Round `|x| / scale` at random to one of `s = 2**(bits-1) - 1` levels and pack the codes.

        A code is `s` plus or minus the level. Elements beyond the scale get the last level.

        Returns:
            Packed codes, uint8 [size * bits / 8].
        """
        levels = (1 << bits - 1) - 1
        used = scale >= TINY
        inverse = self.where(used, levels / self.where(used, scale, 1.0), 0.0)
        noise = self.uniform(key, x.shape[0])

        def codes(band: Band, groups: slice) -> Tensor:
            rows, chance = (self._band(band, y) for y in (x, noise))
            height = self.scale(self.abs(rows), self.reshape(inverse[groups], (-1, 1)))
            level = self.minimum(self.cast(self.minimum(height + chance, levels), "int64"), levels)
            return self.where(rows < 0, levels - level, levels + level)

        return self._packed(self._fill(bands, x.shape[0], codes, "int64"), bits)

    def add_levels(
        self,
        bands: Bands,
        base: Tensor | None,
        room: Tensor,
        packed: Tensor,
        scale: Tensor,
        bits: int,
        weights: Tensor,
    ) -> Tensor:
        """Return `base + sum over ranks of weight * level * scale / s`.

        Args:
            base: float32 [size]; None for zeros.
            room: where the result may be written; may be `base`. Donating.
            packed: codes of `encode_levels`, uint8 [world, size * bits / 8].
            scale: float32 [world, groups].
            weights: float32 [world].
        """
        levels = (1 << bits - 1) - 1
        total = self.clear(room) if base is None else self.overwrite(room, base)
        for rank in range(packed.shape[0]):
            # A product: graphs turn a division by a constant into one, which rounds differently.
            unit = self.where(scale[rank] >= TINY, scale[rank] * (1.0 / levels), 0.0)
            code = self.unpack(self.from_bytes(packed[rank], "uint32"), bits)

            def values(
                band: Band, groups: slice, unit: Tensor = unit, code: Tensor = code
            ) -> Tensor:
                level = self.cast(self._band(band, code) - levels, "float32")
                return self.scale(level, self.reshape(unit[groups], (-1, 1)))

            value = self._fill(bands, total.shape[0], values, "float32")
            total = self.accumulate(total, self.scale(value, weights[rank]))
        return total

    def encode_signs(self, bands: Bands, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return by group the mean of x >= 0 and of x < 0, 0 if there is none; and packed signs."""
        above: list[Any] = []
        below: list[Any] = []
        for rows in self._rows(bands, x):
            negative = self.cast(rows < 0, "int64")
            count = self.sum(negative, -1)
            for means, side, n in (
                (above, self.where(rows < 0, 0.0, rows), rows.shape[-1] - count),
                (below, self.where(rows < 0, rows, 0.0), count),
            ):
                means.append(self.sum_of_rows(side) / self.cast(self.maximum(n, 1), "float32"))

        def codes(band: Band, groups: slice) -> Tensor:
            del groups
            return self.cast(self._band(band, x) < 0, "int64")

        packed = self._packed(self._fill(bands, x.shape[0], codes, "int64"), 1)
        return self._joined(above), self._joined(below), packed

    def add_signs(
        self,
        bands: Bands,
        base: Tensor | None,
        room: Tensor,
        packed: Tensor,
        above: Tensor,
        below: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """Return `base + sum over ranks of weight * mean` of each element's side.

        For `encode_signs`. Arguments as for `add_levels`; above and below are float32
        [world, groups]. Donating.
        """
        total = self.clear(room) if base is None else self.overwrite(room, base)
        for rank in range(packed.shape[0]):
            code = self.unpack(self.from_bytes(packed[rank], "uint32"), 1)

            def values(band: Band, groups: slice, rank: int = rank, code: Tensor = code) -> Tensor:
                high, low = (self.reshape(s[rank][groups], (-1, 1)) for s in (above, below))
                return self.where(self._band(band, code) > 0, low, high)

            value = self._fill(bands, total.shape[0], values, "float32")
            total = self.accumulate(total, self.scale(value, weights[rank]))
        return total

    def _packed(self, codes: Tensor, bits: int) -> Tensor:
        return self.to_bytes(self.pack(codes, bits), "uint32")

    def _joined(self, pieces: list[Tensor]) -> Tensor:
        """Concatenate to one vector; a shard that is all padding has no pieces."""
        return self.concat(pieces) if pieces else self.zeros((0,))

    def _rows(self, bands: Bands, x: Tensor) -> list[Tensor]:
        return [self._band(band, x) for band in bands.bands]

    def _band(self, band: Band, x: Tensor) -> Tensor:
        return self.reshape(x[band.start : band.end], (band.rows, band.length))

    def _fill(
        self, bands: Bands, size: int, values: Callable[[Band, slice], Tensor], dtype: str
    ) -> Tensor:
        """Return a vector of the bands `values(band, groups)` [rows, length], and 0 elsewhere."""
        pieces: list[Any] = []
        done = group = 0
        for band in bands.bands:
            if band.start > done:
                pieces.append(self.zeros((band.start - done,), dtype))
            groups = slice(group, group + band.rows)
            pieces.append(self.reshape(values(band, groups), (band.rows * band.length,)))
            done, group = band.end, group + band.rows
        if size > done:
            pieces.append(self.zeros((size - done,), dtype))
        return self.concat(pieces) if len(pieces) > 1 else pieces[0]
