"""Sparse methods that test each element: Variance, Hybrid, Strom.

    select_mask  selects the elements to send, elementwise
    encode       encodes them, and packs those that fit into the payload
    commit       updates the state by what was *sent*, never by what was wanted

A method implements `select_mask` and `commit`, and names a quantizer. A step's payload is either

* words: one 32-bit word for each slot of the level's capacity, the code above the index; unused
  slots point to the bucket's sink. By default indices and codes travel apart, in fewer bits, see
  `codecs.indices`; or
* places, on the dense level: `code + 1` for each element of the bucket, in `dense_bits` bits. If
  the dense level is summed, the decoded values are allreduced instead.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache

from hvd_gradcomp.codecs.compaction import SentElements, select
from hvd_gradcomp.codecs.indices import CODINGS, Words
from hvd_gradcomp.codecs.quantizers import Quantizer
from hvd_gradcomp.codecs.sparse import (
    Encoded,
    Memory,
    Payloads,
    SparseCompressor,
    SparseState,
    StepInputs,
)
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.cost_model import most_gathered
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.method.capacity import POLICIES, CapacityPolicy, CapacitySchedule
from hvd_gradcomp.method.compressor import Context, Report, State, derived
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP
from hvd_gradcomp.ops.interface.header import ReductionSpec
from hvd_gradcomp.ops.kernel_params import CapacityLevel, Rule
from hvd_gradcomp.ops.scope import layer_of


class ThresholdCompressor(SparseCompressor):
    """Base of the family; see the head of this file.

    Attributes:
        capacity: how the capacity follows demand; a key of `capacity.POLICIES`.
        index_coding: code of the indices; a name in `indices.CODINGS`.
    """

    rule: Rule | None = None
    sends_any_number = True
    capacity: str = "largest"
    index_coding: str = "elias_fano"
    kernel_methods = frozenset({"select_mask", "commit", "quantizer"})

    @derived
    def max_bucket(self) -> int:
        """Elements that the index in a word can address."""
        return 1 << self._index_bits

    @property
    @abstractmethod
    def quantizer(self) -> Quantizer:
        """Quantizer of the values."""

    @abstractmethod
    def select_mask(
        self, ops: Ops, memory: Memory, gradient: Tensor, moment: Tensor | None
    ) -> tuple[Tensor, Memory]:
        """Accumulate the gradient; return a mask of wanted elements and the memory. Elementwise."""

    @abstractmethod
    def commit(self, ops: Ops, memory: Memory, sent: SentElements, value: Tensor) -> Memory:
        """Remove what was sent: `value[i]` was sent for element `sent.index[i]`."""

    # -- sizes -------------------------------------------------------------------------------

    def capacity_schedule(self, layout: Layout, ranks: int = 1) -> CapacitySchedule:
        """Return the capacities for words; above them a dense level or an allreduce is cheaper."""
        side = int(wire.body_bytes(self.quantizer.side_parts(layout)))
        limit = most_gathered(4.0 * layout.elements, ranks) - side
        places, policy = self._dense_bytes(layout), self.policy
        if places > limit:
            return CapacitySchedule(_capacities(self, layout, int(limit), 1), True, policy)
        return CapacitySchedule(_capacities(self, layout, places, 0), policy=policy)

    @property
    def policy(self) -> CapacityPolicy:
        return POLICIES[self.capacity]

    def validate_payload(self) -> None:
        """Raise `ValueError` if `capacity` or `index_coding` is not one of its values."""
        validate.one_of(self, "capacity", tuple(POLICIES))
        validate.one_of(self, "index_coding", CODINGS)

    def report(self, layout: Layout, state: State, steps: int, since: int = 0) -> Report:
        report = super().report(layout, state, steps, since)
        return report._replace(level_changes=int(state.capacity.changes))

    def parts(self, layout: Layout, level: CapacityLevel) -> dict[str, wire.Part]:
        """Return the parts of a body with plain words at a level; `dense` is a Python bool."""
        side = self.quantizer.side_parts(layout)
        if level.dense:
            return {**side, "places": wire.Part("uint8", self._dense_bytes(layout))}
        return {**side, "words": wire.Part("uint32", level.capacity)}

    def _dense_bytes(self, layout: Layout) -> int:
        return layout.size * self.quantizer.dense_bits // 8

    def body_bytes(self, layout: Layout, level: CapacityLevel) -> int:
        if level.dense or self.index_coding == "int32":
            return int(wire.body_bytes(self.parts(layout, level)))
        return int(wire.body_bytes(self.coded_parts(layout, level.capacity)))

    def coded_parts(self, layout: Layout, capacity: int) -> dict[str, wire.Part]:
        """Return the parts of a body whose indices travel apart from their codes."""
        codes = (capacity + GROUP - 1) // GROUP * self.quantizer.bits
        index = CODINGS[self.index_coding].parts(layout, capacity)
        side = self.quantizer.side_parts(layout)
        return {**side, **index, "codes": wire.Part("uint32", codes)}

    # -- one step ----------------------------------------------------------------------------

    def checks_gradient(self, ops: Ops, context: Context, level: CapacityLevel) -> bool:
        del context, level
        kernels = ops.threshold_kernels
        return self.rule is not None and kernels is not None and bool(kernels.checks)

    def encode(self, level: CapacityLevel, inputs: StepInputs) -> tuple[Encoded, SparseState]:
        _, ops, context, gradient, state, moment, unchecked = inputs
        layout, step = context.layout, context.step
        if ops.threshold_kernels is not None and self.rule is not None:
            arguments = state.memory, gradient, moment, state.sent
            checks = {"checks": True} if unchecked else {}
            written = ops.threshold_kernels.write(
                self.rule, layout, level, step, *arguments, **checks
            )
            if not written.finite:
                return Encoded(written.body, 0, 0, finite=False), state
            body = self._coded(ops, context, level, written.body)
            encoded = Encoded(body, written.sent, written.wanted, commit=written.commit)
            memory = type(state.memory)(*written.memory)
            return encoded, state._replace(memory=memory, sent=written.per_layer)
        passing, memory = self._search(ops, gradient, state.memory, moment)
        selection = select(ops, layout, passing)
        value = selection.take(memory[0])
        code, encodable, side = self.quantizer.encode(ops, selection, value)
        selection, code = selection.only(encodable, code)

        def words() -> tuple[Tensor, SentElements]:
            sent = selection.fitting(code, level.capacity, step)
            word = sent.code * (1 << self._index_bits) + sent.index
            branch = level._replace(dense=False)
            body = wire.pack_body(ops, self.parts(layout, branch), {**side, "words": word})
            return self._coded(ops, context, branch, body), sent

        def places() -> tuple[Tensor, SentElements]:
            dense, sent = selection.spread(code)
            packed = _pack(ops, dense, self.quantizer.dense_bits)
            branch = level._replace(dense=True)
            return wire.pack_body(ops, self.parts(layout, branch), {**side, "places": packed}), sent

        body, sent = ops.cond(level.dense, places, words)
        if side:
            layer = layer_of(ops, layout, sent.index)
            side = {name: ops.gather(x, layer) for name, x in side.items()}
        value = self.quantizer.decode(ops, sent.code, side)
        undo_log = self.undo_log(ops, memory, sent.index)
        memory = self.without_sink(ops, self.commit(ops, memory, sent, value))
        encoded = Encoded(body, sent.count, selection.count(), undo_log)
        return encoded, state._replace(memory=memory, sent=state.sent + sent.per_layer)

    def _words(self, context: Context, level: CapacityLevel) -> Words:
        """Return where the words of a body stand at a level."""
        layout = context.layout
        side = int(wire.body_bytes(self.quantizer.side_parts(layout)))
        capacities = self.capacity_schedule(layout, context.size).capacities
        return Words(side, level.capacity, capacities, layout.sink, self.quantizer.bits)

    def _coded(self, ops: Ops, context: Context, level: CapacityLevel, body: Tensor) -> Tensor:
        """Return the body that travels, from one of plain words or places."""
        if self.index_coding == "int32" or level.dense is True:
            return body
        coding, words = CODINGS[self.index_coding], self._words(context, level)
        return ops.cond(level.dense, lambda: body, lambda: coding.encode_body(ops, words, body))

    def check_bodies(
        self,
        ops: Ops,
        context: Context,
        level: CapacityLevel,
        header: wire.Header,
        bodies: Tensor,
    ) -> tuple[wire.Header, Tensor]:
        """Return bodies of words; see `SparseCompressor.check_bodies`.

        Raises:
            PayloadError: indices do not ascend.
        """
        if self.index_coding == "int32" or level.dense is True:
            return super().check_bodies(ops, context, level, header, bodies)
        coding, words = CODINGS[self.index_coding], self._words(context, level)
        bodies, ascending = ops.cond(
            level.dense,
            lambda: (bodies, ops.full((bodies.shape[0],), 0) == 0),
            lambda: coding.decode_bodies(ops, words, bodies),
        )
        return patterns.check_ascending(ops, ascending, header), bodies

    @property
    def _index_bits(self) -> int:
        return 32 - self.quantizer.bits

    def _search(
        self, ops: Ops, gradient: Tensor, memory: Memory, moment: Tensor | None
    ) -> tuple[Tensor, Memory]:
        fields = len(memory)

        def tile(*pieces: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            arguments = pieces[fields:]
            squares = arguments[1] if moment is not None else None
            wanted, taken_in = self.select_mask(
                ops, type(memory)(*pieces[:fields]), arguments[0], squares
            )
            return wanted, tuple(taken_in)

        arguments = (gradient,) if moment is None else (gradient, moment)
        passing, taken_in = ops.search(tile, tuple(memory), arguments)
        return passing, type(memory)(*taken_in)

    def reduction_spec(self, context: Context, level: CapacityLevel) -> ReductionSpec:
        layout, ascending = context.layout, None
        side = self.quantizer.side_parts(layout)
        if level.dense is False and self.index_coding == "int32":
            mask = (1 << self._index_bits) - 1
            ascending = int(wire.body_bytes(side)) // 4, level.capacity, mask, layout.size
        return patterns.reduction_spec(context, side, ascending)

    def decode_sum(self, ops: Ops, layout: Layout, payloads: Payloads, scratch: Tensor) -> Tensor:
        level, bodies, weights = payloads
        if ops.threshold_kernels is not None and self.rule is not None:
            return ops.threshold_kernels.add(self.rule, layout, level, bodies, weights, scratch)

        def words() -> Tensor:
            payload = wire.unpack_body(ops, self.parts(layout, level._replace(dense=False)), bodies)
            word = payload.pop("words")  # [world, capacity]
            code, index = ops.split_bits(word, self._index_bits)
            side = payload
            if side:
                layer = layer_of(ops, layout, index)
                side = {name: ops.gather_rows(x, layer) for name, x in side.items()}
            value = self.quantizer.decode(ops, code, side) * weights[:, None]
            total = ops.clear(scratch)
            for rank in range(bodies.shape[0]):
                total = ops.add_at(total, index[rank], value[rank])
            return total

        def places() -> Tensor:
            payload = wire.unpack_body(ops, self.parts(layout, level._replace(dense=True)), bodies)
            packed = payload.pop("places")
            table = ops.table(layout, "layer_of_block")
            total = ops.clear(scratch)
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

        return ops.clear_last(ops.cond(level.dense, places, words))


@lru_cache(maxsize=1024)
def _capacities(
    compressor: ThresholdCompressor, layout: Layout, limit: int, beyond: int
) -> tuple[int, ...]:
    """Return the capacities below the dense level whose bodies have at most `limit` bytes.

    Bytes that are sent once for a layer do not count.

    Args:
        beyond: elements above the most that fit, below which capacities end.
    """
    side = int(wire.body_bytes(compressor.quantizer.side_parts(layout)))

    def fits(capacity: int) -> bool:
        if compressor.index_coding == "int32":
            return 4 * capacity <= limit
        return wire.body_bytes(compressor.coded_parts(layout, capacity)) - side <= limit

    low, high = 0, limit // 4 if compressor.index_coding == "int32" else layout.size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    every = CapacitySchedule.up_to(low + beyond, policy=compressor.policy).capacities
    # Elias-Fano's code of a few more elements may take a word less, in small layers.
    return tuple(filter(fits, every))


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
