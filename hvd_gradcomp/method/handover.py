"""Hooks of methods that keep something that another method, or another rank, can take over.

A method hands over what it has not sent yet, its residual, and the momentum of its steps: to the
next phase of `after`, to other buckets of the same layers, to ranks that stay when one leaves.
"""

from __future__ import annotations

from typing import Optional

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor, Report, State
from hvd_gradcomp.ops import Ops, Tensor

Correction = tuple[Optional[float], Optional[bool]]  # (momentum, nesterov)


class Handover(Compressor):
    """Method that keeps a residual, or applies momentum. Every hook is optional."""

    def report(self, layout: Layout, state: State, steps: int, since: int = 0) -> Report:
        report = super().report(layout, state, steps, since)
        return report._replace(residual=self.residual(state))

    def residual(self, state: State) -> Tensor | None:
        """Return what was accumulated and not yet sent, [size]; None if nothing is kept."""
        return None

    def inherit(
        self, ops: Ops, state: State, gradient: Tensor, residual: Tensor
    ) -> tuple[State, Tensor]:
        """Take over another method's residual: return (state, gradient) that contain it.

        By default it is sent with the next gradient.
        """
        return state, gradient + residual

    def velocity(self, state: State) -> Tensor | None:
        """Return the momentum of the steps so far, [size], if the state holds nothing else."""
        return None

    def with_velocity(self, state: State, velocity: Tensor) -> State:
        """Return a state that continues from a velocity that is equal on all ranks."""
        return state

    @property
    def correction(self) -> Correction | None:
        """Return the (momentum, nesterov) that it applies; None leaves momentum to the optimizer.

        None in the pair means the optimizer's number, which `corrected` is then called with.
        """
        return None

    def corrected(self, momentum: float, nesterov: bool) -> Compressor:
        """Return a copy with the momentum taken over from the optimizer, if it has `correction`."""
        return self


def residual_of(compressor: Compressor, state: State) -> Tensor | None:
    """Return what a method has not sent yet, [size]; None if it keeps nothing."""
    return compressor.residual(state) if isinstance(compressor, Handover) else None


def correction_of(compressor: Compressor) -> Correction | None:
    """Return the (momentum, nesterov) that a method applies, as `Handover.correction`."""
    return compressor.correction if isinstance(compressor, Handover) else None


def takes_momentum(compressor: Compressor) -> bool:
    """Return True if a method takes the momentum over from the optimizer."""
    return (correction_of(compressor) or (0.0,))[0] is None


def inherited(
    compressor: Compressor, ops: Ops, state: State, gradient: Tensor, residual: Tensor
) -> tuple[State, Tensor]:
    """Give a method another one's residual; one that keeps none sends it with the gradient."""
    if isinstance(compressor, Handover):
        return compressor.inherit(ops, state, gradient, residual)
    return state, gradient + residual
