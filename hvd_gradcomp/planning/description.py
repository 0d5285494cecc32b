"""Table of a compressor's plan for a model, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from tabulate import tabulate

from hvd_gradcomp.algorithms.combined.wrappers import MomentumAfter
from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.core.layout import Layout, outputs_first
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.planning.assignment import assign
from hvd_gradcomp.planning.worth import goes_dense


class Table(str):
    """String that interactive sessions and notebooks show without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def describe(
    compressor: Compressor,
    layers: Sequence[Layer],
    buckets: int,
    ranks: int = 1,
    moments: Sequence[str] = (),
    filters_last: bool = False,
) -> Table:
    """Tabulate layers: shape, compressor, and the bytes that a rank is expected to send.

    Args:
        moments: source of each layer's second moments, for an additional column.
        filters_last: see `Layout`.
    """
    rows: list[tuple[str, ...]] = []
    dense = expected = 0.0
    unknown = 0
    assigned = assign(compressor, layers, ranks, filters_last)
    whole = {
        method: _of(method, layers, assigned, filters_last) for method in dict.fromkeys(assigned)
    }
    summed = {
        method for method, layout in whole.items() if goes_dense(method.working, layout, ranks)
    }
    for (name, shape, _), method in zip(layers, assigned):
        size = 4 * prod(shape)
        share = method.layer_bytes(outputs_first(name, shape) if filters_last else shape)
        if share is not None and method in summed:
            share = size
        dense, expected = dense + size, expected + (share or 0.0)
        unknown += share is None
        bytes_text = _unknown(method) if share is None else f"{share:,.0f}"
        rows.append((name, "x".join(map(str, shape)), brief(method), f"{size:,}", bytes_text))
    total = f"{len(layers)} layers, {buckets} buckets"
    sent = f"{expected:,.0f}"
    if unknown:
        sent = f"at least {sent}" if expected else "not known"
    rows.append(("total", total, "", f"{dense:,.0f}", sent))
    head: tuple[str, ...] = ("layer", "shape", "compressor", "bytes dense", "bytes a step")
    align: tuple[str, ...] = ("left", "left", "left", "right", "right")
    if moments:
        rows = [(*row, bytes_text) for row, bytes_text in zip(rows, (*moments, ""))]
        head, align = (*head, "moments"), (*align, "left")
    return Table(tabulate(rows, head, colalign=align))


def _unknown(method: Compressor) -> str:
    """Return the text for a compressor that does not predict a layer's bytes."""
    return "4 an element sent" if method.working.sends_any_number else "not known"


def _of(
    method: Compressor, layers: Sequence[Layer], assigned: Sequence[Compressor], filters_last: bool
) -> Layout:
    """Return a layout of all layers of one compressor."""
    inner = [layer for layer, other in zip(layers, assigned) if other == method]
    names, shapes, _ = zip(*inner)
    return Layout(names, tuple(map(tuple, shapes)), block=method.block, filters_last=filters_last)


def tracked(rows: Iterable[tuple[str, Sequence[int], str, str]]) -> Table:
    """Tabulate parameters: shape, class of the module, and source of the moments."""
    bytes_text = [(name, "x".join(map(str, shape)), *rest) for name, shape, *rest in rows]
    head = ("parameter", "shape", "held by", "moments")
    return Table(tabulate(bytes_text, head, disable_numparse=True))


def brief(compressor: Compressor) -> str:
    """Format a compressor for a table, without fields of default value."""
    if isinstance(compressor, MomentumAfter):
        return f"{brief(compressor.inner)}, then momentum={compressor.momentum}"
    return str(compressor).replace("Compressor(", "(")
