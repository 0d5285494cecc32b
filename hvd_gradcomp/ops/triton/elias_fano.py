"""Kernels of `Ops.encode_words` and `Ops.decode_words`, like c/elias_fano.c.

encode      splits words into planes of low bits, bits for the rest, and planes of codes
count_bits  counts the bits that are set in each tile of a body's bits
place_bits  turns the i-th bit that is set into the rest of the i-th index
join        puts indices together from rests and planes, above these the codes; checks the order
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP
from hvd_gradcomp.ops.triton.common import Launcher, from_words, to_words

SLOTS = 1024  # words, or bits, per program
NEAR = 256  # tiles whose counts are added together


@triton.jit
def copy_side(source, target, side, program, programs, SLOTS: tl.constexpr):
    """Copy the words before those that are coded."""
    for first in range(program * SLOTS, side, programs * SLOTS):
        at = first + tl.arange(0, SLOTS)
        word = tl.load(source + at, mask=at < side, other=0)
        tl.store(target + at, word, mask=at < side)


@triton.jit(do_not_specialize=["side", "count", "low", "width", "tiles"])
def encode(
    body, coded, side, count, low, width, tiles, BITS: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    """Encode a tile of words. The words of `coded` for the rests must be zeros."""
    tile = tl.program_id(0)
    copy_side(body, coded, side, tile, tiles, SLOTS)
    slot = tile * SLOTS + tl.arange(0, SLOTS)
    group = tile * (SLOTS // 32) + tl.arange(0, SLOTS // 32)
    groups = (count + 31) // 32
    word = tl.load(body + side + slot, mask=slot < count, other=0)
    index = word
    lows = coded + side
    highs = lows + groups * low
    if BITS > 0:
        index = word & ((1 << (32 - BITS)) - 1)
        planes = highs + (width + 31) // 32
        for bit in tl.static_range(BITS):
            code = to_words((word >> (32 - BITS + bit)) & 1, SLOTS)
            tl.store(planes + group * BITS + bit, code, mask=group < groups)
    for bit in range(0, low):
        last = to_words((index >> bit) & 1, SLOTS)
        tl.store(lows + group * low + bit, last, mask=group < groups)
    place = (index >> low) + slot
    tl.atomic_or(highs + (place >> 5), 1 << (place & 31), mask=(slot < count) & (place < width))


@triton.jit
def flags_of(highs, tile, width, SLOTS: tl.constexpr):
    """Return the bits of a tile, as 0 and 1."""
    word = tile * (SLOTS // 32) + tl.arange(0, SLOTS // 32)
    flags = from_words(tl.load(highs + word, mask=word * 32 < width, other=0), SLOTS)
    return tl.where(tile * SLOTS + tl.arange(0, SLOTS) < width, flags, 0)


@triton.jit(do_not_specialize=["start", "width", "tiles"])
def count_bits(bodies, counts, ascends, stride, start, width, tiles, SLOTS: tl.constexpr):
    """Count the bits of a tile that are set; set `ascends`, bool [ranks], to True.

    Args:
        start: word of a body where the bits begin.
        counts: by rank and tile.
    """
    rank, tile = tl.program_id(0), tl.program_id(1)
    flags = flags_of(bodies + rank * stride.to(tl.int64) + start, tile, width, SLOTS)
    tl.store(counts + rank * tiles + tile, tl.sum(flags))
    if tile == 0:
        tl.store(ascends + rank, 1)


@triton.jit(do_not_specialize=["start", "count", "width", "tiles"])
def place_bits(
    bodies, counts, rests, stride, start, count, width, tiles,
    SLOTS: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Store the rests, by rank and index; 0 for indices that have no bit."""
    rank, tile = tl.program_id(0), tl.program_id(1)
    rank_rests = rests + rank * count.to(tl.int64)
    before = 0
    for first in range(0, tile, NEAR):
        other = first + tl.arange(0, NEAR)
        before += tl.sum(tl.load(counts + rank * tiles + other, mask=other < tile, other=0))
    flags = flags_of(bodies + rank * stride.to(tl.int64) + start, tile, width, SLOTS)
    slot = before + tl.cumsum(flags) - 1
    place = tile * SLOTS + tl.arange(0, SLOTS)
    tl.store(rank_rests + slot, place - slot, mask=(flags != 0) & (slot < count))
    if tile == tiles - 1:
        for first in range(before + tl.sum(flags), count, SLOTS):
            at = first + tl.arange(0, SLOTS)
            tl.store(rank_rests + at, tl.zeros((SLOTS,), tl.int32), mask=at < count)


@triton.jit
def indices_of(rests, lows, slot, known, low, universe):
    """Return the indices in some slots, none beyond `universe`."""
    rest = tl.load(rests + slot, mask=known, other=0)
    index = slot * 0
    for bit in range(0, low):
        word = tl.load(lows + (slot >> 5) * low + bit, mask=known, other=0)
        index |= ((word >> (slot & 31)) & 1) << bit
    fits = rest <= (universe >> low)
    return tl.minimum(tl.where(fits, (rest << low) + index, universe), universe)


@triton.jit(do_not_specialize=["side", "count", "low", "width", "universe"])
def join(
    bodies, rests, words, ascends, stride, side, count, low, width, universe,
    BITS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write a tile of words; clear `ascends` if an index is not above the one before it."""
    rank, tile = tl.program_id(0), tl.program_id(1)
    body = bodies + rank * stride.to(tl.int64)
    out = words + rank * (side + count).to(tl.int64)
    rank_rests = rests + rank * count.to(tl.int64)
    copy_side(body, out, side, tile, tl.num_programs(1), SLOTS)
    slot = tile * SLOTS + tl.arange(0, SLOTS)
    inside, lows = slot < count, body + side
    index = indices_of(rank_rests, lows, slot, inside, low, universe)
    behind = inside & (slot > 0)
    before = indices_of(rank_rests, lows, slot - 1, behind, low, universe)
    wrong = behind & (index <= before) & (index != universe)
    if tl.max(wrong.to(tl.int32)) > 0:
        tl.store(ascends + rank, 0)
    if BITS > 0:
        planes = lows + (count + 31) // 32 * low + (width + 31) // 32
        for bit in tl.static_range(BITS):
            word = tl.load(planes + (slot >> 5) * BITS + bit, mask=inside, other=0)
            index |= ((word >> (slot & 31)) & 1) << (32 - BITS + bit)
    tl.store(out + side + slot, index, mask=inside)


class WordKernels(Launcher):
    """Kernels of words whose indices ascend; see `ops.interface.bitpack`."""

    def encode_words(
        self, body: Tensor, side: int, count: int, low: int, width: int, universe: int, bits: int
    ) -> Tensor:
        """Encode a body; see `BitPacking.encode_words`."""
        groups = -(-count // GROUP)
        words = side // 4 + groups * (low + bits) + -(-width // GROUP)
        coded = torch.zeros(words, dtype=torch.int32, device=self.ops.device)
        tiles = max(-(-count // SLOTS), 1)
        self.launch(
            encode, tiles, body.view(torch.int32), coded, side // 4, count, low, width, tiles,
            BITS=bits, SLOTS=SLOTS,
        )  # fmt: skip
        return coded.view(torch.uint8)

    def decode_words(
        self, bodies: Tensor, side: int, count: int, low: int, width: int, universe: int, bits: int
    ) -> tuple[Tensor, Tensor]:
        """Decode bodies; see `BitPacking.decode_words`."""
        ranks, before = bodies.shape[0], side // 4
        tiles, slots = max(-(-width // SLOTS), 1), max(-(-count // SLOTS), 1)
        counts = self.scratch("counts", ranks * tiles)
        rests = self.scratch("rests", ranks * count)
        words = self.empty((ranks, before + count), torch.int32)
        ascends = self.empty((ranks,), torch.bool)
        coded, start = bodies.view(torch.int32), before + -(-count // GROUP) * low
        stride = coded.stride(0)
        self.launch(
            count_bits, (ranks, tiles), coded, counts, ascends, stride, start, width, tiles,
            SLOTS=SLOTS,
        )  # fmt: skip
        self.launch(
            place_bits, (ranks, tiles), coded, counts, rests, stride, start, count, width, tiles,
            SLOTS=SLOTS, NEAR=NEAR,
        )  # fmt: skip
        self.launch(
            join, (ranks, slots), coded, rests, words, ascends, stride, before, count, low, width,
            universe,
            BITS=bits, SLOTS=SLOTS,
        )  # fmt: skip
        return words.view(torch.uint8), ascends
