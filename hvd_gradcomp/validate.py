"""Hyper-parameters are checked where they are written, and named when they are wrong."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any


def real(owner: Any, name: str, *, low: float, high: float = math.inf, closed: str = "") -> None:
    """Requires a real number in an interval; `closed` holds the ends that belong to it, "[" "]"."""
    value = getattr(owner, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    left = "[" if "[" in closed else "("
    right = "]" if "]" in closed else ")"
    if (
        number
        and math.isfinite(value)
        and (value > low or (left == "[" and value == low))
        and (value < high or (right == "]" and value == high))
    ):
        return
    raise ValueError(
        f"{type(owner).__name__}: {name} must be a number in {left}{low}, {high}{right}, "
        f"got {value!r}"
    )


def boolean(owner: Any, name: str) -> None:
    """Requires True or False."""
    value = getattr(owner, name)
    if not isinstance(value, bool):
        raise ValueError(f"{type(owner).__name__}: {name} must be True or False, got {value!r}")


def one_of(owner: Any, name: str, choices: Collection[Any]) -> None:
    """Requires one of a few values."""
    value = getattr(owner, name)
    if value not in choices:
        listed = ", ".join(repr(c) for c in choices)
        raise ValueError(f"{type(owner).__name__}: {name} must be one of {listed}, got {value!r}")
