"""Methods whose state depends on how many ranks exchange."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from hvd_gradcomp.core.compressor import Compressor, State
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Ops


@runtime_checkable
class Starts(Protocol):
    """Begins otherwise among other ranks."""

    def start(self, ops: Ops, layout: Layout, ranks: int) -> State:
        """The state before the first step, among so many ranks."""


@runtime_checkable
class Resizes(Protocol):
    """Goes on otherwise among other ranks."""

    def resized(self, ops: Ops, state: State, step: Any, ranks: int) -> State:
        """A state that goes on among other ranks than before; the same if nothing depends on it.

        Raises:
            ValueError: it cannot work with so many.
        """


def start(compressor: Compressor, ops: Ops, layout: Layout, ranks: int) -> State:
    """See `Starts`; by default `Compressor.init`."""
    if isinstance(compressor, Starts):
        return compressor.start(ops, layout, ranks)
    return compressor.init(ops, layout)


def resized(compressor: Compressor, ops: Ops, state: State, step: Any, ranks: int) -> State:
    """See `Resizes`; by default the state as it is."""
    if isinstance(compressor, Resizes):
        return compressor.resized(ops, state, step, ranks)
    return state
