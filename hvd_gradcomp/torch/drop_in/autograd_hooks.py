"""Autograd hooks: a gradient arrives, and a backward ends.

A hook tells the synchronizer of an optimizer when a pass has added to a gradient. A callback of the
autograd engine lets it finish with the backward, or with the one around it.
"""

from __future__ import annotations

import functools
import sys
import traceback
import weakref
from collections.abc import Callable, Collection, Generator
from typing import Any, Protocol

import torch

from hvd_gradcomp.runtime.driver import run_until_done
from hvd_gradcomp.torch.comm import horovod
from hvd_gradcomp.torch.interop.dynamo import interpreted


class Synchronizer(Protocol):
    """The part of `grad_synchronizer.GradSynchronizer` that hooks call.

    Attributes:
        news: a gradient has arrived since the last round of messages.
    """

    news: bool

    def arrive(self, p: torch.nn.Parameter) -> None:
        """Handle a pass that has added to the gradient of a parameter."""

    def fail(self) -> None:
        """Handle an error of `arrive`, which ends the backward."""

    def has_everything(self) -> bool:
        """Return True if no gradient is missing on this rank."""

    def agree_and_reduce(self, last: bool) -> Generator[None, None, bool]:
        """Agree with all ranks on what has arrived, and reduce it; yield while waiting for them."""


# Synchronizers with news, by the autograd engine's run in which their hooks have fired.
_backwards: dict[int, weakref.WeakSet[Synchronizer]] = {}
_living: weakref.WeakSet[GradHooks] = weakref.WeakSet()


class GradHooks:
    """The hooks of one optimizer's parameters.

    A parameter's hook belongs to the optimizer that it joined last. Hooks of an earlier one would
    start exchanges for as long as that one is not collected, which takes longer on some ranks.
    """

    def __init__(self, synchronizer: Synchronizer) -> None:
        self._synchronizer = weakref.ref(synchronizer)
        self._hooks: dict[torch.nn.Parameter, Any] = {}
        self._accumulators: list[Any] = []  # they live as long as somebody refers to them
        _living.add(self)

    def watch(self, parameters: Collection[torch.nn.Parameter]) -> None:
        """Install hooks on these parameters, and remove those of other optimizers."""
        for other in _living:
            if other is not self:
                other.leave(parameters)
        for p in parameters:
            if p in self._hooks:
                continue
            with torch.enable_grad():
                accumulator: Any = p.expand_as(p).grad_fn.next_functions[0][0]
            self._hooks[p] = accumulator.register_hook(_hook(self._synchronizer, p))
            self._accumulators.append(accumulator)

    def leave(self, parameters: Collection[torch.nn.Parameter]) -> None:
        """Remove the hooks of these parameters. `step` still reduces their gradients."""
        for p in parameters:
            if p in self._hooks:
                self._hooks.pop(p).remove()


def cancel(synchronizer: Synchronizer) -> None:
    """Drop the callback of a backward that has failed, or was compiled."""
    for run in [run for run, those in _backwards.items() if synchronizer in those]:
        _backwards[run].discard(synchronizer)
        if not _backwards[run]:
            del _backwards[run]


def finish_after_backward(synchronizer: Synchronizer) -> None:
    """Let a synchronizer finish when the backward that runs now has ended."""
    synchronizer.news = True
    run = _RUN_OF_ENGINE()
    if run not in _backwards:
        _backwards[run] = weakref.WeakSet()
        callback = functools.partial(_backward_has_ended, run)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    _backwards[run].add(synchronizer)


def _hook(synchronizer: weakref.ref[Synchronizer], p: torch.nn.Parameter) -> Callable[..., None]:
    @interpreted
    def hook(*_: Any) -> None:
        living = synchronizer()
        if living is None:
            return
        try:
            living.arrive(p)
        except BaseException:
            living.fail()
            raise

    return hook


@interpreted
def _backward_has_ended(run: int) -> None:
    having_news = [each for each in _backwards.pop(run, ()) if each.news]
    nested, function = _enclosing_backward()
    early = [each for each in having_news if nested and not each.has_everything()]
    if early and function is not None:  # asks again at the end of the backward around this one

        def pass_on(*_: Any) -> None:
            for synchronizer in early:
                finish_after_backward(synchronizer)

        function.register_hook(pass_on)
    # All optimizers at once: their hooks fire in another order on other ranks.
    ready = [each.agree_and_reduce(last=False) for each in having_news if each not in early]
    run_until_done(ready, horovod.pauses())


def _enclosing_backward() -> tuple[bool, Any]:
    """Return True if this backward runs inside another one, and the function that started it.

    A reentrant checkpoint (`torch.utils.checkpoint(..., use_reentrant=True)`) calls `backward` from
    its own backward function; at the end of that inner backward other layers still lack their
    gradients, and messages about them would cost a round. PyTorch has no API for the node that
    runs, so the calling frames are walked: the frame of `BackwardCFunction.apply` has the node as
    `self`, whose hook then fires in the outer backward. The function is None if a plain function,
    such as a hook, called `backward`.
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
