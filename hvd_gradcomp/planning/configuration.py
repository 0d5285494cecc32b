"""Compressors as JSON-compatible data: the class name, and the fields.

Loading runs only constructors of known classes: a compressor of this package, a user's compressor
whose module has been imported, or one that an installed package declares.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from hvd_gradcomp.core import registry
from hvd_gradcomp.core.suggestions import did_you_mean, unknown_parameters
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.planning.assignment import Named, Role, Smaller

_CLASS = "class"  # no field can be called so
_RULES: dict[str, type] = {rule.__name__: rule for rule in (Named, Role, Smaller)}


def as_config(value: Any) -> Any:
    """Convert a compressor, with its parts, to numbers, strings, lists and dicts.

    Raises:
        TypeError: a field holds something else.

    >>> from hvd_gradcomp import QSGDCompressor, after
    >>> as_config(after(2, None, QSGDCompressor()))["then"]["class"]
    'QSGDCompressor'
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [as_config(item) for item in value]
    if is_dataclass(value) and isinstance(value, (Compressor, *_RULES.values())):
        values = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return {
            _CLASS: type(value).__name__,
            **{name: as_config(item) for name, item in values.items()},
        }
    raise TypeError(
        f"{value!r} cannot be saved as text: compressors are frozen dataclasses of numbers, texts, "
        "tuples and other compressors"
    )


def from_config(config: Any) -> Any:
    """Restore the argument of `as_config`.

    Raises:
        ValueError: the config names a class or a field that is unknown here.
    """
    if isinstance(config, (list, tuple)):
        return tuple(from_config(item) for item in config)
    if not isinstance(config, dict):
        return config
    values = {name: from_config(item) for name, item in config.items() if name != _CLASS}
    name = config.get(_CLASS)
    known = _RULES.get(str(name)) or registry.find(str(name))
    if known is None:
        nearest = did_you_mean(str(name), [*_RULES, *registry.known()])
        raise ValueError(
            f"there is no compressor {name!r} here{nearest or '.'} Import the module that defines "
            "it, install the package that has it, or use the version of hvd_gradcomp that saved it"
        )
    unknown = unknown_parameters(known, values)
    if unknown:
        raise ValueError(f"{unknown}; another version of hvd_gradcomp may have saved it")
    try:
        return known(**values)
    except TypeError as error:
        raise ValueError(
            f"{name} of this version cannot be made from {values}: {error}. Use the version of "
            "hvd_gradcomp that saved it"
        ) from error
