"""Warnings at the first step if compression does not pay on a model.

A method says itself where it does not pay (`Compressor.drawbacks`): by default if its exchange
moves no fewer bytes than dense gradients; methods that learn by their bytes while learning and
afterwards. Methods whose payload depends on the gradients get no warning, unless they compress no
layer of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hvd_gradcomp.core.cost_model import gathers_rows
from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.core.layout import Layout, outputs_first
from hvd_gradcomp.method.compressor import Compressor

Plan = Sequence[tuple[Compressor, Layout]]


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
    if idle(compressor, plan):
        return [compressor.idle_reason(names, 4 * elements)]
    texts = []
    for method in dict.fromkeys(method for method, _ in kinds):
        texts += method.drawbacks([layout for other, layout in kinds if other == method], ranks)
    return texts


def idle(compressor: Compressor, plan: Plan) -> bool:
    """Return True if the compressor would compress no layer; `warnings` says why."""
    return compressor.idle([method for method, _ in plan])


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
    if payload is None and method.working.sends_any_number:
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
