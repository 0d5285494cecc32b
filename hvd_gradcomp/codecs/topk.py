"""Top-k methods: they send the k largest elements of each layer, or of the model.

    collect      accumulates the gradient in the memory, elementwise
    k_per_layer  the number of elements of each layer to send
    encode       selects the k largest and packs them into the payload
    commit       updates the memory by what was *sent*

The selection is exact and sorts no layer; see `codecs.topk_select`.

Zeros are never sent. Payload: coded values, then coded indices, of a fixed size, or of one of a
few sizes if the number of elements changes. What rounding takes from a value stays in the memory's
first field. If an allgather would move more bytes than an allreduce of the bucket, the decoded
payloads are allreduced instead.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from math import prod
from typing import Any, ClassVar, NamedTuple

from hvd_gradcomp.codecs.indices import CODINGS, IndexCoding, Words
from hvd_gradcomp.codecs.sparse import Encoded, Memory, Payloads, SparseCompressor, StepInputs
from hvd_gradcomp.codecs.topk_select import largest, of_blocks
from hvd_gradcomp.codecs.values import VALUES, ValueCoding, ValueGroups
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.cost_model import Exchange, dense_exchange, most_gathered
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.method.capacity import CapacitySchedule, CapacityState
from hvd_gradcomp.method.compressor import Context
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.kernel_params import CapacityLevel, Collecting, Form
from hvd_gradcomp.ops.scope import Scope, layer_of


def count_of(size: int, density: float) -> int:
    """Return the number of elements for a density, at least one of `size`.

    >>> count_of(1000, 0.001), count_of(10, 0.001), count_of(1500, 0.001)
    (1, 1, 2)
    """
    return min(size, max(1, int(size * density + 0.5)))


class TopKState(NamedTuple):
    """State of one bucket."""

    memory: Memory  # NamedTuple of float32 [size], rank-local
    capacity: CapacityState  # replicated
    sent: Tensor  # int64 [layers], elements that this rank has sent so far
    hint: Tensor  # float32 [groups], magnitude to search from in the next step; rank-local


class TopKCompressor(SparseCompressor):
    """Base of the family; see the head of this file.

    Attributes:
        of_model: True to select over the whole model, False to select in each layer.
        index_coding: code of the indices; a name in `indices.CODINGS`.
        values: code of the values; a name in `values.VALUES`.
    """

    reset_on_merge = frozenset({"hint"})
    rule: Collecting | None = None
    kernel_methods = frozenset(
        {"collect", "commit", "without_sink", "select", "undo_log", "rollback"}
    )

    of_model: ClassVar[bool] = False
    index_coding: str = "elias_fano"
    values: str = "float32"

    def validate_codings(self) -> None:
        """Raise a ValueError unless `index_coding` and `values` are names of codes."""
        validate.one_of(self, "index_coding", CODINGS)
        validate.one_of(self, "values", VALUES)

    @abstractmethod
    def count(self, size: int) -> int:
        """Return the maximum number of elements to send out of `size`."""

    @abstractmethod
    def collect(self, ops: Ops, memory: Memory, gradient: Tensor) -> Memory:
        """Accumulate the gradient. Elementwise, donating."""

    @abstractmethod
    def commit(self, ops: Ops, memory: Memory, index: Tensor) -> Memory:
        """Remove what was sent; indices may be the sink."""

    def k_per_layer(
        self, ops: Ops, layout: Layout, step: Any, gradient: Tensor, state: Any
    ) -> tuple[Tensor | None, Any]:
        """Return how many elements of each layer (or of the model) to send this step; int64 [k].

        None stands for the maximum of every layer, a 0 for the maximum of that layer.
        """
        del ops, layout, step, gradient
        return None, state

    # -- sizes -------------------------------------------------------------------------------

    @property
    def coding(self) -> IndexCoding:
        """Code of the indices."""
        return CODINGS[self.index_coding]

    @property
    def value_coding(self) -> ValueCoding:
        """Code of the values."""
        return VALUES[self.values]

    @property
    def rounds(self) -> bool:
        """Whether values are rounded on the wire."""
        return self.values != "float32"

    def limits(self, layout: Layout) -> tuple[int, ...]:
        """Return the maximum number of elements of each layer, or of the model."""
        return _limits_of(self, layout)

    def value_groups(self, layout: Layout) -> ValueGroups:
        """Return the groups of values that share side values."""
        return _value_groups_of(self, layout)

    def capacity(self, layout: Layout) -> int:
        """Return the maximum number of elements in a payload."""
        return sum(self.limits(layout))

    def capacities(self, layout: Layout) -> tuple[int, ...]:
        """Return the possible capacities of a payload, ascending; the last is the maximum."""
        return (self.capacity(layout),)

    def capacity_schedule(self, layout: Layout, ranks: int = 1) -> CapacitySchedule:
        limit = most_gathered(4.0 * layout.elements, ranks)
        capacities, sizes = self.capacities(layout), _sizes_of(self, layout)
        fit = sum(1 for _ in takewhile(lambda size: size <= limit, sizes))
        return CapacitySchedule(capacities[:fit], summed=fit < len(capacities))

    def exchange_of(self, layout: Layout, ranks: int) -> Exchange:
        capacities = self.capacity_schedule(layout, ranks).capacities
        if not capacities:
            return dense_exchange(layout.elements, wire.HEADER_BYTES)
        payload = self.payload_bytes(layout, CapacityLevel(0, capacities[0], False))
        return Exchange("allgather", (("allgather", float(payload)),))

    def parts(self, layout: Layout, capacity: int | None = None) -> dict[str, wire.Part]:
        """Return the parts of a body with this capacity; by default the maximum."""
        capacity = self.capacity(layout) if capacity is None else capacity
        return {**self.value_parts(layout, capacity), **self.coding.parts(layout, capacity)}

    def value_parts(self, layout: Layout, capacity: int) -> dict[str, wire.Part]:
        """Return the parts of a body with this capacity that hold its values."""
        return self.value_coding.parts(capacity, self.value_groups(layout))

    def body_bytes(self, layout: Layout, level: CapacityLevel | None = None) -> int:
        return int(wire.body_bytes(self.parts(layout, BodySpec.on(self, layout, level).capacity)))

    def payload_bytes(self, layout: Layout, level: CapacityLevel | None = None) -> int:
        return super().payload_bytes(
            layout, level or CapacityLevel(0, self.capacity(layout), False)
        )

    def layer_bytes(self, shape: Sequence[int]) -> float:
        size = prod(shape)
        count = self.count(size)
        return self.value_coding.layer_bytes(count) + count * self.coding.bits(size, count) / 8

    def init(self, ops: Ops, layout: Layout) -> Any:
        memory, _, sent = super().init(ops, layout)
        schedule = self.capacity_schedule(layout).init(ops, level=len(self.capacities(layout)) - 1)
        return TopKState(memory, schedule, sent, self.unknown(ops, layout))

    def unknown(self, ops: Ops, layout: Layout) -> Tensor:
        """Return the hint before the first step, which no element passes."""
        groups = Scope(layout, self.of_model).count
        return ops.full((groups,), float("inf"), "float32")

    # -- one step ----------------------------------------------------------------------------

    def checks_gradient(self, ops: Ops, context: Context, level: CapacityLevel) -> bool:
        spec = BodySpec.on(self, context.layout, level)
        if self.rule is None or not spec.is_fused(ops) or not ops.topk_kernels.checks:
            return False
        return not self.looks_at_gradient(context.step)

    def looks_at_gradient(self, step: Any) -> bool:
        """Return True if `k_per_layer` reads the gradient in this step, which is checked before."""
        del step
        return type(self).k_per_layer is not TopKCompressor.k_per_layer

    def encode(self, level: CapacityLevel, inputs: StepInputs) -> tuple[Encoded, Any]:
        _, ops, context, gradient, state, _, unchecked = inputs
        layout, step = context.layout, context.step
        scope, spec = Scope(layout, self.of_model), BodySpec.on(self, layout, level)
        wanted, state = self.k_per_layer(ops, layout, step, gradient, state)
        if self.rule is not None and spec.is_fused(ops):
            encoded, state = _encode_fused(
                ops, scope, spec, step, wanted, gradient, state, unchecked
            )
            if not encoded.finite:
                return encoded, inputs.state
            return encoded._replace(body=spec.coded(ops, encoded.body)), state
        k_per_layer, total = _shared(ops, spec, wanted)
        k_per_layer = ops.words(self.limits(layout)) if k_per_layer is None else k_per_layer
        passing, memory = self.collected(ops, scope, gradient, state)
        index, values, hint = self.select(
            ops, scope, step, memory[0], k_per_layer, passing, spec.capacity
        )
        values, real = ops.bits_float(values), ops.cast(index < layout.sink, "int64")
        coded, decoded = spec.encode_values(ops, values, index)
        body = wire.pack_body(ops, spec.plain_parts(ops), {**coded, "index": index})
        body = spec.coded(ops, body)
        per_layer = ops.segment_sum(real, layer_of(ops, layout, index), len(layout.names))
        undo_log = self.undo_log(ops, memory, index, values)
        memory = self.commit(ops, memory, index)
        if self.rounds:  # the rounding error stays
            memory = type(memory)(ops.put(memory[0], index, values - decoded), *memory[1:])
        memory = self.without_sink(ops, memory)
        encoded = Encoded(body, ops.sum(real), total, undo_log)
        sent = state.sent + per_layer
        return encoded, state._replace(memory=memory, sent=sent, hint=hint)

    def collected(
        self, ops: Ops, scope: Scope, gradient: Tensor, state: Any
    ) -> tuple[Tensor | None, Memory]:
        """Return the elements that pass the hint (None if not searched) and the updated memory."""
        kind, fields = type(state.memory), len(state.memory)

        def tile(*pieces: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.collect(ops, kind(*pieces[:fields]), pieces[fields]))

        if not ops.dynamic_shapes:
            return None, kind(*ops.sweep(tile, tuple(state.memory), (gradient,)))

        def with_values(*pieces: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            taken_in = tile(*pieces)
            return taken_in[0], taken_in

        bound = of_blocks(ops, scope, state.hint)
        passing, taken_in = ops.search(with_values, tuple(state.memory), (gradient,), bound)
        return passing, kind(*taken_in)

    def select(
        self,
        ops: Ops,
        scope: Scope,
        step: Any,
        r: Tensor,
        k_per_layer: Tensor,
        passing: Tensor | None,
        capacity: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Select the k largest |r|; return their indices, bits of values, and the next hint.

        Args:
            passing: indices of all elements above some bound; None to search here.
            capacity: the number of indices to return, ascending, the last of them sinks.
        """
        limits = self.limits(scope.layout)
        selection, code, hint = largest(ops, scope, r, k_per_layer, limits, step, passing)
        sent = selection.fitting(code, capacity, step)
        return sent.index, sent.code, hint

    def check_bodies(
        self,
        ops: Ops,
        context: Context,
        level: CapacityLevel,
        header: wire.Header,
        bodies: Tensor,
    ) -> tuple[wire.Header, Tensor]:
        """Return bodies with plain indices; see `SparseCompressor.check_bodies`.

        Raises:
            PayloadError: indices do not ascend.
        """
        bodies, ascending = BodySpec.on(self, context.layout, level).decoded(ops, bodies)
        header = patterns.check_ascending(ops, ascending, header)
        return super().check_bodies(ops, context, level, header, bodies)

    def ceilings(
        self, ops: Ops, layout: Layout, level: CapacityLevel, bodies: Tensor
    ) -> list[Tensor]:
        sent = BodySpec.on(self, layout, level)
        if sent.is_fused(ops) and ops.topk_kernels.looks:
            return []  # the summing kernel checks them
        parts, values = sent.plain_parts(ops), self.value_parts(layout, 0)
        payload = {name: wire.unpack_part(ops, parts, bodies, name) for name in values}
        return [self.value_coding.ceiling(ops, payload)]

    def decode_sum(self, ops: Ops, layout: Layout, payloads: Payloads, scratch: Tensor) -> Tensor:
        level, bodies, weights = payloads
        sent = BodySpec.on(self, layout, level)
        if sent.is_fused(ops):
            arguments, kernels = (layout, sent.form, bodies, weights, scratch), ops.topk_kernels
            if kernels.looks:
                return kernels.add(*arguments, patterns.LARGEST, wire.ANY_NOT_FINITE)
            return kernels.add(*arguments)
        payload = wire.unpack_body(ops, sent.plain_parts(ops), bodies)
        total = ops.clear(scratch)
        for rank in range(bodies.shape[0]):
            parts = {name: part[rank] for name, part in payload.items()}
            index = parts["index"]
            values = sent.decode_values(ops, parts, index)
            total = ops.add_at(total, index, values * weights[rank])
        return ops.clear_last(total)


class BodySpec(NamedTuple):
    """Body of a payload with a given capacity in elements.

    Attributes:
        compressor: the method.
        layout: of the bucket.
        capacity: one of the compressor's; may be a scalar in a graph.
        summed: True if the body stays on its rank, so that its indices stay plain.
    """

    compressor: TopKCompressor
    layout: Layout
    capacity: Any
    summed: bool = False

    @classmethod
    def on(
        cls, compressor: TopKCompressor, layout: Layout, level: CapacityLevel | None
    ) -> BodySpec:
        """Return the body at a capacity level; by default at the maximum."""
        capacities = compressor.capacities(layout)
        summed = level is not None and level.summed
        if level is None or level.dense is True or len(capacities) == 1:
            return cls(compressor, layout, capacities[-1], summed)
        return cls(compressor, layout, level.capacity, summed)

    def value_parts(self, ops: Ops) -> dict[str, wire.Part]:
        """Return the parts that hold the values."""
        compressor, layout, capacity, _ = self
        if isinstance(capacity, int):
            return compressor.value_parts(layout, capacity)
        capacities = compressor.capacities(layout)
        place = ops.bisect(capacities, capacity)
        by_capacity = [compressor.value_parts(layout, each) for each in capacities]
        return {
            name: part._replace(count=ops.choice([x[name].count for x in by_capacity], place))
            for name, part in by_capacity[0].items()
        }

    def plain_parts(self, ops: Ops) -> dict[str, wire.Part]:
        """Return the parts of the body with plain indices."""
        return {**self.value_parts(ops), "index": wire.Part("uint32", self.capacity)}

    def is_fused(self, ops: Ops) -> bool:
        """Return True if fused kernels read and write this body."""
        return ops.topk_kernels is not None and not self.compressor.rounds

    @property
    def form(self) -> Form:
        """The body as fused kernels know it."""
        return Form(self.capacity)

    def coded(self, ops: Ops, body: Tensor) -> Tensor:
        """Return the body that travels, from one with plain indices; uint8 [bytes]."""
        if self.summed:
            return body
        return self.compressor.coding.encode_body(ops, self._words(ops), body)

    def decoded(self, ops: Ops, bodies: Tensor) -> tuple[Tensor, Tensor | None]:
        """Invert `coded` of all ranks' bodies, and return whose indices ascend, if known."""
        return self.compressor.coding.decode_bodies(ops, self._words(ops), bodies)

    def _words(self, ops: Ops) -> Words:
        side = wire.body_bytes(self.value_parts(ops))
        capacities = self.compressor.capacities(self.layout)
        return Words(side, self.capacity, capacities, self.layout.sink)

    def encode_values(
        self, ops: Ops, values: Tensor, index: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the parts of the values, and the values as they are decoded; float32 [capacity].

        Args:
            ops: the tensor operations.
            values: float32 [capacity].
            index: of each, int64 [capacity]; the sink where nothing is sent.
        """
        compressor, layout, capacity, _ = self
        if not compressor.rounds:
            return {"values": values}, values
        max_capacity, code = compressor.capacity(layout), compressor.value_coding
        groups, missing = compressor.value_groups(layout), max_capacity - capacity
        values = _extended(ops, values, missing, max_capacity)
        index = _extended(ops, index, missing, max_capacity, "int64", layout.sink)
        coded, parts = code.encode(ops, values, index, groups), self.value_parts(ops)
        decoded = code.decode(ops, coded, index, groups)[:capacity]
        return {name: x[: parts[name].count] for name, x in coded.items()}, decoded

    def decode_values(self, ops: Ops, payload: Mapping[str, Tensor], index: Tensor) -> Tensor:
        """Return the values of one rank's parts, given where they lie; float32 [capacity]."""
        compressor, layout, capacity, _ = self
        if not compressor.rounds:
            return payload["values"]
        max_capacity, code = compressor.capacity(layout), compressor.value_coding
        whole, parts = compressor.value_parts(layout, max_capacity), self.value_parts(ops)
        coded = {}
        for name, part in whole.items():
            missing = whole[name].count - parts[name].count
            dtype = _IN_MEMORY[part.dtype]
            coded[name] = _extended(ops, payload[name], missing, part.count, dtype)
        index = _extended(ops, index, max_capacity - capacity, max_capacity, "int64", layout.sink)
        return code.decode(ops, coded, index, compressor.value_groups(layout))[:capacity]


_IN_MEMORY = {"float32": "float32", "bytes": "uint8"}


def _extended(
    ops: Ops, x: Tensor, missing: Any, length: int, dtype: str = "float32", filler: int = 0
) -> Tensor:
    """Append a filler up to a static length."""
    if not (isinstance(missing, int) and missing == 0):
        x = ops.concat((x, ops.full((missing,), filler, dtype)))
    return ops.reshape(x, (length,))


@lru_cache(maxsize=1024)
def _limits_of(compressor: TopKCompressor, layout: Layout) -> tuple[int, ...]:
    return tuple(compressor.count(size) for size in Scope(layout, compressor.of_model).sizes)


@lru_cache(maxsize=1024)
def _value_groups_of(compressor: TopKCompressor, layout: Layout) -> ValueGroups:
    if compressor.of_model:
        return ValueGroups.of_model(layout, compressor.capacity(layout))
    return ValueGroups.of_layers(layout, compressor.limits(layout))


@lru_cache(maxsize=1024)
def _parts_of(compressor: TopKCompressor, layout: Layout) -> list[dict[str, wire.Part]]:
    return [compressor.parts(layout, capacity) for capacity in compressor.capacities(layout)]


@lru_cache(maxsize=1024)
def _sizes_of(compressor: TopKCompressor, layout: Layout) -> list[int]:
    return [int(wire.body_bytes(parts)) for parts in _parts_of(compressor, layout)]


def _shared(ops: Ops, spec: BodySpec, wanted: Tensor | None) -> tuple[Tensor | None, Any]:
    """Return the part of `wanted` that fits (None for the maximum) and the number wanted."""
    compressor, layout, capacity, _ = spec
    if wanted is None and len(compressor.capacities(layout)) == 1:
        return None, compressor.capacity(layout)
    limits = compressor.limits(layout)
    shares: tuple[Tensor, Tensor] = ops.shares(
        ops.words(limits) if wanted is None else wanted, limits, capacity
    )
    return shares


def _encode_fused(
    ops: Ops,
    scope: Scope,
    spec: BodySpec,
    step: int,
    wanted: Tensor | None,
    gradient: Tensor,
    state: Any,
    unchecked: bool,
) -> tuple[Encoded, Any]:
    compressor, form, kernels = spec.compressor, spec.form, ops.topk_kernels
    limits = compressor.limits(spec.layout)
    arguments = limits, state.hint, state.memory, gradient, state.sent
    if wanted is not None and kernels.shares:
        written = kernels.write(compressor.rule, scope, form, step, wanted, *arguments, shares=True)
        total = written.wanted
    else:
        k_per_layer, total = _shared(ops, spec, wanted)
        checks = {"checks": True} if unchecked else {}
        written = kernels.write(
            compressor.rule, scope, form, step, k_per_layer, *arguments, **checks
        )
    if not written.finite:
        return Encoded(written.body, 0, 0, finite=False), state
    encoded = Encoded(written.body, written.sent, total, commit=written.commit)
    memory = type(state.memory)(*written.memory)
    return encoded, state._replace(memory=memory, sent=written.per_layer, hint=written.hint)
