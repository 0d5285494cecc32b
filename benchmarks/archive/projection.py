"""Measures the error of GradiVeQ's projection on real gradients, by cause.

    python -m benchmarks.archive.projection  # digits, the network of examples.pytorch.learned

Trains two ranks in one process without compression, so that bases are judged and not used. After
`--warmup` steps the mean gradient is sampled for `--samples` steps, and bases at `--ratio` are made
for each slice, and for each layer from slices in turn. Then, by age of the basis, the share of the
energy `||s - s'||^2 / ||s||^2` that is left out of all convolutions: of the ranks' mean gradient
with a basis for each slice, of the same with one basis a layer, and of one rank's own gradient with
one a layer. `samples` is the first of these on the samples themselves: what the dimension alone
makes it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from examples import digits
from examples.pytorch.learned import network
from hvd_gradcomp import GradiVeQCompressor
from hvd_gradcomp.algorithms.gradiveq import basis, projection
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Context
from hvd_gradcomp.ops.torch import TorchOps

RANKS = 2
AGES = (1, 10, 50, 100, 200, 400)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratio", type=float, default=8)
    parser.add_argument("--samples", type=int, default=25)
    parser.add_argument("--max-slice", type=int, default=1024)
    parser.add_argument("--warmup", type=int, nargs="*", default=[20, 200, 600])
    parser.add_argument("--batch-size", type=int, default=32, help="a rank")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    x, y, _, _ = (torch.from_numpy(a) for a in digits.load())
    x = x.permute(0, 3, 1, 2)
    ops, rows = TorchOps(), []
    for warmup in options.warmup:
        torch.manual_seed(1)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), options.learning_rate, momentum=0.9)
        layers = [(n, p) for n, p in model.named_parameters() if p.dim() > 2]
        layout = Layout(
            tuple(n for n, _ in layers), tuple(tuple(p.shape) for _, p in layers), block=1
        )
        kinds = {
            kind: GradiVeQCompressor(
                ratio=options.ratio,
                sample_steps=options.samples,
                max_slice=options.max_slice,
                reuse=reuse,
            )
            for kind, reuse in (("a slice", 1), ("a layer", None))
        }
        states = {kind: one.init(ops, layout) for kind, one in kinds.items()}
        generator = torch.Generator().manual_seed(2)

        def gradients(model=model, layers=layers, generator=generator) -> list[torch.Tensor]:
            """Return each rank's gradient; the model keeps their mean."""
            of_ranks, means = [], [torch.zeros_like(p) for p in model.parameters()]
            for _ in range(RANKS):
                batch = torch.randint(0, len(y), (options.batch_size,), generator=generator)
                model.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                of_ranks.append(torch.cat([p.grad.reshape(-1).clone() for _, p in layers]))
                for mean, p in zip(means, model.parameters()):
                    mean += p.grad / RANKS
            for mean, p in zip(means, model.parameters()):
                p.grad = mean
            return of_ranks

        def left_out(
            kind: str, gradient: torch.Tensor, kinds=kinds, states=states, layout=layout
        ) -> float:
            _, energy, lost = projection.encode(
                kinds[kind].slicing, ops, layout, gradient, states[kind]
            )
            return float(lost / energy)

        seen = []
        for step in range(warmup + options.samples + AGES[-1]):
            of_ranks = gradients()
            mean = sum(of_ranks) / RANKS
            age = step - warmup - options.samples + 1
            if 0 <= step - warmup < options.samples:
                seen.append(mean)
                for kind, one in kinds.items():
                    states[kind] = basis.recorded(
                        one.slicing, ops, layout, mean, step - warmup, states[kind]
                    )
            if age == 0:
                for kind, one in kinds.items():
                    program = basis.learned(
                        one.slicing, ops, Context(layout, 0, 1, 0), states[kind]
                    )
                    try:
                        program.send(next(program).tensor)
                    except StopIteration as stop:
                        states[kind] = stop.value
                again = sum(left_out("a slice", one) for one in seen) / options.samples
            if age in AGES:
                rows.append(
                    {
                        "trained": warmup,
                        "age": age,
                        "samples": again,
                        "mean, basis a slice": left_out("a slice", mean),
                        "mean, basis a layer": left_out("a layer", mean),
                        "one rank, basis a layer": left_out("a layer", of_ranks[0]),
                    }
                )
            optimizer.step()
    table = Table(title=f"Energy left out at ratio {options.ratio:g}, %")
    for head in rows[0]:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*(f"{v}" if isinstance(v, int) else f"{100 * v:.1f}" for v in row.values()))
    Console(width=110).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
