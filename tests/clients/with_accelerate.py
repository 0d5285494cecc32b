"""Accelerate: what comes after `prepare` stays as it is.

Each rank uses Accelerate as a process alone, on its share of the samples; Horovod reduces.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hvd_gradcomp.torch as hvd
from tests.clients import cases

MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # what mpirun tells each of its processes


def train(
    compressor: hvd.Compressor | None,
    samples: Any,
    batch: int,
    *,
    momentum: float = 0.9,
    norm: float | None = None,
    value: float | None = None,
    passes: int = 1,
    passes_known: int | None = None,
    early: bool = False,
    **settings: Any,
) -> torch.nn.Module:
    """One epoch, clipped by norm or by value; gradients are accumulated over some passes.

    Args:
        passes_known: number of passes that Horovod is told.
        early: synchronize before clipping, which the last step of an epoch needs if it has fewer
            passes.
    """
    model = cases.mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=cases.RATE, momentum=momentum)
    if compressor is not None:
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            compression=compressor,
            backward_passes_per_step=passes_known or passes,
        )
    reduced = optimizer  # `prepare` returns what wraps it
    alone()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=passes, **settings)
    loader = DataLoader(TensorDataset(*samples), batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(x), y))
            if accelerator.sync_gradients and early and compressor is not None:
                reduced.synchronize()
            if accelerator.sync_gradients and norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), norm)
            if accelerator.sync_gradients and value is not None:
                accelerator.clip_grad_value_(model.parameters(), value)
            optimizer.step()
            optimizer.zero_grad()
    return model


def alone() -> None:
    """Lets the next Accelerator find no other processes, and no settings of an earlier one."""
    for name in MPI:
        os.environ.pop(name, None)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def main(folder: str) -> None:
    hvd.init()
    samples, norm = cases.points(64), {"norm": cases.CLIPPED}
    cases.compare(
        folder,
        train,
        cases.mlp,
        samples,
        lambda model: cross_entropy(model(samples[0]), samples[1]),
        {
            "plain": ({}, {}),
            "norm": ({}, norm),
            "value": ({}, {"value": 0.005}),
            "accumulated": ({"passes": 2}, norm),
            "odd": ({"passes": 3}, {"early": True, **norm}),
            "bfloat16": ({"mixed_precision": "bf16"}, norm),
        },
        norm,
        {
            "odd": {"passes": 3, **norm},
            "not told": {"passes": 2, "passes_known": 1, **norm},
            "told more": {"passes_known": 2, **norm},
        },
    )


if __name__ == "__main__":
    main(sys.argv[1])
