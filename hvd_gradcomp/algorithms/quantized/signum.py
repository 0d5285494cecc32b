"""Signum with majority vote (Bernstein et al. 2018, 2019): signs of the momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from hvd_gradcomp.core import validate
from hvd_gradcomp.core.collectives import Allgather, Allreduce
from hvd_gradcomp.core.cost_model import Exchange, dense_exchange
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.row_groups import RowGroup, RowGroups
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.method.compressor import Compressor, Context, Program
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP


class Momentum(NamedTuple):
    """State of one bucket."""

    m: Tensor  # float32 [size]; rank-local


@dataclass(frozen=True)
class SignumCompressor(Compressor):
    """Sends the signs of the momentum; the majority of ranks decides (Bernstein et al. 2018).

    Each step: `m = momentum * m + (1 - momentum) * g`; the result is the sign of the sum over ranks
    of `sign(m)`, and 0 where they tie. Every element moves by the learning rate: take a small one
    and SGD without momentum. Keep the scale of the result in mind with weight decay and clipping.

    What travels: 1 bit for each element, by allgather. If a rank would receive more bytes than with
    dense gradients, the signs as half precision, by allreduce. State: m, 4 bytes for each element.

    Default: `SignumCompressor()`, as trained in docs/papers.md with SGD without momentum at a rate
    of 0.001.

    Args:
        momentum: in [0, 1); 0 is signSGD with majority vote.

    Differs from the paper: there is no server. One bit has no zero: an element whose m is 0 counts
    as positive and negative in turn, from step to step and from rank to rank.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> SignumCompressor()
    SignumCompressor(momentum=0.9)
    """

    momentum: float = 0.9

    block = GROUP

    def __post_init__(self) -> None:
        validate.real(self, "momentum", low=0, high=1, closed="[")

    def layer_bytes(self, shape: Sequence[int]) -> float:
        return -(-prod(shape) // GROUP) * GROUP / 8

    def exchange_of(self, layout: Layout, ranks: int) -> Exchange:
        bits = Exchange("allgather", (("allgather", wire.HEADER_BYTES + layout.size / 8),))
        if bits.received(ranks) <= dense_exchange(layout.elements).received(ranks):
            return bits
        return Exchange("halves", (("allreduce", 2.0 * (layout.size + 1)),))

    def init(self, ops: Ops, layout: Layout) -> Momentum:
        return Momentum(ops.zeros((layout.size,)))

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: Momentum, **extra: Tensor
    ) -> Program:
        del extra
        layout, rank = context.layout, context.rank
        layers = [RowGroup(at, 1, n) for at, n in zip(layout.offsets, layout.sizes) if n]
        row_groups = RowGroups(tuple(layers))
        finite, gradient = patterns.check_storable(ops, gradient)
        negative = 1 - (context.step + rank) % 2  # what a zero counts as
        unit = context.prescale * context.postscale * context.size
        if self.exchange_of(layout, context.size).kind == "halves":
            ahead = ops.scale(gradient, 1.0 - self.momentum)
            m = ops.accumulate(ahead, ops.times(state.m, self.momentum))
            zero = ops.cast(1 - ops.words((negative,)) * 2, "float32")
            sign = ops.cast(ops.signs(ops.where(m == 0, zero, m), 1.0), "float16")
            healthy = ops.cast(patterns.poison(ops, finite), "float16")
            total = yield Allreduce(ops.concat((sign, healthy)), 1.0, 1.0)
            votes = patterns.strip_poison(ops, ops.cast(total, "float32"))
            result = _within(ops, layers, ops.signs(votes, unit))
            return result, Momentum(ops.overwrite(state.m, m))
        m, codes = ops.momentum_signs(row_groups, state.m, gradient, self.momentum, negative)
        header = patterns.header_of(self, context, finite)
        buffers = yield Allgather(wire.pack(ops, header, codes))
        plain = context._replace(prescale=1.0, postscale=1.0)
        expected, spec = patterns.header_of(self, context), patterns.reduction_spec(plain, {})
        header, bodies = wire.unpack(ops, expected, buffers, spec)
        weights = patterns.weights_of(ops, plain, header)
        result, m = ops.majority(row_groups, bodies, weights, unit, m, state.m)
        return result, Momentum(m)


def _within(ops: Ops, layers: Sequence[RowGroup], x: Tensor) -> Tensor:
    """Return x with zeros outside of the layers."""
    pieces, end = [], 0
    for layer in layers:
        pieces += [ops.zeros((layer.start - end,)), x[layer.start : layer.end]]
        end = layer.end
    return ops.concat([*pieces, ops.zeros((x.shape[0] - end,))])
