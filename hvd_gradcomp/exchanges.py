"""How payloads meet: small generators, one a pattern of communication."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_gradcomp import wire
from hvd_gradcomp.aggregator import Context, Program
from hvd_gradcomp.collectives import Allgather, Allreduce
from hvd_gradcomp.ops import Ops, Tensor

if TYPE_CHECKING:
    from hvd_gradcomp.codecs.linear import LinearCompressor
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

    One collective. All ranks read all headers, so all choose the same rung for the next step.
    """
    layout = context.layout
    rung, ladder = codec.ladder(layout).climb(ops, state.ladder)
    encoded, state = codec.encode(ops, layout, rung, context.step, gradient, state, moment)
    header = wire.Header(
        codec.algorithm,
        codec.digest(layout),
        context.step % (1 << 32),
        rung.index,
        encoded.sent,
        encoded.wanted,
    )
    buffers = yield Allgather(wire.seal(ops, header, encoded.body))
    header, bodies = wire.open_sealed(ops, header, buffers)
    weights = ops.full((context.size,), context.prescale * context.postscale, "float32")
    if header.intact is not None:
        weights = weights * ops.cast(header.intact, "float32")
    total = codec.decode_sum(ops, layout, rung, bodies, weights, room=gradient)
    needed = ops.stage(ops.max(header.wanted))
    return total, state._replace(ladder=ladder._replace(needed=needed))


def allreduce(
    codec: LinearCompressor, ops: Ops, context: Context, gradient: Tensor, state: object
) -> Program:
    """The ranks' codes are added up on the way: for codecs whose codes may be added."""
    code = codec.encode(ops, gradient)
    total = yield Allreduce(code, context.prescale, context.postscale)
    return codec.decode(ops, context.layout, total), state
