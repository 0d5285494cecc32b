"""What one method hands to another: what it has kept back, and momentum."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from hvd_gradcomp.core.compressor import Compressor, State
from hvd_gradcomp.ops import Ops, Tensor

Correction = tuple["float | None", "bool | None"]


@runtime_checkable
class Keeps(Protocol):
    """Keeps what it has not sent."""

    def residual(self, state: State) -> Tensor | None:
        """What was accumulated and not yet sent, [size]; None where nothing is kept."""


@runtime_checkable
class Inherits(Protocol):
    """Has a place for what another method had kept."""

    def inherit(
        self, ops: Ops, state: State, gradient: Tensor, residual: Tensor
    ) -> tuple[State, Tensor]:
        """Takes it over: (state, gradient) with it inside."""


@runtime_checkable
class Moves(Protocol):
    """Has a velocity."""

    def velocity(self, state: State) -> Tensor | None:
        """The momentum of the steps so far, [size], where it is all that the state holds."""

    def with_velocity(self, state: State, velocity: Tensor) -> State:
        """Goes on from a velocity that all ranks have in common."""


@runtime_checkable
class Corrects(Protocol):
    """Applies momentum itself, instead of the optimizer."""

    @property
    def correction(self) -> Correction | None:
        """(momentum, nesterov) that it applies, None in them for the optimizer's."""

    def corrected(self, momentum: float, nesterov: bool) -> Compressor:
        """The same, with the momentum that it takes over from the optimizer; see `wrappers`."""


def residual(compressor: Compressor, state: State) -> Tensor | None:
    """See `Keeps`; by default nothing."""
    return compressor.residual(state) if isinstance(compressor, Keeps) else None


def inherit(
    compressor: Compressor, ops: Ops, state: State, gradient: Tensor, residual: Tensor
) -> tuple[State, Tensor]:
    """See `Inherits`; by default it is sent with the next gradient."""
    if isinstance(compressor, Inherits):
        return compressor.inherit(ops, state, gradient, residual)
    return state, gradient + residual


def velocity(compressor: Compressor, state: State) -> Tensor | None:
    """See `Moves`; by default none."""
    return compressor.velocity(state) if isinstance(compressor, Moves) else None


def with_velocity(compressor: Compressor, state: State, velocity: Tensor) -> State:
    """See `Moves`; by default the state as it is."""
    return compressor.with_velocity(state, velocity) if isinstance(compressor, Moves) else state


def correction(compressor: Compressor) -> Correction | None:
    """See `Corrects`; None for one that leaves momentum to the optimizer."""
    return compressor.correction if isinstance(compressor, Corrects) else None
