"""Decorators and switches that keep torch.compile out of code that must run eagerly.

Equivalent to `torch.compiler.disable(..., recursive=False)`, but without importing the compiler,
and with a switch (`pause`, `resume`) for the rest of the thread. On PyTorch versions with other
internals they are no-ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

# torch.compile skips a function with this mark, and all that it calls. PyTorch marks the methods of
# its own optimizers; before 2.1 there is no such mark.
interpreted: Any = getattr(torch, "_disable_dynamo", lambda function: function)

try:
    from torch._C._dynamo import eval_frame as _frames

    _SKIP: Any = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
except (ImportError, AttributeError):
    _SKIP = None


def outside(reason: str) -> Callable[[F], F]:
    """Return a decorator against compilation; with `fullgraph=True` the error has the reason."""

    def mark(function: F) -> F:
        if _SKIP is not None:
            vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
            _frames.set_code_exec_strategy(function.__code__, _SKIP)
        return function

    return mark


@outside("it switches the compiler")
def pause() -> Any:
    """Stop compilation on this thread; return the argument for `resume`."""
    return None if _SKIP is None else _frames.set_eval_frame(None)


@outside("it switches the compiler")
def resume(paused: Any) -> None:
    """Resume compilation as before `pause`."""
    if _SKIP is not None:
        _frames.set_eval_frame(paused)
