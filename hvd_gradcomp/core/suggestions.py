"""Messages for names that are not known: the nearest known name, and the parameters of a call."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return a text to append to an error about an unknown name; empty if no choice is near.

    Args:
        name: what was written; upper and lower case count as alike.
        choices: the names that are known.

    >>> did_you_mean("alpa", ["alpha", "zeta"]), did_you_mean("x", ["alpha"])
    ("; did you mean 'alpha'?", '')
    """
    by_lower = {choice.lower(): choice for choice in choices}
    nearest = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[nearest[0]]!r}?" if nearest else ""


def unknown_parameters(maker: Callable[..., Any], named: Mapping[str, Any]) -> str:
    """Return an error text if a call names parameters that its function lacks; otherwise empty.

    Args:
        maker: a class or function with a signature.
        named: the keyword arguments of the call.

    >>> def method(alpha, zeta=0.999): ...
    >>> unknown_parameters(method, {"alpa": 2})
    "method has no parameter 'alpa'; did you mean 'alpha'? It takes alpha, zeta=0.999"
    """
    parameters = inspect.signature(maker).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return ""
    unknown = [name for name in named if name not in parameters]
    if not unknown:
        return ""
    name = unknown[0]
    defaults = {
        p.name: "" if p.default is p.empty else f"={p.default!r}" for p in parameters.values()
    }
    listed = ", ".join(f"{p}{default}" for p, default in defaults.items()) or "none"
    nearest = did_you_mean(name, parameters) or "."
    return f"{maker.__name__} has no parameter {name!r}{nearest} It takes {listed}"
