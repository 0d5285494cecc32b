"""Trains with several methods while something happens to the link: FOLDER STEPS."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from hvd_gradcomp import DGCCompressor, NoneCompressor, QSGDCompressor, StromCompressor
from tests.parallel.workers.results import digest, write

METHODS = (
    NoneCompressor(),
    StromCompressor(tau=0.01),
    DGCCompressor(density=0.05),
    QSGDCompressor(bits=4, exchange="two_shot"),
)
PAUSE = 0.05  # seconds between steps
BEGUN = "begun"  # the file that says that rank 0 trains


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    models = [nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in METHODS]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05),
            model.named_parameters(),
            compression=compressor,
        )
        for model, compressor in zip(models, METHODS)
    ]
    generator = torch.Generator().manual_seed(hvd.rank())
    message, done = "", 0
    try:
        for done in range(steps):
            if done == 5 and hvd.rank() == 0:
                (folder / BEGUN).touch()
            time.sleep(PAUSE)
            for model, optimizer in zip(models, optimizers):
                optimizer.zero_grad()
                model(torch.randn(8, 64, generator=generator)).square().mean().backward()
                optimizer.step()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    replicas = digest(p.detach().numpy() for model in models for p in model.parameters())
    write(
        folder, hvd.rank(), {"said": message, "step": done, "replicas": replicas, "at": time.time()}
    )
    if message:
        sys.exit(1)
    hvd.shutdown()


if __name__ == "__main__":
    main()
