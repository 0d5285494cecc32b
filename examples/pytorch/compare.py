"""One task with every compressor, on PyTorch: accuracy or perplexity, ratios, bytes, time.

horovodrun --gloo -np 2 python -m examples.pytorch.compare
horovodrun --gloo -np 2 python -m examples.pytorch.compare --task chars --epochs 4 --warmup 1
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from examples import comparison, digits
from examples.pytorch.char_lstm import CharacterModel, loss_of, text

Loss = Callable[[nn.Module], torch.Tensor]


class Digits:
    """Handwritten digits by a network of 1.1 million parameters in three layers."""

    unit, passes, clip, learning_rate = "accuracy %", 1, None, 0.05

    def __init__(self, options: Any) -> None:
        self.options = options
        x, y, test_x, test_y = (torch.from_numpy(a) for a in digits.load())
        self.train, self.test = (x.flatten(1), y), (test_x.flatten(1), test_y)

    def model(self) -> nn.Module:
        width = self.options.width
        return nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )

    def epoch(self, seed: int) -> Iterator[list[Loss]]:
        """The losses of each step, one for each backward pass."""
        x, y = self.train
        for batch in digits.shard(len(y), self.options.batch_size, hvd.rank(), hvd.size(), seed):
            yield [lambda model, b=batch: nn.functional.cross_entropy(model(x[b]), y[b])]

    def score(self, model: nn.Module) -> float:
        x, y = self.test
        return 100 * (model(x).argmax(1) == y).float().mean().item()


class Characters:
    """The next character of the standard library's source, by an LSTM."""

    unit, passes, clip, learning_rate = "perplexity", 1, 1.0, 1.0

    def __init__(self, options: Any) -> None:
        self.options = options
        data = text(1_000_000)
        self.train, self.test = data[: -len(data) // 10], data[-len(data) // 10 :]

    def model(self) -> nn.Module:
        return CharacterModel(self.options.width // 4)

    def epoch(self, seed: int) -> Iterator[list[Loss]]:
        generator = torch.Generator().manual_seed(1000 * seed + hvd.rank())
        for _ in range(100):
            starts = torch.randint(
                0, len(self.train) - 65, (self.options.batch_size,), generator=generator
            )
            windows = torch.stack([self.train[s : s + 65] for s in starts.tolist()])
            yield [lambda model, w=windows: loss_of(model, w)]

    def score(self, model: nn.Module) -> float:
        held_out = self.test[: len(self.test) // 65 * 65][: 65 * 300].view(-1, 65)
        return math.exp(loss_of(model, held_out))


def run(task: Any, name: str, options: Any, seed: int) -> dict[str, Any]:
    """Trains one model with one method."""
    steps = sum(1 for _ in task.epoch(seed))
    compressor = comparison.METHODS[name](options.warmup * steps)
    torch.manual_seed(seed)
    model = task.model()
    tracker = None
    if compressor.uses_moments and options.task == "digits":
        tracker = hvd.track_moments(model)
    rate = options.learning_rate or task.learning_rate
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9),
        model.named_parameters(),
        compression=compressor,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    early, start = None, time.perf_counter()
    for epoch in range(options.epochs):
        if epoch == options.warmup:
            early = hvd.compression_stats(optimizer)
        for losses in task.epoch(1000 * seed + epoch):
            optimizer.zero_grad()
            for loss in losses:
                loss(model).backward()
            if task.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), task.clip)
            optimizer.step()
    seconds = time.perf_counter() - start
    if tracker is not None:
        tracker.remove()
    with torch.no_grad():
        score = task.score(model)
    stats = hvd.compression_stats(optimizer)
    return comparison.row(name, compressor, score, stats, early, seconds)


def main() -> None:
    options = comparison.arguments(__doc__.splitlines()[0], ("digits", "chars"))
    hvd.init()
    torch.set_num_threads(1)
    task = Digits(options) if options.task == "digits" else Characters(options)
    rows = []
    for name in options.methods:
        for seed in range(1, options.seeds + 1):
            rows.append(run(task, name, options, seed))
            if hvd.rank() == 0:
                print(f"{name}: {rows[-1]['score']:.2f}", flush=True)
    if hvd.rank() == 0:
        size = sum(p.numel() for p in task.model().parameters())
        title = f"PyTorch, {options.task}, {size:,} parameters, {hvd.size()} ranks"
        comparison.report(title, task.unit, options, rows)
    hvd.shutdown()


if __name__ == "__main__":
    main()
