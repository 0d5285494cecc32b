"""The selected elements of all layers as one vector, as both patterns send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_gradcomp.algorithms.lgc.state import LGCState
from hvd_gradcomp.algorithms.sparse.dgc import DGCCompressor
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.codecs.indices import IndexCoding
from hvd_gradcomp.codecs.sparse import Memory
from hvd_gradcomp.codecs.topk_select import largest
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.method.compressor import Compressor, Context
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP
from hvd_gradcomp.ops.kernel_params import Form
from hvd_gradcomp.ops.scope import Scope, layer_of

_MAGNITUDE = (1 << 31) - 1


class Selected(NamedTuple):
    """Memory after accumulation, and the indices of its largest elements."""

    memory: Memory
    index: Tensor  # int64 [selected], ascending; unused slots, at the end, hold the sink
    hint: Tensor  # float32 [layers], magnitude to search from in the next step


@dataclass(frozen=True)
class Selection:
    """Selects elements as DGC does, and keeps what an exchange takes from or owes to them."""

    topk: DGCCompressor
    exact: bool  # with exact feedback, see `LGCCompressor`

    def accumulate_and_select(
        self,
        ops: Ops,
        context: Context,
        finite: Any,
        gradient: Tensor,
        state: LGCState,
        chooses: Any = True,
    ) -> Selected:
        """Accumulate the gradient and select each layer's largest elements, without removing them.

        A gradient that is known to be non-finite is ignored: the step is going to fail.

        Args:
            chooses: True if this rank selects; a bool, or a scalar in a graph. Else it finds
                nothing.
        """
        topk, layout = self.topk, context.layout
        limits, capacity = topk.limits(layout), topk.capacity(layout)
        nothing = ops.full((capacity,), layout.sink)
        if finite is False:
            return Selected(state.memory, nothing, state.hint)
        flag, scope = ops.words((chooses,)), Scope(layout, whole=False)
        hint = ops.where(flag > 0, state.hint, float("inf"))
        if ops.topk_kernels is not None and topk.rule is not None:
            form = Form(capacity)
            written = ops.topk_kernels.write(
                topk.rule._replace(masking=False),
                scope,
                form,
                context.step,
                ops.words(limits) * flag,
                limits,
                hint,
                state.memory,
                gradient,
                state.sent,
            )
            index = ops.from_bytes(written.body[form.index :], "uint32")
            values = ops.from_bytes(written.body[: form.index], "float32")
            memory = type(state.memory)(*written.memory)
            # TensorFlow's kernel has already removed the values; those that do not fit must stay.
            memory = memory._replace(r=ops.put(memory.r, index, values))
            return Selected(memory, index, ops.where(flag > 0, written.hint, state.hint))
        passing, memory = topk.collected(ops, scope, gradient, state._replace(hint=hint))

        def choose() -> tuple[Tensor, Tensor]:
            selection, code, hint = largest(
                ops, scope, memory.r, ops.words(limits), limits, context.step, passing
            )
            sent = selection.fitting(code, capacity, context.step)
            return ops.reshape(sent.index, (capacity,)), hint

        index, hint = ops.cond(chooses, choose, lambda: (nothing, state.hint))
        return Selected(memory, ops.sort(index), hint)

    def values_to_send(self, ops: Ops, state: LGCState, index: Tensor) -> Tensor:
        """Return the values of `r` at some indices, plus `owed` there; 0 in the sink."""
        values = ops.gather(state.memory.r, index)
        return values + ops.gather(state.owed, index) if self.exact else values

    def set_owed(self, ops: Ops, state: LGCState, index: Tensor, values: Any) -> LGCState:
        """Return the state with `owed` set to `values` at some indices."""
        if not self.exact:
            return state
        return state._replace(owed=ops.clear_last(ops.put(state.owed, index, values)))

    def commit(self, ops: Ops, state: LGCState, index: Tensor) -> LGCState:
        """Return the state after values were exchanged without loss."""
        memory = self.topk.without_sink(ops, self.topk.commit(ops, state.memory, index))
        return self.set_owed(ops, state._replace(memory=memory), index, 0.0)


@dataclass(frozen=True)
class Units:
    """Normalizes all ranks' vectors by one rank's, so that the autoencoder sees similar ones."""

    signs: bool
    by_layer: bool  # one RMS for each layer; else one for the model

    def parts(self, layout: Layout, capacity: int) -> dict[str, wire.Part]:
        """Return the parts of `measure` in a payload."""
        signs = {"signs": wire.Part("uint32", -(-capacity // GROUP))} if self.signs else {}
        return {**signs, "scale": wire.Part("float32", len(layout.names) if self.by_layer else 1)}

    def measure(self, ops: Ops, layout: Layout, index: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Return the parts that normalize all ranks' values: one rank's RMS and signs.

        Args:
            index: ascending.
            values: of the rank whose code the others have to match.
        """
        parts = {}
        if self.signs:
            missing = -values.shape[0] % GROUP
            negative = ops.cast(ops.concat((values, ops.zeros((missing,)))) < 0, "int64")
            parts["signs"] = ops.pack(negative, 1)
        if self.by_layer:
            parts["scale"] = _rms_of_layers(ops, layout, index, values)
        else:
            mean = ops.reshape(ops.sum(values * values), (1,)) * (1.0 / values.shape[0])
            parts["scale"] = ops.where(mean > 0, ops.sqrt(mean), 1.0)
        return parts

    def of_elements(
        self, ops: Ops, layout: Layout, index: Tensor, parts: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the unit of each element from the parts of `measure`; float32 [selected]."""
        scale = parts["scale"]
        if self.by_layer:
            scale = ops.gather(scale, layer_of(ops, layout, index))
        else:
            scale = scale + ops.zeros(tuple(index.shape))
        if not self.signs:
            return scale
        negative = ops.unpack(parts["signs"], 1)[: index.shape[0]] > 0
        return ops.where(negative, -scale, scale)


def _rms_of_layers(ops: Ops, layout: Layout, index: Tensor, values: Tensor) -> Tensor:
    """Return the RMS of each layer's values, 1 for zeros; float32 [layers]."""
    count = per_layer(ops, layout, index)
    end, wide = ops.cumsum(count), ops.cast(values, "float64")
    energy = ops.concat((ops.zeros((1,), "float64"), ops.cumsum(wide * wide)))
    energy = ops.gather(energy, end) - ops.gather(energy, end - count)
    mean = energy / ops.cast(ops.maximum(count, 1), "float64")
    root = ops.cast(ops.sqrt(ops.maximum(mean, 0.0)), "float32")
    return ops.where(root > 0, root, 1.0)


def to_units(ops: Ops, values: Tensor, unit: Tensor) -> Tensor:
    """Divide values by their units, padded with zeros to the autoencoder's length."""
    missing = autoencoder.padded(values.shape[0]) - values.shape[0]
    return ops.concat((values / unit, ops.zeros((missing,))))


def count_sent(ops: Ops, layout: Layout, state: LGCState, index: Tensor) -> LGCState:
    """Return the state with the sent elements counted."""
    return state._replace(sent=state.sent + per_layer(ops, layout, index))


def per_layer(ops: Ops, layout: Layout, index: Tensor) -> Tensor:
    """Count the elements of each layer, without the sink; int64 [layers]."""
    real = ops.cast(index < layout.sink, "int64")
    return ops.segment_sum(real, layer_of(ops, layout, index), len(layout.names))


# -- payloads ----------------------------------------------------------------------------------


def pack(compressor: Compressor, ops: Ops, context: Context, finite: Any, body: Tensor) -> Tensor:
    """Pack a body with its header."""
    return wire.pack(ops, patterns.header_of(compressor, context, finite), body)


def unpack(
    compressor: Compressor, ops: Ops, context: Context, buffers: Tensor
) -> tuple[wire.Header, Tensor]:
    """Unpack the headers and the bodies."""
    expected, spec = patterns.header_of(compressor, context), patterns.reduction_spec(context, {})
    return wire.unpack(ops, expected, buffers, spec)


# -- short vectors -----------------------------------------------------------------------------


def largest_of_layers(
    ops: Ops, layout: Layout, counts: Sequence[int], index: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Select the largest of each layer's elements, of equal ones the first.

    Args:
        ops, layout: of the bucket.
        counts: how many of each layer.
        index: ascending, unused slots hold the sink.
        values: at these indices.

    Returns:
        Their indices and values, [sum of counts] each.
    """
    length = values.shape[0]
    layer = layer_of(ops, layout, index)  # ascending too, so unchanged by the sort
    weakness = _MAGNITUDE - ops.float_bits(ops.abs(values))
    ranked = ops.sort((layer * (1 << 31) + weakness) * length + ops.arange(length)) % length
    inside = ops.segment_sum(ops.full((length,), 1), layer, len(counts))
    number = ops.arange(length) - ops.gather(ops.cumsum(inside) - inside, layer)
    kept = number < ops.gather(ops.words(counts), layer)
    place = ops.sort(ops.where(kept, ranked, length))[: sum(counts)]
    index = ops.concat((index, ops.full((1,), layout.sink)))
    return ops.gather(index, place), ops.gather(ops.concat((values, ops.zeros((1,)))), place)


def sent_by_ranks(
    ops: Ops, layout: Layout, coding: IndexCoding, payload: Mapping[str, Tensor], count: int
) -> list[tuple[Tensor, Tensor]]:
    """Return each rank's indices, ascending, and values from an unpacked payload of all.

    Args:
        ops, layout: of the bucket.
        coding: of the indices.
        payload: its parts; "values" is float32 [ranks, count].
        count: the number of elements that each rank sends.
    """
    sent = []
    for rank in range(payload["values"].shape[0]):
        indices = {name: part[rank] for name, part in payload.items() if name != "values"}
        index = coding.decode(ops, layout, indices, count)
        sent.append((index, payload["values"][rank]))
    return sent


def among(ops: Ops, ascending: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position of each index among ascending ones, and a mask of those found."""
    place = ops.minimum(ops.count_below(ascending, index), ascending.shape[0] - 1)
    return place, ops.gather(ascending, place) == index


def at(ops: Ops, index: Tensor, values: Tensor, places: Tensor) -> Tensor:
    """Return a sparse vector's values at other indices, 0 if absent; `index` is ascending."""
    place, present = among(ops, index, places)
    return ops.where(present, ops.gather(values, place), 0.0)
