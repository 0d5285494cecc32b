"""Exchange of sparse elements by owners, who add up and choose again (Li and Hoefler 2022).

Each rank owns a region of the bucket. All send the owner those of their elements that lie there, as
many as a message has room for. It adds them up in the order of ranks, and sends all ranks the
largest of its sums, as many as fit into one message. So a rank receives `2 * (ranks - 1)` messages,
each of a share `1 / ranks` of what a rank has chosen, and an allgather would bring it all that each
rank has chosen.

Nothing is lost: an `Exchanged` says what was sent, and what the owner has left out.

Balance: each message says how many elements were chosen in its region. From the sums of these and
the places of the result all ranks compute regions with as many elements each, for the next step.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_gradcomp.codecs.compaction import window
from hvd_gradcomp.codecs.elias_fano import EliasFano
from hvd_gradcomp.codecs.topk_select import largest, of_blocks
from hvd_gradcomp.codecs.values import ValueCoding, ValueGroups
from hvd_gradcomp.core.collectives import Allgather, Alltoall
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.method.compressor import Context
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.kernel_params import Collecting, Form
from hvd_gradcomp.ops.scope import Scope, layer_of

KNOTS = 256  # stretches of a bucket from which as many elements are chosen


class Elements(NamedTuple):
    """Elements with their places, or a row of them for each message.

    A place may be the sink, and its value is 0 then.
    """

    index: Tensor  # int64 [count], ascending; or [messages, count]
    values: Tensor  # float32, likewise

    def flat(self, ops: Ops) -> Elements:
        """Return the elements of all messages, one after another."""
        return Elements(*(ops.reshape(x, (-1,)) for x in self))

    def as_row(self, ops: Ops) -> Elements:
        """Return the elements as those of one message."""
        return Elements(*(ops.reshape(x, (1, -1)) for x in self))

    def weighted(self, ops: Ops, weights: Tensor) -> Elements:
        """Return the elements of each row times its weight, float32 [rows]."""
        return Elements(self.index, self.values * ops.reshape(weights, (-1, 1)))


class Chosen(NamedTuple):
    """One rank's step before anything travels."""

    accumulated: Tensor  # float32 [size], `r + g`, in the gradient's memory
    elements: Elements  # the k largest; unused ones, at the sink, come last
    hint: Tensor  # float32 [1], magnitude to search from in the next step


class Exchanged(NamedTuple):
    """Result of an exchange by owners."""

    total: Elements  # of all regions, with the weights of a mean
    sent: Elements  # of this rank, as the others decode them
    left: Elements  # of the sums of this rank's region that did not go out, and their rounding
    knots: Tensor  # for the next step
    header: wire.Header  # of all ranks' first messages


def first_knots(ops: Ops, layout: Layout) -> Tensor:
    """Return the ends of stretches of equal length; int64 [KNOTS + 1]."""
    return ops.words([knot * layout.sink // KNOTS for knot in range(KNOTS + 1)])


def choose(
    ops: Ops,
    context: Context,
    gradient: Tensor,
    r: Tensor,
    hint: Tensor,
    k: Any,
    limit: int,
) -> Chosen:
    """Choose the k largest of `r + g`, which comes to be in the gradient's memory.

    Args:
        ops, context: of the step.
        gradient: float32 [size]. Donating.
        r: float32 [size]; stays as it is.
        hint: of the last step, float32 [1].
        k: an integer, or a scalar of a graph.
        limit: the largest k.
    """
    layout, step = context.layout, context.step
    scope, fixed = Scope(layout, whole=True), isinstance(k, int)
    if ops.topk_kernels is not None:
        form = Form(k)
        quota, limits = (None, (k,)) if fixed else (ops.words((k,)), (limit,))
        before = ops.zeros((len(layout.names),), "int64")
        written = ops.topk_kernels.write(
            Collecting(), scope, form, step, quota, limits, hint, (gradient,), r, before
        )
        index = ops.from_bytes(written.body[form.index :], "uint32")
        values = ops.from_bytes(written.body[: form.index], "float32")
        accumulated = written.memory[0]
        if ops.topk_kernels.removes:
            accumulated = ops.put(accumulated, index, values)
        return Chosen(accumulated, Elements(index, values), written.hint)
    passing, accumulated = _accumulated(ops, scope, gradient, r, hint)
    selection, code, hint = largest(
        ops, scope, accumulated, ops.words((k,)), (limit,), step, passing
    )
    sent = selection.fitting(code, k, step)
    return Chosen(accumulated, Elements(sent.index, ops.bits_float(sent.code)), hint)


def _accumulated(
    ops: Ops, scope: Scope, gradient: Tensor, r: Tensor, hint: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Return the elements that pass the hint, None if not searched, and `g + r`. Donating."""
    if not ops.dynamic_shapes:
        return None, ops.accumulate(gradient, r)

    def tile(accumulated: Tensor, r: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        accumulated = ops.accumulate(accumulated, r)
        return accumulated, (accumulated,)

    passing, (accumulated,) = ops.search(tile, (gradient,), (r,), of_blocks(ops, scope, hint))
    return passing, accumulated


def commit(
    ops: Ops,
    context: Context,
    accumulated: Tensor,
    r: Tensor,
    sent: Elements,
    received: Sequence[Elements],
    left: Elements | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Remove what was sent, take in what is left, and add up what was received.

    Args:
        ops, context: of the step.
        accumulated: `r + g`, as `choose` returns it. Donating.
        r: of before the step. Donating.
        sent: of this rank, all messages one after another.
        received: with the weights of a mean, in the order in which they are added.
        left: of this rank's region, after an exchange by owners.

    Returns:
        The mean, the new r, and how many elements of each layer were sent.
    """
    layout = context.layout
    kept = ops.add_at(accumulated, sent.index, 0.0 - sent.values)
    if left is not None:
        kept = ops.add_at(kept, *left)
    kept = ops.clear_last(kept)
    real = ops.cast(sent.index < layout.sink, "int64")
    per_layer = ops.segment_sum(real, layer_of(ops, layout, sent.index), len(layout.names))
    mean, r = (r, kept) if context.owns_gradient else (kept, ops.overwrite(r, kept))
    mean = ops.clear(mean)
    for elements in received:
        mean = ops.add_at(mean, *elements)
    return ops.clear_last(mean), r, per_layer


@dataclass(frozen=True)
class Message:
    """Body of `count` elements, and how many were chosen where they come from.

    Args:
        layout: of the bucket.
        count: elements; an integer, or a scalar of a graph.
        places: code of the places of one message.
        coding: code of the values.
        groups: of the values, by layers.
    """

    layout: Layout
    count: Any
    places: EliasFano
    coding: ValueCoding
    groups: ValueGroups

    @classmethod
    def of(cls, layout: Layout, count: int, coding: ValueCoding, groups: ValueGroups) -> Message:
        """Return the shortest message of so many elements."""
        return cls(layout, count, EliasFano.of(1, count, layout.sink), coding, groups)

    def parts(self) -> dict[str, wire.Part]:
        """Return the parts of a body."""
        load = {"load": wire.Part("uint32", 1)}
        return {**load, **self.places.parts(), **self.coding.parts(self.count, self.groups)}

    def encode(
        self, ops: Ops, messages: int, elements: Elements, load: Tensor
    ) -> tuple[list[list[Tensor]], Elements]:
        """Return the bodies of some messages in pieces, and the elements as they are decoded."""
        real = elements.index < self.layout.sink
        places = self.places.encode_apart(ops, elements.index)
        coded, decoded = [], []
        for row in range(messages):
            index = elements.index[row]
            coded.append(self.coding.encode(ops, elements.values[row], index, self.groups))
            decoded.append(self.coding.decode(ops, coded[row], index, self.groups))
        values = {name: ops.stack([code[name] for code in coded]) for name in coded[0]}
        payload = {"load": ops.reshape(load, (messages, 1)), **places, **values}
        bodies = wire.pack_rows(ops, self.parts(), payload, messages)
        return bodies, Elements(elements.index, ops.where(real, ops.stack(decoded), 0.0))

    def decode(self, ops: Ops, bodies: Tensor) -> tuple[Tensor, Elements]:
        """Return the loads, int64 [ranks, 1], and the elements of each rank."""
        payload = wire.unpack_body(ops, self.parts(), bodies)
        index = self.places.decode(ops, payload)

        def values_of(rank: int) -> Tensor:
            rank_payload: Mapping[str, Tensor] = {
                name: part[rank] for name, part in payload.items()
            }
            return self.coding.decode(ops, rank_payload, index[rank], self.groups)

        values = ops.stack([values_of(rank) for rank in range(bodies.shape[0])])
        return payload["load"], Elements(index, ops.where(index < self.layout.sink, values, 0.0))

    def gather(
        self, ops: Ops, context: Context, header: wire.Header, elements: Elements, load: Tensor
    ) -> Generator[Any, Any, tuple[Tensor, Elements, Elements]]:
        """Allgather each rank's elements.

        Args:
            ops, context: of the step.
            header: of this rank's payload.
            elements: of this rank, in one row.
            load: how many were chosen; int64 [1].

        Returns:
            The loads, int64 [ranks, 1]; the elements of each rank, with the weights of a mean; and
            this rank's as they are decoded, in one row.
        """
        (body,), sent = self.encode(ops, 1, elements, load)
        buffers = yield Allgather(wire.pack(ops, header, *body))
        spec = patterns.reduction_spec(context, {})
        header, bodies = wire.unpack(ops, header, buffers, spec)
        loads, every = self.decode(ops, bodies)
        peaks = ops.reshape(ops.peaks(every.values), (-1, 1))
        header = patterns.check_summable(ops, [peaks], context, header)
        return loads, every.weighted(ops, patterns.weights_of(ops, context, header)), sent


def exchange(
    ops: Ops,
    context: Context,
    message: Message,
    header: wire.Header,
    chosen: Elements,
    knots: Tensor,
) -> Generator[Any, Any, Exchanged]:
    """Add up the elements of each region at its owner, and gather the largest of the sums.

    Args:
        ops, context: of the step.
        message: what travels to and from an owner.
        header: of this rank's payload.
        chosen: elements of this rank; unused ones, at the sink, come last.
        knots: ends of stretches with as many elements, equal on all ranks; int64 [KNOTS + 1].
    """
    layout, ranks, slots = message.layout, context.size, message.count
    cuts = cuts_of(ops, knots, ranks)
    rows, load = _split(ops, context, slots, cuts, chosen)
    bodies, sent = message.encode(ops, ranks, rows, load)
    plain = context._replace(prescale=1.0, postscale=1.0)
    buffers = yield Alltoall(wire.pack_all(ops, header, bodies))
    spec = patterns.reduction_spec(plain, {})
    of_all, received = wire.unpack(ops, header, buffers, spec)
    loads, elements = message.decode(ops, received)
    elements = elements.weighted(ops, patterns.weights_of(ops, plain, of_all))
    index, values = ops.merge_rows(*elements, layout.sink)

    finite, values = patterns.check_storable(ops, values)
    none = ops.length(index)
    place, taken = ops.largest_of_rows(values, none, slots)
    place = ops.sort(ops.reshape(ops.where(taken != 0, place, none), (-1,)))
    index = ops.concat((index, ops.words((layout.sink,))))
    values = ops.concat((values, ops.zeros((1,))))
    again = Elements(ops.gather(index, place), ops.gather(values, place)).as_row(ops)
    header = header._replace(finite=finite)
    loads, every, summed = yield from message.gather(ops, context, header, again, ops.sum(loads, 0))
    rest = ops.add_at(values, place, 0.0 - summed.flat(ops).values)
    left = Elements(ops.where(rest != 0, index, layout.sink), rest)
    knots = _balanced(ops, layout, knots, cuts, loads, every.index, ranks, slots)
    return Exchanged(every.flat(ops), sent.flat(ops), left, knots, of_all)


def cuts_of(ops: Ops, knots: Tensor, ranks: int) -> Tensor:
    """Return where regions begin, and the end of the last one; int64 [ranks + 1]."""
    places = [divmod(rank * KNOTS, ranks) for rank in range(ranks + 1)]
    low = ops.gather(knots, ops.words([place for place, _ in places]))
    high = ops.gather(knots, ops.words([min(place + 1, KNOTS) for place, _ in places]))
    return low + (high - low) * ops.words([rest for _, rest in places]) // ranks


def _split(
    ops: Ops, context: Context, slots: Any, cuts: Tensor, chosen: Elements
) -> tuple[Elements, Tensor]:
    """Return the elements that fit into the message of each region, and how many there are."""
    layout, ranks = context.layout, context.size
    first = ops.count_below(chosen.index, cuts)
    first, load = first[:-1], first[1:] - first[:-1]
    head, start = window(ops.where, load, slots, context.step)
    head, start, first, count = (ops.reshape(x, (-1, 1)) for x in (head, start, first, load))
    slot = ops.arange(slots)
    slot = slot + ops.where(slot >= head, start - head, 0)
    none = ops.length(chosen.index)
    place = ops.reshape(ops.where(slot < count, first + slot, none), (-1,))
    index = ops.gather(ops.concat((chosen.index, ops.words((layout.sink,)))), place)
    values = ops.gather(ops.concat((chosen.values, ops.zeros((1,)))), place)
    return Elements(*(ops.reshape(x, (ranks, slots)) for x in (index, values))), load


def _balanced(
    ops: Ops,
    layout: Layout,
    knots: Tensor,
    cuts: Tensor,
    loads: Tensor,
    places: Tensor,
    ranks: int,
    slots: Any,
) -> Tensor:
    """Return the knots between which as many elements were chosen.

    Args:
        ops, layout: of the bucket.
        knots: as they are, which stay where nothing was chosen.
        cuts: of the regions.
        loads: how many were chosen in each region; int64 [ranks, 1].
        places: those of each region that came back; int64 [ranks, slots]. They stand for all that
            were chosen there.
        ranks, slots: as above.
    """
    load = ops.reshape(loads, (-1,))
    back = ops.sum(ops.cast(places < layout.sink, "int64"), -1)
    ends, every = ops.cumsum(load), ops.sum(load)
    target = (ops.arange(KNOTS - 1) + 1) * every // KNOTS
    region = ops.minimum(ops.count_below(ends, target + 1), ranks - 1)
    load, back, end, start = (ops.gather(x, region) for x in (load, back, ends, cuts))
    number = (target - (end - load)) * back // ops.maximum(load, 1)
    number = region * slots + ops.minimum(number, slots - 1)
    inner = ops.where(back > 0, ops.gather(ops.reshape(places, (-1,)), number), start)
    balanced = ops.concat((ops.words((0,)), inner, ops.words((layout.sink,))))
    return ops.where(every > 0, balanced, knots)
