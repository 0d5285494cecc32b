"""How payloads meet: small generators, one a pattern of communication."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from hvd_gradcomp import wire
from hvd_gradcomp.aggregator import Compressor, Context, Program
from hvd_gradcomp.collectives import Allgather, Allreduce, Alltoall, Broadcast, Switch
from hvd_gradcomp.ops import NonFiniteGradientError, Ops, PayloadError, Tensor

_LARGEST = (2.0 - 2.0**-20) * 2.0**127  # of float32, and a bit less: sums are rounded on their way

if TYPE_CHECKING:
    from hvd_gradcomp.algorithms.scalecom import ScaleComCompressor
    from hvd_gradcomp.codecs.linear import LinearCompressor
    from hvd_gradcomp.codecs.quantized import QuantizedCompressor
    from hvd_gradcomp.codecs.sparse import Encoded, SparseCompressor, SparseState
    from hvd_gradcomp.ladder import Rung


def sparse(
    codec: SparseCompressor,
    ops: Ops,
    context: Context,
    gradient: Tensor,
    state: SparseState,
    moment: Tensor | None,
) -> Program:
    """What was sent is gathered; or added up on the way, where that brings a rank fewer bytes.

    All ranks read all headers, so all choose the same rung for the next step, and all raise when
    one of them has a gradient that is not finite. That rank's state is then as it was; the others
    keep their gradient of the step in their residual.
    """
    ladder = codec.ladder(context.layout, context.size)
    rung, climbed = ladder.climb(ops, state.ladder)
    rank = codec, ops, context, gradient, state._replace(ladder=climbed), moment
    if not ladder.summed:
        return (yield from allgather(rung, *rank))
    top = rung._replace(dense=True, summed=True)
    if not ladder.capacities:
        return (yield from summed(top, *rank))
    ways = (lambda: allgather(rung._replace(dense=False), *rank), lambda: summed(top, *rank))
    return (yield Switch(ops.pick(rung.dense, 1, 0), ways))


def allgather(
    rung: Rung,
    codec: SparseCompressor,
    ops: Ops,
    context: Context,
    gradient: Tensor,
    state: SparseState,
    moment: Tensor | None,
) -> Program:
    """Everybody receives every payload and adds them up in rank order. One collective."""
    encoded, header, gradient, state = _encoded(rung, codec, ops, context, gradient, state, moment)

    def fits(header: wire.Header, bodies: Tensor) -> wire.Header:
        sides = codec.ceilings(ops, context.layout, rung, bodies)
        return _summable(ops, sides, context, header) if sides else header

    header, bodies = yield from _gathered(codec, ops, header, encoded, encoded.body, state, fits)
    weights = weights_of(ops, context, header)
    total = codec.decode_sum(ops, context.layout, rung, bodies, weights, room=gradient)
    return total, _needing(ops, state, header)


def summed(
    rung: Rung,
    codec: SparseCompressor,
    ops: Ops,
    context: Context,
    gradient: Tensor,
    state: SparseState,
    moment: Tensor | None,
) -> Program:
    """Each rank decodes its own payload, and an allreduce adds up what these stand for.

    An allgather of the headers comes first, so ranks learn of each other what they do by
    `allgather`, and the result is the same but for the order in which it is added up.
    """
    encoded, header, gradient, state = _encoded(rung, codec, ops, context, gradient, state, moment)
    nothing = encoded.body[:0]
    header, _ = yield from _gathered(codec, ops, header, encoded, nothing, state, lambda h, _: h)
    weights = weights_of(ops, context._replace(prescale=1.0, postscale=1.0), header)
    mine, body = weights[context.rank : context.rank + 1], ops.reshape(encoded.body, (1, -1))
    x = codec.decode_sum(ops, context.layout, rung, body, mine, room=gradient)
    total = usable(ops, (yield from added_up(ops, context, x)))
    return total, _needing(ops, state, header)


def _encoded(
    rung: Rung,
    codec: SparseCompressor,
    ops: Ops,
    context: Context,
    gradient: Tensor,
    state: SparseState,
    moment: Tensor | None,
) -> tuple[Encoded, wire.Header, Tensor, SparseState]:
    """What this rank sends, its header, memory for the result, and the state without it."""
    layout, step = context.layout, context.step
    finite, gradient = checked_to_keep(ops, gradient)
    if moment is not None:
        fits, moment = ops.sound(moment, "sum")
        finite = finite & fits
    if finite is False:
        encoded = codec.nothing(ops, layout, rung)
    else:
        encoded, state = codec.encode(ops, layout, rung, step, gradient, state, moment)
    number, digest, step = codec.algorithm, codec.digest(layout), step % (1 << 32)
    sent, wanted = encoded.sent, encoded.wanted
    header = wire.Header(number, digest, step, rung.index, sent, wanted, finite)
    return encoded, header, gradient, state


def _gathered(
    codec: SparseCompressor,
    ops: Ops,
    header: wire.Header,
    encoded: Encoded,
    body: Tensor,
    state: SparseState,
    fits: Callable[[wire.Header, Tensor], wire.Header],
) -> Generator[Any, Any, tuple[wire.Header, Tensor]]:
    """The headers and bodies of all; where they cannot be used, the state is as it was."""
    buffers = yield Allgather(wire.seal(ops, header, body))
    try:
        header, bodies = wire.open_sealed(ops, header, buffers)
        header = fits(header, bodies)
    except (PayloadError, NonFiniteGradientError):
        codec.give_back(ops, state.memory, encoded.held)
        raise
    encoded.settle()
    return header, bodies


def _needing(ops: Ops, state: SparseState, header: wire.Header) -> SparseState:
    """The state that knows how much room the ranks have needed."""
    needed = ops.stage(ops.max(header.wanted))
    return state._replace(ladder=state.ladder._replace(needed=needed))


def quantized_allgather(
    codec: QuantizedCompressor, ops: Ops, context: Context, gradient: Tensor, state: Any
) -> Program:
    """Everybody receives every code and adds up what they stand for, in rank order.

    `size - 1` payloads arrive at each rank. The state is replaced at the end: a failed exchange
    leaves it as it was.
    """
    layout = context.layout
    bands, parts = codec.bands(layout), codec.parts(layout)
    finite, gradient = checked(ops, gradient)
    x = codec.collect(ops, gradient, state)
    mine, finite = _checked_sides(
        ops, codec, codec.encode(ops, bands, x, _key(ops, codec, context, 0)), finite
    )
    body = wire.pack_body(ops, parts, mine)
    buffers = yield Allgather(wire.seal(ops, header_of(codec, context, finite), body))
    header, bodies = wire.open_sealed(ops, header_of(codec, context), buffers)
    payload = wire.unpack_body(ops, parts, bodies)
    header = _summable(ops, [payload[name] for name in codec.side], context, header)
    state = codec.keep(ops, bands, x, mine, state)
    weights = weights_of(ops, context, header)
    return codec.add_decoded(ops, bands, None, gradient, payload, weights), state


def two_shot(
    codec: QuantizedCompressor, ops: Ops, context: Context, gradient: Tensor, state: Any
) -> Program:
    """Each rank adds up one shard of the bucket, quantizes the sum again, and hands it to all.

    An alltoall and an allgather; `2 * (size - 1)` payloads of a shard arrive at each rank. What
    quantizing the sum takes is kept, where the method keeps anything, by the rank that did it.
    """
    layout, world, rank = context.layout, context.size, context.rank
    shard, bands = codec.shard_size(layout, world), codec.bands(layout)
    cuts = [bands.cut(i * shard, (i + 1) * shard) for i in range(world)]
    parts = codec.shard_parts(layout, world)
    finite, gradient = checked(ops, gradient)
    x = codec.collect(ops, gradient, state)
    mine = codec.encode(ops, bands, x, _key(ops, codec, context, 0))
    beyond = parts["codes"].count * world - mine["codes"].shape[0]
    mine["codes"] = ops.concat((mine["codes"], ops.zeros((beyond,), "uint8")))
    mine, finite = _checked_sides(ops, codec, mine, finite)
    header = header_of(codec, context, finite)
    bodies = [
        wire.pack_body(ops, parts, codec.shard_of(ops, mine, cuts, i, parts)) for i in range(world)
    ]
    buffers = yield Alltoall(ops.stack([wire.seal(ops, header, body) for body in bodies]))
    reply, bodies = wire.open_sealed(ops, header_of(codec, context), buffers)
    payload = wire.unpack_body(ops, parts, bodies)
    plain = weights_of(ops, context._replace(prescale=1.0, postscale=1.0), reply)
    total = codec.add_decoded(ops, cuts[rank], None, ops.zeros((shard,)), payload, plain)

    finite, total = checked(ops, total)
    summed = codec.encode(ops, cuts[rank], total, _key(ops, codec, context, 1))
    summed, finite = _checked_sides(ops, codec, summed, finite)
    body = wire.pack_body(ops, parts, codec.filled(ops, summed, parts))
    buffers = yield Allgather(wire.seal(ops, header_of(codec, context, finite), body))
    reply, bodies = wire.open_sealed(ops, header_of(codec, context), buffers)
    state = codec.keep(ops, bands, x, mine, state)
    state = codec.keep_of_sum(ops, cuts[rank], rank * shard, total, summed, state)
    payload = wire.unpack_body(ops, parts, bodies)
    weights = weights_of(ops, context, reply)
    pieces = []
    for other, cut in enumerate(cuts):
        room = gradient[other * shard : (other + 1) * shard]
        if room.shape[0] < shard:  # the last shard may reach beyond the bucket
            room = ops.zeros((shard,))
        theirs = {name: part[other : other + 1] for name, part in payload.items()}
        weight = weights[other : other + 1]
        pieces.append(codec.add_decoded(ops, cut, None, room, theirs, weight))
    return ops.assemble(gradient, pieces), state


def quantized_allreduce(
    codec: QuantizedCompressor, ops: Ops, context: Context, gradient: Tensor, state: Any
) -> Program:
    """What would be quantized, as it is: in buckets so small that codes would take more bytes."""
    total = yield from added_up(ops, context, codec.collect(ops, gradient, state))
    return usable(ops, total), codec.keep_nothing(ops, state)


def checked(ops: Ops, gradient: Tensor) -> tuple[Any, Tensor]:
    """Whether it is finite; and zeros instead where that is known too late to leave it out."""
    return ops.sound(gradient, "elements")


def checked_to_keep(ops: Ops, gradient: Tensor) -> tuple[Any, Tensor]:
    """The same where it is added to what is kept from step to step, and so is its square perhaps.

    What is kept must not overflow: with an infinite second moment an element would never be sent
    again. So a norm beyond 2**58 counts as infinite: a thousand squares of that fit.
    """
    return ops.sound(gradient, "squares")


def _checked_sides(
    ops: Ops, codec: QuantizedCompressor, mine: dict[str, Tensor], finite: Any
) -> tuple[dict[str, Tensor], Any]:
    """A payload, and whether it can be used: a norm or a mean may overflow where no element does.

    And above 2**126 what a code is divided by has an inverse that TensorFlow takes for zero. Zeros
    instead of what cannot be used where that is known too late to leave it out.
    """
    sides, finite = ops.checked_sides([mine[name] for name in codec.side], finite)
    return {**mine, **dict(zip(codec.side, sides))}, finite


def _summable(
    ops: Ops, sides: Sequence[Tensor], context: Context, header: wire.Header
) -> wire.Header:
    """Requires that what the ranks have sent adds up to finite numbers; the header then says so.

    Args:
        ops: the verbs.
        sides: magnitudes that no element sent exceeds, by groups; float [world, groups] each.
        context: of the step.
        header: of what was sent.

    Raises:
        NonFiniteGradientError: on all ranks, as in `usable`; also where single groups are so large
            that it cannot be ruled out.
    """
    fits = ops.summable(sides, context.prescale * context.postscale, _LARGEST)
    intact = ops.require({wire.ANY_NOT_FINITE: fits}, NonFiniteGradientError)
    if intact is None:
        return header
    return header._replace(intact=intact if header.intact is None else header.intact & intact)


def _key(ops: Ops, codec: QuantizedCompressor, context: Context, stage: int) -> Tensor:
    """The key of this rank's private random numbers in this step; int64 [2]."""
    salt = f"{codec.seed} {context.rank} {stage} {context.layout.digest}".encode()
    return ops.key(context.step, zlib.crc32(salt))


def header_of(codec: Compressor, context: Context, finite: Any = True) -> wire.Header:
    """What this rank says about a payload of a fixed size."""
    elements = context.layout.elements
    step = context.step % (1 << 32)
    digest = codec.digest(context.layout)
    return wire.Header(codec.algorithm, digest, step, 0, elements, elements, finite)


def weights_of(ops: Ops, context: Context, header: wire.Header) -> Tensor:
    """What each rank counts for; nothing where its payload is not to be used."""
    weight = context.prescale * context.postscale
    if header.intact is None:
        return ops.full((context.size,), weight, "float32")
    return ops.weigh(weight, header.intact)


def leader(
    codec: ScaleComCompressor, ops: Ops, context: Context, gradient: Tensor, state: object
) -> Program:
    """One rank after the other says which elements travel; their values are added up on the way.

    A broadcast of the leader's indices and an allreduce of everybody's values there.
    """
    layout, turn = context.layout, context.step % context.size
    finite, gradient = checked_to_keep(ops, gradient)

    def chosen() -> Tensor:
        return codec.choose(ops, context, gradient, state)

    buffer = yield from from_leader(ops, context, turn, chosen, codec.choice_bytes(layout))
    index = codec.chosen(ops, context, ops.reshape(buffer, (1, -1)))
    values = ops.concat((codec.values(ops, gradient, state, index), poison(ops, finite)))
    total = yield Allreduce(values, context.prescale, context.postscale)
    total = unpoisoned(ops, total)
    return codec.settle_all(ops, layout, gradient, state, index, total)


def from_leader(
    ops: Ops, context: Context, leader: Any, payload: Callable[[], Tensor], size: int
) -> Generator[Any, Any, Tensor]:
    """One rank's payload of so many bytes, on all ranks."""
    mine = ops.cond(leader == context.rank, payload, lambda: ops.zeros((size,), "uint8"))

    def from_root(root: int) -> Generator[Broadcast, Tensor, tuple[Tensor]]:
        return ((yield Broadcast(mine, root)),)

    roots = [lambda r=root: from_root(r) for root in range(context.size)]
    (buffer,) = yield Switch(leader, roots)
    return buffer


def poison(ops: Ops, finite: Any) -> Tensor:
    """0, or NaN if this rank's gradient is not finite; float32 [1], last of what is added up."""
    healthy = ops.cast(ops.words((finite,)), "float32")
    return ops.where(healthy > 0, 0.0, healthy / healthy)


def unpoisoned(ops: Ops, total: Tensor) -> Tensor:
    """A sum of vectors that end in `poison`, without it; see `usable`."""
    return usable(ops, total)[:-1]


def drawn(step: Any, seed: int, count: int) -> Any:
    """A number below `count` that all ranks draw alike for a step; at random to all appearance.

    Plain arithmetic below 2**62, so that it is the same of an int and of a scalar in a graph.

    >>> [drawn(step, 0, 4) for step in range(12)]
    [0, 0, 0, 1, 3, 3, 2, 3, 3, 0, 2, 1]
    """
    prime = (1 << 31) - 1
    x = (step % prime * 1103515245 + (seed * 69621 + 40014) % prime) % prime
    for shift in (7919, 104729):
        x = x * ((x + shift) % prime) % prime * 16807 % prime
    return x // 1024 % count


def allreduce(
    codec: LinearCompressor, ops: Ops, context: Context, gradient: Tensor, state: object
) -> Program:
    """The ranks' codes are added up on the way: for codecs whose codes may be added.

    The sum itself says whether all were finite; or too large together for the dtype that travels.
    """
    code = codec.encode(ops, gradient)
    total = yield Allreduce(code, context.prescale, context.postscale, donated=True)
    return usable(ops, codec.decode(ops, context.layout, total)), state


def added_up(ops: Ops, context: Context, x: Tensor) -> Generator[Any, Any, Tensor]:
    """Everybody's bucket added up on the way, without its padding; x may hold the result.

    x is [layout.size], zero outside the layers.
    """
    runs = context.layout.runs
    tight = ops.concat([x[a:b] for a, b in runs]) if len(runs) > 1 else x[: runs[0][1]]
    tight = yield Allreduce(tight, context.prescale, context.postscale, donated=True)
    pieces, end, taken = [], 0, 0
    for start, stop in runs:
        pieces += [x[end:start], tight[taken : taken + stop - start]]
        end, taken = stop, taken + stop - start
    return ops.assemble(x, [*pieces, x[end:]])


def usable(ops: Ops, total: Tensor) -> Tensor:
    """A sum of gradients, which says itself whether all were finite, and not too large together.

    Raises:
        NonFiniteGradientError: on all ranks; where that comes a step too late, zeros instead.
    """
    finite = ops.words((ops.finite(total),)) > 0
    intact = ops.require({wire.ANY_NOT_FINITE: finite}, NonFiniteGradientError)
    return total if intact is None else ops.where(intact, total, 0.0)
