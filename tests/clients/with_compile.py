"""`torch.compile`: of the model, of backward, and of all that a step does.

Plain PyTorch, which everything is held to, runs eagerly.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch._dynamo import compiled_autograd
from torch.nn.functional import cross_entropy

import hvd_gradcomp.torch as hvd
from tests.clients import cases


def train(
    compressor: hvd.Compressor | None,
    samples: Any,
    batch: int,
    *,
    momentum: float = 0.9,
    norm: float = float("inf"),
    model_by: str | None = None,
    backward_by: str | None = None,
    step_by: str | None = None,
    early: bool = True,
) -> torch.nn.Module:
    """One epoch, clipped by norm; each part may be compiled by one of PyTorch's backends.

    Compiled autograd leaves out what is to be called at the end of backward: `early` does it.
    """
    torch._dynamo.reset()  # so that each training compiles anew, however many there were before
    model = cases.mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=cases.RATE, momentum=momentum)
    if compressor is None:
        model_by = backward_by = step_by = None
    else:
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), compression=compressor
        )
    compiled = model if model_by is None else torch.compile(model, backend=model_by)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = cross_entropy(compiled(x), y)
        with nullcontext() if backward_by is None else compiled_backward(backward_by):
            loss.backward()
        if backward_by is not None and early:
            optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()

    each = step if step_by is None else torch.compile(step, backend=step_by)
    for x, y in zip(*(s.split(batch) for s in samples)):
        each(x, y)
    return model


def compiled_backward(backend: str) -> Any:
    """Compiled autograd for what runs meanwhile."""
    return compiled_autograd._enable(torch.compile(backend=backend))


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
            "eager": ({"model_by": "eager"}, norm),
            "aot_eager": ({"model_by": "aot_eager"}, norm),
            "inductor": ({"model_by": "inductor"}, norm),
            "compiled autograd": ({"backward_by": "eager"}, norm),
            "whole step": ({"step_by": "aot_eager"}, norm),
        },
        {"model_by": "eager", **norm},
        {"not synchronized": {"backward_by": "eager", "early": False, **norm}},
    )


if __name__ == "__main__":
    main(sys.argv[1])
