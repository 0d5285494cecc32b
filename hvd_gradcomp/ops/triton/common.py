"""What kernels share: how they are launched, bits and places, checksums, what is not finite.

A bucket is cut into at most `PIECES` pieces, one a program. What all pieces add up to (how many
elements pass, say) is written by piece, and whoever needs the sum in a later launch adds it up
itself. So no launch waits within for another program, and what floats are added in no order that is
left to chance. Atomic operations are on integers alone, where order does not matter.

Rounding is that of the verbs: no multiplication is fused with an addition, roots and quotients are
rounded to nearest, denormals are kept. Indices have 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from hvd_gradcomp.ops import Tensor

if TYPE_CHECKING:
    from hvd_gradcomp.ops.torch import TorchOps

PIECES = 512
SECTOR = 32  # bytes that a GPU reads or writes at least
MOST = (1 << 31) - (1 << 16)  # elements that indices of 32 bits reach
HEAD = 8  # words before a body, the last of them the checksum; see `wire`
_TILE = 4096
_SHORT = 8 * _TILE  # words of a body that one program goes through
_WARPS = 8


class Launch(NamedTuple):
    """One launch.

    Attributes:
        kernel: what was launched.
        given: its arguments.
        constants: that it was compiled for.
        warps: of a program.
        moved: bytes that it reads and writes of the tensors that it is given.
    """

    kernel: Any
    given: tuple[Any, ...]
    constants: Mapping[str, Any]
    warps: int
    moved: int


class Launcher:
    """Base of the families.

    Args:
        ops: the verbs.

    Attributes:
        seen: called with each `Launch`, if anybody counts them.
    """

    seen: Callable[[Launch], None] | None = None

    def __init__(self, ops: TorchOps) -> None:
        self.ops = ops
        self._rooms: dict[Any, Tensor] = {}

    def launch(
        self,
        kernel: Any,
        programs: int | tuple[int, ...],
        *given: Any,
        partly: Mapping[int, int] | None = None,
        warps: int = _WARPS,
        **constants: Any,
    ) -> None:
        """Runs a kernel; with tensors that have no data it is only seen.

        Args:
            kernel: of this package.
            programs: how many, along each axis.
            given: its arguments. What is read and written is given twice.
            partly: bytes that are moved of a tensor, by its place, where that is not all of it.
            warps: of a program.
            constants: that it is compiled for.
        """
        tensors = [(i, x) for i, x in enumerate(given) if isinstance(x, torch.Tensor)]
        if Launcher.seen is not None:
            whole = {i: x.numel() * x.element_size() for i, x in tensors}
            moved = sum(min(size, (partly or {}).get(i, size)) for i, size in whole.items())
            Launcher.seen(Launch(kernel, given, constants, warps, moved))
        if tensors[0][1].device.type != "meta":
            grid = programs if isinstance(programs, tuple) else (programs,)
            kernel[grid](*given, **constants, num_warps=warps, enable_fp_fusion=False)

    def room(self, key: Any, size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Memory that is used again, of any content."""
        room = self._rooms.get((key, dtype))
        if room is None or room.shape[0] < size:
            room = self._rooms[key, dtype] = self.empty(size, dtype)
        return room[:size]

    def empty(self, size: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Fresh memory; PyTorch has some at hand."""
        return torch.empty(size, dtype=dtype, device=self.ops.device)

    def table(self, key: Any, values: Callable[[], Sequence[int]]) -> Tensor:
        """Integers that depend on layouts alone; int32."""
        if ("table", key) not in self._rooms:
            numbers = torch.tensor(values(), dtype=torch.int32, device="cpu")
            self._rooms["table", key] = numbers.to(self.ops.device)
        return self._rooms["table", key]


class Cut(NamedTuple):
    """Pieces of so many tiles each."""

    pieces: int
    tiles: int


def cut(size: int, tile: int) -> Cut:
    """A vector of so many elements in at most `PIECES` pieces of whole tiles.

    >>> cut(10_000, 4096), cut(1 << 24, 4096)
    (Cut(pieces=3, tiles=1), Cut(pieces=512, tiles=8))
    """
    if size > MOST:
        raise ValueError(f"a bucket of {size} elements: kernels reach {MOST}; take smaller buckets")
    tiles = -(-size // tile)
    each = -(-tiles // PIECES)
    return Cut(-(-tiles // each), each)


# -- bits and places -----------------------------------------------------------------------------


@triton.jit
def bits_of(x):
    """The bits of float32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def magnitude_of(x):
    """Those without the sign."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def float_of(bits):
    """The float32 of bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_words(flags, TILE: tl.constexpr):
    """32 flags a word, the first in the lowest bit."""
    lanes = tl.arange(0, 32)
    rows = tl.reshape(flags.to(tl.int32), (TILE // 32, 32))
    return tl.sum(rows << lanes[None, :], axis=1)


@triton.jit
def from_words(words, TILE: tl.constexpr):
    """The inverse of `to_words`, as 0 and 1."""
    lanes = tl.arange(0, 32)
    return tl.reshape((words[:, None] >> lanes[None, :]) & 1, (TILE,))


@triton.jit
def before_and_all(counts, pieces, piece, PIECES: tl.constexpr):
    """How many there are in the pieces before one, and in all."""
    number = tl.arange(0, PIECES)
    count = tl.load(counts + number, mask=number < pieces, other=0)
    return tl.sum(tl.where(number < piece, count, 0)), tl.sum(count)


@triton.jit
def first_from(words, count, mask_of_index, index, WIDE: tl.constexpr, ROUNDS: tl.constexpr):
    """The first of ascending words that does not lie before an index; in range for any words."""
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


# -- what is not finite --------------------------------------------------------------------------


@triton.jit
def survey(x, partial, n, tiles, HOW: tl.constexpr, TILE: tl.constexpr):
    """By piece the sum of x or of its squares, or the largest magnitude as bits; see `sound`."""
    piece = tl.program_id(0)
    total = tl.zeros((TILE,), tl.float32)
    most = tl.zeros((TILE,), tl.int32)
    for tile in range(piece * tiles, piece * tiles + tiles):
        at = tile * TILE + tl.arange(0, TILE)
        value = tl.load(x + at, mask=at < n, other=0.0)
        if HOW == "squares":
            total += value * value
        elif HOW == "sum":
            total += value
        else:
            most = tl.maximum(most, magnitude_of(value))
    if HOW == "elements":
        tl.store(partial + piece, float_of(tl.max(most)))
    else:
        tl.store(partial + piece, tl.sum(total))


@triton.jit
def clear_unless_finite(
    x,
    partial,
    finite,
    also,
    n,
    pieces,
    tiles,
    HOW: tl.constexpr,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Says what the survey has found, and `also`; sets x to 0 where it is not finite."""
    piece = tl.program_id(0)
    number = tl.arange(0, PIECES)
    found = tl.load(partial + number, mask=number < pieces, other=0.0)
    if HOW == "elements":
        holds = tl.max(magnitude_of(found)) < 0x7F800000
    else:
        holds = magnitude_of(tl.sum(found) * 4096.0) < 0x7F800000
    if piece == 0:
        said = holds
        if also is not None:
            said = said & (tl.load(also) != 0)
        tl.store(finite, said)
    if not holds:
        for tile in range(piece * tiles, piece * tiles + tiles):
            at = tile * TILE + tl.arange(0, TILE)
            tl.store(x + at, tl.zeros((TILE,), tl.float32), mask=at < n)


# -- frames --------------------------------------------------------------------------------------


@triton.jit
def add_up(words, n, tile, TILE: tl.constexpr):
    """A tile of words and its part of `Composites.weighted_sum`."""
    at = tile * TILE + tl.arange(0, TILE)
    word = tl.load(words + at, mask=at < n, other=0)
    return word, tl.sum(word * (2 * at + 17))


@triton.jit
def lay(body, out, n, first, last, TILE: tl.constexpr):
    """Tiles of a body, behind the head of a frame; their weighted sum."""
    total = 0
    for tile in range(first, last):
        word, part = add_up(body, n, tile, TILE)
        at = tile * TILE + tl.arange(0, TILE)
        tl.store(out + 8 + at, word, mask=at < n)
        total += part
    return total


@triton.jit
def lay_pieces(body, out, partial, n, tiles, TILE: tl.constexpr):
    """A long body, in pieces."""
    piece = tl.program_id(0)
    total = lay(body, out, n, piece * tiles, piece * tiles + tiles, TILE)
    tl.store(partial + piece, total)


@triton.jit(do_not_specialize=["n", "pieces", "w0", "w1", "w2", "w3", "w4", "w5"])
def frame(
    body, out, partial, sent, wanted, finite, n, pieces, w0, w1, w2, w3, w4, w5,
    PIECES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The head of a frame: words of the host, or of the device where there are some; checksum.

    A body that no launch before has laid there is laid there now.
    """
    if partial is None:
        total = lay(body, out, n, 0, (n + TILE - 1) // TILE, TILE)
    else:
        number = tl.arange(0, PIECES)
        total = tl.sum(tl.load(partial + number, mask=number < pieces, other=0))
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
def add_pieces(frames, partial, n, stride, tiles, TILE: tl.constexpr, PIECES: tl.constexpr):
    """By frame and piece the weighted sum of a long body."""
    piece = tl.program_id(0)
    row = tl.program_id(1)
    total = 0
    for tile in range(piece * tiles, piece * tiles + tiles):
        total += add_up(frames + row * stride.to(tl.int64) + 8, n, tile, TILE)[1]
    tl.store(partial + row * PIECES + piece, total)


@triton.jit(do_not_specialize=["n", "rows", "pieces", "e0", "e1", "e2", "e3", "e4", "e5"])
def look(
    frames, partial, words, needed, held, intact, n, stride, rows, pieces, e0, e1, e2, e3, e4, e5,
    PIECES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What `admit` says of a frame, for the fields of a payload's header in `wire`."""
    row = tl.program_id(0)
    if row == 0:
        most = tl.load(frames + 5).to(tl.int64) & 0xFFFFFFFF
        for other in range(1, rows):
            wanted = tl.load(frames + other * stride.to(tl.int64) + 5).to(tl.int64) & 0xFFFFFFFF
            most = tl.maximum(most, wanted)
        tl.store(needed, most)
    start = frames + row * stride.to(tl.int64)
    if partial is None:
        total = 0
        for tile in range(0, (n + TILE - 1) // TILE):
            total += add_up(start + 8, n, tile, TILE)[1]
    else:
        number = tl.arange(0, PIECES)
        total = tl.sum(tl.load(partial + row * PIECES + number, mask=number < pieces, other=0))
    place = tl.arange(0, 8)
    word = tl.load(start + place)
    total += tl.sum(tl.where(place < 7, word * (2 * place + 1), 0))
    tl.store(words + row * 7 + place, word.to(tl.int64) & 0xFFFFFFFF, mask=place < 7)
    w0 = tl.load(start)
    w6 = tl.load(start + 6)
    h0 = (tl.load(start + 7) == total).to(tl.int32)
    h1 = ((w0 & 0xFFFF) == e0).to(tl.int32)
    h2 = (((w0 >> 16) & 0xFF) == e1).to(tl.int32)
    h3 = (((w0 >> 24) & 0xFF) == e2).to(tl.int32)
    h4 = (tl.load(start + 1) == e3).to(tl.int32)
    h5 = (tl.load(start + 2) == e4).to(tl.int32)
    h6 = (tl.load(start + 3) == e5).to(tl.int32)
    h7 = (w6 == 0).to(tl.int32)
    tl.store(held + row, h0 != 0)
    tl.store(held + rows + row, h1 != 0)
    tl.store(held + 2 * rows + row, h2 != 0)
    tl.store(held + 3 * rows + row, h3 != 0)
    tl.store(held + 4 * rows + row, h4 != 0)
    tl.store(held + 5 * rows + row, h5 != 0)
    tl.store(held + 6 * rows + row, h6 != 0)
    tl.store(held + 7 * rows + row, h7 != 0)
    tl.store(intact + row, (h0 & h1 & h2 & h3 & h4 & h5 & h6 & h7) != 0)


# -- side values ---------------------------------------------------------------------------------


@triton.jit
def check_sides(one, other, finite, healthy, n, TILE: tl.constexpr):
    """Whether four times a side value is finite, and the gradient was; if not they become 0."""
    most = tl.zeros((TILE,), tl.int32)
    for first in range(0, n, TILE):
        at = first + tl.arange(0, TILE)
        value = tl.load(one + at, mask=at < n, other=0.0)
        most = tl.maximum(most, magnitude_of(value * 4.0))
        if other is not None:
            value = tl.load(other + at, mask=at < n, other=0.0)
            most = tl.maximum(most, magnitude_of(value * 4.0))
    holds = tl.max(most) < 0x7F800000
    tl.store(healthy, holds & (tl.load(finite) != 0))
    if not holds:
        for first in range(0, n, TILE):
            at = first + tl.arange(0, TILE)
            tl.store(one + at, tl.zeros((TILE,), tl.float32), mask=at < n)
            if other is not None:
                tl.store(other + at, tl.zeros((TILE,), tl.float32), mask=at < n)


@triton.jit(do_not_specialize=["ranks"])
def summable(
    one, other, fits, n, ranks, stride,
    WEIGHT: tl.constexpr, LIMIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Whether the largest sum over ranks of a group's side values stays below the limit."""
    most = tl.zeros((TILE,), tl.float64)
    for first in range(0, n, TILE):
        at = first + tl.arange(0, TILE)
        total = tl.zeros((TILE,), tl.float64)
        for rank in range(0, ranks):
            size = tl.abs(tl.load(one + rank * stride + at, mask=at < n, other=0.0))
            if other is not None:
                beside = tl.abs(tl.load(other + rank * stride + at, mask=at < n, other=0.0))
                size = tl.maximum(size, beside)
            total += size.to(tl.float64)
        most = tl.maximum(most, total)
    tl.store(fits, tl.max(most) * WEIGHT <= LIMIT)


class Common(Launcher):
    """Shadows of composites that all methods use; see `ops.composites` for what they do."""

    @staticmethod
    def split(said: Tensor) -> tuple[Tensor, Tensor]:
        """The most elements that a rank wanted; what is right, bool [HEAD, rows], finite last."""
        return said[:8].view(torch.int64)[0], said[8:].view(torch.bool).view(HEAD, -1)

    def frame(self, values: Sequence[Any], finite: Any, body: Tensor) -> Tensor:
        words = body.view(torch.int32)
        size = words.shape[0]
        out, partial = self.empty(HEAD + size, torch.int32), None
        pieces, tiles = cut(max(size, 1), _TILE)
        if size > _SHORT:
            partial = self.room("partial", pieces)
            self.launch(lay_pieces, pieces, words, out, partial, size, tiles, TILE=_TILE)
        known = [0 if isinstance(x, torch.Tensor) else _signed(x) for x in values]
        there = [x if isinstance(x, torch.Tensor) else None for x in (*values[4:], finite)]
        partly = {0: 0, 1: 4 * HEAD} if size > _SHORT else {}
        how: dict[str, Any] = {"partly": partly, "PIECES": PIECES, "TILE": _TILE}
        self.launch(frame, 1, words, out, partial, *there, size, pieces, *known, **how)
        return out.view(torch.uint8)

    def look(self, frames: Tensor, expected: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The words; what `split` takes apart; and whether all is right, bool [rows]."""
        rows, words, partial = frames.shape[0], frames.view(torch.int32), None
        size, stride = words.shape[1] - HEAD, words.stride(0)
        pieces, tiles = cut(max(size, 1), _TILE)
        if size > _SHORT:
            partial = self.room("partial", rows * PIECES)
            given = words, partial, size, stride, tiles
            how: dict[str, Any] = {"partly": {1: 4 * rows * pieces}}
            self.launch(add_pieces, (pieces, rows), *given, TILE=_TILE, PIECES=PIECES, **how)
        read, said = (
            self.empty((rows, HEAD - 1), torch.int64),
            self.empty(8 + HEAD * rows, torch.uint8),
        )
        intact, numbers = self.empty((rows,), torch.bool), map(_signed, expected)
        how = {"partly": {0: 4 * HEAD * rows, 1: 4 * rows * pieces} if size > _SHORT else {}}
        self.launch(
            look, rows, words, partial, read, *self.split(said), intact, size, stride, rows, pieces,
            *numbers,
            PIECES=PIECES, TILE=_TILE, **how,
        )  # fmt: skip
        return read, said, intact

    def checked_sides(self, sides: Sequence[Tensor], finite: Tensor) -> tuple[list[Tensor], Tensor]:
        healthy, other = self.empty((), torch.bool), sides[1] if len(sides) > 1 else None
        self.launch(check_sides, 1, sides[0], other, finite, healthy, sides[0].shape[0], TILE=_TILE)
        return list(sides), healthy

    def summable(self, sides: Sequence[Tensor], weight: float, limit: float) -> Tensor:
        one, other = sides[0], sides[1] if len(sides) > 1 else None
        fits, (ranks, size) = self.empty((1,), torch.bool), one.shape
        given = one, other, fits, size, ranks, one.stride(0)
        self.launch(summable, 1, *given, WEIGHT=weight, LIMIT=limit, TILE=_TILE)
        return fits

    def sound(self, x: Tensor, how: str, also: Tensor | None) -> tuple[Tensor, Tensor]:
        pieces, tiles = cut(x.shape[0], _TILE)
        partial, finite = self.room("partial", pieces, torch.float32), self.empty((), torch.bool)
        size = x.shape[0]
        self.launch(survey, pieces, x, partial, size, tiles, HOW=how, TILE=_TILE)
        self.launch(
            clear_unless_finite, pieces, x, partial, finite, also, size, pieces, tiles,
            partly={0: 0}, HOW=how, TILE=_TILE, PIECES=PIECES,
        )  # fmt: skip
        return finite, x


def _signed(word: int) -> int:
    """The same 32 bits."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)
