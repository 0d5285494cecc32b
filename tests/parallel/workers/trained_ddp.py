"""A small training over DistributedDataParallel, as users of the command line write it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp.torch import ddp


def train(compression: Any, local: dict[str, Any] | None = None) -> Iterator[Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 64), nn.Linear(64, 10)
    )
    model, optimizer = net, torch.optim.SGD(net.parameters(), lr=0.1)
    if local is None:
        model = DistributedDataParallel(net)
        ddp.compress(model, compression)
        yield model
    else:
        named = net.named_parameters()
        optimizer = ddp.LocalSteps(optimizer, named, compression=compression, **local)
        yield optimizer
    x = torch.randn(256, 1, 8, 8)
    y = x.flatten(1)[:, :10].argmax(1)
    while True:
        batch = torch.randint(256, (32,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        yield loss.item()
