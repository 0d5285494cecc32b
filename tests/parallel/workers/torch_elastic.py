"""Trains elastically: the first rank 0 is killed in the middle of a step, and later one joins.

Each process writes what it saw to `FOLDER/process-<pid>.json`: nothing that is tested carries it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.method.compressor import is_replicated, leaves
from hvd_gradcomp.method.handover import residual_of
from tests.parallel.workers.results import digest
from tests.parallel.workers.survival import Diary, open_slot

COMPRESSORS = {
    "variance": hvd.VarianceCompressor(alpha=0.5),
    "dgc": hvd.DGCCompressor(density=0.1),
    "gradiveq": hvd.GradiVeQCompressor(
        ratio=4, warmup_steps=4, sample_steps=6, compress_steps=12, feedback=True
    ),
    "lgc": hvd.LGCCompressor(alpha=0.1, full_steps=4, train_steps=8),
}
KILLED, AFTER_KILL, AFTER_JOIN = 14, 4, 12  # batches


class Network(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)
        )


def batch_of(batch: int, rank: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * batch + rank)
    x = torch.randn(size, 1, 8, 8, generator=generator)
    y = torch.stack([x[:, 0, i::2, j::2].mean((1, 2)) for i in (0, 1) for j in (0, 1)], 1)
    return x, y


def reducers(optimizer):
    return optimizer.reducers if hasattr(optimizer, "reducers") else [optimizer._gradcomp]


def buckets(optimizer):
    return [bucket for reducer in reducers(optimizer) for bucket in reducer.buckets]


def residuals(optimizer):
    """What this rank keeps back, of each bucket that keeps anything."""
    residuals = (residual_of(b.compressor, b.state) for b in buckets(optimizer))
    return [r for r in residuals if r is not None]


def replicated(optimizer):
    steps = [reducer.steps for reducer in reducers(optimizer)]
    for bucket in buckets(optimizer):
        for path, x in leaves(bucket.state):
            if is_replicated(bucket.compressor, path):
                steps.append(x.cpu().numpy())
    return steps


def main(folder: str) -> None:
    hvd.init()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    diary = Diary(folder)
    unseen = batch_of(-1, 999, size=256)
    torch.manual_seed(hvd.rank())  # all begin differently
    models = {name: Network() for name in COMPRESSORS}
    optimizers = {
        name: hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
            if name in ("dgc", "lgc")
            else torch.optim.Adam(model.parameters(), lr=0.005),
            model.named_parameters(),
            compression=COMPRESSORS[name],
        )
        for name, model in models.items()
    }
    models["local"] = Network()
    optimizers["local"] = hvd.LocalSteps(
        torch.optim.Adam(models["local"].parameters(), lr=0.005),
        models["local"].named_parameters(),
        every=4,
        outer=hvd.OuterSGD(1.0, 0.0),
        compression=hvd.SparseGDCompressor(density=0.1),
    )
    state = hvd.elastic.TorchState(
        **{f"{name}_model": model for name, model in models.items()},
        **{f"{name}_optimizer": optimizer for name, optimizer in optimizers.items()},
        batch=0,
        joined=None,
    )
    first = hvd.rank() == 0 and hvd.size() == 3

    def kept() -> dict[str, str]:
        return {n: digest(r.numpy() for r in residuals(o)) for n, o in optimizers.items()}

    def squares() -> float:
        kept = (r for optimizer in optimizers.values() for r in residuals(optimizer))
        return sum(float(r.double().square().sum()) for r in kept)

    @hvd.elastic.run
    def train(state):
        for optimizer in optimizers.values():
            for reducer in reducers(optimizer):
                assert reducer.postscale == 1 / hvd.size()
        diary.note("start", batch=state.batch, rank=hvd.rank(), size=hvd.size(), kept=kept())
        if hvd.size() == 3 and state.batch > 0 and state.joined is None:
            state.joined = state.batch
        while state.joined is None or state.batch < state.joined + AFTER_JOIN:
            if hvd.size() == 2 and state.batch == KILLED + AFTER_KILL and hvd.rank() == 0:
                open_slot(folder)
            if hvd.size() == 2 and state.batch > KILLED + AFTER_KILL:
                time.sleep(0.1)  # until one joins
            losses = {}
            for name, model in models.items():
                x, y = batch_of(state.batch, hvd.rank())
                optimizers[name].zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                if first and state.batch == KILLED and name == "dgc":
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizers[name].step()
                with torch.no_grad():  # of what nobody trains on: no noise from batch to batch
                    losses[name] = nn.functional.mse_loss(model(unseen[0]), unseen[1]).item()
            state.batch += 1
            norm = squares() ** 0.5
            diary.note("batch", batch=state.batch, losses=losses, kept=kept(), norm=norm)
            state.commit()

    train(state)
    optimizers["local"].exchange()
    diary.note(
        "end",
        batch=state.batch,
        rank=hvd.rank(),
        size=hvd.size(),
        lost=state.lost,
        parameters=digest(p.detach().numpy() for m in models.values() for p in m.parameters()),
        replicated=digest(x for o in optimizers.values() for x in replicated(o)),
    )


if __name__ == "__main__":
    main(sys.argv[1])
