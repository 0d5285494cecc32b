"""Autograd hooks of an optimizer's parameters, and the callback at the end of a backward.

A hook takes each gradient after its last pass has accumulated it. A callback of the autograd engine
ends the exchange when the backward ends, or the backward around it.
"""

from __future__ import annotations

import functools
import sys
import traceback
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch

from hvd_gradcomp.torch.backward_end import ending, has_everything
from hvd_gradcomp.torch.comm import horovod
from hvd_gradcomp.torch.moments.dynamo import interpreted

# Optimizers with new gradients, by the autograd engine's run in which their hooks fired.
_backwards: dict[int, weakref.WeakSet[Any]] = {}


class GradHooks:
    """Autograd hooks by which an optimizer takes gradients.

    Attributes:
        news: a gradient has arrived since the last sync round.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.news = False
        self._watched: dict[torch.nn.Parameter, Any] = {}
        self._accumulators: list[Any] = []  # keeps them alive

    def watch(self, new: Collection[torch.nn.Parameter]) -> None:
        """Register hooks on these parameters, unless they have one."""
        for p in new:
            if p in self._watched:
                continue
            with torch.enable_grad():
                accumulator: Any = p.expand_as(p).grad_fn.next_functions[0][0]
            self._watched[p] = accumulator.register_hook(_hook(self._optimizer, p))
            self._accumulators.append(accumulator)

    def leave(self, parameters: Collection[torch.nn.Parameter]) -> None:
        """Remove the hooks of these parameters. `step` would still reduce their gradients."""
        for p in parameters:
            if p in self._watched:
                self._watched.pop(p).remove()


def forget(optimizer: Any) -> None:
    """Forget the optimizer's backward, if it failed or was compiled."""
    for run in [run for run, those in _backwards.items() if optimizer in those]:
        _backwards[run].discard(optimizer)
        if not _backwards[run]:
            del _backwards[run]


def _hook(optimizer: weakref.ref[Any], p: torch.nn.Parameter) -> Callable[..., None]:
    @interpreted
    def hook(*_: Any) -> None:
        there = optimizer()
        if there is None:
            return
        try:
            _arrive(there, p)
        except BaseException:
            there._gradcomp.scaling.forget()
            raise

    return hook


def _arrive(optimizer: Any, p: torch.nn.Parameter) -> None:
    """Handle a pass that has accumulated into the gradient of a parameter."""
    versions = optimizer._versions
    if p.grad is not None and p.grad.requires_grad:
        raise AssertionError(
            f"the gradient of {optimizer._parameter_names[p]} requires a gradient itself: "
            "backward(create_graph=True) cannot be exchanged. Use torch.autograd.grad for "
            "higher derivatives"
        )
    if p in optimizer._late:
        versions.note(p)  # the late-gradient hook added a zero
        optimizer._gradcomp.sources.forget([p])
        _ask_at_end_of_backward(optimizer)
        return
    if p.grad is None:
        raise RuntimeError(
            f"the gradient of {optimizer._parameter_names[p]} was gone before it could be "
            "exchanged: a hook of the parameter steps or clears it. Step after backward()"
        )
    if optimizer._rounds.ended or optimizer._allreduce_delay[p] <= 0:
        if not optimizer._rounds.ended or versions.holds(p):
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call "
                "to step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        optimizer._drop()  # the reduced gradients were dropped, e.g. by `model.zero_grad()`
    elif optimizer._synchronized and not optimizer._reduced.holds(p):
        optimizer._drop()
    optimizer._synchronized = False
    optimizer._allreduce_delay[p] -= 1
    optimizer._handles[p] = (None, None)
    if optimizer._allreduce_delay[p] == 0:
        optimizer._handles[p] = optimizer._allreduce_grad_async(p)
        _ask_at_end_of_backward(optimizer)
    versions.note(p)


def _ask_at_end_of_backward(optimizer: Any) -> None:
    optimizer._arrivals.news = True
    run = _RUN_OF_ENGINE()
    if run not in _backwards:
        _backwards[run] = weakref.WeakSet()
        callback = functools.partial(_backward_has_ended, run)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    _backwards[run].add(optimizer)


@interpreted
def _backward_has_ended(run: int) -> None:
    having_news = [one for one in _backwards.pop(run, ()) if one._arrivals.news]
    nested, function = _surroundings()
    early = [one for one in having_news if nested and not has_everything(one)]
    if early and function is not None:  # ask again at the end of the enclosing backward

        def pass_on(*_: Any) -> None:
            for optimizer in early:
                _ask_at_end_of_backward(optimizer)

        function.register_hook(pass_on)
    # Drive all optimizers side by side: their hooks fire in another order on other ranks.
    horovod.complete(ending(one, last=False) for one in having_news if one not in early)


def _surroundings() -> tuple[bool, Any]:
    """Return (is this backward nested in another, the autograd function that called it or None).

    Reentrant checkpoints nest backwards.
    """
    runs = 0
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code is _APPLY:
            return True, frame.f_locals.get("self")
        runs += frame.f_code is _RUN
    return runs > 1, None


# Before PyTorch 2.1 `backward` calls the engine itself.
_RUN = getattr(torch.autograd.graph, "_engine_run_backward", torch.autograd.backward).__code__
_RUN_OF_ENGINE = getattr(torch._C, "_current_graph_task_id", lambda: 0)
_APPLY = torch.autograd.function.BackwardCFunction.apply.__code__
