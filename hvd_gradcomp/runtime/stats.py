"""Totals that `compression_stats` reports, from any frontend's buckets and counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor, Report, State
from hvd_gradcomp.monitoring.stats import CompressionStats, mean_losses, norm_of


class BucketTotals(NamedTuple):
    """A bucket that this rank compresses, and its number of compressed steps."""

    layout: Layout
    compressor: Compressor
    state: State
    steps: int


@dataclass
class TrafficCounts:
    """Counts of this rank's traffic, by the names that `CompressionStats` and checkpoints have."""

    skipped: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


TRAFFIC = tuple(field.name for field in fields(TrafficCounts))


def stats(
    buckets: Iterable[BucketTotals],
    counted: TrafficCounts,
    *,
    steps: int,
    order: Sequence[str],
    beside: Mapping[str, int],
    unplanned: Mapping[str, int],
    norm: Callable[[Any], float],
    gradient_norms: Iterable[float],
    memory: Mapping[str, int],
    seconds_waited: float | None = None,
) -> CompressionStats:
    """Return totals since the start; reads the device.

    Args:
        buckets: those that this rank compresses.
        counted: this rank's traffic.
        steps: completed exchanges.
        order: names of layers, in the model's order.
        beside: values that were sent outside of the buckets, by layer name.
        unplanned: sizes of layers that have no bucket on any rank, by name.
        norm: the L2 norm of a tensor.
        gradient_norms: of parts of the exchanged gradient.
        memory, seconds_waited: see `CompressionStats`.
    """
    layers: dict[str, int] = {}
    sizes = dict(unplanned)
    reports: list[Report] = []
    elements = steps * sum(unplanned.values())
    for layout, compressor, state, taken in buckets:
        elements += layout.elements * taken
        sizes.update(zip(layout.names, layout.sizes))
        report = compressor.report(layout, state, steps, since=steps - taken)
        reports.append(report)
        layers.update(zip(layout.names, report.sent))
    for name, values in beside.items():
        layers[name] = layers.get(name, 0) + values
    return CompressionStats(
        steps=steps,
        elements=elements,
        elements_sent=sum(layers.values()),
        bytes_dense=4 * elements,
        **asdict(counted),
        layers={name: layers[name] for name in order if name in layers},
        losses=mean_losses(report.losses for report in reports),
        sizes={name: sizes[name] for name in order if name in sizes},
        level_changes=sum(report.level_changes for report in reports),
        residual_norm=norm_of(norm(r.residual) for r in reports if r.residual is not None),
        gradient_norm=norm_of(gradient_norms),
        seconds_waited=seconds_waited,
        memory=dict(memory),
    )
