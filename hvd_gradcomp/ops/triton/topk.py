"""Fused kernels of `codecs.topk`, like `ops.fused.TopKKernels` and c/topk.c.

    collect  accumulates the gradient; by group a histogram of the upper bits of magnitudes
    list_candidates
             finds the bin of the k-th, the elements there or beyond, a histogram of the bits below
    select   by group: the k-th to the last bit, ties in turn, the selected indices, ascending
    pack     writes the body: indices packed as in `codecs.indices`, values; clears these in r
    unpack   decodes the indices and the largest value of each rank's body
    add      adds up all bodies, tile by tile, and in each rank by rank

A group is a layer, or the model, and is cut into *tasks*, stretches of one program each. Two passes
over the bucket find the k largest, whatever their distribution; the rest processes candidates,
about twice as many as are sent, unless many are nearly equal.

Three things differ from C. No step starts where the last one looked: the hint stays as it is. A
body whose indices do not ascend, or point outside of the bucket, adds nothing, and `Ops.require`
raises as for other damage, and also if the sum would not be finite. And nothing is left to commit:
sent elements are cleared at once, since nothing fails on a GPU before the step is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from hvd_gradcomp.ops import NonFiniteGradientError, PayloadError, Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP
from hvd_gradcomp.ops.interface.header import BEYOND
from hvd_gradcomp.ops.kernel_params import Written
from hvd_gradcomp.ops.triton.common import (
    SECTOR,
    Launcher,
    cut,
    first_from,
    float_of,
    magnitude_of,
    to_words,
)
from hvd_gradcomp.ops.triton.threshold import ADDED, NEAR, WIDE

if TYPE_CHECKING:
    from hvd_gradcomp.core.layout import Layout
    from hvd_gradcomp.ops.kernel_params import Collecting, Form
    from hvd_gradcomp.ops.scope import Scope

TILE = 2048
UPPER, LOWER = 2048, 1024  # bins of the first digit of a magnitude, and of the next two
ROWS, COLUMNS = 64, 32  # tasks, and candidates of each, that a program moves together
SLOTS = 1024  # of a body, per program


@triton.jit
def all_wanted(quota, limits, groups, NEAR: tl.constexpr):
    """Return the number of wanted elements, and of groups that want any; 0 if `limits` is None."""
    every = tl.zeros((), tl.int64)
    some = tl.zeros((), tl.int64)
    if limits is not None:
        for first in range(0, groups, NEAR):
            group = first + tl.arange(0, NEAR)
            want = tl.load(quota + group, mask=group < groups, other=0)
            want = tl.where(want > 0, want, tl.load(limits + group, mask=group < groups, other=0))
            every += tl.sum(want)
            some += tl.sum(tl.minimum(want, 1))
    return every, some


@triton.jit
def quota_of(quota, limits, group, known, every, some, capacity):
    """Return the elements that a group sends: its quota, or with `limits` as in `Ops.shares`."""
    want = tl.load(quota + group, mask=known, other=0)
    if limits is not None:
        want = tl.where(want > 0, want, tl.load(limits + group, mask=known, other=0))
        one = tl.minimum(want, 1)
        share = one + (want - one) * (capacity - some) // tl.maximum(every - some, 1)
        want = tl.where(every > capacity, share, want)
    return want.to(tl.int32)


# -- search --------------------------------------------------------------------------------------


@triton.jit
def collect(
    r0, u0, gradient, r, u, tasks, histogram, passing, before, per_layer, sent, n, layers, momentum,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr, UPPER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute `u = momentum*u0 + g` and `r = r0 + u`, or `r = r0 + g`; fill the histograms.

    Args:
        tasks: of each its start and end, in blocks, and its group.
        histogram: of magnitudes, by group and bin; zeros before, and `passing` too.
        passing: number of nonzero elements of each group.
        before: elements sent of each layer so far; `per_layer` becomes a copy to add to.
        sent: becomes 0, to add to.
    """
    program = tl.program_id(0)
    if program == 0:
        for first in range(0, layers, TILE):
            layer = first + tl.arange(0, TILE)
            known = tl.load(before + layer, mask=layer < layers, other=0)
            tl.store(per_layer + layer, known, mask=layer < layers)
        tl.store(sent, tl.zeros((), tl.int64))
    start = tl.load(tasks + 3 * program) * BLOCK
    end = tl.load(tasks + 3 * program + 1) * BLOCK
    counts = tl.zeros((UPPER,), tl.int32)
    for first in range(start, end, TILE):
        at = first + tl.arange(0, TILE)
        inside = at < end
        g = tl.load(gradient + at, mask=inside, other=0.0)
        if u is not None:
            speed = tl.load(u0 + at, mask=inside, other=0.0) * momentum + g
            tl.store(u + at, tl.where(at == n - 1, 0.0, speed), mask=inside)
            g = speed * momentum + g if NESTEROV else speed
        element = tl.load(r0 + at, mask=inside, other=0.0) + g
        tl.store(r + at, tl.where(at == n - 1, 0.0, element), mask=inside)
        size = magnitude_of(element)
        counts += tl.histogram(size >> 20, UPPER, mask=inside & (size > 0))
    group = tl.load(tasks + 3 * program + 2)
    digit = tl.arange(0, UPPER)
    tl.atomic_add(histogram + group * UPPER + digit, counts, mask=counts > 0)
    tl.atomic_add(passing + group, tl.sum(counts))


@triton.jit
def nth(counts, rank, BINS: tl.constexpr):
    """Return the bin of the rank-th largest, its rank in that bin, and the number in that bin."""
    digit = tl.arange(0, BINS)
    beyond = tl.sum(counts) - tl.cumsum(counts)
    here = (beyond < rank) & (rank <= beyond + counts)
    bin = tl.sum(tl.where(here, digit, 0))
    return bin, rank - tl.sum(tl.where(here, beyond, 0)), tl.sum(tl.where(here, counts, 0))


@triton.jit
def digit_of(counts, group, rank, BINS: tl.constexpr):
    """Apply `nth` to a group's histogram."""
    return nth(tl.load(counts + group * BINS + tl.arange(0, BINS)), rank, BINS)


@triton.jit(do_not_specialize=["capacity"])
def list_candidates(
    r, tasks, quota, limits, wanted, histogram, finer, candidates, counts, groups, capacity,
    BLOCK: tl.constexpr, UPPER: tl.constexpr, LOWER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """List, from a task's start, the indices in the bin of the group's k-th and beyond; count them.

    If fewer than k are not zero, list all these. Add to `finer`, zeros before, a histogram of the
    next bits of those in the bin.

    Args:
        limits: of the quotas, if these have yet to share the capacity, else None.
        wanted: total that the groups want.
    """
    program = tl.program_id(0)
    start = tl.load(tasks + 3 * program) * BLOCK
    end = tl.load(tasks + 3 * program + 1) * BLOCK
    group = tl.load(tasks + 3 * program + 2)
    every, some = all_wanted(quota, limits, groups, 256)
    if limits is not None:
        tl.store(wanted, every, mask=program == 0)
    k = quota_of(quota, limits, group, group >= 0, every, some, capacity)
    bin = digit_of(histogram, group, k, UPPER)[0]
    least = tl.maximum(bin << 20, 1)
    lower = tl.zeros((LOWER,), tl.int32)
    count = 0
    for first in range(start, end, TILE):
        at = first + tl.arange(0, TILE)
        size = magnitude_of(tl.load(r + at, mask=at < end, other=0.0))
        near = ((size >= least) & (k > 0)).to(tl.int32)
        here = tl.sum(near)
        if here > 0:
            place = start + count + tl.cumsum(near) - 1
            tl.store(candidates + place, at, mask=near != 0)
            within = (near != 0) & ((size >> 20) == bin)
            lower += tl.histogram((size >> 10) & (LOWER - 1), LOWER, mask=within)
            count += here
    tl.store(counts + program, count)
    digit = tl.arange(0, LOWER)
    tl.atomic_add(finer + group * LOWER + digit, lower, mask=lower > 0)


# -- selection -----------------------------------------------------------------------------------


@triton.jit
def gathered(
    candidates, tasks, counts, first, last, into,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Concatenate the candidates of some tasks, and return their number."""
    total = 0
    for task in range(first, last, ROWS):
        row = task + tl.arange(0, ROWS)
        count = tl.load(counts + row, mask=row < last, other=0)
        start = tl.load(tasks + 3 * row, mask=row < last, other=0) * BLOCK
        place = total + tl.cumsum(count) - count
        for left in range(0, tl.max(count), COLUMNS):
            column = left + tl.arange(0, COLUMNS)
            inside = column[None, :] < count[:, None]
            index = tl.load(candidates + start[:, None] + column[None, :], mask=inside, other=0)
            tl.store(into + place[:, None] + column[None, :], index, mask=inside)
        total += tl.sum(count)
    return total


@triton.jit
def is_early(index, known, first, origin, starts, layer_of_block, WHOLE: tl.constexpr,
             BITS: tl.constexpr):  # fmt: skip
    """Return 1 if an element's number within its group is below `first`, else 0."""
    number = index - origin
    if WHOLE:
        layer = tl.load(layer_of_block + (index >> BITS), mask=known, other=0)
        number = index - tl.load(starts + layer, mask=known, other=0)
    return (known & (number < first)).to(tl.int32)


@triton.jit(do_not_specialize=["step", "capacity"])
def select(
    r, tasks, groups, quota, limits, histogram, passing, finer, candidates, counts, listed, starts,
    layer_of_block, chosen, number, count_of_groups, step, capacity,
    WHOLE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, UPPER: tl.constexpr,
    LOWER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the k largest of a group, ascending, behind those of the groups before it.

    Args:
        groups: of each its first task, the one after its last, its start, its elements.
        listed: concatenated candidates, from the start of a group on.
        starts: by layer the offset to subtract from an index for its number in the model.
        chosen: indices.
        number: total number of chosen elements.
    """
    group = tl.program_id(0)
    every, some = all_wanted(quota, limits, count_of_groups, 256)
    before = 0
    for first in range(0, group, 256):
        other = first + tl.arange(0, 256)
        known = other < group
        share = quota_of(quota, limits, other, known, every, some, capacity)
        nonzero = tl.load(passing + other, mask=known, other=0)
        before += tl.sum(tl.where(known, tl.minimum(share, nonzero), 0))
    k = quota_of(quota, limits, group, group >= 0, every, some, capacity)
    nonzero = tl.load(passing + group)
    if group == count_of_groups - 1:
        tl.store(number, before + tl.minimum(k, nonzero))
    origin = tl.load(groups + 4 * group + 2)
    of_group = listed + origin
    task, last_task = tl.load(groups + 4 * group), tl.load(groups + 4 * group + 1)
    total = gathered(candidates, tasks, counts, task, last_task, of_group, BLOCK, ROWS, COLUMNS)
    tl.debug_barrier()
    upper, rank, ties = digit_of(histogram, group, k, UPPER)
    middle, rank, ties = digit_of(finer, group, rank, LOWER)
    front = (upper << 10) | middle
    lower = tl.zeros((LOWER,), tl.int32)
    for first in range(0, total, TILE):
        place = first + tl.arange(0, TILE)
        index = tl.load(of_group + place, mask=place < total, other=0)
        size = magnitude_of(tl.load(r + index, mask=place < total, other=0.0))
        within = (place < total) & ((size >> 10) == front)
        lower += tl.histogram(size & (LOWER - 1), LOWER, mask=within)
    low, places, ties = nth(lower, rank, LOWER)
    # If at most k are not zero, all are chosen, and none of them ties with the last.
    last = tl.where(k < nonzero, (front << 10) | low, 0)
    from_ = (step.to(tl.int64) * k % tl.load(groups + 4 * group + 3)).to(tl.int32)
    earlies = 0
    if (ties <= places) | (k >= nonzero):
        places = total  # for all of them
        ties = 0
    else:
        for first in range(0, total, TILE):
            place = first + tl.arange(0, TILE)
            index = tl.load(of_group + place, mask=place < total, other=0)
            size = magnitude_of(tl.load(r + index, mask=place < total, other=0.0))
            tie = (place < total) & (size == last)
            earlies += tl.sum(
                is_early(index, tie, from_, origin, starts, layer_of_block, WHOLE, BITS)
            )
    seen = 0
    for first in range(0, total, TILE):
        place = first + tl.arange(0, TILE)
        index = tl.load(of_group + place, mask=place < total, other=0)
        size = magnitude_of(tl.load(r + index, mask=place < total, other=0.0))
        tie = (place < total) & (size == last)
        early = is_early(index, tie, from_, origin, starts, layer_of_block, WHOLE, BITS)
        turned = seen + tl.cumsum(tie.to(tl.int32)) - earlies + early * ties
        seen += tl.sum(tie.to(tl.int32))
        kept = ((place < total) & (size > last)) | (tie & (turned <= places))
        slot = before + tl.cumsum(kept.to(tl.int32)) - 1
        tl.store(chosen + slot, index, mask=kept & (slot < capacity))
        before += tl.sum(kept.to(tl.int32))


# -- bodies --------------------------------------------------------------------------------------


@triton.jit
def slots_of(chosen, slot, count, capacity, begin, n):
    """Return the index in a slot of a body; the list begins at `begin`, spare slots are sinks."""
    place = slot + begin
    place = tl.where(place >= capacity, place - capacity, place)
    used = (slot >= 0) & (slot < capacity) & (place < count)
    return tl.load(chosen + place, mask=used, other=n - 1)


@triton.jit
def steps_of(chosen, tile, count, capacity, begin, blocks, n, SLOTS: tl.constexpr):
    """Return a tile's slots, indices, steps from one index to the next, blocks and their widths."""
    slot = tile * SLOTS + tl.arange(0, SLOTS)
    index = slots_of(chosen, slot, count, capacity, begin, n)
    before = tl.where(slot == 0, 0, slots_of(chosen, slot - 1, count, capacity, begin, n))
    step = index - before
    step = tl.where(step < 0, step + n, step)
    most = tl.max(tl.reshape(step, (SLOTS // 32, 32)), axis=1)
    width = most * 0
    for bit in tl.static_range(31):
        width += (most >= (1 << bit)).to(tl.int32)
    block = tile * (SLOTS // 32) + tl.arange(0, SLOTS // 32)
    return slot, index, step, block, tl.where(block < blocks, width, 0)


@triton.jit
def parts_of(body, indices, deltas, values):
    """Return pointers to a body's block widths, packed words, plain indices and values."""
    widths = (body + indices).to(tl.pointer_type(tl.int8))
    return widths, body + deltas, body + indices, (body + values).to(tl.pointer_type(tl.float32))


@triton.jit(do_not_specialize=["capacity", "blocks", "room", "at_indices", "at_deltas",
                               "at_values", "begin", "cleared"])  # fmt: skip
def pack(
    chosen, number, r0, u, r, layer_of_block, body, per_layer, sent, clear, n, tiles, capacity,
    blocks, room, at_indices, at_deltas, at_values, begin, cleared,
    PACKED: tl.constexpr, BITS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write a body, one tile of slots per program; clear what is sent in r, and in u unless None.

    Args:
        r0: r.
        per_layer: sent elements of each layer are added; likewise `sent`.
        clear: `cleared` numbers, set to zeros for the next step.
        room: capacity of the `blocks` of packed indices, in words.
        begin: start of the list.
    """
    tile = tl.program_id(0)
    widths, deltas, indices, values = parts_of(body, at_indices, at_deltas, at_values)
    padded = 4 * (at_deltas - at_indices)
    for first in range(tile * SLOTS, cleared, tiles * SLOTS):
        at = first + tl.arange(0, SLOTS)
        tl.store(clear + at, tl.zeros((SLOTS,), tl.int32), mask=at < cleared)
    count = tl.minimum(tl.load(number), capacity)
    slot = tile * SLOTS + tl.arange(0, SLOTS)
    if PACKED:
        end = 0
        filled = 0
        for other in range(0, tile):
            width = steps_of(chosen, other, count, capacity, begin, blocks, n, SLOTS)[4]
            ends = end + tl.cumsum(width)
            filled = tl.maximum(filled, tl.max(tl.where(ends <= room, ends, 0)))
            end += tl.sum(width)
        slot, index, step, block, width = steps_of(
            chosen, tile, count, capacity, begin, blocks, n, SLOTS
        )
        ends = end + tl.cumsum(width)
        fits = ends <= room
        tl.store(widths + block, width.to(tl.int8), mask=block < padded)
        for plane in range(0, tl.max(width)):
            word = to_words((step >> plane) & 1, SLOTS)
            tl.store(deltas + ends - width + plane, word, mask=fits & (plane < width))
        if tile == tiles - 1:
            filled = tl.maximum(filled, tl.max(tl.where(fits, ends, 0)))
            for first in range(filled, room, SLOTS):
                at = first + tl.arange(0, SLOTS)
                tl.store(deltas + at, tl.zeros((SLOTS,), tl.int32), mask=at < room)
        has = tl.broadcast_to(fits.to(tl.int32)[:, None], (SLOTS // 32, 32))
        goes = (index < n - 1) & (tl.reshape(has, (SLOTS,)) != 0)
    else:
        index = slots_of(chosen, slot, count, capacity, 0, n)
        tl.store(indices + slot, index, mask=slot < capacity)
        goes = index < n - 1
    goes = goes & (slot < capacity)
    held = tl.load(r0 + index, mask=goes, other=0.0)
    tl.store(values + slot, held, mask=slot < capacity)
    tl.debug_barrier()  # all threads have read before any of them clears
    tl.store(r + index, tl.zeros((SLOTS,), tl.float32), mask=goes)
    if u is not None:
        tl.store(u + index, tl.zeros((SLOTS,), tl.float32), mask=goes)
    # Indices ascend: most rows are of one layer.
    layer = tl.load(layer_of_block + (index >> BITS), mask=goes, other=0)
    layer = tl.reshape(layer, (SLOTS // 32, 32))
    going = tl.reshape(goes.to(tl.int32), (SLOTS // 32, 32))
    here = tl.sum(going, axis=1)
    most = tl.max(tl.where(going != 0, layer, 0), axis=1)
    least = tl.min(tl.where(going != 0, layer, 0x7FFFFFFF), axis=1)
    tl.atomic_add(per_layer + most, here.to(tl.int64), mask=(here > 0) & (most == least))
    mixed = (going != 0) & (most != least)[:, None]
    tl.atomic_add(per_layer + layer, going.to(tl.int64), mask=mixed)
    tl.atomic_add(sent, tl.sum(here).to(tl.int64))


@triton.jit(do_not_specialize=["capacity", "blocks", "room", "at_indices", "at_deltas",
                               "at_values"])  # fmt: skip
def unpack(
    bodies, index, shares, largest, held, n, stride, capacity, blocks, room, at_indices, at_deltas,
    at_values, PACKED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Decode the indices of a rank's body, check their order, and find the largest magnitude.

    Args:
        bodies: of all ranks, `stride` words apart.
        index: likewise, `capacity` apart.
        shares: number of a rank's indices, and of those before the list wraps around.
    """
    rank = tl.program_id(0)
    body = bodies + rank * stride.to(tl.int64)
    widths, deltas, indices, values = parts_of(body, at_indices, at_deltas, at_values)
    wrong = tl.zeros((SLOTS,), tl.int32)
    most = tl.zeros((SLOTS,), tl.int32)
    end = 0
    reached = tl.zeros((), tl.int64)
    count = 0
    turned = 0
    for first in range(0, capacity, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        inside = slot < capacity
        value = tl.load(values + slot, mask=inside, other=0.0)
        most = tl.maximum(most, magnitude_of(value))
        if PACKED:
            block = first // 32 + tl.arange(0, SLOTS // 32)
            width = tl.load(widths + block, mask=block < blocks, other=0)
            width = width.to(tl.int32) & 255
            ends = end + tl.cumsum(width)
            fits = (block < blocks) & (ends <= room)
            step = tl.zeros((SLOTS // 32, 32), tl.int32)
            for plane in range(0, tl.minimum(tl.max(width), 31)):
                known = fits & (plane < width)
                word = tl.load(deltas + ends - width + plane, mask=known, other=0)
                step |= ((word[:, None] >> tl.arange(0, 32)[None, :]) & 1) << plane
            end = tl.minimum(end + tl.sum(width), room + 1)  # damaged bodies have any widths
            has = tl.broadcast_to(fits.to(tl.int32)[:, None], (SLOTS // 32, 32))
            inside = inside & (tl.reshape(has, (SLOTS,)) != 0)
            step = tl.reshape(step, (SLOTS,))
            far = reached + tl.cumsum(step.to(tl.int64))
            reached += tl.sum(step.to(tl.int64))
            again = far >= n
            wrong |= (inside & (far >= 2 * n.to(tl.int64))).to(tl.int32)
            at = tl.where(again, far - n, far).to(tl.int32)
            stays = (step == 0) & (slot > 0)
            wrong |= (inside & stays & (at != n - 1)).to(tl.int32)
            turned += tl.sum((inside & ~again).to(tl.int32))
        else:
            at = tl.load(indices + slot, mask=inside, other=n - 1)
            last = tl.load(indices + slot - 1, mask=inside & (slot > 0), other=-1)
            wrong |= (inside & ((at < 0) | (at >= n))).to(tl.int32)
            wrong |= (inside & (at <= last) & (at != n - 1)).to(tl.int32)
            turned += tl.sum(inside.to(tl.int32))
        tl.store(index + rank.to(tl.int64) * capacity + slot, at, mask=inside)
        count += tl.sum(inside.to(tl.int32))
    tl.store(shares + 2 * rank, count)
    tl.store(shares + 2 * rank + 1, turned)
    tl.store(held + rank, tl.max(wrong) == 0)
    tl.store(largest + rank, float_of(tl.max(most)))


@triton.jit
def add_share(
    index, values, first, last, start, end, weight, room,
    NEAR: tl.constexpr, WIDE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Add the elements of a tile from the ascending indices `first` to `last`."""
    count = last - first
    low = first + first_from(index + first, count, 0x7FFFFFFF, start, WIDE, ROUNDS)
    high = first + first_from(index + first, count, 0x7FFFFFFF, end, WIDE, ROUNDS)
    for place in range(low, high, NEAR):
        slot = place + tl.arange(0, NEAR)
        at = tl.load(index + slot, mask=slot < high, other=-1)
        inside = (slot < high) & (at >= start) & (at < end)
        value = tl.load(values + slot, mask=inside, other=0.0) * weight
        total = tl.load(room + at, mask=inside, other=0.0)
        tl.store(room + at, total + value, mask=inside)


@triton.jit(do_not_specialize=["capacity", "at_values", "ranks"])
def add_chosen(
    index, bodies, shares, weights, largest, held, fits, room, n, stride, capacity, at_values,
    ranks, LIMIT: tl.constexpr, TILE: tl.constexpr, NEAR: tl.constexpr, WIDE: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Set room to the sum of all ranks' elements times their weight, in rank order.

    A program has a tile of the room.

    Args:
        held: ranks whose indices are in order; others add nothing.
        fits: whether no sum can overflow; if one can, nothing is added at all.
    """
    values = (bodies + at_values).to(tl.pointer_type(tl.float32))
    most = tl.zeros((), tl.float64)
    for rank in range(0, ranks):
        weight = tl.abs(tl.load(weights + rank).to(tl.float64))
        most += tl.where(weight > 0, tl.load(largest + rank).to(tl.float64) * weight, 0.0)
    holds = most <= LIMIT
    if tl.program_id(0) == 0:
        tl.store(fits, holds)
    start = tl.program_id(0) * TILE
    end = tl.minimum(start + TILE, n - 1)  # before the sink
    tile = start + tl.arange(0, TILE)
    tl.store(room + tile, tl.zeros((TILE,), tl.float32), mask=tile < n)
    for rank in range(0, ranks):
        weight = tl.load(weights + rank)
        if holds & (tl.load(held + rank) != 0) & (weight != 0.0):
            own = index + rank * capacity.to(tl.int64)
            sent = values + rank * stride.to(tl.int64)
            count = tl.load(shares + 2 * rank)
            turned = tl.load(shares + 2 * rank + 1)
            tl.debug_barrier()  # the writes of this program's other threads are visible
            add_share(own, sent, 0, turned, start, end, weight, room, NEAR, WIDE, ROUNDS)
            tl.debug_barrier()
            add_share(own, sent, turned, count, start, end, weight, room, NEAR, WIDE, ROUNDS)


class TopKKernels(Launcher):
    """Kernels of the methods with a number of elements; see `ops.fused.TopKKernels`."""

    leads = False  # a leader chooses by plain ops
    looks = shares = removes = True

    def write(
        self,
        how: Collecting,
        scope: Scope,
        form: Form,
        step: int,
        quota: Tensor | None,
        most: Sequence[int],
        hint: Tensor,
        memory: Sequence[Tensor],
        gradient: Tensor,
        before: Tensor,
        shares: bool = False,
    ) -> Written:
        """Encode a step; see `ops.fused`. With `shares`, quota is as in `Indexing.shares`."""
        layout, places, capacity = scope.layout, form.places, form.capacity
        size, layers, groups = layout.size, len(layout.names), scope.count
        tasks = self._tasks(scope)
        table = self.table(("most", most), lambda: most)
        wanted, limits = (self.empty((), torch.int64), table) if shares else (None, None)
        quota = table if quota is None else quota
        r0, u0 = memory[0], memory[1] if how.momentum else None
        r, u = self.ops.writable(r0), None if u0 is None else self.ops.writable(u0)
        cleared = groups * (UPPER + LOWER + 1)
        room = self.clean("found", cleared)
        histogram, finer = room[: groups * UPPER], room[groups * UPPER : -groups]
        passing = room[cleared - groups :]
        programs = tasks.shape[0] // 3
        found, listed = self.scratch("found", size), self.scratch("listed", size)
        counts, chosen = self.scratch("counts", programs), self.scratch("chosen", capacity)
        number = self.scratch("number", 1)
        per_layer, sent = self.empty(layers, torch.int64), self.empty((), torch.int64)
        body = self.empty(form.size, torch.uint8)
        lies, starts = self.table((layout, "layer_of_block"), lambda: layout.layer_of_block), None
        if scope.whole:
            starts = self.table((layout, "starts"), scope.starts)
        bounds = self._groups(scope)
        self.launch(
            collect, programs, r0, u0, gradient, r, u, tasks, histogram, passing, before,
            per_layer, sent, size, layers, float(how.momentum),
            NESTEROV=how.nesterov, BLOCK=layout.block, UPPER=UPPER, TILE=TILE,
        )  # fmt: skip
        near = 4 * 3 * capacity  # bytes of the candidates, about three times as many
        self.launch(
            list_candidates, programs, r, tasks, quota, limits, wanted, histogram, finer, found,
            counts, groups, capacity,
            partly={7: near}, BLOCK=layout.block, UPPER=UPPER, LOWER=LOWER, TILE=TILE,
        )  # fmt: skip
        self.launch(
            select, groups, r, tasks, bounds, quota, limits, histogram, passing,
            finer, found, counts, listed, starts, lies, chosen, number, groups, step, capacity,
            partly={0: 3 * capacity * SECTOR, 8: near, 10: 4 * near, 12: near},
            WHOLE=scope.whole, BITS=layout.block_bits, BLOCK=layout.block, UPPER=UPPER,
            LOWER=LOWER, ROWS=ROWS, COLUMNS=COLUMNS, TILE=TILE,
        )  # fmt: skip
        packed = places.blocks > 0
        length = places.blocks * GROUP if packed else capacity
        begin = step % places.blocks * GROUP if packed else 0
        tiles = -(-length // SLOTS)
        apart = capacity * SECTOR
        self.launch(
            pack, tiles, chosen, number, r, u if how.masking else None, r, lies,
            body.view(torch.int32), per_layer, sent, room, size, tiles, capacity, places.blocks,
            places.room, *_words(form), begin, cleared,
            partly={2: apart, 3: apart, 4: apart, 5: 4 * capacity},
            PACKED=packed, BITS=layout.block_bits, SLOTS=SLOTS,
        )  # fmt: skip
        out = [r] if u is None else [r, u]
        return Written(body, sent, wanted, per_layer, out, hint=hint)

    def add(
        self,
        layout: Layout,
        form: Form,
        bodies: Tensor,
        weights: Tensor,
        room: Tensor,
        limit: float,
        beyond: str,
    ) -> Tensor:
        """Sum the bodies; see `ops.fused`. Demand `beyond` if the sum might exceed limit."""
        places, capacity, ranks = form.places, form.capacity, bodies.shape[0]
        room, words = self.ops.writable(room), bodies.view(torch.int32)
        index, shares = self.scratch("index", ranks * capacity), self.scratch("shares", 2 * ranks)
        largest = self.scratch("largest", ranks, torch.float32)
        facts = self.empty((ranks + 1,), torch.bool)
        held, fits = facts[:ranks], facts[ranks:]
        at_indices, at_deltas, at_values = _words(form)
        where = layout.size, words.stride(0), capacity
        self.launch(
            unpack, ranks, words, index, shares, largest, held, *where, places.blocks,
            places.room, at_indices, at_deltas, at_values, PACKED=places.blocks > 0, SLOTS=SLOTS,
        )  # fmt: skip
        rounds = 1
        while WIDE**rounds < capacity:
            rounds += 1
        self.launch(
            add_chosen, -(-layout.size // ADDED), index, words, shares, weights, largest, held,
            fits, room, *where, at_values, ranks,
            LIMIT=limit, TILE=ADDED, NEAR=NEAR, WIDE=WIDE, ROUNDS=rounds,
        )  # fmt: skip
        said = self.ops.stage(facts)
        wrong = (BEYOND,), said[None, :ranks], PayloadError
        self.ops.require_async([wrong, ((beyond,), said[None, ranks:], NonFiniteGradientError)])
        return room

    def _tasks(self, scope: Scope) -> Tensor:
        """Return for each task its start and end, in blocks, and its group."""
        return self.table((scope.layout, scope.whole, "tasks"), lambda: [*chain(*_cut(scope)[0])])

    def _groups(self, scope: Scope) -> Tensor:
        """Return for each group its first task, the one after its last, its start, its elements."""
        return self.table((scope.layout, scope.whole, "groups"), lambda: [*chain(*_cut(scope)[1])])


def _cut(scope: Scope) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the tasks and groups of a scope; padding after a layer belongs to that layer."""
    layout = scope.layout
    length = max(cut(layout.size, TILE).tiles * TILE // layout.block, 1)
    starts = [0] if scope.whole else layout.offsets
    tasks: list[tuple[int, ...]] = []
    groups: list[tuple[int, ...]] = []
    for group, (start, end) in enumerate(zip(starts, [*starts[1:], layout.size])):
        first, last, before = start // layout.block, end // layout.block, len(tasks)
        tasks += [(at, min(at + length, last), group) for at in range(first, last, length)]
        groups.append((before, len(tasks), start, max(scope.sizes[group], 1)))
    return tasks, groups


def _words(form: Form) -> tuple[int, ...]:
    """Return the word offsets of indices or widths, of packed differences, and of values."""
    return form.places.first // 4, form.places.deltas // 4, form.values // 4
