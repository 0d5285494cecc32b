"""Watches of gradients while a row trains; each result is the same on all ranks.

A watch may take a gradient of its own before a step: what is in `p.grad` after backward is the mean
over ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from benchmarks.papers import information
from benchmarks.papers.principal_components import compression_loss, energy
from hvd_gradcomp.core.layers import convolves
from hvd_gradcomp.ops.torch import TorchOps

OPS = TorchOps()
Loss = Callable[[], torch.Tensor]


class Watch(ABC):
    """Looks at some steps of a model's training."""

    looks = 20

    def __init__(self, model: nn.Module, steps: int) -> None:
        self.model, self.every = model, max(1, steps // self.looks)
        self.weights = {name: p for name, p in model.named_parameters() if p.dim() > 1}

    def before(self, step: int, loss: Loss) -> None:
        """Before the step's backward; most look at nothing there."""
        return None

    def after(self, step: int) -> None:
        """After its backward, before the optimizer; some look at nothing there."""
        return None

    @abstractmethod
    def result(self) -> Any:
        """Return the findings, for JSON."""

    def gradients(self, loss: Loss) -> dict[str, torch.Tensor]:
        """This rank's gradients of weights, flat."""
        gradients_ = torch.autograd.grad(loss(), list(self.weights.values()))
        return {name: g.reshape(-1) for name, g in zip(self.weights, gradients_)}


class Information(Watch):
    """Entropy, and mutual information of two ranks' gradients, by how finely they are quantized.

    The probe has the figures of its bins. Abrahamyan et al. (2021, section III) quantize to 2**32
    levels, and there nearly every element has a level to itself, whatever the gradients have in
    common: so the same is computed for several numbers of levels, and once more after the second
    rank's elements changed places.
    """

    levels = (4, 8, 16, 32)  # bits of the quantizer
    sample = 4096

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__(model, steps)
        self.probe = hvd.Probe(model.named_parameters(), every=self.every, corrected=True)
        self.rows: dict[int, list[tuple[float, float, float]]] = {b: [] for b in self.levels}

    def before(self, step: int, loss: Loss) -> None:
        if step % self.every:
            return
        random = np.random.default_rng(step)
        for gradient in self.gradients(loss).values():
            sample = gradient[:: max(1, len(gradient) // self.sample)].double()
            x, y = hvd.allgather(sample[None], name="papers.pair")[:2].numpy()
            for bits in self.levels:
                a, b = _leveled(x, bits), _leveled(y, bits)
                mixed = b[random.permutation(len(b))]
                self.rows[bits].append((_bits(b), _shared(a, b), _shared(a, mixed)))

    def after(self, step: int) -> None:
        self.probe.step()

    def result(self) -> Any:
        last = [r for r in self.probe.readings if r.layer in self.weights]
        binned = [(r.step, r.layer, r.entropy, r.mutual_information, r.chance) for r in last]
        means = {bits: np.mean(rows, 0).tolist() for bits, rows in self.rows.items()}
        return {"levels": [[bits, *means[bits]] for bits in self.levels], "probe": binned}


class Entropy(Watch):
    """The entropy of each weight's gradient by the number of bins (Kuang et al. 2019, Figure 2)."""

    bins = (2, 4, 8, 16, 32, 64)

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__(model, steps)
        self.rows: list[list[float]] = []

    def before(self, step: int, loss: Loss) -> None:
        if step % self.every == 0:
            gradients = [*self.gradients(loss).values()]
            sizes = torch.tensor([float(len(g)) for g in gradients])
            row = []
            for bins in self.bins:
                bits = torch.tensor([information.entropy(OPS, g, bins) for g in gradients])
                row.append(float((bits * sizes).sum() / sizes.sum()))
            self.rows.append(row)

    def result(self) -> Any:
        means_here = torch.tensor(self.rows, dtype=torch.float64).mean(0)
        means = hvd.allreduce(means_here, name="papers.entropy").tolist()
        return [[bins, bits] for bins, bits in zip(self.bins, means)]


class Slices(Watch):
    """Principal components of convolutions' gradients (Yu et al. 2018, Figures 4, 5).

    Of each slice length the basis of a layer's first slice, an eighth of the length in dimensions,
    is applied to its other slices, in the steps that it was made of. How a basis ages is seen in
    the first slices of three layers, in `window` of the steps that are looked at: it is fitted to
    the older half of them, and applied to the newer half.
    """

    steps, longest, ratio = 160, 1024, 8
    window, length = 60, 256

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__(model, steps)
        self.first = max(0, steps - self.steps)
        self.kept: dict[str, list[torch.Tensor]] = {
            name: [] for name, p in self.weights.items() if convolves((name, tuple(p.shape), ""))
        }
        self.every = max(1, steps // 100)
        able = [name for name in self.kept if self.weights[name].numel() >= 2 * self.length]
        few = min(3, len(able))
        chosen = {able[i * (len(able) - 1) // max(few - 1, 1)] for i in range(few)}
        self.aging: dict[str, list[tuple[int, torch.Tensor]]] = {name: [] for name in chosen}

    def after(self, step: int) -> None:
        for name, rows in self.aging.items():
            if step % self.every == 0:
                rows.append((step, self.slices(name)[: self.length].clone()))
        if step >= self.first:
            for name, kept in self.kept.items():
                kept.append(self.slices(name))

    def slices(self, name: str) -> torch.Tensor:
        """A layer's mean gradient in GradiVeQ's order: filters, then depth, then positions."""
        return self.weights[name].grad.permute(2, 3, 1, 0).reshape(-1).clone()

    def result(self) -> Any:
        layers = []
        for name, rows in self.kept.items():
            filters, depth = self.weights[name].shape[:2]
            block, recorded = filters * depth, torch.stack(rows)
            lengths = {block * i // 4 for i in range(1, 17)} | {64 << i for i in range(6)}
            limit = min(self.longest, recorded.shape[1] // 2, self.ratio * (len(rows) - 1))
            curve = [
                [m, _loss(recorded, m, m // self.ratio)] for m in sorted(lengths) if m <= limit
            ]
            if curve and depth > 1:
                shares = [
                    [m, energy(OPS, recorded[:, :m])[max(m // self.ratio, 1) - 1]] for m, _ in curve
                ]
                layer = {"layer": name, "filters x depth": block, "curve": curve}
                layers.append(layer | {"energy": shares})
        ages: dict[int, list[float]] = {}
        for looks in self.aging.values():
            for age, loss in aged(looks, self.window, self.ratio):
                ages.setdefault(age, []).append(loss)
        means = [[age, sum(losses) / len(losses)] for age, losses in sorted(ages.items())]
        return {"slices": layers, "ages": means}


def aged(
    looks: list[tuple[int, torch.Tensor]], window: int, ratio: int, least: int = 8
) -> Iterator[tuple[int, float]]:
    """(age in steps, loss) of bases; each is fitted to the older half of a window of looks.

    Args:
        looks: steps and their slices.
        window: looks in a window; with fewer than `least` there is nothing to say.
        ratio: elements of a slice by those that the basis keeps.
    """
    window = min(window, len(looks))
    half = window // 2
    for start in range(len(looks) - window + 1 if window >= least else 0):
        steps, rows = zip(*looks[start : start + window])
        recorded = torch.stack(rows)
        dimension = max(recorded.shape[1] // ratio, 1)
        losses = compression_loss(OPS, recorded[:half], recorded[half:], dimension)
        for step, loss in zip(steps[half:], losses):
            if math.isfinite(loss):
                yield step - steps[half - 1], loss


WATCHES: dict[str, Any] = {"information": Information, "entropy": Entropy, "slices": Slices}


def _leveled(x: np.ndarray, bits: int) -> np.ndarray:
    """Levels of the uniform quantizer over the range of x; int64."""
    low, high = x.min(), x.max()
    if high == low:
        return np.zeros(len(x), np.int64)
    return np.minimum((x - low) / (high - low) * 2.0**bits, 2.0**bits - 1).astype(np.int64)


def _bits(x: np.ndarray) -> float:
    """Entropy of the histogram of whole numbers, or of rows of them."""
    counts = np.unique(x, return_counts=True, axis=0)[1] / len(x)
    return float(-(counts * np.log2(counts)).sum())


def _shared(x: np.ndarray, y: np.ndarray) -> float:
    return _bits(x) + _bits(y) - _bits(np.stack((x, y), 1))


def _loss(recorded: torch.Tensor, length: int, dimensions: int) -> float:
    """Share of the other slices' energy that the first one's basis leaves out."""
    slices = recorded.shape[1] // length
    cut = recorded[:, : slices * length].view(len(recorded), slices, length)
    mean = cut[:, 0].mean(0)
    basis = torch.linalg.svd(cut[:, 0] - mean, full_matrices=False).Vh[: max(1, dimensions)]
    others = cut[:, 1:].reshape(-1, length)
    away = others - mean
    missed = away - away @ basis.T @ basis
    loss = float((missed * missed).sum() / (others * others).sum())
    return loss if math.isfinite(loss) else 1.0
