"""Recipes: what is trained, and how, before anything about exchanges."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional

from benchmarks.moments import GPT, Block
from benchmarks.papers import data

LENGTH = 96  # characters of a window
PIECE = 40 * (LENGTH + 1)  # of the text; every tenth is held out
HELD_OUT = 600  # windows of those, spread over them


class Shape(NamedTuple):
    """Size of a GPT: GPT-2 has more words than a text of characters uses."""

    width: int
    blocks: int
    heads: int = 4
    words: int = 128


SHAPES = {
    "gpt-0.8": Shape(128, 4),
    "gpt-3": Shape(256, 4),
    "gpt-10": Shape(384, 6),
    "gpt-124": Shape(768, 12, 12, 50_257),
}
SMALL = "gpt-0.8"  # at which rates are tuned
Loss = Callable[[], torch.Tensor]


class Task(Protocol):
    """Model and data of a recipe, on one of several ranks."""

    def model(self) -> nn.Module:
        """Return a new model."""

    def batches(self, model: nn.Module, seed: int) -> Iterator[Loss]:
        """Yield functions that return the loss of this rank's next batch, without an end."""

    def sums(self, model: nn.Module) -> torch.Tensor:
        """Return the summed loss on this rank's part of what is held out, and its size."""


@dataclass(frozen=True)
class Recipe:
    """Training of a model, whatever is exchanged.

    Attributes:
        title: in tables.
        batch: samples a step of all ranks together.
        steps, warmup_steps: of a training of usual length.
        optimizer_name: "adamw" or "sgd".
        decay: of weights.
        clip: the gradient's largest norm; None for none.
        rates: of learning at their highest, a ladder to choose from for each method.
    """

    title: str
    batch: int
    steps: int
    warmup_steps: int
    optimizer_name: str
    decay: float
    clip: float | None
    rates: tuple[float, ...]

    def optimizer(self, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        """Return a new optimizer at this rate."""
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(parameters, rate, 0.9, weight_decay=self.decay)
        return torch.optim.AdamW(parameters, rate, (0.9, 0.95), weight_decay=self.decay)


LADDER = (0.00075, 0.0015, 0.003, 0.006, 0.012, 0.024, 0.048)


def _gpt(key: str, title: str) -> Recipe:
    return Recipe(f"GPT, {title} million parameters", 32, 600, 60, "adamw", 0.1, 1.0, LADDER)


RECIPES = {
    "gpt-0.8": _gpt("gpt-0.8", "0.8"),
    "gpt-3": _gpt("gpt-3", "3"),
    "gpt-10": _gpt("gpt-10", "10"),
    "gpt-124": _gpt("gpt-124", "124"),
    "resnet-20": Recipe(
        "ResNet-20 on clothes", 128, 600, 60, "sgd", 5e-4, None, (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
    ),
}


def share(step: float, steps: int, warmup_steps: int) -> float:
    """Return the share of the highest rate in a step: linear warm-up, then a cosine to a tenth.

    >>> [round(share(step, 1000, 100), 3) for step in (0, 99, 550, 1000)]
    [0.01, 1.0, 0.55, 0.1]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    past = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, past)))


@functools.cache
def precision(device: str) -> torch.dtype:
    """Return the dtype of products: bfloat16, or float32 on a CPU that has no such instructions.

    A CPU without them takes 12 times as long in bfloat16 as in float32.
    """
    if device != "cpu":
        return torch.bfloat16
    known = getattr(torch.cpu, "get_capabilities", dict)()  # not in older PyTorch
    has_them = any(known.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    return torch.bfloat16 if has_them else torch.float32


def autocast(device: str) -> torch.autocast:
    """Return the context in which a model computes, in `precision`."""
    enabled = precision(device) == torch.bfloat16
    return torch.autocast(device, torch.bfloat16, enabled=enabled)


class ProductBlock(Block):
    """Block whose attention is two products.

    PyTorch's own takes twice as long as these in bfloat16 on a CPU, for windows this short.
    """

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -torch.inf).softmax(-1).to(v.dtype) @ v


class Text:
    """The next character of the King James Bible; the loss is in nats a character.

    Args:
        key: of `SHAPES`.
        batch: windows of this rank's steps.
        rank, size: of this rank, and how many there are.
        folder: in the place of Debian's packages.
    """

    def __init__(self, key: str, batch: int, rank: int, size: int, folder: Path | None) -> None:
        self._shape = SHAPES[key]
        self._batch, self._rank = batch, rank
        characters = data.text(folder)
        pieces = characters[: len(characters) // PIECE * PIECE].view(-1, PIECE)
        tenth = torch.arange(len(pieces)) % 10 == 9
        self.train, windows = pieces[~tenth].flatten(), pieces[tenth].view(-1, LENGTH + 1)
        self.held_out = windows[:: max(1, len(windows) // HELD_OUT)][:HELD_OUT][rank::size]

    def model(self) -> nn.Module:
        width, blocks, heads, words = self._shape
        model = GPT(width, words, LENGTH)
        model.blocks = nn.Sequential(*(ProductBlock(width, heads, True) for _ in range(blocks)))
        for embedding in (model.words, model.places):
            nn.init.normal_(embedding.weight, std=0.1)
        return model

    def batches(self, model: nn.Module, seed: int) -> Iterator[Loss]:
        generator = torch.Generator().manual_seed(1000 * seed + self._rank)
        while True:
            last = len(self.train) - LENGTH
            starts = torch.randint(0, last, (self._batch, 1), generator=generator)
            windows = self.train[starts + torch.arange(LENGTH + 1)]
            yield partial(_loss, model, windows, "mean")

    def sums(self, model: nn.Module) -> torch.Tensor:
        parts = (_loss(model, w, "sum").item() for w in self.held_out.split(50))
        return torch.tensor([sum(parts), len(self.held_out) * LENGTH], dtype=torch.float64)


def _loss(model: nn.Module, windows: torch.Tensor, reduction: str) -> torch.Tensor:
    place = next(model.parameters()).device
    windows = windows.to(place)
    with autocast(place.type):
        scores = model(windows[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(scores.float(), windows[:, 1:].flatten(), reduction=reduction)


class Shortcut(nn.Module):
    """Block of ResNet for small pictures: two convolutions, and their input added (He et al. 2015).

    The input is passed on by every other pixel and more channels of zeros: no parameters.
    """

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self._more, self._stride = width - before, 1 if width == before else 2
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, self._stride, 1, bias=False), nn.BatchNorm2d(width),
            nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        short = x[:, :, :: self._stride, :: self._stride]
        return functional.relu(self.body(x) + functional.pad(short, (0, 0, 0, 0, 0, self._more)))


class Pictures:
    """Ten kinds of clothes, moved and mirrored; the loss is in nats a picture.

    Args:
        batch, rank, size, folder: as of `Text`.
    """

    def __init__(self, batch: int, rank: int, size: int, folder: Path | None) -> None:
        self._batch, self._rank = batch, rank
        self._x, self._y = data.images(folder, "train", 0, 50_000 if folder is None else 1000)
        x, y = data.images(folder, "t10k", 0, 10_000 if folder is None else 1000)
        self._held_out = x[rank::size], y[rank::size]

    def model(self) -> nn.Module:
        widths = (16, *[16] * 3, *[32] * 3, *[64] * 3)
        blocks = (Shortcut(a, b) for a, b in zip(widths, widths[1:]))
        first = nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        return nn.Sequential(
            *first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
        )

    def batches(self, model: nn.Module, seed: int) -> Iterator[Loss]:
        generator = torch.Generator().manual_seed(1000 * seed + self._rank)
        while True:
            chosen = torch.randint(0, len(self._y), (self._batch,), generator=generator)
            x = functional.pad(self._x[chosen], (2, 2, 2, 2), value=-0.81)
            top, left, mirrored = torch.randint(0, 5, (3,), generator=generator).tolist()
            x = x[:, :, top : top + 28, left : left + 28]
            x = x.flip(-1) if mirrored % 2 else x
            yield partial(self._loss, model, x, self._y[chosen])

    @staticmethod
    def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with autocast(x.device.type):
            scores = model(x)
        return functional.cross_entropy(scores.float(), y)

    def sums(self, model: nn.Module) -> torch.Tensor:
        model.eval()
        total = torch.zeros(3, dtype=torch.float64)
        for x, y in zip(*(part.split(500) for part in self._held_out)):
            scores = model(x)
            loss = functional.cross_entropy(scores, y, reduction="sum")
            right = (scores.argmax(1) == y).sum()
            total += torch.tensor([loss.item(), len(y), right.item()], dtype=torch.float64)
        model.train()
        return total


def task(key: str, batch: int, rank: int, size: int, folder: Path | None) -> Task:
    """Return the task of a recipe.

    Args:
        key: of `RECIPES`.
        batch: samples of this rank's steps.
        rank, size: of this rank, and how many there are.
        folder: in the place of Debian's packages.
    """
    if key in SHAPES:
        return Text(key, batch, rank, size, folder)
    return Pictures(batch, rank, size, folder)
