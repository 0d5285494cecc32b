"""Ok-Topk: top-k elements that owners add up and choose again (Li and Hoefler 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, NamedTuple

from hvd_gradcomp.codecs.clipping import Clipping
from hvd_gradcomp.codecs.compaction import window
from hvd_gradcomp.codecs.elias_fano import EliasFano
from hvd_gradcomp.codecs.quantized import EXCHANGES
from hvd_gradcomp.codecs.topk import count_of
from hvd_gradcomp.codecs.topk_select import largest, of_blocks
from hvd_gradcomp.codecs.values import VALUES, ValueCoding
from hvd_gradcomp.core import patterns, validate, wire
from hvd_gradcomp.core.collectives import Allgather, Alltoall
from hvd_gradcomp.core.compressor import Compressor, Context, Program, Report
from hvd_gradcomp.core.cost_model import volume
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.kernel_params import Collecting, Form
from hvd_gradcomp.ops.scope import Scope, layer_of

KNOTS = 256  # stretches of a bucket from which as many elements are chosen


class OkTopKState(NamedTuple):
    """State of one bucket."""

    r: Tensor  # float32 [size], what was not sent; rank-local
    knots: Tensor  # int64 [KNOTS + 1], ends of stretches with as many elements; replicated
    sent: Tensor  # int64 [layers], elements that this rank has sent so far
    hint: Tensor  # float32 [1], magnitude to search from in the next step; rank-local


class Found(NamedTuple):
    """Elements with their places, or a row of them for each message.

    A place may be the sink, and its value is 0 then.
    """

    index: Tensor  # int64 [count], ascending; or [messages, count]
    values: Tensor  # float32, likewise


class Chosen(NamedTuple):
    """One rank's step before anything travels."""

    finite: Any
    there: Tensor  # float32 [size], `r + g`, in the gradient's memory
    elements: Found  # the k largest
    hint: Tensor


@dataclass(frozen=True, repr=False)
class OkTopKCompressor(Clipping, Compressor):
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

    Args:
        density: share of elements to send, in (0, 1]; smaller sends less.
        values: code of the sent values: "float32", "bfloat16", "int8", "int4", "int2" or "sign";
            fewer bits send less. Up to 4,096 values share a scale or a codebook.
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
    OkTopKCompressor(density=0.01, values='float32', exchange='auto', slack=1.25)
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

    def room(self, layout: Layout, ranks: int) -> int:
        """Return the number of elements that fit into a message of one region."""
        k = self.count(layout)
        return min(k, ceil(self.slack * k / ranks))

    def parts(self, layout: Layout, count: int) -> dict[str, wire.Part]:
        """Return the parts of a body of so many elements."""
        load = {"load": wire.Part("uint32", 1)}
        return {**load, **self.places(layout, count).parts(), **self.coding.parts(count)}

    def places(self, layout: Layout, count: int) -> EliasFano:
        """Return the code of so many places."""
        return EliasFano.of(1, count, layout.sink)

    def payload_bytes(self, layout: Layout) -> int:
        """Return the bytes of a bucket's payload in an allgather."""
        return wire.packed_bytes(self.parts(layout, self.count(layout)))

    def shard_bytes(self, layout: Layout, ranks: int) -> int:
        """Return the bytes of a message to or from an owner."""
        return wire.packed_bytes(self.parts(layout, self.room(layout, ranks)))

    def way(self, layout: Layout, ranks: int) -> str:
        """Return the exchange: "allgather", "two_shot" or "allreduce"."""
        if self.exchange == "two_shot":
            return "two_shot"
        shard = self.shard_bytes(layout, ranks)
        owned = volume("alltoall", ranks * shard, ranks) + volume("allgather", shard, ranks)
        moved = {"allgather": volume("allgather", self.payload_bytes(layout), ranks)}
        if self.exchange == "auto":
            moved["two_shot"] = owned
        moved["allreduce"] = volume("allreduce", 4.0 * layout.elements, ranks)
        return min(moved, key=lambda way: moved[way])  # of equal ones the first

    def layer_bytes(self, shape: Sequence[int]) -> float:
        size = 1 << 20  # layers compete, so a small one need not send any
        count = count_of(size, self.density)
        parts = {**EliasFano.of(1, count, size).parts(), **self.coding.parts(count)}
        return prod(shape) / size * int(wire.body_bytes(parts))

    # -- one step ----------------------------------------------------------------------------

    def init(self, ops: Ops, layout: Layout) -> OkTopKState:
        knots = ops.words([knot * layout.sink // KNOTS for knot in range(KNOTS + 1)])
        sent = ops.zeros((len(layout.names),), "int64")
        hint = ops.full((1,), float("inf"), "float32")
        return OkTopKState(ops.zeros((layout.size,)), knots, sent, hint)

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: OkTopKState, **extra: Tensor
    ) -> Program:
        gradient, _ = self.clipped(ops, context, gradient, extra)
        way = self.way(context.layout, context.size)
        if way == "allreduce":
            return (yield from self.dense(ops, context, gradient, state))
        chosen = self.choose(ops, context, gradient, state)
        if way == "two_shot":
            return (yield from self.two_shot(ops, context, chosen, state))
        return (yield from self.allgather(ops, context, chosen, state))

    def choose(self, ops: Ops, context: Context, gradient: Tensor, state: OkTopKState) -> Chosen:
        """Choose the k largest of `r + g`, which comes to be in the gradient's memory."""
        layout, step, k = context.layout, context.step, self.count(context.layout)
        finite, there = patterns.check_storable(ops, gradient)
        if finite is False:  # the others learn of it, and nobody's state changes
            there = ops.clear(there)
        scope, most = Scope(layout, whole=True), (k,)
        if ops.topk_kernels is not None:
            given = scope, Form.plain(k), step, None, most, state.hint, (there,), state.r
            written = ops.topk_kernels.write(Collecting(), *given, state.sent)
            index = ops.from_bytes(written.body[: 4 * k], "uint32")
            values = ops.from_bytes(written.body[4 * k :], "float32")
            there = written.memory[0]
            if ops.topk_kernels.removes:
                there = ops.put(there, index, values)
            return Chosen(finite, there, Found(index, values), written.hint)
        found, there = self.accumulated(ops, scope, there, state)
        selection, code, hint = largest(ops, scope, there, ops.words(most), most, step, found)
        elements = selection.fitting(code, k, step)
        return Chosen(finite, there, Found(elements.index, ops.bits_float(elements.code)), hint)

    def accumulated(
        self, ops: Ops, scope: Scope, gradient: Tensor, state: OkTopKState
    ) -> tuple[Tensor | None, Tensor]:
        """Return the elements that pass the hint, None if not searched, and `g + r`. Donating."""
        if not ops.dynamic_shapes:
            return None, ops.accumulate(gradient, state.r)

        def tile(there: Tensor, r: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            there = ops.accumulate(there, r)
            return there, (there,)

        bound = of_blocks(ops, scope, state.hint)
        found, (there,) = ops.search(tile, (gradient,), (state.r,), bound)
        return found, there

    def allgather(self, ops: Ops, context: Context, chosen: Chosen, state: OkTopKState) -> Program:
        """Gather the elements of all ranks, and add them up in their order."""
        layout, k = context.layout, self.count(context.layout)
        payload, sent = self.encode(ops, layout, _row(ops, chosen.elements), ops.words((k,)))
        _, found = yield from self.gathered(ops, context, k, payload, chosen.finite)
        room, state = self.commit(ops, context, chosen, state, _flat(ops, sent))
        total = ops.clear(room)
        for rank in range(context.size):
            total = ops.add_at(total, found.index[rank], found.values[rank])
        return ops.clear_last(total), state

    def two_shot(self, ops: Ops, context: Context, chosen: Chosen, state: OkTopKState) -> Program:
        """Add up the elements of each region at its owner, and gather the largest of the sums."""
        layout, ranks, room = context.layout, context.size, self.room(context.layout, context.size)
        cuts = self.cuts(ops, state.knots, ranks)
        rows, load = self.split(ops, context, cuts, chosen.elements)
        payload, sent = self.encode(ops, layout, rows, load)
        bodies = wire.pack_rows(ops, self.parts(layout, room), payload)
        plain = context._replace(prescale=1.0, postscale=1.0)
        header = patterns.header_of(self, context, chosen.finite)
        buffers = yield Alltoall(wire.pack_all(ops, header, bodies))
        expected, spec = patterns.header_of(self, context), patterns.reduction_spec(plain, {})
        header, received = wire.unpack(ops, expected, buffers, spec)
        loads, found = self.decode(ops, layout, received, room)
        found = _weighted(ops, found, patterns.weights_of(ops, plain, header))
        summed = Found(*ops.merge_rows(*found, layout.sink))

        finite, total = patterns.check_storable(ops, summed.values)
        none = ops.words((layout.sink,)), ops.zeros((1,))
        summed = Found(*(ops.concat(pair) for pair in zip((summed.index, total), none)))
        place = self.largest_of(ops, summed, room)
        again = _row(ops, Found(*(ops.gather(x, place) for x in summed)))
        payload, sums = self.encode(ops, layout, again, ops.sum(loads, 0))
        loads, found = yield from self.gathered(ops, context, room, payload, finite)
        left = ops.add_at(summed.values, place, 0.0 - _flat(ops, sums).values)
        left_index = ops.where(left != 0, summed.index, layout.sink)
        rest = Found(left_index, left)
        memory, state = self.commit(ops, context, chosen, state, _flat(ops, sent), rest)
        total = ops.clear_last(ops.add_at(ops.clear(memory), *_flat(ops, found)))
        knots = self.balanced(ops, layout, state.knots, cuts, loads, found.index)
        return total, state._replace(knots=knots)

    def dense(self, ops: Ops, context: Context, gradient: Tensor, state: OkTopKState) -> Program:
        """Send all elements, where these are fewer bytes."""
        there = ops.accumulate(gradient, state.r)
        total = patterns.check_sum(ops, (yield from patterns.allreduce_bucket(ops, context, there)))
        sent = state.sent + ops.words(context.layout.sizes)
        return total, state._replace(r=ops.clear(state.r), sent=sent)

    def gathered(
        self, ops: Ops, context: Context, count: int, payload: Mapping[str, Tensor], finite: Any
    ) -> Any:
        """Allgather bodies of so many elements; return the loads, and weighted elements."""
        (body,) = wire.pack_rows(ops, self.parts(context.layout, count), payload)
        header = patterns.header_of(self, context, finite)
        buffers = yield Allgather(wire.pack(ops, header, *body))
        expected, spec = patterns.header_of(self, context), patterns.reduction_spec(context, {})
        header, bodies = wire.unpack(ops, expected, buffers, spec)
        loads, found = self.decode(ops, context.layout, bodies, count)
        peaks = ops.reshape(ops.peaks(found.values), (-1, 1))
        header = patterns.check_summable(ops, [peaks], context, header)
        return loads, _weighted(ops, found, patterns.weights_of(ops, context, header))

    def commit(
        self,
        ops: Ops,
        context: Context,
        chosen: Chosen,
        state: OkTopKState,
        sent: Found,
        left: Found | None = None,
    ) -> tuple[Tensor, OkTopKState]:
        """Return memory for the result, and the state without what was sent, with what is left."""
        layout = context.layout
        kept = ops.add_at(chosen.there, sent.index, 0.0 - sent.values)
        if left is not None:
            kept = ops.add_at(kept, *left)
        kept = ops.clear_last(kept)
        real = ops.cast(sent.index < layout.sink, "int64")
        layers = ops.segment_sum(real, layer_of(ops, layout, sent.index), len(layout.names))
        r, room = (kept, state.r) if context.owns_gradient else (ops.overwrite(state.r, kept), kept)
        return room, state._replace(r=r, sent=state.sent + layers, hint=chosen.hint)

    # -- what travels ------------------------------------------------------------------------

    def encode(
        self, ops: Ops, layout: Layout, found: Found, load: Tensor
    ) -> tuple[dict[str, Tensor], Found]:
        """Return the parts of bodies, a row for each message, and the elements as decoded."""
        (messages, count), real = found.index.shape, found.index < layout.sink
        places = self.places(layout, count).encode_apart(ops, found.index)
        counted, coded, decoded = ops.cast(real, "int64"), [], []
        for row in range(messages):
            coded.append(self.coding.encode(ops, found.values[row], counted[row]))
            decoded.append(self.coding.decode(ops, coded[row], count))
        values = {name: ops.stack([code[name] for code in coded]) for name in coded[0]}
        payload = {"load": ops.reshape(load, (messages, 1)), **places, **values}
        return payload, Found(found.index, ops.where(real, ops.stack(decoded), 0.0))

    def decode(self, ops: Ops, layout: Layout, bodies: Tensor, count: int) -> tuple[Tensor, Found]:
        """Return the loads, int64 [ranks, 1], and the elements of each rank."""
        payload = wire.unpack_body(ops, self.parts(layout, count), bodies)
        index = self.places(layout, count).decode(ops, payload)
        values = [
            self.coding.decode(ops, {name: part[rank] for name, part in payload.items()}, count)
            for rank in range(bodies.shape[0])
        ]
        return payload["load"], Found(index, ops.where(index < layout.sink, ops.stack(values), 0.0))

    # -- regions -----------------------------------------------------------------------------

    def cuts(self, ops: Ops, knots: Tensor, ranks: int) -> Tensor:
        """Return where regions begin, and the end of the last one; int64 [ranks + 1]."""
        places = [divmod(rank * KNOTS, ranks) for rank in range(ranks + 1)]
        low = ops.gather(knots, ops.words([place for place, _ in places]))
        high = ops.gather(knots, ops.words([min(place + 1, KNOTS) for place, _ in places]))
        return low + (high - low) * ops.words([rest for _, rest in places]) // ranks

    def split(
        self, ops: Ops, context: Context, cuts: Tensor, elements: Found
    ) -> tuple[Found, Tensor]:
        """Return the elements that fit into the message of each region, and how many there are."""
        layout, ranks, room = context.layout, context.size, self.room(context.layout, context.size)
        first = ops.count_below(elements.index, cuts)
        first, load = first[:-1], first[1:] - first[:-1]
        head, start = window(ops.where, load, room, context.step)
        head, start, first, count = (ops.reshape(x, (-1, 1)) for x in (head, start, first, load))
        slot = ops.arange(room)
        slot = slot + ops.where(slot >= head, start - head, 0)
        none = self.count(layout)
        place = ops.reshape(ops.where(slot < count, first + slot, none), (-1,))
        index = ops.gather(ops.concat((elements.index, ops.words((layout.sink,)))), place)
        values = ops.gather(ops.concat((elements.values, ops.zeros((1,)))), place)
        return Found(*(ops.reshape(x, (ranks, room)) for x in (index, values))), load

    def largest_of(self, ops: Ops, summed: Found, room: int) -> Tensor:
        """Return the places of the largest sums, ascending; the last one stands for none."""
        none = summed.index.shape[0] - 1
        place, values = ops.largest_of_rows(summed.values[:none], none, room)
        return ops.sort(ops.reshape(ops.where(values != 0, place, none), (-1,)))

    def balanced(
        self,
        ops: Ops,
        layout: Layout,
        knots: Tensor,
        cuts: Tensor,
        loads: Tensor,
        places: Tensor,
    ) -> Tensor:
        """Return the knots between which as many elements were chosen.

        Args:
            ops, layout: of the bucket.
            knots: as they are, which stay where nothing was chosen.
            cuts: of the regions.
            loads: how many were chosen in each region; int64 [ranks, 1].
            places: those of each region that came back; int64 [ranks, room]. They stand for all
                that were chosen there.
        """
        load, (ranks, room) = ops.reshape(loads, (-1,)), places.shape
        back = ops.sum(ops.cast(places < layout.sink, "int64"), -1)
        ends, every = ops.cumsum(load), ops.sum(load)
        target = (ops.arange(KNOTS - 1) + 1) * every // KNOTS
        region = ops.minimum(ops.count_below(ends, target + 1), ranks - 1)
        load, back, end, start = (ops.gather(x, region) for x in (load, back, ends, cuts))
        number = (target - (end - load)) * back // ops.maximum(load, 1)
        number = region * room + ops.minimum(number, room - 1)
        inner = ops.where(back > 0, ops.gather(ops.reshape(places, (-1,)), number), start)
        balanced = ops.concat((ops.words((0,)), inner, ops.words((layout.sink,))))
        return ops.where(every > 0, balanced, knots)

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


def _row(ops: Ops, found: Found) -> Found:
    """Return the elements as those of one message."""
    return Found(*(ops.reshape(x, (1, -1)) for x in found))


def _flat(ops: Ops, found: Found) -> Found:
    """Return the elements of all messages, one after another."""
    return Found(*(ops.reshape(x, (-1,)) for x in found))


def _weighted(ops: Ops, found: Found, weights: Tensor) -> Found:
    """Return the elements of each rank times its weight."""
    return Found(found.index, found.values * ops.reshape(weights, (-1, 1)))
