"""A small training as users of the command line write it: a factory, and a generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import hvd_gradcomp.torch as hvd


def factory() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 64), nn.Linear(64, 10)
    )
    x = torch.randn(256, 1, 8, 8)
    y = x.flatten(1)[:, :10].argmax(1)

    def loss() -> torch.Tensor:
        batch = torch.randint(256, (32,))
        return nn.functional.cross_entropy(model(x[batch]), y[batch])

    return model, loss


def tracked() -> tuple[nn.Module, Callable[[], torch.Tensor], torch.optim.Optimizer]:
    """With per-sample moments, and an optimizer that has no momentum to hand over."""
    model, loss = factory()
    hvd.track_moments(model)
    return model, loss, torch.optim.AdamW(model.parameters())


def broken() -> nn.Module:
    raise KeyError("no such data")


def small() -> nn.Module:
    """Without a convolution."""
    return nn.Linear(64, 64)


def train(compression: Any, wrap: Any = hvd.DistributedOptimizer) -> Iterator[Any]:
    hvd.init()
    model, loss = factory()
    optimizer = wrap(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=compression,
    )
    yield optimizer
    while True:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        yield value.item()


def local(compression: Any) -> Iterator[Any]:
    """With local steps."""
    yield from train(compression, partial(hvd.LocalSteps, every=4, outer=hvd.OuterSGD(1, 0)))


def short(compression: Any) -> Iterator[Any]:
    """Runs out of batches."""
    steps = train(compression)
    yield from (next(steps) for _ in range(4))
