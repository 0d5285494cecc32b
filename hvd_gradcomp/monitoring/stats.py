"""Statistics of sent data, measured at the collectives and not computed from a plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType

TOTAL = MappingProxyType({"total": True})  # metadata of fields that grow from step to step


@dataclass(frozen=True)
class CompressionStats:
    """Totals of this rank since the start. Subtract an earlier reading for a span of steps.

    With `hierarchical=True` a rank counts the buckets that it compresses for its host, and of their
    bytes only those between hosts; the sum over a host's ranks is the host's total.

    Attributes:
        steps: completed exchanges, without skipped ones.
        skipped: exchanges that all ranks skipped because of a non-finite gradient.
        elements: gradient elements of these steps, without padding.
        elements_sent: elements that this rank sent. For a sparse gradient that is gathered
            uncompressed, every value of its rows, repeated rows included; its indices count as
            bytes only.
        bytes_dense: bytes of the same gradients as float32.
        bytes_sent: bytes that this rank handed to collectives, including headers, padding and
            unused capacity, but not the part of an alltoall that stays on this rank.
        bytes_received: bytes that collectives returned.
        layers: elements sent by layer name.
        losses: current losses of learned methods, not since the start, as shares of the energy:
            "basis", of GradiVeQ's projection; "autoencoder", of LGC's reconstruction. Means over
            buckets; empty if nothing is learned yet.
        sizes: elements of a gradient by layer name.
        level_changes: changes of a payload's capacity level, over all buckets. Horovod
            renegotiates each time.
        residual_norm: L2 norm of this rank's current residual, in units of its gradient; None if
            the compressor has none.
        gradient_norm: L2 norm of an exchanged gradient. On PyTorch of the current `p.grad`, which
            between a step and the next backward is the optimizer's input; on TensorFlow of the
            last exchange that a `StatsWriter` has read. None if there is none.
        seconds_waited: seconds, since this process made the optimizer, that steps waited for the
            data of exchanges, hidden neither by backward nor by `delay=`. Excludes waiting for
            slower ranks to start the step, and device-side waits (NCCL). None on TensorFlow, whose
            graphs wait by themselves; for its `LocalSteps` the time of exchanges, compressing
            included. Ignored by `==`.
        memory: bytes that this process keeps now beyond the model, its gradients and the inner
            optimizer, by purpose, without those of 0. "state": of the compressors. "rollback": the
            state from before the last exchange, and memory for the one of the next. "buckets": of
            gradients, unless `p.grad` lies in them. "moments": second moments. "scratch": tables
            and temporaries that each step uses. Of local steps also "global", the global
            parameters; "outer", the outer optimizer's state; "in flight", changes that travel.
            Not counted is what transports and GPU kernels keep. Ignored by `==`.
    """

    steps: int = field(default=0, metadata=TOTAL)
    elements: int = field(default=0, metadata=TOTAL)
    elements_sent: int = field(default=0, metadata=TOTAL)
    bytes_dense: int = field(default=0, metadata=TOTAL)
    bytes_sent: int = field(default=0, metadata=TOTAL)
    bytes_received: int = field(default=0, metadata=TOTAL)
    layers: dict[str, int] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    skipped: int = field(default=0, metadata=TOTAL)
    level_changes: int = field(default=0, metadata=TOTAL)
    residual_norm: float | None = None
    gradient_norm: float | None = None
    seconds_waited: float | None = field(default=None, compare=False)
    memory: dict[str, int] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        """Format the totals as a table.

        >>> print(CompressionStats(20, 1000, 125, 4000, 500, 1000, losses={"basis": 0.25}))
        steps            20
        bytes            4,000 of gradient, 500 sent (ratio 8.0), 1,000 received
        elements         1,000 of gradients, 125 sent (ratio 8.0)
        basis loss       0.25
        """
        rows = {"steps": f"{self.steps:,}"}
        if self.skipped:
            rows["steps"] += f", and {self.skipped:,} left out"
        rows["bytes"] = (
            f"{self.bytes_dense:,} of gradient, {self.bytes_sent:,} sent{_ratio(self.ratio)}, "
            f"{self.bytes_received:,} received"
        )
        rows["elements"] = (
            f"{self.elements:,} of gradients, {self.elements_sent:,} sent"
            f"{_ratio(self.element_ratio)}"
        )
        if self.level_changes:
            rows["level changes"] = f"{self.level_changes:,}"
        if self.ms_waited is not None:
            rows["waiting"] = f"{self.ms_waited:.3g} ms a step"
        if self.gradient_norm is not None:
            rows["gradient norm"] = f"{self.gradient_norm:.4g}"
        if self.residual_norm is not None:
            rows["residual norm"] = f"{self.residual_norm:.4g}"
            if self.residual_ratio is not None:
                rows["residual norm"] += f", {self.residual_ratio:.3g} times the gradient's"
        rows.update({f"{name} loss": f"{value:.3g}" for name, value in self.losses.items()})
        lines = [f"{name:<15}  {text}" for name, text in rows.items()]
        density = self.density
        if density:
            lines.append("elements sent, by layer:")
            wide = max(map(len, density))
            lines += [f"  {name:<{wide}}  {100 * share:.3g} %" for name, share in density.items()]
        return "\n".join(lines)

    @property
    def element_ratio(self) -> float:
        """Elements over elements sent, the papers' compression ratio; inf if none was sent."""
        return self.elements / self.elements_sent if self.elements_sent else float("inf")

    @property
    def ratio(self) -> float:
        """Bytes of float32 gradient over bytes handed to collectives; inf if none were."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else float("inf")

    @property
    def density(self) -> dict[str, float]:
        """Elements sent over elements by layer name, in [0, 1]; empty before the first step."""
        had = {name: size * self.steps for name, size in self.sizes.items()}
        return {name: self.layers[name] / n for name, n in had.items() if n}

    @property
    def residual_ratio(self) -> float | None:
        """Norm of the residual over that of the gradient: about its delay in steps."""
        if self.residual_norm is None or not self.gradient_norm:
            return None
        return self.residual_norm / self.gradient_norm

    @property
    def ms_waited(self) -> float | None:
        """Milliseconds that a step stood still for exchanges, in the mean; None if not known."""
        if self.seconds_waited is None or not self.steps:
            return None
        return 1e3 * self.seconds_waited / self.steps

    def __sub__(self, earlier: CompressionStats) -> CompressionStats:
        """Return the span between two readings; losses and norms are those of the later one."""
        totals = [f.name for f in fields(self) if f.metadata == TOTAL]
        span = {name: getattr(self, name) - getattr(earlier, name) for name in totals}
        layers = {name: n - earlier.layers.get(name, 0) for name, n in self.layers.items()}
        waited = self.seconds_waited
        if waited is not None:
            waited -= earlier.seconds_waited or 0.0
        return replace(self, layers=layers, seconds_waited=waited, **span)


def combined(
    parts: Sequence[CompressionStats],
    beside: Sequence[CompressionStats],
    steps: int,
    memory: Mapping[str, int] = MappingProxyType({}),
) -> CompressionStats:
    """Return the totals of a model whose parts are exchanged apart, and not in every step.

    Args:
        parts: of disjoint layers, which make up the model.
        beside: of other exchanges of the same layers, or of what is no gradient.
        steps: of the training; a dense exchange of all layers in each of them is what the bytes and
            elements are compared with.
        memory: bytes besides those of the exchanges, as `CompressionStats.memory`.

    >>> half = CompressionStats(1, 10, 10, 40, 40, 80, sizes={"a": 10})
    >>> both = combined([half, half], [], 5)
    >>> both.steps, both.elements, both.elements_sent, both.ratio
    (5, 50, 20, 2.5)
    """
    every = [*parts, *beside]
    sizes = {name: size for part in parts for name, size in part.sizes.items()}
    layers = dict.fromkeys(sizes, 0)
    for part in every:
        for name, sent in part.layers.items():
            layers[name] = layers.get(name, 0) + sent
    elements = steps * sum(sizes.values())
    waited = [part.seconds_waited for part in every]
    return CompressionStats(
        steps=steps,
        elements=elements,
        elements_sent=sum(part.elements_sent for part in every),
        bytes_dense=4 * elements,
        bytes_sent=sum(part.bytes_sent for part in every),
        bytes_received=sum(part.bytes_received for part in every),
        layers=layers,
        losses=mean_losses(part.losses for part in parts),
        sizes=sizes,
        skipped=sum(part.skipped for part in every),
        level_changes=sum(part.level_changes for part in parts),
        residual_norm=norm_of(p.residual_norm for p in parts if p.residual_norm is not None),
        seconds_waited=None if None in waited else sum(filter(None, waited)),
        memory=dict(sum(map(Counter, (memory, *(part.memory for part in every))), Counter())),
    )


def _ratio(ratio: float) -> str:
    """Format a compression ratio; empty if nothing was sent."""
    return f" (ratio {ratio:,.1f})" if 0 < ratio < math.inf else ""


def mean_losses(several: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each loss over the buckets that have it.

    >>> mean_losses([{"basis": 0.5}, {}, {"basis": 0.25}])
    {'basis': 0.375}
    """
    values: dict[str, list[float]] = {}
    for losses in several:
        for name, value in losses.items():
            if value == value:  # NaN: not known yet
                values.setdefault(name, []).append(value)
    return {name: sum(known) / len(known) for name, known in values.items()}


def norm_of(parts: Iterable[float]) -> float | None:
    """Return a vector's L2 norm from those of its parts; None if one is NaN or there are none.

    >>> norm_of([3.0, 4.0]), norm_of([])
    (5.0, None)
    """
    known = list(parts)
    norm = math.sqrt(sum(x * x for x in known))
    return None if not known or math.isnan(norm) else norm
