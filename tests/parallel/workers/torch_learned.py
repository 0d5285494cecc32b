"""Trains with the methods that learn, through all their phases; digests every 10 steps."""

from __future__ import annotations

import io
import os
import sys

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.method.handover import residual_of
from tests.methods import learned_by
from tests.parallel.workers.results import digest, finish


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 24, 3),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 48, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(192, 10),
    )


def made(compressor):
    model = network()
    return model, hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.002),
        model.named_parameters(),
        compression=compressor,
        bucket_bytes=4096,
    )


def train(compressor, steps: int, stops: tuple = ()) -> dict:
    """At each of the stops everything is saved, made anew and loaded."""
    model, optimizer = made(compressor)
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    generator = torch.Generator().manual_seed(100 + hvd.rank())
    digests, kinds, before = [], [], 0
    for step in range(steps):
        if step in stops:
            file = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict()), file)
            file.seek(0)
            states = torch.load(file)
            model, optimizer = made(compressor)
            for one, state in zip((model, optimizer), states):
                one.load_state_dict(state)
            before = 0
        x = torch.randn(8, 1, 8, 8, generator=generator)
        y = x.mean((1, 2, 3)).mul(40).long().clamp(-5, 4) + 5
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        sent = hvd.compression_stats(optimizer).bytes_sent
        kinds.append(sent - before)
        before = sent
        if step % 10 == 9:
            digests.append(digest([p.detach().numpy() for p in model.parameters()]))
        if step == steps - 30:
            hvd.retrain(optimizer)
    stats = hvd.compression_stats(optimizer)
    return {
        "digests": digests,
        "losses": stats.losses,
        "bytes": kinds,
        "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
    }


class Scrambled(nn.Module):
    """Lists its layers in another order than it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(20, 10)
        self.second, self.third = nn.Linear(40, 30), nn.Linear(30, 20)
        self.unused = nn.Linear(5, 4)
        self.first = nn.Linear(16, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.last(torch.relu(self.third(x)))


def by_order_of_use() -> list:
    """Who compresses what, and how far from plain SGD the steps before any loss are."""
    torch.manual_seed(2)
    model, plain = Scrambled(), Scrambled()
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, plain)]
    optimizers[0] = hvd.DistributedOptimizer(
        optimizers[0],
        model.named_parameters(),
        compression=hvd.LGCCompressor(alpha=0.02, full_steps=5, train_steps=4),
    )
    generator = torch.Generator().manual_seed(7)  # the same data on all ranks
    for _ in range(5):
        x = torch.randn(8, 16, generator=generator)
        for one, optimizer in zip((model, plain), optimizers):
            optimizer.zero_grad()
            one(x).square().sum().backward()
            optimizer.step()
    pairs = zip(model.parameters(), plain.parameters())
    away = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return [away, [line.split()[0] for line in hvd.describe(optimizers[0]).splitlines()[2:-1]]]


def beside_a_sparse_method() -> float:
    """What a partition with DGC loses when LGC learns the order, as a share of the gradient."""
    torch.manual_seed(2)
    model = Scrambled()
    lgc = hvd.LGCCompressor(alpha=0.05, full_steps=5, train_steps=4, momentum=0.0)
    rules = {"third.weight": hvd.DGCCompressor(density=0.01, momentum=0.0), "*": lgc}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        model.named_parameters(),
        compression=hvd.partition(rules),
    )
    contributions = []  # of this rank, before they are reduced
    model.third.weight.register_hook(lambda gradient: contributions.append(gradient.double()))
    got = 0.0
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().sum().backward()
        optimizer.step()
        got = got + model.third.weight.grad.double()
    total, engine = sum(contributions), optimizer._gradcomp
    bucket, slot = engine.planner.places[model.third.weight]
    kept = bucket.cut(residual_of(bucket.compressor, bucket.state))[slot].double()
    lost = hvd.allreduce(total - got - kept, name="lost")
    return float(lost.abs().max() / total.abs().max())


def main(folder: str, steps: int, fusion: str) -> None:
    os.environ["HOROVOD_FUSION_THRESHOLD"] = fusion
    hvd.init()
    torch.set_num_threads(1)
    result = {"order": by_order_of_use(), "lost": beside_a_sparse_method()}
    methods = learned_by("torch", hvd.size())
    result |= {repr(c): train(c, steps) for c in methods}
    if hvd.size() == 2:  # one stop in each phase, and the other run is not stopped at all
        again = methods[-1]
        stopped = train(again, steps, stops=(30, 90, 140))
        result["again"] = [stopped["digests"][-1], result[repr(again)]["digests"][-1]]
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
