"""Algorithm 2: ring-allreduce."""

from __future__ import annotations

from typing import Any

from hvd_gradcomp import exchanges, wire
from hvd_gradcomp.aggregator import Context, Program
from hvd_gradcomp.algorithms.lgc import training, vectors
from hvd_gradcomp.algorithms.lgc.settings import LGCSettings, sealed_bytes
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.collectives import Allgather, Allreduce
from hvd_gradcomp.ops import Ops, Tensor


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
    leader = exchanges.drawn(context.step, lgc.seed, context.size)
    finite, gradient = exchanges.checked(ops, gradient)
    taken = vectors.taken_in(lgc, ops, context, finite, gradient, state, leader == context.rank)
    state = state._replace(memory=taken.memory, hint=taken.hint)
    index, scale = yield from places(lgc, ops, context, leader, finite, taken.index, state)
    values = vectors.with_owed(lgc, ops, state, index)
    state = vectors.counted(ops, layout, state, index)
    poison = exchanges.poison(ops, finite)
    if compress:
        total, state = yield from coded(lgc, ops, context, state, index, values, scale, poison)
    elif train:
        buffers = yield Allgather(
            vectors.sealed(lgc, ops, context, finite, ops.to_bytes(values, "float32"))
        )
        header, bodies = vectors.opened(lgc, ops, context, buffers)
        sent = ops.from_bytes(bodies, "float32")  # [ranks, selected]
        weights = ops.reshape(exchanges.weights_of(ops, context, header), (-1, 1))
        weighted = sent * weights
        total = weighted[0]
        for rank in range(1, context.size):
            total = total + weighted[rank]
        state = vectors.settled(lgc, ops, state, index)
        if context.rank == lgc.master:
            state = training.learned(lgc, ops, state, elapsed, training.ring_loss(ops, sent, scale))
        if last:
            state = yield from training.handed_out(lgc, ops, context, state)
    else:
        said = ops.concat((values, poison))
        total = yield Allreduce(said, context.prescale, context.postscale)
        total = exchanges.unpoisoned(ops, total)
        state = vectors.settled(lgc, ops, state, index)
    return ops.clear_last(ops.put(ops.clear(gradient), index, total)), state


def places(
    lgc: LGCSettings,
    ops: Ops,
    context: Context,
    leader: Any,
    finite: Any,
    chosen: Tensor,
    state: Any,
) -> Any:
    """The leader's indices, ascending, and the RMS of its values."""
    layout = context.layout
    parts, capacity = lgc.choice_parts(layout), lgc.capacity(layout)

    def payload() -> Tensor:
        coding = lgc.coding.parts(layout, capacity)
        mine, sent, _ = lgc.coding.encode(ops, layout, coding, chosen, context.step)
        mine["scale"] = vectors.rms(ops, vectors.with_owed(lgc, ops, state, sent), capacity)
        return vectors.sealed(lgc, ops, context, finite, wire.pack_body(ops, parts, mine))

    size = sealed_bytes(parts)
    buffer = yield from exchanges.from_leader(ops, context, leader, payload, size)
    header, bodies = vectors.opened(lgc, ops, context, ops.reshape(buffer, (1, -1)))
    mine = {name: part[0] for name, part in wire.unpack_body(ops, parts, bodies).items()}
    index = lgc.coding.decode(ops, layout, mine, capacity)
    if header.intact is not None:
        index = ops.where(header.intact, index, layout.sink)
    return ops.sort(index), mine["scale"]


def coded(
    lgc: LGCSettings,
    ops: Ops,
    context: Context,
    state: Any,
    index: Tensor,
    values: Tensor,
    scale: Tensor,
    poison: Tensor,
) -> Any:
    """Codes instead of values: what comes back, and the state after it."""
    selected = values.shape[0]
    x = ops.reshape(vectors.scaled(ops, values, scale), (1, -1))
    code = autoencoder.encode(ops, state.encoder, x)
    said = ops.concat((ops.reshape(code, (-1,)), ops.reshape(state.local, (1,)), poison))
    total = yield Allreduce(said, 1.0, 1.0 / context.size)
    total = exchanges.unpoisoned(ops, total)
    both = ops.stack((total[:-1], ops.reshape(code, (-1,))))
    decoded = autoencoder.decode(ops, state.decoder, both)[:, :selected] * scale
    back, mine = (ops.where(index < context.layout.sink, decoded[row], 0.0) for row in (0, 1))
    missed = values - mine
    state = vectors.settled(lgc, ops, state, index)
    if lgc.feedback == "exact":
        memory = state.memory
        memory = memory._replace(r=ops.clear_last(ops.put(memory.r, index, missed)))
        state = vectors.owing(lgc, ops, state._replace(memory=memory), index, mine - back)
    local = vectors.share(ops, missed, values)
    state = training.watched(lgc, ops, state._replace(local=local), total[-1:])
    return back * (context.prescale * context.postscale * context.size), state
