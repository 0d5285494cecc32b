"""Ok-Topk: top-k elements that owners add up and choose again (Li and Hoefler 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

from hvd_gradcomp.codecs import owners
from hvd_gradcomp.codecs.clipping import Clipping
from hvd_gradcomp.codecs.elias_fano import EliasFano
from hvd_gradcomp.codecs.owners import Chosen, Elements, Message
from hvd_gradcomp.codecs.quantized import EXCHANGES
from hvd_gradcomp.codecs.topk import count_of
from hvd_gradcomp.codecs.values import VALUES, ValueCoding, ValueGroups
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.cost_model import Exchange, cheapest, dense_exchange, two_shot_exchange
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.method.compressor import Context, Program, Report
from hvd_gradcomp.method.handover import Handover
from hvd_gradcomp.ops import Ops, Tensor


class OkTopKState(NamedTuple):
    """State of one bucket."""

    r: Tensor  # float32 [size], what was not sent; rank-local
    knots: Tensor  # int64 [KNOTS + 1], ends of stretches with as many elements; replicated
    sent: Tensor  # int64 [layers], elements that this rank has sent so far
    hint: Tensor  # float32 [1], magnitude to search from in the next step; rank-local


@dataclass(frozen=True)
class OkTopKCompressor(Clipping, Handover):
    """Top-k of which each rank owns a region: it adds up and chooses again (Li and Hoefler 2022).

    Each step: `r += g`; each rank chooses the `k = max(1, round(n * density))` largest `|r|` of a
    bucket of n elements, across the borders of layers. Each rank owns a region of the bucket. All
    send the owner those of their k that lie there, at most `slack * k / ranks`. It adds them up in
    the order of ranks, and sends all ranks the `slack * k / ranks` largest of its sum. Then a rank
    sends and receives less than 6k words of 4 bytes, whatever the number of ranks (if k is above
    25 times that); an allgather would bring it the k elements of each.

    Nothing is lost: what finds no room stays in the sender's r, what the owner leaves out goes into
    the owner's r, and so does what rounding takes.

    Balance: each message says how many elements were chosen in its region. From the sums of
    these and the places of the result all ranks compute regions with as many elements each, for the
    next step.

    What travels: values, float32 by default, and places by Elias-Fano, some
    `log2(ranks / density) + 2` bits each. By allgather, with 1 or 2 ranks, each rank receives the k
    elements of all others. If a rank would receive more bytes than with dense gradients, all
    elements are sent, 4 bytes each, by allreduce. State: `r`, 4 bytes for each element.

    Default: `OkTopKCompressor(density=0.01)`, as trained on digits among 8 ranks
    (docs/algorithms/balanced.md).

    Args:
        density: share of elements to send, in (0, 1]; smaller sends less.
        values: code of the sent values: "float32", "bfloat16", "int8", "int4", "int2" or "sign";
            neighbours in a layer, some 4,096 at most, share a scale or a codebook. Each message has
            these of all layers. Where a finer code makes the message shorter, it takes that: with
            many ranks or layers int8 or bfloat16, which have few of these or none.
        exchange: "allgather"; "two_shot", by owners; or "auto": the one that moves fewer bytes,
            from 3 ranks on by owners. "two_shot" never sends all elements.
        slack: room for elements of a region, over that for a mean one; at least 1. Larger sends
            more, and leaves less behind where regions differ.
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` before accumulating; positive; smaller clips more. None clips
            nothing.

    Differs from the paper: ranks and owners choose exactly, not by thresholds that serve several
    steps. Each owner chooses of its region, not by one threshold of all, so messages have one size
    and need no second balancing. Regions change each step, by what was counted in them; the paper
    averages what ranks propose every 64 steps. What the owner leaves out stays with the
    owner, not with those who sent it.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> OkTopKCompressor()
    OkTopKCompressor(density=0.01, values='float32', exchange='auto', slack=1.25, max_norm=None)
    """

    density: float = 0.01
    values: str = "float32"
    exchange: str = "auto"
    slack: float = 1.25
    max_norm: float | None = None

    keeps_gradient = True
    replicated = frozenset({"knots"})
    reset_on_merge = frozenset({"hint"})

    def __post_init__(self) -> None:
        validate.real(self, "density", low=0, high=1, closed="]")
        validate.one_of(self, "values", VALUES)
        validate.one_of(self, "exchange", EXCHANGES)
        validate.real(self, "slack", low=1, closed="[")
        self.validate_max_norm()

    # -- sizes -------------------------------------------------------------------------------

    @property
    def coding(self) -> ValueCoding:
        """Code of the values."""
        return VALUES[self.values]

    def count(self, layout: Layout) -> int:
        """Return the number of elements that a rank chooses."""
        return count_of(layout.elements, self.density)

    def slots(self, layout: Layout, ranks: int) -> int:
        """Return the number of elements that fit into a message of one region."""
        k = self.count(layout)
        return min(k, ceil(self.slack * k / ranks))

    def message(self, layout: Layout, count: int) -> Message:
        """Return the body of so many elements, in the code of `values` or a finer, shorter one."""
        return _message_of(self, layout, count)

    def payload_bytes(self, layout: Layout) -> int:
        """Return the bytes of a bucket's payload in an allgather."""
        return wire.packed_bytes(self.message(layout, self.count(layout)).parts())

    def shard_bytes(self, layout: Layout, ranks: int) -> int:
        """Return the bytes of a message to or from an owner."""
        return wire.packed_bytes(self.message(layout, self.slots(layout, ranks)).parts())

    def exchange_of(self, layout: Layout, ranks: int) -> Exchange:
        two_shot = two_shot_exchange(float(self.shard_bytes(layout, ranks)), ranks)
        if self.exchange == "two_shot":
            return two_shot
        gathered = Exchange("allgather", (("allgather", float(self.payload_bytes(layout))),))
        compressed = [gathered, two_shot] if self.exchange == "auto" else [gathered]
        return cheapest([*compressed, dense_exchange(layout.elements)], ranks)

    def layer_bytes(self, shape: Sequence[int]) -> float:
        size = 1 << 20  # layers compete, so a small one need not send any
        count = count_of(size, self.density)
        places = int(wire.body_bytes(EliasFano.of(1, count, size).parts()))
        return prod(shape) / size * (places + self.coding.layer_bytes(count))

    # -- one step ----------------------------------------------------------------------------

    def init(self, ops: Ops, layout: Layout) -> OkTopKState:
        sent = ops.zeros((len(layout.names),), "int64")
        hint = ops.full((1,), float("inf"), "float32")
        return OkTopKState(ops.zeros((layout.size,)), owners.first_knots(ops, layout), sent, hint)

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: OkTopKState, **extra: Tensor
    ) -> Program:
        gradient, _ = self.clipped(ops, context, gradient, extra)
        exchange = self.exchange_of(context.layout, context.size)
        if exchange.kind == "dense":
            return (yield from self.dense(ops, context, gradient, state))
        finite, gradient = patterns.check_storable(ops, gradient)
        if finite is False:  # the others learn of it, and nobody's state changes
            gradient = ops.clear(gradient)
        k, header = self.count(context.layout), patterns.header_of(self, context, finite)
        chosen = owners.choose(ops, context, gradient, state.r, state.hint, k, k)
        steps = self.two_shot if exchange.kind == "two_shot" else self.allgather
        return (yield from steps(ops, context, header, chosen, state))

    def allgather(
        self, ops: Ops, context: Context, header: wire.Header, chosen: Chosen, state: OkTopKState
    ) -> Program:
        """Gather the elements of all ranks, and add them up in their order."""
        k = self.count(context.layout)
        message, elements = self.message(context.layout, k), chosen.elements.as_row(ops)
        _, every, sent = yield from message.gather(ops, context, header, elements, ops.words((k,)))
        ranks = range(context.size)
        received = [Elements(every.index[rank], every.values[rank]) for rank in ranks]
        total, r, per_layer = owners.commit(
            ops, context, chosen.accumulated, state.r, sent.flat(ops), received
        )
        return total, state._replace(r=r, sent=state.sent + per_layer, hint=chosen.hint)

    def two_shot(
        self, ops: Ops, context: Context, header: wire.Header, chosen: Chosen, state: OkTopKState
    ) -> Program:
        """Add up the elements of each region at its owner, and gather the largest of the sums."""
        message = self.message(context.layout, self.slots(context.layout, context.size))
        done = yield from owners.exchange(
            ops, context, message, header, chosen.elements, state.knots
        )
        total, r, per_layer = owners.commit(
            ops, context, chosen.accumulated, state.r, done.sent, [done.total], done.left
        )
        return total, OkTopKState(r, done.knots, state.sent + per_layer, chosen.hint)

    def dense(self, ops: Ops, context: Context, gradient: Tensor, state: OkTopKState) -> Program:
        """Send all elements, where these are fewer bytes."""
        whole = ops.accumulate(gradient, state.r)
        total = patterns.check_sum(ops, (yield from patterns.allreduce_bucket(ops, context, whole)))
        sent = state.sent + ops.words(context.layout.sizes)
        return total, state._replace(r=ops.clear(state.r), sent=sent)

    # -- reports -----------------------------------------------------------------------------

    def report(self, layout: Layout, state: OkTopKState, steps: int, since: int = 0) -> Report:
        del layout, steps, since
        return Report([int(n) for n in state.sent], state.r)

    def residual(self, state: OkTopKState) -> Tensor:
        return state.r

    def inherit(
        self, ops: Ops, state: OkTopKState, gradient: Tensor, residual: Tensor
    ) -> tuple[OkTopKState, Tensor]:
        del ops
        return state._replace(r=state.r + residual), gradient


@lru_cache(maxsize=1024)
def _message_of(compressor: OkTopKCompressor, layout: Layout, count: int) -> Message:
    groups = ValueGroups.of_model(layout, compressor.count(layout), count)
    groups = replace(groups, ascending=True)
    # A message is of one region, and has the side values of all layers: among many ranks, or with
    # many layers, codebooks take more than their codes save.
    finer = [*VALUES][: [*VALUES].index(compressor.values) + 1]
    messages = [Message.of(layout, count, VALUES[name], groups) for name in finer]
    return min(messages, key=lambda message: wire.packed_bytes(message.parts()))
