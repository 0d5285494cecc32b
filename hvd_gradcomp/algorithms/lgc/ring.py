"""Algorithm 2: ring-allreduce."""

from __future__ import annotations

from typing import Any

from hvd_gradcomp import exchanges, wire
from hvd_gradcomp.aggregator import Context, Program
from hvd_gradcomp.algorithms.lgc import training, vectors
from hvd_gradcomp.algorithms.lgc.settings import LGCSettings, sealed_bytes
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.codecs.sparse import Memory
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
    finite, gradient = exchanges.checked(ops, gradient)
    memory = vectors.advanced(lgc, ops, gradient, state)
    index, scale = yield from places(lgc, ops, context, finite, memory, state)
    values = vectors.with_owed(
        lgc, ops, state, index, ops.gather(memory[0], index)
    )  # 0 in the sink
    state = vectors.counted(lgc, ops, layout, state, index)
    memory = lgc.settled(ops, lgc.settle(ops, memory, index))
    poison = exchanges.poison(ops, finite)
    if compress:
        return (yield from coded(lgc, ops, context, memory, state, index, values, scale, poison))
    if train:
        buffers = yield Allgather(
            vectors.sealed(lgc, ops, context, finite, ops.to_bytes(values, "float32"))
        )
        header, bodies = vectors.opened(lgc, ops, context, buffers)
        sent = ops.from_bytes(bodies, "float32")  # [ranks, selected]
        state = vectors.owing(lgc, ops, state, index, 0.0)
        weights = ops.reshape(exchanges.weights_of(ops, context, header), (-1, 1))
        weighted = sent * weights
        total = weighted[0]
        for rank in range(1, context.size):
            total = total + weighted[rank]
        state = state._replace(memory=memory)
        if context.rank == lgc.master:
            state = training.learned(lgc, ops, state, elapsed, training.ring_loss(ops, sent, scale))
        if last:
            state = yield from training.handed_out(lgc, ops, context, state)
    else:
        said = ops.concat((values, poison))
        total = yield Allreduce(said, context.prescale, context.postscale)
        total = exchanges.unpoisoned(ops, total)
        state = vectors.owing(lgc, ops, state._replace(memory=memory), index, 0.0)
    mean = ops.clear_last(ops.put(ops.zeros((layout.size,)), index, total))
    return mean, state


def places(
    lgc: LGCSettings, ops: Ops, context: Context, finite: Any, memory: Memory, state: Any
) -> Any:
    """The leader's indices, ascending, and the RMS of its values."""
    layout = context.layout
    leader = exchanges.drawn(context.step, lgc.seed, context.size)
    parts = lgc.choice_parts(layout)

    def payload() -> Tensor:
        mine, _, values = vectors.selected(lgc, ops, context, memory, state)
        mine["scale"] = vectors.rms(ops, values, lgc.capacity(layout))
        return vectors.sealed(lgc, ops, context, finite, wire.pack_body(ops, parts, mine))

    size = sealed_bytes(parts)
    buffer = yield from exchanges.from_leader(ops, context, leader, payload, size)
    header, bodies = vectors.opened(lgc, ops, context, ops.reshape(buffer, (1, -1)))
    mine = {name: part[0] for name, part in wire.unpack_body(ops, parts, bodies).items()}
    index = lgc.coding.decode(ops, layout, mine, lgc.capacity(layout))
    if header.intact is not None:
        index = ops.where(header.intact, index, layout.sink)
    return ops.sort(index), mine["scale"]


def coded(
    lgc: LGCSettings,
    ops: Ops,
    context: Context,
    memory: Memory,
    state: Any,
    index: Tensor,
    values: Tensor,
    scale: Tensor,
    poison: Tensor,
) -> Program:
    """A compressed step, once it is known which elements travel."""
    layout, selected = context.layout, values.shape[0]
    x = ops.reshape(vectors.scaled(ops, values, scale), (1, -1))
    code = autoencoder.encode(ops, state.encoder, x)

    def decoded(code: Tensor) -> Tensor:
        vector = ops.reshape(autoencoder.decode(ops, state.decoder, code), (-1,))
        return ops.where(index < layout.sink, vector[:selected] * scale, 0.0)

    said = ops.concat((ops.reshape(code, (-1,)), ops.reshape(state.local, (1,)), poison))
    total = yield Allreduce(said, 1.0, 1.0 / context.size)
    total = exchanges.unpoisoned(ops, total)
    back, mine = decoded(ops.reshape(total[:-1], (1, -1))), decoded(code)
    missed = values - mine
    if lgc.feedback == "exact":
        memory = lgc.settled(ops, memory._replace(r=ops.put(memory.r, index, missed)))
        state = vectors.owing(lgc, ops, state, index, mine - back)
    local = vectors.share(ops, missed, values)
    state = training.watched(lgc, ops, state._replace(memory=memory, local=local), total[-1:])
    weight = context.prescale * context.postscale * context.size
    mean = ops.put(ops.zeros((layout.size,)), index, back * weight)
    return ops.clear_last(mean), state
