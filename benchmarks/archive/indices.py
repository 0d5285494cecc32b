"""Bits for each index on real gradients, beside the entropy bound of random places.

    python -m benchmarks.archive.indices

A network on handwritten digits is trained for some steps in this process; its gradients go through
Sparse GD at several densities. `used` is what the packed differences and their widths take, `room`
what travels with them, and `Elias-Fano` with `index_coding="elias_fano"` (neither changes from step
to step); `bound` is `log2(n/k) + 1.44`.
"""

from __future__ import annotations

import argparse
import math

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from examples import digits
from hvd_gradcomp import SparseGDCompressor
from hvd_gradcomp.codecs.indices import CODINGS
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.wire import body_bytes as packed_bytes
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(1)
    x, y, _, _ = (torch.from_numpy(a) for a in digits.load())
    model = nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4096, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    parameters = list(model.parameters())
    layout = Layout(
        tuple(name for name, _ in model.named_parameters()),
        tuple(tuple(p.shape) for p in parameters),
    )
    worlds = {
        density: World(SparseGDCompressor(density=density), TorchOps(), layout, 1)
        for density in (0.0005, 0.001, 0.01, 0.1)
    }
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    used: dict[float, float] = dict.fromkeys(worlds, 0.0)
    for step in range(options.steps):
        batch = torch.randint(0, len(y), (32,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch].permute(0, 3, 1, 2)), y[batch]).backward()
        for density, world in worlds.items():
            world.step([world.flat([p.grad for p in parameters])])
            parts = world.compressor.parts(layout)  # type: ignore[attr-defined]
            widths = world.traffic[0][0].tensor[32 : 32 + parts["widths"].count]
            used[density] += 32 * int(widths.long().sum()) + 8 * len(widths)
        optimizer.step()
    table = Table(title=f"{layout.elements:,} elements, {options.steps} steps")
    for head in ("density", "indices", "used", "room", "Elias-Fano", "bound"):
        table.add_column(head, justify="right")
    for density, world in worlds.items():
        parts = world.compressor.parts(layout)  # type: ignore[attr-defined]
        count = parts["values"].count
        bits = 32 * parts["deltas"].count + 8 * parts["widths"].count
        table.add_row(
            f"{density:g}",
            str(count),
            f"{used[density] / options.steps / count:.2f}",
            f"{bits / count:.2f}",
            f"{8 * packed_bytes(CODINGS['elias_fano'].parts(layout, count)) / count:.2f}",
            f"{math.log2(layout.elements / count) + 1.44:.2f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
