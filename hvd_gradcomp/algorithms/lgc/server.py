"""Algorithm 1: a parameter server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvd_gradcomp import exchanges, wire
from hvd_gradcomp.aggregator import Context, Program
from hvd_gradcomp.algorithms.lgc import training, vectors
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.codecs.sparse import Memory
from hvd_gradcomp.collectives import Allgather, Broadcast, Gather
from hvd_gradcomp.ops import NonFiniteGradientError, Ops, PayloadError, Tensor

if TYPE_CHECKING:
    from hvd_gradcomp.algorithms.lgc.settings import LGCSettings

_FINE, _NOT_FINITE, _DAMAGED = 0, 1, 2


def program(
    lgc: LGCSettings,
    ops: Ops,
    context: Context,
    gradient: Tensor,
    state: Any,
    elapsed: Any,
    train: bool = False,
    last: bool = False,
    compress: bool = False,
) -> Program:
    """One step of a rank, after the first phase."""
    layout = context.layout
    finite, gradient = exchanges.checked(ops, gradient)
    memory = vectors.advanced(lgc, ops, gradient, state)
    parts, index, values = vectors.selected(lgc, ops, context, memory, state)
    state = vectors.counted(lgc, ops, layout, state, index)
    if compress:
        chosen = (parts, index, values)
        return (yield from served(lgc, ops, context, memory, state, chosen, finite))
    parts["values"] = values
    body = wire.pack_body(ops, lgc.parts(layout), parts)
    buffers = yield Allgather(vectors.sealed(lgc, ops, context, finite, body))
    header, bodies = vectors.opened(lgc, ops, context, buffers)
    weights = exchanges.weights_of(ops, context, header)
    room = ops.zeros((layout.size,))
    mean = lgc.decode_sum(ops, layout, None, bodies, weights, room)  # type: ignore[arg-type]
    memory = lgc.settled(ops, lgc.settle(ops, memory, index))
    state = vectors.owing(lgc, ops, state._replace(memory=memory), index, 0.0)
    if train and context.rank == lgc.master:
        state = training.learned(
            lgc, ops, state, elapsed, training.server_loss(lgc, ops, context, bodies)
        )
    if train and last:
        state = yield from training.handed_out(lgc, ops, context, state)
    return mean, state


def served(
    lgc: LGCSettings,
    ops: Ops,
    context: Context,
    memory: Memory,
    state: Any,
    chosen: tuple[dict[str, Tensor], Tensor, Tensor],
    finite: Any,
) -> Program:
    """A compressed step, of a rank that has chosen."""
    layout, ranks, rank = context.layout, context.size, context.rank
    common = lgc.common(ranks)
    parts, index, values = chosen
    strong = vectors.strongest(ops, values, lgc.innovations(layout))
    coded, innovated, place = lgc.coding.encode(
        ops,
        layout,
        lgc.innovation_parts(layout),
        ops.gather(index, strong),
        context.step,
    )
    own = ops.where(innovated < layout.sink, ops.gather(ops.gather(values, strong), place), 0.0)
    coded |= {"values": own, "loss": ops.reshape(state.local, (1,))}
    body = wire.pack_body(ops, lgc.innovation_parts(layout), coded)
    mine = vectors.sealed(lgc, ops, context, finite, body)
    if rank == common:
        scale = vectors.rms(ops, values, lgc.capacity(layout))
        vector = vectors.at(ops, layout, index, values, ops.sort(index))
        x = ops.reshape(vectors.scaled(ops, vector, scale), (1, -1))
        code = ops.reshape(autoencoder.encode(ops, state.encoder, x), (-1,))
        body = wire.pack_body(ops, lgc.code_parts(layout), {**parts, "scale": scale, "code": code})
        mine = ops.concat((mine, vectors.sealed(lgc, ops, context, finite, body)))
    size = lgc.compressed_bytes(layout, ranks)
    lengths = tuple(size["worker"] + size["common"] * (r == common) for r in range(ranks))
    everything = yield Gather(mine, lgc.master, lengths)
    if rank == lgc.master:
        answer = answered_by_master(lgc, ops, context, state, everything, lengths)
    else:
        answer = ops.zeros((size["master"],), "uint8")
    answer = yield Broadcast(answer, lgc.master)
    header, bodies = vectors.opened(lgc, ops, context, ops.reshape(answer, (1, -1)))
    back = wire.unpack_body(ops, lgc.back_parts(layout, ranks), bodies)
    back = {name: part[0] for name, part in back.items()}
    verdict = back.pop("verdict")
    sound = ops.require({wire.DAMAGED: verdict != _DAMAGED}, PayloadError)
    fine = ops.require({wire.NOT_FINITE: verdict != _NOT_FINITE}, NonFiniteGradientError)
    changed = lgc.coding.decode(ops, layout, back, lgc.returned(layout, ranks))
    if sound is not None:
        good = ops.sum(ops.cast(sound & fine & header.intact, "int64")) == ranks
        changed = ops.where(good, changed, layout.sink)
    decoded = ops.where(changed < layout.sink, back["values"], 0.0)
    mean = ops.clear_last(ops.put(ops.zeros((layout.size,)), changed, decoded))
    missed = values - ops.gather(mean, index)
    if lgc.feedback == "exact":
        # What was selected and came back, as something else, goes over to what is owed.
        known = ops.clear_last(ops.put(ops.zeros((layout.size,)), changed, 1.0))
        answered = ops.gather(known, index) > 0
        r = ops.put(memory[0], index, ops.where(answered, 0.0, ops.gather(memory[0], index)))
        owed = ops.gather(state.owed, index)
        state = vectors.owing(lgc, ops, state, index, ops.where(answered, values, owed))
        owed = ops.gather(state.owed, changed) - decoded
        state = vectors.owing(lgc, ops, state, changed, owed)
        memory = memory._replace(r=r)
        if lgc.momentum and lgc.masking:  # of what this rank has sent
            u = ops.put(memory.u, innovated, 0.0)
            memory = memory._replace(u=ops.put(u, index, 0.0) if rank == common else u)
    else:
        memory = lgc.settle(ops, memory, index)
    local = vectors.share(ops, missed, values)
    state = state._replace(memory=lgc.settled(ops, memory), local=local)
    state = training.watched(lgc, ops, state, back["loss"])
    return mean * (context.prescale * context.postscale * ranks), state


def answered_by_master(
    lgc: LGCSettings,
    ops: Ops,
    context: Context,
    state: Any,
    everything: Tensor,
    lengths: Sequence[int],
) -> Tensor:
    """The master's way back: the mean of what it reconstructs, or who is to blame.

    It must not fail alone while the others wait for it, so what is damaged becomes a verdict.
    """
    layout, ranks, common = context.layout, context.size, lgc.common(context.size)
    capacity = lgc.capacity(layout)
    base = lgc.compressed_bytes(layout, ranks)["worker"]
    starts = [sum(lengths[:rank]) for rank in range(ranks)]
    workers = ops.stack([everything[start : start + base] for start in starts])
    extra = ops.reshape(
        everything[starts[common] + base : starts[common] + lengths[common]], (1, -1)
    )
    header = exchanges.header_of(lgc, context)
    facts, finite = wire.examined(ops, header, workers)
    more, _ = wire.examined(ops, header, extra)
    intact = ops.cast(facts, "int64")
    whole = intact * ops.where(ops.arange(ranks) == common, ops.cast(more, "int64"), intact * 0 + 1)
    verdict = ops.where(finite, _FINE, _NOT_FINITE)
    verdict = ops.where(whole > 0, verdict, _DAMAGED)
    bodies = wire.bodies_of(workers)
    payload = wire.unpack_body(ops, lgc.innovation_parts(layout), bodies)
    losses = ops.reshape(payload.pop("loss"), (-1,))
    values = ops.reshape(payload.pop("values"), (ranks, lgc.innovations(layout)))
    index = [
        lgc.coding.decode(
            ops, layout, {n: p[rank] for n, p in payload.items()}, lgc.innovations(layout)
        )
        for rank in range(ranks)
    ]
    body = wire.bodies_of(extra)
    code_parts = wire.unpack_body(ops, lgc.code_parts(layout), body)
    code_parts = {name: part[0] for name, part in code_parts.items()}
    places = ops.sort(lgc.coding.decode(ops, layout, code_parts, capacity))
    scale, code = code_parts["scale"], ops.reshape(code_parts["code"], (1, -1))
    channels = [
        vectors.scaled(ops, vectors.at(ops, layout, index[rank], values[rank], places), scale)
        for rank in range(ranks)
    ]
    decoded = autoencoder.decode(ops, state.decoder, code, ops.stack(channels))
    mean = ops.sum(decoded, 0)[:capacity] * (scale * (1.0 / ranks))
    total = ops.put(ops.zeros((layout.size,)), places, ops.where(places < layout.sink, mean, 0.0))
    inside = ops.put(ops.zeros((layout.size,)), places, 1.0)
    for rank in range(ranks):
        outside = ops.where(ops.gather(inside, index[rank]) == 0, values[rank], 0.0)
        total = ops.add_at(total, index[rank], outside * (1.0 / ranks))
    changed = _distinct(ops, ops.concat((places, *index)), layout.sink)
    changed = changed[: lgc.returned(layout, ranks)]
    parts = lgc.back_parts(layout, ranks)
    coded, changed, _ = lgc.coding.encode(ops, layout, parts, changed, context.step)
    coded["values"] = ops.where(changed < layout.sink, ops.gather(total, changed), 0.0)
    coded["loss"] = ops.reshape(ops.sum(losses) * (1.0 / ranks), (1,))
    coded["verdict"] = verdict
    return vectors.sealed(lgc, ops, context, True, wire.pack_body(ops, parts, coded))


def _distinct(ops: Ops, index: Tensor, sink: int) -> Tensor:
    """The same indices once each, ascending, filled up with the sink."""
    ascending = ops.sort(index)
    before = ops.concat((ops.full((1,), -1), ascending[:-1]))
    return ops.sort(ops.where(ascending == before, sink, ascending))
