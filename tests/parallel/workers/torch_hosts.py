"""A few compressed steps on several hosts: where each rank ran, and what its replica became."""

from __future__ import annotations

import socket
import sys

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from hvd_gradcomp import DGCCompressor
from tests.parallel.workers.results import digest, finish


def main() -> None:
    hvd.init()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 5))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=DGCCompressor(density=0.05),
    )
    begin = digest(p.detach().numpy() for p in model.parameters())
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 30, generator=generator)).square().mean().backward()
        optimizer.step()
    name = socket.gethostname()
    result = {
        "host": name,
        "address": socket.gethostbyname(name),
        "begin": begin,
        "end": digest(p.detach().numpy() for p in model.parameters()),
    }
    finish(hvd, sys.argv[1], result)


if __name__ == "__main__":
    main()
