"""Registry of methods: the number that each has on the wire, and those that other packages bring.

A method is known by its class name. Its number in the header of payloads is the lower half of the
name's CRC-32: nobody picks a number, and it is the same on all ranks, whatever else they have
imported.

Two names can get the same number. Even then no payload would be decoded by the wrong method, since
the digest beside the number covers the compressor's whole `repr`; but the error for ranks with
different methods would blame their hyper-parameters. So a clash is an error where the second class
is defined, and so is a name that another class has. A class that is defined again in the same file,
or in the same notebook, replaces the first.

An installed package declares its methods as entry points. The command line knows them by the name
on the left, with their default settings:

    [project.entry-points."hvd_gradcomp.compressors"]
    steady = "steady:SteadyCompressor"

They are imported on demand. A method that cannot be imported is left out; one line in the log names
its package and the reason.
"""

from __future__ import annotations

import logging
import sys
import zlib
from functools import cache, lru_cache
from importlib import metadata
from typing import Any

LOGGER = logging.getLogger("hvd_gradcomp")
GROUP = "hvd_gradcomp.compressors"
_known: dict[str, type[Any]] = {}


def number_of(name: str) -> int:
    """Return the 16 bits that identify a method in the header of a payload."""
    return zlib.crc32(name.encode()) & 0xFFFF


def register(cls: type[Any]) -> int:
    """Register a method by its class name, and return its number.

    Raises:
        TypeError: another class has the name, or a name with the same number.
    """
    name, number = cls.__name__, number_of(cls.__name__)
    for other in _known.values():
        same = other.__name__ == name
        if number_of(other.__name__) != number or (same and _file(other) == _file(cls)):
            continue
        alike = "name" if same else f"number on the wire, {number}, by its name"
        raise TypeError(
            f"{_path(cls)} cannot be defined beside {_path(other)}, which has the same {alike}: "
            "give one of them another name, or import only one of them"
        )
    _known[name] = cls
    return number


def known() -> dict[str, type[Any]]:
    """Return all methods that have been defined, by name."""
    return dict(_known)


def find(name: str) -> type[Any] | None:
    """Return the method with this class name: defined already, or declared by a package."""
    for short, point in declared().items():
        if name not in _known and point.attr == name:
            _imported(short)
    return _known.get(name)


@lru_cache(maxsize=1)
def declared() -> dict[str, metadata.EntryPoint]:
    """Return the methods that packages declare, by command-line name, without importing them."""
    points: Any = metadata.entry_points()
    # Python 3.9 has a dict.
    points = points.select(group=GROUP) if hasattr(points, "select") else points.get(GROUP, ())
    by_name: dict[str, metadata.EntryPoint] = {}
    for point in points:
        first = by_name.setdefault(point.name, point)
        if first.value != point.value:
            leave_out(point, f"{_owner(first)} declares another one by that name")
    return by_name


@cache
def load(short: str) -> Any:
    """Return a method that a package declares, with its default settings.

    Returns:
        The compressor. If that fails, None, and one line in the log.
    """
    cls = _imported(short)
    try:
        return None if cls is None else cls()
    except Exception as error:
        leave_out(declared()[short], f"{type(error).__name__}: {error}")
        return None


@cache
def _imported(short: str) -> Any:
    """Return the class of a method that a package declares; None as in `load`."""
    point = declared()[short]
    try:
        cls = point.load()
        if cls not in _known.values():
            raise TypeError(f"{point.value} is no class of a method")
        return cls
    except (Exception, SystemExit) as error:
        leave_out(point, f"{type(error).__name__}: {error}")
        return None


def leave_out(point: metadata.EntryPoint, reason: str) -> None:
    """Log in one line that a declared method cannot be used, whose it is, and why."""
    text = " ".join(reason.split())
    LOGGER.warning("%s: its method %r is left out: %s", _owner(point), point.name, text)


def _owner(point: metadata.EntryPoint) -> str:
    owner = getattr(point, "dist", None)  # Python 3.9 does not say
    return f"{owner.name} {owner.version}" if owner else point.value


def _file(cls: type[Any]) -> str:
    """Return the file of a class; a script that is imported as well counts as one file."""
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__


def _path(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
