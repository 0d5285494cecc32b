"""Gradients after they were taken or reduced: their changes, and late contributions.

A late gradient is a contribution to an already reduced gradient; it is summed uncompressed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from hvd_gradcomp.torch.comm import horovod as comm_horovod
from hvd_gradcomp.torch.interop.dynamo import interpreted
from hvd_gradcomp.torch.moments import tracker
from hvd_gradcomp.torch.reduce.bucket import as_real
from hvd_gradcomp.torch.reduce.reducer import Reducer

_Version = tuple[Any, int]  # the tensor, and how often it was written to


class GradVersions:
    """Versions of gradients that were taken or reduced."""

    def __init__(self) -> None:
        self._known: dict[torch.nn.Parameter, _Version] = {}

    def note(self, p: torch.nn.Parameter) -> None:
        """Record the current gradient of a parameter and its version."""
        assert p.grad is not None
        self._known[p] = p.grad, p.grad._version

    def remove(self, p: torch.nn.Parameter) -> None:
        """Remove the recorded gradient of a parameter."""
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
        """Remove all recorded gradients."""
        self._known.clear()


class LateGradients:
    """Gradients that arrive after the end of a step's exchange.

    Args:
        versions: of the reduced gradients.
    """

    def __init__(self, versions: GradVersions) -> None:
        self._versions = versions
        self._brought: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._hooks: list[Any] = []

    def __contains__(self, p: torch.nn.Parameter) -> bool:
        return p in self._brought

    def watch(self, missing: Collection[torch.nn.Parameter]) -> None:
        """Register hooks on parameters whose gradients were missing when the exchange ended."""
        self._hooks = [
            p.register_hook(partial(self._hold_back, p)) for p in missing if p.requires_grad
        ]

    def clear(self) -> None:
        """Remove the hooks, and drop late gradients."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._brought.clear()

    @interpreted
    def _hold_back(self, p: torch.nn.Parameter, contribution: torch.Tensor) -> torch.Tensor | None:
        """Hold a later pass's contribution back from the reduced gradient; a tensor hook."""
        if not self._versions.holds(p):
            return None  # the reduced gradient was dropped: this one begins a step
        dense = contribution.to_dense() if contribution.is_sparse else contribution
        known = self._brought.get(p)
        self._brought[p] = dense.detach().clone() if known is None else known + dense
        tracker.discard(p)
        return torch.zeros_like(contribution)

    def add_up(
        self,
        reducer: Reducer,
        late: Collection[tuple[str, torch.nn.Parameter]],
        average: bool,
    ) -> Iterator[None]:
        """Add up late gradients of any rank, uncompressed; yield while waiting for other ranks.

        Args:
            reducer: of the optimizer.
            late: parameters that have one on some rank, by name.
            average: divide by the number of ranks.
        """
        group = reducer.participants.process_set
        postscale = 1.0 / group.size() if average else 1.0
        works = []
        for name, p in late:
            late_grad = self._brought.pop(p, None)
            real = as_real(torch.zeros_like(p) if late_grad is None else late_grad)
            summand = real.to(torch.float64 if real.dtype == torch.float64 else torch.float32)
            reducer.traffic.sent(summand)
            reducer.traffic.received(summand)
            title = f"{reducer.transport.name}.late.{name}"
            work = comm_horovod.allreduce(summand.contiguous(), title, group, 1.0, postscale)
            works.append((name, p, work))
        nonfinite = []
        for name, p, work in works:
            while not work.ready():
                yield
            total = work.wait().view(as_real(p.detach()).shape)
            total = torch.view_as_complex(total) if p.is_complex() else total.to(p.dtype)
            if not bool(total.isfinite().all()):
                nonfinite.append(name)
            _add(p, total)
            self._versions.note(p)
        if nonfinite:
            reducer.record_nonfinite(
                f"a gradient of {', '.join(nonfinite)} that came late has a NaN or an infinity on "
                "one of the ranks"
            )


@torch.no_grad()
def _add(p: torch.nn.Parameter, total: torch.Tensor) -> None:
    assert p.grad is not None
    reduced = p.grad.to_dense() if p.grad.is_sparse else p.grad
    reduced.add_(total)
    if p.grad.is_sparse:
        p.grad = reduced.to_sparse()
