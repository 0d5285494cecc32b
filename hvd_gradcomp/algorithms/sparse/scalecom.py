"""ScaleCom's CLT-k (Chen et al. 2020): the leader chooses the indices for all ranks."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from hvd_gradcomp.algorithms.sparse.sparse_gd import SparseGDCompressor
from hvd_gradcomp.codecs.clipping import Clipping
from hvd_gradcomp.codecs.indices import CODINGS, Words
from hvd_gradcomp.codecs.sparse import Residual
from hvd_gradcomp.codecs.topk import BodySpec
from hvd_gradcomp.codecs.values import VALUES
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.collectives import Allgather, Allreduce
from hvd_gradcomp.core.cost_model import Exchange, cheapest, dense_exchange, volume
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.method.compressor import Context, Program, Report
from hvd_gradcomp.method.handover import Handover
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.kernel_params import Form
from hvd_gradcomp.ops.scope import Scope, layer_of


class ScaleComState(NamedTuple):
    """State of one bucket."""

    memory: Residual  # rank-local
    sent: Tensor  # int64 [layers], elements that this rank has sent so far


@dataclass(frozen=True)
class ScaleComCompressor(Clipping, Handover):
    """CLT-k: all ranks send their values at the leader's top-k indices (Chen et al. 2020).

    The leader of step t is rank `t mod size`. It chooses the `k = max(1, round(n * density))`
    largest elements of each layer of its `r + g` and broadcasts their indices; all ranks' values
    there are allreduced, at a cost that does not grow with the number of ranks. Then
    `r = (1-beta)*r + beta*(r + g - sent)`.

    What travels: packed indices from the leader, by broadcast; then 4 bytes for each element sent,
    by allreduce. If that is more than dense gradients, near density 1, all elements are sent.
    State: `r`, 4 bytes for each element.

    Default: `ScaleComCompressor(density=0.01)`, which lost nothing on digits
    (docs/algorithms/index.md). Larger trainings had 0.001 behind uncompressed steps
    (docs/papers-long.md); 0.01 was not measured in them.

    Args:
        density: share of elements to send, in (0, 1]; smaller sends less. At 1 layers are sent
            dense.
        beta: of the low-pass filter on the residual, in (0, 1]; 1 keeps everything that was not
            sent, smaller values forget by design.
        index_coding: "elias_fano", packed, or "int32", plain.
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` before accumulating, so that a bad batch does not fill the
            residual; positive; smaller clips more. None clips nothing.
        values: code of the sent values: "float32", "bfloat16", "int8", "int4", "int2" or "sign";
            fewer bits send less of a layer that sends many. What rounding takes stays in `r`.
            Neighbours in a layer, some 4,096 at most, share a scale or a codebook, which is sent
            too: of a layer that sends few, it may take more than the bits save.
            Rounded values travel by allgather, whose cost grows with the number of ranks; decoded,
            by allreduce, where that moves fewer bytes.

    Differs from the paper: the selection is exact, not chunked; the leader sends no zeros.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> print(ScaleComCompressor(density=0.02))
    ScaleComCompressor(density=0.02)
    """

    density: float = 0.01
    beta: float = 1.0
    index_coding: str = "elias_fano"
    max_norm: float | None = None
    values: str = "float32"

    replicated = frozenset({"sent"})

    def __post_init__(self) -> None:
        validate.real(self, "density", low=0, high=1, closed="]")
        validate.real(self, "beta", low=0, high=1, closed="]")
        validate.one_of(self, "index_coding", CODINGS)
        validate.one_of(self, "values", VALUES)
        self.validate_max_norm()

    @cached_property
    def topk(self) -> SparseGDCompressor:
        """Top-k with the same parameters, which the leader chooses by."""
        return SparseGDCompressor(self.density, self.index_coding, values=self.values)

    def init(self, ops: Ops, layout: Layout) -> ScaleComState:
        layers = ops.zeros((len(layout.names),), "int64")
        return ScaleComState(self.topk.init_memory(ops, layout), layers)

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: Any, **extra: Tensor
    ) -> Program:
        gradient, _ = self.clipped(ops, context, gradient, extra)
        if self.exchange_of(context.layout, context.size).kind == "dense":
            return self._all(ops, context, gradient, state)
        return self._by_leader(ops, context, gradient, state)

    def exchange_of(self, layout: Layout, ranks: int) -> Exchange:
        values = "allreduce", 4.0 * (self.topk.capacity(layout) + 1)
        if self.gathers(layout, ranks):
            values = "allgather", float(self.value_bytes(layout))
        choice = "broadcast", float(self.choice_bytes(layout))
        by_leader = Exchange("leader", (choice, values))
        return cheapest([by_leader, dense_exchange(layout.elements)], ranks)

    def gathers(self, layout: Layout, ranks: int) -> bool:
        """Return True if rounded values are allgathered, which moves no more than float32 sums."""
        summed = volume("allreduce", 4.0 * (self.topk.capacity(layout) + 1), ranks)
        return self.topk.rounds and volume("allgather", self.value_bytes(layout), ranks) <= summed

    def _by_leader(self, ops: Ops, context: Context, gradient: Tensor, state: Any) -> Program:
        """Broadcast the leader's indices, and allreduce all ranks' values there."""
        layout, leader = context.layout, context.step % context.size
        finite, gradient = patterns.check_storable(ops, gradient)

        def choice() -> Tensor:
            return self.choose(ops, context, gradient, state)

        size = self.choice_bytes(layout)
        buffer = yield from patterns.from_leader(ops, context, leader, choice, size)
        index = self.chosen(ops, context, ops.reshape(buffer, (1, -1)))
        values, error = self.values_at(ops, layout, gradient, state, index), None
        if self.topk.rounds:
            whole, spec = values, BodySpec(self.topk, layout, self.topk.capacity(layout))
            real = index < layout.sink
            coded, values = spec.encode_values(ops, whole, index)
            values = ops.where(real, values, 0.0)
            error = whole - values
        if self.gathers(layout, context.size):
            total = yield from self._gathered(ops, context, finite, spec, index, coded)
        else:
            values = ops.concat((values, patterns.poison(ops, finite)))
            total = yield Allreduce(values, context.prescale, context.postscale)
            total = patterns.strip_poison(ops, total)
        return self.commit_all(ops, layout, gradient, state, index, total, error)

    def _gathered(
        self,
        ops: Ops,
        context: Context,
        finite: Any,
        spec: BodySpec,
        index: Tensor,
        coded: dict[str, Tensor],
    ) -> Generator[Any, Any, Tensor]:
        """Allgather the rounded values and sum them in rank order; float32 [capacity]."""
        parts = self.value_parts(context.layout)
        body = wire.pack_pieces(ops, parts, coded)
        header = patterns.header_of(self, context, finite)
        buffers = yield Allgather(wire.pack(ops, header, *body))
        expected, check = patterns.header_of(self, context), patterns.reduction_spec(context, {})
        header, bodies = wire.unpack(ops, expected, buffers, check)
        weights = patterns.weights_of(ops, context, header)
        total = ops.zeros((self.topk.capacity(context.layout),))
        payload = wire.unpack_body(ops, parts, bodies)
        for rank in range(context.size):
            rank_payload = {name: part[rank] for name, part in payload.items()}
            total = total + spec.decode_values(ops, rank_payload, index) * weights[rank]
        return patterns.check_sum(ops, total)

    def _all(self, ops: Ops, context: Context, gradient: Tensor, state: Any) -> Program:
        r = state.memory.r
        total = yield from patterns.allreduce_bucket(ops, context, ops.accumulate(gradient, r))
        total = patterns.check_sum(ops, total)
        sent = state.sent + ops.words(context.layout.sizes)
        return total, ScaleComState(Residual(ops.scale(r, 1.0 - self.beta)), sent)

    # -- what the leader sends ---------------------------------------------------------------

    def choice_parts(self, layout: Layout) -> dict[str, wire.Part]:
        """Return the parts of the broadcast's body."""
        return self.topk.coding.parts(layout, self.topk.capacity(layout))

    def choice_bytes(self, layout: Layout) -> int:
        """Return the bytes of the broadcast, header included."""
        return wire.packed_bytes(self.choice_parts(layout))

    def value_parts(self, layout: Layout) -> dict[str, wire.Part]:
        """Return the parts of the body that holds rounded values."""
        return self.topk.value_parts(layout, self.topk.capacity(layout))

    def value_bytes(self, layout: Layout) -> int:
        """Return the bytes of the rounded values, header included."""
        return wire.packed_bytes(self.value_parts(layout))

    def payload_bytes(self, layout: Layout) -> int:
        """Return the bytes that one rank hands to both collectives; rounded values gathered."""
        values = (
            self.value_bytes(layout) if self.topk.rounds else 4 * (self.topk.capacity(layout) + 1)
        )
        return self.choice_bytes(layout) + values

    def choice_form(self, ops: Ops, layout: Layout) -> Form | None:
        """Return the broadcast's plain body; None if no fused kernel supports it."""
        kernels, topk = ops.topk_kernels, self.topk
        if kernels is None or not kernels.leads or topk.rule is None or topk.rounds:
            return None
        return Form(topk.capacity(layout), valued=False)

    def choice_words(self, layout: Layout) -> Words:
        """Return the words of the broadcast's plain body: all of it."""
        capacity = self.topk.capacity(layout)
        return Words(0, capacity, (capacity,), layout.sink)

    def choose(self, ops: Ops, context: Context, gradient: Tensor, state: Any) -> Tensor:
        """Encode the leader's payload: the indices of its largest error-compensated elements."""
        layout, limits = context.layout, self.topk.limits(context.layout)
        scope, r = Scope(layout, whole=False), state.memory.r
        form = self.choice_form(ops, layout)
        if form is not None:
            written = ops.topk_kernels.choose(scope, form, context.step, limits, r, gradient)
            body, count = written.body, written.sent
        else:
            k_per_layer, whole = ops.words(limits), r + gradient
            capacity = self.topk.capacity(layout)
            index, _, _ = self.topk.select(
                ops, scope, context.step, whole, k_per_layer, None, capacity
            )
            body = ops.to_bytes(index, "uint32")
            count = ops.sum(ops.cast(index < layout.sink, "int64"))
        body = self.topk.coding.encode_body(ops, self.choice_words(layout), body)
        return wire.pack(ops, self._header(context)._replace(sent=count, wanted=count), body)

    def _header(self, context: Context) -> wire.Header:
        step = context.step % (1 << 32)
        return wire.Header(self.algorithm, self.digest(context.layout), step, 0, 0, 0)

    def chosen(self, ops: Ops, context: Context, buffer: Tensor) -> Tensor:
        """Decode the leader's indices from its payload [1, bytes]; int64 [capacity].

        For fused kernels, return the plain body, which they read themselves.

        Raises:
            PayloadError: indices do not ascend.
        """
        layout = context.layout
        header, bodies = wire.unpack(ops, self._header(context), buffer)
        words = self.choice_words(layout)
        bodies, ascending = self.topk.coding.decode_bodies(ops, words, bodies)
        header = patterns.check_ascending(ops, ascending, header)
        if self.choice_form(ops, layout) is not None:
            return bodies[0] if header.intact is None else ops.where(header.intact, bodies[0], 0)
        index = ops.from_bytes(bodies[0], "uint32")
        if header.intact is not None:
            index = ops.where(header.intact, index, layout.sink)
        return index

    # -- what all send -----------------------------------------------------------------------

    def values_at(
        self, ops: Ops, layout: Layout, gradient: Tensor, state: Any, index: Tensor
    ) -> Tensor:
        """Return this rank's values at the leader's indices; float32 [capacity]."""
        r, form = state.memory.r, self.choice_form(ops, layout)
        if form is not None:
            return ops.topk_kernels.values(layout, form, index, r, gradient)
        return ops.gather(r, index) + ops.gather(gradient, index)

    def commit_all(
        self,
        ops: Ops,
        layout: Layout,
        gradient: Tensor,
        state: Any,
        index: Tensor,
        total: Tensor,
        error: Tensor | None = None,
    ) -> tuple[Tensor, ScaleComState]:
        """Return the mean and the state without what was sent, but with its rounding error."""
        r, form = state.memory.r, self.choice_form(ops, layout)
        if form is not None:
            arguments = form, index, total, self.beta, r, gradient
            mean, r, per_layer = ops.topk_kernels.replace(layout, *arguments)
            return mean, ScaleComState(Residual(r), state.sent + per_layer)
        kept: Any = 0.0 if error is None else error
        if self.beta != 1.0:
            kept = ops.times(ops.gather(r, index), 1.0 - self.beta)
            if error is not None:
                kept = kept + ops.times(error, self.beta)
            gradient = ops.scale(gradient, self.beta)
        r = ops.clear_last(ops.put(ops.accumulate(r, gradient), index, kept))
        real = ops.cast(index < layout.sink, "int64")
        per_layer = ops.segment_sum(real, layer_of(ops, layout, index), len(layout.names))
        mean = ops.clear_last(ops.put(ops.clear(gradient), index, total))
        return mean, ScaleComState(Residual(r), state.sent + per_layer)

    # -- optional hooks ----------------------------------------------------------------------

    def layer_bytes(self, shape: Sequence[int]) -> float:
        return self.topk.layer_bytes(shape)

    def report(self, layout: Layout, state: ScaleComState, steps: int, since: int = 0) -> Report:
        return self.topk.report(layout, state, steps, since)

    def residual(self, state: ScaleComState) -> Tensor:
        return state.memory.r

    def inherit(
        self, ops: Ops, state: ScaleComState, gradient: Tensor, residual: Tensor
    ) -> tuple[ScaleComState, Tensor]:
        return self.topk.inherit(ops, state, gradient, residual)
