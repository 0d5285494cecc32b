"""Messages between ranks other than tensors: JSON, checked against a type when it is read.

Unlike unpickling, reading runs no received code: it returns the expected type or raises an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints


class MessageError(ValueError):
    """Message of another rank that does not have the expected type."""


def dumps(item: Any) -> bytes:
    """Encode as JSON: None, numbers, strings, and lists, tuples and string-keyed dicts of these.

    Infinities and NaN keep their value, and floats all of their bits.

    Raises:
        TypeError: it holds something else.
    """
    return json.dumps(item, separators=(",", ":")).encode()


def loads(data: bytes, kind: Any) -> Any:
    """Decode the bytes of `dumps`.

    Args:
        data: the bytes.
        kind: a type: None, bool, int, float, str, `list[...]`, `dict[str, ...]`, `tuple[...]` of
            fixed length or with `...`, `Optional[...]`, a NamedTuple of these, or Any.

    Raises:
        MessageError: it is not JSON, or not of that type.

    >>> loads(dumps({"a": (1, "b")}), dict[str, tuple[int, str]])
    {'a': (1, 'b')}
    """
    try:
        item = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"no JSON: {error}") from None
    return convert(item, kind)


def convert(item: Any, kind: Any, where: str = "it") -> Any:
    """Convert decoded JSON to a type that `loads` takes.

    Args:
        item: the decoded JSON.
        kind: the expected type.
        where: name of the item in error messages.

    Raises:
        MessageError: it has another type.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return item
    if origin is Union and item is not None:
        return convert(item, arguments[0], where)
    if item is None and (kind is None or type(None) in arguments):
        return None
    if origin is dict and isinstance(item, dict):
        return {key: convert(value, arguments[1], f"{where}.{key}") for key, value in item.items()}
    if isinstance(item, list):
        if origin is list or (origin is tuple and arguments[1:] == (...,)):
            return origin(convert(x, arguments[0], f"{where}[{i}]") for i, x in enumerate(item))
        named = hasattr(kind, "_fields")
        kinds = [*get_type_hints(kind).values()] if named else arguments if origin else ()
        if (named or origin is tuple) and len(kinds) == len(item):
            values = (convert(x, k, f"{where}[{i}]") for i, (x, k) in enumerate(zip(item, kinds)))
            return kind(*values) if named else tuple(values)
    if kind is float and type(item) is int:
        return float(item)
    if isinstance(kind, type) and type(item) is kind:
        return item
    raise MessageError(f"{where} is {str(item)[:40]!r}, which was not asked for")


def gather(
    item: Any, kind: Any, allgather: Callable[[bytes], Iterable[bytes]], ranks: Sequence[int] | None
) -> list[Any]:
    """Gather an item from every rank, on all ranks.

    Args:
        item: this rank's.
        kind: the expected type of each.
        allgather: gathers bytes; lengths may differ between ranks.
        ranks: the numbers of the ranks, if these are not all ranks.

    Raises:
        MessageError: on all ranks, if an item has another type.
    """
    items = []
    for place, data in enumerate(allgather(dumps(item))):
        try:
            items.append(loads(data, kind))
        except MessageError as error:
            rank = ranks[place] if ranks else place
            raise MessageError(
                f"what rank {rank} has said cannot be read: {error}. Install the same version of "
                "hvd_gradcomp on all hosts, and call the same functions in the same order"
            ) from None
    return items
