"""Keeps torch.compile out of what has to run as it is written.

As `torch.compiler.disable(..., recursive=False)` does, without importing the whole compiler, and
with its rest switched off and on from inside. PyTorch versions that do this in another way compile
what they like.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

# torch.compile leaves what is marked so as it is, and all that it calls. PyTorch marks its own
# optimizers' methods with it; before 2.1 there is none.
interpreted: Any = getattr(torch, "_disable_dynamo", lambda function: function)

try:
    from torch._C._dynamo import eval_frame as _frames

    _SKIP: Any = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
except (ImportError, AttributeError):
    _SKIP = None


def outside(reason: str) -> Callable[[F], F]:
    """Marks a function that is not compiled; with `fullgraph=True` the error says the reason."""

    def mark(function: F) -> F:
        if _SKIP is not None:
            vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
            _frames.set_code_exec_strategy(function.__code__, _SKIP)
        return function

    return mark


@outside("it switches the compiler")
def pause() -> Any:
    """Compiles nothing of what this thread runs from here on; for `resume`."""
    return None if _SKIP is None else _frames.set_eval_frame(None)


@outside("it switches the compiler")
def resume(paused: Any) -> None:
    """Goes on as before `pause`."""
    if _SKIP is not None:
        _frames.set_eval_frame(paused)
