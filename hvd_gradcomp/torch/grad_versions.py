"""Recorded versions of gradients, to detect that one was changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_Version = tuple[Any, int]  # the tensor, and how often it was written to


class GradVersions:
    """Versions of gradients that were taken or reduced."""

    def __init__(self) -> None:
        self._known: dict[torch.nn.Parameter, _Version] = {}

    def note(self, p: torch.nn.Parameter) -> None:
        """Record the current gradient of a parameter and its version."""
        assert p.grad is not None
        self._known[p] = p.grad, p.grad._version

    def forget(self, p: torch.nn.Parameter) -> None:
        """Forget the recorded gradient of a parameter."""
        self._known.pop(p, None)

    def only(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Record the gradients of these parameters, and no others."""
        self.clear()
        for p in parameters:
            if p.grad is not None:
                self.note(p)

    def holds(self, p: torch.nn.Parameter) -> bool:
        """Return True if `p.grad` is the recorded tensor, even if modified since."""
        return p in self._known and p.grad is self._known[p][0]

    def changed(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradient was replaced or modified."""
        return [p for p in self._known if self.has_changed(p)]

    def has_changed(self, p: torch.nn.Parameter) -> bool:
        """Return True if the parameter's recorded gradient was replaced or modified."""
        if p not in self._known:
            return False
        gradient, version = self._known[p]
        return p.grad is not gradient or gradient._version != version

    def clear(self) -> None:
        """Forget all recorded gradients."""
        self._known.clear()
