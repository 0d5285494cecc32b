"""Which gradients an exchange knows, so that a change of one is seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_Version = tuple[Any, int]  # the tensor, and how often it was written to


class GradVersions:
    """Of gradients that were taken, or reduced."""

    def __init__(self) -> None:
        self._known: dict[torch.nn.Parameter, _Version] = {}

    def note(self, p: torch.nn.Parameter) -> None:
        """The gradient of a parameter is as it should be."""
        assert p.grad is not None
        self._known[p] = p.grad, p.grad._version

    def forget(self, p: torch.nn.Parameter) -> None:
        """Knows nothing of the gradient of a parameter."""
        self._known.pop(p, None)

    def only(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Knows what gradients these have, and no others."""
        self.clear()
        for p in parameters:
            if p.grad is not None:
                self.note(p)

    def holds(self, p: torch.nn.Parameter) -> bool:
        """Whether a parameter has the gradient that is known, written to or not."""
        return p in self._known and p.grad is self._known[p][0]

    def changed(self) -> list[torch.nn.Parameter]:
        """Those whose gradient is another, or was written to."""
        return [p for p in self._known if self.has_changed(p)]

    def has_changed(self, p: torch.nn.Parameter) -> bool:
        """Whether the gradient of a parameter is known, and no longer what it was."""
        if p not in self._known:
            return False
        gradient, version = self._known[p]
        return p.grad is not gradient or gradient._version != version

    def clear(self) -> None:
        """Knows nothing."""
        self._known.clear()
