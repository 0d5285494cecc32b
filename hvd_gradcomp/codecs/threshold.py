"""The sparse methods with a rule for each element: Variance, Hybrid, Strom.

    gate     which elements the rule wants to send, elementwise
    encode   the code of each, what fits, the payload
    settle   the state, by what was *sent*, never by what was wanted

A method fills in `gate` and `settle`, and names a quantizer. The payload of a step is either

* words: one 32-bit word for each slot of the rung's capacity, code above index; unused slots point
  to the bucket's sink; or
* places, on the dense rung: `code + 1` for each element of the bucket, in `dense_bits` bits. Where
  the dense rung is summed they do not travel, but what they stand for.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from hvd_gradcomp.codecs.compaction import SentElements, select
from hvd_gradcomp.codecs.quantizers import Quantizer
from hvd_gradcomp.codecs.sparse import Encoded, Memory, SparseCompressor, SparseState
from hvd_gradcomp.core import patterns, wire
from hvd_gradcomp.core.capacity import CapacitySchedule
from hvd_gradcomp.core.compressor import Context, State, derived
from hvd_gradcomp.core.cost_model import most_gathered
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.protocols.reporting import Report
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.interface.header import Weighing
from hvd_gradcomp.ops.kernel_params import CapacityLevel, Rule
from hvd_gradcomp.ops.scope import layer_of


class ThresholdCompressor(SparseCompressor):
    """Base of the family; see the head of this file."""

    rule: Rule | None = None
    ruled = frozenset({"gate", "settle", "quantizer"})

    @derived
    def max_bucket(self) -> int:
        """As many elements as the index in a word can tell apart."""
        return 1 << self._index_bits

    @property
    @abstractmethod
    def quantizer(self) -> Quantizer:
        """How values become codes."""

    @abstractmethod
    def gate(
        self, ops: Ops, memory: Memory, gradient: Tensor, moment: Tensor | None
    ) -> tuple[Tensor, Memory]:
        """Takes the gradient in; returns what is wanted, bool, and the memory. Elementwise."""

    @abstractmethod
    def settle(self, ops: Ops, memory: Memory, sent: SentElements, value: Tensor) -> Memory:
        """Takes out what was sent: `value[i]` was sent for element `sent.index[i]`."""

    # -- sizes -------------------------------------------------------------------------------

    def ladder(self, layout: Layout, ranks: int = 1) -> CapacitySchedule:
        """Words, up to where a place for every element is cheaper, or a sum."""
        side = int(wire.body_bytes(self.quantizer.side_parts(layout)))
        room = most_gathered(4.0 * layout.elements, ranks) - side
        places = self._dense_bytes(layout)
        if places > room:
            return CapacitySchedule.up_to(int(room) // 4 + 1, summed=True)
        return CapacitySchedule.up_to(places // 4)

    def report(self, layout: Layout, state: State, steps: int, since: int = 0) -> Report:
        said = super().report(layout, state, steps, since)
        return said._replace(rung_changes=int(state.ladder.changes))

    def parts(self, layout: Layout, rung: CapacityLevel) -> dict[str, wire.Part]:
        """The body of a payload on one rung; `rung.dense` is a Python bool."""
        side = self.quantizer.side_parts(layout)
        if rung.dense:
            return {**side, "places": wire.Part("uint8", self._dense_bytes(layout))}
        return {**side, "words": wire.Part("uint32", rung.capacity)}

    def _dense_bytes(self, layout: Layout) -> int:
        return layout.size * self.quantizer.dense_bits // 8

    def body_bytes(self, layout: Layout, rung: CapacityLevel) -> int:
        return wire.body_bytes(self.parts(layout, rung))

    # -- one step ----------------------------------------------------------------------------

    def encode(
        self,
        ops: Ops,
        layout: Layout,
        rung: CapacityLevel,
        step: Any,
        gradient: Tensor,
        state: SparseState,
        moment: Tensor | None = None,
    ) -> tuple[Encoded, SparseState]:
        """This rank's payload. Donating: the memory in `state` may be written to."""
        if ops.word_passes is not None and self.rule is not None:
            return self._encode_in_passes(ops, layout, rung, step, gradient, state, moment)
        found, memory = self._search(ops, gradient, state.memory, moment)
        selection = select(ops, layout, found)
        value = selection.take(memory[0])
        code, encodable, side = self.quantizer.encode(ops, selection, value)
        selection, code = selection.only(encodable, code)

        def words() -> tuple[Tensor, SentElements]:
            sent = selection.fitting(code, rung.capacity, step)
            word = sent.code * (1 << self._index_bits) + sent.index
            room = rung._replace(dense=False)
            return wire.pack_body(ops, self.parts(layout, room), {**side, "words": word}), sent

        def places() -> tuple[Tensor, SentElements]:
            dense, sent = selection.spread(code)
            packed = _pack(ops, dense, self.quantizer.dense_bits)
            room = rung._replace(dense=True)
            return wire.pack_body(ops, self.parts(layout, room), {**side, "places": packed}), sent

        body, sent = ops.cond(rung.dense, places, words)
        if side:
            layer = layer_of(ops, layout, sent.index)
            side = {name: ops.gather(x, layer) for name, x in side.items()}
        value = self.quantizer.decode(ops, sent.code, side)
        held = self.held(ops, memory, sent.index)
        memory = self.without_sink(ops, self.settle(ops, memory, sent, value))
        encoded = Encoded(body, sent.count, selection.count(), held)
        return encoded, state._replace(memory=memory, sent=state.sent + sent.per_layer)

    def _encode_in_passes(
        self,
        ops: Ops,
        layout: Layout,
        rung: CapacityLevel,
        step: Any,
        gradient: Tensor,
        state: SparseState,
        moment: Tensor | None,
    ) -> tuple[Encoded, SparseState]:
        given = state.memory, gradient, moment, state.sent
        written = ops.word_passes.write(self.rule, layout, rung, step, *given)
        encoded = Encoded(written.body, written.sent, written.wanted, settle=written.settle)
        memory = type(state.memory)(*written.memory)
        return encoded, state._replace(memory=memory, sent=written.per_layer)

    @property
    def _index_bits(self) -> int:
        return 32 - self.quantizer.bits

    def _search(
        self, ops: Ops, gradient: Tensor, memory: Memory, moment: Tensor | None
    ) -> tuple[Tensor, Memory]:
        fields = len(memory)

        def tile(*pieces: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            given = pieces[fields:]
            squares = given[1] if moment is not None else None
            wanted, taken_in = self.gate(ops, type(memory)(*pieces[:fields]), given[0], squares)
            return wanted, tuple(taken_in)

        given = (gradient,) if moment is None else (gradient, moment)
        found, taken_in = ops.search(tile, tuple(memory), given)
        return found, type(memory)(*taken_in)

    def weighing(self, context: Context, rung: CapacityLevel) -> Weighing:
        layout, ascending = context.layout, None
        side = self.quantizer.side_parts(layout)
        if rung.dense is False:
            mask = (1 << self._index_bits) - 1
            ascending = int(wire.body_bytes(side)) // 4, rung.capacity, mask, layout.size
        return patterns.weighing(context, side, ascending)

    def decode_sum(
        self,
        ops: Ops,
        layout: Layout,
        rung: CapacityLevel,
        bodies: Tensor,
        weights: Tensor,
        room: Tensor,
    ) -> Tensor:
        """`sum over ranks of weights[rank] * what the rank sent`, rank by rank in rank order.

        Args:
            bodies: uint8 [world, bytes].
            weights: float32 [world]; 0 leaves a rank out.
            room: float32 [size] that the sum may be written to; its values do not count.
        """
        if ops.word_passes is not None and self.rule is not None:
            return ops.word_passes.add(self.rule, layout, rung, bodies, weights, room)

        def words() -> Tensor:
            payload = wire.unpack_body(ops, self.parts(layout, rung._replace(dense=False)), bodies)
            word = payload.pop("words")  # [world, capacity]
            code, index = ops.split_bits(word, self._index_bits)
            side = payload
            if side:
                layer = layer_of(ops, layout, index)
                side = {name: ops.gather_rows(x, layer) for name, x in side.items()}
            value = self.quantizer.decode(ops, code, side) * weights[:, None]
            total = ops.clear(room)
            for rank in range(bodies.shape[0]):
                total = ops.add_at(total, index[rank], value[rank])
            return total

        def places() -> Tensor:
            payload = wire.unpack_body(ops, self.parts(layout, rung._replace(dense=True)), bodies)
            packed = payload.pop("places")
            table = ops.table(layout, "layer_of_block")
            total = ops.clear(room)
            for rank in range(bodies.shape[0]):
                dense = _unpack(ops, packed[rank], self.quantizer.dense_bits)
                code = ops.reshape(dense, (-1, layout.block)) - 1  # [blocks, block]
                side = {
                    name: ops.reshape(ops.gather(x[rank], table), (-1, 1))
                    for name, x in payload.items()
                }
                value = self.quantizer.decode(ops, ops.maximum(code, 0), side) * weights[rank]
                value = ops.where(code >= 0, value, 0.0)
                total = ops.accumulate(total, ops.reshape(value, (layout.size,)))
            return total

        return ops.clear_last(ops.cond(rung.dense, places, words))


def _pack(ops: Ops, values: Tensor, bits: int) -> Tensor:
    """Integers below 2**bits as bytes, the first in the lowest bits; int64 [n * bits / 8]."""
    per_byte = 8 // bits
    if per_byte == 1:
        return values
    rows = ops.reshape(values, (-1, per_byte))
    return sum(rows[:, place] * (1 << bits * place) for place in range(per_byte))


def _unpack(ops: Ops, packed: Tensor, bits: int) -> Tensor:
    """The inverse of `_pack`."""
    per_byte = 8 // bits
    if per_byte == 1:
        return packed
    weights = ops.words([1 << bits * place for place in range(per_byte)])
    rows = ops.reshape(packed, (-1, 1)) // weights % (1 << bits)
    return ops.reshape(rows, (-1,))
