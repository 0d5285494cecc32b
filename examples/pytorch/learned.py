"""GradiVeQ and LGC on convolutional networks, on PyTorch: accuracy, bytes by phase, curves.

horovodrun --gloo -np 2 python -m examples.pytorch.learned --png results/learned.png
horovodrun --gloo -np 2 python -m examples.pytorch.learned --cifar10 FOLDER --epochs 164
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from examples import cifar10, digits, learned


class Block(nn.Module):
    """Two convolutions and a shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.across = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.first_norm(self.first(x)))
        beside = x if self.across is None else self.across(x)
        return torch.relu(self.second_norm(self.second(inner)) + beside)


def resnet(depth: int = 32, classes: int = 10) -> nn.Sequential:
    """The ResNet for CIFAR of so many layers; the papers use 32, 50 and 101."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    width = 16
    for outputs in (16, 32, 64):
        for i in range((depth - 2) // 6):
            layers.append(Block(width, outputs, 2 if outputs > 16 and i == 0 else 1))
            width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def network() -> nn.Sequential:
    """For the digits: 1,054,570 parameters, all but 2,890 in convolutions."""

    def convolution(inputs: int, outputs: int) -> tuple[nn.Module, nn.Module]:
        return nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()

    return nn.Sequential(
        *convolution(1, 32),
        *convolution(32, 64),
        nn.MaxPool2d(2),
        *convolution(64, 128),
        *convolution(128, 256),
        nn.MaxPool2d(2),
        *convolution(256, 288),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(288, 10),
    )


def run(data: Any, name: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Trains one model with one method."""
    train_x, train_y, test_x, test_y = data
    torch.manual_seed(seed)
    model = resnet() if options.cifar10 else network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9),
        model.named_parameters(),
        compression=learned.METHODS[name](options),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    curves, last = learned.Curves(), hvd.compression_stats(optimizer)
    step, previous = 0, last
    for epoch in range(options.epochs):
        batches = digits.shard(
            len(train_y), options.batch_size, hvd.rank(), hvd.size(), 1000 * seed + epoch
        )
        for batch in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(train_x[batch]), train_y[batch])
            loss.backward()
            optimizer.step()
            step += 1
            if step % learned.EVERY == 0:
                previous, last = last, hvd.compression_stats(optimizer)
                curves.note(loss.item(), last)
    if not curves.notes:  # a run of fewer steps
        last = hvd.compression_stats(optimizer)
        curves.note(loss.item(), last)
    model.eval()
    with torch.no_grad():
        right = sum(
            (model(x).argmax(1) == y).sum().item()
            for x, y in zip(test_x.split(500), test_y.split(500))
        )
    span = last - previous
    bytes_a_step = torch.tensor([span.bytes_sent / span.steps], dtype=torch.float64)
    ranks = hvd.allgather(bytes_a_step, "learned.bytes").tolist()
    return learned.row(name, seed, 100 * right / len(test_y), ranks, curves)


def main() -> None:
    options = learned.arguments(__doc__.splitlines()[0])
    hvd.init()
    torch.set_num_threads(1)
    load = digits.load if options.cifar10 is None else lambda: cifar10.load(options.cifar10)
    train_x, train_y, test_x, test_y = (torch.from_numpy(a) for a in load())
    data = (train_x.permute(0, 3, 1, 2), train_y, test_x.permute(0, 3, 1, 2), test_y)
    rows = []
    for name in options.methods:
        for seed in range(1, options.seeds + 1):
            rows.append(run(data, name, options, seed))
            if hvd.rank() == 0:
                print(f"{name}: {rows[-1]['accuracy']:.2f} %", flush=True)
    if hvd.rank() == 0:
        size = sum(p.numel() for p in (resnet() if options.cifar10 else network()).parameters())
        learned.report(f"PyTorch, {size:,} parameters, {hvd.size()} ranks", options, rows)
    hvd.shutdown()


if __name__ == "__main__":
    main()
