"""Warnings at the first step if compression does not pay on a model.

The bytes of learning methods are known in advance, while learning and afterwards; both are compared
with dense gradients. Any other method says itself how its buckets travel (`exchange_of`). Methods
whose payload depends on the gradients get no warning, unless they compress no layer of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, prod
from typing import NamedTuple

from hvd_gradcomp.algorithms.gradiveq import GradiVeQCompressor
from hvd_gradcomp.algorithms.lgc import LGCCompressor
from hvd_gradcomp.algorithms.lgc.server import Server
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.codecs.threshold import ThresholdCompressor
from hvd_gradcomp.core import wire
from hvd_gradcomp.core.compressor import Compressor
from hvd_gradcomp.core.cost_model import dense_exchange, gathers_rows
from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.core.layout import Layout, outputs_first

Plan = Sequence[tuple[Compressor, Layout]]


class Course(NamedTuple):
    """Bytes that a rank hands to collectives for a bucket; mean over ranks."""

    learning: float  # in total while it learns
    step: float  # for each step afterwards
    dense: float  # for each step without compression


def warnings(compressor: Compressor, plan: Plan, ranks: int) -> list[str]:
    """Return warnings for a compressor that does not pay; empty if it does.

    Args:
        compressor: as the user gave it.
        plan: the buckets with their compressors, from `assignment.plan`.
        ranks: number of ranks that exchange.
    """
    kinds = [(method.working, layout) for method, layout in plan]
    elements = sum(layout.elements for _, layout in kinds)
    names = [name for _, layout in plan for name in layout.names]
    nothing = idle(compressor, plan)
    if nothing and isinstance(compressor, GradiVeQCompressor):
        listed = ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")
        return [
            f"GradiVeQ compresses nothing: none of {len(names)} layers is a convolution that takes "
            f"fewer bytes so, {4 * elements:,} dense: {listed}. Use another method; these all go "
            f"to other={compressor.others}"
        ]
    if nothing:
        return [
            f"no layer is compressed: all {len(names)} are sent dense, {4 * elements:,} bytes a "
            "step, since none would take less, or none is of the kind that the method is for. Use "
            "compression=None, or another method; hvd.describe lists the layers. It is "
            f"{compressor}"
        ]
    texts = []
    for method in dict.fromkeys(method for method, _ in kinds):
        layouts = [layout for other, layout in kinds if other == method]
        if isinstance(method, LGCCompressor):
            texts.append(_of_lgc(method, _total(lgc_course(method, x, ranks) for x in layouts)))
        elif isinstance(method, GradiVeQCompressor):
            texts.append(
                _of_gradiveq(method, _total(gradiveq_course(method, x, ranks) for x in layouts))
            )
            texts.append(_of_ratio(method, layouts))
        else:
            texts.append(_of_bytes(method, layouts, ranks))
    return [line for line in texts if line]


def idle(compressor: Compressor, plan: Plan) -> bool:
    """Return True if the compressor would compress no layer; `warnings` says why."""
    if isinstance(compressor, GradiVeQCompressor):
        return all(method.working != compressor for method, _ in plan)
    return compressor.compresses and not any(method.compresses for method, _ in plan)


def goes_dense(method: Compressor, layout: Layout, ranks: int) -> bool:
    """Return True if a bucket always moves the bytes of a dense allreduce with so many ranks."""
    exchange = method.exchange_of(layout, ranks)
    return exchange is not None and exchange.kind == "dense"


def most_rows(
    method: Compressor, layer: Layer, ranks: int, index_bytes: int = 8, filters_last: bool = False
) -> int:
    """Return the most rows of a sparse gradient on any rank for which an allgather pays.

    Methods that send single chosen values send at most the values of these rows.

    Args:
        method: the layer's compressor.
        layer: (name, shape, dtype); the first axis counts rows.
        ranks: number of ranks that exchange.
        index_bytes: bytes of a row's index.
        filters_last: see `Layout`.

    Returns:
        The number of rows; -1 if an allgather never pays; see `cost_model.gathers_rows`.
    """
    name, shape, dtype = layer
    width = {"float64": 8, "float16": 2}.get(dtype, 4)  # bytes on the wire
    dense = prod(shape) * (width if dtype in method.native_dtypes else 4)
    payload = method.layer_bytes(outputs_first(name, shape) if filters_last else shape)
    if payload is None and isinstance(method.working, ThresholdCompressor):
        return -1

    def pays(rows: int) -> bool:
        length = prod(shape[1:])
        widths = {"value_bytes": width, "index_bytes": index_bytes}
        return gathers_rows(
            rows, length, ranks, dense=dense, payload=payload, summed=method.is_linear, **widths
        )

    low, high = -1, dense  # an allgather pays for `low`, unless -1, and not for `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def _of_bytes(method: Compressor, layouts: Sequence[Layout], ranks: int) -> str:
    """Warn about a method that moves no fewer bytes than dense gradients, by its own account."""
    exchanges = [method.exchange_of(layout, ranks) for layout in layouts]
    known = [exchange for exchange in exchanges if exchange is not None]
    elements = sum(layout.elements for layout in layouts)
    dense = dense_exchange(elements).received(ranks)
    received = sum(exchange.received(ranks) for exchange in known)
    if not method.compresses or ranks == 1 or len(known) < len(exchanges) or received < dense:
        return ""
    if all(exchange.kind == "dense" for exchange in known):
        reason = (
            "the payloads of all others would bring each rank more than dense gradients, so what "
            f"is sent is added up by an allreduce of {4 * elements:,} bytes a step"
        )
    else:
        reason = (
            f"each rank receives {received:,.0f} bytes a step, and {dense:,.0f} with dense "
            "gradients"
        )
    return (
        f"nothing is saved among {ranks} ranks: {reason}. Send less, compress between hosts only "
        f"(hierarchical=True), or use compression=None. It is {method}"
    )


def _total(courses: Iterable[Course]) -> Course:
    return Course(*map(sum, zip(*courses)))


def _of_lgc(method: LGCCompressor, course: Course) -> str:
    """Warn about LGC, which learns once, before the rest of the training."""
    learning, step, dense = course
    steps = method.full_steps + method.train_steps
    extra, saved = learning - steps * dense, dense - step
    pays = steps + extra / saved if saved > 0 else inf
    if pays <= 2 * steps and extra <= 0.5 * steps * dense:
        return ""
    when = f"so it pays from step {pays:,.0f} on" if saved > 0 else "so it never pays"
    return (
        f"LGC sends more than dense gradients on this model: {learning / steps:,.0f} bytes a step "
        f"and rank in the {steps} steps in which it learns, the autoencoder's parameters and what "
        f"fills up small layers included, where dense ones take {dense:,.0f}; then {step:,.0f}, "
        f"{when}. Use DGCCompressor, which learns nothing, or train for longer. It is {method}"
    )


def _of_gradiveq(method: GradiVeQCompressor, course: Course) -> str:
    """Warn about GradiVeQ, which learns again in each cycle."""
    learning, step, dense = course
    mean = (learning + method.compress_steps * step) / method.cycle_steps
    if mean < dense:
        return ""
    return (
        f"GradiVeQ sends no less than dense gradients on these convolutions: {mean:,.0f} bytes a "
        f"step and rank, the mean over a cycle of {method.cycle_steps} steps ({step:,.0f} in a "
        f"compressed one, {learning:,.0f} in all to learn the bases), where dense ones take "
        f"{dense:,.0f}. Raise ratio= or compress_steps=, or use another method. It is {method}"
    )


def _of_ratio(method: GradiVeQCompressor, layouts: Sequence[Layout]) -> str:
    """Warn if a basis cannot have as many dimensions as `ratio` asks for."""
    fewer = [
        (f"{name} {cut.length / cut.room:.3g}", method.slicing.steps_for(cut))
        for layout in layouts
        for name, cut in zip(layout.names, method.slicing.slices(layout))
        if cut.room < method.slicing.min_components(cut.length)
    ]
    if not fewer:
        return ""
    listed = ", ".join(name for name, _ in fewer[:8]) + (", ..." if len(fewer) > 8 else "")
    return (
        f"GradiVeQ compresses {len(fewer)} layers by more than ratio={method.ratio!r}: {listed}. A "
        "basis has fewer dimensions than samples: ask for sample_steps="
        f"{max(n for _, n in fewer)}, a smaller slice_size=, or more slices that share a basis "
        f"(reuse=). It is {method}"
    )


def lgc_course(method: LGCCompressor, layout: Layout, ranks: int) -> Course:
    """Return LGC's bytes for a model's bucket."""
    dense, sizes = 4.0 * layout.elements, method.compressed_bytes(layout, ranks)
    network, topk, exchange = 4 * autoencoder.ENCODER_SIZE, method.topk, method.exchange
    if isinstance(exchange, Server):
        train = float(topk.payload_bytes(layout))
        handed_out = 4 + network * (exchange.common(ranks) != exchange.master)
        step = sizes["worker"] + (sizes["common"] + sizes["master"]) / ranks
    else:
        values = wire.HEADER_BYTES + 4 * topk.capacity(layout)
        chosen = wire.packed_bytes(topk.coding.parts(layout, topk.capacity(layout)))
        train = values + chosen / ranks
        handed_out = 4 + network + 4 * autoencoder.decoder_size(innovation=False)
        step = sizes["worker"] + sizes["leader"] / ranks
    whole = 4 * (layout.size + 1)
    learning = method.full_steps * whole + method.train_steps * train + handed_out / ranks
    return Course(learning, step, dense)


def gradiveq_course(method: GradiVeQCompressor, layout: Layout, ranks: int) -> Course:
    """Return GradiVeQ's bytes of a cycle; a lower bound if gradients decide the dimensions."""
    dense = 4.0 * layout.elements
    groups = sum(cut.groups for cut in method.slicing.slices(layout))
    least = None if method.loss_threshold is None else [1] * groups
    sampling = 4.0 * layout.elements if method.between.is_linear else 0.0
    learning = method.sample_steps * sampling + method.slicing.basis_bytes(layout) / ranks
    return Course(learning, method.slicing.coefficient_bytes(layout, least), dense)
