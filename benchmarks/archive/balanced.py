"""Training by allgather and by owners: the loss, and the bytes that a rank receives on the way.

    python -m benchmarks.archive.balanced
    python -m benchmarks.archive.balanced --ranks 16 --optimizers Adam --json balanced.json

Ranks of one process in lockstep (`testing.World`) train a perceptron of 85,002 parameters on 1,200
of scikit-learn's digits, with 16 of them a step on each rank. Printed are the loss on the other
597, the mean of two seeds; and how many times fewer bytes than with dense gradients collectives
brought a rank, by rings, over all steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from hvd_gradcomp import (
    Compressor,
    NoneCompressor,
    OkTopKCompressor,
    SparseGDCompressor,
    StromCompressor,
    VarianceCompressor,
    balanced,
)
from hvd_gradcomp.core.collectives import Allgather, Allreduce, Alltoall
from hvd_gradcomp.core.cost_model import volume
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World

STEPS, BATCH, SEEN, SEEDS = 300, 16, 1200, (1, 2)
KINDS = {Allgather: "allgather", Allreduce: "allreduce", Alltoall: "alltoall"}
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.002),
}
INNER: tuple[Compressor, ...] = (
    StromCompressor(tau=0.05),
    VarianceCompressor(alpha=2.0),
    SparseGDCompressor(density=0.01),
)
WAYS: tuple[Compressor, ...] = (
    NoneCompressor(),
    OkTopKCompressor(density=0.01),
    *(method for one in INNER for method in (one, balanced(one, "two_shot"))),
    balanced(SparseGDCompressor(density=0.03), "two_shot"),
)


def received(world: World) -> float:
    """Return the bytes that the last step brought a rank."""
    moved = 0.0
    for request, *_ in world.traffic:
        size = request.tensor.numel() * request.tensor.element_size()
        moved += volume(KINDS[type(request)], size, world.size)
    return moved


def trained(compressor: Compressor, ranks: int, optimizer: str, seed: int) -> tuple[float, float]:
    """Return the loss on held-out digits, and the bytes that a rank received in a mean step."""
    data = load_digits()
    x, y = torch.from_numpy(data.data / 16).float(), torch.from_numpy(data.target)
    torch.manual_seed(seed)
    layers = torch.nn.Linear(64, 256), torch.nn.Linear(256, 256), torch.nn.Linear(256, 10)
    one, two, three = layers
    model = torch.nn.Sequential(one, torch.nn.ReLU(), two, torch.nn.ReLU(), three)
    names, parameters = zip(*model.named_parameters())
    layout = Layout(names, tuple(tuple(p.shape) for p in parameters), block=compressor.block)
    world = World(compressor, TorchOps(), layout, ranks)
    steps = OPTIMIZERS[optimizer](parameters)
    generator, moved = torch.Generator().manual_seed(seed), []
    for _ in range(STEPS):
        gradients = []
        for _ in range(ranks):
            chosen = torch.randint(0, SEEN, (BATCH,), generator=generator)
            of_rank = torch.autograd.grad(cross_entropy(model(x[chosen]), y[chosen]), parameters)
            gradients.append(world.flat(list(of_rank)))
        mean = world.step(gradients)[0]
        moved.append(received(world))
        for p, start, size in zip(parameters, layout.offsets, layout.sizes):
            p.grad = mean[start : start + size].view(p.shape)
        steps.step()
    with torch.no_grad():
        loss = float(cross_entropy(model(x[SEEN:]), y[SEEN:]))
    return loss, statistics.mean(moved)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.archive.balanced", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS])
    parser.add_argument("--json", type=Path, help="where the rows go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = [(ranks, optimizer) for ranks in options.ranks for optimizer in options.optimizers]
    heads = [f"{optimizer}, {ranks} ranks" for ranks, optimizer in cells]
    print(f"| method | {' | '.join(heads)} |\n|---|{'--:|' * len(heads)}")
    rows: list[dict[str, Any]] = []
    for method in WAYS:
        shown = []
        for ranks, optimizer in cells:
            runs = [trained(method, ranks, optimizer, seed) for seed in SEEDS]
            loss, moved = (statistics.mean(numbers) for numbers in zip(*runs))
            ratio = volume("allreduce", 4.0 * 85_002, ranks) / moved
            row = {"method": str(method), "ranks": ranks, "optimizer": optimizer}
            rows.append({**row, "losses": [run[0] for run in runs], "bytes": moved})
            shown.append(f"{loss:.3f}, {ratio:.3g}")
        print(f"| `{method}` | {' | '.join(shown)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
