"""Family of methods that send every element in a few bits: QSGD, TernGrad, 1-bit SGD.

    rows         the elements that share a scale
    encode       the scales, and a code of `bits` bits for each element
    add_decoded  decodes and sums the payloads of all ranks

Exchange. In an allgather each rank receives `size - 1` payloads, so its cost grows with the number
of ranks; in the two-shot exchange (alltoall of shards, sum, quantize again, allgather) it receives
about two payloads with any number of ranks. `exchange="auto"` picks the one that moves fewer bytes.
In small buckets, headers, side values and padding can make both larger than the elements
themselves; then "auto" allreduces the elements uncompressed.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import prod
from operator import and_
from typing import Any, NamedTuple

from hvd_gradcomp.codecs.clipping import Clipping
from hvd_gradcomp.codecs.sparse import Residual
from hvd_gradcomp.core.collectives import Allgather, Alltoall
from hvd_gradcomp.core.cost_model import Exchange, cheapest, dense_exchange, two_shot_exchange
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.row_groups import RowGroup, RowGroups
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.method.compressor import Compressor, Context, Program, State, derived
from hvd_gradcomp.method.handover import Handover
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP

EXCHANGES = ("auto", "allgather", "two_shot")
Payload = dict[str, Tensor]


class Accumulator(NamedTuple):
    """Target that decoded payloads are added to.

    Attributes:
        base: float32 [size]; None for zeros.
        scratch: where the result may be written; may be `base`. Donating.
        weights: of each rank's payload, float32 [world].
    """

    base: Tensor | None
    scratch: Tensor
    weights: Tensor


class QuantizedCompressor(Compressor):
    """Base of the family; see the head of this file.

    Attributes:
        bits: of a code.
        side: names of the float32 values that each group sends besides its codes.
        seed: of the random numbers, for methods that use some.
        exchange: one of `EXCHANGES`.
        finite_by: names of float32 values of `encode`, sent or not, that are all finite only if
            all elements are: with dynamic shapes these are checked instead of the elements.
        error_feedback: whether the state has a residual `r` of quantization errors.
    """

    is_quantizer = True
    block = GROUP
    max_bucket = 1 << 32  # positions that the random numbers distinguish
    bits: int
    side: tuple[str, ...]
    finite_by: tuple[str, ...] = ()
    seed: int = 0
    exchange: str = "auto"
    error_feedback: bool = False

    @abstractmethod
    def rows(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return the groups of a layer, in order, as (number of groups, elements of each).

        Args:
            shape: with the outputs first, however the framework stores it.
        """

    @abstractmethod
    def encode(self, ops: Ops, row_groups: RowGroups, x: Tensor, key: Tensor) -> Payload:
        """Return the groups' side values and the packed "codes", uint8 [size * bits / 8]."""

    @abstractmethod
    def add_decoded(
        self, ops: Ops, row_groups: RowGroups, payload: Payload, accumulator: Accumulator
    ) -> Tensor:
        """Return `base + sum over ranks of weight * decoded payload`; parts are [world, ...]."""

    def add_checked(
        self, ops: Ops, row_groups: RowGroups, payload: Payload, accumulator: Accumulator
    ) -> tuple[Tensor, Any]:
        """Return `add_decoded`, and whether it is finite; None if that is still to be found out."""
        return self.add_decoded(ops, row_groups, payload, accumulator), None

    def subtract_decoded(
        self, ops: Ops, row_groups: RowGroups, x: Tensor, scratch: Tensor, payload: Payload
    ) -> Tensor:
        """Return x minus this rank's decoded payload; see `add_decoded`."""
        payloads = {name: ops.reshape(part, (1, -1)) for name, part in payload.items()}
        return self.add_decoded(
            ops, row_groups, payloads, Accumulator(x, scratch, ops.constants((-1.0,)))
        )

    # -- sizes -------------------------------------------------------------------------------

    def row_groups(self, layout: Layout) -> RowGroups:
        """Return the groups of a bucket."""
        return _row_groups_of(self, layout)

    def parts(self, layout: Layout) -> dict[str, wire.Part]:
        """Return the parts of an allgathered payload's body."""
        return _parts_of(self, self.row_groups(layout).groups, layout.size)

    def shard_size(self, layout: Layout, world: int) -> int:
        """Return the number of elements of each rank's shard of the bucket."""
        return -(-layout.size // (world * GROUP)) * GROUP

    def cuts(self, layout: Layout, world: int) -> tuple[RowGroups, ...]:
        """Return the groups of each rank's shard."""
        return _cuts_of(self, layout, world)

    def shard_parts(self, layout: Layout, world: int) -> dict[str, wire.Part]:
        """Return the parts of a shard's body, sized for the shard with the most groups."""
        groups = max(cut.groups for cut in self.cuts(layout, world))
        return _parts_of(self, groups, self.shard_size(layout, world))

    def exchanges(self, layout: Layout, ranks: int) -> list[Exchange]:
        """Return all exchanges that the method has, by allgather first and dense last."""
        payload = float(wire.packed_bytes(self.parts(layout)))
        shard = float(wire.packed_bytes(self.shard_parts(layout, ranks)))
        return [
            Exchange("allgather", (("allgather", payload),)),
            two_shot_exchange(shard, ranks),
            dense_exchange(layout.elements),
        ]

    def exchange_of(self, layout: Layout, ranks: int) -> Exchange:
        """Return the exchange that was asked for; for "auto" the one that moves fewest bytes."""
        exchanges = self.exchanges(layout, ranks)
        if self.exchange == "auto":
            return cheapest(exchanges, ranks)
        return next(one for one in exchanges if one.kind == self.exchange)

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
        exchange = self.exchange_of(context.layout, context.size)
        return _PROGRAMS[exchange.kind](self, ops, context, gradient, state)

    def collect(self, ops: Ops, gradient: Tensor, state: State) -> Tensor:
        """Return the tensor to quantize. Donates the gradient, leaves the state unchanged."""
        del ops, state
        return gradient

    def update_state(
        self, ops: Ops, row_groups: RowGroups, x: Tensor, payload: Payload, state: State
    ) -> State:
        """Return the state after x was sent as the payload. Donates the state."""
        del ops, row_groups, x, payload
        return state

    def clear_state(self, ops: Ops, state: State) -> State:
        """Return the state after the result of `collect` was sent uncompressed. Donating."""
        del ops
        return state

    def update_shard(
        self,
        ops: Ops,
        row_groups: RowGroups,
        start: int,
        total: Tensor,
        payload: Payload,
        state: State,
    ) -> State:
        """Return the state after the sum of the shard at `start` was quantized again. Donating."""
        if not self.error_feedback:
            return state
        missed = self.subtract_decoded(ops, row_groups, total, total, payload)
        return state._replace(r=ops.add_slice(state.r, start, missed))

    def shard_of(
        self,
        ops: Ops,
        payload: Payload,
        cuts: Sequence[RowGroups],
        shard: int,
        parts: dict[str, wire.Part],
    ) -> Payload:
        """Cut one shard out of a payload; fewer codes if it reaches beyond the bucket."""
        codes = parts["codes"].count
        first, groups = cuts[shard].first, cuts[shard].groups
        shard_payload = {name: payload[name][first : first + groups] for name in self.side}
        shard_payload["codes"] = payload["codes"][shard * codes : (shard + 1) * codes]
        return self.filled(ops, shard_payload, parts)

    def shard_pieces(
        self,
        ops: Ops,
        payload: Payload,
        cuts: Sequence[RowGroups],
        parts: dict[str, wire.Part],
    ) -> list[list[Tensor]]:
        """Cut a payload into the pieces of every shard's body."""
        shards = [self.shard_of(ops, payload, cuts, i, parts) for i in range(len(cuts))]
        pieces = [wire.pack_pieces(ops, parts, shard) for shard in shards]
        if parts["codes"].count * len(cuts) > payload["codes"].shape[0]:
            for body, shard in zip(pieces, shards):
                missing = parts["codes"].count - shard["codes"].shape[0]
                body.append(ops.zeros((missing,), "uint8"))
        return pieces

    def filled(self, ops: Ops, payload: Payload, parts: dict[str, wire.Part]) -> Payload:
        """Pad the side values with zeros to the shard with the most groups."""
        for name in self.side:
            missing = parts[name].count - payload[name].shape[0]
            payload = {**payload, name: ops.concat((payload[name], ops.zeros((missing,))))}
        return payload


@dataclass(frozen=True)
class Keeping(QuantizedCompressor, registered=False):
    """Wrapper that adds a stateless method's quantization error to a residual.

    This wrapper never sends the residual; another method does. Summed over the ranks, `r` plus what
    was sent equals the gradients and the earlier `r`.
    """

    codec: QuantizedCompressor

    error_feedback = True

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

    def encode(self, ops: Ops, row_groups: RowGroups, x: Tensor, key: Tensor) -> Payload:
        return self.codec.encode(ops, row_groups, x, key)

    def add_decoded(
        self, ops: Ops, row_groups: RowGroups, payload: Payload, accumulator: Accumulator
    ) -> Tensor:
        return self.codec.add_decoded(ops, row_groups, payload, accumulator)

    def update_state(
        self, ops: Ops, row_groups: RowGroups, x: Tensor, payload: Payload, state: State
    ) -> State:
        accumulated = ops.accumulate(state.r, x)
        return state._replace(
            r=self.subtract_decoded(ops, row_groups, accumulated, accumulated, payload)
        )


class FeedbackCompressor(Clipping, QuantizedCompressor, Handover):
    """Base of methods that add their quantization error to the next gradient.

    They can clip a rank's own gradient first. Without `error_feedback` there is no state.
    """

    error_feedback = True

    def init(self, ops: Ops, layout: Layout) -> Any:
        return Residual(ops.zeros((layout.size,))) if self.error_feedback else ()

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: State, **extra: Tensor
    ) -> Program:
        gradient, _ = self.clipped(ops, context, gradient, extra)
        return super().aggregate(ops, context, gradient, state)

    def collect(self, ops: Ops, gradient: Tensor, state: State) -> Tensor:
        return ops.accumulate(gradient, state.r) if self.error_feedback else gradient

    def update_state(
        self, ops: Ops, row_groups: RowGroups, x: Tensor, payload: Payload, state: State
    ) -> State:
        if not self.error_feedback:
            return state
        return Residual(self.subtract_decoded(ops, row_groups, x, state.r, payload))

    def clear_state(self, ops: Ops, state: State) -> State:
        return Residual(ops.clear(state.r)) if self.error_feedback else state

    def inherit(
        self, ops: Ops, state: State, gradient: Tensor, residual: Tensor
    ) -> tuple[State, Tensor]:
        if not self.error_feedback:
            return super().inherit(ops, state, gradient, residual)
        return Residual(state.r + residual), gradient

    def residual(self, state: State) -> Tensor | None:
        return state.r if self.error_feedback else None


class LevelsCompressor(QuantizedCompressor):
    """Base of QSGD and TernGrad: levels of one scale for each group, with unbiased rounding."""

    side = ("scale",)

    @abstractmethod
    def scale(self, ops: Ops, row_groups: RowGroups, x: Tensor) -> Tensor:
        """Return the magnitude of each group's highest level; float32 [groups]."""

    def encode(self, ops: Ops, row_groups: RowGroups, x: Tensor, key: Tensor) -> Payload:
        scale = self.scale(ops, row_groups, x)
        return {"scale": scale, "codes": ops.encode_levels(row_groups, x, scale, self.bits, key)}

    def add_decoded(
        self, ops: Ops, row_groups: RowGroups, payload: Payload, accumulator: Accumulator
    ) -> Tensor:
        base, scratch, weights = accumulator
        codes, scale = payload["codes"], payload["scale"]
        return ops.add_levels(row_groups, base, scratch, codes, scale, self.bits, weights)


@lru_cache(maxsize=256)
def _row_groups_of(codec: QuantizedCompressor, layout: Layout) -> RowGroups:
    row_groups: list[RowGroup] = []
    for offset, shape in zip(layout.offsets, layout.with_outputs_first().shapes):
        for count, length in codec.rows(shape):
            if count and length:  # an empty layer sends nothing
                row_groups.append(RowGroup(offset, count, length))
                offset += count * length
    return RowGroups(tuple(row_groups))


@lru_cache(maxsize=256)
def _cuts_of(codec: QuantizedCompressor, layout: Layout, world: int) -> tuple[RowGroups, ...]:
    shard, row_groups = codec.shard_size(layout, world), codec.row_groups(layout)
    return tuple(row_groups.between(i * shard, (i + 1) * shard) for i in range(world))


def _parts_of(codec: QuantizedCompressor, groups: int, size: int) -> dict[str, wire.Part]:
    side = {name: wire.Part("float32", groups) for name in codec.side}
    return {**side, "codes": wire.Part("bytes", size * codec.bits // 8)}


def rows_of_length(size: int, length: int) -> tuple[tuple[int, int], ...]:
    """Cut a layer into rows; the last one may be shorter.

    >>> rows_of_length(10, 4), rows_of_length(3, 4)
    (((2, 4), (1, 2)), ((1, 3),))
    """
    whole, rest = divmod(size, length)
    return tuple(r for r in ((whole, length), (1, rest)) if r[0] and r[1])


def allgather(
    codec: QuantizedCompressor, ops: Ops, context: Context, gradient: Tensor, state: State
) -> Program:
    """Allgather the payloads; each rank decodes and sums them in rank order.

    Each rank receives `size - 1` payloads. The state is replaced at the end, so a failed exchange
    leaves it unchanged.
    """
    layout = context.layout
    row_groups, parts = codec.row_groups(layout), codec.parts(layout)
    finite, gradient = _check_elements(ops, codec, gradient)
    x = codec.collect(ops, gradient, state)
    sent, finite = _checked_sides(
        ops, codec, codec.encode(ops, row_groups, x, _key(ops, codec, context, 0)), finite
    )
    body = wire.pack_pieces(ops, parts, sent)
    buffers = yield Allgather(wire.pack(ops, patterns.header_of(codec, context, finite), *body))
    spec = patterns.reduction_spec(context, {name: parts[name] for name in codec.side})
    header, bodies = wire.unpack(ops, patterns.header_of(codec, context), buffers, spec)
    payload = wire.unpack_body(ops, parts, bodies)
    state = codec.update_state(ops, row_groups, x, sent, state)
    weights = patterns.weights_of(ops, context, header)
    accumulator = Accumulator(None, gradient, weights)
    total, finite = codec.add_checked(ops, row_groups, payload, accumulator)
    return _check_unbounded(ops, codec, total, [finite]), state


def two_shot(
    codec: QuantizedCompressor, ops: Ops, context: Context, gradient: Tensor, state: State
) -> Program:
    """Sum one shard on each rank, quantize the sum again, and allgather it.

    An alltoall and an allgather; each rank receives `2 * (size - 1)` payloads of a shard. With
    error feedback, the rank that quantized a sum keeps its quantization error.
    """
    layout, world, rank = context.layout, context.size, context.rank
    shard, row_groups = codec.shard_size(layout, world), codec.row_groups(layout)
    cuts, parts = codec.cuts(layout, world), codec.shard_parts(layout, world)
    finite, gradient = _check_elements(ops, codec, gradient)
    x = codec.collect(ops, gradient, state)
    sent = codec.encode(ops, row_groups, x, _key(ops, codec, context, 0))
    sent, finite = _checked_sides(ops, codec, sent, finite)
    header = patterns.header_of(codec, context, finite)
    buffers = yield Alltoall(wire.pack_all(ops, header, codec.shard_pieces(ops, sent, cuts, parts)))
    plain = context._replace(prescale=1.0, postscale=1.0)
    expected, spec = patterns.header_of(codec, context), patterns.reduction_spec(plain, {})
    reply, bodies = wire.unpack(ops, expected, buffers, spec)
    payload = wire.unpack_body(ops, parts, bodies)
    weights = patterns.weights_of(ops, plain, reply)
    # With error feedback the gradient's memory still holds what was quantized.
    out = ops.zeros((shard,)) if codec.error_feedback else gradient[:shard]
    total = codec.add_decoded(ops, cuts[rank], payload, Accumulator(None, out, weights))

    finite, total = _check_elements(ops, codec, total)
    summed = codec.encode(ops, cuts[rank], total, _key(ops, codec, context, 1))
    summed, finite = _checked_sides(ops, codec, summed, finite)
    body = wire.pack_pieces(ops, parts, codec.filled(ops, summed, parts))
    buffers = yield Allgather(wire.pack(ops, patterns.header_of(codec, context, finite), *body))
    spec = patterns.reduction_spec(context, {})
    reply, bodies = wire.unpack(ops, expected, buffers, spec)
    state = codec.update_state(ops, row_groups, x, sent, state)
    state = codec.update_shard(ops, cuts[rank], rank * shard, total, summed, state)
    payload = wire.unpack_body(ops, parts, bodies)
    weights = patterns.weights_of(ops, context, reply)
    pieces, checks = [], []
    for other, cut in enumerate(cuts):
        scratch = gradient[other * shard : (other + 1) * shard]
        if not scratch.shape[0]:  # shards extend past the bucket, so the last may be all padding
            continue
        shard_payloads = {name: part[other : other + 1] for name, part in payload.items()}
        accumulator = Accumulator(None, scratch, weights[other : other + 1])
        piece, finite = codec.add_checked(ops, cut, shard_payloads, accumulator)
        pieces.append(piece)
        checks.append(finite)
    return _check_unbounded(ops, codec, ops.assemble(gradient, pieces), checks), state


def allreduce(
    codec: QuantizedCompressor, ops: Ops, context: Context, gradient: Tensor, state: State
) -> Program:
    """Allreduce without quantizing, for buckets so small that codes would take more bytes."""
    total = yield from patterns.allreduce_bucket(ops, context, codec.collect(ops, gradient, state))
    return patterns.check_sum(ops, total), codec.clear_state(ops, state)


def _check_elements(ops: Ops, codec: QuantizedCompressor, x: Tensor) -> tuple[Any, Tensor]:
    """Return `patterns.check_finite`; or True if values of the payload are checked instead."""
    if codec.finite_by and ops.dynamic_shapes:
        return True, x
    return patterns.check_finite(ops, x)


def _checked_sides(
    ops: Ops, codec: QuantizedCompressor, sent: dict[str, Tensor], finite: Any
) -> tuple[dict[str, Tensor], Any]:
    """Check the side values of a payload: a norm or mean may overflow where no element does.

    Above 2**126 a scale's reciprocal is denormal, and TensorFlow flushes it to zero. Unusable side
    values are replaced by zeros where the check cannot stop the step.
    """
    for name in codec.finite_by:
        if name in sent and name not in codec.side:
            finite = finite & ops.finite(sent[name])
    if not codec.side:
        return sent, finite
    sides, finite = ops.checked_sides([sent[name] for name in codec.side], finite)
    return {**sent, **dict(zip(codec.side, sides))}, finite


def _check_unbounded(
    ops: Ops, codec: QuantizedCompressor, total: Tensor, checks: Sequence[Any]
) -> Tensor:
    """Require a finite sum where no side values have bounded it beforehand.

    Args:
        ops: the tensor operations.
        codec: of the sum.
        total: the sum.
        checks: whether each part of it is finite, or None.
    """
    if codec.side:
        return total
    known = None if None in checks else reduce(and_, checks)
    return patterns.check_sum(ops, total, known)


def _key(ops: Ops, codec: QuantizedCompressor, context: Context, stage: int) -> Tensor:
    """Return the key of this rank's private random numbers in this step; int64 [2]."""
    salt = f"{codec.seed} {context.rank} {stage} {context.layout.digest}".encode()
    return ops.key(context.step, zlib.crc32(salt))


_PROGRAMS: dict[str, Callable[..., Program]] = {
    "allgather": allgather,
    "two_shot": two_shot,
    "dense": allreduce,
}
