"""Hooks of methods that learn from gradients: a basis, an autoencoder."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from hvd_gradcomp.core.cost_model import Course
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor, State
from hvd_gradcomp.ops import Ops


class Learned(Compressor):
    """Method whose state holds something that it has learned."""

    @abstractmethod
    def retrained(self, ops: Ops, state: State, step: Any) -> State:
        """Return a state that learns anew from this step on."""

    def rehearsed(self, ops: Ops, layout: Layout, state: State, step: int) -> State:
        """Return a state that has learned all until this step; its knowledge may be random.

        With it the compressed phase is measured. By default the same state: its first steps are.
        """
        return state

    def course(self, layout: Layout, ranks: int) -> Course | None:
        """Return the bytes of a bucket while the method learns, and afterwards; None if not known.

        It counts where `exchange_of` knows nothing, and gradients do not decide `layer_bytes`.
        """
        return None

    def owner(self, path: str, step: int) -> int | None:
        """Return the rank whose tensor counts when states are merged; None if they are summed.

        Called for the fields, dotted as in `leaves`, that are not `replicated`: an autoencoder that
        one rank trains cannot be summed, a residual has to be.
        """
        return None


def owner_of(compressor: Compressor, path: str, step: int) -> int | None:
    """Return the rank whose tensor counts when states are merged, as `Learned.owner`."""
    return compressor.owner(path, step) if isinstance(compressor, Learned) else None


def retrained(compressor: Compressor, ops: Ops, state: State, step: Any) -> State:
    """Return a state that learns anew from this step on; the same if the method learns nothing."""
    return compressor.retrained(ops, state, step) if isinstance(compressor, Learned) else state
