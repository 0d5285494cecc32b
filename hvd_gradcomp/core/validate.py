"""Checks of hyper-parameters and arguments, with errors that name them."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Collection, Mapping
from typing import Any

from hvd_gradcomp.core.suggestions import did_you_mean

POLICIES = ("skip", "raise", "propagate")  # for gradients that are not finite


def stands_for(owner: Any, name: str, value: Any) -> None:
    """Replace a field's value by what it stands for, in a frozen dataclass."""
    object.__setattr__(owner, name, value)


def real(owner: Any, name: str, *, low: float, high: float = math.inf, closed: str = "") -> None:
    """Require a real number in an interval; `closed` holds the ends that belong to it, "[" "]"."""
    number(owner, name, getattr(owner, name), low=low, high=high, closed=closed)


def number(
    owner: Any, name: str, value: Any, *, low: float, high: float = math.inf, closed: str = ""
) -> None:
    """Require the same of a value that is not an attribute, one of several, say."""
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    left = "[" if "[" in closed else "("
    right = "]" if "]" in closed else ")"
    if (
        numeric
        and math.isfinite(value)
        and (value > low or (left == "[" and value == low))
        and (value < high or (right == "]" and value == high))
    ):
        return
    raise ValueError(
        f"{type(owner).__name__}: {name} must be a number in {left}{low}, {high}{right}, "
        f"got {value!r}"
    )


def whole(owner: Any, name: str, *, low: int, high: float = math.inf) -> None:
    """Require an integer between `low` and `high`, both included."""
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(
            f"{type(owner).__name__}: {name} must be a whole number in [{low}, {high}], "
            f"got {value!r}"
        )


def count(name: str, value: Any, low: int = 0) -> None:
    """Require that an argument is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be a whole number of at least {low}, got {value!r}")


def boolean(owner: Any, name: str) -> None:
    """Require True or False."""
    value = getattr(owner, name)
    if not isinstance(value, bool):
        raise ValueError(f"{type(owner).__name__}: {name} must be True or False, got {value!r}")


def one_of(owner: Any, name: str, choices: Collection[Any]) -> None:
    """Require one of a few values."""
    value = getattr(owner, name)
    if value not in choices:
        raise ValueError(f"{type(owner).__name__}: {name} {not_among(value, choices)}")


def not_among(value: Any, choices: Collection[Any]) -> str:
    """Return the error text for a value that is none of the choices, with the nearest of them.

    >>> not_among("mediam", ("clip", "median"))
    "must be one of 'clip', 'median', got 'mediam'; did you mean 'median'?"
    """
    texts = [choice for choice in choices if isinstance(choice, str)]
    nearest = did_you_mean(value, texts) if isinstance(value, str) else ""
    return f"must be one of {', '.join(map(repr, choices))}, got {value!r}{nearest}"


def policy(nonfinite: Any) -> None:
    """Require one of `POLICIES`, or None."""
    if nonfinite is not None and nonfinite not in POLICIES:
        raise ValueError(f"nonfinite {not_among(nonfinite, (*POLICIES, None))}")


def skip_or_raise(nonfinite: Any, reason: str) -> None:
    """Require a policy for an exchange that cannot propagate what is not finite.

    Args:
        nonfinite: the policy.
        reason: why it cannot.
    """
    if nonfinite not in (None, "raise", "skip"):
        raise ValueError(f"nonfinite must be 'raise', 'skip' or None, got {nonfinite!r}: {reason}")


def exchange(
    what: str,
    *,
    initialized: bool,
    horovod_only: Mapping[str, Any],
    op: Any,
    allowed: Collection[Any],
    unused: Collection[str] = (),
) -> None:
    """Refuse Horovod arguments that cannot work with compression, before anything is built.

    Args:
        what: the function that was called.
        initialized: whether `hvd.init()` was called.
        horovod_only: arguments that Horovod's function has and ours does not.
        op: as the user gave it.
        allowed: Average and Sum.
        unused: names of such arguments that change nothing here, and so are accepted.
    """
    for name in horovod_only:
        if name not in ("groups", "num_groups", *unused):
            raise TypeError(f"{what}() got an unexpected keyword argument {name!r}")
    if not initialized:
        raise ValueError(f"call hvd.init() before hvd.{what}(...)")
    if horovod_only.get("groups") is not None or horovod_only.get("num_groups"):
        raise ValueError(
            "groups= and num_groups= bypass compression and are refused: layers are already "
            "exchanged in buckets"
        )
    if op not in allowed:
        raise ValueError(
            "op must be hvd.Average or hvd.Sum: Adasum combines full gradients pair by pair and "
            "cannot work on compressed ones"
        )


class NoSuchNameError(ValueError):
    """Error for a `module:name` that is malformed, or that does not exist."""


def attribute(name: str, what: str) -> Any:
    """Return the object that `module:name` names, with modules of the current folder in reach.

    Raises:
        NoSuchNameError: there is nothing of that name. Errors of the module itself pass through.
    """
    module, _, attribute = name.partition(":")
    if not (attribute.isidentifier() and all(map(str.isidentifier, module.split(".")))):
        raise NoSuchNameError(f"no {what} {name!r}; give module:{what}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there; what it imports is not
        raise NoSuchNameError(f"{name}: no module {module!r} from {os.getcwd()}") from error
    if not hasattr(imported, attribute):
        nearest = did_you_mean(attribute, vars(imported))
        raise NoSuchNameError(f"{name}: module {module!r} has no {attribute!r}{nearest}")
    return getattr(imported, attribute)
