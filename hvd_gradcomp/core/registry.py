"""Methods by name: the number that each has on the wire, and those that other packages bring.

A method is known by the name of its class. The byte in the header of its payloads follows from that
name: nobody picks a number, and it is the same on all ranks, whatever else they have imported. The
methods of this package keep the numbers that they have always had; any other name gets one of 32 to
255, by its CRC-32.

224 numbers are few, so two names can get the same one. Nothing would be decoded by the wrong method
even then, since the digest beside the number is made from all of the compressor's `repr`; but ranks
with different methods would be told of different hyper-parameters. So a clash is an error where the
second class is defined, and so is a name that another class has. A class that is defined once more
in the same file, or in the same notebook, replaces the first.

An installed package declares its methods as entry points. The command line knows them by the name
on the left, with the settings that they have by default:

    [project.entry-points."hvd_gradcomp.compressors"]
    steady = "steady:SteadyCompressor"

They are imported when they are asked for. What cannot be imported is left out, with one line that
says whose it is and why.
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
RESERVED = {  # never reused
    "NoneCompressor": 1,
    "FP16Compressor": 2,
    "VarianceCompressor": 3,
    "HybridCompressor": 4,
    "StromCompressor": 5,
    "SparseGDCompressor": 6,
    "GradientDroppingCompressor": 7,
    "DGCCompressor": 8,
    "EGCCompressor": 9,
    "QSGDCompressor": 10,
    "TernGradCompressor": 11,
    "OneBitCompressor": 12,
    "ScaleComCompressor": 13,
    "MomentumAfter": 14,
    "After": 15,
    "Partition": 16,
    "GradiVeQCompressor": 17,
    "LGCCompressor": 18,
}
_FIRST, _END = 32, 256
_known: dict[str, type[Any]] = {}


def number_of(name: str) -> int:
    """The byte that stands for a method in the header of a payload."""
    return RESERVED.get(name) or _FIRST + zlib.crc32(name.encode()) % (_END - _FIRST)


def register(cls: type[Any]) -> int:
    """Makes a method known by the name of its class; its number.

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
    """All methods that have been defined, by name."""
    return dict(_known)


def find(name: str) -> type[Any] | None:
    """The method whose class is called so: defined already, or declared by a package."""
    for short, point in declared().items():
        if name not in _known and point.attr == name:
            _imported(short)
    return _known.get(name)


@lru_cache(maxsize=1)
def declared() -> dict[str, metadata.EntryPoint]:
    """What installed packages declare, by the name in the command line. Imports none of it."""
    points: Any = metadata.entry_points()
    # Python 3.9 has a dict.
    points = points.select(group=GROUP) if hasattr(points, "select") else points.get(GROUP, ())
    found: dict[str, metadata.EntryPoint] = {}
    for point in points:
        first = found.setdefault(point.name, point)
        if first.value != point.value:
            leave_out(point, f"{_owner(first)} declares another one by that name")
    return found


@cache
def load(short: str) -> Any:
    """A method that a package declares, with the settings that it has by default.

    Returns:
        The compressor. None, and one line in the log, where that does not work.
    """
    cls = _imported(short)
    try:
        return None if cls is None else cls()
    except Exception as error:
        leave_out(declared()[short], f"{type(error).__name__}: {error}")
        return None


@cache
def _imported(short: str) -> Any:
    """The class of a method that a package declares; None as in `load`."""
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
    """Says in one line that a method cannot be used as it is declared, whose it is, and why."""
    text = " ".join(reason.split())
    LOGGER.warning("%s: its method %r is left out: %s", _owner(point), point.name, text)


def _owner(point: metadata.EntryPoint) -> str:
    owner = getattr(point, "dist", None)  # Python 3.9 does not say
    return f"{owner.name} {owner.version}" if owner else point.value


def _file(cls: type[Any]) -> str:
    """Where it is defined; a script that is imported as well is one file."""
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__


def _path(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
