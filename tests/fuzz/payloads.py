"""One payload that a sender has made up: a valid header, the right checksum, and any body.

Damage on the way is found by the checksum; what a program with a bug, or an owner who means harm,
puts behind a valid one is not. Whatever it is, decoding has to end in a result that is equal on all
ranks, or in an error on all ranks that says what is wrong; and may touch no memory of others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvd_gradcomp import Compressor, NonFiniteGradientError, PayloadError
from hvd_gradcomp.core.collectives import Switch
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.wire import HEADER_BYTES, MAGIC
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.methods import BALANCED, EVERY, INT32, PRODUCTS, ROBUST, ROUNDED, TODAY

SHAPES = ((30, 20), (9,), (300,))
RANKS = 3
METHODS: list[Compressor] = [*EVERY, *TODAY, *PRODUCTS, *ROUNDED, *INT32, *ROBUST, *BALANCED]
ROUNDS = 4  # of a program, of which one is attacked


class FindingError(Exception):
    """Outcome that no payload may have."""


def reframed(data: np.ndarray, ops: TorchOps) -> np.ndarray:
    """Return a payload whose checksum is right again; unchanged if it has no header."""
    if data.size < HEADER_BYTES or data[0] != MAGIC:
        return data
    words = data[:HEADER_BYTES].copy().view(np.uint32)
    known = torch.from_numpy(words[:7].astype(np.int64))
    body = torch.from_numpy(data[HEADER_BYTES:].copy())
    words[7] = int(ops.checksum(known, body))
    return np.concatenate([words.view(np.uint8), data[HEADER_BYTES:]])


def forged(data: np.ndarray, wish: bytes) -> np.ndarray:
    """Return a payload with what is wished for in the place of its body, or written over parts.

    Args:
        data: uint8, what was to travel.
        wish: the first byte says how; its second bit writes over the counts of the header.
    """
    made, start = data.copy(), 0
    has_header = data.size >= HEADER_BYTES and data[0] == MAGIC
    if has_header:
        start = HEADER_BYTES
    how, rest = (wish[0], wish[1:]) if wish else (0, b"")
    if how & 2 and has_header and len(rest) >= 8:  # elements sent, and that should have been
        made[16:24] = np.frombuffer(rest[:8], np.uint8)
        rest = rest[8:]
    body = made[start:]
    if how & 1:
        content = np.frombuffer(rest[: body.size], np.uint8)
        body[: content.size] = content
    else:
        while len(rest) >= 4 and body.size:
            place = int.from_bytes(rest[:2], "little") % body.size
            run = np.frombuffer(rest[3 : 3 + 1 + rest[2] % 8], np.uint8)[: body.size - place]
            body[place : place + run.size] = run
            rest = rest[4 + rest[2] % 8 :]
    return made


class Forging:
    """Tampering of a world: one rank's payload in one round is forged."""

    def __init__(self, ops: TorchOps, place: int, rank: int, wish: bytes) -> None:
        self._ops, self._place, self._rank, self._wish = ops, place, rank, wish
        self._count = 0

    def __call__(self, rank: int, request: Any) -> Any:
        if isinstance(request, Switch):
            return request
        place, self._count = self._count // RANKS, self._count + 1
        tensor = getattr(request, "tensor", None)
        if (place, rank) != (self._place, self._rank) or tensor is None:
            return request
        if tensor.dtype != torch.uint8 or not tensor.numel():
            return request  # what is added up on its way has no header
        rows = tensor.reshape(-1, tensor.shape[-1]).numpy()
        made = np.stack([reframed(forged(row, self._wish), self._ops) for row in rows])
        return request._replace(tensor=torch.from_numpy(made).reshape(tensor.shape))


def attack(data: bytes) -> str:
    """Try one input: its first bytes choose the method, the round and the rank.

    Returns:
        "refused"; "decoded"; or "not finite", which a sender that hides a NaN brings to all.

    Raises:
        FindingError: replicas differ, or one rank alone has an error.
        Exception: any error that is not one of ours.
    """
    if len(data) < 3:
        return "decoded"
    compressor = METHODS[data[0] % len(METHODS)]
    place, rank = data[1] % ROUNDS, data[1] // ROUNDS % RANKS
    ops = TorchOps()
    layout = Layout(("a", "b", "c"), SHAPES, block=compressor.block)
    world = World(compressor, ops, layout, RANKS)
    random = np.random.default_rng(data[0])
    for step in range(2):
        world.tamper = Forging(ops, place, rank, data[2:]) if step else None
        flats = [
            world.flat([torch.from_numpy(random.standard_normal(s).astype("f4")) for s in SHAPES])
            for _ in range(RANKS)
        ]
        try:
            results = world.step(flats)
        except (PayloadError, NonFiniteGradientError) as error:
            shared = all(type(x) in (type(error), type(None)) for x in world.failures)
            if not shared:
                raise FindingError(
                    f"{compressor}: ranks fail differently, {world.failures}"
                ) from error
            return "refused"
    if any(not torch.equal(x.nan_to_num(), results[0].nan_to_num()) for x in results):
        raise FindingError(f"{compressor}: replicas differ")
    if results[0].isfinite().all():
        return "decoded"
    if compressor in ROBUST:
        raise FindingError(f"{compressor}: a result that is not finite")
    return "not finite"


def named(data: bytes) -> str:
    """Return what an input attacks."""
    return f"{METHODS[data[0] % len(METHODS)]}, round {data[1] % ROUNDS}" if len(data) > 1 else ""
