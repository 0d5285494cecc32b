"""Reports on a state: what was sent, the residual, and the losses of learned methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from hvd_gradcomp.core.compressor import Compressor, State
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.protocols.carrying import residual
from hvd_gradcomp.ops import Tensor


class Report(NamedTuple):
    """Report on a bucket's state; its numbers were read from the device.

    Attributes:
        sent: elements of each layer that this rank has sent.
        residual: what was accumulated and not yet sent, [size]; None if nothing is kept.
        losses: what a learned method loses, as shares of the energy, by name.
        rung_changes: how often its capacity level has changed, see `capacity`; equal on all ranks.
    """

    sent: Sequence[int]
    residual: Tensor | None = None
    losses: Mapping[str, float] = MappingProxyType({})
    rung_changes: int = 0


@runtime_checkable
class Reports(Protocol):
    """Compressor that reports what it has sent or lost."""

    def report(self, layout: Layout, state: State, steps: int, since: int = 0) -> Report:
        """Report on all steps up to now.

        Args:
            layout: of the bucket.
            state: after so many steps.
            steps: that were made.
            since: how many of them were made before this bucket's first.
        """


def report(
    compressor: Compressor, layout: Layout, state: State, steps: int, since: int = 0
) -> Report:
    """Return the report, see `Reports`; by default all elements were sent in each step."""
    if isinstance(compressor, Reports):
        return compressor.report(layout, state, steps, since)
    return Report([size * (steps - since) for size in layout.sizes], residual(compressor, state))
