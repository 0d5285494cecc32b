"""Base class of compressors made of other compressors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_gradcomp.core.cost_model import Exchange
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor, State, derived
from hvd_gradcomp.method.learned import Learned, owner_of, retrained
from hvd_gradcomp.ops import Ops


def _any_child(name: str) -> bool:
    """Return a property of a composite: True if the attribute of any child is true."""
    return derived(lambda self: any(getattr(child, name) for child in self.children.values()))


class Composite(Learned):
    """Compressor that delegates to child compressors and combines their results.

    Its state is a NamedTuple with each child's state in a field of the child's name.

    Attributes:
        in_common: names of the other state fields that are equal on all ranks.
    """

    in_common: frozenset[str] = frozenset()

    @property
    @abstractmethod
    def children(self) -> Mapping[str, Compressor]:
        """Return the child compressors by name, in the order in which they work."""

    @abstractmethod
    def start(self, ops: Ops, layout: Layout, ranks: int) -> State:
        """Return the initial state; see `Compressor.start`."""

    def init(self, ops: Ops, layout: Layout) -> State:
        return self.start(ops, layout, 1)

    # -- properties ----------------------------------------------------------------------------

    @derived
    def block(self) -> int:
        return max(child.block for child in self.children.values())

    @derived
    def max_bucket(self) -> int:
        return min(child.max_bucket for child in self.children.values())

    compresses = _any_child("compresses")
    outputs_first = _any_child("outputs_first")
    whole_model = _any_child("whole_model")
    uses_moments = _any_child("uses_moments")
    sends_any_number = _any_child("sends_any_number")
    varies_in_size = _any_child("varies_in_size")
    needs_execution_order = _any_child("needs_execution_order")

    @derived
    def moments(self) -> str:
        """Return the source of second moments of the first child that uses some."""
        users = (child for child in self.children.values() if child.uses_moments)
        return next((getattr(child, "moments", "") for child in users), "")

    @derived
    def replicated(self) -> frozenset[str]:
        return self.in_common | self._inside("replicated")

    @derived
    def reset_on_merge(self) -> frozenset[str]:
        return self._inside("reset_on_merge")

    def _inside(self, which: str) -> frozenset[str]:
        children = self.children.items()
        return frozenset(f"{name}.{x}" for name, child in children for x in getattr(child, which))

    def check(self, layout: Layout) -> None:
        for child in self.children.values():
            child.check(layout)

    # -- delegation to children ----------------------------------------------------------------

    def layer_bytes(self, shape: Sequence[int]) -> float | None:
        """Return the estimate of the last child, the one that works in the end."""
        return [*self.children.values()][-1].layer_bytes(shape)

    def exchange_of(self, layout: Layout, ranks: int) -> Exchange | None:
        """Return the exchange of the last child, the one that works in the end."""
        return [*self.children.values()][-1].exchange_of(layout, ranks)

    def retrained(self, ops: Ops, state: State, step: Any) -> State:
        """Return the state after each child has restarted its learning."""
        return state._replace(
            **{
                name: retrained(child, ops, getattr(state, name), step)
                for name, child in self.children.items()
            }
        )

    def owner(self, path: str, step: int) -> int | None:
        """Return the rank whose tensor counts, for a path in a child's state."""
        name, _, inside = path.partition(".")
        child = self.children.get(name)
        return None if child is None else owner_of(child, inside, step)

    def resized(self, ops: Ops, state: State, step: Any, ranks: int) -> State:
        """Return the state for another number of ranks; the same object if no child's changes."""
        changed = {}
        for name, child in self.children.items():
            before = getattr(state, name)
            after = child.resized(ops, before, step, ranks)
            if after is not before:
                changed[name] = after
        return state._replace(**changed) if changed else state
