"""Protocols of methods that learn something from gradients: a basis, an autoencoder."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from hvd_gradcomp.core.compressor import Compressor, State
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Ops


@runtime_checkable
class Learns(Protocol):
    """Compressor that learns, and can do so again."""

    def retrained(self, ops: Ops, state: State, step: Any) -> State:
        """Return a state that learns a basis or an autoencoder anew, from this step on."""


@runtime_checkable
class Owned(Protocol):
    """Compressor with tensors of one rank that count for all."""

    def owner(self, path: str, step: int) -> int | None:
        """Return the rank whose tensor counts when states are merged; None if they are summed.

        Called for the fields, dotted as in `leaves`, that are not `replicated`: an autoencoder that
        one rank trains cannot be summed, a residual has to be.
        """


@runtime_checkable
class Rehearses(Protocol):
    """Compressor that can run as if it had learned, to be benchmarked on any gradient."""

    def rehearsed(self, ops: Ops, layout: Layout, state: State, step: int) -> State:
        """Return a state that has learned all until this step; its knowledge may be random."""


def retrained(compressor: Compressor, ops: Ops, state: State, step: Any) -> State:
    """Return a state that learns anew, see `Learns`; by default the same state."""
    return compressor.retrained(ops, state, step) if isinstance(compressor, Learns) else state


def owner(compressor: Compressor, path: str, step: int) -> int | None:
    """Return the owner, see `Owned`; None by default: ranks' tensors are summed."""
    return compressor.owner(path, step) if isinstance(compressor, Owned) else None
