"""Momentum that a compressor takes over, poisoned gradients, partitions and the dry run: torch."""

from __future__ import annotations

import copy
import sys
from contextlib import redirect_stdout
from io import StringIO

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from tests.parallel.workers.results import digest, errors_of, finish


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 4))


def train(optimizer, model, steps, scale=1.0):
    """All ranks see all of one batch in turn, so that the mean over ranks is that of the batch."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        x = torch.randn(2 * hvd.size(), 12, generator=generator)
        y = torch.randn(2 * hvd.size(), 4, generator=generator)
        span = slice(2 * hvd.rank(), 2 * hvd.rank() + 2) if optimizer is not None else slice(None)
        yield scale * nn.functional.mse_loss(model(x[span]), y[span])


def pair(**settings):
    """The largest difference of DGC at density 1 and SGD in one process, and their momentum."""
    compressor = hvd.DGCCompressor(density=1.0)
    model, alone = network(), network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, **settings),
        model.named_parameters(),
        compression=compressor,
    )
    hvd.broadcast_optimizer_state(optimizer, 0)
    plain = torch.optim.SGD(alone.parameters(), lr=0.05, **settings)
    scale = -1.0 if settings.get("maximize") else 1.0
    for loss in train(optimizer, model, 50, scale):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for loss in train(None, alone, 50, scale):
        plain.zero_grad()
        loss.backward()
        plain.step()
    saved = optimizer.state_dict()["param_groups"][0]
    assert saved["momentum"] == settings["momentum"]
    assert saved["nesterov"] == settings.get("nesterov", False)
    assert optimizer.param_groups[0]["momentum"] == 0
    difference = max(
        float((p - q).detach().abs().max()) for p, q in zip(model.parameters(), alone.parameters())
    )
    return [difference, digest(p.detach().numpy() for p in model.parameters())]


def resumed():
    """A state with the taken momentum in it loads into a new optimizer, and trains on."""
    states = []
    for load in (False, True):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
            model.named_parameters(),
            compression=hvd.DGCCompressor(density=0.1),
        )
        if load:
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        for step, loss in enumerate(train(optimizer, model, 12)):
            if load == (step < 6):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == 5:
                saved = {k: v.clone() for k, v in model.state_dict().items()}
                states = [saved, copy.deepcopy(optimizer.state_dict())]
    return digest(p.detach().numpy() for p in model.parameters())


def uninterrupted():
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
        model.named_parameters(),
        compression=hvd.DGCCompressor(density=0.1),
    )
    for loss in train(optimizer, model, 12):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return digest(p.detach().numpy() for p in model.parameters())


def make(optimizer=None, compression=None):
    model = network()
    optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    return hvd.DistributedOptimizer(
        optimizer(model.parameters()), model.named_parameters(), compression=compression
    ), model


def cycled():
    optimizer, model = make(compression=hvd.DGCCompressor())
    optimizer.param_groups[0]["momentum"] = 0.5
    model(torch.ones(2, 12)).sum().backward()
    try:
        optimizer.step()
    finally:
        optimizer.synchronize()


def poisoned():
    optimizer, model = make(compression=hvd.SparseGDCompressor(density=0.1))
    model(torch.ones(2, 12)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    scale = float("nan") if hvd.rank() == 1 else 1.0
    (scale * model(torch.ones(2, 12)).sum()).backward()
    before = {name: p.clone() for name, p in model.named_parameters()}
    try:
        optimizer.step()
    finally:
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        for bucket in optimizer._gradcomp.buckets:
            assert bucket.state.memory.r.isfinite().all()


def main(folder: str) -> None:
    hvd.init()
    torch.set_num_threads(1)
    result = {
        "pairs": {
            "plain": pair(momentum=0.9),
            "nesterov": pair(momentum=0.8, nesterov=True),
            "decay": pair(momentum=0.9, weight_decay=0.05),
            "nesterov decay": pair(momentum=0.9, nesterov=True, weight_decay=0.05),
            "maximize": pair(momentum=0.9, weight_decay=0.01, maximize=True),
        },
        "resumed": [resumed(), uninterrupted()],
    }
    optimizer, _ = make(
        compression=hvd.partition([("0.*", None), ("*", hvd.DGCCompressor(density=0.1))])
    )
    with redirect_stdout(StringIO()) as printed:
        result["description"] = hvd.describe(optimizer)
    assert not printed.getvalue() and repr(result["description"]) == result["description"]
    adam, dgc = (lambda p: torch.optim.Adam(p)), hvd.DGCCompressor()
    groups = lambda p: torch.optim.SGD(  # noqa: E731
        [{"params": [q], "momentum": m} for q, m in zip(p, (0.5, 0.5, 0.9, 0.9))], lr=0.1
    )
    result["errors"] = errors_of(
        {
            "adam": lambda: make(adam, dgc),
            "adam given": lambda: make(adam, hvd.EGCCompressor(momentum=0.9)),
            "another": lambda: make(compression=hvd.DGCCompressor(momentum=0.5)),
            "groups": lambda: make(groups, dgc),
            "cycled": cycled,
            "rules": lambda: make(compression=hvd.partition({"nothing": None, "*": None})),
            "poisoned": poisoned,
        }
    )
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(sys.argv[1])
