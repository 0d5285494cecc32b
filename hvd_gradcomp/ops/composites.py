"""Verbs made of other verbs, written once for all frameworks.

A backend may shadow one with its better way, if the result is the same to the bit; of `project` and
`lift`, which multiply matrices, but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from hvd_gradcomp.foundation.bands import Band, Bands
from hvd_gradcomp.foundation.layout import Layout
from hvd_gradcomp.ops.tensors import Tensor

GROUP = 32  # codes that are packed together
_TINY = 2.0**-100  # a group whose scale is below counts as zero: its inverse would overflow
_FACTOR = 0x45D9F3B
BEYOND = (
    "rank {ranks} sent an index that points outside of its bucket, or does not ascend: "
    "a payload is damaged"
)


class Field(NamedTuple):
    """A number within the words of a frame: which word, from which bit, of how many bits."""

    word: int
    low: int = 0
    bits: int = 32


class Weighing(NamedTuple):
    """What payloads count for in a sum, and what must hold of their bodies.

    A body may begin with magnitudes that nothing sent exceeds, by groups. Their sum over ranks,
    times the weight, must not exceed the limit.

    Attributes:
        weight: of each payload.
        groups: how many.
        vectors: of magnitudes: of two the larger counts.
        powers: they are exponents of powers of two, int8; else float32.
        limit: of the sum.
        refused: message and error where it is exceeded.
        ascending: the first word of indices, how many, their bits in a word, and how many elements
            they may point to; those of the last may repeat. Of verbs, `add_at` knows that.
    """

    weight: float = 1.0
    groups: int = 0
    vectors: int = 0
    powers: bool = False
    limit: float = 0.0
    refused: tuple[str, type[Exception]] = ("", Exception)
    ascending: tuple[int, int, int, int] | None = None


class Admitted(NamedTuple):
    """What `Composites.admit` has read.

    Attributes:
        words: int64 [rows, count].
        intact: what `Ops.require` gives of all facts together.
        needed: the most elements that a rank wanted, on the host; None where nobody looked.
        weights: what each row counts for, float32 [rows]; None for `weigh` to say.
    """

    words: Tensor
    intact: Any
    needed: Any = None
    weights: Tensor | None = None


class Composites:
    """Base of `Ops`."""

    def constants(self: Any, values: tuple[float, ...]) -> Tensor:
        """`reals` that nobody writes to."""
        return self.reals(values)

    def accumulate_square(self: Any, x: Tensor, y: Tensor) -> Tensor:
        """`x + y*y`. Donating."""
        return self.accumulate(x, self.square(y))

    def square_exceeds(self: Any, x: Tensor, y: Tensor, factor: float) -> Any:
        """`x*x > factor*y`, for the body of a `search`."""
        return self.greater(self.square(x), self.times(y, factor))

    def advance(
        self: Any, r: Tensor, u: Tensor, gradient: Tensor, momentum: float, nesterov: bool
    ) -> tuple[Tensor, Tensor]:
        """Momentum: `u = momentum*u + g`, `r += u` (with Nesterov `r += momentum*u + g`); (r, u).

        Elementwise, donating for r and u.
        """
        u = self.accumulate(self.scale(u, momentum), gradient)
        ahead = self.accumulate(self.times(u, momentum), gradient) if nesterov else u
        return self.accumulate(r, ahead), u

    def project(self: Any, x: Tensor, basis: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of x times a basis; the sum of their squares; that of their products with `row`.

        Rounded as the framework does it.

        Args:
            x: as many rows as it has, in as many axes, in any order of memory.
            basis: [length of a row, dimension].
            row: [1, length].
        """
        x = self.reshape(x, (-1, basis.shape[0]))
        beside = self.sum(self.matmul(x, self.transpose(row, (1, 0))))
        return self.matmul(x, basis), self.inner(x, x), beside

    def lift(
        self: Any,
        code: Tensor,
        basis: Tensor,
        row: Tensor,
        shape: Sequence[int],
        order: Sequence[int],
    ) -> Any:
        """A layer to `assemble`: rows of code [rows, dimension] times the basis turned, and `row`.

        The inverse of `project`, as far as there is one.

        Args:
            shape: of the layer.
            order: of its axes, in which rows run through them; the last row may run beyond.
        """
        rows = self.matmul_plus(code, self.transpose(basis, (1, 0)), row)
        return self.unturned(self.reshape(rows, (-1,)), shape, order)

    def unturned(self: Any, flat: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
        """What runs through axes of a shape in an order, and maybe beyond, as a tensor of them."""
        flat = flat[: prod(shape)]
        if tuple(order) == tuple(range(len(order))):
            return flat
        turned = self.reshape(flat, tuple(shape[axis] for axis in order))
        return self.transpose(turned, [order.index(axis) for axis in range(len(order))])

    def outputs_first(self: Any, layout: Layout, x: Tensor, back: bool = False) -> Tensor:
        """A bucket with its layers in the order of `Layout.outputs_first`, or back in their own."""
        pieces: list[Any] = []
        end = 0
        for start, *axes in layout.stored_outputs_last:
            size, shape = prod(axes), tuple(axes[::-1] if back else axes)
            layer = self.unturned(x[start : start + size], shape[::-1], (2, 1, 0))
            pieces += [x[end:start], self.reshape(layer, (size,))]
            end = start + size
        return self.concat([*pieces, x[end:]])

    def shares(
        self: Any, wanted: Tensor, most: Sequence[int], capacity: Any
    ) -> tuple[Tensor, Tensor]:
        """How many of the elements that groups want have room, int64 [groups]; and all wanted.

        One of each group has, and of the rest all groups have the same share.

        Args:
            wanted: int64 [groups]; 0 for the most.
            most: of each group.
            capacity: of the room.
        """
        wanted = self.where(wanted > 0, wanted, self.words(most))
        one = self.minimum(wanted, 1)
        total, least = self.sum(wanted), self.sum(one)
        share = (wanted - one) * (capacity - least) // self.maximum(total - least, 1)
        return self.where(total > capacity, one + share, wanted), total

    def leaky_relu(self: Any, x: Tensor, slope: float) -> Tensor:
        """x where it is positive, `slope * x` elsewhere."""
        return self.where(x > 0, x, x * slope)

    def count(self: Any, flags: Tensor) -> Tensor:
        """How many of fewer than 2**24 flags are set along the last axis; int64."""
        return self.cast(self.sum(self.cast(flags, "float32"), -1), "int64")

    # -- packing -----------------------------------------------------------------------------
    #
    # Bit by bit: 32 codes of b bits are b words of 32 bits, word j holding bit j of each. So any
    # width packs without a code that straddles two words.

    def pack(self: Any, codes: Tensor, bits: int) -> Tensor:
        """Codes below 2**bits as words; int64 [32 m] to int64 [m * bits] below 2**32."""
        return self.reshape(self.bit_planes(self.reshape(codes, (-1, GROUP)), bits), (-1,))

    def unpack(self: Any, words: Tensor, bits: int) -> Tensor:
        """The inverse of `pack`."""
        return self.reshape(self.from_bit_planes(self.reshape(words, (-1, bits))), (-1,))

    def bit_planes(self: Any, groups: Tensor, bits: int) -> Tensor:
        """Bit j of the 32 codes of a group, as one word; [m, 32] to [m, bits]."""
        lanes = self.words([1 << lane for lane in range(GROUP)])
        planes = []
        for place in range(bits):
            bit = self.split_bits(groups, place)[0] % 2
            planes.append(self.reshape(self.sum(bit * lanes, -1), (-1, 1)))
        return self.concat(planes)

    def from_bit_planes(self: Any, planes: Tensor) -> Tensor:
        """The inverse of `bit_planes`; [m, bits] to [m, 32]."""
        lanes = self.arange(GROUP)
        codes = self.shift_right(planes[:, :1], lanes) % 2
        for place in range(1, planes.shape[1]):
            bit = self.shift_right(planes[:, place : place + 1], lanes) % 2
            codes = codes + bit * (1 << place)
        return codes

    def _packed(self: Any, codes: Tensor, bits: int) -> Tensor:
        return self.to_bytes(self.pack(codes, bits), "uint32")

    def weighted_sum(self: Any, data: Tensor) -> Tensor:
        """Sum of 32-bit words, each times 2 * place + 17, modulo 2**32; uint8 [..., n] to [...]."""
        words = self.from_bytes(data, "uint32")
        places = self.arange(self.length(words)) * 2 + 17
        return self.sum(words * places, -1) % (1 << 32)

    # -- framing -----------------------------------------------------------------------------
    #
    # A frame is some 32-bit words, a checksum of them and of the body, and the body.

    def frame(self: Any, values: Sequence[Any], finite: Any, parts: Sequence[Tensor]) -> Tensor:
        """Words, checksum and a body in parts (uint8, whole words) as uint8.

        The words are values below 2**32, and 1 unless something was finite, or else 0.
        """
        poisoned = int(not finite) if isinstance(finite, bool) else 1 - self.cast(finite, "int64")
        body = self.concat(parts) if len(parts) > 1 else parts[0]
        return self.framed(self.words((*values, poisoned)), body)

    def framed(self: Any, words: Tensor, body: Tensor) -> Tensor:
        """The same of int64 words."""
        checksum = self.reshape(self.checksum(words, body), (1,))
        return self.headed(self.to_bytes(self.concat((words, checksum)), "uint32"), body)

    def headed(self: Any, head: Tensor, body: Tensor) -> Tensor:
        """One after the other."""
        return self.concat((head, body))

    def examine(
        self: Any, frames: Tensor, count: int, fields: Sequence[Field], expected: Sequence[Any]
    ) -> tuple[Tensor, list[Tensor]]:
        """What frames say, and what is right about it.

        Args:
            frames: uint8 [rows, bytes].
            count: of the words of a frame.
            fields: places of numbers within the words.
            expected: the numbers, each an integer or a scalar.

        Returns:
            The words, int64 [rows, count]. And bool [rows], whether the checksum matches, and then
            for each field, whether its number is as expected.
        """
        front = self.from_bytes(frames[:, : 4 * (count + 1)], "uint32")
        words, numbers = front[:, :count], self.words(expected)
        held = [front[:, count] == self.checksum(words, frames[:, 4 * (count + 1) :])]
        for i, (word, low, bits) in enumerate(fields):
            held.append(words[:, word] // (1 << low) % (1 << bits) == numbers[i])
        return words, held

    def admit(
        self: Any,
        frames: Tensor,
        count: int,
        fields: Sequence[Field],
        expected: Sequence[Any],
        messages: Sequence[str],
        poisoned: tuple[str, type[Exception]],
        weighing: Weighing,
    ) -> Admitted:
        """Requires that frames are as `examine` expects them, and that their last word is 0.

        Args:
            frames, count, fields, expected: of `examine`.
            messages: for what is wrong, of each that `examine` looks at.
            poisoned: message and error where the last word is not 0.
            weighing: what else must hold.
        """
        words, held = self.examine(frames, count, fields, expected)
        intact = self.require(dict(zip(messages, held)))
        facts = [(poisoned, words[:, count - 1] == 0)]
        if weighing.vectors:
            sides = self._sides(frames[:, 4 * (count + 1) :], weighing)
            fits = self.summable(sides, weighing.weight, weighing.limit)
            facts.append((weighing.refused, fits))
        for (message, error), fact in facts:
            known = self.require({message: fact}, error)
            intact = None if known is None else intact & known
        return Admitted(words, intact)

    def _sides(self: Any, bodies: Tensor, weighing: Weighing) -> list[Tensor]:
        """The magnitudes that bodies begin with; float32 [rows, groups] each."""
        groups = weighing.groups
        if weighing.powers:
            return [
                self.bits_float((self.from_bytes(bodies[:, :groups], "int8") + 127) * (1 << 23))
            ]
        cuts = [4 * groups * vector for vector in range(weighing.vectors + 1)]
        return [self.from_bytes(bodies[:, a:b], "float32") for a, b in zip(cuts, cuts[1:])]

    def weigh(self: Any, weight: float, intact: Tensor) -> Tensor:
        """The weight where a rank's payload is intact, else 0; float32 [world]."""
        weights = self.full((intact.shape[0],), weight, "float32")
        return weights * self.cast(intact, "float32")

    def checked_sides(
        self: Any, sides: Sequence[Tensor], finite: Any
    ) -> tuple[Sequence[Tensor], Any]:
        """Side values, and whether these times 4 are finite and something else was.

        Zeros instead of all where that is known too late to leave them out. Donating.
        """
        healthy = self.finite(self.concat(sides) * 4.0)
        if not self.dynamic_shapes:
            sides = [self.where(healthy, side, 0.0) for side in sides]
        return sides, finite & healthy

    def summable(self: Any, sides: Sequence[Tensor], weight: float, limit: float) -> Tensor:
        """Whether `weight * sum over ranks of the largest |side|` of a group is beyond no limit.

        Args:
            sides: float32 [world, groups] each.
            weight: of all.
            limit: a number.

        Returns:
            bool [1].
        """
        most = self.abs(sides[0])
        for side in sides[1:]:
            most = self.maximum(most, self.abs(side))
        total = self.max(self.sum(self.cast(most, "float64"), 0)) * weight
        return self.reshape(total, (1,)) <= limit

    def checksum(self: Any, words: Tensor, body: Tensor) -> Tensor:
        """Of words, each times 2 * place + 1, and a body; or of rows of both."""
        weights = self.arange(self.length(words)) * 2 + 1
        return (self.sum(words * weights, -1) + self.weighted_sum(body)) % (1 << 32)

    # -- what is not finite ------------------------------------------------------------------

    def sound(self: Any, x: Tensor, how: str) -> tuple[Any, Tensor]:
        """Whether x is finite; and x, or zeros where that is known too late to leave it out.

        Donating where shapes are static.

        Args:
            x: float32 [size].
            how: "elements" asks for each; "squares" and "sum" for 4096 times their sum.
        """
        if how == "elements":
            finite = self.finite(x)
        else:
            total = self.inner(x, x) if how == "squares" else self.sum(x)
            finite = self.finite(total * 4096.0)
        return finite, x if self.dynamic_shapes else self.where(finite, x, 0.0)

    def sound_with(self: Any, gradient: Tensor, moment: Tensor) -> tuple[Any, Tensor, Tensor]:
        """`sound` of a gradient's squares and of the sum of its moment: of both, and each."""
        finite, gradient = self.sound(gradient, "squares")
        fine, moment = self.sound(moment, "sum")
        return finite & fine, gradient, moment

    # -- random numbers ----------------------------------------------------------------------
    #
    # Number i of a key is a hash of i and the key; there is no state besides the step, and the
    # user's random numbers are not touched. The hash is two rounds of a 32-bit finalizer
    # (xor-shift, multiply), one for each half of the key, in arithmetic that stays below 2**63.

    def key(self: Any, step: Any, salt: int) -> Tensor:
        """The key of a step; int64 [2] below 2**32. `salt` tells ranks, buckets and uses apart."""
        first = self.mix(self.xor(self.mix(self.words((step % (1 << 32),))), salt))
        return self.concat((first, self.mix(self.xor(first, 0x9E3779B9))))

    def uniform(self: Any, key: Tensor, count: Any) -> Tensor:
        """Numbers 0 to count - 1 of a key, multiples of 2**-24 in [0, 1); float32 [count]."""
        hashed = self.mix((self.arange(count) + key[:1]) % (1 << 32))
        hashed = self.mix(self.xor(hashed, key[1:]))
        return self.cast(self.split_bits(hashed, 8)[0], "float32") * 2.0**-24

    def mix(self: Any, x: Tensor) -> Tensor:
        """A bijection of [0, 2**32) that looks random."""
        for _ in range(2):
            x = self.xor(x, self.split_bits(x, 16)[0]) * _FACTOR % (1 << 32)
        return self.xor(x, self.split_bits(x, 16)[0])

    # -- sums --------------------------------------------------------------------------------

    def sum_of_rows(self: Any, x: Tensor) -> Tensor:
        """The sum of each row, float32 [rows, n] to [rows], the same to the bit everywhere.

        The order of a framework's own sum is its own affair, and rounding depends on it. Here rows
        are folded in halves, elementwise.
        """
        length = x.shape[-1]
        while length > 1:
            half = length // 2
            folded = x[:, :half] + x[:, half : 2 * half]
            if length % 2:
                first = folded[:, :1] + x[:, length - 1 : length]
                folded = first if half == 1 else self.concat((first, folded[:, 1:]))
            x, length = folded, half
        return self.reshape(x, (-1,))

    def peaks(self: Any, x: Tensor) -> Tensor:
        """The largest |x| of each row; float32 [rows, n] to [rows]."""
        return self.max(self.abs(x), -1)

    # -- layers ------------------------------------------------------------------------------

    def layer_histograms(self: Any, layout: Layout, x: Tensor, bins: int) -> Tensor:
        """How much of each layer lies in equal bins between its extremes; int64 [bins, layers].

        An element belongs to the last bin whose lower edge, `low + number * width`, it reaches.
        Padding is zero: it is taken out of the few blocks that have some, and of what was counted.
        """
        table, block, layers = self.table(layout, "layer_of_block"), layout.block, len(layout.names)
        last = layout.size // block - 1
        ends = [(o + size - 1) // block for o, size in zip(layout.offsets, layout.sizes)]
        used = [o + size - block * end for o, size, end in zip(layout.offsets, layout.sizes, ends)]
        if ends[-1] != last:  # the sink's own block
            ends, used = [*ends, last], [*used, 0]
        edge = self.reshape(self.words(ends), (-1, 1))
        elements = self.arange(block)
        own = elements < self.reshape(self.words(used), (-1, 1))

        rows = self.reshape(x, (-1, block))
        cut = self.gather(x, self.reshape(edge * block + elements, (-1,)))
        cut = self.reshape(cut, (-1, block))

        def largest(of_blocks: Tensor, items: Tensor) -> Tensor:
            """Of each layer; bits of a float32 order like integers, once their sign is folded."""
            of_ends = self.max(self.where(own, items, float("-inf")), -1)
            bits = self.float_bits(self.put(of_blocks, self.words(ends), of_ends))
            folded = self.where(bits >= 1 << 31, (1 << 32) - 1 - bits, bits + (1 << 31))
            top = self.segment_max(folded, table, layers)
            return self.bits_float(self.where(top >= 1 << 31, top - (1 << 31), (1 << 32) - 1 - top))

        high = largest(self.max(rows, -1), cut)
        low = 0.0 - largest(0.0 - self.min(rows, -1), 0.0 - cut)
        width = (high - low) / self.full((layers,), bins, "float32")
        sizes = self.words(layout.sizes)
        starts = [offset // block for offset in layout.offsets]
        padding = (
            self.words([block * (b - a) for a, b in zip(starts, [*starts[1:], last + 1])]) - sizes
        )
        above, counts = sizes, []
        for upper in range(1, bins):
            first = low + self.times(width, float(upper))  # of the bin
            flags = rows >= self.reshape(self.gather(first, table), (-1, 1))
            beyond = self.segment_sum(self.count(flags), table, layers)
            beyond = beyond - padding * self.cast(first <= 0.0, "int64")
            counts.append(above - beyond)
            above = beyond
        return self.stack([*counts, above])

    # -- codes for every element -------------------------------------------------------------

    def group_maxima(self: Any, bands: Bands, x: Tensor) -> Tensor:
        """The largest |x| of each group; float32 [groups]."""
        return self._joined([self.max(self.abs(rows), -1) for rows in self._rows(bands, x)])

    def group_squares(self: Any, bands: Bands, x: Tensor) -> Tensor:
        """The sum of squares of each group; float32 [groups]."""
        return self._joined([self.sum_of_rows(self.square(rows)) for rows in self._rows(bands, x)])

    def group_norms(self: Any, bands: Bands, x: Tensor) -> Tensor:
        """The root of the sum of squares of each group; float32 [groups]."""
        squares = self.cast(self.group_squares(bands, x), "float64")
        return self.cast(self.sqrt(squares), "float32")

    def clipped_maxima(self: Any, bands: Bands, x: Tensor, clip: float) -> Tensor:
        """The largest |x| of each group, at most `clip` root mean squares; float32 [groups]."""
        squares = self.cast(self.group_squares(bands, x), "float64")
        sigma = self.sqrt(squares / self.cast(self.words(bands.lengths), "float64"))
        bound = self.cast(sigma * clip, "float32")
        return self.minimum(self.group_maxima(bands, x), bound)

    def encode_levels(
        self: Any, bands: Bands, x: Tensor, scale: Tensor, bits: int, key: Tensor
    ) -> Tensor:
        """Rounds `|x| / scale` at random to one of `s = 2**(bits-1) - 1` levels and packs.

        A code is `s` plus or minus the level. Elements beyond the scale get the last level.

        Returns:
            Packed codes, uint8 [size * bits / 8].
        """
        levels = (1 << bits - 1) - 1
        used = scale >= _TINY
        inverse = self.where(used, levels / self.where(used, scale, 1.0), 0.0)
        noise = self.uniform(key, x.shape[0])

        def codes(band: Band, groups: slice) -> Tensor:
            rows, chance = (self._band(band, y) for y in (x, noise))
            height = self.scale(self.abs(rows), self.reshape(inverse[groups], (-1, 1)))
            level = self.minimum(self.cast(self.minimum(height + chance, levels), "int64"), levels)
            return self.where(rows < 0, levels - level, levels + level)

        return self._packed(self._fill(bands, x.shape[0], codes, "int64"), bits)

    def add_levels(
        self: Any,
        bands: Bands,
        base: Tensor | None,
        room: Tensor,
        packed: Tensor,
        scale: Tensor,
        bits: int,
        weights: Tensor,
    ) -> Tensor:
        """`base + sum over ranks of weight * level * scale / s`, for codes of `encode_levels`.

        Args:
            base: float32 [size]; None for zeros.
            room: where the result may be written; may be `base`. Donating.
            packed: uint8 [world, size * bits / 8].
            scale: float32 [world, groups].
            weights: float32 [world].
        """
        levels = (1 << bits - 1) - 1
        total = self.clear(room) if base is None else self.overwrite(room, base)
        for rank in range(packed.shape[0]):
            # A product: graphs turn a division by a constant into one, which rounds otherwise.
            unit = self.where(scale[rank] >= _TINY, scale[rank] * (1.0 / levels), 0.0)
            code = self.unpack(self.from_bytes(packed[rank], "uint32"), bits)

            def values(
                band: Band, groups: slice, unit: Tensor = unit, code: Tensor = code
            ) -> Tensor:
                level = self.cast(self._band(band, code) - levels, "float32")
                return self.scale(level, self.reshape(unit[groups], (-1, 1)))

            value = self._fill(bands, total.shape[0], values, "float32")
            total = self.accumulate(total, self.scale(value, weights[rank]))
        return total

    def encode_signs(self: Any, bands: Bands, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(mean of x >= 0, mean of x < 0) by group, 0 for the mean of nothing; and packed signs."""
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
        self: Any,
        bands: Bands,
        base: Tensor | None,
        room: Tensor,
        packed: Tensor,
        above: Tensor,
        below: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """`base + sum over ranks of weight * mean` of the element's side, for `encode_signs`.

        Arguments as for `add_levels`; above and below are float32 [world, groups]. Donating.
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

    def _joined(self: Any, pieces: list[Tensor]) -> Tensor:
        """One vector; a shard that is all padding has no pieces."""
        return self.concat(pieces) if pieces else self.zeros((0,))

    def _rows(self: Any, bands: Bands, x: Tensor) -> list[Tensor]:
        return [self._band(band, x) for band in bands.bands]

    def _band(self: Any, band: Band, x: Tensor) -> Tensor:
        return self.reshape(x[band.start : band.end], (band.rows, band.length))

    def _fill(
        self: Any, bands: Bands, size: int, values: Callable[[Band, slice], Tensor], dtype: str
    ) -> Tensor:
        """The vector whose bands are `values(band, groups)` [rows, length], and 0 elsewhere."""
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
