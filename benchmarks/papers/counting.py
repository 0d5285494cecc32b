"""Counts the bytes that each rank hands to collectives in a step, and which pieces these are.

All ranks are those of `hvd_gradcomp.testing.World`, in this process, and their tensors have a shape
and no data, as in `benchmarks.traffic`: of LGC, ScaleCom and top-k no payload's size depends on
values; of the others a density is given. Bytes are counted where `compression_stats` counts them in
a training; pieces are the sizes that methods declare for parts of their payloads. Both have to add
up to the same on each rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.traffic import WithoutData
from hvd_gradcomp import Compressor, LGCCompressor, ScaleComCompressor
from hvd_gradcomp.algorithms.lgc.server import Server
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.codecs.sparse import SparseCompressor
from hvd_gradcomp.codecs.topk import TopKCompressor
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.ops.kernel_params import CapacityLevel
from hvd_gradcomp.planning.assignment import plan
from hvd_gradcomp.testing import World

BUCKET_BYTES = 25 << 20  # as the PyTorch frontend
Shapes = Sequence[tuple[str, tuple[int, ...]]]


class Count(NamedTuple):
    """Count of one or more buckets.

    Attributes:
        steps: bytes by step and rank.
        pieces: bytes of the last step by rank, by name.
    """

    steps: list[list[int]]
    pieces: dict[str, list[int]]


def count(
    compressor: Compressor, shapes: Shapes, ranks: int, steps: int, density: float = 0.0
) -> Count:
    """Count some steps of a model, bucket after bucket.

    Args:
        compressor: with the steps of its phases; LGC's training has to end before the last step.
        shapes: names and shapes of the layers, in the model's order.
        ranks: how many exchange.
        steps: how many.
        density: share of the elements that each rank had to send in the step before; for methods
            whose gradients decide.
    """
    layers = [(name, shape, "float32") for name, shape in shapes]
    totals = [[0] * ranks for _ in range(steps)]
    pieces: dict[str, list[int]] = defaultdict(lambda: [0] * ranks)
    for method, layout in plan(compressor, layers, BUCKET_BYTES, ranks=ranks):
        bucket = _of_bucket(method, layout, ranks, steps, density)
        for total, counted in zip(totals, bucket.steps):
            total[:] = map(sum, zip(total, counted))
        apart = isinstance(compressor, LGCCompressor) and isinstance(method.working, TopKCompressor)
        for name, sizes in bucket.pieces.items():
            title = f"last layer's {name}" if apart else name
            pieces[title] = [*map(sum, zip(pieces[title], sizes))]
    by_rank = [sum(sizes) for sizes in zip(*pieces.values())]
    if by_rank != totals[-1]:
        raise AssertionError(f"pieces add up to {by_rank}, counted were {totals[-1]}")
    return Count(totals, dict(pieces))


class Ledger:
    """Counter of what a rank hands to collectives for others."""

    def __init__(self) -> None:
        self.bytes_sent = 0

    def sent(self, tensor: torch.Tensor) -> None:
        self.bytes_sent += tensor.numel() * tensor.element_size()

    def received(self, tensor: torch.Tensor) -> None:
        """Do nothing: bytes are counted where they leave."""

    record_checksum = received


def _of_bucket(method: Compressor, layout: Layout, ranks: int, steps: int, density: float) -> Count:
    ops = WithoutData(kernels=False)
    world = World(method, ops, layout, ranks)
    if density:
        world.states = [_demanding(method, ops, layout, s, density) for s in world.states]
    totals = []
    for _ in range(steps):
        ledgers = [Ledger() for _ in range(ranks)]
        for runner, ledger in zip(world._runners, ledgers):
            runner.traffic = ledger
        gradients = [ops.zeros((layout.size,)) for _ in range(ranks)]
        extra = {"moment": gradients} if method.uses_moments else {}
        world.step(gradients, **extra)
        totals.append([ledger.bytes_sent for ledger in ledgers])
    pieces: dict[str, list[int]] = defaultdict(lambda: [0] * ranks)
    for name, senders, size in _pieces(method.working, layout, world):
        for rank in senders:
            pieces[name][rank] += size
    return Count(totals, dict(pieces))


def _demanding(method: Any, ops: Any, layout: Layout, state: Any, density: float) -> Any:
    """Return the state after steps in each of which so many elements were sent.

    Where a capacity leaves a part for the next step, so many more were to be sent.
    """
    sent, waits = layout.elements * density, method.policy.waits
    needed = round(sent * waits / (waits - 1) if waits else sent)
    numbers = {"level": ops.host(0), "needed": ops.host(needed)}
    return state._replace(capacity=state.capacity._replace(**numbers))


def _pieces(
    method: Compressor, layout: Layout, world: World
) -> Iterator[tuple[str, Sequence[int], int]]:
    """Yield names, senders and bytes of what travelled in the last step."""
    everybody = range(world.size)
    if isinstance(method, LGCCompressor):
        yield from _lgc_pieces(method, layout, world)
    elif isinstance(method, ScaleComCompressor):
        leader = [(world.steps - 1) % world.size]
        yield from _parts(method.choice_parts(layout), leader)
        yield "header", everybody, 4
        yield "values", everybody, 4 * method.topk.capacity(layout)
    elif isinstance(method, SparseCompressor):
        state = getattr(world.states[0], "then", world.states[0])  # of `after`
        level = int(state.capacity.level)
        capacity = method.capacity_schedule(layout, world.size).capacities[level]
        if isinstance(method, TopKCompressor):
            parts = method.parts(layout, capacity)
        else:
            parts = method.coded_parts(layout, capacity)
        assert method.body_bytes(layout, CapacityLevel(level, capacity, False)) == int(
            wire.body_bytes(parts)
        )
        yield from _parts(parts, everybody)
    else:
        yield "layers sent whole", everybody, 4 * layout.elements


def _lgc_pieces(
    method: LGCCompressor, layout: Layout, world: World
) -> Iterator[tuple[str, Sequence[int], int]]:
    everybody, exchange, ranks = range(world.size), method.exchange, world.size
    if isinstance(exchange, Server):
        innovation = exchange.innovation_parts(layout)
        yield from _parts(innovation, everybody, "innovation's ")
        yield from _parts(exchange.code_parts(layout), [exchange.common(ranks)])
        answer = wire.packed_bytes(exchange.back_parts(layout, ranks))
        yield "the server's answer", [exchange.master], answer
        return
    leader = patterns.draw_number(world.steps - 1, method.seed, ranks)
    yield from _parts(exchange.choice_parts(layout), [leader])
    code = 4 * autoencoder.code_length(exchange.selection.topk.capacity(layout))
    yield "code", everybody, code
    yield "samples", everybody, exchange.compressed_bytes(layout, ranks)["worker"] - code


def _parts(
    parts: Mapping[str, wire.Part], senders: Sequence[int], prefix: str = ""
) -> Iterator[tuple[str, Sequence[int], int]]:
    """Yield the parts of a payload; both halves of packed indices have one name."""
    yield "header", senders, wire.HEADER_BYTES
    names = {"low": "indices", "high": "indices", "sampled": "samples", "scale": "scales"}
    for name, part in parts.items():
        title = names.get(name, name)
        title = prefix + title if title in ("values", "indices") else title
        yield title, senders, int(wire.body_bytes({name: part}))
