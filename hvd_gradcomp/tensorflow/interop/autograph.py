"""AutoGraph: the functions that it leaves as they are, since translating takes long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def untranslated(function: Function) -> Function:
    """Mark a function that AutoGraph leaves as it is.

    `tf.autograph.experimental.do_not_convert` would turn it off for all that is called from there,
    custom gradients of users included. AutoGraph has this mark on what it has translated itself.
    """
    function.autograph_info__ = None  # type: ignore[attr-defined]
    return function
