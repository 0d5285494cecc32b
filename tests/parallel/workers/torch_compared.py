"""Trains over Horovod what `ddp_training` trains without, and keeps the parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import hvd_gradcomp.torch as hvd
from tests.methods import ONE_OF_EACH
from tests.parallel.workers.perceptron import STEPS, Model, loss, vector
from tests.parallel.workers.results import write


def main(folder: str) -> None:
    hvd.init()
    torch.set_num_threads(1)
    for place, compression in enumerate(ONE_OF_EACH):
        torch.manual_seed(1)
        model = Model()
        for p in model.unused.parameters():
            p.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05),
            model.named_parameters(),
            compression=compression,
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, step, hvd.rank()).backward()
            optimizer.step()
        torch.save(vector(model), Path(folder, f"horovod-{place}-{hvd.rank()}.pt"))
    write(folder, hvd.rank(), [repr(c) for c in ONE_OF_EACH])


if __name__ == "__main__":
    main(sys.argv[1])
