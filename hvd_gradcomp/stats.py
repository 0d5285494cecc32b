"""What was sent, measured where it was handed to a collective and not computed from a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CompressionStats:
    """Totals of this rank since the start. Subtract an earlier reading for a span of steps.

    Attributes:
        steps: exchanges done; without those that were left out.
        skipped: exchanges that were left out, on all ranks, for a gradient that was not finite.
        elements: gradient elements that the steps had, without padding.
        elements_sent: elements of them that this rank sent.
        bytes_dense: bytes of the same gradients as float32.
        bytes_sent: bytes that this rank handed to collectives; headers, padding and unused room
            included.
        bytes_received: bytes that collectives handed back.
        layers: elements sent by layer name.
        losses: what learned methods lose now, not since the start, as shares of the energy:
            "basis", what GradiVeQ's projection leaves out; "autoencoder", what LGC's
            reconstruction misses. The mean over buckets; nothing where nothing is learned yet.
    """

    steps: int = 0
    elements: int = 0
    elements_sent: int = 0
    bytes_dense: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    layers: dict[str, int] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    skipped: int = 0

    @property
    def element_ratio(self) -> float:
        """Parameters over parameters sent, the papers' compression ratio; inf if none was sent."""
        return self.elements / self.elements_sent if self.elements_sent else float("inf")

    @property
    def ratio(self) -> float:
        """Bytes of float32 gradient over bytes handed to collectives; inf if none were."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else float("inf")

    def __sub__(self, earlier: CompressionStats) -> CompressionStats:
        """What happened between two readings."""
        return CompressionStats(
            self.steps - earlier.steps,
            self.elements - earlier.elements,
            self.elements_sent - earlier.elements_sent,
            self.bytes_dense - earlier.bytes_dense,
            self.bytes_sent - earlier.bytes_sent,
            self.bytes_received - earlier.bytes_received,
            {k: n - earlier.layers.get(k, 0) for k, n in self.layers.items()},
            self.losses,
            self.skipped - earlier.skipped,
        )


def mean_losses(several: Iterable[dict[str, float]]) -> dict[str, float]:
    """The mean of each loss over the buckets that have it.

    >>> mean_losses([{"basis": 0.5}, {}, {"basis": 0.25}])
    {'basis': 0.375}
    """
    values: dict[str, list[float]] = {}
    for losses in several:
        for name, value in losses.items():
            if value == value:  # NaN: not known yet
                values.setdefault(name, []).append(value)
    return {name: sum(known) / len(known) for name, known in values.items()}
