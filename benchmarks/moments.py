"""Measures per-sample moments: time and memory of a pass, beside a plain forward and backward.

    python -m benchmarks.moments                  # a small GPT, ViT, ResNet and LSTM, one thread
    python -m benchmarks.moments --model gpt --batch-size 32

Each row is a process of its own: the median of steps, plain and tracked in turn,
and how much more memory the process took at most than it had before its first step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import nn
from torch.nn import functional

from hvd_gradcomp.torch.moments import tracker


class Block(nn.Module):
    """Block of a transformer, as in GPT-2 and ViT."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (t.view(count, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = self.attend(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(count, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class GPT(nn.Module):
    """Words tied to the last layer."""

    def __init__(self, width: int = 128, words: int = 1000, length: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4, True) for _ in range(4)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return functional.linear(self.norm(self.blocks(x)), self.words.weight)


class ViT(nn.Module):
    """Vision transformer for 32 by 32 pixels, in 64 patches."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 65, width))
        self.blocks = nn.Sequential(*(Block(width, 4, False) for _ in range(4)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.blocks(x)[:, 0])


class Residual(nn.Module):
    """Two convolutions, and what they are added to."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.short = nn.Conv2d(before, width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.short(x))


def resnet() -> nn.Module:
    stages = [Residual(3, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2), Residual(128, 128, 2)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class LSTM(nn.Module):
    """Language model of characters, as `examples/pytorch/char_lstm.py`."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(128, 32), nn.LSTM(32, 256, batch_first=True)
        self.head = nn.Linear(256, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.words(tokens))[0])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "gpt": (GPT, lambda count: torch.randint(0, 1000, (count, 64))),
    "vit": (ViT, lambda count: torch.randn(count, 3, 32, 32)),
    "resnet": (resnet, lambda count: torch.randn(count, 3, 32, 32)),
    "lstm": (LSTM, lambda count: torch.randint(0, 128, (count, 64))),
}


def measured(name: str, batch: int, chunk: int, steps: int, tracked: bool) -> tuple[float, float]:
    """Seconds a step, and MB more than before the first."""
    torch.manual_seed(0)
    make, draw = MODELS[name]
    model, x = make(), draw(batch)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if tracked:
        tracker.track_moments(model, chunk=chunk)
    times = []
    for _ in range(steps + 2):
        model.zero_grad()
        begin = time.perf_counter()
        model(x).square().mean().backward()
        times.append(time.perf_counter() - begin)
        for p in model.parameters():
            tracker.take(p)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return statistics.median(times[2:]), (peak - before) / 1024


def apart(*arguments: object) -> list[float]:
    """`measured` in a process of its own, whose memory is that of nothing else."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(write, "w") as file:
            json.dump(measured(*arguments), file)  # type: ignore[arg-type]
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        answer = file.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, action="append", help="all if not given")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=16, help="as of track_moments")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3, help="plain and tracked in turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.model or MODELS:
        work = name, options.batch_size, options.chunk, options.steps
        rounds = [(apart(*work, False), apart(*work, True)) for _ in range(options.rounds)]
        plain, tracked = (
            [statistics.median(column) for column in zip(*side)] for side in zip(*rounds)
        )
        size = sum(p.numel() for p in MODELS[name][0]().parameters()) * 4 / 1e6
        rows.append(
            (name, f"{size:.1f}", f"{1e3 * plain[0]:.0f}", f"{1e3 * tracked[0]:.0f}",
             f"{tracked[0] / plain[0]:.2f}", f"{plain[1]:.0f}", f"{tracked[1]:.0f}")
        )  # fmt: skip
    head = ("model", "MB", "plain ms", "tracked ms", "times", "plain MB", "tracked MB")
    print(tabulate(rows, head, disable_numparse=True, colalign=("left", *["right"] * 6)))


if __name__ == "__main__":
    main()
