"""Methods that learn something from gradients: a basis, an autoencoder."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from hvd_gradcomp.core.compressor import Compressor, State
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Ops


@runtime_checkable
class Learns(Protocol):
    """Learns, and can do so again."""

    def retrained(self, ops: Ops, state: State, step: Any) -> State:
        """A state that learns a basis or an autoencoder anew, from this step on."""


@runtime_checkable
class Owned(Protocol):
    """Has tensors of one rank's that count for all."""

    def owner(self, path: str, step: int) -> int | None:
        """Whose tensor counts where the ranks' states become one; None if they are added up.

        Asked of the fields, dotted as in `leaves`, that are not `replicated`: an autoencoder that
        one rank trains cannot be added up, a residual has to be.
        """


@runtime_checkable
class Rehearses(Protocol):
    """Can work as if it had learned, to be measured: what that costs depends on no gradient."""

    def rehearsed(self, ops: Ops, layout: Layout, state: State, step: int) -> State:
        """A state that has learned all until this step; what it knows may be random."""


def retrained(compressor: Compressor, ops: Ops, state: State, step: Any) -> State:
    """See `Learns`; by default there is nothing to learn."""
    return compressor.retrained(ops, state, step) if isinstance(compressor, Learns) else state


def owner(compressor: Compressor, path: str, step: int) -> int | None:
    """See `Owned`; by default what ranks keep is added up."""
    return compressor.owner(path, step) if isinstance(compressor, Owned) else None
