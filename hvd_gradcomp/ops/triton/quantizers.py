"""Kernels of the composite ops that quantize every element: QSGD, TernGrad, 1-bit SGD.

`ops.interface.quantization` defines each op; for a CPU they are in c/groups.c, c/levels.c and
c/signs.c. `ops.interface.bitpack` lists the twins of the formats. A group may be 32 elements or a
layer of millions, so groups are processed by *tasks*, stretches of one group that a program has at
once; the tasks depend on the bands alone. Sums are folded in halves, as in `Reduction.sum_of_rows`:
a task folds its input `LEVELS` times, and passes go on until each group is one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl

from hvd_gradcomp.core.row_groups import RowGroups
from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP
from hvd_gradcomp.ops.interface.quantization import FACTOR, TINY
from hvd_gradcomp.ops.triton.common import (
    Launcher,
    cut,
    float_of,
    from_words,
    magnitude_of,
    signed,
    to_words,
)

TILE = 2048
TASK = 4096  # elements of a group, per program
LEVELS, WIDE = 7, 32  # folds per pass, and sums per task


@triton.jit
def group_maxima(x, tasks, out, ONE: tl.constexpr, TASK: tl.constexpr):
    """Find the largest magnitude of a group, as bits; ONE means one task per group."""
    task = tasks + 3 * tl.program_id(0)
    start = tl.load(task)
    at = tl.arange(0, TASK)
    value = tl.load(x + start + at, mask=at < tl.load(task + 1), other=0.0)
    peaks = tl.max(magnitude_of(value))
    if ONE:
        tl.store(out + tl.load(task + 2), peaks)
    else:
        tl.atomic_max(out + tl.load(task + 2), peaks)


# -- sums ----------------------------------------------------------------------------------------


@triton.jit
def leaves(x, at, inside, HOW: tl.constexpr):
    """Load the summands, and -0 elsewhere, which changes no sum; return them and a note.

    The note is, for squares, the largest magnitude, as bits; else the number of negative values.
    """
    nothing = float_of((at * 0) | -0x80000000)
    value = tl.load(x + at, mask=inside, other=0.0)
    if HOW == "squares":
        noted = tl.max(magnitude_of(value))
        value = value * value
    else:
        noted = tl.sum((value < 0.0).to(tl.int32))
    if HOW == "above":
        value = tl.where(value < 0.0, 0.0, value)
    if HOW == "below":
        value = tl.where(value < 0.0, value, 0.0)
    return tl.where(inside, value, nothing), noted


@triton.jit
def both(one, other, HOW: tl.constexpr):
    """Combine the notes of two parts."""
    if HOW == "squares":
        return tl.maximum(one, other)
    else:
        return one + other


@triton.jit
def places_of(n, LEAVES: tl.constexpr, LEVELS: tl.constexpr):
    """Return the offsets from an element after so many folds to those that were added to it.

    Bit j of a leaf says whether fold j + 1 added it. Also return which leaves exist.
    """
    leaf = tl.arange(0, LEAVES)
    place = leaf * 0
    absent = leaf * 0
    for level in tl.static_range(LEVELS):
        bit = (leaf >> level) & 1
        place += bit * (n >> (level + 1))
        absent |= bit & ((n >> level) <= 1).to(tl.int32)
    return place, absent == 0


@triton.jit
def folded(x, first, n, HOW: tl.constexpr, LEVELS: tl.constexpr, WIDE: tl.constexpr):
    """Apply `LEVELS` folds to x [n]: WIDE elements of the result, from `first` on.

    Return their positions, the sums, which of them exist, and the note of `leaves`.
    """
    LEAVES: tl.constexpr = 1 << LEVELS
    place, exists = places_of(n, LEAVES, LEVELS)
    row = first + tl.arange(0, WIDE)
    left = tl.maximum(n >> LEVELS, 1)
    inside = (row < left)[:, None] & exists[None, :]
    total, noted = leaves(x, row[:, None] + place[None, :], inside, HOW)
    for level in tl.static_range(LEVELS):
        low, high = tl.split(tl.reshape(total, (WIDE, LEAVES >> (level + 1), 2)))
        total = low + high
        # An odd number leaves a last element, which is added to the first.
        before = n >> level
        odd = (before & 1) * ((before > 1).to(tl.int32) * (first == 0).to(tl.int32))
        spare, known = places_of(n, 1 << level, level)
        known = (known.to(tl.int32) * odd) != 0
        last, more = leaves(x, (before - 1 + spare)[None, :], known[None, :], HOW)
        noted = both(noted, more, HOW)
        for deep in tl.static_range(level):
            one, other = tl.split(tl.reshape(last, (1, 1 << (level - deep - 1), 2)))
            last = one + other
        takes_last = (row == 0)[:, None] & (tl.arange(0, LEAVES >> (level + 1)) == 0)[None, :]
        total = tl.where(takes_last & (odd != 0), total + last, total)
    return row, tl.reshape(total, (WIDE,)), row < left, noted


@triton.jit
def fold(tasks, x, out, peaks, HOW: tl.constexpr, LEVELS: tl.constexpr, WIDE: tl.constexpr):
    """Run a pass over a part of a group; a task has source, length, output, first row and group.

    The largest magnitude of the group goes to `peaks`, zeros before, unless that is None.
    """
    task = tasks + 5 * tl.program_id(0)
    source = x + tl.load(task)
    first, n = tl.load(task + 3), tl.load(task + 1)
    row, total, inside, noted = folded(source, first, n, HOW, LEVELS, WIDE)
    tl.store(out + tl.load(task + 2) + row, total, mask=inside)
    if peaks is not None:
        tl.atomic_max(peaks + tl.load(task + 4), noted)


@triton.jit
def norms(squares, peaks, lengths, out, groups, CLIP: tl.constexpr, TILE: tl.constexpr):
    """Compute roots of sums of squares; or clip `peaks` to CLIP root mean squares, and clear it."""
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = group < groups
    square = tl.load(squares + group, mask=inside, other=0.0).to(tl.float64)
    if peaks is None:
        size = tl.sqrt(square).to(tl.float32)
    else:
        length = tl.load(lengths + group, mask=inside, other=1).to(tl.float64)
        bound = tl.sqrt(square / length) * tl.full((), CLIP, tl.float64)
        largest = float_of(tl.load(peaks + group, mask=inside, other=0))
        size = tl.minimum(largest, bound.to(tl.float32))
        tl.debug_barrier()  # all threads have read before any of them clears
        tl.store(peaks + group, tl.zeros((TILE,), tl.int32), mask=inside)
    tl.store(out + group, size, mask=inside)


@triton.jit
def fold_sides(tasks, x, above, below, counts, LEVELS: tl.constexpr, WIDE: tl.constexpr):
    """Fold the non-negative and the negative elements; count the negative ones."""
    task = tasks + 5 * tl.program_id(0)
    source, n = x + tl.load(task), tl.load(task + 1)
    out, first = tl.load(task + 2), tl.load(task + 3)
    row, total, inside = folded(source, first, n, "above", LEVELS, WIDE)[:3]
    tl.store(above + out + row, total, mask=inside)
    row, total, inside, negative = folded(source, first, n, "below", LEVELS, WIDE)
    tl.store(below + out + row, total, mask=inside)
    tl.atomic_add(counts + tl.load(task + 4), negative)


@triton.jit
def fold_means(
    tasks, above0, below0, counts, lengths, above, below,
    LAST: tl.constexpr, LEVELS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Run a pass over both; the last one divides by the counts, and clears them."""
    task = tasks + 5 * tl.program_id(0)
    source, n = tl.load(task), tl.load(task + 1)
    out, first, group = tl.load(task + 2), tl.load(task + 3), tl.load(task + 4)
    row, up, inside = folded(above0 + source, first, n, "plain", LEVELS, WIDE)[:3]
    row, down, inside = folded(below0 + source, first, n, "plain", LEVELS, WIDE)[:3]
    if LAST:
        count = tl.load(counts + group)
        rest = tl.load(lengths + group) - count
        up = tl.div_rn(up, tl.maximum(row * 0 + rest, 1).to(tl.float32))
        down = tl.div_rn(down, tl.maximum(row * 0 + count, 1).to(tl.float32))
        tl.debug_barrier()  # all threads have read before any of them clears
        tl.store(counts + group, 0)
    tl.store(above + out + row, up, mask=inside)
    tl.store(below + out + row, down, mask=inside)


# -- codes ---------------------------------------------------------------------------------------


@triton.jit
def group_at(
    bands, band_of_word, tile, n, COUNT: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr
):
    """Return a tile's indices, their groups, and which have one; COUNT bands in rows of four."""
    at = tile * TILE + tl.arange(0, TILE)
    word = tile * (TILE // 32) + tl.arange(0, TILE // 32)
    first = tl.load(band_of_word + word, mask=word < n // 32, other=0)
    band = tl.reshape(tl.broadcast_to(first[:, None], (TILE // 32, 32)), (TILE,))
    for _ in tl.static_range(STEPS):
        band += ((at >= tl.load(bands + 4 * band + 1)) & (band < COUNT - 1)).to(tl.int32)
    start = tl.load(bands + 4 * band)
    inside = (at >= start) & (at < tl.load(bands + 4 * band + 1)) & (at < n)
    number = (at - start) // tl.load(bands + 4 * band + 2)
    return at, tl.where(inside, tl.load(bands + 4 * band + 3) + number, 0), inside


@triton.jit
def mix(x):
    """Compute `Quantization.mix`."""
    x = (x ^ (x >> 16)) * 0x45D9F3B
    x = (x ^ (x >> 16)) * 0x45D9F3B
    return x ^ (x >> 16)


@triton.jit
def uniform(number, first, second):
    """Compute `Quantization.uniform`: a key's multiples of 2**-24 at some numbers."""
    hashed = mix(number.to(tl.uint32) + first.to(tl.uint32))
    hashed = mix(hashed ^ second.to(tl.uint32))
    return (hashed >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit(do_not_specialize=["first", "second"])
def encode_levels(
    x, scale, bands, band_of_word, packed, n, tiles, first, second, tiny,
    NEAREST: tl.constexpr, BITS: tl.constexpr, COUNT: tl.constexpr, STEPS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Compute `Quantization.encode_levels`, with the key's halves as numbers."""
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
    piece = tl.program_id(0)
    for tile in range(piece * tiles, piece * tiles + tiles):
        at, group, inside = group_at(bands, band_of_word, tile, n, COUNT, STEPS, TILE)
        size = tl.load(scale + group, mask=inside, other=0.0)
        used = size >= tiny
        levels = tl.full((TILE,), TOP, tl.float32)
        inverse = tl.where(used, tl.div_rn(levels, tl.where(used, size, 1.0)), 0.0)
        value = tl.load(x + at, mask=at < n, other=0.0)
        height = tl.abs(value) * inverse
        if NEAREST:
            height += 0.5
        else:
            height += uniform(at, first, second)
        level = tl.minimum(tl.minimum(height, levels).to(tl.int32), TOP)
        code = tl.where(value < 0.0, TOP - level, TOP + level)
        code = tl.where(inside, code, 0)
        word = tile * (TILE // 32) + tl.arange(0, TILE // 32)
        for plane in tl.static_range(BITS):
            bit = to_words((code >> plane) & 1, TILE)
            tl.store(packed + word * BITS + plane, bit, mask=word < n // 32)


@triton.jit
def codes_of(packed, tile, n, BITS: tl.constexpr, TILE: tl.constexpr):
    """Return the codes of a tile."""
    word = tile * (TILE // 32) + tl.arange(0, TILE // 32)
    code = tl.zeros((TILE,), tl.int32)
    for plane in tl.static_range(BITS):
        bits = tl.load(packed + word * BITS + plane, mask=word < n // 32, other=0)
        code += from_words(bits, TILE) << plane
    return code


@triton.jit(do_not_specialize=["ranks", "packed_stride", "scale_stride"])
def add_levels(
    base, packed, scale, weights, bands, band_of_word, out, n, tiles, ranks, packed_stride,
    scale_stride, tiny, step,
    BITS: tl.constexpr, COUNT: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute `Quantization.add_levels`; step is `1 / levels`."""
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
    piece = tl.program_id(0)
    for tile in range(piece * tiles, piece * tiles + tiles):
        at, group, inside = group_at(bands, band_of_word, tile, n, COUNT, STEPS, TILE)
        total = tl.zeros((TILE,), tl.float32)
        if base is not None:
            total = tl.load(base + at, mask=at < n, other=0.0)
        for rank in range(0, ranks):
            code = codes_of(packed + rank * packed_stride.to(tl.int64), tile, n, BITS, TILE)
            theirs = scale + rank * scale_stride.to(tl.int64)
            size = tl.load(theirs + group, mask=inside, other=0.0)
            unit = tl.where(size >= tiny, size * step, 0.0)
            value = tl.where(inside, (code - TOP).to(tl.float32) * unit, 0.0)
            total = total + value * tl.load(weights + rank)
        tl.store(out + at, total, mask=at < n)


@triton.jit
def pack_signs(
    x, bands, band_of_word, packed, n, tiles,
    COUNT: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Pack a bit for each element, 1 if it is negative and in a group."""
    piece = tl.program_id(0)
    for tile in range(piece * tiles, piece * tiles + tiles):
        at, _, inside = group_at(bands, band_of_word, tile, n, COUNT, STEPS, TILE)
        value = tl.load(x + at, mask=inside, other=0.0)
        word = tile * (TILE // 32) + tl.arange(0, TILE // 32)
        tl.store(packed + word, to_words(value < 0.0, TILE), mask=word < n // 32)


@triton.jit(do_not_specialize=["ranks", "packed_stride", "side_stride"])
def add_signs(
    base, packed, above, below, weights, bands, band_of_word, out, n, tiles, ranks, packed_stride,
    side_stride, COUNT: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute `Quantization.add_signs`."""
    piece = tl.program_id(0)
    for tile in range(piece * tiles, piece * tiles + tiles):
        at, group, inside = group_at(bands, band_of_word, tile, n, COUNT, STEPS, TILE)
        total = tl.zeros((TILE,), tl.float32)
        if base is not None:
            total = tl.load(base + at, mask=at < n, other=0.0)
        for rank in range(0, ranks):
            code = codes_of(packed + rank * packed_stride.to(tl.int64), tile, n, 1, TILE)
            apart = rank * side_stride.to(tl.int64)
            high = tl.load(above + apart + group, mask=inside, other=0.0)
            low = tl.load(below + apart + group, mask=inside, other=0.0)
            value = tl.where(inside, tl.where(code > 0, low, high), 0.0)
            total = total + value * tl.load(weights + rank)
        tl.store(out + at, total, mask=at < n)


class Quantizers(Launcher):
    """Composite ops that `QuantizedCompressor` uses; arguments as in `Quantization`."""

    def group_maxima(self, bands: RowGroups, x: Tensor) -> Tensor:
        rows = tasks_of(bands)
        one = len(rows) == bands.groups
        if one:
            out = self.empty(bands.groups, torch.int32)
        else:
            out = torch.zeros(bands.groups, dtype=torch.int32, device=self.ops.device)
        if rows:
            tasks = self.table((bands, "tasks"), lambda: joined(rows))
            self.launch(group_maxima, len(rows), x, tasks, out, ONE=one, TASK=TASK)
        return out.view(torch.float32)

    def group_squares(self, bands: RowGroups, x: Tensor) -> Tensor:
        return self._sums_of(bands, x, "squares")

    def group_means(self, bands: RowGroups, x: Tensor) -> Tensor:
        return self._sums_of(bands, x, "plain") / self._lengths(bands).to(torch.float32)

    def group_norms(self, bands: RowGroups, x: Tensor) -> Tensor:
        return self._norms(bands, x, None)

    def clipped_maxima(self, bands: RowGroups, x: Tensor, clip: float) -> Tensor:
        return self._norms(bands, x, self.clean("peaks", bands.groups), clip)

    def _sums_of(
        self, bands: RowGroups, x: Tensor, how: str, peaks: Tensor | None = None
    ) -> Tensor:
        passes = folds_of(bands)
        last, tables = len(passes) - 1, self._folds(bands, passes)
        sums = [self._sums(number, size, number == last) for number, (_, size) in enumerate(passes)]
        for number, (table, source, into) in enumerate(zip(tables, (x, *sums), sums)):
            first = number == 0
            self._fold(
                fold, table, source, into, peaks if first else None, HOW=how if first else "plain"
            )
        return sums[-1] if sums else self.empty(0, torch.float32)

    def _norms(
        self, bands: RowGroups, x: Tensor, peaks: Tensor | None, clip: float = 0.0
    ) -> Tensor:
        groups = bands.groups
        lengths = None if peaks is None else self._lengths(bands)
        out = self.empty(groups, torch.float32)
        squares = self._sums_of(bands, x, "squares", peaks)
        if groups:
            programs = -(-groups // 1024)
            self.launch(norms, programs, squares, peaks, lengths, out, groups, CLIP=clip, TILE=1024)
        return out

    def encode_levels(
        self, bands: RowGroups, x: Tensor, scale: Tensor, bits: int, key: tuple[int, int] | None
    ) -> Tensor:
        pieces, tiles = cut(x.shape[0], TILE)
        packed = self.empty(x.shape[0] * bits // 8, torch.uint8)
        tables, how = self._bands(bands, x.shape[0])
        self.launch(
            encode_levels, pieces, x, scale, *tables, packed.view(torch.int32), x.shape[0], tiles,
            *map(signed, key or (0, 0)), TINY, NEAREST=key is None, BITS=bits, **how,
        )  # fmt: skip
        return packed

    def add_levels(
        self,
        bands: RowGroups,
        base: Tensor | None,
        out: Tensor,
        packed: Tensor,
        scale: Tensor,
        bits: int,
        weights: Tensor,
    ) -> Tensor:
        out = self.ops.writable(out)
        pieces, tiles = cut(out.shape[0], TILE)
        tables, how = self._bands(bands, out.shape[0])
        words = _words(packed)
        self.launch(
            add_levels, pieces, base, words, scale, weights, *tables, out, out.shape[0], tiles,
            packed.shape[0], words.stride(0), scale.stride(0), TINY, 1.0 / ((1 << bits - 1) - 1),
            BITS=bits, **how,
        )  # fmt: skip
        return out

    def encode_signs(self, bands: RowGroups, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pieces, tiles = cut(x.shape[0], TILE)
        packed = self.empty(x.shape[0] // 8, torch.uint8)
        out = [self.empty(bands.groups, torch.float32) for _ in (0, 1)]
        counts, lengths = self.clean("negative", bands.groups), self._lengths(bands)
        passes = folds_of(bands, 2)
        tables = self._folds(bands, passes)
        memories = [
            [self._sums((number, side), size, False) for side in (0, 1)]
            for number, (_, size) in enumerate(passes[:-1])
        ]
        tables_of_bands, how = self._bands(bands, x.shape[0])
        words = packed.view(torch.int32)
        self.launch(pack_signs, pieces, x, *tables_of_bands, words, x.shape[0], tiles, **how)
        sides: list[Tensor] = []
        for number, (table, into) in enumerate(zip(tables, [*memories, out])):
            if number:
                last = number == len(passes) - 1
                self._fold(fold_means, table, *sides, counts, lengths, *into, LAST=last)
            else:
                self._fold(fold_sides, table, x, *into, counts)
            sides = into
        return out[0], out[1], packed

    def add_signs(
        self,
        bands: RowGroups,
        base: Tensor | None,
        out: Tensor,
        packed: Tensor,
        above: Tensor,
        below: Tensor,
        weights: Tensor,
    ) -> Tensor:
        out = self.ops.writable(out)
        pieces, tiles = cut(out.shape[0], TILE)
        tables, how = self._bands(bands, out.shape[0])
        if above.stride(0) != below.stride(0):  # one may be a view of payloads, the other not
            above, below = above.contiguous(), below.contiguous()
        words = _words(packed)
        self.launch(
            add_signs, pieces, base, words, above, below, weights, *tables, out, out.shape[0],
            tiles, packed.shape[0], words.stride(0), above.stride(0), **how,
        )  # fmt: skip
        return out

    def _folds(
        self, bands: RowGroups, passes: Sequence[tuple[Any, int]]
    ) -> list[tuple[Tensor, int]]:
        """Return the tasks of each pass, and their number."""
        return [
            (self.table((bands, "folds", number), partial(joined, rows)), len(rows))
            for number, (rows, _) in enumerate(passes)
        ]

    def _fold(self, kernel: Any, table: tuple[Tensor, int], *args: Any, **how: Any) -> None:
        tasks, count = table
        self.launch(kernel, count, tasks, *args, LEVELS=LEVELS, WIDE=WIDE, **how)

    def _sums(self, number: Any, size: int, last: bool) -> Tensor:
        """Return memory for the results of a pass; new memory for the last one."""
        if last:
            return self.empty(size, torch.float32)
        return self.scratch(("sums", number), size, torch.float32)

    def _lengths(self, bands: RowGroups) -> Tensor:
        return self.table((bands, "lengths"), lambda: bands.lengths)

    def _bands(self, bands: RowGroups, size: int) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        rows, of_word, steps = map_of(bands, size)
        tables = (
            self.table((bands, "bands"), lambda: joined(rows)),
            self.table((bands, "words", size), lambda: of_word),
        )
        return tables, {"COUNT": len(rows), "STEPS": steps, "TILE": TILE}


@lru_cache(maxsize=256)
def tasks_of(bands: RowGroups) -> list[tuple[int, int, int]]:
    """Return (start, length, group) of each stretch of a group.

    >>> from hvd_gradcomp.core.row_groups import RowGroup
    >>> tasks_of(RowGroups((RowGroup(0, 1, 5000), RowGroup(5024, 2, 3))))
    [(0, 4096, 0), (4096, 904, 0), (5024, 3, 1), (5027, 3, 2)]
    """
    tasks: list[tuple[int, int, int]] = []
    group = 0
    for start, rows, length in bands.runs:
        for row in range(rows):
            first = start + row * length
            for at in range(0, length, TASK):
                tasks.append((first + at, min(TASK, length - at), group))
            group += 1
    return tasks


@lru_cache(maxsize=256)
def folds_of(bands: RowGroups, least: int = 1) -> list[tuple[list[tuple[int, ...]], int]]:
    """Return each pass's tasks and number of results; at least `least` passes."""
    groups = [
        (band.start + row * band.length, band.length)
        for band in bands.runs
        for row in range(band.rows)
    ]
    passes: list[tuple[list[tuple[int, ...]], int]] = []
    while groups and (len(passes) < least or any(length > 1 for _, length in groups)):
        rows: list[tuple[int, ...]] = []
        left: list[tuple[int, int]] = []
        end = 0
        for number, (start, length) in enumerate(groups):
            rest = max(length >> LEVELS, 1)
            rows += [(start, length, end, first, number) for first in range(0, rest, WIDE)]
            left.append((end, rest))
            end += rest
        passes.append((rows, end))
        groups = left
    return passes


@lru_cache(maxsize=256)
def map_of(bands: RowGroups, size: int) -> tuple[list[tuple[int, ...]], list[int], int]:
    """Return bands as (start, end, length, first group), and each word's first band.

    The third result is the largest number of further bands in a word.
    """
    rows: list[tuple[int, ...]] = []
    group = place = further = 0
    for band in bands.runs:
        rows.append((band.start, band.end, band.length, group))
        group += band.rows
    of_word = []
    for first in range(0, size, GROUP):
        while place + 1 < len(rows) and rows[place][1] <= first:
            place += 1
        of_word.append(place)
        last = place
        while last + 1 < len(rows) and rows[last][1] < first + GROUP:
            last += 1
        further = max(further, last - place)
    return rows or [(0, 0, 1, 0)], of_word, further


def joined(rows: Sequence[tuple[int, ...]]) -> list[int]:
    """Flatten the rows."""
    return [number for row in rows for number in row]


def _words(packed: Tensor) -> Tensor:
    """View rows of bytes as rows of words."""
    aligned = packed.stride(1) == 1 and packed.stride(0) % 4 == packed.storage_offset() % 4 == 0
    return (packed if aligned else packed.contiguous()).view(torch.int32)


assert FACTOR == 0x45D9F3B  # the constant in `mix`
