"""Codes for the indices of sent elements: a fixed payload size for a given capacity.

With k of n elements sent, sorted indices need at least about `log2(n/k) + 1.44` bits each.

`delta` takes the differences of sorted indices and packs each block of 32 in the fewest bits that
hold the block's largest: `log2(n/k) + 2.5` bits for random indices. Sizes must not change from step
to step (Horovod would renegotiate), so the room for packed words is fixed: the need of random
indices and a little more. If they need more than that, the last blocks are not sent and stay in the
state; the list starts at another block each step, so no position in the bucket waits more often
than another.

`elias_fano` takes at most `log2(n/k) + 2` bits whatever the indices are, so all of them fit.
"""

from __future__ import annotations

import math
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from hvd_gradcomp.codecs.elias_fano import EliasFano
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.wire import Part, body_bytes, starts
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP
from hvd_gradcomp.ops.kernel_params import Places

_SPARE_BITS = 3.5  # with blocks of 32, random indices need 2.5, clustered ones more
_SPARE_DEFLATED = 2.25  # random indices need at least 1.44
_TABLES = 64  # approximate bytes of DEFLATE's code tables


class IndexCoding(ABC):
    """Code of fixed size for ascending indices of one bucket.

    Attributes:
        recodes: whether fused kernels read and write plain indices, which `encode` and `decode`
            then translate.
    """

    recodes: ClassVar[bool] = False

    @abstractmethod
    def parts(self, layout: Layout, capacity: int) -> dict[str, Part]:
        """Return the payload parts for `capacity` indices."""

    @abstractmethod
    def bits(self, size: int, count: int) -> float:
        """Estimate the bits for each of `count` indices into `size` elements."""

    def places(self, parts: Mapping[str, Part]) -> Places | None:
        """Return the offsets of its parts in a body; None if no fused kernel supports the code."""
        del parts
        return None

    @abstractmethod
    def encode(
        self, ops: Ops, layout: Layout, parts: Mapping[str, Part], index: Tensor, turn: Any
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Encode ascending indices that may end in any number of sinks.

        Args:
            index: int64 [capacity].
            turn: the step.

        Returns:
            The parts; the indices in the order in which they are sent, [capacity], with sinks for
            those that are not; and the position in `index` that each came from, [capacity].
        """

    @abstractmethod
    def decode(
        self, ops: Ops, layout: Layout, payload: Mapping[str, Tensor], capacity: Any
    ) -> Tensor:
        """Decode one rank's parts to indices; int64 [capacity]."""


class Plain(IndexCoding):
    """Plain code: 32 bits for each index."""

    def parts(self, layout: Layout, capacity: int) -> dict[str, Part]:
        del layout
        return {"index": Part("uint32", capacity)}

    def bits(self, size: int, count: int) -> float:
        del size, count
        return 32.0

    def places(self, parts: Mapping[str, Part]) -> Places:
        return Places(0, 0, starts(parts)["index"], 0)

    def encode(
        self, ops: Ops, layout: Layout, parts: Mapping[str, Part], index: Tensor, turn: Any
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        del layout, parts, turn
        return {"index": index}, index, ops.arange(ops.length(index))

    def decode(
        self, ops: Ops, layout: Layout, payload: Mapping[str, Tensor], capacity: Any
    ) -> Tensor:
        del ops, layout, capacity
        return payload["index"]


class Delta(IndexCoding):
    """Differences, each block of 32 packed in the fewest bits."""

    def parts(self, layout: Layout, capacity: int) -> dict[str, Part]:
        blocks = -(-capacity // GROUP)
        most = layout.size.bit_length()
        distance = math.log2(layout.size / capacity)
        # Three blocks may need all bits: the first, the one where the list wraps, and unused slots.
        words = math.ceil(blocks * (distance + _SPARE_BITS)) + 3 * (most - int(distance))
        return {
            "widths": Part("uint8", blocks),
            "deltas": Part("uint32", min(words, blocks * most)),
        }

    def bits(self, size: int, count: int) -> float:
        return math.log2(size / count) + _SPARE_BITS + 8 / GROUP

    def places(self, parts: Mapping[str, Part]) -> Places:
        blocks, room = parts["widths"].count, parts["deltas"].count
        return Places(blocks, room, starts(parts)["widths"], starts(parts)["deltas"])

    def encode(
        self, ops: Ops, layout: Layout, parts: Mapping[str, Part], index: Tensor, turn: Any
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        blocks, room = parts["widths"].count, parts["deltas"].count
        capacity = ops.length(index)
        place = (ops.arange(capacity) + turn % blocks * GROUP) % capacity
        index = ops.gather(index, place)
        filled = ops.concat((index, ops.full((blocks * GROUP - capacity,), layout.sink)))
        before = ops.concat((ops.full((1,), 0), filled[:-1]))
        groups = ops.reshape((filled - before + layout.size) % layout.size, (-1, GROUP))
        most = layout.size.bit_length()
        bits = ops.words([1 << bit for bit in range(most)])
        largest = ops.reshape(ops.max(groups, -1), (-1, 1))
        width = ops.sum(ops.cast(largest >= bits, "int64"), -1)  # [blocks]
        slot, fits = _slots(ops, width, most, room)
        planes = ops.where(slot < room, ops.bit_planes(groups, most), 0)
        stream = ops.put(
            ops.full((room + 1,), 0), ops.reshape(slot, (-1,)), ops.reshape(planes, (-1,))
        )
        index = ops.where(_of_blocks(ops, fits)[:capacity], index, layout.sink)
        return {"widths": width, "deltas": stream[:room]}, index, place

    def decode(
        self, ops: Ops, layout: Layout, payload: Mapping[str, Tensor], capacity: Any
    ) -> Tensor:
        width, stream = payload["widths"], payload["deltas"]
        room, most = ops.length(stream), layout.size.bit_length()
        slot, fits = _slots(ops, width, most, room)
        planes = ops.gather(ops.concat((stream, ops.full((1,), 0))), slot)
        groups = ops.from_bit_planes(planes)
        index = ops.cumsum(ops.reshape(groups, (-1,))) % layout.size
        return ops.where(_of_blocks(ops, fits), index, layout.sink)[:capacity]


def _slots(ops: Ops, width: Tensor, most: int, room: Any) -> tuple[Tensor, Tensor]:
    """Return the stream offset of plane j of each block (`room` if none), and which blocks fit."""
    end = ops.cumsum(width)
    fits = end <= room
    plane = ops.arange(most)
    slot = ops.reshape(end - width, (-1, 1)) + plane  # [blocks, most]
    used = (plane < ops.reshape(width, (-1, 1))) & ops.reshape(fits, (-1, 1))
    return ops.where(used, slot, room), fits


def _of_blocks(ops: Ops, flags: Tensor) -> Tensor:
    """Return for each index the flag of its block."""
    none = ops.full((1, GROUP), 0)
    return ops.reshape(ops.reshape(ops.cast(flags, "int64"), (-1, 1)) + none > 0, (-1,))


class EliasFanoCoding(IndexCoding):
    """Elias-Fano code; see `codecs.elias_fano`."""

    recodes = True

    def parts(self, layout: Layout, capacity: int) -> dict[str, Part]:
        return EliasFano.of(1, capacity, layout.sink).parts()

    def bits(self, size: int, count: int) -> float:
        return 8 * body_bytes(EliasFano.of(1, count, size).parts()) / count

    def encode(
        self, ops: Ops, layout: Layout, parts: Mapping[str, Part], index: Tensor, turn: Any
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        del turn
        capacity = ops.length(index)
        code = self._code(layout, capacity, parts["low"].count)
        return code.encode(ops, ops.reshape(index, (1, -1))), index, ops.arange(capacity)

    def decode(
        self, ops: Ops, layout: Layout, payload: Mapping[str, Tensor], capacity: Any
    ) -> Tensor:
        code = self._code(layout, capacity, ops.length(payload["low"]))
        return ops.reshape(code.decode(ops, payload), (-1,))

    def _code(self, layout: Layout, capacity: Any, words: Any) -> EliasFano:
        """Return the code of which so many words are low bits; both may be scalars of a graph."""
        return EliasFano(1, capacity, layout.sink, words // ((capacity + GROUP - 1) // GROUP))


class Deflate(IndexCoding):
    """Differences compressed by DEFLATE, the lowest bytes of all first, then the next ones.

    Fewer bytes than `Delta`, since widths vary and rare bytes get long codes; but zlib runs on the
    host, so it synchronizes with a GPU, and XLA cannot compile it.
    """

    def parts(self, layout: Layout, capacity: int) -> dict[str, Part]:
        return {"deflated": Part("bytes", self._room(layout.size, capacity))}

    def bits(self, size: int, count: int) -> float:
        return math.log2(size / count) + _SPARE_DEFLATED

    def _room(self, size: int, count: int) -> int:
        """Return bytes for a count, code tables, and somewhat more than random indices need."""
        packed = math.ceil(count * (math.log2(size / count) + _SPARE_DEFLATED) / 8)
        return 4 * math.ceil((4 + min(packed + _TABLES, 4 * count + 16)) / 4)

    def encode(
        self, ops: Ops, layout: Layout, parts: Mapping[str, Part], index: Tensor, turn: Any
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        room, capacity = parts["deflated"].count, ops.length(index)
        place = (ops.arange(capacity) + turn * GROUP % capacity) % capacity
        index = ops.gather(index, place)
        before = ops.concat((ops.full((1,), 0), index[:-1]))
        steps = (index - before + layout.size) % layout.size
        data = ops.map_bytes(_deflated, _prefixed(ops, room, ops.to_bytes(steps, "uint32")))
        data = ops.reshape(data, (room,))
        count = ops.from_bytes(data[:4], "uint32")
        return (
            {"deflated": data},
            ops.where(ops.arange(capacity) < count, index, layout.sink),
            place,
        )

    def decode(
        self, ops: Ops, layout: Layout, payload: Mapping[str, Tensor], capacity: Any
    ) -> Tensor:
        data = payload["deflated"]
        steps = ops.map_bytes(_inflated, _prefixed(ops, capacity, data))
        steps = ops.from_bytes(ops.reshape(steps, (4 * capacity,)), "uint32")
        count = ops.from_bytes(data[:4], "uint32")
        index = ops.cumsum(steps) % layout.size
        return ops.where(ops.arange(capacity) < count, index, layout.sink)


def _prefixed(ops: Ops, number: Any, data: Tensor) -> Tensor:
    """Prefix bytes with a number, which may be a tensor of a graph."""
    return ops.concat((ops.to_bytes(ops.words((number,)), "uint32"), data))


def _deflated(prefixed: bytes) -> bytes:
    """Compress the differences that fit into exactly `room` bytes, after their count."""
    (room,), steps = struct.unpack("<I", prefixed[:4]), prefixed[4:]
    count = len(steps) // 4
    while True:
        deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
        stream = b""
        for byte in range(4):  # each plane in its own DEFLATE block, with its own code
            stream += deflate.compress(steps[byte : 4 * count : 4]) + deflate.flush(zlib.Z_BLOCK)
        stream += deflate.flush()
        if len(stream) <= room - 4:
            return (struct.pack("<I", count) + stream).ljust(room, b"\0")
        count = min(count - 1, count * (room - 4) // len(stream))


def _inflated(prefixed: bytes) -> bytes:
    """Decompress to `capacity` differences, padded with zeros; all zeros if damaged."""
    (capacity,), data = struct.unpack("<I", prefixed[:4]), prefixed[4:]
    try:
        planes = zlib.decompressobj(-15).decompress(data[4:], 4 * capacity)
    except zlib.error:
        planes = b""
    count = len(planes) // 4
    steps = bytearray(4 * capacity)
    for byte in range(4):
        steps[byte : 4 * count : 4] = planes[byte * count : (byte + 1) * count]
    return bytes(steps)


CODINGS: dict[str, IndexCoding] = {
    "delta": Delta(),
    "elias_fano": EliasFanoCoding(),
    "deflate": Deflate(),
    "int32": Plain(),
}
