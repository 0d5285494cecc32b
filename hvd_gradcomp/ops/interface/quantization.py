"""Quantization of every element, and the random numbers for rounding.

Number i of a key is a hash of i and the key; there is no state besides the step, and the user's
random generators are not touched. The hash is two rounds of a 32-bit finalizer (xor-shift,
multiply), one for each half of the key, in arithmetic that stays below 2**63.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from hvd_gradcomp.core.row_groups import RowGroup, RowGroups
from hvd_gradcomp.ops.interface.bitpack import GROUP, BitPacking
from hvd_gradcomp.ops.tensors import Tensor

TINY = 2.0**-100  # a group with a smaller scale counts as zero: its inverse would overflow
FACTOR = 0x45D9F3B
LARGEST_E4M3 = 448.0
# Sums over a group are exact in steps of 2**-38 of its peak, and its squares' in steps of 2**-34:
# up to 2**22 values stay below 2**63.
_PART, _SQUARE = 38, 34
_MORE = 64  # bytes: scales of groups that another shard may have more, in a part of one size
_LEAST = 127 - 88  # the exponent of a peak, as in float32, whose steps are not yet denormal


class Quantization(BitPacking):
    """Ops that quantize every element, and the random numbers for rounding."""

    def key(self, step: Any, salt: int) -> Tensor:
        """Return a step's key; int64 [2] below 2**32. `salt` separates ranks, buckets and uses."""
        first = self.mix(self.xor(self.mix(self.words((step % (1 << 32),))), salt))
        return self.concat((first, self.mix(self.xor(first, 0x9E3779B9))))

    def random_words(self, key: Tensor, count: Any) -> Tensor:
        """Return a key's numbers 0 to count - 1, below 2**32; int64 [count]."""
        hashed = self.mix((self.arange(count) + key[:1]) % (1 << 32))
        return self.mix(self.xor(hashed, key[1:]))

    def uniform(self, key: Tensor, count: Any) -> Tensor:
        """Return a key's numbers 0 to count - 1: multiples of 2**-24 in [0, 1); float32 [count]."""
        return self.cast(self.split_bits(self.random_words(key, count), 8)[0], "float32") * 2.0**-24

    def mix(self, x: Tensor) -> Tensor:
        """Hash x in [0, 2**32) by a bijection that looks random."""
        for _ in range(2):
            x = self.xor(x, self.split_bits(x, 16)[0]) * FACTOR % (1 << 32)
        return self.xor(x, self.split_bits(x, 16)[0])

    def group_maxima(self, row_groups: RowGroups, x: Tensor) -> Tensor:
        """Return the largest |x| of each group; float32 [groups]."""
        if self.native is not None:
            return self._of_groups("group_maxima", row_groups, x)
        return self._joined([self.max(self.abs(rows), -1) for rows in self._rows(row_groups, x)])

    def group_squares(self, row_groups: RowGroups, x: Tensor) -> Tensor:
        """Return the sum of squares of each group; float32 [groups]."""
        if self.native is not None:
            return self._of_groups("group_squares", row_groups, x)
        return self._joined(
            [self.sum_of_rows(self.square(rows)) for rows in self._rows(row_groups, x)]
        )

    def group_means(self, row_groups: RowGroups, x: Tensor) -> Tensor:
        """Return the mean of each group; float32 [groups]."""
        if self.native is not None:
            return self._of_groups("group_means", row_groups, x)
        means = []
        for rows in self._rows(row_groups, x):
            # By a tensor: PyTorch divides by a number on a GPU as a product with its reciprocal.
            lengths = self.full(rows.shape[:1], float(rows.shape[-1]), "float32")
            means.append(self.sum_of_rows(rows) / lengths)
        return self._joined(means)

    def group_norms(self, row_groups: RowGroups, x: Tensor) -> Tensor:
        """Return the root of the sum of squares of each group; float32 [groups]."""
        squares = self.cast(self.group_squares(row_groups, x), "float64")
        return self.cast(self.sqrt(squares), "float32")

    def clipped_maxima(self, row_groups: RowGroups, x: Tensor, clip: float) -> Tensor:
        """Return each group's largest |x|, at most `clip` root mean squares; float32 [groups]."""
        squares = self.cast(self.group_squares(row_groups, x), "float64")
        sigma = self.sqrt(squares / self.cast(self.words(row_groups.lengths), "float64"))
        bound = self.cast(sigma * clip, "float32")
        return self.minimum(self.group_maxima(row_groups, x), bound)

    def encode_levels(
        self, row_groups: RowGroups, x: Tensor, scale: Tensor, bits: int, key: Tensor | None
    ) -> Tensor:
        """Round `|x| / scale` to one of `s = 2**(bits-1) - 1` levels and pack the codes.

        A code is `s` plus or minus the level. Elements beyond the scale get the last level.

        Args:
            row_groups: the groups.
            x: float32 [size].
            scale: magnitude of the highest level, float32 [groups].
            bits: of a code.
            key: of random numbers, for unbiased rounding; None rounds to the nearest level.

        Returns:
            Packed codes, uint8 [size * bits / 8].
        """
        if self.native is not None:
            inputs = self.numbers_of(row_groups), x, scale, self._rounding(key)
            return self.native("encode_levels", inputs, (self._codes(x, bits, scale),), (bits,))
        levels = (1 << bits - 1) - 1
        inverse = self._inverse(scale, levels)
        noise = None if key is None else self.uniform(key, x.shape[0])

        def codes(band: RowGroup, groups: slice) -> Tensor:
            rows = self._band(band, x)
            chance = 0.5 if noise is None else self._band(band, noise)
            height = self.scale(self.abs(rows), self.reshape(inverse[groups], (-1, 1)))
            level = self.minimum(self.cast(self.minimum(height + chance, levels), "int64"), levels)
            return self.where(rows < 0, levels - level, levels + level)

        return self._packed(self._fill(row_groups, x.shape[0], codes, "int64"), bits)

    def add_levels(
        self,
        row_groups: RowGroups,
        base: Tensor | None,
        out: Tensor,
        packed: Tensor,
        scale: Tensor,
        bits: int,
        weights: Tensor,
    ) -> Tensor:
        """Return `base + sum over ranks of weight * level * scale / s`.

        Args:
            base: float32 [size]; None for zeros.
            out: where the result may be written; may be `base`. Donating.
            packed: codes of `encode_levels`, uint8 [world, size * bits / 8].
            scale: float32 [world, groups].
            weights: float32 [world].
        """
        if self.native is not None:
            start = out if base is None else base
            rows = self.rows(packed), self.rows(scale)
            inputs = self.numbers_of(row_groups), start, *rows, weights
            return self.native("add_levels", inputs, (self.writable(out),), (bits, base is None))
        levels = (1 << bits - 1) - 1
        total = self.clear(out) if base is None else self.overwrite(out, base)
        for rank in range(packed.shape[0]):
            # A product: graphs turn a division by a constant into one, which rounds differently.
            unit = self.where(scale[rank] >= TINY, scale[rank] * (1.0 / levels), 0.0)
            code = self.unpack(self.from_bytes(packed[rank], "uint32"), bits)

            def values(
                band: RowGroup, groups: slice, unit: Tensor = unit, code: Tensor = code
            ) -> Tensor:
                level = self.cast(self._band(band, code) - levels, "float32")
                return self.scale(level, self.reshape(unit[groups], (-1, 1)))

            value = self._fill(row_groups, total.shape[0], values, "float32")
            total = self.accumulate(total, self.scale(value, weights[rank]))
        return total

    def encode_floats(
        self, row_groups: RowGroups, x: Tensor, unit: Tensor | None, bits: int, key: Tensor | None
    ) -> Tensor:
        """Round to narrow floats, ties to even: bfloat16, or e4m3 of `x / unit`.

        Args:
            row_groups: the groups.
            x: float32 [size].
            unit: of each group, float32 [groups]; `|x / unit|` is at most 448. None for bfloat16.
            bits: 16 for bfloat16, 8 for e4m3 (4 bits of exponent, 3 of mantissa).
            key: of random numbers, for unbiased rounding to bfloat16; None rounds to the nearest.

        Returns:
            Codes, little-endian, uint8 [size * bits / 8].
        """
        if self.native is not None:
            units = self.zeros((0,)) if unit is None else unit
            inputs = self.numbers_of(row_groups), x, units, self._rounding(key)
            return self.native("encode_floats", inputs, (self._codes(x, bits, units),), (bits,))
        if unit is not None:
            x = self._by_group(row_groups, x, self._inverse(unit, 1.0))
        sign, magnitude = self.split_bits(self.float_bits(x), 31)
        if bits == 16:
            whole, rest = self.split_bits(magnitude, 16)
            if key is None:
                up = rest + whole % 2 > 0x8000
            else:
                noise = self.cast(self.uniform(key, x.shape[0]) * 65536.0, "int64")
                up = rest + noise >= 1 << 16
        else:
            whole, rest = self.split_bits(magnitude, 20)
            whole = whole - (120 << 3)  # the exponent's bias becomes 7
            up = rest + whole % 2 > 1 << 19
        code = whole + self.cast(up, "int64")
        if bits == 8:  # below 2**-6 are multiples of 2**-9: the sum's last bits
            low = self.float_bits(self.abs(x) * 2.0**9 + 2.0**23) % 16
            code = self.where(magnitude < 121 << 23, low, code)
        return self._code_bytes(code + sign * (1 << bits - 1), bits)

    def encode_bfloat16(self, x: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return `encode_floats` for bfloat16, and the largest |x|, float32 [1]."""
        if self.native is not None:
            outputs = self.body(2 * self.extent(x.shape[0])), self.empty((1,))
            packed, largest = self.native("encode_bfloat16", (x, self._rounding(key)), outputs)
            return packed, largest
        codes = self.encode_floats(RowGroups(()), x, None, 16, key)
        return codes, self.peaks(self.reshape(x, (1, -1)))

    def encode_peaks(
        self, row_groups: RowGroups, x: Tensor, bits: int, key: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return `group_maxima`, and `encode_levels` with these as scales."""
        if self.native is not None:
            outputs = self._codes_and_groups(row_groups, x, bits)
            inputs = self.numbers_of(row_groups), x, self._rounding(key)
            scale, packed = self.native("encode_peaks", inputs, outputs, (bits,))
            return scale, packed
        scale = self.group_maxima(row_groups, x)
        return scale, self.encode_levels(row_groups, x, scale, bits, key)

    def encode_e4m3(
        self, row_groups: RowGroups, x: Tensor, power_of_two: bool
    ) -> tuple[Tensor, Tensor]:
        """Return units of which each group's largest |x| is 448, and `encode_floats` with these.

        With `power_of_two` units are rounded up to one.
        """
        if self.native is not None:
            outputs = self._codes_and_groups(row_groups, x, 8)
            inputs, ints = (self.numbers_of(row_groups), x), (int(power_of_two),)
            unit, codes = self.native("encode_e4m3", inputs, outputs, ints)
            return unit, codes
        unit = self.group_maxima(row_groups, x) * (1.0 / LARGEST_E4M3)
        if power_of_two:
            exponent, _ = self.split_bits(self.float_bits(unit) + (1 << 23) - 1, 23)
            unit = self.bits_float(exponent * (1 << 23))
        return unit, self.encode_floats(row_groups, x, unit, 8, None)

    def add_floats(
        self,
        row_groups: RowGroups,
        base: Tensor | None,
        out: Tensor,
        packed: Tensor,
        unit: Tensor | None,
        bits: int,
        weights: Tensor,
    ) -> Tensor:
        """Return `base + sum over ranks of weight * value * unit`, for `encode_floats`.

        Arguments as for `add_levels`; unit is float32 [world, groups], or None. Donating.
        """
        if self.native is not None:
            units = self.zeros((0,)) if unit is None else self.rows(unit)
            start, packed = out if base is None else base, self.rows(packed)
            inputs = self.numbers_of(row_groups), start, packed, units, weights
            return self.native("add_floats", inputs, (self.writable(out),), (bits, base is None))
        total = self.clear(out) if base is None else self.overwrite(out, base)
        for rank in range(packed.shape[0]):
            code = self._codes_in(packed[rank], bits)[: total.shape[0]]
            if bits == 16:
                value = self.bits_float(code * (1 << 16))
            else:
                sign, magnitude = self.split_bits(code, 7)
                normal = self.bits_float((magnitude + (120 << 3)) * (1 << 20))
                value = self.where(magnitude < 8, self.cast(magnitude, "float32") * 2.0**-9, normal)
                value = self.where(sign > 0, -value, value)
            if unit is not None:
                used = self.where(unit[rank] >= TINY, unit[rank], 0.0)
                value = self._by_group(row_groups, value, used)
            total = self.accumulate(total, self.scale(value, weights[rank]))
        return total

    def add_bfloat16(
        self, base: Tensor | None, out: Tensor, packed: Tensor, weights: Tensor
    ) -> tuple[Tensor, Any]:
        """Return `add_floats` for bfloat16, and whether all of it is finite. Donating."""
        if self.native is not None:
            start, packed = out if base is None else base, self.rows(packed)
            inputs = self.numbers(()), start, packed, self.zeros((0,)), weights
            outputs, ints = (self.writable(out), self.flag()), (16, base is None)
            total, finite = self.native("add_floats", inputs, outputs, ints)
            return total, finite
        total = self.add_floats(RowGroups(()), base, out, packed, None, 16, weights)
        return total, self.finite(total)

    def encode_powers(self, x: Tensor, key: Tensor) -> Tensor:
        """Round at random to powers of two, unbiased: sign and exponent of float32.

        Args:
            x: float32 [size], a multiple of 32.
            key: of random numbers.

        Returns:
            Packed codes of 9 bits, uint8 [size * 9 / 8].
        """
        if self.native is not None:
            return self.native("encode_powers", (x, key), (self._codes(x, 9),))
        whole, mantissa = self.split_bits(self.float_bits(x), 23)
        noise = self.cast(self.uniform(key, x.shape[0]) * 2.0**23, "int64")
        code = whole + self.cast(mantissa + noise >= 1 << 23, "int64")
        return self.to_bytes(self.pack(code, 9), "uint32")

    def add_powers(
        self, base: Tensor | None, out: Tensor, packed: Tensor, weights: Tensor
    ) -> Tensor:
        """Return `base + sum over ranks of weight * decoded codes`. Donating for out.

        Args:
            base: float32 [size]; None for zeros.
            out: where the result may be written.
            packed: of `encode_powers`, at least of `size` elements; uint8 [world, bytes].
            weights: float32 [world].
        """
        if self.native is not None:
            inputs = out if base is None else base, self.rows(packed), weights
            return self.native("add_powers", inputs, (self.writable(out),), (base is None,))
        total = self.clear(out) if base is None else self.overwrite(out, base)
        for rank in range(packed.shape[0]):
            code = self.unpack(self.from_bytes(packed[rank], "uint32"), 9)[: total.shape[0]]
            total = self.accumulate(
                total, self.scale(self.bits_float(code * (1 << 23)), weights[rank])
            )
        return total

    def _inverse(self, scale: Tensor, levels: float) -> Tensor:
        """Return `levels / scale`, and 0 where a group counts as zero."""
        used = scale >= TINY
        # Of two tensors: PyTorch divides a number by a tensor as a product with its reciprocal.
        whole = self.full(scale.shape, levels, "float32")
        return self.where(used, whole / self.where(used, scale, 1.0), 0.0)

    def _by_group(self, row_groups: RowGroups, x: Tensor, factor: Tensor) -> Tensor:
        """Return x times the factor of its group, and 0 outside of the groups."""

        def product(band: RowGroup, groups: slice) -> Tensor:
            return self._band(band, x) * self.reshape(factor[groups], (-1, 1))

        return self._fill(row_groups, x.shape[0], product, "float32")

    def _code_bytes(self, codes: Tensor, bits: int) -> Tensor:
        """Return codes of 8 or 16 bits as bytes, little-endian."""
        lanes = self.words([1 << bits * lane for lane in range(32 // bits)])
        return self.to_bytes(self.sum(self.reshape(codes, (-1, 32 // bits)) * lanes, -1), "uint32")

    def _codes_in(self, data: Tensor, bits: int) -> Tensor:
        """Invert `_code_bytes`."""
        words = self.reshape(self.from_bytes(data, "uint32"), (-1, 1))
        lanes = self.arange(32 // bits) * bits
        return self.reshape(self.shift_right(words, lanes) % (1 << bits), (-1,))

    def encode_signs(self, row_groups: RowGroups, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return by group the mean of x >= 0 and of x < 0, 0 if there is none; and packed signs."""
        if self.native is not None:
            outputs = (
                self.empty((row_groups.groups,)),
                self.empty((row_groups.groups,)),
                self.empty((self.extent(x.shape[0]) // 8,), "uint8"),
            )
            inputs = self.numbers_of(row_groups), x
            positive, negative, packed = self.native("encode_signs", inputs, outputs)
            return positive, negative, packed
        above: list[Any] = []
        below: list[Any] = []
        for rows in self._rows(row_groups, x):
            negative = self.cast(rows < 0, "int64")
            count = self.sum(negative, -1)
            for means, side, n in (
                (above, self.where(rows < 0, 0.0, rows), rows.shape[-1] - count),
                (below, self.where(rows < 0, rows, 0.0), count),
            ):
                means.append(self.sum_of_rows(side) / self.cast(self.maximum(n, 1), "float32"))

        def codes(band: RowGroup, groups: slice) -> Tensor:
            del groups
            return self.cast(self._band(band, x) < 0, "int64")

        packed = self._packed(self._fill(row_groups, x.shape[0], codes, "int64"), 1)
        return self._joined(above), self._joined(below), packed

    def add_signs(
        self,
        row_groups: RowGroups,
        base: Tensor | None,
        out: Tensor,
        packed: Tensor,
        above: Tensor,
        below: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """Return `base + sum over ranks of weight * mean` of each element's side.

        For `encode_signs`. Arguments as for `add_levels`; above and below are float32
        [world, groups]. Donating.
        """
        if self.native is not None:
            start, packed = out if base is None else base, self.rows(packed)
            inputs = self.numbers_of(row_groups), start, packed, above, below, weights
            return self.native("add_signs", inputs, (self.writable(out),), (base is None,))
        total = self.clear(out) if base is None else self.overwrite(out, base)
        for rank in range(packed.shape[0]):
            code = self.unpack(self.from_bytes(packed[rank], "uint32"), 1)

            def values(
                band: RowGroup, groups: slice, rank: int = rank, code: Tensor = code
            ) -> Tensor:
                high, low = (self.reshape(s[rank][groups], (-1, 1)) for s in (above, below))
                return self.where(self._band(band, code) > 0, low, high)

            value = self._fill(row_groups, total.shape[0], values, "float32")
            total = self.accumulate(total, self.scale(value, weights[rank]))
        return total

    def momentum_signs(
        self, row_groups: RowGroups, m: Tensor, gradient: Tensor, momentum: float, negative: Any
    ) -> tuple[Tensor, Tensor]:
        """Return `momentum * m + (1 - momentum) * gradient`, and its packed signs.

        Donating for the gradient.

        Args:
            row_groups: the groups; outside of them a sign is positive.
            m: float32 [size].
            gradient: float32 [size].
            momentum: a number.
            negative: 1 if a zero counts as negative, 0 if as positive; an integer or a scalar.
        """
        if self.native is not None:
            inputs = self.numbers_of(row_groups), m, gradient
            outputs = self.writable(gradient), self._codes(gradient, 1)
            reals = momentum, 1.0 - momentum
            m, packed = self.native("momentum_signs", inputs, outputs, (negative,), reals)
            return m, packed
        ahead = self.scale(gradient, 1.0 - momentum)
        m = self.accumulate(ahead, self.times(m, momentum))
        zero = self.cast(1 - self.words((negative,)) * 2, "float32")
        return m, self.encode_signs(row_groups, self.where(m == 0, zero, m))[2]

    def majority(
        self,
        row_groups: RowGroups,
        packed: Tensor,
        weights: Tensor,
        unit: float,
        m: Tensor,
        out: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return `unit` times the sign of most ranks, 0 where they tie; and m, written to `out`.

        Donating for m, which the first result may take the memory of, and for out.

        Args:
            row_groups: the groups; outside of them the result is 0.
            packed: signs of `momentum_signs`, uint8 [world, size / 8].
            weights: 1 for a rank that counts, 0 for one that does not; float32 [world].
            unit: a number.
            m: float32 [size].
            out: float32 [size].
        """
        if self.native is not None:
            inputs = self.numbers_of(row_groups), self.rows(packed), weights
            ints, reals = (self.length(m),), (unit,)
            if not self.in_place:
                return self.native("majority", inputs, (self.empty(m.shape),), ints, reals), m
            outputs = self.writable(m), self.writable(out)
            total, m = self.native("majority", (*inputs, m), outputs, ints, reals)
            return total, m
        ones = self.full((packed.shape[0], row_groups.groups), 1.0, "float32")
        total = self.zeros((m.shape[0],))
        votes = self.add_signs(row_groups, None, total, packed, ones, -ones, weights)
        above, below = (self.cast(side, "float32") for side in (votes > 0, votes < 0))
        return (above - below) * unit, self.overwrite(out, m)

    def peaks_of_groups(self, x: Tensor, group: Tensor, groups: int) -> Tensor:
        """Return the largest |x| of each group, whose members may lie anywhere; float32 [groups].

        Args:
            x: float32 [count].
            group: of each, int64 [count]; `groups` for none.
            groups: their number.
        """
        _, magnitude = self.split_bits(self.float_bits(x), 31)
        return self.bits_float(self.segment_max(magnitude, group, groups + 1)[:groups])

    def means_of_groups(self, x: Tensor, group: Tensor, groups: int) -> Tensor:
        """Return the mean of each group, 0 of an empty one; arguments as for `peaks_of_groups`.

        Bit-identical on all backends, in any order of the members; see `_parts_of_peaks`.
        """
        part, up = self._parts_of_peaks(x, group, groups)
        return (self._means(part, group, groups + 1, _PART) * up)[:groups]

    def encode_bins(
        self, x: Tensor, group: Tensor, entries: tuple[int, ...], bits: int
    ) -> tuple[Tensor, Tensor]:
        """Return the bin of each value in its group, and the mean of what is in each bin.

        With mean mu and standard deviation s of the group, `2**bits` bins of equal width divide
        mu - 3 s to mu + 3 s; what lies beyond counts to the outermost bins. A group of fewer values
        has a bin for each. Means as by `means_of_groups`.

        Args:
            x: float32 [count].
            group: of each, int64 [count]; the number of groups for none.
            entries: bins of each group, at most `2**bits`; if fewer, it has no more values.
            bits: of a code.

        Returns:
            Codes, as `pack_bytes` packs them, 0 for none; and means, one group after another,
            float32 [sum of entries].
        """
        if self.native is not None:
            size = (self.extent(x.shape[0]) + GROUP - 1) // GROUP * GROUP // 8 * bits
            outputs = self.empty((size,), "uint8"), self.empty((sum(entries),))
            inputs = x, group, self.numbers(entries)
            codes, means = self.native("encode_bins", inputs, outputs, (bits,))
            return codes, means
        groups, bins, total = len(entries), 1 << bits, sum(entries)
        part, up = self._parts_of_peaks(x, group, groups)
        mean = self._means(part, group, groups + 1, _PART)
        apart = part - self.gather(mean, group)
        variance = self._means(apart * apart, group, groups + 1, _SQUARE)
        deviation = self.cast(self.sqrt(self.cast(variance, "float64")), "float32")
        per_unit = self._inverse(deviation, 1.0) * (bins / 6.0)
        height = apart * self.gather(per_unit, group) + bins / 2.0
        code = self.cast(self.minimum(self.maximum(height, 0.0), bins - 1.0), "int64")
        if min(entries, default=bins) < bins:
            few = self.gather(self.words([*(int(n < bins) for n in entries), 0]), group)
            last = self.gather(self.words([*entries, 1]), group) - 1
            rank = self.minimum(self._rank_in_group(group), last)
            code = self.where(few > 0, rank, code)
        code = self.where(group < groups, code, 0)
        first = [0, *accumulate(entries)]
        slot = self.gather(self.words(first), group) + code
        of_slot = [number for number, n in enumerate(entries) for _ in range(n)]
        means = self._means(part, slot, total + 1, _PART)[:total]
        return self.pack_bytes(code, bits), means * self.gather(up, self.words(of_slot))

    def decode_bins(
        self, packed: Tensor, means: Tensor, group: Tensor, entries: tuple[int, ...], bits: int
    ) -> Tensor:
        """Invert `encode_bins`: the mean of each value's bin, 0 in no group; float32 [count]."""
        if self.native is not None:
            inputs = self.rows(packed), means, group, self.numbers(entries)
            return self.native("decode_bins", inputs, (self.empty(group.shape),), (bits,))
        code = self.unpack_bytes(packed, bits)[: group.shape[0]]
        first = [0, *accumulate(entries)]
        # Of a damaged payload a code may be too large.
        code = self.minimum(code, self.gather(self.words([*entries, 1]), group) - 1)
        slot = self.gather(self.words(first), group) + code
        return self.gather(self.concat((means, self.zeros((1,)))), slot)

    def _parts_of_peaks(self, x: Tensor, group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """Return x over a power of two near its group's peak, and these; [count], [groups + 1].

        So sums can be those of integers, which are exact, in any order, and a power of two times a
        group changes nothing but these. A group whose peak is below 2**-88 counts as zero.
        """
        _, magnitude = self.split_bits(self.float_bits(x), 31)
        top = self.segment_max(self.split_bits(magnitude, 23)[0], group, groups + 1)
        used, top = top >= _LEAST, self.minimum(top, 253)  # the reciprocal of 2**127 is denormal
        up = self.bits_float(self.where(used, top, 0) * (1 << 23))
        down = self.bits_float(self.where(used, 254 - top, 0) * (1 << 23))
        return x * self.gather(down, group), up

    def _means(self, x: Tensor, segment: Tensor, count: int, bits: int) -> Tensor:
        """Return the mean of each segment, exactly summed in steps of 2**-bits; float32 [count]."""
        whole = self.cast(x * 2.0**bits, "int64")
        total = self.cast(self.segment_sum(whole, segment, count), "float32") * 2.0**-bits
        number = self.segment_sum(self.full(segment.shape, 1), segment, count)
        return total / self.cast(self.maximum(number, 1), "float32")

    def _rank_in_group(self, group: Tensor) -> Tensor:
        """Return how many members of its group come before each; int64 [count]."""
        count = group.shape[0]
        bits = max(count - 1, 1).bit_length()
        keys = self.sort(group * (1 << bits) + self.arange(count))
        sorted_, slot = self.split_bits(keys, bits)
        rank = self.arange(count) - self.count_below(sorted_, sorted_)
        return self.put(self.full((count,), 0), slot, rank)

    def _of_groups(self, kernel: str, row_groups: RowGroups, x: Tensor) -> Tensor:
        """Run a kernel that returns a number of each group."""
        numbers = self.numbers_of(row_groups)
        return self.native(kernel, (numbers, x), (self.empty((row_groups.groups,)),))

    def _rounding(self, key: Tensor | None) -> Any:
        """Return a key as kernels take it, no numbers for None."""
        return self.numbers(()) if key is None else key

    def _codes(self, x: Tensor, bits: int, scale: Tensor | None = None) -> Any:
        """Return the output for codes of all elements, behind the scales of groups in a payload."""
        front = 0 if scale is None else 4 * self.extent(scale.shape[0])
        return self.body(self.extent(x.shape[0]) * bits // 8, front + _MORE)

    def _codes_and_groups(self, row_groups: RowGroups, x: Tensor, bits: int) -> tuple[Any, Any]:
        """Return the outputs for a number of each group, and for codes behind these."""
        size = self.extent(x.shape[0]) * bits // 8
        return self.empty((row_groups.groups,)), self.body(size, 4 * row_groups.groups + _MORE)

    def _packed(self, codes: Tensor, bits: int) -> Tensor:
        return self.to_bytes(self.pack(codes, bits), "uint32")

    def _joined(self, pieces: list[Tensor]) -> Tensor:
        """Concatenate to one vector; a shard that is all padding has no pieces."""
        return self.concat(pieces) if pieces else self.zeros((0,))

    def _rows(self, row_groups: RowGroups, x: Tensor) -> list[Tensor]:
        return [self._band(band, x) for band in row_groups.runs]

    def _band(self, band: RowGroup, x: Tensor) -> Tensor:
        return self.reshape(x[band.start : band.end], (band.rows, band.length))

    def _fill(
        self,
        row_groups: RowGroups,
        size: int,
        values: Callable[[RowGroup, slice], Tensor],
        dtype: str,
    ) -> Tensor:
        """Return a vector of the bands `values(band, groups)` [rows, length], and 0 elsewhere."""
        pieces: list[Any] = []
        done = group = 0
        for band in row_groups.runs:
            if band.start > done:
                pieces.append(self.zeros((band.start - done,), dtype))
            groups = slice(group, group + band.rows)
            pieces.append(self.reshape(values(band, groups), (band.rows * band.length,)))
            done, group = band.end, group + band.rows
        if size > done:
            pieces.append(self.zeros((size - done,), dtype))
        return self.concat(pieces) if len(pieces) > 1 else pieces[0]
