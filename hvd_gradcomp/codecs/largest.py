"""The sparse methods with a number of elements: the k largest of each layer, or of the model.

    collect  takes the gradient into the memory, elementwise
    quota    how many elements of each layer to send
    encode   the k largest, their indices, the payload
    settle   the memory, by what was *sent*

The selection is exact. No layer is sorted for it: elements beyond a bound are found while the
gradient is collected, and only they are sorted. About 1.3 k passed it in the step before; that
changes slowly, since the memory changes slowly. Layers of which fewer than k elements pass (all, in
the first step) are scanned again: small ones whole, others with a bound from a strided sample, and
once more below where the sample misled. Elements as large as the k-th are taken in turn, so that no
place is preferred: those at `step * k` and after come first.

Zeros are never sent. Payload: float32 values and coded indices, of a fixed size, or of one of a few
sizes where the number of elements changes; where gathering these would bring a rank more bytes than
an allreduce of the bucket, they are summed instead.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import takewhile
from math import prod
from typing import Any, ClassVar, NamedTuple

from hvd_gradcomp.codecs.indices import CODINGS, IndexCoding
from hvd_gradcomp.codecs.selection import Indexed, Masked, Selection
from hvd_gradcomp.codecs.sparse import Encoded, Memory, SparseCompressor
from hvd_gradcomp.core import wire
from hvd_gradcomp.core.ladder import Ladder, LadderState
from hvd_gradcomp.foundation.cost import most_gathered
from hvd_gradcomp.foundation.layout import Layout
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.rules import Collecting, Form, Rung
from hvd_gradcomp.ops.scope import Scope, layer_of

_SMALL = 4096  # a layer up to here is not sampled
_BITS = 31  # of a magnitude
_FINE = 18  # bits below a bin of the sample's histogram: 32 bins to an octave
_BINS = 512  # 16 octaves below the largest; the last bin takes the rest


def count_of(size: int, density: float) -> int:
    """How many of `size` elements a density means: at least one.

    >>> count_of(1000, 0.001), count_of(10, 0.001), count_of(1500, 0.001)
    (1, 1, 2)
    """
    return min(size, max(1, int(size * density + 0.5)))


class LargestState(NamedTuple):
    """State of one bucket."""

    memory: Memory  # NamedTuple of float32 [size], rank-local
    ladder: LadderState  # replicated
    sent: Tensor  # int64 [layers], elements that this rank has sent so far
    hint: Tensor  # float32 [groups], where to look first in the next step; rank-local


class LargestCompressor(SparseCompressor):
    """Base of the family; see the head of this file.

    Attributes:
        of_model: whether the elements of all layers compete, not those of each among themselves.
    """

    begins_anew = frozenset({"hint"})
    rule: Collecting | None = None
    ruled = frozenset({"collect", "settle", "settled", "select", "held", "give_back"})

    of_model: ClassVar[bool] = False
    index_coding: str

    @abstractmethod
    def count(self, size: int) -> int:
        """The most of so many elements that are sent."""

    @abstractmethod
    def collect(self, ops: Ops, memory: Memory, gradient: Tensor) -> Memory:
        """Takes the gradient in. Elementwise, donating."""

    @abstractmethod
    def settle(self, ops: Ops, memory: Memory, index: Tensor) -> Memory:
        """Takes out what was sent; indices may be the sink."""

    def quota(
        self, ops: Ops, layout: Layout, step: Any, gradient: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        """How many elements of each layer (or of the model) are sent in this step; int64 [k]."""
        del step, gradient
        return ops.words(self.most(layout)), state

    # -- sizes -------------------------------------------------------------------------------

    @property
    def coding(self) -> IndexCoding:
        """How indices travel."""
        return CODINGS[self.index_coding]

    def most(self, layout: Layout) -> tuple[int, ...]:
        """The most elements that are sent of each layer, or of the model."""
        return _most_of(self, layout)

    def capacity(self, layout: Layout) -> int:
        """Elements that a payload holds, at most."""
        return sum(self.most(layout))

    def capacities(self, layout: Layout) -> tuple[int, ...]:
        """Elements that a payload may have room for, ascending; the last is the most."""
        return (self.capacity(layout),)

    def capacity_of(self, layout: Layout, rung: Rung | None) -> Any:
        """Elements that a payload has room for on a rung; the most, where no rung is given."""
        capacities = self.capacities(layout)
        if rung is None or rung.dense is True or len(capacities) == 1:
            return capacities[-1]
        return rung.capacity

    def ladder(self, layout: Layout, ranks: int = 1) -> Ladder:
        most = most_gathered(4.0 * layout.elements, ranks)
        capacities, sizes = self.capacities(layout), _sizes_of(self, layout)
        fit = sum(1 for _ in takewhile(lambda size: size <= most, sizes))
        return Ladder(capacities[:fit], summed=fit < len(capacities))

    def parts(self, layout: Layout, capacity: int | None = None) -> dict[str, wire.Part]:
        """The body of a payload with so much room; with the most, where none is given."""
        capacity = self.capacity(layout) if capacity is None else capacity
        return {
            **self.coding.parts(layout, capacity),
            "values": wire.Part("float32", capacity),
        }

    def parts_of(self, ops: Ops, layout: Layout, capacity: Any) -> dict[str, wire.Part]:
        """The same of one of `capacities`, which may be a scalar in a graph."""
        if isinstance(capacity, int):
            return self.parts(layout, capacity)
        capacities = self.capacities(layout)
        place, by_capacity = ops.bisect(capacities, capacity), _parts_of(self, layout)
        return {
            name: part._replace(count=ops.choice([x[name].count for x in by_capacity], place))
            for name, part in by_capacity[0].items()
        }

    def form(self, ops: Ops, layout: Layout, capacity: Any) -> Form | Tensor | None:
        """Where the parts lie in a body; None where there are no passes for it.

        Of a capacity that a graph knows: `Form.numbers`, int64 [7].
        """
        if isinstance(capacity, int):
            return _form_of(self, layout, capacity)
        capacities = self.capacities(layout)
        forms = [_form_of(self, layout, each) for each in capacities]
        # All numbers of all rungs in one table: each of its own would be many nodes of a graph.
        table = [number for form in forms if form is not None for number in form.numbers]
        width = len(table) // len(forms)
        if not table:
            return None
        place = ops.bisect(capacities, capacity) * width + ops.arange(width)
        return ops.gather(ops.words(table), place)

    def body_bytes(self, layout: Layout, rung: Rung | None = None) -> int:
        return int(wire.body_bytes(self.parts(layout, self.capacity_of(layout, rung))))

    def payload_bytes(self, layout: Layout, rung: Rung | None = None) -> int:
        return super().payload_bytes(layout, rung or Rung(0, self.capacity(layout), False))

    def layer_bytes(self, shape: Sequence[int]) -> float:
        size = prod(shape)
        count = self.count(size)
        return count * (4 + self.coding.bits(size, count) / 8)

    def init(self, ops: Ops, layout: Layout) -> Any:
        memory, _, sent = super().init(ops, layout)
        ladder = self.ladder(layout).init(ops, rung=len(self.capacities(layout)) - 1)
        return LargestState(memory, ladder, sent, self.unknown(ops, layout))

    def unknown(self, ops: Ops, layout: Layout) -> Tensor:
        """The hint before the first step: no element passes."""
        groups = Scope(layout, self.of_model).count
        return ops.full((groups,), float("inf"), "float32")

    # -- one step ----------------------------------------------------------------------------

    def encode(
        self,
        ops: Ops,
        layout: Layout,
        rung: Rung,
        step: Any,
        gradient: Tensor,
        state: Any,
        moment: Tensor | None = None,
    ) -> tuple[Encoded, Any]:
        del moment
        wanted, state = self.quota(ops, layout, step, gradient, state)
        scope, capacity = Scope(layout, self.of_model), self.capacity_of(layout, rung)
        quota = wanted if len(self.capacities(layout)) == 1 else _within(ops, wanted, capacity)
        if ops.largest_passes is not None and self.rule is not None:
            form = self.form(ops, layout, capacity)
            if form is not None:
                numbers = step, quota, ops.sum(wanted)
                return self._encode_in_passes(ops, scope, form, *numbers, gradient, state)
        found, memory = self.collected(ops, scope, gradient, state)
        chosen = self.select(ops, scope, step, memory[0], quota, found, rung)
        parts, index, values, hint = chosen
        parts["values"] = values = ops.bits_float(values)
        body = wire.pack_body(ops, self.parts_of(ops, layout, capacity), parts)
        real = ops.cast(index < layout.sink, "int64")
        per_layer = ops.segment_sum(real, layer_of(ops, layout, index), len(layout.names))
        held = self.held(ops, memory, index, values)
        memory = self.settled(ops, self.settle(ops, memory, index))
        encoded = Encoded(body, ops.sum(real), ops.sum(wanted), held)
        sent = state.sent + per_layer
        return encoded, state._replace(memory=memory, sent=sent, hint=hint)

    def _encode_in_passes(
        self,
        ops: Ops,
        scope: Scope,
        form: Form | Tensor,
        step: int,
        quota: Tensor,
        wanted: Tensor,
        gradient: Tensor,
        state: Any,
    ) -> tuple[Encoded, Any]:
        layout = scope.layout
        written = ops.largest_passes.write(
            self.rule,
            scope,
            form,
            step,
            quota,
            ops.words(scope.slack(self.most(layout))),
            state.hint,
            state.memory,
            gradient,
        )
        encoded = Encoded(written.body, written.sent, wanted, settle=written.settle)
        memory, sent = type(state.memory)(*written.memory), state.sent + written.per_layer
        return encoded, state._replace(memory=memory, sent=sent, hint=written.hint)

    def collected(
        self, ops: Ops, scope: Scope, gradient: Tensor, state: Any
    ) -> tuple[Tensor | None, Memory]:
        """The memory with the gradient in it, and which elements pass the hint, if one looked."""
        kind, fields = type(state.memory), len(state.memory)

        def tile(*pieces: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.collect(ops, kind(*pieces[:fields]), pieces[fields]))

        if not ops.dynamic_shapes:
            return None, kind(*ops.sweep(tile, tuple(state.memory), (gradient,)))

        def with_values(*pieces: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            settled = tile(*pieces)
            return settled[0], settled

        bound = _of_blocks(ops, scope, state.hint)
        found, settled = ops.search(with_values, tuple(state.memory), (gradient,), bound)
        return found, kind(*settled)

    def select(
        self,
        ops: Ops,
        scope: Scope,
        step: Any,
        r: Tensor,
        quota: Tensor,
        found: Tensor | None,
        rung: Rung | None = None,
    ) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
        """The k largest |r|: parts that say which, indices, bits of the values, the next hint.

        Args:
            found: indices of all elements beyond some bound; None to look for them here.
            rung: how much room there is; None for the most.
        """
        layout, capacity = scope.layout, self.capacity_of(scope.layout, rung)
        selection, code, hint = largest(ops, scope, r, quota, self.most(layout), step, found)
        sent = selection.cut(code, capacity, step)
        given = self.parts_of(ops, layout, capacity)
        parts, index, place = self.coding.encode(ops, layout, given, sent.index, step)
        values = ops.where(index < layout.sink, ops.gather(sent.code, place), 0)
        return parts, index, values, hint

    def ceilings(self, ops: Ops, layout: Layout, rung: Rung, bodies: Tensor) -> list[Tensor]:
        parts = self.parts_of(ops, layout, self.capacity_of(layout, rung))
        values = wire.unpack_body(ops, parts, bodies)["values"]
        return [ops.reshape(ops.max(ops.abs(values), -1), (-1, 1))]

    def decode_sum(
        self,
        ops: Ops,
        layout: Layout,
        rung: Rung,
        bodies: Tensor,
        weights: Tensor,
        room: Tensor,
    ) -> Tensor:
        capacity = self.capacity_of(layout, rung)
        form = self.form(ops, layout, capacity)
        if ops.largest_passes is not None and form is not None:
            return ops.largest_passes.add(layout, form, bodies, weights, room)
        payload = wire.unpack_body(ops, self.parts_of(ops, layout, capacity), bodies)
        values = payload.pop("values") * weights[:, None]  # [world, capacity]
        total = ops.clear(room)
        for rank in range(bodies.shape[0]):
            mine = {name: part[rank] for name, part in payload.items()}
            index = self.coding.decode(ops, layout, mine, capacity)
            total = ops.add_at(total, index, values[rank])
        return ops.clear_last(total)


@lru_cache(maxsize=1024)
def _most_of(compressor: LargestCompressor, layout: Layout) -> tuple[int, ...]:
    return tuple(compressor.count(size) for size in Scope(layout, compressor.of_model).sizes)


@lru_cache(maxsize=1024)
def _parts_of(compressor: LargestCompressor, layout: Layout) -> list[dict[str, wire.Part]]:
    return [compressor.parts(layout, capacity) for capacity in compressor.capacities(layout)]


@lru_cache(maxsize=1024)
def _sizes_of(compressor: LargestCompressor, layout: Layout) -> list[int]:
    return [int(wire.body_bytes(parts)) for parts in _parts_of(compressor, layout)]


@lru_cache(maxsize=4096)
def _form_of(compressor: LargestCompressor, layout: Layout, capacity: int) -> Form | None:
    parts = compressor.parts(layout, capacity)
    places = compressor.coding.places(parts)
    if places is None:
        return None
    return Form(int(wire.body_bytes(parts)), capacity, wire.starts(parts)["values"], places)


def _within(ops: Ops, quota: Tensor, capacity: Any) -> Tensor:
    """What of a quota has room: one of each group, and of the rest all groups the same share."""
    one = ops.minimum(quota, 1)
    total, least = ops.sum(quota), ops.sum(one)
    share = (quota - one) * (capacity - least) // ops.maximum(total - least, 1)
    return ops.where(total > capacity, one + share, quota)


def largest(
    ops: Ops,
    scope: Scope,
    r: Tensor,
    k: Tensor,
    most: Sequence[int],
    turn: Any,
    found: Tensor | None,
) -> tuple[Selection, Tensor, Tensor]:
    """The k largest |r| of each group, zeros excepted.

    Args:
        r: float32 [size].
        k: int64 [groups], at most `most`.
        turn: the step; says which of equal magnitudes come first.
        found: indices of all elements beyond some bound, ascending; None if nobody looked.

    Returns:
        The selection, the bits of its values, and a magnitude of each group that about
        1.3 k elements reach; infinite where shapes are static, 0 for a group that has fewer than k.
    """
    layout = scope.layout
    if ops.dynamic_shapes:
        found = _candidates(ops, scope, r, k, most, found)
        code = ops.float_bits(ops.gather(r, found))
        bits = code % (1 << _BITS)
        selection: Selection = Indexed(ops, layout, found)
        last, hint = _last_of_sorted(ops, scope, found, bits, k)
    else:
        code = ops.float_bits(r)
        bits = code % (1 << _BITS)
        selection = Masked(ops, layout, bits > 0)
        last = _last_of_layers(ops, scope, r, k, most)
        hint = ops.full((scope.count,), float("inf"), "float32")
    last_of_item = selection.of_layer(scope.of_layers(ops, last))
    selection, code = selection.only((bits > 0) & (bits >= last_of_item), code)
    if ops.dynamic_shapes:
        surplus = scope.count_of(ops, selection.index_of_items()) > k
        index, code = ops.cond(
            _some(ops, surplus),
            lambda: _dropped(_without_surplus(ops, scope, selection, code, last, k, turn)),
            lambda: (selection.index_of_items(), code),
        )
        return Indexed(ops, layout, index), code, hint
    return *_without_surplus(ops, scope, selection, code, last, k, turn), hint


def _some(ops: Ops, flags: Tensor) -> Any:
    """Whether any is true, where branches are chosen."""
    return ops.staged(ops.stage(ops.max(ops.cast(flags, "int64")))) > 0


def _dropped(selected: tuple[Selection, Tensor]) -> tuple[Tensor, Tensor]:
    return selected[0].index_of_items(), selected[1]


def _candidates(
    ops: Ops, scope: Scope, r: Tensor, k: Tensor, most: Sequence[int], found: Tensor | None
) -> Tensor:
    """Indices of at least the k largest of each group, or of all that are not zero; ascending."""

    def short_of(found: Tensor) -> Tensor:
        return scope.count_of(ops, found) < k

    def again(found: Tensor, short: Tensor, bound: Tensor) -> Tensor:
        """Scans the groups that are short, and only them."""
        kept = ops.nonzero(~ops.gather(short, scope.of_index(ops, found)))
        more = ops.find(r, _of_blocks(ops, scope, ops.where(short, bound, float("inf"))))
        return ops.sort(ops.concat((ops.gather(found, kept), more)))

    found = ops.full((0,), 0) if found is None else found
    short = short_of(found)
    large = ops.words(scope.sizes) > _SMALL
    zero = ops.full((scope.count,), 0.0, "float32")
    bound = ops.cond(
        _some(ops, short & large), lambda: _bound_by_sample(ops, scope, r, k, most), lambda: zero
    )
    bound = ops.where(large, bound, 0.0)
    for factor in (0.25, 0.0, 0.0):
        found = ops.cond(
            _some(ops, short), partial(again, found, short, bound), partial(lambda f: f, found)
        )
        short = short_of(found) & (bound > 0)
        bound = bound * factor
    return found


def _of_blocks(ops: Ops, scope: Scope, bound: Tensor) -> Tensor:
    """A value of each group as one of each block."""
    table = ops.table(scope.layout, "layer_of_block")
    return ops.gather(scope.of_layers(ops, bound), table)


def _bound_by_sample(ops: Ops, scope: Scope, r: Tensor, k: Tensor, most: Sequence[int]) -> Tensor:
    """A magnitude of each group that somewhat more than k elements reach, to all appearance."""
    layout = scope.layout
    index, layer = ops.table(layout, "sample"), ops.table(layout, "layer_of_sample")
    magnitude, _ = ops.split_bits(ops.float_bits(ops.abs(ops.gather(r, index))), _FINE)
    group = ops.table(layout, "no_layer_of_sample") if scope.whole else layer
    top = ops.segment_max(magnitude, group, scope.count)
    bin_ = ops.minimum(ops.gather(top, group) - magnitude, _BINS - 1)
    strides = ops.table(layout, "stride_of_sample")
    counts = ops.segment_sum(strides, group * _BINS + bin_, scope.count * _BINS)
    counts = ops.reshape(counts, (scope.count, _BINS))
    reached = ops.reshape(ops.cumsum(ops.reshape(counts, (-1,))), (scope.count, _BINS))
    reached = reached - reached[:, :1] + counts[:, :1]
    target = ops.reshape(k + ops.words(scope.slack(most)), (-1, 1))
    below = ops.sum(ops.cast(reached < target, "int64"), -1)
    bits = ops.where(below < _BINS - 1, ops.maximum(top - below, 0), 0)
    return ops.bits_float(bits * (1 << _FINE))


def _last_of_sorted(
    ops: Ops, scope: Scope, found: Tensor, bits: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """The bits of the k-th largest of each group, by sorting the candidates; and the next hint."""
    group = scope.of_index(ops, found)
    limit = (1 << _BITS) - 1
    ascending = ops.sort(group * (1 << _BITS) + (limit - bits))
    ascending = ops.concat((ascending, ops.full((1,), limit)))
    count = scope.count_of(ops, found)
    start = ops.cumsum(count) - count

    def magnitude(rank: Tensor) -> Tensor:
        place = start + ops.maximum(ops.minimum(rank, count) - 1, 0)
        return limit - ops.split_bits(ops.gather(ascending, place), _BITS)[1]

    # A quarter more, and what the count may vary by; where too few passed, look deeper next time.
    spread = ops.cast(ops.sqrt(ops.cast(k, "float64")) * 4.0, "int64")
    wished = k + ops.split_bits(k, 2)[0] + spread + 8
    hint = ops.bits_float(magnitude(wished)) * ops.where(count < wished, ops.reals([0.97]), 1.0)
    few = count < ops.maximum(k, 1)
    return ops.where(few, 0, magnitude(k)), ops.where(few, 0.0, hint)


def _last_of_layers(ops: Ops, scope: Scope, r: Tensor, k: Tensor, most: Sequence[int]) -> Tensor:
    """The same in static shapes, layer by layer."""
    layout, magnitude = scope.layout, ops.abs(r)
    if scope.whole:
        pieces = [magnitude]
    else:
        pieces = [magnitude[o : o + n] for o, n in zip(layout.offsets, layout.sizes)]
    last = [
        ops.gather(ops.float_bits(ops.largest(piece, m)), k[group : group + 1] - 1)
        for group, (piece, m) in enumerate(zip(pieces, most))
    ]
    return ops.concat(last)


def _without_surplus(
    ops: Ops,
    scope: Scope,
    selection: Selection,
    code: Tensor,
    last: Tensor,
    k: Tensor,
    turn: Any,
) -> tuple[Selection, Tensor]:
    """Drops from elements as large as the k-th what goes beyond k, another each step."""
    bits = code % (1 << _BITS)
    tie = ops.cast(bits == selection.of_layer(scope.of_layers(ops, last)), "int64")
    tie = selection.items_only(tie)
    greater = selection.items_only(1 - tie)

    def per_group(items: Tensor) -> Tensor:
        by_layer = selection.sum_of_layer(items)
        return ops.reshape(ops.sum(by_layer), (1,)) if scope.whole else by_layer

    def of_item(groups: Tensor) -> Tensor:
        return selection.of_layer(scope.of_layers(ops, groups))

    room = k - per_group(greater)
    first = turn * k % ops.words(scope.sizes)
    number = selection.index_of_items() - selection.of_layer(ops.words(scope.starts()))
    early = ops.cast(number < of_item(first), "int64") * tie
    ties, earlies = per_group(tie), per_group(early)
    before = ops.cumsum(ties) - ties
    rank = ops.cumsum(tie) - of_item(before)  # from 1, in the order of indices
    rank = rank + ops.where(early > 0, of_item(ties - earlies), of_item(0 - earlies))
    kept = (greater > 0) | (rank <= of_item(room))
    return selection.only(kept & (tie + greater > 0), code)
