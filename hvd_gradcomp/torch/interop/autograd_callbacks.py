"""Calls at the end of a backward pass, for hooks that are called in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hvd_gradcomp.torch.interop.dynamo import interpreted


def backward_id() -> int:
    """Return autograd's number of the backward that runs on this thread; -1 if none does."""
    return int(torch._C._current_graph_task_id())


def after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of backward, after the callbacks that others are yet to queue."""
    _queue(partial(_queue, partial(_call, function)))


@interpreted
def _queue(function: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


@interpreted
def _call(function: Callable[[], None]) -> None:
    function()
