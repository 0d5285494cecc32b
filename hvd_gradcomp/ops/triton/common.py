"""Shared code of the kernels: launches, bits, checksums, non-finite values.

`ops.interface.bitpack` lists the twins of the formats.

A bucket is cut into at most `PIECES` pieces, one per program. A total over all pieces (the number
of selected elements, say) is written by piece, and a later launch that needs the sum adds it up
itself; or the last program of the launch does the remaining work. So no program waits for another,
and the order of float sums is fixed. Atomic operations are on integers alone, where order does not
matter. Their counters begin as zeros, which the step before has left there.

Rounding is that of the plain ops: no multiplication is fused with an addition, roots and quotients
are rounded to nearest, denormals are kept. Indices have 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.interface.header import ReductionSpec

PIECES = 512
SECTOR = 32  # bytes of a GPU's smallest memory access
MOST = (1 << 31) - (1 << 16)  # elements that 32-bit indices reach
HEAD = 8  # words before a body, the last of them the checksum; see `wire`
_TILE = 4096
_PARTS = 3  # maximum for a body
_WARPS = 8


class Launch(NamedTuple):
    """Record of one launch.

    Attributes:
        kernel: the kernel.
        args: its arguments.
        constants: its compile-time constants.
        warps: per program.
        moved: bytes that it reads and writes of its tensors.
    """

    kernel: Any
    args: tuple[Any, ...]
    constants: Mapping[str, Any]
    warps: int
    moved: int


def made_current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that makes a device the current GPU, which is where Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class KernelOps(Protocol):
    """Part of `TorchOps` that the kernels use."""

    device: torch.device

    def from_host(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor: ...

    def writable(self, x: Tensor) -> Tensor: ...

    def stage(self, x: Tensor) -> Tensor: ...

    def require_async(
        self, facts: Iterable[tuple[Sequence[str], Tensor, type[Exception]]]
    ) -> None: ...


class Launcher:
    """Base of the families.

    A method allocates all its memory before it launches anything: if an allocation failed between
    launches, memory that a later launch clears would stay as it is.

    Args:
        ops: the tensor ops, or any object that has their device.

    Attributes:
        seen: called with each `Launch`, if set.
    """

    seen: Callable[[Launch], None] | None = None

    def __init__(self, ops: KernelOps) -> None:
        self.ops = ops
        self._memory: dict[Any, Tensor] = {}

    def launch(
        self,
        kernel: Any,
        programs: int | tuple[int, ...],
        *args: Any,
        partly: Mapping[int, int] | None = None,
        warps: int = _WARPS,
        **constants: Any,
    ) -> None:
        """Run a kernel; with tensors that have no data only record it.

        Args:
            kernel: of this package.
            programs: their number, along each axis.
            args: its arguments. A tensor that is both read and written is passed twice.
            partly: bytes that are moved of a tensor, by its position, if that is not all of it.
            warps: per program.
            constants: its compile-time constants.
        """
        tensors = [(i, x) for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
        if Launcher.seen is not None:
            whole = {i: x.numel() * x.element_size() for i, x in tensors}
            moved = sum(min(size, (partly or {}).get(i, size)) for i, size in whole.items())
            Launcher.seen(Launch(kernel, args, constants, warps, moved))
        if tensors[0][1].device.type != "meta":
            grid = programs if isinstance(programs, tuple) else (programs,)
            with made_current(tensors[0][1].device):
                kernel[grid](*args, **constants, num_warps=warps, enable_fp_fusion=False)

    def scratch(self, key: Any, size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return reused memory, of any content."""
        memory = self._memory.get((key, dtype))
        if memory is None or memory.shape[0] < size:
            memory = self._memory[key, dtype] = self.empty(size, dtype)
        return memory[:size]

    def clean(self, key: Any, size: int) -> Tensor:
        """Return zeros, int32; kernels must leave zeros there as well."""
        memory = self._memory.get(("clean", key))
        if memory is None or memory.shape[0] < size:
            memory = torch.zeros(size, dtype=torch.int32, device=self.ops.device)
            self._memory["clean", key] = memory
        return memory[:size]

    def empty(self, size: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return new memory, which PyTorch's allocator caches."""
        return torch.empty(size, dtype=dtype, device=self.ops.device)

    def table(self, key: Any, values: Callable[[], Sequence[int]]) -> Tensor:
        """Return integers that depend on layouts alone; int32, cached."""
        if ("table", key) not in self._memory:
            self._memory["table", key] = self.ops.from_host(values(), torch.int32)
        return self._memory["table", key]


class Cut(NamedTuple):
    """Number of pieces, and of tiles in each."""

    pieces: int
    tiles: int


def cut(size: int, tile: int) -> Cut:
    """Cut a vector of `size` elements into at most `PIECES` pieces of whole tiles.

    >>> cut(10_000, 4096), cut(1 << 24, 4096)
    (Cut(pieces=3, tiles=1), Cut(pieces=512, tiles=8))
    """
    if size > MOST:
        raise ValueError(f"a bucket of {size} elements: kernels reach {MOST}; take smaller buckets")
    tiles = -(-size // tile)
    each = -(-tiles // PIECES)
    return Cut(-(-tiles // each), each)


# -- bits and positions --------------------------------------------------------------------------


@triton.jit
def bits_of(x):
    """Return the bits of float32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def magnitude_of(x):
    """Return the bits of float32 without the sign."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def float_of(bits):
    """Return the float32 of bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_words(flags, TILE: tl.constexpr):
    """Pack 32 flags into a word, the first in the lowest bit."""
    lanes = tl.arange(0, 32)
    rows = tl.reshape(flags.to(tl.int32), (TILE // 32, 32))
    return tl.sum(rows << lanes[None, :], axis=1)


@triton.jit
def from_words(words, TILE: tl.constexpr):
    """Invert `to_words`, to 0 and 1."""
    lanes = tl.arange(0, 32)
    return tl.reshape((words[:, None] >> lanes[None, :]) & 1, (TILE,))


@triton.jit
def is_last(arrived):
    """Return True if all other programs of this launch arrived before; leave 0 in the counter."""
    tl.debug_barrier()  # earlier work of this program's threads is done
    last = tl.atomic_add(arrived, 1) == tl.num_programs(0) * tl.num_programs(1) - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def before_and_all(counts, pieces, piece, PIECES: tl.constexpr):
    """Return the total count of the pieces before one, and of all."""
    number = tl.arange(0, PIECES)
    count = tl.load(counts + number, mask=number < pieces, other=0)
    return tl.sum(tl.where(number < piece, count, 0)), tl.sum(count)


@triton.jit
def first_from(words, count, mask_of_index, index, WIDE: tl.constexpr, ROUNDS: tl.constexpr):
    """Return the place of the first ascending word not below an index; in range for any words."""
    low = index * 0
    left = low + count
    number = tl.arange(0, WIDE)
    for _ in tl.static_range(ROUNDS):
        stride = tl.maximum((left + WIDE - 1) // WIDE, 1)
        place = number * stride + stride - 1
        known = place < left
        word = tl.load(words + low + place, mask=known, other=0)
        below = tl.sum((known & ((word & mask_of_index) < index)).to(tl.int32))
        low += below * stride
        left = tl.minimum(stride - 1, left - below * stride)
    return low


# -- non-finite values ---------------------------------------------------------------------------


@triton.jit
def measured(total, largest, value, HOW: tl.constexpr):
    """Add a value or its square to the total, or update the largest magnitude as bits."""
    if HOW == "squares":
        return total + value * value, largest
    elif HOW == "sum":
        return total + value, largest
    else:
        return total, tl.maximum(largest, magnitude_of(value))


@triton.jit
def clear_unless(holds, x, n, TILE: tl.constexpr):
    """Set x to 0 unless `holds`. One program does it: such a step is lost anyway."""
    if not holds:
        for first in range(0, n, TILE):
            at = first + tl.arange(0, TILE)
            tl.store(x + at, tl.zeros((TILE,), tl.float32), mask=at < n)


@triton.jit
def is_finite(partial, pieces, HOW: tl.constexpr, PIECES: tl.constexpr):
    """Return True if the pieces that `check_finite` has measured are finite together."""
    number = tl.arange(0, PIECES)
    value = tl.load(partial + number, mask=number < pieces, other=0.0, cache_modifier=".cg")
    if HOW == "elements":
        return tl.max(magnitude_of(value)) < 0x7F800000
    else:
        return magnitude_of(tl.sum(value) * 4096.0) < 0x7F800000


@triton.jit
def check_finite(
    x0, moment0, partial, arrived, x, moment, finite, n, pieces, tiles,
    HOW: tl.constexpr, TILE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Check x as `check_finite` does, and the sum of a moment; each becomes 0 if it is not finite.

    `partial` has by piece the sum of x, or of its squares, or the largest magnitude; behind these
    the sums of the moment. x0 is x, and moment0 is moment.
    """
    piece = tl.program_id(0)
    total = tl.zeros((TILE,), tl.float32)
    beside = tl.zeros((TILE,), tl.float32)
    largest = tl.zeros((TILE,), tl.int32)
    for tile in range(piece * tiles, piece * tiles + tiles):
        at = tile * TILE + tl.arange(0, TILE)
        value = tl.load(x0 + at, mask=at < n, other=0.0)
        total, largest = measured(total, largest, value, HOW)
        if moment is not None:
            beside += tl.load(moment0 + at, mask=at < n, other=0.0)
    if HOW == "elements":
        tl.store(partial + piece, float_of(tl.max(largest)))
    else:
        tl.store(partial + piece, tl.sum(total))
    if moment is not None:
        tl.store(partial + PIECES + piece, tl.sum(beside))
    if is_last(arrived):
        sound = is_finite(partial, pieces, HOW, PIECES)
        clear_unless(sound, x, n, TILE)
        if moment is not None:
            fine = is_finite(partial + PIECES, pieces, "sum", PIECES)
            clear_unless(fine, moment, n, TILE)
            sound = sound & fine
        tl.store(finite, sound)


# -- frames --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["end0", "end1", "end2", "w0", "w1", "w2", "w3", "w4", "w5"])
def write_frame(
    part0, part1, part2, out, sums, sent, wanted, finite, end0, end1, end2, tiles,
    w0, w1, w2, w3, w4, w5, TILE: tl.constexpr,
):  # fmt: skip
    """Write a frame: a head of words and the checksum of all, and a body in up to three parts.

    Args:
        sums: zeros: the checksum, and the number of programs that have arrived.
        end0, end1, end2: words before the end of each part.
        w0, w1, w2, w3, w4, w5: words of the host; `sent` and `wanted` replace the last two if they
            are on the device.
    """
    piece = tl.program_id(0)
    total = 0
    for tile in range(piece * tiles, piece * tiles + tiles):
        at = tile * TILE + tl.arange(0, TILE)
        word = tl.load(part0 + at, mask=at < end0, other=0)
        if part1 is not None:
            word |= tl.load(part1 + at - end0, mask=(at >= end0) & (at < end1), other=0)
        if part2 is not None:
            word |= tl.load(part2 + at - end1, mask=(at >= end1) & (at < end2), other=0)
        tl.store(out + 8 + at, word, mask=at < end2)
        total += tl.sum(word * (2 * at + 17))
    tl.atomic_add(sums, total)
    if is_last(sums + 1):
        total = tl.atomic_xchg(sums, 0)
        if sent is not None:
            w4 = tl.load(sent).to(tl.int32)
        if wanted is not None:
            w5 = tl.load(wanted).to(tl.int32)
        w6 = 0
        if finite is not None:
            w6 = 1 - tl.load(finite).to(tl.int32)
        place = tl.arange(0, 8)
        word = tl.where(place == 0, w0, 0)
        word = tl.where(place == 1, w1, word)
        word = tl.where(place == 2, w2, word)
        word = tl.where(place == 3, w3, word)
        word = tl.where(place == 4, w4, word)
        word = tl.where(place == 5, w5, word)
        word = tl.where(place == 6, w6, word)
        total += tl.sum(word * (2 * place + 1))
        tl.store(out + place, tl.where(place == 7, total, word))


@triton.jit
def sums_fit(
    sides, groups, stride, rows, weight,
    VECTORS: tl.constexpr, POWERS: tl.constexpr, LIMIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return True if no group's sum over rows of its largest side value exceeds the limit."""
    wrong = tl.zeros((TILE,), tl.int32)
    limit = tl.full((), LIMIT, tl.float64)
    for first in range(0, groups, TILE):
        at = first + tl.arange(0, TILE)
        inside = at < groups
        total = tl.zeros((TILE,), tl.float64)
        for row in range(0, rows):
            body = sides + row * stride.to(tl.int64)
            if POWERS:
                power = tl.load(body.to(tl.pointer_type(tl.int8)) + at, mask=inside, other=-127)
                size = tl.abs(float_of((power.to(tl.int32) + 127) << 23))
            else:
                size = tl.abs(float_of(tl.load(body + at, mask=inside, other=0)))
                if VECTORS == 2:
                    beside = tl.abs(float_of(tl.load(body + groups + at, mask=inside, other=0)))
                    size = tl.maximum(size, beside, propagate_nan=tl.PropagateNan.ALL)
            total += size.to(tl.float64)
        wrong |= 1 - (total * weight <= limit).to(tl.int32)
    return tl.max(wrong) == 0


@triton.jit
def validate_rows(
    frames, sums, words, needed, passed, intact, weights, stride, rows, groups,
    e0, e1, e2, e3, e4, e5, ROWS: tl.constexpr, VECTORS: tl.constexpr, POWERS: tl.constexpr,
    ASCENDING: tl.constexpr, WEIGHT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Check all rows, in the last program of `validate_headers`."""
    row = tl.arange(0, ROWS)
    inside = row < rows
    nothing = tl.zeros((ROWS,), tl.int32)
    start = frames + row * stride.to(tl.int64)
    place = tl.arange(0, 8)[None, :]
    word = tl.load(start[:, None] + place, mask=inside[:, None], other=0)
    total = tl.atomic_xchg(sums + row, nothing, mask=inside)
    total += tl.sum(tl.where(place < 7, word * (2 * place + 1), 0), axis=1)
    into = words + row[:, None] * 7 + place
    tl.store(into, word.to(tl.int64) & 0xFFFFFFFF, mask=inside[:, None] & (place < 7))
    wanted = tl.load(start + 5, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    tl.store(needed, tl.max(wanted))
    w0 = tl.load(start, mask=inside, other=0)
    h0 = tl.load(start + 7, mask=inside, other=0) == total
    h1 = (w0 & 0xFF) == e0
    h2 = ((w0 >> 8) & 0xFF) == e1
    h3 = ((w0 >> 16) & 0xFFFF) == e2
    h4 = tl.load(start + 1, mask=inside, other=0) == e3
    h5 = tl.load(start + 2, mask=inside, other=0) == e4
    h6 = tl.load(start + 3, mask=inside, other=0) == e5
    h7 = tl.load(start + 6, mask=inside, other=0) == 0
    h8 = inside
    if VECTORS > 0:
        weight = tl.full((), WEIGHT, tl.float64)
        h8 = inside & sums_fit(
            frames + 8, groups, stride, rows, weight, VECTORS, POWERS, LIMIT, 1024
        )
    h9 = inside
    if ASCENDING:
        h9 = tl.atomic_xchg(sums + ROWS + row, nothing, mask=inside) == 0
    tl.store(passed + row, h0, mask=inside)
    tl.store(passed + rows + row, h1, mask=inside)
    tl.store(passed + 2 * rows + row, h2, mask=inside)
    tl.store(passed + 3 * rows + row, h3, mask=inside)
    tl.store(passed + 4 * rows + row, h4, mask=inside)
    tl.store(passed + 5 * rows + row, h5, mask=inside)
    tl.store(passed + 6 * rows + row, h6, mask=inside)
    tl.store(passed + 7 * rows + row, h7, mask=inside)
    tl.store(passed + 8 * rows + row, h8, mask=inside)
    tl.store(passed + 9 * rows + row, h9, mask=inside)
    right = h0 & h1 & h2 & h3 & h4 & h5 & h6 & h7 & h8 & h9
    tl.store(intact + row, right, mask=inside)
    tl.store(weights + row, tl.where(right, WEIGHT, 0.0), mask=inside)


@triton.jit(
    do_not_specialize=[
        "n", "rows", "groups", "first", "count", "mask_of_index", "size",
        "e0", "e1", "e2", "e3", "e4", "e5",
    ]
)  # fmt: skip
def validate_headers(
    frames, sums, words, needed, passed, intact, weights, n, stride, rows, tiles, groups,
    first, count, mask_of_index, size, e0, e1, e2, e3, e4, e5,
    ROWS: tl.constexpr, VECTORS: tl.constexpr, POWERS: tl.constexpr, ASCENDING: tl.constexpr,
    WEIGHT: tl.constexpr, LIMIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Check frames as the op of this name does, with the fields of a payload's header in `wire`.

    Args:
        sums: zeros: each row's weighted sum, each row's number of words out of order, and the
            number of programs that have arrived.
        passed: bool [10, rows]: results of the checks.
        first, count, mask_of_index, size: of `ReductionSpec.ascending`.
    """
    row = tl.program_id(1)
    total = 0
    wrong = 0
    for tile in range(tl.program_id(0) * tiles, tl.program_id(0) * tiles + tiles):
        at = tile * TILE + tl.arange(0, TILE)
        body = frames + row * stride.to(tl.int64) + 8
        word = tl.load(body + at, mask=at < n, other=0)
        total += tl.sum(word * (2 * at + 17))
        if ASCENDING:
            inside = (at >= first) & (at < first + count)
            before = tl.load(body + at - 1, mask=inside & (at > first), other=0) & mask_of_index
            before = tl.where(at > first, before, -1)
            index = word & mask_of_index
            bad = (index >= size) | ((index <= before) & (index != size - 1))
            wrong += tl.sum((inside & bad).to(tl.int32))
    tl.atomic_add(sums + row, total)
    if ASCENDING:
        tl.atomic_add(sums + ROWS + row, wrong)
    if is_last(sums + 2 * ROWS):
        validate_rows(
            frames, sums, words, needed, passed, intact, weights, stride, rows, groups,
            e0, e1, e2, e3, e4, e5, ROWS, VECTORS, POWERS, ASCENDING, WEIGHT, LIMIT,
        )  # fmt: skip


# -- side values ---------------------------------------------------------------------------------


@triton.jit
def check_sides(one, other, finite, healthy, n, TILE: tl.constexpr):
    """Check that 4 times the side values are finite, and `finite`; bad sides become 0."""
    largest = tl.zeros((TILE,), tl.int32)
    for first in range(0, n, TILE):
        at = first + tl.arange(0, TILE)
        value = tl.load(one + at, mask=at < n, other=0.0)
        largest = tl.maximum(largest, magnitude_of(value * 4.0))
        if other is not None:
            value = tl.load(other + at, mask=at < n, other=0.0)
            largest = tl.maximum(largest, magnitude_of(value * 4.0))
    holds = tl.max(largest) < 0x7F800000
    tl.store(healthy, holds & (tl.load(finite) != 0))
    if not holds:
        for first in range(0, n, TILE):
            at = first + tl.arange(0, TILE)
            tl.store(one + at, tl.zeros((TILE,), tl.float32), mask=at < n)
            if other is not None:
                tl.store(other + at, tl.zeros((TILE,), tl.float32), mask=at < n)


class Common(Launcher):
    """Overrides of composite ops that all methods use; `ops.interface` has their contracts."""

    @staticmethod
    def split(results: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most elements that a rank wanted, and the checks' results, bool [10, rows]."""
        return results[:8].view(torch.int64)[0], results[8:].view(torch.bool).view(10, -1)

    def frame(self, values: Sequence[Any], finite: Any, parts: Sequence[Tensor]) -> Tensor:
        if len(parts) > _PARTS:
            parts = (torch.cat(tuple(parts)),)
        words = [part.view(torch.int32) for part in parts]
        ends, end = [], 0
        for part in words:
            end += part.shape[0]
            ends.append(end)
        more = _PARTS - len(words)
        out = self.empty(HEAD + end, torch.int32)
        known = [0 if isinstance(x, torch.Tensor) else signed(x) for x in values]
        on_device = [x if isinstance(x, torch.Tensor) else None for x in (*values[4:], finite)]
        pieces, tiles = cut(max(end, 1), _TILE)
        self.launch(
            write_frame, pieces, *words, *[None] * more, out, self.clean("frame", 2), *on_device,
            *ends, *[end] * more, tiles, *known, TILE=_TILE,
        )  # fmt: skip
        return out.view(torch.uint8)

    def validate_headers(
        self, frames: Tensor, expected: Sequence[int], spec: ReductionSpec
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the words, the input of `split`, bool [rows] for intact rows, and the weights."""
        rows, words = frames.shape[0], frames.view(torch.int32)
        size, stride = words.shape[1] - HEAD, words.stride(0)
        pieces, tiles = cut(max(size, 1), _TILE)
        padded = triton.next_power_of_2(rows)
        fields = self.empty((rows, HEAD - 1), torch.int64)
        results = self.empty(8 + 10 * rows, torch.uint8)
        intact, weights = self.empty((rows,), torch.bool), self.empty((rows,), torch.float32)
        self.launch(
            validate_headers, (pieces, rows), words, self.clean("headers", 2 * padded + 1), fields,
            *self.split(results), intact, weights, size, stride, rows, tiles, spec.groups,
            *(spec.ascending or (0, 0, 0, 0)), *map(signed, expected),
            ROWS=padded, VECTORS=spec.vectors, POWERS=spec.powers,
            ASCENDING=spec.ascending is not None, WEIGHT=spec.weight,
            LIMIT=spec.limit, TILE=_TILE,
        )  # fmt: skip
        return fields, results, intact, weights

    def checked_sides(self, sides: Sequence[Tensor], finite: Tensor) -> tuple[list[Tensor], Tensor]:
        healthy, other = self.empty((), torch.bool), sides[1] if len(sides) > 1 else None
        self.launch(check_sides, 1, sides[0], other, finite, healthy, sides[0].shape[0], TILE=_TILE)
        return list(sides), healthy

    def check_finite(self, x: Tensor, how: str, moment: Tensor | None = None) -> Tensor:
        """Return whether x and the moment are finite; each becomes 0 if it is not."""
        finite, size = self.empty((), torch.bool), x.shape[0]
        pieces, tiles = cut(size, _TILE)
        partial = self.scratch("partial", 2 * PIECES, torch.float32)
        arrived = self.clean("check_finite", 1)
        self.launch(
            check_finite, pieces, x, moment, partial, arrived, x, moment, finite, size, pieces,
            tiles, partly={4: 0, 5: 0}, HOW=how, TILE=_TILE, PIECES=PIECES,
        )  # fmt: skip
        return finite


def signed(word: int) -> int:
    """Return the same 32 bits as a signed integer."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)
