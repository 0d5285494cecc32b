"""Parameter-server pattern of LGC: Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_gradcomp.algorithms.lgc import training, vectors
from hvd_gradcomp.algorithms.lgc.settings import OTHERS, SAMPLED, LGCSettings, LGCState
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.codecs.sparse import Payloads
from hvd_gradcomp.core import patterns, wire
from hvd_gradcomp.core.collectives import Allgather, Broadcast, Gather
from hvd_gradcomp.core.compressor import Context, Program
from hvd_gradcomp.ops import NonFiniteGradientError, Ops, PayloadError, Tensor
from hvd_gradcomp.ops.kernel_params import CapacityLevel

_FINE, _NOT_FINITE, _DAMAGED = 0, 1, 2


def program(
    lgc: LGCSettings,
    ops: Ops,
    context: Context,
    gradient: Tensor,
    state: LGCState,
    elapsed: Any,
    train: bool = False,
    last: bool = False,
    compress: bool = False,
) -> Program:
    """Run one step of a rank, after the first phase."""
    layout = context.layout
    finite, gradient = patterns.check_storable(ops, gradient)
    selected = vectors.accumulate_and_select(lgc, ops, context, finite, gradient, state)
    state = state._replace(memory=selected.memory, hint=selected.hint)
    if compress:
        index = selected.index
        return (yield from compressed_step(lgc, ops, context, finite, index, gradient, state))
    layout_parts = lgc.parts(layout)
    parts, index, _ = lgc.coding.encode(ops, layout, layout_parts, selected.index, context.step)
    parts["values"] = vectors.values_to_send(lgc, ops, state, index)
    buffers = yield Allgather(
        vectors.pack(lgc, ops, context, finite, wire.pack_body(ops, layout_parts, parts))
    )
    header, bodies = vectors.unpack(lgc, ops, context, buffers)
    weights = patterns.weights_of(ops, context, header)
    level = CapacityLevel(0, lgc.capacity(layout), False)
    mean = lgc.decode_sum(ops, layout, Payloads(level, bodies, weights), gradient)
    mean = patterns.check_sum(ops, mean)
    state = vectors.commit(lgc, ops, vectors.count_sent(ops, layout, state, index), index)
    if train and context.rank == lgc.master:
        loss = training.server_loss(lgc, ops, context, bodies)
        state = training.train_step(lgc, ops, state, elapsed, loss)
    if train and last:
        state = yield from training.distribute(lgc, ops, context, state)
    return mean, state


def compressed_step(
    lgc: LGCSettings,
    ops: Ops,
    context: Context,
    finite: Any,
    index: Tensor,
    gradient: Tensor,
    state: LGCState,
) -> Program:
    """Run a compressed step of a rank, given its selected indices."""
    layout, ranks, rank = context.layout, context.size, context.rank
    common, capacity = lgc.common(ranks), lgc.capacity(layout)
    message = []
    if rank == common:
        layout_parts = lgc.coding.parts(layout, capacity)
        parts, index, _ = lgc.coding.encode(ops, layout, layout_parts, index, context.step)
        index = ops.sort(index)
        values = vectors.values_to_send(lgc, ops, state, index)
        parts |= vectors.measure(lgc, ops, layout, index, values)
        unit = vectors.unit(lgc, ops, layout, index, parts)
        x = ops.reshape(vectors.to_units(ops, values, unit), (1, -1))
        parts["code"] = ops.reshape(autoencoder.encode(ops, state.encoder, x), (-1,))
        body = wire.pack_body(ops, lgc.code_parts(layout), parts)
        message.append(vectors.pack(lgc, ops, context, finite, body))
    else:
        values = vectors.values_to_send(lgc, ops, state, index)
    state = vectors.count_sent(ops, layout, state, index)
    innovated, own = vectors.innovation(lgc, ops, layout, index, values)
    layout_parts = lgc.innovation_parts(layout)
    parts, innovated, place = lgc.coding.encode(ops, layout, layout_parts, innovated, context.step)
    parts["values"] = ops.where(innovated < layout.sink, ops.gather(own, place), 0.0)
    parts["asked"] = state.asked[0]
    body = wire.pack_body(ops, layout_parts, parts)
    message.insert(0, vectors.pack(lgc, ops, context, finite, body))
    size = lgc.compressed_bytes(layout, ranks)
    lengths = tuple(size["worker"] + size["common"] * (r == common) for r in range(ranks))
    everything = yield Gather(ops.concat(message), lgc.master, lengths)
    if rank == lgc.master:
        answer, state = reconstruct(lgc, ops, context, state, everything, lengths)
    else:
        answer = ops.zeros((size["master"],), "uint8")
    answer = yield Broadcast(answer, lgc.master)
    changed, mean, loss = decode_answer(lgc, ops, context, answer)
    weight = context.prescale * context.postscale * ranks
    sums = patterns.check_sum(ops, mean * weight)
    total = ops.clear_last(ops.put(ops.clear(gradient), changed, sums))
    spots = training.spots(ops, context.step, capacity)
    own = vectors.at(ops, index, values, ops.gather(changed, spots))
    if lgc.feedback == "exact":
        # Selected values whose index is in the answer move from `r` to `owed`.
        _, there = vectors.among(ops, ops.sort(changed), index)
        kept, owed = (ops.gather(x, index) for x in (state.memory.r, state.owed))
        state = vectors.set_owed(lgc, ops, state, index, ops.where(there, values, owed))
        owed = ops.gather(state.owed, changed) - mean
        state = vectors.set_owed(lgc, ops, state, changed, owed)
        memory = state.memory
        memory = memory._replace(r=ops.put(memory.r, index, ops.where(there, 0.0, kept)))
        if lgc.momentum and lgc.masking:  # mask the elements that this rank sent
            u = ops.put(memory.u, innovated, 0.0)
            memory = memory._replace(u=ops.put(u, index, 0.0) if rank == common else u)
        state = state._replace(memory=lgc.without_sink(ops, memory))
    else:
        state = vectors.commit(lgc, ops, state, index)
    sampled = ops.stack((own, ops.gather(mean, spots)))
    loss = ops.reshape(loss, ()) * 1.0
    state = training.update_drift(lgc, ops, state._replace(asked=sampled, loss=loss))
    return total, state


def decode_answer(
    lgc: LGCSettings, ops: Ops, context: Context, answer: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Decode the master's answer: the changed indices, the mean there, and the loss.

    Raises:
        PayloadError, NonFiniteGradientError: on all ranks, if the master received such a payload.
    """
    layout, ranks = context.layout, context.size
    header, bodies = vectors.unpack(lgc, ops, context, ops.reshape(answer, (1, -1)))
    back = wire.unpack_body(ops, lgc.back_parts(layout, ranks), bodies)
    back = {name: part[0] for name, part in back.items()}
    verdict = back["verdict"]
    sound = ops.require({wire.DAMAGED: verdict != _DAMAGED}, PayloadError)
    fine = ops.require({wire.NOT_FINITE: verdict != _NOT_FINITE}, NonFiniteGradientError)
    places = ops.sort(lgc.coding.decode(ops, layout, back, lgc.capacity(layout)))
    others = {name.removeprefix(OTHERS): part for name, part in back.items() if OTHERS in name}
    outside = lgc.coding.decode(ops, layout, others, lgc.outside(layout, ranks))
    changed = ops.concat((places, outside))
    if sound is not None:
        good = ops.sum(ops.cast(sound & fine & header.intact, "int64")) == ranks
        changed = ops.where(good, changed, layout.sink)
    mean = ops.cast(back["values"], "float32") * back["most"]
    return changed, ops.where(changed < layout.sink, mean, 0.0), back["loss"]


def reconstruct(
    lgc: LGCSettings,
    ops: Ops,
    context: Context,
    state: LGCState,
    everything: Tensor,
    lengths: Sequence[int],
) -> tuple[Tensor, Any]:
    """Return the master's answer (reconstructed mean, verdict on each rank) and its state.

    The master must not fail alone while the others wait, so it reports damage as a verdict.
    """
    layout, ranks, common = context.layout, context.size, lgc.common(context.size)
    capacity, count = lgc.capacity(layout), lgc.innovations(layout)
    base = lgc.compressed_bytes(layout, ranks)["worker"]
    starts = [sum(lengths[:rank]) for rank in range(ranks)]
    workers = ops.stack([everything[start : start + base] for start in starts])
    extra = ops.reshape(
        everything[starts[common] + base : starts[common] + lengths[common]], (1, -1)
    )
    header = patterns.header_of(lgc, context)
    facts, finite = wire.examine(ops, header, workers)
    more, _ = wire.examine(ops, header, extra)
    intact = ops.cast(facts, "int64")
    whole = intact * ops.where(ops.arange(ranks) == common, ops.cast(more, "int64"), intact * 0 + 1)
    verdict = ops.where(finite, _FINE, _NOT_FINITE)
    verdict = ops.where(whole > 0, verdict, _DAMAGED)

    payload = wire.unpack_body(ops, lgc.innovation_parts(layout), wire.bodies_of(workers))
    sampled = ops.reshape(payload.pop("asked"), (ranks, SAMPLED))
    sampled = ops.sum(sampled, 0) * (1.0 / ranks)
    state = training.update_loss(ops, state, sampled, state.asked[1] - sampled)
    payload["values"] = ops.reshape(payload["values"], (ranks, count))
    innovations = vectors.sent_by_ranks(lgc, ops, layout, payload, count)
    choice = wire.unpack_body(ops, lgc.code_parts(layout), wire.bodies_of(extra))
    choice = {name: part[0] for name, part in choice.items()}
    places = ops.sort(lgc.coding.decode(ops, layout, choice, capacity))
    unit = vectors.unit(lgc, ops, layout, places, choice)
    code = ops.reshape(choice["code"], (1, -1))
    channels = [vectors.at(ops, *innovation, places) for innovation in innovations]
    decoded = autoencoder.decode(
        ops, state.decoder, code, ops.stack([vectors.to_units(ops, x, unit) for x in channels])
    )
    mean = ops.sum(decoded, 0)[:capacity] * (unit * (1.0 / ranks))

    lonely = [ops.where(vectors.among(ops, places, i)[1], layout.sink, i) for i, _ in innovations]
    outside = _distinct(ops, ops.concat(lonely), layout.sink)[: lgc.outside(layout, ranks)]
    rest = lgc.coding.parts(layout, lgc.outside(layout, ranks))
    others, outside, _ = lgc.coding.encode(ops, layout, rest, outside, context.step)
    found = [vectors.at(ops, *innovation, outside) for innovation in innovations]
    changed = ops.concat((places, outside))
    mean = ops.concat((mean, ops.sum(ops.stack(found), 0) * (1.0 / ranks)))
    mean = ops.where(changed < layout.sink, mean, 0.0)
    most = ops.reshape(ops.max(ops.abs(mean)), (1,))
    most = ops.where(most > 0, most, 1.0)
    back = {name: choice[name] for name in lgc.coding.parts(layout, capacity)}
    back |= {OTHERS + name: part for name, part in others.items()}
    back |= {"values": mean / most, "most": most, "verdict": verdict}
    back["loss"] = ops.reshape(state.loss, (1,))
    body = wire.pack_body(ops, lgc.back_parts(layout, ranks), back)
    return vectors.pack(lgc, ops, context, True, body), state


def _distinct(ops: Ops, index: Tensor, sink: int) -> Tensor:
    """Return the distinct indices, ascending, padded with the sink."""
    ascending = ops.sort(index)
    before = ops.concat((ops.full((1,), -1), ascending[:-1]))
    return ops.sort(ops.where(ascending == before, sink, ascending))
