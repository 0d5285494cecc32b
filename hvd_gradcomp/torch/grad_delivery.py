"""Gives an optimizer's gradients to its engine; sparse ones to Horovod, which gathers their rows.

What comes back stands for a gradient in the place of a handle of Horovod's: a callable that returns
it reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as horovod
import torch

from hvd_gradcomp.torch.comm import horovod as comm_horovod

Reduced = Callable[[], torch.Tensor]


def give(optimizer: Any, p: torch.nn.Parameter) -> Reduced:
    """Gives a gradient away; zeros where there is none."""
    engine = optimizer._gradcomp
    if p.grad is None:
        p.grad = torch.zeros_like(p, dtype=getattr(p, "grad_dtype", None))
    if goes_sparse(optimizer, p):
        engine.give_sparse(p, p.grad)
        return _gather_rows(optimizer, p, p.grad)
    if p.grad.is_sparse:
        engine.say_rows_are_compressed(p)
    engine.give(p, p.grad.to_dense() if p.grad.is_sparse else p.grad)
    return lambda: engine.take(p)


def goes_sparse(optimizer: Any, p: torch.nn.Parameter) -> bool:
    """Whether the gradient of a parameter is gathered by Horovod."""
    return p.grad is not None and p.grad.is_sparse and not optimizer.sparse_as_dense


def make_dense(optimizer: Any, p: torch.nn.Parameter) -> Reduced:
    """Of a gradient that was given, and is sparse on some ranks and dense on others: dense on all.

    Returns:
        What stands for it from then on.
    """
    if goes_sparse(optimizer, p):
        rows = optimizer._handles[p][0]
        p.grad = torch.zeros_like(p)
    else:
        rows = _gather_rows(optimizer, p, no_rows(p))
    return lambda: optimizer._gradcomp.take(p).add(rows())


def no_rows(p: torch.nn.Parameter) -> torch.Tensor:
    """A sparse gradient that is zero."""
    shape = (0, *p.shape[1:])
    indices = torch.empty((1, 0), dtype=torch.int64, device=p.device)
    return torch.sparse_coo_tensor(indices, p.new_empty(shape), p.shape, check_invariants=False)


def _gather_rows(optimizer: Any, p: torch.nn.Parameter, rows: torch.Tensor) -> Reduced:
    """What comes back waits for the rows of all ranks, and adds up."""
    average, name = optimizer.op == horovod.Average, optimizer._parameter_names[p]
    wait = comm_horovod.sparse_allreduce(rows, name, optimizer.process_set, average)
    return lambda: optimizer._gradcomp.take_sparse(wait())
