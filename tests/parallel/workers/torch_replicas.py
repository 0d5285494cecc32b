"""Trains with every method for some steps and writes a digest of the parameters for each."""

from __future__ import annotations

import sys

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.method.handover import correction_of
from tests.methods import (
    BALANCED,
    EVERY,
    INT32,
    ONE_OF_EACH_EXCHANGE,
    OUTSIDE,
    PRODUCTS,
    ROBUST,
    ROUNDED,
    TODAY,
)
from tests.parallel.workers.places import arrays, choose, here
from tests.parallel.workers.results import digest, finish

METHODS = {
    "all": EVERY,
    "one of each exchange": ONE_OF_EACH_EXCHANGE,
    "outside": OUTSIDE + TODAY + ROUNDED + INT32 + PRODUCTS + ROBUST + BALANCED,
}


def main(folder: str, steps: int, settings: str, device: str = "cpu") -> None:
    """Goes through the `METHODS` of that name."""
    hvd.init()
    choose(device)
    torch.set_num_threads(1)
    result = {}
    for compressor in METHODS[settings]:
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10)
        ).to(here())
        tracker = hvd.track_moments(model) if compressor.uses_moments else None
        plain: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if correction_of(compressor) is not None:  # a momentum of its own, which Adam has too
            plain = torch.optim.SGD(model.parameters(), lr=0.001)
        optimizer = hvd.DistributedOptimizer(
            plain,
            model.named_parameters(),
            compression=compressor,
            bucket_bytes=4096,
        )
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        generator = torch.Generator().manual_seed(100 + hvd.rank())
        for _ in range(steps):
            x = torch.randn(8, 1, 8, 8, generator=generator).to(here())
            y = torch.randint(0, 10, (8,), generator=generator).to(here())
            optimizer.zero_grad()
            (20 * nn.functional.cross_entropy(model(x), y)).backward()
            optimizer.step()
        stats = hvd.compression_stats(optimizer)
        assert stats.steps == steps and stats.bytes_sent > 0, (compressor, stats)
        if tracker is not None:
            assert 0 < stats.elements_sent < stats.elements
            tracker.remove()
        parameters = [*arrays(model.parameters())]
        result[repr(compressor)] = [
            digest(parameters),
            float(sum(abs(p).sum() for p in parameters)),
        ]
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
