"""What both patterns do with the elements that are selected, one vector for the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_gradcomp import exchanges, wire
from hvd_gradcomp.aggregator import Context, Program
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.codecs.largest import Scope
from hvd_gradcomp.codecs.selection import layer_of
from hvd_gradcomp.codecs.sparse import Memory
from hvd_gradcomp.collectives import Allreduce
from hvd_gradcomp.layout import Layout
from hvd_gradcomp.ops import Ops, Tensor

if TYPE_CHECKING:
    from hvd_gradcomp.algorithms.lgc.settings import LGCSettings

_MAGNITUDE = (1 << 31) - 1


def whole(lgc: LGCSettings, ops: Ops, context: Context, gradient: Tensor, state: Any) -> Program:
    """The first phase; momentum comes after the exchange, and goes on as the velocity `u`."""
    finite, gradient = exchanges.checked(ops, gradient)
    said = ops.concat((gradient, exchanges.poison(ops, finite)))
    total = yield Allreduce(said, context.prescale, context.postscale)
    total = exchanges.unpoisoned(ops, total)
    if not lgc.momentum:
        return total, state
    ahead, u = ops.zeros(total.shape), state.memory.u * 1
    ahead, u = ops.advance(ahead, u, total, lgc.momentum, bool(lgc.nesterov))
    return ahead, state._replace(memory=state.memory._replace(u=u))


def advanced(lgc: LGCSettings, ops: Ops, gradient: Tensor, state: Any) -> Memory:
    """The memory with the gradient in it; the old one stays, in case the step fails."""
    return lgc.collect(ops, type(state.memory)(*(x * 1 for x in state.memory)), gradient)


def selected(
    lgc: LGCSettings, ops: Ops, context: Context, memory: Memory, state: Any
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The largest elements of each layer: parts that say which, their indices, their values."""
    layout = context.layout
    scope, quota = Scope(layout, whole=False), ops.words(lgc.most(layout))
    parts, index, code, _ = lgc.select(ops, scope, context.step, memory[0], quota, None)
    index, code = (ops.reshape(x, (lgc.capacity(layout),)) for x in (index, code))
    return parts, index, with_owed(lgc, ops, state, index, ops.bits_float(code))


def with_owed(lgc: LGCSettings, ops: Ops, state: Any, index: Tensor, values: Tensor) -> Tensor:
    """Values of `r` at some places, with what is owed there."""
    return values + ops.gather(state.owed, index) if lgc.feedback == "exact" else values


def owing(lgc: LGCSettings, ops: Ops, state: Any, index: Tensor, values: Any) -> Any:
    """The state with other values owed at some places."""
    if lgc.feedback == "paper":
        return state
    owed = ops.put(state.owed * 1, index, values)
    return state._replace(owed=ops.clear_last(owed))


def sealed(lgc: LGCSettings, ops: Ops, context: Context, finite: Any, body: Tensor) -> Tensor:
    """A body as it travels."""
    return wire.seal(ops, exchanges.header_of(lgc, context, finite), body)


def opened(
    lgc: LGCSettings, ops: Ops, context: Context, buffers: Tensor
) -> tuple[wire.Header, Tensor]:
    """What travelled: the headers and the bodies."""
    return wire.open_sealed(ops, exchanges.header_of(lgc, context), buffers)


def counted(lgc: LGCSettings, ops: Ops, layout: Layout, state: Any, index: Tensor) -> Any:
    """The state with what was sent counted."""
    real = ops.cast(index < layout.sink, "int64")
    per_layer = ops.segment_sum(real, layer_of(ops, layout, index), len(layout.names))
    return state._replace(sent=state.sent + per_layer)


def rms(ops: Ops, values: Tensor, count: int) -> Tensor:
    """The root of the mean square, 1 for zeros; float32 [1]."""
    mean = ops.reshape(ops.sum(values * values), (1,)) * (1.0 / count)
    return ops.where(mean > 0, ops.sqrt(mean), 1.0)


def scaled(ops: Ops, values: Tensor, scale: Tensor) -> Tensor:
    """In units of the scale, filled up with zeros to what the autoencoder takes."""
    missing = autoencoder.padded(values.shape[0]) - values.shape[0]
    return ops.concat((values / scale, ops.zeros((missing,))))


def share(ops: Ops, missed: Tensor, values: Tensor) -> Tensor:
    """The energy of one as a share of the other's; 0 of nothing."""
    energy = ops.sum(values * values)
    return ops.where(energy > 0, ops.sum(missed * missed) / ops.where(energy > 0, energy, 1.0), 0.0)


def strongest(ops: Ops, values: Tensor, count: int) -> Tensor:
    """Places of the largest magnitudes, ascending; int64 [count]. Of equals the first."""
    length = values.shape[0]
    weakness = _MAGNITUDE - ops.float_bits(ops.abs(values))
    ranked = ops.sort(weakness * length + ops.arange(length))[:count]
    return ops.sort(ranked % length)


def at(ops: Ops, layout: Layout, index: Tensor, values: Tensor, places: Tensor) -> Tensor:
    """A sparse vector's values at other places, 0 where it has none."""
    dense = ops.put(ops.zeros((layout.size,)), index, values)
    return ops.gather(ops.clear_last(dense), places)
