"""Fused kernels of `codecs.threshold`, like `ops.fused.ThresholdKernels` and c/threshold.c.

    find     accumulates the gradient; a bit for each wanted element, the largest by layer
    code     drops those that no code of powers can express, and counts
    write    writes words to their slots, decays what does not fit, fills spare slots with sinks
    places   replaces the last two at the dense level: a code for every element
    commit   removes the sent elements from the memory
    add      adds up words, tile by tile, and in each rank by rank; or places

Two things differ from C. `Common.validate_headers` has already found indices that point outside of
the bucket or do not ascend; `add` is safe with any index. And the sent elements, and their number,
stay on the device. `ops.interface.bitpack` lists the twins of the formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.kernel_params import Rule, Written
from hvd_gradcomp.ops.triton.common import (
    PIECES,
    SECTOR,
    Launcher,
    before_and_all,
    bits_of,
    cut,
    first_from,
    float_of,
    from_words,
    is_last,
    magnitude_of,
    to_words,
)

if TYPE_CHECKING:
    from hvd_gradcomp.core.layout import Layout
    from hvd_gradcomp.ops.kernel_params import CapacityLevel

TILE = 2048
ADDED = 8192  # elements of a sum, per program
NEAR = 256  # words that it reads at a time
WIDE = 128  # words that it reads at a time to find the first


@triton.jit
def find_words(
    r0, v0, gradient, moment, r, v, mask, counts, tops, layer_of_block, before, per_layer, numbers,
    n, tiles, layers, alpha, tau, zeta,
    AMBIGUITY: tl.constexpr, LARGE: tl.constexpr, POWERS: tl.constexpr, CORRECTS: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute `r = r0 + g`, `v = v0 + q` (`g*g` without moments), `v *= zeta`; flag the wanted.

    If the rule corrects v, v of wanted elements does not decay here.

    Args:
        mask: a bit for each element, 1 if wanted.
        counts: number of wanted elements in each piece.
        tops: the largest magnitude of a wanted element of each layer, as bits; zeros before.
        per_layer: elements sent of each layer before, to add to.
        numbers: become zeros, to add to.
    """
    piece = tl.program_id(0)
    if piece == 0:
        for first in range(0, layers, TILE):
            layer = first + tl.arange(0, TILE)
            sent = tl.load(before + layer, mask=layer < layers, other=0)
            tl.store(per_layer + layer, sent, mask=layer < layers)
        tl.store(numbers + tl.arange(0, 2), tl.zeros((2,), tl.int64))
    count = 0
    for tile in range(piece * tiles, piece * tiles + tiles):
        at = tile * TILE + tl.arange(0, TILE)
        inside = at < n
        g = tl.load(gradient + at, mask=inside, other=0.0)
        element = tl.load(r0 + at, mask=inside, other=0.0) + g
        tl.store(r + at, element, mask=inside)
        wanted = inside
        if LARGE:
            wanted = wanted & (tl.abs(element) > tau)
        if AMBIGUITY:
            q = g * g if moment is None else tl.load(moment + at, mask=inside, other=0.0)
            seen = tl.load(v0 + at, mask=inside, other=0.0) + q
            wanted = wanted & (element * element > seen * alpha)
            decayed = seen * zeta
            if CORRECTS:
                decayed = tl.where(wanted, seen, decayed)
            tl.store(v + at, decayed, mask=inside)
        word = tile * (TILE // 32) + tl.arange(0, TILE // 32)
        tl.store(mask + word, to_words(wanted, TILE), mask=word < n // 32)
        if POWERS:
            sizes = tl.where(wanted, magnitude_of(element), 0)
            peaks = tl.max(tl.reshape(sizes, (TILE // BLOCK, BLOCK)), axis=1)
            block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
            layer = tl.load(layer_of_block + block, mask=block < n // BLOCK, other=0)
            tl.atomic_max(tops + layer, peaks, mask=peaks > 0)
        count += tl.sum(wanted.to(tl.int32))
    tl.store(counts + piece, count)


@triton.jit
def ceilings_of(tops, layer_of_block, tile, n, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the layer of each block, and that layer's largest exponent."""
    block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    layer = tl.load(layer_of_block + block, mask=block < n // BLOCK, other=0)
    return layer, tl.minimum(tl.load(tops + layer) >> 23, 254)


@triton.jit
def spread(blocks, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Expand a value per block to one per element."""
    rows = tl.broadcast_to(blocks[:, None], (TILE // BLOCK, BLOCK))
    return tl.reshape(rows, (TILE,))


@triton.jit
def code_of(element, ceiling):
    """Return how far a value's exponent is below the ceiling, and whether that has a code."""
    nearest = (magnitude_of(element) + 0x400000) >> 23
    rounded = tl.minimum(nearest, ceiling)
    below = ceiling - rounded
    return below, (below <= 7) & (rounded > 0)


@triton.jit
def code_words(
    r, mask, kept, counts, tops, layer_of_block, n, tiles, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """Keep the wanted elements that a code can express, and count those of each piece."""
    piece = tl.program_id(0)
    count = 0
    for tile in range(piece * tiles, piece * tiles + tiles):
        word = tile * (TILE // 32) + tl.arange(0, TILE // 32)
        words = tl.load(mask + word, mask=word < n // 32, other=0)
        wanted = from_words(words, TILE) != 0
        at = tile * TILE + tl.arange(0, TILE)
        ceiling = ceilings_of(tops, layer_of_block, tile, n, BLOCK, TILE)[1]
        element = tl.load(r + at, mask=wanted, other=0.0)
        has = wanted & code_of(element, spread(ceiling, BLOCK, TILE))[1]
        tl.store(kept + word, to_words(has, TILE), mask=word < n // 32)
        count += tl.sum(has.to(tl.int32))
    tl.store(counts + piece, count)


@triton.jit(do_not_specialize=["step", "capacity"])
def write_words(
    r, v, v0, mask, counts, tops, arrived, layer_of_block, words, side, per_layer, numbers,
    n, pieces, tiles, layers, capacity, step, zeta,
    POWERS: tl.constexpr, CORRECTS: tl.constexpr, SIDE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Write a body of words: a window of neighbours if not all fit, the sink in spare slots.

    Args:
        v: of wanted elements that are not sent, decays here if the rule corrects it; v0 is v.
        tops: zeros after.
        side: the exponents, padded to `SIDE` bytes.
        per_layer: sent elements of each layer are added.
        numbers: how many are sent, and wanted; int64 [2].
    """
    piece = tl.program_id(0)
    before, wanted = before_and_all(counts, pieces, piece, PIECES)
    crowded = wanted > capacity
    start = (step.to(tl.int64) * capacity % tl.maximum(wanted, 1)).to(tl.int32)
    start = tl.where(crowded, start, 0)
    head = tl.where(crowded, tl.maximum(start + (capacity - wanted), 0), 0)
    sent = tl.minimum(wanted, capacity)
    for tile in range(piece * tiles, piece * tiles + tiles):
        word = tile * (TILE // 32) + tl.arange(0, TILE // 32)
        flags = from_words(tl.load(mask + word, mask=word < n // 32, other=0), TILE)
        at = tile * TILE + tl.arange(0, TILE)
        place = before + tl.cumsum(flags) - 1
        late = place >= start
        goes = (flags != 0) & ((place < head) | (late & (place - start < capacity)))
        slot = tl.where(late, place - start + head, place)
        element = tl.load(r + at, mask=goes, other=0.0)
        layer, ceiling = ceilings_of(tops, layer_of_block, tile, n, BLOCK, TILE)
        code = (bits_of(element) & -0x80000000) | at
        if POWERS:
            code |= (code_of(element, spread(ceiling, BLOCK, TILE))[0] & 7) << 28
        tl.store(words + slot, code, mask=goes)
        if CORRECTS:
            stays = (flags != 0) & ~goes
            seen = tl.load(v0 + at, mask=stays, other=0.0)
            tl.store(v + at, seen * zeta, mask=stays)
        here = tl.sum(tl.reshape(goes.to(tl.int32), (TILE // BLOCK, BLOCK)), axis=1)
        tl.atomic_add(per_layer + layer, here.to(tl.int64), mask=here > 0)
        before += tl.sum(flags)
    for first in range(sent + piece * TILE, capacity, pieces * TILE):
        slot = first + tl.arange(0, TILE)
        tl.store(words + slot, tl.zeros((TILE,), tl.int32) + (n - 1), mask=slot < capacity)
    if piece == 0:
        tl.store(numbers, sent.to(tl.int64))
        tl.store(numbers + 1, wanted.to(tl.int64))
        if POWERS:
            write_exponents(tops, side, layers, SIDE)
    if POWERS:
        clear_by_last(tops, arrived, layers, TILE)


@triton.jit
def clear_by_last(tops, arrived, layers, TILE: tl.constexpr):
    """Clear `tops` for the next step, in the last program to arrive."""
    if is_last(arrived):
        for first in range(0, layers, TILE):
            layer = first + tl.arange(0, TILE)
            tl.store(tops + layer, tl.zeros((TILE,), tl.int32), mask=layer < layers)


@triton.jit
def write_exponents(tops, side, layers, SIDE: tl.constexpr):
    """Write a byte for each layer, and padding."""
    for first in tl.static_range(0, SIDE, 1024):
        layer = first + tl.arange(0, 1024)
        top = tl.minimum(tl.load(tops + layer, mask=layer < layers, other=127 << 23) >> 23, 254)
        tl.store(side + layer, (top - 127).to(tl.int8), mask=layer < SIDE)


@triton.jit
def write_places(
    r, mask, tops, arrived, layer_of_block, places, side, per_layer, numbers, n, tiles, layers,
    POWERS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write a body of places: `code + 1` of wanted elements, else 0, in a byte or two bits each."""
    piece = tl.program_id(0)
    for tile in range(piece * tiles, piece * tiles + tiles):
        word = tile * (TILE // 32) + tl.arange(0, TILE // 32)
        goes = from_words(tl.load(mask + word, mask=word < n // 32, other=0), TILE) != 0
        at = tile * TILE + tl.arange(0, TILE)
        element = tl.load(r + at, mask=goes, other=0.0)
        layer, ceiling = ceilings_of(tops, layer_of_block, tile, n, BLOCK, TILE)
        negative = (bits_of(element) < 0).to(tl.int32)
        if POWERS:
            below, has = code_of(element, spread(ceiling, BLOCK, TILE))
            goes = goes & has
            tl.store(
                places + at, tl.where(goes, negative * 8 + below + 1, 0).to(tl.int8), mask=at < n
            )
        else:
            code = tl.reshape(tl.where(goes, negative + 1, 0), (TILE // 4, 4))
            four = tl.sum(code << (2 * tl.arange(0, 4))[None, :], axis=1)
            byte = tile * (TILE // 4) + tl.arange(0, TILE // 4)
            tl.store(places + byte, four.to(tl.int8), mask=byte < n // 4)
        here = tl.sum(tl.reshape(goes.to(tl.int32), (TILE // BLOCK, BLOCK)), axis=1)
        tl.atomic_add(per_layer + layer, here.to(tl.int64), mask=here > 0)
        tl.atomic_add(numbers, tl.sum(here).to(tl.int64))
    if POWERS:
        if piece == 0:
            write_exponents(tops, side, layers, SIDE)
        clear_by_last(tops, arrived, layers, TILE)


@triton.jit
def power_of(exponent, below, negative):
    """Return plus or minus a power of two."""
    power = tl.maximum(exponent + 127 - below, 0)
    return float_of((power << 23) | (negative << 31))


@triton.jit
def value_of(
    word, exponents, layer_of_block, inside, tau, POWERS: tl.constexpr, BITS: tl.constexpr
):
    """Return the value that a word encodes."""
    negative = (word >> 31) & 1
    if POWERS:
        layer = tl.load(layer_of_block + ((word & 0x0FFFFFFF) >> BITS), mask=inside, other=0)
        exponent = tl.load(exponents + layer, mask=inside, other=0).to(tl.int32)
        return power_of(exponent, (word >> 28) & 7, negative)
    return tl.where(negative != 0, -tau, tau) + tl.zeros_like(word).to(tl.float32)


@triton.jit
def commit_words(
    words, exponents, numbers, layer_of_block, r0, v0, r, v, tau, zeta, twice_tau,
    tau_squared, MASK: tl.constexpr, POWERS: tl.constexpr, SUBTRACTS: tl.constexpr,
    CORRECTS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Remove the elements sent as words from the memory; r0 is r, and v0 is v."""
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = slot < tl.load(numbers)
    word = tl.load(words + slot, mask=inside, other=0)
    at = word & MASK
    value = value_of(word, exponents, layer_of_block, inside, tau, POWERS, BITS)
    left = tl.zeros((TILE,), tl.float32)
    seen = tl.zeros((TILE,), tl.float32)
    if SUBTRACTS or CORRECTS:
        element = tl.load(r0 + at, mask=inside, other=0.0)
        if SUBTRACTS:
            left = element - value
        if CORRECTS:
            seen = tl.load(v0 + at, mask=inside, other=0.0) - tl.abs(element) * twice_tau
            seen = seen + tau_squared
            seen = tl.where(seen > 0.0, seen, 0.0) * zeta
        if not SUBTRACTS:
            tl.debug_barrier()  # all threads have read before any of them clears
    tl.store(r + at, left, mask=inside)
    if v is not None:
        tl.store(v + at, seen, mask=inside)


@triton.jit
def codes_at(places, tile, n, POWERS: tl.constexpr, TILE: tl.constexpr):
    """Return `code + 1` of the elements of a tile."""
    if POWERS:
        at = tile * TILE + tl.arange(0, TILE)
        return tl.load(places + at, mask=at < n, other=0).to(tl.int32) & 255
    byte = tile * (TILE // 4) + tl.arange(0, TILE // 4)
    four = tl.load(places + byte, mask=byte < n // 4, other=0).to(tl.int32)
    return tl.reshape((four[:, None] >> (2 * tl.arange(0, 4))[None, :]) & 3, (TILE,))


@triton.jit
def value_of_code(code, exponent, tau, POWERS: tl.constexpr):
    """Return the value that a nonzero `code + 1` encodes."""
    if POWERS:
        code = tl.maximum(code - 1, 0)
        return power_of(exponent, code & 7, code >> 3)
    return (3 - 2 * code).to(tl.float32) * tau


@triton.jit
def commit_places(
    places, exponents, layer_of_block, r0, v0, r, v, n, tiles, tau, zeta, twice_tau, tau_squared,
    POWERS: tl.constexpr, SUBTRACTS: tl.constexpr, CORRECTS: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Remove the elements sent as places from the memory; r0 is r, and v0 is v."""
    piece = tl.program_id(0)
    for tile in range(piece * tiles, piece * tiles + tiles):
        at = tile * TILE + tl.arange(0, TILE)
        inside = at < n
        code = codes_at(places, tile, n, POWERS, TILE)
        exponent = code
        if POWERS:
            block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
            layer = tl.load(layer_of_block + block, mask=block < n // BLOCK, other=0)
            exponent = spread(tl.load(exponents + layer).to(tl.int32), BLOCK, TILE)
        element = tl.load(r0 + at, mask=inside, other=0.0)
        left = tl.zeros((TILE,), tl.float32)
        if SUBTRACTS:
            left = element - value_of_code(code, exponent, tau, POWERS)
        tl.store(r + at, tl.where(code != 0, left, element), mask=inside)
        if v is not None:
            seen = tl.load(v0 + at, mask=inside, other=0.0)
            less = tl.zeros((TILE,), tl.float32)
            if CORRECTS:
                less = seen - tl.abs(element) * twice_tau
                less = less + tau_squared
                less = tl.where(less > 0.0, less, 0.0) * zeta
            tl.store(v + at, tl.where(code != 0, less, seen), mask=inside)


@triton.jit(do_not_specialize=["capacity", "ranks"])
def add_words(
    bodies, layer_of_block, weights, out, n, stride, side, capacity, ranks, tau,
    MASK: tl.constexpr, POWERS: tl.constexpr, BITS: tl.constexpr,
    TILE: tl.constexpr, NEAR: tl.constexpr, WIDE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Set `out` to the sum of all ranks' words times their weight, in rank order.

    A program has a tile of `out`, and finds the words of each rank that are in it.

    Args:
        bodies: of all ranks, `stride` words apart; words begin after `side` words.
        weights: 0 for ranks whose words are not in order.
    """
    start = tl.program_id(0) * TILE
    end = tl.minimum(start + TILE, n - 1)  # before the sink
    tile = start + tl.arange(0, TILE)
    tl.store(out + tile, tl.zeros((TILE,), tl.float32), mask=tile < n)
    for rank in range(0, ranks):
        tl.debug_barrier()  # the writes of this program's other threads are visible
        body = bodies + rank * stride.to(tl.int64)
        weight = tl.load(weights + rank)
        count = tl.where(weight != 0.0, capacity, 0)
        first = first_from(body + side, count, MASK, start, WIDE, ROUNDS)
        last = first_from(body + side, count, MASK, end, WIDE, ROUNDS)
        for slot in range(first, last, NEAR):
            place = slot + tl.arange(0, NEAR)
            word = tl.load(body + side + place, mask=place < last, other=-1)
            at = word & MASK
            inside = (place < last) & (at >= start) & (at < end)
            exponents = body.to(tl.pointer_type(tl.int8))
            value = value_of(word, exponents, layer_of_block, inside, tau, POWERS, BITS) * weight
            total = tl.load(out + at, mask=inside, other=0.0)
            tl.store(out + at, total + value, mask=inside)


@triton.jit(do_not_specialize=["ranks"])
def add_places(
    bodies, layer_of_block, weights, out, n, stride, side, tiles, ranks, tau,
    POWERS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Set `out` to the sum of all ranks' places; `stride` and `side` are in bytes."""
    piece = tl.program_id(0)
    for tile in range(piece * tiles, piece * tiles + tiles):
        at = tile * TILE + tl.arange(0, TILE)
        total = tl.zeros((TILE,), tl.float32)
        block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
        layer = tl.load(layer_of_block + block, mask=block < n // BLOCK, other=0)
        for rank in range(0, ranks):
            body = bodies + rank * stride.to(tl.int64)
            code = codes_at(body + side, tile, n, POWERS, TILE)
            exponent = code
            if POWERS:
                exponent = spread(tl.load(body + layer).to(tl.int32), BLOCK, TILE)
            value = value_of_code(code, exponent, tau, POWERS) * tl.load(weights + rank)
            total = total + tl.where(code != 0, value, 0.0)
        tl.store(out + at, tl.where(at == n - 1, 0.0, total), mask=at < n)


class ThresholdKernels(Launcher):
    """Kernels of threshold methods; see `ops.fused.ThresholdKernels`."""

    checks = False

    def write(
        self,
        rule: Rule,
        layout: Layout,
        level: CapacityLevel,
        step: int,
        memory: Sequence[Tensor],
        gradient: Tensor,
        moment: Tensor | None,
        before: Tensor,
    ) -> Written:
        size, layers, block = layout.size, len(layout.names), layout.block
        pieces, tiles = cut(size, TILE)
        r0, v0 = memory[0], memory[1] if rule.ambiguity else None
        r, v = self.ops.writable(r0), None if v0 is None else self.ops.writable(v0)
        table = self._layer_of_block(layout)
        per_layer, numbers = self.empty(layers, torch.int64), self.empty(2, torch.int64)
        tops, arrived = self.clean("tops", layers), self.clean("arrived", 1)
        mask, counts = self.scratch("mask", size // 32), self.scratch("counts", pieces)
        kept = self.scratch("kept", size // 32) if rule.powers and not level.dense else mask
        side = rule.side_bytes(layout)
        body = self.empty(rule.body_bytes(layout, level), torch.uint8)
        exponents, rest = body[:side].view(torch.int8), body[side:]
        self.launch(
            find_words, pieces, r0, v0, gradient, moment, r, v, mask, counts, tops, table, before,
            per_layer, numbers, size, tiles, layers, float(rule.alpha), float(rule.tau),
            float(rule.zeta),
            AMBIGUITY=rule.ambiguity, LARGE=rule.large, POWERS=rule.powers,
            CORRECTS=rule.corrects, BLOCK=block, TILE=TILE,
        )  # fmt: skip
        # Sent elements are scattered; at the dense level they may be all of r.
        apart = 4 * size if level.dense else level.capacity * SECTOR
        if level.dense:
            self.launch(
                write_places, pieces, r, mask, tops, arrived, table, rest.view(torch.int8),
                exponents, per_layer, numbers, size, tiles, layers,
                partly={0: apart}, POWERS=rule.powers, SIDE=side, BLOCK=block, TILE=TILE,
            )  # fmt: skip
            sent = wanted = numbers[0]
        else:
            if rule.powers:
                self.launch(
                    code_words, pieces, r, mask, kept, counts, tops, table, size, tiles,
                    partly={0: apart}, BLOCK=block, TILE=TILE,
                )  # fmt: skip
            decaying = (v, v) if rule.corrects else (None, None)
            self.launch(
                write_words, pieces, r, *decaying, kept, counts, tops, arrived, table,
                rest.view(torch.int32), exponents, per_layer, numbers, size, pieces, tiles, layers,
                level.capacity, step, float(rule.zeta), partly=dict.fromkeys((0, 1, 2), apart),
                POWERS=rule.powers, CORRECTS=rule.corrects, SIDE=side, BLOCK=block, TILE=TILE,
                PIECES=PIECES,
            )  # fmt: skip
            sent, wanted = numbers[0], numbers[1]

        def commit() -> None:
            memories = (r, v, r, v)
            tau, zeta = float(rule.tau), float(rule.zeta)
            how = tau, zeta, 2 * tau, tau * tau
            kind: dict[str, Any] = {
                "SUBTRACTS": rule.subtracts,
                "CORRECTS": rule.corrects,
                "POWERS": rule.powers,
            }
            if level.dense:
                self.launch(
                    commit_places, pieces, rest.view(torch.int8), exponents, table, *memories, size,
                    tiles, *how, **kind, BLOCK=block, TILE=TILE,
                )  # fmt: skip
                return
            partly = dict.fromkeys(range(3, 8), apart)
            self.launch(
                commit_words, -(-level.capacity // 1024), rest.view(torch.int32), exponents,
                numbers, table, *memories, *how, partly=partly, **kind, MASK=_mask(rule),
                BITS=layout.block_bits, TILE=1024,
            )  # fmt: skip

        out = [r] if v is None else [r, v]
        return Written(body, sent, wanted, per_layer, out, commit)

    def add(
        self,
        rule: Rule,
        layout: Layout,
        level: CapacityLevel,
        bodies: Tensor,
        weights: Tensor,
        out: Tensor,
    ) -> Tensor:
        out, ranks, size = self.ops.writable(out), bodies.shape[0], layout.size
        table, side = self._layer_of_block(layout), rule.side_bytes(layout)
        if level.dense:
            pieces, tiles = cut(size, TILE)
            self.launch(
                add_places, pieces, bodies.view(torch.int8), table, weights, out, size,
                bodies.stride(0), side, tiles, ranks, float(rule.tau),
                POWERS=rule.powers, BLOCK=layout.block, TILE=TILE,
            )  # fmt: skip
            return out
        words, rounds = bodies.view(torch.int32), 1
        while WIDE**rounds < level.capacity:
            rounds += 1
        self.launch(
            add_words, -(-size // ADDED), words, table, weights, out, size, words.stride(0),
            side // 4, level.capacity, ranks, float(rule.tau),
            MASK=_mask(rule), POWERS=rule.powers, BITS=layout.block_bits,
            TILE=ADDED, NEAR=NEAR, WIDE=WIDE, ROUNDS=rounds,
        )  # fmt: skip
        return out

    def _layer_of_block(self, layout: Layout) -> Tensor:
        cut(layout.size, TILE)
        return self.table((layout, "layer_of_block"), lambda: layout.layer_of_block)


def _mask(rule: Rule) -> int:
    """Return the bits of an index in a word."""
    return 0x0FFFFFFF if rule.powers else 0x7FFFFFFF
