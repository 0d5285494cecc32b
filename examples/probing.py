"""Measures what the gradients of a small network have in common while it learns the digits.

horovodrun --gloo -np 2 python -m examples.probing --png results/probing
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from examples import digits
from hvd_gradcomp.cli.digits import network
from hvd_gradcomp.monitoring.probe import Reading
from hvd_gradcomp.torch.monitoring.probing import Probe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--every", type=int, default=2, help="probe one step in so many")
    parser.add_argument("--batch-size", type=int, default=32, help="a rank")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of SGD")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--png", type=Path, help="folder for plots and readings.jsonl")
    options = parser.parse_args()
    if options.png is not None:
        pyplot()  # fails before the training

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    train_x, train_y, test_x, test_y = (torch.from_numpy(x) for x in digits.load())
    train_x, test_x = train_x.permute(0, 3, 1, 2), test_x.permute(0, 3, 1, 2)
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9),
        model.named_parameters(),
        compression=hvd.NoneCompressor(),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    probe = Probe(model.named_parameters(), every=options.every)
    for epoch in range(options.epochs):
        for batch in digits.shard(
            len(train_y), options.batch_size, hvd.rank(), hvd.size(), options.seed + epoch
        ):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
            probe.step()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    if hvd.rank() == 0:
        print(f"accuracy {100 * accuracy:.2f} % after {probe.steps} steps\n{probe.table()}")
        if options.png is not None:
            options.png.mkdir(parents=True, exist_ok=True)
            probe.write(options.png / "readings.jsonl")
            plot(probe.readings, options.png)
            print(f"plots: {options.png}")
    hvd.shutdown()


def pyplot():
    """Return matplotlib's pyplot, or exit with how to install it."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--png needs matplotlib: pip install matplotlib, or leave the option out")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(readings: list[Reading], folder: Path) -> None:
    """Plot information and densities by step."""
    layers: dict[str, list[Reading]] = {}
    for reading in readings:
        layers.setdefault(reading.layer, []).append(reading)
    weights = {name: of_layer for name, of_layer in layers.items() if name.endswith("weight")}

    def picture(name: str, x: str, y: str, draw) -> None:
        figure, axes = pyplot().subplots(figsize=(6.4, 4.0), layout="constrained")
        draw(axes)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
        figure.savefig(folder / f"{name}.png", dpi=150)
        pyplot().close(figure)

    def information(axes) -> None:
        for place, (name, of_layer) in enumerate(weights.items()):
            steps, color = [r.step for r in of_layer], f"C{place}"
            axes.plot(steps, [r.entropy for r in of_layer], ":", color=color, linewidth=1)
            if of_layer[0].mutual_information is not None:
                shared = [r.mutual_information for r in of_layer]
                axes.plot(steps, shared, color=color, label=name, linewidth=1)
                axes.plot(steps, [r.chance for r in of_layer], "--", color=color, linewidth=0.6)

    def densities(axes) -> None:
        steps = sorted({r.step for r in readings})
        by_step: dict[int, list[Reading]] = {step: [] for step in steps}
        for reading in readings:
            by_step[reading.step].append(reading)
        total = sum(r.size for r in by_step[steps[0]])
        for label in ("variance", "egc", "dgc"):
            shares = [
                sum(r.size * getattr(r, f"density_{label}") for r in by_step[step]) / total
                for step in steps
            ]
            axes.plot(steps, shares, label=label)
        axes.set_yscale("log")

    bits = "bits: entropy (dotted), mutual information, by chance (dashed)"
    picture("information", "step", bits, information)
    picture("densities", "step", "share of elements to send", densities)


if __name__ == "__main__":
    main()
