"""Handover from one method to another: residual and momentum."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from hvd_gradcomp.core.compressor import Compressor, State
from hvd_gradcomp.ops import Ops, Tensor

Correction = tuple["float | None", "bool | None"]


@runtime_checkable
class Keeps(Protocol):
    """Compressor that keeps a residual."""

    def residual(self, state: State) -> Tensor | None:
        """Return what was accumulated and not yet sent, [size]; None if nothing is kept."""


@runtime_checkable
class Inherits(Protocol):
    """Compressor that can take over another method's residual."""

    def inherit(
        self, ops: Ops, state: State, gradient: Tensor, residual: Tensor
    ) -> tuple[State, Tensor]:
        """Take the residual over: return (state, gradient) that contain it."""


@runtime_checkable
class Moves(Protocol):
    """Compressor with a velocity."""

    def velocity(self, state: State) -> Tensor | None:
        """Return the momentum of the steps so far, [size], if the state holds nothing else."""

    def with_velocity(self, state: State, velocity: Tensor) -> State:
        """Return a state that continues from a velocity that is equal on all ranks."""


@runtime_checkable
class Corrects(Protocol):
    """Compressor that applies momentum itself, instead of the optimizer."""

    @property
    def correction(self) -> Correction | None:
        """Return the (momentum, nesterov) that it applies; None in them means the optimizer's."""

    def corrected(self, momentum: float, nesterov: bool) -> Compressor:
        """Return a copy with the momentum taken over from the optimizer; see `wrappers`."""


def residual(compressor: Compressor, state: State) -> Tensor | None:
    """Return the residual, see `Keeps`; None by default."""
    return compressor.residual(state) if isinstance(compressor, Keeps) else None


def inherit(
    compressor: Compressor, ops: Ops, state: State, gradient: Tensor, residual: Tensor
) -> tuple[State, Tensor]:
    """Take a residual over, see `Inherits`; by default it is sent with the next gradient."""
    if isinstance(compressor, Inherits):
        return compressor.inherit(ops, state, gradient, residual)
    return state, gradient + residual


def velocity(compressor: Compressor, state: State) -> Tensor | None:
    """Return the velocity, see `Moves`; None by default."""
    return compressor.velocity(state) if isinstance(compressor, Moves) else None


def with_velocity(compressor: Compressor, state: State, velocity: Tensor) -> State:
    """Return a state that continues from a velocity, see `Moves`; by default the same state."""
    return compressor.with_velocity(state, velocity) if isinstance(compressor, Moves) else state


def correction(compressor: Compressor) -> Correction | None:
    """Return the correction, see `Corrects`; None if momentum is left to the optimizer."""
    return compressor.correction if isinstance(compressor, Corrects) else None
