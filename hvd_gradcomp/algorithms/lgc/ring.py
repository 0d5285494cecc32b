"""Ring-allreduce pattern of LGC: Algorithm 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvd_gradcomp.algorithms.lgc import training, vectors
from hvd_gradcomp.algorithms.lgc.settings import LGCSettings, LGCState, packed_bytes
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.core import patterns, wire
from hvd_gradcomp.core.collectives import Allgather, Allreduce
from hvd_gradcomp.core.compressor import Context, Program
from hvd_gradcomp.ops import Ops, Tensor


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
    leader = patterns.draw_number(context.step, lgc.seed, context.size)
    finite, gradient = patterns.check_storable(ops, gradient)
    taken = vectors.accumulate_and_select(
        lgc, ops, context, finite, gradient, state, leader == context.rank
    )
    state = state._replace(memory=taken.memory, hint=taken.hint)
    index, choice = yield from places(
        lgc, ops, context, leader, finite, taken.index, state, compress
    )
    # Codes hold `r` alone; `owed` waits until values travel.
    r = ops.gather(state.memory.r, index)
    values = r if compress else vectors.values_to_send(lgc, ops, state, index)
    state = vectors.count_sent(ops, layout, state, index)
    poison = patterns.poison(ops, finite)
    if compress:
        total, state = yield from exchange_codes(
            lgc, ops, context, state, index, values, choice, poison
        )
    elif train:
        buffers = yield Allgather(
            vectors.pack(lgc, ops, context, finite, ops.to_bytes(values, "float32"))
        )
        header, bodies = vectors.unpack(lgc, ops, context, buffers)
        sent = ops.from_bytes(bodies, "float32")  # [ranks, selected]
        weights = ops.reshape(patterns.weights_of(ops, context, header), (-1, 1))
        weighted = sent * weights
        total = weighted[0]
        for rank in range(1, context.size):
            total = total + weighted[rank]
        total = patterns.check_sum(ops, total)
        state = vectors.commit(lgc, ops, state, index)
        if context.rank == lgc.master:
            loss = training.ring_loss(lgc, ops, context, leader, index, sent)
            state = training.train_step(lgc, ops, state, elapsed, loss)
        if last:
            state = yield from training.distribute(lgc, ops, context, state)
    else:
        vector = ops.concat((values, poison))
        total = yield Allreduce(vector, context.prescale, context.postscale)
        total = patterns.strip_poison(ops, total)
        state = vectors.commit(lgc, ops, state, index)
    return ops.clear_last(ops.put(ops.clear(gradient), index, total)), state


def places(
    lgc: LGCSettings,
    ops: Ops,
    context: Context,
    leader: Any,
    finite: Any,
    chosen: Tensor,
    state: LGCState,
    compress: bool,
) -> Any:
    """Broadcast the leader's indices, ascending, and, for codes, its signs and scales."""
    layout = context.layout
    capacity = lgc.capacity(layout)
    coding = lgc.coding.parts(layout, capacity)
    parts = lgc.choice_parts(layout) if compress else coding

    def payload() -> Tensor:
        choice, sent, _ = lgc.coding.encode(ops, layout, coding, chosen, context.step)
        if compress:
            sent = ops.sort(sent)
            values = ops.gather(state.memory.r, sent)
            choice |= vectors.measure(lgc, ops, layout, sent, values)
        return vectors.pack(lgc, ops, context, finite, wire.pack_body(ops, parts, choice))

    size = packed_bytes(parts)
    buffer = yield from patterns.from_leader(ops, context, leader, payload, size)
    header, bodies = vectors.unpack(lgc, ops, context, ops.reshape(buffer, (1, -1)))
    choice = {name: part[0] for name, part in wire.unpack_body(ops, parts, bodies).items()}
    index = lgc.coding.decode(ops, layout, choice, capacity)
    if header.intact is not None:
        index = ops.where(header.intact, index, layout.sink)
    return ops.sort(index), choice


def exchange_codes(
    lgc: LGCSettings,
    ops: Ops,
    context: Context,
    state: LGCState,
    index: Tensor,
    values: Tensor,
    choice: Mapping[str, Tensor],
    poison: Tensor,
) -> Any:
    """Exchange codes instead of values; return the decoded sum and the state."""
    layout, selected = context.layout, values.shape[0]
    unit = vectors.unit(lgc, ops, layout, index, choice)
    x = ops.reshape(vectors.to_units(ops, values, unit), (1, -1))
    code = ops.reshape(autoencoder.encode(ops, state.encoder, x), (-1,))
    spots = training.spots(ops, context.step, selected)
    total = yield Allreduce(
        ops.concat((code, ops.gather(values, spots), poison)), 1.0, 1.0 / context.size
    )
    total = patterns.strip_poison(ops, total)
    length, exact = code.shape[0], lgc.feedback == "exact"
    codes = ops.stack((total[:length], code) if exact else (total[:length],))
    decoded = autoencoder.decode(ops, state.decoder, codes)[:, :selected] * unit
    back = ops.where(index < layout.sink, decoded[0], 0.0)
    weight = context.prescale * context.postscale * context.size
    result = patterns.check_sum(ops, back * weight)
    owed = ops.gather(state.owed, index) if exact else 0.0
    state = vectors.commit(lgc, ops, state, index)
    if exact:
        own, memory = ops.where(index < layout.sink, decoded[1], 0.0), state.memory
        memory = memory._replace(r=ops.clear_last(ops.put(memory.r, index, values - own)))
        state = vectors.set_owed(lgc, ops, state._replace(memory=memory), index, owed + own - back)
    sampled = total[length:]
    state = training.update_loss(ops, state, sampled, ops.gather(back, spots) - sampled)
    state = training.update_drift(lgc, ops, state)
    return result, state
