"""Measures the energy that GradiVeQ leaves out of real gradients, and what its bases cost.

    python -m benchmarks.projection --json docs/measured/projection.json
    python -m benchmarks.projection --parts digits layers --json docs/measured/projection.json
    python -m benchmarks.projection --before OTHER --json docs/measured/projection.json
    python -m benchmarks.projection --show docs/measured/projection.json    # into its page

Two ranks of 32 images train in one process, without compression: bases are judged and not used. All
settings (`max_slice`, `sample_steps`) make their bases after the same step, from the mean gradients
of the last `sample_steps`; the convolutions of later steps are projected at a ratio of 8. What a
basis leaves out is `||s - s'||^2 / ||s||^2` of all convolutions together, the median over ten of
the 50 steps up to an age: of the mean gradient, which all ranks decode, and of one rank's own,
which `compression_stats` reports. Times are of one core: encode and decode of a step, and all bases
of a cycle once. State is what a rank keeps of all convolutions: bases, and their samples.

With `--before` only the defaults of another checkout are measured, by this script.

Last come single layers of VGG-16 with noise for gradients: what a basis takes where a block of
filters by depth has up to 16,384 elements.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.papers import data
from benchmarks.papers.models import vgg
from examples import digits
from examples.pytorch.learned import network, resnet
from hvd_gradcomp import GradiVeQCompressor
from hvd_gradcomp.algorithms.gradiveq import basis, projection
from hvd_gradcomp.algorithms.gradiveq.state import GradiVeQState
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps

RANKS, BATCH, RATIO = 2, 32, 8
AGES = {"young": range(5, 51, 5), "old": range(355, 401, 5)}  # of a basis, in steps
DEFAULT, BEFORE = "default", "default before"
SETTINGS: dict[str, dict[str, int]] = {
    DEFAULT: {},
    **{
        f"{longest:,} elements, {steps} steps": {"max_slice": longest, "sample_steps": steps}
        for longest, steps in ((1024, 100), (4096, 25), (4096, 50), (4096, 200), (16384, 100))
    },
}
LAYERS = (  # of VGG-16
    ((64, 64, 3, 3), {}),
    ((128, 128, 3, 3), {}),
    ((128, 128, 3, 3), {"max_slice": 16384, "sample_steps": 300}),
    ((512, 512, 3, 3), {}),
)
PAGE = Path("docs/algorithms/gradiveq.md")  # from the root of a checkout
BEGIN, END = "<!-- tables of benchmarks.projection -->", "<!-- end of these tables -->"
Row = dict[str, Any]


class Training(NamedTuple):
    """Network and its data."""

    model: nn.Module
    images: torch.Tensor
    labels: torch.Tensor
    rate: float
    decay: float


def on_digits() -> Training:
    images, labels, _, _ = (torch.from_numpy(array) for array in digits.load())
    return Training(network(), images.permute(0, 3, 1, 2), labels, 0.02, 0.0)


def on_clothes(model: nn.Module) -> Training:
    data.install(None, data.FILES)
    return Training(model, *data.images(None, "train", 0, 50_000), 0.05, 5e-4)


def gray_resnet() -> nn.Module:
    model = resnet(32)
    model[0] = nn.Conv2d(1, 16, 3, padding=1, bias=False)
    return model


NETWORKS: dict[str, tuple[str, Callable[[], Training]]] = {
    "digits": ("digits, 1 million parameters", on_digits),
    "clothes": ("clothes, VGG of the papers' page", lambda: on_clothes(vgg())),
    "resnet": ("clothes, ResNet-32", lambda: on_clothes(gray_resnet())),
}


class Bases:
    """Bases of all convolutions in one setting; each layer is a bucket of its own."""

    def __init__(self, options: dict[str, int], layouts: Sequence[Layout]) -> None:
        self.compressor = GradiVeQCompressor(ratio=RATIO, **options)
        self.ops, self.layouts = TorchOps(), layouts
        self.states: list[GradiVeQState] = [self.compressor.init(self.ops, x) for x in layouts]
        self.seconds = 0.0

    def record(self, gradients: Sequence[torch.Tensor], step: int) -> None:
        """Record samples; `step` counts from the first step of sampling, and may be below 0."""
        if step < 0:
            return
        slicing = self.compressor.slicing
        self.states = [
            basis.recorded(slicing, self.ops, layout, gradient, step, state)
            for layout, gradient, state in zip(self.layouts, gradients, self.states)
        ]

    def learn(self) -> None:
        start = time.process_time()
        slicing = self.compressor.slicing
        self.states = [
            basis.computed(slicing, self.ops, layout, state)
            for layout, state in zip(self.layouts, self.states)
        ]
        self.seconds = time.process_time() - start

    def energies(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return [layers, 2]: the energy of each layer, and what of it is left out."""
        pairs = []
        for layout, gradient, state in zip(self.layouts, gradients, self.states):
            slicing = self.compressor.slicing
            _, energy, lost = projection.encode(slicing, self.ops, layout, gradient, state)
            pairs.append(torch.stack((energy, lost)))
        return torch.stack(pairs).double()

    def step_ms(self, gradients: Sequence[torch.Tensor], rounds: int = 5) -> float:
        """Return the processor's time to encode and decode a step."""
        slicing, times = self.compressor.slicing, []
        for _ in range(rounds):
            start = time.process_time()
            for layout, gradient, state in zip(self.layouts, gradients, self.states):
                code, _, _ = projection.encode(slicing, self.ops, layout, gradient, state)
                projection.decode(slicing, self.ops, layout, code, state)
            times.append(time.process_time() - start)
        return 1e3 * statistics.median(times)

    def costs(self) -> Row:
        slicing = self.compressor.slicing
        tensors = [t for s in self.states for t in (s.samples, s.basis, s.offset)]
        return {
            "state_mb": sum(4 * t.numel() for t in tensors) / 1e6,
            "broadcast_mb": sum(slicing.basis_bytes(layout) for layout in self.layouts) / 1e6,
            "learn_s": self.seconds,
            "longest": max(cut.length for x in self.layouts for cut in slicing.slices(x)),
        }


def steps_of(training: Training, seed: int) -> Iterator[tuple[list[torch.Tensor], ...]]:
    """Yield of each step the convolutions' mean gradients, and those of the first rank."""
    model, images, labels, rate, decay = training
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=decay)
    generator = torch.Generator().manual_seed(seed)
    while True:
        ranks = []
        for _ in range(RANKS):
            batch = torch.randint(0, len(labels), (BATCH,), generator=generator)
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            ranks.append(torch.autograd.grad(loss, [*model.parameters()]))
        for parameter, *gradients in zip(model.parameters(), *ranks):
            parameter.grad = torch.stack(gradients).mean(0)
        means = [p.grad.reshape(-1) for p in model.parameters() if p.grad.dim() > 2]
        yield means, [g.reshape(-1) for g in ranks[0] if g.dim() > 2]
        optimizer.step()


def measured(name: str, warmup: int, seed: int, settings: dict[str, dict[str, int]]) -> Row:
    """Return what each setting leaves out and costs in one training."""
    torch.manual_seed(seed)
    training = NETWORKS[name][1]()
    layers = [(n, p) for n, p in training.model.named_parameters() if p.dim() > 2]
    layouts = [Layout((n,), (tuple(p.shape),), block=1) for n, p in layers]
    every = {title: Bases(options, layouts) for title, options in settings.items()}
    samples = max(200, *(bases.compressor.sample_steps for bases in every.values()))
    rows: dict[str, Row] = {title: {} for title in every}
    looks: dict[tuple[str, str], list[torch.Tensor]] = {}
    for step, (means, of_first) in enumerate(steps_of(training, seed)):
        age = step - warmup - samples + 1
        if age > max(max(ages) for ages in AGES.values()):
            break
        for title, bases in every.items():
            if step >= warmup and age <= 0:
                bases.record(means, age - 1 + bases.compressor.sample_steps)
            if age == 0:
                bases.learn()
                rows[title] = bases.costs() | {"step_ms": bases.step_ms(means)}
            for when, ages in AGES.items():
                if age in ages:
                    looks.setdefault((title, when), []).append(bases.energies(means))
                    looks.setdefault((title, f"{when}, own"), []).append(bases.energies(of_first))
    for (title, when), energies in looks.items():
        of_layers = torch.stack(energies)  # [looks, layers, 2]
        total = of_layers.sum(1)
        rows[title][when] = float((total[:, 1] / total[:, 0]).median())
        if when == "young":
            each = (of_layers[..., 1] / of_layers[..., 0]).median(0).values.tolist()
            rows[title]["layers"] = [[n, list(p.shape), lost] for (n, p), lost in zip(layers, each)]
    return {"network": name, "made_after": warmup + samples, "seed": seed, "rows": rows}


def costs_of(shape: tuple[int, ...], options: dict[str, int]) -> Row:
    """Return what the basis of one layer takes, from samples that are noise."""
    bases = Bases(options, [Layout(("layer",), (shape,), block=1)])
    (layout,), (state,) = bases.layouts, bases.states
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(state.samples.shape[0], generator=generator)
    bases.states = [state._replace(samples=noise)]
    bases.learn()
    (cut,) = bases.compressor.slicing.slices(layout)
    samples = cut.rows * bases.compressor.sample_steps
    gradient = torch.randn(layout.size, generator=generator)
    return {
        "shape": list(shape),
        "options": options,
        "length": cut.length,
        "dimensions": cut.max_dimensions,
        "bases": cut.groups,
        "samples": samples,
        "step_ms": bases.step_ms([gradient]),
        **bases.costs(),
    }


def tables(result: dict[str, list[Row]]) -> str:
    """Return the tables of all networks and of single layers, in Markdown."""
    parts = [_of_network(run) for run in result["networks"]]
    if result["layers"]:
        parts.append(_of_layers(result["layers"]))
    return "\n".join(parts)


def _of_network(run: Row) -> str:
    heads = ["setting", "longest slice", "left out, to 50 steps", "to 400", "one rank's, to 50"]
    heads += ["state, MB", "bases, MB", "making them, s", "encode and decode, ms"]
    cells = [
        [name, f"{row['longest']:,}"]
        + [f"{row[key]:.2f}" for key in ("young", "old", "young, own")]
        + [f"{row['state_mb']:.1f}", f"{row['broadcast_mb']:.1f}"]
        + [f"{row['learn_s']:.2f}", f"{row['step_ms']:.1f}"]
        for name, row in run["rows"].items()
    ]
    title = NETWORKS[run["network"]][0]
    head = f"**{title[0].upper()}{title[1:]}**, bases made after {run['made_after']} steps:"
    return f"{head}\n\n{_markdown(heads, cells)}"


def _of_layers(rows: Sequence[Row]) -> str:
    heads = ["layer", "setting", "slice", "bases", "d", "samples of each", "state, MB"]
    heads += ["making them, s", "encode and decode, ms"]
    cells = []
    for row in rows:
        setting = ", ".join(f"`{name}={value}`" for name, value in row["options"].items())
        cells.append([str(row["shape"]), setting or DEFAULT, f"{row['length']:,}"])
        cells[-1] += [f"{row[key]:,}" for key in ("bases", "dimensions", "samples")]
        cells[-1] += [f"{row['state_mb']:.1f}", f"{row['learn_s']:.2f}", f"{row['step_ms']:.1f}"]
    return _markdown(heads, cells)


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def with_tables(page: str, result: dict[str, list[Row]]) -> str:
    """Return the text of a page with the tables of a result between its marks."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{tables(result)}\n{END}{rest.partition(END)[2]}"


def _keep(path: Path, result: dict[str, list[Row]]) -> None:
    """Write a part's result beside those of the other parts."""
    kept = json.loads(path.read_text()) if path.exists() else {"networks": [], "layers": []}
    networks = {run["network"]: run for run in kept["networks"]}
    for run in result["networks"]:
        older = networks.get(run["network"], {"rows": {}})["rows"]
        rows = {**older, **run["rows"]}
        order = [DEFAULT, BEFORE, *SETTINGS]
        run["rows"] = {title: rows[title] for title in dict.fromkeys(order) if title in rows}
        networks[run["network"]] = run
    kept["networks"] = [networks[name] for name in NETWORKS if name in networks]
    kept["layers"] = result["layers"] or kept["layers"]
    path.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.projection", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parts = [*NETWORKS, "layers"]
    parser.add_argument("--parts", nargs="*", default=parts, choices=parts)
    parser.add_argument("--settings", nargs="*", default=[*SETTINGS], choices=[*SETTINGS])
    parser.add_argument("--title", help=argparse.SUPPRESS)  # of the only setting
    parser.add_argument("--warmup", type=int, default=200, help="steps before all that samples")
    parser.add_argument("--before", type=Path, help="another checkout, with its kernels built")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where the result goes; other parts there stay")
    parser.add_argument("--show", type=Path, help="write a result into the page, measure nothing")
    options = parser.parse_args()
    if options.show:
        result = json.loads(options.show.read_text())
        PAGE.write_text(with_tables(PAGE.read_text(), result))
        print(tables(result))
        return
    if options.before:
        folder = options.before.resolve()
        words = [sys.executable, __file__, "--settings", DEFAULT, "--title", BEFORE]
        words += ["--parts", *(part for part in options.parts if part in NETWORKS)]
        words += ["--warmup", str(options.warmup), "--seed", str(options.seed)]
        words += ["--json", str(options.json.resolve())] if options.json else []
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        sys.exit(subprocess.run(words, cwd=folder, env=environment).returncode)
    torch.set_num_threads(1)
    settings = {title: SETTINGS[title] for title in options.settings}
    for part in options.parts:
        if part == "layers":
            result = {"networks": [], "layers": [costs_of(*layer) for layer in LAYERS]}
        else:
            run = measured(part, options.warmup, options.seed, settings)
            run["rows"] = {options.title or title: row for title, row in run["rows"].items()}
            result = {"networks": [run], "layers": []}
        print(tables(result), flush=True)
        if options.json:
            _keep(options.json, result)


if __name__ == "__main__":
    main()
