"""What `compression_stats` reports, of any frontend's buckets and counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hvd_gradcomp.aggregator import Compressor, State
from hvd_gradcomp.layout import Layout
from hvd_gradcomp.stats import CompressionStats, mean_losses, norm_of


class Exchanged(NamedTuple):
    """A bucket that this rank compresses, and in how many steps it has."""

    layout: Layout
    compressor: Compressor
    state: State
    steps: int


class Counted(NamedTuple):
    """What this rank has counted of its exchanges."""

    bytes_sent: int
    bytes_received: int
    skipped: int


def stats(
    buckets: Iterable[Exchanged],
    counted: Counted,
    *,
    steps: int,
    order: Sequence[str],
    beside: Mapping[str, int],
    unplanned: Mapping[str, int],
    norm: Callable[[Any], float],
    gradient_norms: Iterable[float],
) -> CompressionStats:
    """Totals since the start; reads the device.

    Args:
        buckets: those that this rank compresses.
        counted: what was moved.
        steps: exchanges done.
        order: names of layers, as the model has them.
        beside: values that were sent beside the buckets, by the layer's name.
        unplanned: sizes of layers that have no bucket on any rank, by name.
        norm: the L2 norm of a tensor.
        gradient_norms: of parts of the exchanged gradient.
    """
    layers: dict[str, int] = {}
    sizes = dict(unplanned)
    losses, residuals, elements, rung_changes = [], [], steps * sum(unplanned.values()), 0
    for layout, compressor, state, taken in buckets:
        elements += layout.elements * taken
        sizes.update(zip(layout.names, layout.sizes))
        layers.update(zip(layout.names, compressor.elements_sent(layout, state, taken)))
        losses.append(compressor.losses(state))
        rung_changes += compressor.rung_changes(state)
        working, own = compressor.at_work(state, steps)
        residuals.append(working.residual(own))
    for name, values in beside.items():
        layers[name] = layers.get(name, 0) + values
    return CompressionStats(
        steps=steps,
        elements=elements,
        elements_sent=sum(layers.values()),
        bytes_dense=4 * elements,
        bytes_sent=counted.bytes_sent,
        bytes_received=counted.bytes_received,
        layers={name: layers[name] for name in order if name in layers},
        losses=mean_losses(losses),
        sizes={name: sizes[name] for name in order if name in sizes},
        skipped=counted.skipped,
        rung_changes=rung_changes,
        residual_norm=norm_of(norm(r) for r in residuals if r is not None),
        gradient_norm=norm_of(gradient_norms),
    )
