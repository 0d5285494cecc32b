"""The family of methods that send every element in a few bits: QSGD, TernGrad, 1-bit SGD.

    rows     which elements share a scale
    encode   the scales, and a code of `bits` bits for each element
    decode   what they stand for

Exchange. An allgather brings `size - 1` payloads to each rank, so its cost grows with the number of
ranks; the two-shot exchange (alltoall of shards, sum, quantize again, allgather) brings two
payloads' worth however many ranks there are. `exchange="auto"` takes what moves fewer bytes. In a
bucket of a few elements both may be more than the elements themselves, for headers, side values and
padding: then "auto" adds these up as they are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, ClassVar

from hvd_gradcomp import exchanges, wire
from hvd_gradcomp.aggregator import Compressor, Context, Program
from hvd_gradcomp.bands import Band, Bands
from hvd_gradcomp.cost import volume
from hvd_gradcomp.layout import Layout
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.composites import GROUP

EXCHANGES = ("auto", "allgather", "two_shot")
_PROGRAMS: dict[str, Callable[..., Program]] = {
    "allgather": exchanges.quantized_allgather,
    "two_shot": exchanges.two_shot,
    "allreduce": exchanges.quantized_allreduce,
}
Payload = dict[str, Tensor]


class QuantizedCompressor(Compressor):
    """Base of the family; see the head of this file.

    Attributes:
        bits: of a code.
        side: names of the float32 values that each group sends besides its codes.
        seed: of the random numbers, for methods that use some.
    """

    block = GROUP
    max_bucket = 1 << 32  # places that the random numbers tell apart
    bits: int
    side: ClassVar[tuple[str, ...]]
    seed: int
    exchange: str

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
    def add_decoded(
        self,
        ops: Ops,
        bands: Bands,
        base: Tensor | None,
        room: Tensor,
        payload: Payload,
        weights: Tensor,
    ) -> Tensor:
        """`base + sum over ranks of weight * what the payload stands for`.

        Args:
            base: float32 [size]; None for zeros.
            room: where the result may be written; may be `base`. Donating.
            payload: parts [world, ...].
            weights: float32 [world].
        """

    def less(self, ops: Ops, bands: Bands, x: Tensor, room: Tensor, payload: Payload) -> Tensor:
        """What is left of x when this rank's payload is taken off; see `add_decoded`."""
        one = {name: ops.reshape(part, (1, -1)) for name, part in payload.items()}
        return self.add_decoded(ops, bands, x, room, one, ops.full((1,), -1.0, "float32"))

    # -- sizes -------------------------------------------------------------------------------

    def bands(self, layout: Layout) -> Bands:
        """The groups of a bucket."""
        return _bands_of(self, layout)

    def parts(self, layout: Layout) -> dict[str, wire.Part]:
        """The body of an allgathered payload."""
        return self._parts(self.bands(layout).groups, layout.size)

    def shard_size(self, layout: Layout, world: int) -> int:
        """Elements of each rank's part of the bucket."""
        return -(-layout.size // (world * GROUP)) * GROUP

    def shard_parts(self, layout: Layout, world: int) -> dict[str, wire.Part]:
        """The body of codes for one shard; the same for all shards, so as for the most groups."""
        shard, bands = self.shard_size(layout, world), self.bands(layout)
        groups = max(bands.cut(i * shard, (i + 1) * shard).groups for i in range(world))
        return self._parts(groups, shard)

    def _parts(self, groups: int, size: int) -> dict[str, wire.Part]:
        side = {name: wire.Part("float32", groups) for name in self.side}
        return {**side, "codes": wire.Part("bytes", size * self.bits // 8)}

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
        self, ops: Ops, context: Context, gradient: Tensor, state: Any, **extra: Tensor
    ) -> Program:
        del extra
        way = self.chosen_exchange(context.layout, context.size)
        return _PROGRAMS[way](self, ops, context, gradient, state)

    def collect(self, ops: Ops, gradient: Tensor, state: Any) -> Tensor:
        """What is quantized; donating for the gradient. The state stays as it is."""
        del ops, state
        return gradient

    def keep(self, ops: Ops, bands: Bands, x: Tensor, payload: Payload, state: Any) -> Any:
        """The state after x was sent as the payload. Donating for the state."""
        del ops, bands, x, payload
        return state

    def keep_nothing(self, ops: Ops, state: Any) -> Any:
        """The state after what `collect` gave was sent as it is. Donating."""
        del ops
        return state

    def keep_of_sum(
        self, ops: Ops, bands: Bands, start: int, total: Tensor, payload: Payload, state: Any
    ) -> Any:
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

    def __post_init__(self) -> None:
        for name in ("algorithm", "bits", "side", "seed", "exchange"):
            object.__setattr__(self, name, getattr(self.codec, name))

    def rows(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return self.codec.rows(shape)

    def encode(self, ops: Ops, bands: Bands, x: Tensor, key: Tensor) -> Payload:
        return self.codec.encode(ops, bands, x, key)

    def add_decoded(
        self,
        ops: Ops,
        bands: Bands,
        base: Tensor | None,
        room: Tensor,
        payload: Payload,
        weights: Tensor,
    ) -> Tensor:
        return self.codec.add_decoded(ops, bands, base, room, payload, weights)

    def keep(self, ops: Ops, bands: Bands, x: Tensor, payload: Payload, state: Any) -> Any:
        there = ops.accumulate(state.r, x)
        return state._replace(r=self.less(ops, bands, there, there, payload))

    def keep_of_sum(
        self, ops: Ops, bands: Bands, start: int, total: Tensor, payload: Payload, state: Any
    ) -> Any:
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

    def add_decoded(
        self,
        ops: Ops,
        bands: Bands,
        base: Tensor | None,
        room: Tensor,
        payload: Payload,
        weights: Tensor,
    ) -> Tensor:
        codes, scale = payload["codes"], payload["scale"]
        return ops.add_levels(bands, base, room, codes, scale, self.bits, weights)


@lru_cache(maxsize=256)
def _bands_of(codec: QuantizedCompressor, layout: Layout) -> Bands:
    bands: list[Band] = []
    for offset, shape in zip(layout.offsets, layout.outputs_first):
        for count, length in codec.rows(shape):
            bands.append(Band(offset, count, length))
            offset += count * length
    return Bands(tuple(bands))


def rows_of_length(size: int, length: int) -> tuple[tuple[int, int], ...]:
    """A layer cut into rows, the last one shorter if it must be.

    >>> rows_of_length(10, 4), rows_of_length(3, 4)
    (((2, 4), (1, 2)), ((1, 3),))
    """
    whole, rest = divmod(size, length)
    return tuple(r for r in ((whole, length), (1, rest)) if r[0] and r[1])
