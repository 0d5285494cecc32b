"""The probe beside a training on PyTorch: what it reads, and that it changes nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import horovod.torch as stock
import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.torch.monitoring.probing import Probe
from tests.parallel.workers.results import digest, errors_of, finish

STEPS = 24


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.Dropout(0.2)
    )


def unused(model):
    """A parameter that no backward reaches."""
    model.idle = nn.Linear(3, 2)
    model.idle.forward = None
    return model


def train(distribute, every=None, seen=None, in_place=False):
    """The digest of the weights after some steps, and the probe if there is one.

    Args:
        seen: filled with the local gradients of the probed steps, by a hook of the test's own.
        in_place: gradients are zeroed and not forgotten.
    """
    model = network()
    optimizer = distribute(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
    torch.manual_seed(10 + hvd.rank())
    probe = Probe(model.named_parameters(), every) if every else None
    copies = {}
    if seen is not None:
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: copies.__setitem__(name, p.grad.detach().clone())
            )
    for step in range(STEPS):
        if in_place and step:
            for p in model.parameters():
                p.grad.zero_()
        else:
            optimizer.zero_grad()
        model(torch.randn(6, 2, 6, 6)).square().mean().backward()
        if probe is not None:
            probe.step()
            if seen is not None and step % every == 0:
                seen.append({name: x.tolist() for name, x in copies.items()})
        optimizer.step()
    return digest(p.detach().numpy() for p in model.parameters()), probe


def with_ours(compression):
    return lambda optimizer, model: hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=compression
    )


def with_stock(optimizer, model):
    return stock.DistributedOptimizer(optimizer, model.named_parameters())


def hooks():
    """How many hooks the parameters have in each step that begins."""
    model, counts = network(), []
    probe = Probe(model.named_parameters(), 3)
    for _ in range(7):
        counts.append(sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()))
        model(torch.ones(1, 2, 6, 6)).sum().backward()
        probe.step()
    return counts


def made_otherwise():
    """Gradients that no hook has seen, and parameters without any."""
    model = unused(network())
    probe = Probe(model.named_parameters(), 1)
    for p in list(model.parameters())[:2]:
        p.grad = torch.full_like(p, 1.0 + hvd.rank())
        p.grad.view(-1)[0] = 0
    probe.step([torch.full_like(p, 0.25) for p in model.parameters()])
    return [r._asdict() for r in probe.readings]


def subset_of(everybody):
    """Only the ranks of a process set read something."""
    model = network()
    probe = Probe(model.named_parameters(), 1, process_set=everybody)
    model(torch.full((1, 2, 6, 6), 1.0 + hvd.rank())).sum().backward()
    return [r._asdict() for r in probe.step()]


def main(folder: str) -> None:
    alone = hvd.ProcessSet([1])
    hvd.init(process_sets=[alone])
    torch.set_num_threads(1)
    methods = {
        "stock": with_stock,
        "none": with_ours(hvd.NoneCompressor()),
        "variance": with_ours(hvd.VarianceCompressor(alpha=1.0, moments="step")),
    }
    pairs, readings = {}, {}
    for name, distribute in methods.items():
        for in_place in (False, True):
            plain, _ = train(distribute, in_place=in_place)
            probed, probe = train(distribute, 2, in_place=in_place)
            pairs[f"{name}, {in_place}"] = [plain, probed]
            readings[f"{name}, {in_place}"] = [r._asdict() for r in probe.readings]
    local: list = []
    _, probe = train(with_stock, 2, local, in_place=True)
    probe.write(Path(folder, f"readings of {hvd.rank()}"))
    result = {
        "pairs": pairs,
        "readings": readings,
        "local": local,
        "checked": [r._asdict() for r in probe.readings],
        "strides": {sample.name: sample.stride for sample in probe.samples},
        "hooks": hooks(),
        "otherwise": made_otherwise(),
        "alone": subset_of(alone),
        "errors": errors_of(
            {
                "pair": lambda: Probe(network().named_parameters(), pair=(0, 5)),
                "every": lambda: Probe(network().named_parameters(), -1),
            }
        ),
    }
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
