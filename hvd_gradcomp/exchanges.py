"""How payloads meet: small generators, one a pattern of communication."""

from __future__ import annotations

import zlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from hvd_gradcomp import wire
from hvd_gradcomp.aggregator import Compressor, Context, Program
from hvd_gradcomp.collectives import Allgather, Allreduce, Alltoall, Broadcast, Switch
from hvd_gradcomp.ops import NonFiniteGradientError, Ops, PayloadError, Tensor

if TYPE_CHECKING:
    from hvd_gradcomp.algorithms.scalecom import ScaleComCompressor
    from hvd_gradcomp.codecs.linear import LinearCompressor
    from hvd_gradcomp.codecs.quantized import QuantizedCompressor
    from hvd_gradcomp.codecs.sparse import SparseCompressor, SparseState


def allgather(
    codec: SparseCompressor,
    ops: Ops,
    context: Context,
    gradient: Tensor,
    state: SparseState,
    moment: Tensor | None,
) -> Program:
    """Everybody receives every payload and adds them up in rank order.

    One collective. All ranks read all headers, so all choose the same rung for the next step, and
    all raise when one of them has a gradient that is not finite. That rank's state is then as it
    was; the others keep their gradient of the step in their residual.
    """
    layout = context.layout
    rung, ladder = codec.ladder(layout).climb(ops, state.ladder)
    finite, gradient = _checked(ops, gradient)
    if finite is False:
        encoded = codec.nothing(ops, layout, rung)
    else:
        encoded, state = codec.encode(ops, layout, rung, context.step, gradient, state, moment)
    header = wire.Header(
        codec.algorithm,
        codec.digest(layout),
        context.step % (1 << 32),
        rung.index,
        encoded.sent,
        encoded.wanted,
        finite,
    )
    buffers = yield Allgather(wire.seal(ops, header, encoded.body))
    try:
        header, bodies = wire.open_sealed(ops, header, buffers)
    except (PayloadError, NonFiniteGradientError):
        codec.give_back(ops, state.memory, encoded.held)
        raise
    weights = _weights(ops, context, header)
    total = codec.decode_sum(ops, layout, rung, bodies, weights, room=gradient)
    needed = ops.stage(ops.max(header.wanted))
    return total, state._replace(ladder=ladder._replace(needed=needed))


def quantized_allgather(
    codec: QuantizedCompressor, ops: Ops, context: Context, gradient: Tensor, state: Any
) -> Program:
    """Everybody receives every code and adds up what they stand for, in rank order.

    `size - 1` payloads arrive at each rank. The state is replaced at the end: a failed exchange
    leaves it as it was.
    """
    layout = context.layout
    bands, parts = codec.bands(layout), codec.parts(layout)
    finite, gradient = _checked(ops, gradient)
    x = codec.collect(ops, gradient, state)
    mine = codec.encode(ops, bands, x, _key(ops, codec, context, 0))
    body = wire.pack_body(ops, parts, mine)
    buffers = yield Allgather(wire.seal(ops, _header(codec, context, finite), body))
    header, bodies = wire.open_sealed(ops, _header(codec, context), buffers)
    state = codec.keep(ops, bands, x, mine, state)
    payload = wire.unpack_body(ops, parts, bodies)
    weights = _weights(ops, context, header)
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
    finite, gradient = _checked(ops, gradient)
    x = codec.collect(ops, gradient, state)
    padding = ops.zeros((world * shard - layout.size,))
    mine = codec.encode(ops, bands, ops.concat((x, padding)), _key(ops, codec, context, 0))
    header = _header(codec, context, finite)
    bodies = [
        wire.pack_body(ops, parts, codec.shard_of(ops, mine, cuts, i, parts)) for i in range(world)
    ]
    buffers = yield Alltoall(ops.stack([wire.seal(ops, header, body) for body in bodies]))
    reply, bodies = wire.open_sealed(ops, _header(codec, context), buffers)
    payload = wire.unpack_body(ops, parts, bodies)
    plain = _weights(ops, context._replace(prescale=1.0, postscale=1.0), reply)
    total = codec.add_decoded(ops, cuts[rank], None, ops.zeros((shard,)), payload, plain)

    summed = codec.encode(ops, cuts[rank], total, _key(ops, codec, context, 1))
    body = wire.pack_body(ops, parts, codec.filled(ops, summed, parts))
    buffers = yield Allgather(wire.seal(ops, _header(codec, context), body))
    reply, bodies = wire.open_sealed(ops, _header(codec, context), buffers)
    state = codec.keep(ops, bands, x, mine, state)
    state = codec.keep_of_sum(ops, cuts[rank], rank * shard, total, summed, state)
    payload = wire.unpack_body(ops, parts, bodies)
    weights = _weights(ops, context, reply)
    pieces = []
    for other, cut in enumerate(cuts):
        room = gradient[other * shard : (other + 1) * shard]
        if room.shape[0] < shard:  # the last shard may reach beyond the bucket
            room = ops.zeros((shard,))
        theirs = {name: part[other : other + 1] for name, part in payload.items()}
        weight = weights[other : other + 1]
        pieces.append(codec.add_decoded(ops, cut, None, room, theirs, weight))
    return ops.assemble(gradient, pieces), state


def _checked(ops: Ops, gradient: Tensor) -> tuple[Any, Tensor]:
    """Whether it is finite; and zeros instead where that is known too late to leave it out."""
    finite = ops.finite(gradient)
    if not ops.dynamic_shapes:
        gradient = ops.where(finite, gradient, 0.0)
    return finite, gradient


def _key(ops: Ops, codec: QuantizedCompressor, context: Context, stage: int) -> Tensor:
    """The key of this rank's private random numbers in this step; int64 [2]."""
    salt = f"{codec.seed} {context.rank} {stage} {context.layout.digest}".encode()
    return ops.key(context.step, zlib.crc32(salt))


def _header(codec: Compressor, context: Context, finite: Any = True) -> wire.Header:
    elements = context.layout.elements
    step = context.step % (1 << 32)
    digest = codec.digest(context.layout)
    return wire.Header(codec.algorithm, digest, step, 0, elements, elements, finite)


def _weights(ops: Ops, context: Context, header: wire.Header) -> Tensor:
    """What each rank counts for; nothing where its payload is not to be used."""
    weights = ops.full((context.size,), context.prescale * context.postscale, "float32")
    return weights if header.intact is None else weights * ops.cast(header.intact, "float32")


def leader(
    codec: ScaleComCompressor, ops: Ops, context: Context, gradient: Tensor, state: object
) -> Program:
    """One rank after the other says which elements travel; their values are added up on the way.

    A broadcast of the leader's indices and an allreduce of everybody's values there.
    """
    layout, turn = context.layout, context.step % context.size
    finite, gradient = _checked(ops, gradient)
    chosen = ops.cond(
        turn == context.rank,
        lambda: codec.choose(ops, context, gradient, state),
        lambda: ops.zeros((codec.choice_bytes(layout),), "uint8"),
    )

    def from_root(root: int) -> Generator[Broadcast, Tensor, tuple[Tensor]]:
        return ((yield Broadcast(chosen, root)),)

    roots = [lambda r=root: from_root(r) for root in range(context.size)]
    (buffer,) = yield Switch(turn, roots)
    index = codec.chosen(ops, context, ops.reshape(buffer, (1, -1)))
    values, poison = codec.values(ops, gradient, state, index, finite)
    total = yield Allreduce(ops.concat((values, poison)), context.prescale, context.postscale)
    intact = ops.require({wire.ANY_NOT_FINITE: total[-1:] == 0}, NonFiniteGradientError)
    total = total[:-1]
    if intact is not None:
        total = ops.where(intact, total, 0.0)
    return codec.settle_all(ops, layout, gradient, state, index, total)


def allreduce(
    codec: LinearCompressor, ops: Ops, context: Context, gradient: Tensor, state: object
) -> Program:
    """The ranks' codes are added up on the way: for codecs whose codes may be added."""
    code = codec.encode(ops, gradient)
    total = yield Allreduce(code, context.prescale, context.postscale)
    return codec.decode(ops, context.layout, total), state
