"""Continues training from what an earlier version saved, or saves it.

What is in tests/golden/checkpoints was saved at commit 0d648ff, by this file in a checkout of it:

    horovodrun --gloo -np 2 python torch_earlier.py FOLDER save tests/golden/checkpoints

Gradients are small whole numbers over 64, so that no bit depends on the machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import hvd_gradcomp.torch as hvd

BEFORE, AFTER = 3, 2  # steps
COMPRESSORS = {
    "variance": lambda: hvd.VarianceCompressor(alpha=1),
    "hybrid": lambda: hvd.HybridCompressor(tau=0.5, alpha=1),
    "strom": lambda: hvd.StromCompressor(tau=4),
    "dgc": lambda: hvd.DGCCompressor(density=0.1, momentum=0.5),
    "egc": lambda: hvd.EGCCompressor(K=20),
    "sparse-gd": lambda: hvd.SparseGDCompressor(density=0.1),
    "scalecom": lambda: hvd.ScaleComCompressor(density=0.1),
    "one-bit": lambda: hvd.OneBitCompressor(),
    "qsgd": lambda: hvd.QSGDCompressor(bits=4),
    "terngrad": lambda: hvd.TernGradCompressor(),
}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for place, p in enumerate(model.parameters()):
            number = torch.arange(p.numel()) * 7919 + step * 104729 + hvd.rank() * 1299709 + place
            loss = loss + (p * ((number % 1009 - 504) / 64).view_as(p)).sum()
        loss.backward()
        optimizer.step()


def start(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    plain = torch.optim.SGD(model.parameters(), lr=0.125)
    names = model.named_parameters()
    return model, hvd.DistributedOptimizer(plain, names, compression=COMPRESSORS[name]())


def save(folder: Path) -> None:
    every = {}
    for name in COMPRESSORS:
        model, optimizer = start(name)
        train(model, optimizer, range(BEFORE))
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saved = {kind: clone(state) for kind, state in saved.items()}
        train(model, optimizer, range(BEFORE, BEFORE + AFTER))
        every[name] = {**saved, "after": model.state_dict()}
    torch.save(every, folder / f"rank-{hvd.rank()}.pt")


def clone(x):
    if isinstance(x, dict):
        return {name: clone(value) for name, value in x.items()}
    return x.clone() if isinstance(x, torch.Tensor) else x


def resume(folder: Path) -> dict[str, bool]:
    """Return by compressor whether two more steps gave the same bits as they did then."""
    same = {}
    for name, saved in torch.load(folder / f"rank-{hvd.rank()}.pt", weights_only=True).items():
        model, optimizer = start(name)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, range(BEFORE, BEFORE + AFTER))
        weights = model.state_dict()
        same[name] = all(torch.equal(weights[key], x) for key, x in saved["after"].items())
    return same


if __name__ == "__main__":
    out, what, checkpoints = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    hvd.init()
    if what == "save":
        save(checkpoints)
        hvd.shutdown()
    else:
        from tests.parallel.workers import results

        results.finish(hvd, out, resume(checkpoints))
