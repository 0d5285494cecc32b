"""What a state tells users: how much was sent, what is kept, what a learned method loses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from hvd_gradcomp.core.compressor import Compressor, State
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.protocols.carrying import residual
from hvd_gradcomp.ops import Tensor


class Report(NamedTuple):
    """What a bucket's state says; the values that are numbers were read from the device.

    Attributes:
        sent: elements of each layer that this rank has sent.
        residual: what was accumulated and not yet sent, [size]; None where nothing is kept.
        losses: what a learned method loses, as shares of the energy, by name.
        rung_changes: how often its payload's room has changed, see `ladder`; equal on all ranks.
    """

    sent: Sequence[int]
    residual: Tensor | None = None
    losses: Mapping[str, float] = MappingProxyType({})
    rung_changes: int = 0


@runtime_checkable
class Reports(Protocol):
    """Knows what it has sent or lost."""

    def report(self, layout: Layout, state: State, steps: int, since: int = 0) -> Report:
        """What happened up to a step.

        Args:
            layout: of the bucket.
            state: after so many steps.
            steps: that were made.
            since: how many of them were made before this bucket's first.
        """


def report(
    compressor: Compressor, layout: Layout, state: State, steps: int, since: int = 0
) -> Report:
    """See `Reports`; by default all elements were sent in each step."""
    if isinstance(compressor, Reports):
        return compressor.report(layout, state, steps, since)
    return Report([size * (steps - since) for size in layout.sizes], residual(compressor, state))
