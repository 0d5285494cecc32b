"""Attacks on ranks that train with DistributedDataParallel; arguments: folder, options, cases.

Started as those of Horovod are, but Horovod is not imported. Each trial has a process group of its
own, so that what fails in one is not in the way of the next.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp import (
    DGCCompressor,
    LGCCompressor,
    NoneCompressor,
    QSGDCompressor,
    StromCompressor,
    VarianceCompressor,
)
from hvd_gradcomp.torch import ddp
from tests.chaos.workers import trials
from tests.chaos.workers.trials import Trial
from tests.parallel.workers.results import digest

FAULTY = 1
TIMEOUT = datetime.timedelta(seconds=8)  # of a trial's group; who waits in vain waits so long
STROM = StromCompressor(tau=0.01)
METHODS = {
    "None": NoneCompressor(),
    "Strom": STROM,
    "Variance": VarianceCompressor(alpha=0.5, moments="step"),
    "DGC": DGCCompressor(density=0.05, momentum=0.9),
    "QSGD": QSGDCompressor(exchange="two_shot"),
    "LGC": LGCCompressor(alpha=0.1, full_steps=3, train_steps=8, momentum=0.9),
}


def build(compressor: Any = STROM) -> tuple[Any, Any, Any]:
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten()
    layers = (*layers, nn.Linear(96, 4))
    group = dist.new_group(timeout=TIMEOUT)
    model = DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    ddp.compress(model, compressor)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), group


def train(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 1, 3, 4) * (1 + dist.get_rank())
        model(x).square().mean().backward()
        optimizer.step()


def replicas(model: Any) -> str:
    return digest([p.detach().numpy() for p in model.parameters()])


def joined(compressor: Any) -> Callable[[Trial], str]:
    """Fewer batches, in `join`; then all together again."""

    def case(trial: Trial) -> str:
        model, optimizer, _ = build(compressor)
        trial.now()
        with model.join():
            train(model, optimizer, 4 if dist.get_rank() == FAULTY else 9)
        train(model, optimizer, 3)
        return replicas(model)

    return case


def around(change: Callable[[Any, Any], Any]) -> Callable[[Trial], str]:
    """Some steps, what one rank does alone, and more steps."""

    def case(trial: Trial) -> str:
        model, optimizer, group = build()
        train(model, optimizer, 4)
        if dist.get_rank() == FAULTY:
            trial.now()
            change(model, group)
        train(model, optimizer, 8)
        return replicas(model)

    return case


def fewer(trial: Trial) -> str:
    """Fewer batches without `join`, then what all ranks do after an epoch."""
    model, optimizer, group = build()
    trial.now()
    train(model, optimizer, 4 if dist.get_rank() == FAULTY else 9)
    dist.barrier(group)
    return replicas(model)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("this rank has failed")


def fails(model: Any, group: Any) -> None:
    del group
    _Fails.apply(model(torch.ones(4, 1, 3, 4))).sum().backward()


def metric(model: Any, group: Any) -> None:
    del model
    dist.all_reduce(torch.ones(3), group=group)


CASES: dict[str, Callable[[Trial], Any]] = {
    **{f"fewer batches on one rank, join, {name}": joined(one) for name, one in METHODS.items()},
    "fewer batches on one rank": fewer,
    "all_reduce on one rank": around(metric),
    "verify on one rank": around(lambda model, group: ddp.verify(model)),
    "an exception on one rank": around(fails),
    "kill -9": around(lambda model, group: os.kill(os.getpid(), signal.SIGKILL)),
}


def main(folder: str, cases: str, *names: str) -> None:
    del cases
    torch.set_num_threads(1)
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    met = Path(folder, "met").absolute()
    dist.init_process_group("gloo", f"file://{met}", rank=rank, world_size=size)
    trials.run(folder, rank, CASES, names, dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
