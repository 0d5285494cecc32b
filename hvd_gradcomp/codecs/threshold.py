"""Sparse methods that test each element: Variance, Hybrid, Strom.

    gate     selects the elements to send, elementwise
    encode   encodes them, and packs those that fit into the payload
    settle   updates the state by what was *sent*, never by what was wanted

A method implements `gate` and `settle`, and names a quantizer. The payload of a step is either

* words: one 32-bit word for each slot of the level's capacity, the code above the index; unused
  slots point to the bucket's sink; or
* places, on the dense level: `code + 1` for each element of the bucket, in `dense_bits` bits. If
  the dense level is summed, the decoded values are allreduced instead.
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
from hvd_gradcomp.ops.interface.header import ReductionSpec
from hvd_gradcomp.ops.kernel_params import CapacityLevel, Rule
from hvd_gradcomp.ops.scope import layer_of


class ThresholdCompressor(SparseCompressor):
    """Base of the family; see the head of this file."""

    rule: Rule | None = None
    ruled = frozenset({"gate", "settle", "quantizer"})

    @derived
    def max_bucket(self) -> int:
        """Elements that the index in a word can address."""
        return 1 << self._index_bits

    @property
    @abstractmethod
    def quantizer(self) -> Quantizer:
        """Quantizer of the values."""

    @abstractmethod
    def gate(
        self, ops: Ops, memory: Memory, gradient: Tensor, moment: Tensor | None
    ) -> tuple[Tensor, Memory]:
        """Accumulate the gradient; return a mask of wanted elements and the memory. Elementwise."""

    @abstractmethod
    def settle(self, ops: Ops, memory: Memory, sent: SentElements, value: Tensor) -> Memory:
        """Remove what was sent: `value[i]` was sent for element `sent.index[i]`."""

    # -- sizes -------------------------------------------------------------------------------

    def ladder(self, layout: Layout, ranks: int = 1) -> CapacitySchedule:
        """Return the capacities for words; above them a dense level or an allreduce is cheaper."""
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
        """Return the parts of a payload's body at one level; `rung.dense` is a Python bool."""
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
        """Encode this rank's payload. Donating: may write to the memory in `state`."""
        if ops.threshold_kernels is not None and self.rule is not None:
            return self._encode_fused(ops, layout, rung, step, gradient, state, moment)
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

    def _encode_fused(
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
        written = ops.threshold_kernels.write(self.rule, layout, rung, step, *given)
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

    def weighing(self, context: Context, rung: CapacityLevel) -> ReductionSpec:
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
        """Return the sum over ranks of `weights[rank]` * the decoded payload, in rank order.

        Args:
            bodies: uint8 [world, bytes].
            weights: float32 [world]; 0 leaves a rank out.
            room: float32 [size], scratch memory for the sum; its values are ignored.
        """
        if ops.threshold_kernels is not None and self.rule is not None:
            return ops.threshold_kernels.add(self.rule, layout, rung, bodies, weights, room)

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
    """Pack integers below 2**bits into bytes, the first lowest; int64 [n * bits / 8]."""
    per_byte = 8 // bits
    if per_byte == 1:
        return values
    rows = ops.reshape(values, (-1, per_byte))
    return sum(rows[:, place] * (1 << bits * place) for place in range(per_byte))


def _unpack(ops: Ops, packed: Tensor, bits: int) -> Tensor:
    """Invert `_pack`."""
    per_byte = 8 // bits
    if per_byte == 1:
        return packed
    weights = ops.words([1 << bits * place for place in range(per_byte)])
    rows = ops.reshape(packed, (-1, 1)) // weights % (1 << bits)
    return ops.reshape(rows, (-1,))
