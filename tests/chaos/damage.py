"""Ways to damage bytes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random


def flipped(data: bytes, dice: Random) -> bytes:
    place, bit = dice.randrange(len(data)), dice.randrange(8)
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def overwritten(data: bytes, dice: Random) -> bytes:
    """A run of random bytes, up to 64."""
    start = dice.randrange(len(data))
    run = dice.randbytes(min(dice.randint(1, 64), len(data) - start))
    return data[:start] + run + data[start + len(run) :]


def zeroed(data: bytes, dice: Random) -> bytes:
    del dice
    return bytes(len(data))


def truncated(data: bytes, dice: Random) -> bytes:
    return data[: dice.randrange(len(data))]


def rest_zero(data: bytes, dice: Random) -> bytes:
    """As many bytes, of which the end never came."""
    return truncated(data, dice).ljust(len(data), b"\0")


def longer(data: bytes, dice: Random) -> bytes:
    return data + dice.randbytes(dice.randint(1, 64))


def empty(data: bytes, dice: Random) -> bytes:
    del data, dice
    return b""


Damage = Callable[[bytes, Random], bytes]
OF_FILES: dict[str, Damage] = {
    "one bit flipped": flipped,
    "a run of bytes overwritten": overwritten,
    "cut short": truncated,
    "longer": longer,
    "zeros": zeroed,
    "empty": empty,
}
OF_PAYLOADS: dict[str, Damage] = {
    "one bit flipped": flipped,
    "a run of bytes overwritten": overwritten,
    "the end never came": rest_zero,
    "zeros": zeroed,
}
