"""Fused kernels of `codecs.topk`, like `ops.fused.TopKKernels` and c/topk.c.

    collect  accumulates the gradient; by group a histogram of the upper bits of magnitudes
    list_candidates
             finds the bin of the k-th, the elements there or beyond, a histogram of the bits below
    select   by group: the k-th to the last bit, ties in turn, the selected indices, ascending
    pack     writes the body, values and plain indices; clears what is sent in r
    check    checks the order of each rank's indices; finds the largest value of each rank's body
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
from hvd_gradcomp.ops.interface.header import BEYOND
from hvd_gradcomp.ops.kernel_params import Written
from hvd_gradcomp.ops.triton.common import (
    SECTOR,
    Launcher,
    cut,
    first_from,
    float_of,
    magnitude_of,
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


@triton.jit(do_not_specialize=["capacity", "cleared"])
def pack(
    chosen, number, r0, u, r, layer_of_block, body, per_layer, sent, clear, n, tiles, capacity,
    cleared,
    BITS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write a body, one tile of slots per program; clear what is sent in r, and in u unless None.

    Args:
        r0: r.
        per_layer: sent elements of each layer are added; likewise `sent`.
        clear: `cleared` numbers, set to zeros for the next step.
    """
    tile = tl.program_id(0)
    values = body.to(tl.pointer_type(tl.float32))
    for first in range(tile * SLOTS, cleared, tiles * SLOTS):
        at = first + tl.arange(0, SLOTS)
        tl.store(clear + at, tl.zeros((SLOTS,), tl.int32), mask=at < cleared)
    count = tl.minimum(tl.load(number), capacity)
    slot = tile * SLOTS + tl.arange(0, SLOTS)
    index = tl.load(chosen + slot, mask=slot < count, other=n - 1)
    tl.store(body + capacity + slot, index, mask=slot < capacity)
    goes = (index < n - 1) & (slot < capacity)
    value = tl.load(r0 + index, mask=goes, other=0.0)
    tl.store(values + slot, value, mask=slot < capacity)
    tl.debug_barrier()  # all threads have read before any of them clears
    tl.store(r + index, tl.zeros((SLOTS,), tl.float32), mask=goes)
    if u is not None:
        tl.store(u + index, tl.zeros((SLOTS,), tl.float32), mask=goes)
    # Indices ascend: most rows are of one layer.
    layer = tl.load(layer_of_block + (index >> BITS), mask=goes, other=0)
    layer = tl.reshape(layer, (SLOTS // 32, 32))
    going = tl.reshape(goes.to(tl.int32), (SLOTS // 32, 32))
    here = tl.sum(going, axis=1)
    highest = tl.max(tl.where(going != 0, layer, 0), axis=1)
    lowest = tl.min(tl.where(going != 0, layer, 0x7FFFFFFF), axis=1)
    tl.atomic_add(per_layer + highest, here.to(tl.int64), mask=(here > 0) & (highest == lowest))
    mixed = (going != 0) & (highest != lowest)[:, None]
    tl.atomic_add(per_layer + layer, going.to(tl.int64), mask=mixed)
    tl.atomic_add(sent, tl.sum(here).to(tl.int64))


@triton.jit(do_not_specialize=["capacity"])
def check(bodies, largest, ordered, n, stride, capacity, SLOTS: tl.constexpr):
    """Check the order of a rank's indices, and find the largest magnitude of its values.

    Args:
        bodies: of all ranks, `stride` words apart.
        ordered: whether a rank's indices ascend, within the bucket.
    """
    rank = tl.program_id(0)
    body = bodies + rank * stride.to(tl.int64)
    values, indices = body.to(tl.pointer_type(tl.float32)), body + capacity
    wrong = tl.zeros((SLOTS,), tl.int32)
    peak = tl.zeros((SLOTS,), tl.int32)
    for first in range(0, capacity, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        inside = slot < capacity
        value = tl.load(values + slot, mask=inside, other=0.0)
        peak = tl.maximum(peak, magnitude_of(value))
        at = tl.load(indices + slot, mask=inside, other=n - 1)
        last = tl.load(indices + slot - 1, mask=inside & (slot > 0), other=-1)
        wrong |= (inside & ((at < 0) | (at >= n))).to(tl.int32)
        wrong |= (inside & (at <= last) & (at != n - 1)).to(tl.int32)
    tl.store(ordered + rank, tl.max(wrong) == 0)
    tl.store(largest + rank, float_of(tl.max(peak)))


@triton.jit
def add_share(
    index, values, count, start, end, weight, out,
    NEAR: tl.constexpr, WIDE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Add the elements of a tile from so many ascending indices."""
    low = first_from(index, count, 0x7FFFFFFF, start, WIDE, ROUNDS)
    high = first_from(index, count, 0x7FFFFFFF, end, WIDE, ROUNDS)
    for place in range(low, high, NEAR):
        slot = place + tl.arange(0, NEAR)
        at = tl.load(index + slot, mask=slot < high, other=-1)
        inside = (slot < high) & (at >= start) & (at < end)
        value = tl.load(values + slot, mask=inside, other=0.0) * weight
        total = tl.load(out + at, mask=inside, other=0.0)
        tl.store(out + at, total + value, mask=inside)


@triton.jit(do_not_specialize=["capacity", "ranks"])
def add_chosen(
    bodies, weights, largest, ordered, fits, out, n, stride, capacity, ranks,
    LIMIT: tl.constexpr, TILE: tl.constexpr, NEAR: tl.constexpr, WIDE: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Set `out` to the sum of all ranks' elements times their weight, in rank order.

    A program has a tile of it.

    Args:
        ordered: ranks whose indices are in order; others add nothing.
        fits: whether no sum can overflow; if one can, nothing is added at all.
    """
    bound = tl.zeros((), tl.float64)
    for rank in range(0, ranks):
        weight = tl.abs(tl.load(weights + rank).to(tl.float64))
        bound += tl.where(weight > 0, tl.load(largest + rank).to(tl.float64) * weight, 0.0)
    holds = bound <= LIMIT
    if tl.program_id(0) == 0:
        tl.store(fits, holds)
    start = tl.program_id(0) * TILE
    end = tl.minimum(start + TILE, n - 1)  # before the sink
    tile = start + tl.arange(0, TILE)
    tl.store(out + tile, tl.zeros((TILE,), tl.float32), mask=tile < n)
    for rank in range(0, ranks):
        weight = tl.load(weights + rank)
        if holds & (tl.load(ordered + rank) != 0) & (weight != 0.0):
            body = bodies + rank * stride.to(tl.int64)
            values = body.to(tl.pointer_type(tl.float32))
            tl.debug_barrier()  # the writes of this program's other threads are visible
            add_share(
                body + capacity, values, capacity, start, end, weight, out, NEAR, WIDE, ROUNDS
            )


class TopKKernels(Launcher):
    """Kernels of the methods with a number of elements; see `ops.fused.TopKKernels`."""

    leads = False  # a leader chooses by plain ops
    looks = shares = removes = True
    checks = False

    def write(
        self,
        how: Collecting,
        scope: Scope,
        form: Form,
        step: int,
        quota: Tensor | None,
        limits: Sequence[int],
        hint: Tensor,
        memory: Sequence[Tensor],
        gradient: Tensor,
        before: Tensor,
        shares: bool = False,
    ) -> Written:
        """Encode a step; see `ops.fused`. With `shares`, quota is as in `Indexing.shares`."""
        layout, capacity = scope.layout, form.capacity
        size, layers, groups = layout.size, len(layout.names), scope.count
        tasks = self._tasks(scope)
        table = self.table(("limits", limits), lambda: limits)
        wanted, limit_table = (self.empty((), torch.int64), table) if shares else (None, None)
        quota = table if quota is None else quota
        r0, u0 = memory[0], memory[1] if how.momentum else None
        r, u = self.ops.writable(r0), None if u0 is None else self.ops.writable(u0)
        cleared = groups * (UPPER + LOWER + 1)
        counters = self.clean("counters", cleared)
        histogram, finer = counters[: groups * UPPER], counters[groups * UPPER : -groups]
        passing = counters[cleared - groups :]
        programs = tasks.shape[0] // 3
        candidates, listed = self.scratch("candidates", size), self.scratch("listed", size)
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
            list_candidates, programs, r, tasks, quota, limit_table, wanted, histogram, finer,
            candidates, counts, groups, capacity,
            partly={7: near}, BLOCK=layout.block, UPPER=UPPER, LOWER=LOWER, TILE=TILE,
        )  # fmt: skip
        self.launch(
            select, groups, r, tasks, bounds, quota, limit_table, histogram, passing,
            finer, candidates, counts, listed, starts, lies, chosen, number, groups, step, capacity,
            partly={0: 3 * capacity * SECTOR, 8: near, 10: 4 * near, 12: near},
            WHOLE=scope.whole, BITS=layout.block_bits, BLOCK=layout.block, UPPER=UPPER,
            LOWER=LOWER, ROWS=ROWS, COLUMNS=COLUMNS, TILE=TILE,
        )  # fmt: skip
        tiles = -(-capacity // SLOTS)
        apart = capacity * SECTOR
        self.launch(
            pack, tiles, chosen, number, r, u if how.masking else None, r, lies,
            body.view(torch.int32), per_layer, sent, counters, size, tiles, capacity, cleared,
            partly={2: apart, 3: apart, 4: apart, 5: 4 * capacity},
            BITS=layout.block_bits, SLOTS=SLOTS,
        )  # fmt: skip
        new_memory = [r] if u is None else [r, u]
        return Written(body, sent, wanted, per_layer, new_memory, hint=hint)

    def add(
        self,
        layout: Layout,
        form: Form,
        bodies: Tensor,
        weights: Tensor,
        out: Tensor,
        limit: float,
        beyond: str,
    ) -> Tensor:
        """Sum the bodies; see `ops.fused`. Demand `beyond` if the sum might exceed limit."""
        capacity, ranks = form.capacity, bodies.shape[0]
        out, words = self.ops.writable(out), bodies.view(torch.int32)
        largest = self.scratch("largest", ranks, torch.float32)
        facts = self.empty((ranks + 1,), torch.bool)
        ordered, fits = facts[:ranks], facts[ranks:]
        where = layout.size, words.stride(0), capacity
        self.launch(check, ranks, words, largest, ordered, *where, SLOTS=SLOTS)
        rounds = 1
        while WIDE**rounds < capacity:
            rounds += 1
        self.launch(
            add_chosen, -(-layout.size // ADDED), words, weights, largest, ordered, fits, out,
            *where, ranks,
            LIMIT=limit, TILE=ADDED, NEAR=NEAR, WIDE=WIDE, ROUNDS=rounds,
        )  # fmt: skip
        staged = self.ops.stage(facts)
        wrong = (BEYOND,), staged[None, :ranks], PayloadError
        self.ops.require_async([wrong, ((beyond,), staged[None, ranks:], NonFiniteGradientError)])
        return out

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
