"""Measures the compression of each method on 2, 4 and 8 ranks, and lists the dense layers.

    python -m benchmarks.ratios             # a minute; no ranks are started, no Horovod is needed
    python -m benchmarks.ratios --ranks 16 32

Ranks are those of `hvd_gradcomp.testing.World`, in this process; every tensor that would travel is
counted, headers and padding included. Gradients are noise: a matrix of 1000 x 1000 and its bias.

`sent` is what `compression_stats(...).ratio` counts: bytes of float32 gradients by bytes that a
rank hands to collectives for others. `link` is what passes a rank's link, beside a dense allreduce
of the same gradients. An allgather brings a rank the payloads of all others, so `link` falls with
the number of ranks; two shots and sums are shared out as an allreduce is, so it does not.
`dense up to` is the largest layer, in elements, that is sent dense, since the method would take no
fewer bytes for it; "never" for those that send an element or do not, whatever its layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hvd_gradcomp import (
    Compressor,
    DGCCompressor,
    NoneCompressor,
    OneBitCompressor,
    QSGDCompressor,
    ScaleComCompressor,
    SparseGDCompressor,
    StromCompressor,
    TernGradCompressor,
)
from hvd_gradcomp.core.collectives import Alltoall, Broadcast
from hvd_gradcomp.core.cost_model import volume
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning.assignment import assign
from hvd_gradcomp.testing import World

METHODS: tuple[Compressor, ...] = (
    QSGDCompressor(),
    TernGradCompressor(),
    OneBitCompressor(),
    StromCompressor(tau=2.5),
    DGCCompressor(density=0.001, momentum=0.0),
    SparseGDCompressor(density=0.01),
    ScaleComCompressor(density=0.001),
)
SHAPES = ((1000, 1000), (1000,))
STEPS = 40  # until thresholds of noise send as much in each step


class Moved(NamedTuple):
    """Bytes of a step: the mean over ranks of what is sent, and what passes a link."""

    sent: float
    link: float


def moved(compressor: Compressor, shapes: Sequence[tuple[int, ...]], ranks: int) -> Moved:
    """Measures the last of some steps of noise."""
    names = tuple(f"layer{place}" for place in range(len(shapes)))
    layout = Layout(names, tuple(shapes), block=compressor.block)
    world = World(compressor, TorchOps(), layout, ranks)
    random = torch.Generator().manual_seed(0)
    keeps = isinstance(compressor, StromCompressor)
    for _ in range(STEPS if keeps else 2):
        drawn = [[torch.randn(s, generator=random) for s in shapes] for _ in range(ranks)]
        world.step([world.flat(tensors) for tensors in drawn])
    return Moved(*map(sum, zip(*(of_round(requests, ranks) for requests in world.traffic))))


def of_round(requests: Sequence[Any], ranks: int) -> Moved:
    """Counts one round, by what each rank has asked for."""
    size = float(requests[0].tensor.numel() * requests[0].tensor.element_size())
    kind = type(requests[0]).__name__.lower()
    sent = size / ranks if isinstance(requests[0], Broadcast) else size
    if isinstance(requests[0], Alltoall):
        sent = size * (ranks - 1) / ranks
    return Moved(sent, volume(kind, size, ranks))


def dense_up_to(compressor: Compressor, limit: int = 256) -> int:
    """The largest layer, in elements, that it leaves dense beside a large one; 0 if none."""
    largest = 0
    for size in range(1, limit):
        layers = [("weight", (1000, 1000), "float32"), ("bias", (size,), "float32")]
        if isinstance(assign(compressor, layers, 2)[1], NoneCompressor):
            largest = size
    return largest


def main() -> None:
    """Prints the table."""
    from tabulate import tabulate  # `benchmarks.worth` counts bytes where it is missing

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    ranks = parser.parse_args().ranks
    elements = sum(torch.Size(shape).numel() for shape in SHAPES)
    head = ["method", "dense up to", *(f"{of}, {n}" for n in ranks for of in ("sent", "link"))]
    rows = []
    for compressor in METHODS:
        row = [str(compressor), str(dense_up_to(compressor) or "never")]
        for n in ranks:
            sent, link = moved(compressor, SHAPES, n)
            dense = volume("allreduce", 4.0 * elements, n)
            row += [f"{4 * elements / sent:.1f}", f"{dense / link:.1f}"]
        rows.append(row)
    align = ["left"] + ["right"] * (len(head) - 1)
    print(tabulate(rows, head, colalign=align, disable_numparse=True))


if __name__ == "__main__":
    main()
