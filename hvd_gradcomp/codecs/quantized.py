"""The family of methods that send every element in a few bits: QSGD, TernGrad, 1-bit SGD.

    rows         which elements share a scale
    encode       the scales, and a code of `bits` bits for each element
    add_decoded  adds up what those of all ranks stand for

Exchange. An allgather brings `size - 1` payloads to each rank, so its cost grows with the number of
ranks; the two-shot exchange (alltoall of shards, sum, quantize again, allgather) brings two
payloads' worth however many ranks there are. `exchange="auto"` takes what moves fewer bytes. In a
bucket of a few elements both may be more than the elements themselves, for headers, side values and
padding: then "auto" adds these up as they are.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from hvd_gradcomp.core import patterns, wire
from hvd_gradcomp.core.collectives import Allgather, Alltoall
from hvd_gradcomp.core.compressor import Compressor, Context, Program, State, derived
from hvd_gradcomp.core.cost_model import volume
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.row_groups import Band, Bands
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP

EXCHANGES = ("auto", "allgather", "two_shot")
Payload = dict[str, Tensor]


class Into(NamedTuple):
    """What decoded payloads are added to.

    Attributes:
        base: float32 [size]; None for zeros.
        room: where the result may be written; may be `base`. Donating.
        weights: of each rank's payload, float32 [world].
    """

    base: Tensor | None
    room: Tensor
    weights: Tensor


class QuantizedCompressor(Compressor):
    """Base of the family; see the head of this file.

    Attributes:
        bits: of a code.
        side: names of the float32 values that each group sends besides its codes.
        seed: of the random numbers, for methods that use some.
        exchange: one of `EXCHANGES`.
    """

    block = GROUP
    max_bucket = 1 << 32  # places that the random numbers tell apart
    bits: int
    side: tuple[str, ...]
    seed: int = 0
    exchange: str = "auto"

    @abstractmethod
    def rows(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The groups of a layer, in order, as (how many, elements of each).

        Args:
            shape: with the outputs first, however the framework stores it.
        """

    @abstractmethod
    def encode(self, ops: Ops, bands: Bands, x: Tensor, key: Tensor) -> Payload:
        """The side values of the groups, and "codes", packed, uint8 [size * bits / 8]."""

    @abstractmethod
    def add_decoded(self, ops: Ops, bands: Bands, payload: Payload, into: Into) -> Tensor:
        """`base + sum over ranks of weight * what the payload stands for`; parts [world, ...]."""

    def less(self, ops: Ops, bands: Bands, x: Tensor, room: Tensor, payload: Payload) -> Tensor:
        """What is left of x when this rank's payload is taken off; see `add_decoded`."""
        one = {name: ops.reshape(part, (1, -1)) for name, part in payload.items()}
        return self.add_decoded(ops, bands, one, Into(x, room, ops.constants((-1.0,))))

    # -- sizes -------------------------------------------------------------------------------

    def bands(self, layout: Layout) -> Bands:
        """The groups of a bucket."""
        return _bands_of(self, layout)

    def parts(self, layout: Layout) -> dict[str, wire.Part]:
        """The body of an allgathered payload."""
        return _parts_of(self, self.bands(layout).groups, layout.size)

    def shard_size(self, layout: Layout, world: int) -> int:
        """Elements of each rank's part of the bucket."""
        return -(-layout.size // (world * GROUP)) * GROUP

    def shard_parts(self, layout: Layout, world: int) -> dict[str, wire.Part]:
        """The body of codes for one shard; the same for all shards, so as for the most groups."""
        shard, bands = self.shard_size(layout, world), self.bands(layout)
        groups = max(bands.between(i * shard, (i + 1) * shard).groups for i in range(world))
        return _parts_of(self, groups, shard)

    def moved_bytes(self, layout: Layout, world: int, exchange: str) -> float:
        """Bytes that arrive at each rank from others, by an exchange; or by an "allreduce"."""
        head = wire.HEADER_BYTES
        if exchange == "allreduce":
            return volume("allreduce", 4.0 * layout.elements, world)
        if exchange == "allgather":
            return (world - 1) * (head + int(wire.body_bytes(self.parts(layout))))
        shard = int(wire.body_bytes(self.shard_parts(layout, world)))
        return 2 * (world - 1) * (head + shard)

    def chosen_exchange(self, layout: Layout, world: int) -> str:
        """The exchange that "auto" stands for: what moves the fewest bytes, if not in codes."""
        if self.exchange != "auto":
            return self.exchange
        return min(_PROGRAMS, key=lambda way: self.moved_bytes(layout, world, way))

    def layer_bytes(self, shape: Sequence[int]) -> float:
        padded = -(-prod(shape) // GROUP) * GROUP
        groups = sum(count for count, _ in self.rows(shape))
        return padded * self.bits / 8 + 4 * len(self.side) * groups

    # -- one step ----------------------------------------------------------------------------

    def init(self, ops: Ops, layout: Layout) -> Any:
        del ops, layout
        return ()

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: State, **extra: Tensor
    ) -> Program:
        del extra
        way = self.chosen_exchange(context.layout, context.size)
        return _PROGRAMS[way](self, ops, context, gradient, state)

    def collect(self, ops: Ops, gradient: Tensor, state: State) -> Tensor:
        """What is quantized; donating for the gradient. The state stays as it is."""
        del ops, state
        return gradient

    def keep(self, ops: Ops, bands: Bands, x: Tensor, payload: Payload, state: State) -> State:
        """The state after x was sent as the payload. Donating for the state."""
        del ops, bands, x, payload
        return state

    def keep_nothing(self, ops: Ops, state: State) -> State:
        """The state after what `collect` gave was sent as it is. Donating."""
        del ops
        return state

    def keep_of_sum(
        self, ops: Ops, bands: Bands, start: int, total: Tensor, payload: Payload, state: State
    ) -> State:
        """The state after the sum of the shard from `start` was quantized again. Donating."""
        del ops, bands, start, total, payload
        return state

    def shard_of(
        self,
        ops: Ops,
        payload: Payload,
        cuts: Sequence[Bands],
        shard: int,
        parts: dict[str, wire.Part],
    ) -> Payload:
        """What of a payload concerns one shard."""
        codes = parts["codes"].count
        first, groups = cuts[shard].first, cuts[shard].groups
        mine = {name: payload[name][first : first + groups] for name in self.side}
        mine["codes"] = payload["codes"][shard * codes : (shard + 1) * codes]
        return self.filled(ops, mine, parts)

    def filled(self, ops: Ops, payload: Payload, parts: dict[str, wire.Part]) -> Payload:
        """With zeros for the groups that a shard has less than another."""
        for name in self.side:
            missing = parts[name].count - payload[name].shape[0]
            payload = {**payload, name: ops.concat((payload[name], ops.zeros((missing,))))}
        return payload


@dataclass(frozen=True)
class Keeping(QuantizedCompressor, registered=False):
    """A method that keeps nothing, with a residual that takes in what its codes miss.

    The residual is not sent, it is for another method to do so. `r` with what was sent, summed over
    the ranks, is what there was.
    """

    codec: QuantizedCompressor

    @derived
    def algorithm(self) -> int:
        return self.codec.algorithm

    @derived
    def bits(self) -> int:
        return self.codec.bits

    @derived
    def side(self) -> tuple[str, ...]:
        return self.codec.side

    @derived
    def seed(self) -> int:
        return self.codec.seed

    @derived
    def exchange(self) -> str:
        return self.codec.exchange

    def rows(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return self.codec.rows(shape)

    def encode(self, ops: Ops, bands: Bands, x: Tensor, key: Tensor) -> Payload:
        return self.codec.encode(ops, bands, x, key)

    def add_decoded(self, ops: Ops, bands: Bands, payload: Payload, into: Into) -> Tensor:
        return self.codec.add_decoded(ops, bands, payload, into)

    def keep(self, ops: Ops, bands: Bands, x: Tensor, payload: Payload, state: State) -> State:
        there = ops.accumulate(state.r, x)
        return state._replace(r=self.less(ops, bands, there, there, payload))

    def keep_of_sum(
        self, ops: Ops, bands: Bands, start: int, total: Tensor, payload: Payload, state: State
    ) -> State:
        missed = self.less(ops, bands, total, total, payload)
        return state._replace(r=ops.add_slice(state.r, start, missed))


class LevelsCompressor(QuantizedCompressor):
    """QSGD and TernGrad: levels of one scale a group, rounded at random, so right on average."""

    side = ("scale",)

    @abstractmethod
    def scale(self, ops: Ops, bands: Bands, x: Tensor) -> Tensor:
        """The magnitude of the last level of each group; float32 [groups]."""

    def encode(self, ops: Ops, bands: Bands, x: Tensor, key: Tensor) -> Payload:
        scale = self.scale(ops, bands, x)
        return {"scale": scale, "codes": ops.encode_levels(bands, x, scale, self.bits, key)}

    def add_decoded(self, ops: Ops, bands: Bands, payload: Payload, into: Into) -> Tensor:
        base, room, weights = into
        codes, scale = payload["codes"], payload["scale"]
        return ops.add_levels(bands, base, room, codes, scale, self.bits, weights)


@lru_cache(maxsize=256)
def _bands_of(codec: QuantizedCompressor, layout: Layout) -> Bands:
    bands: list[Band] = []
    for offset, shape in zip(layout.offsets, layout.with_outputs_first().shapes):
        for count, length in codec.rows(shape):
            if count and length:  # of an empty layer nothing is sent
                bands.append(Band(offset, count, length))
                offset += count * length
    return Bands(tuple(bands))


def _parts_of(codec: QuantizedCompressor, groups: int, size: int) -> dict[str, wire.Part]:
    side = {name: wire.Part("float32", groups) for name in codec.side}
    return {**side, "codes": wire.Part("bytes", size * codec.bits // 8)}


def rows_of_length(size: int, length: int) -> tuple[tuple[int, int], ...]:
    """A layer cut into rows, the last one shorter if it must be.

    >>> rows_of_length(10, 4), rows_of_length(3, 4)
    (((2, 4), (1, 2)), ((1, 3),))
    """
    whole, rest = divmod(size, length)
    return tuple(r for r in ((whole, length), (1, rest)) if r[0] and r[1])


def allgather(
    codec: QuantizedCompressor, ops: Ops, context: Context, gradient: Tensor, state: State
) -> Program:
    """Everybody receives every code and adds up what they stand for, in rank order.

    `size - 1` payloads arrive at each rank. The state is replaced at the end: a failed exchange
    leaves it as it was.
    """
    layout = context.layout
    bands, parts = codec.bands(layout), codec.parts(layout)
    finite, gradient = patterns.checked(ops, gradient)
    x = codec.collect(ops, gradient, state)
    mine, finite = _checked_sides(
        ops, codec, codec.encode(ops, bands, x, _key(ops, codec, context, 0)), finite
    )
    body = wire.packed(ops, parts, mine)
    buffers = yield Allgather(wire.seal(ops, patterns.header_of(codec, context, finite), *body))
    weighing = patterns.weighing(context, {name: parts[name] for name in codec.side})
    header, bodies = wire.unpack(ops, patterns.header_of(codec, context), buffers, weighing)
    payload = wire.unpack_body(ops, parts, bodies)
    state = codec.keep(ops, bands, x, mine, state)
    weights = patterns.weights_of(ops, context, header)
    return codec.add_decoded(ops, bands, payload, Into(None, gradient, weights)), state


def two_shot(
    codec: QuantizedCompressor, ops: Ops, context: Context, gradient: Tensor, state: State
) -> Program:
    """Each rank adds up one shard of the bucket, quantizes the sum again, and hands it to all.

    An alltoall and an allgather; `2 * (size - 1)` payloads of a shard arrive at each rank. What
    quantizing the sum takes is kept, where the method keeps anything, by the rank that did it.
    """
    layout, world, rank = context.layout, context.size, context.rank
    shard, bands = codec.shard_size(layout, world), codec.bands(layout)
    cuts = [bands.between(i * shard, (i + 1) * shard) for i in range(world)]
    parts = codec.shard_parts(layout, world)
    finite, gradient = patterns.checked(ops, gradient)
    x = codec.collect(ops, gradient, state)
    mine = codec.encode(ops, bands, x, _key(ops, codec, context, 0))
    beyond = parts["codes"].count * world - mine["codes"].shape[0]
    mine["codes"] = ops.concat((mine["codes"], ops.zeros((beyond,), "uint8")))
    mine, finite = _checked_sides(ops, codec, mine, finite)
    header = patterns.header_of(codec, context, finite)
    pieces = [
        wire.packed(ops, parts, codec.shard_of(ops, mine, cuts, i, parts)) for i in range(world)
    ]
    buffers = yield Alltoall(ops.stack([wire.seal(ops, header, *body) for body in pieces]))
    plain = context._replace(prescale=1.0, postscale=1.0)
    expected, weighing = patterns.header_of(codec, context), patterns.weighing(plain, {})
    reply, bodies = wire.unpack(ops, expected, buffers, weighing)
    payload = wire.unpack_body(ops, parts, bodies)
    weights = patterns.weights_of(ops, plain, reply)
    total = codec.add_decoded(ops, cuts[rank], payload, Into(None, ops.zeros((shard,)), weights))

    finite, total = patterns.checked(ops, total)
    summed = codec.encode(ops, cuts[rank], total, _key(ops, codec, context, 1))
    summed, finite = _checked_sides(ops, codec, summed, finite)
    body = wire.packed(ops, parts, codec.filled(ops, summed, parts))
    buffers = yield Allgather(wire.seal(ops, patterns.header_of(codec, context, finite), *body))
    weighing = patterns.weighing(context, {})
    reply, bodies = wire.unpack(ops, expected, buffers, weighing)
    state = codec.keep(ops, bands, x, mine, state)
    state = codec.keep_of_sum(ops, cuts[rank], rank * shard, total, summed, state)
    payload = wire.unpack_body(ops, parts, bodies)
    weights = patterns.weights_of(ops, context, reply)
    pieces = []
    for other, cut in enumerate(cuts):
        room = gradient[other * shard : (other + 1) * shard]
        if not room.shape[0]:  # shards reach beyond the bucket, and the last may be all padding
            continue
        theirs = {name: part[other : other + 1] for name, part in payload.items()}
        into = Into(None, room, weights[other : other + 1])
        pieces.append(codec.add_decoded(ops, cut, theirs, into))
    return ops.assemble(gradient, pieces), state


def allreduce(
    codec: QuantizedCompressor, ops: Ops, context: Context, gradient: Tensor, state: State
) -> Program:
    """What would be quantized, as it is: in buckets so small that codes would take more bytes."""
    total = yield from patterns.added_up(ops, context, codec.collect(ops, gradient, state))
    return patterns.usable(ops, total), codec.keep_nothing(ops, state)


def _checked_sides(
    ops: Ops, codec: QuantizedCompressor, mine: dict[str, Tensor], finite: Any
) -> tuple[dict[str, Tensor], Any]:
    """A payload, and whether it can be used: a norm or a mean may overflow where no element does.

    And above 2**126 what a code is divided by has an inverse that TensorFlow takes for zero. Zeros
    instead of what cannot be used where that is known too late to leave it out.
    """
    sides, finite = ops.checked_sides([mine[name] for name in codec.side], finite)
    return {**mine, **dict(zip(codec.side, sides))}, finite


def _key(ops: Ops, codec: QuantizedCompressor, context: Context, stage: int) -> Tensor:
    """The key of this rank's private random numbers in this step; int64 [2]."""
    salt = f"{codec.seed} {context.rank} {stage} {context.layout.digest}".encode()
    return ops.key(context.step, zlib.crc32(salt))


_PROGRAMS: dict[str, Callable[..., Program]] = {
    "allgather": allgather,
    "two_shot": two_shot,
    "allreduce": allreduce,
}
