"""Protocols of methods whose state depends on the number of ranks."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from hvd_gradcomp.core.compressor import Compressor, State
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Ops


@runtime_checkable
class Starts(Protocol):
    """Compressor whose initial state depends on the number of ranks."""

    def start(self, ops: Ops, layout: Layout, ranks: int) -> State:
        """Return the state before the first step, for this number of ranks."""


@runtime_checkable
class Resizes(Protocol):
    """Compressor whose state changes with the number of ranks."""

    def resized(self, ops: Ops, state: State, step: Any, ranks: int) -> State:
        """Return the state for another number of ranks; the same object if nothing depends on it.

        Raises:
            ValueError: it cannot work with so many.
        """


def start(compressor: Compressor, ops: Ops, layout: Layout, ranks: int) -> State:
    """Return the initial state, see `Starts`; by default that of `Compressor.init`."""
    if isinstance(compressor, Starts):
        return compressor.start(ops, layout, ranks)
    return compressor.init(ops, layout)


def resized(compressor: Compressor, ops: Ops, state: State, step: Any, ranks: int) -> State:
    """Return the state for a number of ranks, see `Resizes`; by default the same state."""
    if isinstance(compressor, Resizes):
        return compressor.resized(ops, state, step, ranks)
    return state
