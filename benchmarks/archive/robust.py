"""Training beside a rank that lies, by the rule of aggregation: `robust` beside the plain mean.

    python -m benchmarks.archive.robust
    python -m benchmarks.archive.robust --json robust.json

Eight ranks of one process in lockstep (`testing.World`) train a perceptron of 2,410 parameters on
1,200 of scikit-learn's digits by SGD, with 32 of them a step on each rank; the loss is that on the
other 597. Rank 0 sends something else than its gradient: noise ten times as large as a gradient of
ones, anew in each step; the same noise in every step; its gradient times -30; or times -1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from hvd_gradcomp import ChunkedTopKCompressor, Compressor, NoneCompressor, QSGDCompressor, robust
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World

RANKS, STEPS, BATCH, SEEN = 8, 800, 32, 1200
Lie = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
LIES: dict[str, Lie] = {
    "none": lambda g, _: g,
    "noise": lambda g, random: 10 * torch.randn(g.shape, generator=random),
    "the same noise": lambda g, random: 10 * torch.randn(g.shape, generator=random.manual_seed(7)),
    "times -30": lambda g, _: -30 * g,
    "times -1": lambda g, _: -g,
}
CHUNKED = ChunkedTopKCompressor(chunk=64, k=16)
WAYS: tuple[Compressor, ...] = (
    NoneCompressor(),
    robust(None, "clip"),
    robust(None, "median"),
    robust(None, "trimmed"),
    CHUNKED,
    robust(CHUNKED, "clip"),
    robust(QSGDCompressor(bits=4), "median"),
)


def trained(compressor: Compressor, lie: str, steps: int = STEPS) -> float:
    """Return the loss on held-out digits after training beside a rank 0 that lies."""
    data = load_digits()
    x, y = torch.from_numpy(data.data / 16).float(), torch.from_numpy(data.target)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    names, parameters = zip(*model.named_parameters())
    layout = Layout(names, tuple(tuple(p.shape) for p in parameters), block=compressor.block)
    world = World(compressor, TorchOps(), layout, RANKS)
    optimizer = torch.optim.SGD(parameters, 0.3)
    generator, noise = (torch.Generator().manual_seed(seed) for seed in (1, 7))
    for _ in range(steps):
        gradients = []
        for rank in range(RANKS):
            chosen = torch.randint(0, SEEN, (BATCH,), generator=generator)
            of_rank = torch.autograd.grad(cross_entropy(model(x[chosen]), y[chosen]), parameters)
            gradients.append(world.flat([LIES[lie](g, noise) if rank == 0 else g for g in of_rank]))
        mean = world.step(gradients)[0]
        for p, start, size in zip(parameters, layout.offsets, layout.sizes):
            p.grad = mean[start : start + size].view(p.shape)
        optimizer.step()
    with torch.no_grad():
        return float(cross_entropy(model(x[SEEN:]), y[SEEN:]))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.archive.robust", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, help="where the losses go")
    options = parser.parse_args()
    print(f"| method | {' | '.join(LIES)} |\n|---|{'--:|' * len(LIES)}")
    rows: list[dict[str, Any]] = []
    for method in WAYS:
        losses = {}
        for lie in LIES:
            try:
                losses[lie] = trained(method, lie)
            except ArithmeticError:  # a gradient that is not finite
                losses[lie] = float("inf")
        rows.append({"method": str(method), "losses": losses})
        shown = [f"{x:.3f}" if x < 100 else "diverges" for x in losses.values()]
        print(f"| `{method}` | {' | '.join(shown)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
