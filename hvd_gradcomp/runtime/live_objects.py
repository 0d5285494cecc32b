"""Live objects of a type, for callers that are handed parts of them alone.

Bytecode must never run while something refers to all objects: among them are tuples that another
thread is building, and CPython raises a SystemError there if anybody else refers to one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import chain
from typing import Any


def live_callables(kind: type) -> Iterator[Any]:
    """Yield the live instances of a type whose instances are callable.

    Types are inspected, not objects: some lazy objects load when inspected.
    """
    # One call makes the list of all objects, filters it and drops it. Tuples are not callable.
    for each in list(filter(callable, chain.from_iterable(map(gc.get_objects, (None,))))):
        if issubclass(type(each), kind):
            yield each


def live_instances(kind: type) -> Iterator[Any]:
    """Yield the live instances of a type, and of its subclasses.

    The more subclasses it has, the longer this takes.
    """
    kinds = _with_subclasses(kind)
    for each in gc.get_referrers(*kinds):  # instances refer to their class
        if type(each) in kinds:
            yield each


def _with_subclasses(kind: type) -> set[type]:
    kinds: set[type] = {kind}
    pending: list[type] = [kind]
    while pending:
        new: set[type] = set(type.__subclasses__(pending.pop())) - kinds
        kinds |= new
        pending += new
    return kinds
