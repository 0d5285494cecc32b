"""The figures of the site: what each compressor sends of a gradient, and what stays.

    python -m docs.figures [FOLDER]
    python -m docs.figures docs/measured overview        # that of `which.md`

What a method does is not drawn by hand: `hvd_gradcomp.testing.World` runs the compressor, and the
figure shows its gradients, its result and its state. The overview is made of `docs/measured`. How
they look says `hvd_gradcomp.cli.style`: on white and on black.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch

from hvd_gradcomp import (
    DGCCompressor,
    EGCCompressor,
    FP16Compressor,
    GradientDroppingCompressor,
    GradiVeQCompressor,
    HybridCompressor,
    LGCCompressor,
    OneBitCompressor,
    QSGDCompressor,
    ScaleComCompressor,
    SparseGDCompressor,
    StromCompressor,
    TernGradCompressor,
    VarianceCompressor,
)
from hvd_gradcomp.cli import style
from hvd_gradcomp.codecs.principal_components import components
from hvd_gradcomp.core.collectives import Allreduce
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World

OPS = TorchOps()
MEASURED = Path(__file__).parent / "measured"
HELD, STAYS, SENT, LIMIT = "#a0a0a080", style.COLOURS[0], style.COLOURS[1], style.COLOURS[3]
ELEMENTS, SAMPLES, STEPS = 32, 16, 4


def sampled(seed: int, ranks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients and moments [step, rank, element]: few large means, noise from each sample."""
    random = np.random.default_rng(seed)
    mean = random.standard_t(2, ELEMENTS) * 0.12
    noise = random.uniform(0.1, 1.2, ELEMENTS)
    single = mean + noise * random.standard_normal((STEPS, ranks, SAMPLES, ELEMENTS))
    moments = np.square(single / SAMPLES).sum(2)
    return tuple(torch.tensor(x, dtype=torch.float32) for x in (single.mean(2), moments))


def one_bucket(compressor, ranks=1, shapes=((ELEMENTS,),)):
    """A world, how to lay a flat gradient into its bucket, and how to take it out again."""
    layout = Layout(tuple(f"layer{i}" for i in range(len(shapes))), tuple(shapes))
    world = World(compressor, OPS, layout, ranks)
    spans = [slice(at, at + size) for at, size in zip(layout.offsets, layout.sizes)]

    def lay(gradient):
        return world.flat(torch.split(gradient.reshape(-1), layout.sizes))

    def take(bucket):
        return torch.cat([bucket[span] for span in spans])

    return world, lay, take


def bars(axes, accumulated, sent, stays):
    """Draw what a rank held, what of it was sent, and what stays."""
    place = np.arange(len(accumulated))
    axes.bar(place, accumulated, color=HELD, width=0.9, label="held before")
    axes.bar(place, stays, color=STAYS, width=0.45, label="stays")
    here = np.flatnonzero(sent)
    axes.plot(place[here], sent[here], "o", color=SENT, markersize=5, label="sent")
    axes.axhline(0, color=style.INK, linewidth=0.6)


def finished(figure, path, handles=None):
    """One legend below all panels."""
    handles, labels = handles or figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def residual(compressor, path, limit=None, shapes=((ELEMENTS,),), seed=3):
    """Steps of one rank of a method that keeps a residual.

    Args:
        limit: of the moments so far, what an element has to exceed; drawn on both sides.
        shapes: of the layers. Gradients of the second one are a third as large.
    """
    gradients, moments = sampled(seed)
    border = shapes[0][0]
    gradients[..., border:] /= 3
    world, lay, take = one_bucket(compressor, shapes=shapes)
    figure, panels = pyplot.subplots(
        2, STEPS // 2, figsize=(7, 4.6), sharex=True, sharey=True, layout="constrained"
    )
    for step, axes in enumerate(panels.flat):
        memory = world.states[0].memory
        before, extra = take(memory.r), {}
        v = (take(memory.v) + moments[step, 0]).numpy() if hasattr(memory, "v") else None
        if v is not None:
            extra = {"moment": [lay(moments[step, 0])]}
        sent = take(world.step([lay(gradients[step, 0])], **extra)[0])
        after = take(world.states[0].memory.r)
        accumulated = before + gradients[step, 0]
        if hasattr(memory, "u"):  # a velocity was added, not the gradient; what was sent is all
            accumulated = torch.where(sent != 0, sent, after)
        bars(axes, accumulated.numpy(), sent.numpy(), after.numpy())
        if border < ELEMENTS:
            axes.axvline(border - 0.5, color=style.INK, linewidth=0.6, linestyle=":")
        if limit is not None:
            bound = np.broadcast_to(np.asarray(limit(v)), (ELEMENTS,))
            for side in (1, -1):
                label = "has to exceed" if side > 0 else None
                axes.step(
                    np.arange(ELEMENTS), side * bound, where="mid", color=LIMIT, lw=0.9, label=label
                )
        axes.set_title(f"step {step + 1}: {int((sent != 0).sum())} of {ELEMENTS} sent", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("element")
    for axes in panels[:, 0]:
        axes.set_ylabel("accumulated gradient")
    finished(figure, path)


def leader(compressor, path, seed=3):
    """ScaleCom: the places of one rank's largest elements, on all ranks."""
    gradients, _ = sampled(seed, ranks=2)
    world, lay, take = one_bucket(compressor, ranks=2)
    figure, panels = pyplot.subplots(
        2, STEPS, figsize=(10, 4.6), sharey=True, sharex=True, layout="constrained"
    )
    for step in range(STEPS):
        before = [take(state.memory.r) for state in world.states]
        world.step([lay(gradients[step, rank]) for rank in range(2)])
        for rank in range(2):
            accumulated = before[rank] + gradients[step, rank]
            after = take(world.states[rank].memory.r)
            axes = panels[rank, step]
            bars(axes, accumulated.numpy(), (accumulated - after).numpy(), after.numpy())
            says = "chooses" if step % 2 == rank else "follows"
            axes.set_title(f"step {step + 1}, rank {rank} {says}", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("element")
    for axes in panels[:, 0]:
        axes.set_ylabel("accumulated gradient")
    finished(figure, path)


def quantizer(compressor, path, repeats=200):
    """Draw what a gradient is decoded to, once and on average over many steps."""
    gradient = torch.tensor(np.random.default_rng(5).standard_normal(256), dtype=torch.float32)
    world, lay, take = one_bucket(compressor, shapes=((256,),))
    decoded = torch.stack([take(world.step([lay(gradient)])[0]) for _ in range(repeats)]).numpy()
    x = gradient.numpy()
    figure, panels = pyplot.subplots(1, 3, figsize=(10, 3.1), layout="constrained")
    for axes, y, title in (
        (panels[0], decoded[0], "one step"),
        (panels[1], decoded.mean(0), f"mean of {repeats} steps"),
    ):
        axes.plot(x, x, color=HELD, linewidth=3, label="as it was")
        axes.plot(x, y, "o", color=SENT, markersize=3, label="decoded")
        axes.set_xlabel("element of the gradient")
        axes.set_title(title, fontsize=9)
    panels[0].set_ylabel("decoded")
    steps = np.arange(1, repeats + 1)
    error = np.linalg.norm(np.cumsum(decoded, 0) - steps[:, None] * x, axis=1)
    panels[2].plot(steps, error / (steps * np.linalg.norm(x)), color=STAYS)
    panels[2].set_xscale("log")
    panels[2].set_yscale("log")
    panels[2].set_title("relative error of the sum of steps", fontsize=9)
    panels[2].set_xlabel("steps")
    finished(figure, path)


def half_precision(path):
    """FP16: what rounding takes, by magnitude."""
    gradient = torch.logspace(-9, 4.8, 400)  # up to 63096
    world = World(FP16Compressor(), OPS, Layout(("layer",), ((400,),), block=1), 1)
    error = (world.step([gradient])[0] - gradient).abs() / gradient
    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    axes.plot(gradient, error.clamp(min=1e-6), color=SENT)
    axes.axvspan(65504, 2e5, color=HELD)
    axes.text(8e4, 2e-6, "too large", rotation=90)
    axes.set(xscale="log", yscale="log", xlabel="magnitude of an element", ylabel="relative error")
    finished(figure, path)


def digits_gradients(steps, shard=0, ranks=1):
    """Gradients of two layers of a small network that learns digits: a convolution, a matrix."""
    from sklearn.datasets import load_digits
    from torch import nn

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    labels = torch.tensor(labels)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    taken = []
    for step in range(steps):
        batches = torch.randint(
            len(labels), (ranks, 32), generator=torch.Generator().manual_seed(step)
        )
        each = []
        for batch in batches:
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            parameters = list(model.parameters())
            each.append(torch.autograd.grad(loss, parameters))
        for p, *gradients in zip(model.parameters(), *each):
            p.grad = torch.stack(gradients).mean(0)
        optimizer.step()
        taken.append([(g[2], g[4]) for g in each])
    return taken  # [step][rank] = (convolution [16, 16, 3, 3], matrix [64, 256])


def projection(path):
    """GradiVeQ: energy of the components, one slice and what its coefficients give back."""
    samples, compressed = 40, 60
    compressor = GradiVeQCompressor(
        ratio=8, max_slice=256, warmup_steps=20, sample_steps=samples, compress_steps=compressed
    )
    gradients = [ranks[0][0] for ranks in digits_gradients(20 + samples + compressed)]
    shape = tuple(gradients[0].shape)
    world, lay, take = one_bucket(compressor, shapes=(shape,))
    losses, back = [], None
    for step, gradient in enumerate(gradients):
        back = take(world.step([lay(gradient)])[0])
        if step >= 20 + samples:
            missing = (back - gradient.reshape(-1)).square().sum() / gradient.square().sum()
            losses.append(float(missing))
    order = (2, 3, 1, 0)  # depth and filters of one place of the kernel are one slice
    slices = torch.stack([g.permute(order).reshape(9, -1)[0] for g in gradients[20 : 20 + samples]])
    energy = components(OPS, slices).energy.flip(0).numpy()
    d = compressor.slicing.slices_of(shape, filters_last=False).max_dimensions
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(10, 3.1), layout="constrained")
    left.plot(np.arange(1, len(energy) + 1), 100 * np.cumsum(energy) / energy.sum(), color=STAYS)
    left.axvline(d, color=SENT, linewidth=1)
    left.set_title(f"energy that components of {slices.shape[1]} elements hold", fontsize=9)
    left.set(xlabel=f"components ({d} coefficients travel)", ylabel="%")
    was = gradients[-1].permute(order).reshape(9, -1)[0][:64]
    got = back.reshape(shape).permute(order).reshape(9, -1)[0][:64]
    middle.plot(was, color=HELD, linewidth=3, label="slice of the gradient")
    middle.plot(got, color=SENT, linewidth=1, label="from its coefficients")
    middle.set_title(f"{compressed} steps after the samples", fontsize=9)
    middle.set_xlabel("element of the slice")
    right.plot(np.arange(1, len(losses) + 1), 100 * np.asarray(losses), color=STAYS)
    right.set_title("energy left out, of the whole layer", fontsize=9)
    right.set(xlabel="age of the basis, steps", ylabel="%", ylim=(0, None))
    finished(figure, path, middle.get_legend_handles_labels())


def autoencoder(path):
    """LGC by the ring: selected values of two ranks, the code, and what all decode."""
    train, rest = 250, 5
    compressor = LGCCompressor(
        alpha=0.02, full_steps=20, train_steps=train, momentum=0.0, first_layer=(), last_layer=()
    )
    gradients = [[g[1] for g in ranks] for ranks in digits_gradients(20 + train + rest, ranks=2)]
    world, lay, take = one_bucket(compressor, ranks=2, shapes=(tuple(gradients[0][0].shape),))
    losses = []
    for step, each in enumerate(gradients):
        residuals = [state.memory.r.clone() for state in world.states]
        result = take(world.step([lay(g) for g in each])[0])
        if 20 <= step < 20 + train:
            losses += [*compressor.report(world.layout, world.states[0], step + 1).losses.values()]
    index = result.nonzero()[:, 0]
    mean = sum(take(r) + g.reshape(-1) for r, g in zip(residuals, gradients[-1]))[index] / 2
    (code, *_) = [r[0].tensor for r in world.traffic if isinstance(r[0], Allreduce)]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(10, 3.1), layout="constrained")
    left.plot(np.arange(1, len(losses) + 1), losses, color=STAYS)
    left.set_title("energy that the autoencoder misses, in training", fontsize=9)
    left.set(xlabel="step of its training", ylabel="share", ylim=(0, None))
    middle.plot(code.reshape(-1)[:-2], ".", color=LIMIT, markersize=3)
    middle.set_title(f"the code of rank 0: {code.numel() - 2} numbers", fontsize=9)
    middle.set_xlabel("element of the code")
    part = slice(0, 48)
    right.plot(mean[part], color=HELD, linewidth=3, label="selected, mean of the ranks")
    right.plot(result[index][part], color=SENT, linewidth=1, label="decoded from the sum of codes")
    right.set_title(f"the first 48 of {len(index)} selected values", fontsize=9)
    right.set_xlabel("element selected")
    finished(figure, path, right.get_legend_handles_labels())


def hierarchy(path):
    """Four ranks on two hosts: a dense mean in each host, a compressed exchange between them."""
    gradients, _ = sampled(3, ranks=4)
    compressor = SparseGDCompressor(density=0.125)
    world, lay, take = one_bucket(compressor, ranks=2)
    inside = gradients[0].reshape(2, 2, ELEMENTS).mean(1)  # what Horovod does in each host
    result = take(world.step([lay(x) for x in inside])[0])
    figure, panels = pyplot.subplots(2, 3, figsize=(10, 4.4), sharey=True, layout="constrained")
    for host in range(2):
        for rank in range(2):
            panels[host, 0].plot(
                gradients[0, 2 * host + rank],
                ".-",
                linewidth=0.6,
                color=(STAYS, LIMIT)[rank],
                label=f"rank {rank} of the host",
            )
        panels[host, 0].set_title(f"host {host}: its ranks' gradients", fontsize=9)
        stays = take(world.states[host].memory.r)
        bars(panels[host, 1], inside[host].numpy(), (inside[host] - stays).numpy(), stays.numpy())
        panels[host, 1].set_title(f"host {host}: the mean, what leaves it, what stays", fontsize=9)
        panels[host, 2].bar(np.arange(ELEMENTS), result.numpy(), color=SENT)
        panels[host, 2].set_title(f"host {host}: what all its ranks get", fontsize=9)
    entries = [panels[0, i].get_legend_handles_labels() for i in (0, 1)]
    finished(figure, path, [first + second for first, second in zip(*entries)])


def measured(name):
    return json.loads((MEASURED / name).read_text())


def overview(path, width=7):
    """Draw accuracy by bytes, as measured: a line for each method, labelled at its end."""
    figure, axes = pyplot.subplots(figsize=(width, 3.8), layout="constrained")
    shown = {  # (part, row without compression): rows
        ("gradiveq", "none"): {"qsgd": "QSGD, 4 bits"},
        ("variance", "adam/none"): {
            "adam/variance-1": "Variance, Adam",
            "adam/variance-2": "Variance, Adam",
            "adam/hybrid-0.1": "Hybrid, Adam",
        },
        ("lgc", "none-2"): {"exponential": "DGC", "fixed": "DGC"},
        ("egc", "none-2"): {"dropping-2": "Gradient Dropping", "k-256": "EGC", "egc-2": "EGC"},
    }
    methods = dict.fromkeys(name for rows in shown.values() for name in rows.values())
    looks = dict(zip(methods, style.lines(len(methods))))
    for (part, base), rows in shown.items():
        results = {row["key"]: row["result"] for row in measured(f"papers/{part}.json")["rows"]}
        for name in dict.fromkeys(rows.values()):
            points = sorted(
                (results[key]["ratio"], results[key]["score"] - results[base]["score"])
                for key, method in rows.items()
                if method == name
            )
            axes.plot(*zip(*points), **looks[name])
            axes.annotate(
                name,
                points[-1],
                (6, 0),
                textcoords="offset points",
                va="top" if name == "DGC" else "bottom" if name == "EGC" else "center",
                fontsize=8,
                color=looks[name]["color"],
            )
    axes.axhline(0, color=style.INK, linewidth=1)
    axes.set(xscale="log", xlabel="times fewer bytes", ylabel="points of accuracy, beside none")
    axes.set_xlim(right=1e4)  # space for the labels
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def architecture(path):
    """Draw the way of a gradient through the floors of the package; imports go down only."""
    floors = [
        ("frontends", "torch/  tensorflow/  tensorflow/keras/", "optimizers, tapes, callbacks"),
        ("planning", "planning/  checkpoint/", "who compresses what, and files"),
        ("runtime", "runtime/, over Horovod or torch.distributed", "steps programs, by transports"),
        ("monitoring", "monitoring/", "what was moved; equal replicas"),
        ("algorithms", "algorithms/: folders by what travels", "programs that yield collectives"),
        ("codecs", "codecs/: threshold, topk, quantized, linear", "what to send, and what stays"),
        ("core", "method/: Compressor, patterns, wire", "how payloads meet, checked bytes"),
        ("operations", "ops/: PyTorch, TensorFlow, C, Triton", "what is done to a tensor"),
        ("values", "core/: layout, layers, collectives", "values that know no tensor"),
    ]
    figure, axes = pyplot.subplots(figsize=(7, 5.6), layout="constrained")
    axes.set(xlim=(-1.7, 10), ylim=(len(floors), -0.1))
    axes.axis("off")
    for place, (name, what, says) in enumerate(floors):
        colour = style.COLOURS[place % len(style.COLOURS)]
        axes.add_patch(
            FancyBboxPatch(
                (0, place + 0.1),
                9.9,
                0.7,
                boxstyle="round,pad=0,rounding_size=0.1",
                facecolor=f"{colour}28",
                edgecolor=colour,
            )
        )
        axes.text(0.2, place + 0.36, name, fontweight="bold", va="center")
        axes.text(0.2, place + 0.62, what, fontsize=8, va="center")
        axes.text(9.7, place + 0.62, says, fontsize=8, va="center", ha="right")
    end = len(floors) - 0.2
    for x, start, stop, text in (
        (-1.2, 0.1, end, "a gradient"),
        (-0.4, end, 0.1, "the sum over ranks"),
    ):
        how = {"arrowstyle": "->", "color": style.INK}
        axes.annotate("", (x, stop), (x, start), arrowprops=how)
        axes.text(x - 0.12, end / 2, text, rotation=90, fontsize=8, va="center", ha="right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def draw(folder: Path, *names: str) -> list[Path]:
    """All figures, or those of some names; returns their paths."""
    torch.set_num_threads(1)
    logging.getLogger("hvd_gradcomp").setLevel(logging.ERROR)
    pyplot.rcParams.update({**style.SETTINGS, "svg.hashsalt": "gradcomp"})
    folder.mkdir(parents=True, exist_ok=True)
    density, halves = 0.125, ((ELEMENTS // 2,),) * 2
    figures = {
        "half-precision": half_precision,
        "variance": lambda p: residual(VarianceCompressor(alpha=2), p, lambda v: np.sqrt(2 * v)),
        "hybrid": lambda p: residual(
            HybridCompressor(tau=0.3, alpha=2), p, lambda v: np.maximum(0.3, np.sqrt(2 * v))
        ),
        "strom": lambda p: residual(StromCompressor(tau=0.3), p, lambda v: 0.3),
        "sparse-gd": lambda p: residual(SparseGDCompressor(density=density), p, shapes=halves),
        "gradient-dropping": lambda p: residual(
            GradientDroppingCompressor(1 - density), p, shapes=halves
        ),
        "dgc": lambda p: residual(DGCCompressor(density=density, momentum=0.9), p),
        "egc": lambda p: residual(
            EGCCompressor(K=12, bins=8, momentum=0.9, entropy_interval=1), p, shapes=halves
        ),
        "scalecom": lambda p: leader(ScaleComCompressor(density=density), p),
        "qsgd": lambda p: quantizer(QSGDCompressor(bits=4), p),
        "terngrad": lambda p: quantizer(TernGradCompressor(), p),
        "onebit": lambda p: quantizer(OneBitCompressor(), p),
        "gradiveq": projection,
        "lgc": autoencoder,
        "hierarchy": hierarchy,
        "overview": overview,
        "overview-narrow": lambda p: overview(p, width=4.4),  # for a phone
        "architecture": architecture,
    }
    paths = {name: folder / f"{name}.svg" for name in names or figures}
    for name, path in paths.items():
        figures[name](path)
    return list(paths.values())


if __name__ == "__main__":
    for drawn in draw(Path(*sys.argv[1:2] or ["docs/generated"]), *sys.argv[2:]):
        print(drawn)
