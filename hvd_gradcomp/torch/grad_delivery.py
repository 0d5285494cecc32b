"""Delivery of an optimizer's gradients to its reducer; Horovod gathers the rows of sparse ones.

Each delivery returns a callable in place of a Horovod handle; it returns the reduced gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as horovod
import torch

from hvd_gradcomp.torch.comm import horovod as comm_horovod

Reduced = Callable[[], torch.Tensor]


def give(optimizer: Any, p: torch.nn.Parameter) -> Reduced:
    """Deliver a gradient, zeros if there is none; return the callable for the reduced one."""
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
    """Return True if Horovod gathers the gradient of the parameter."""
    return p.grad is not None and p.grad.is_sparse and not optimizer.sparse_as_dense


def make_dense(optimizer: Any, p: torch.nn.Parameter) -> Reduced:
    """Make a delivered gradient dense that is sparse on some ranks and dense on others.

    Returns:
        The callable for the reduced gradient, which replaces the earlier one.
    """
    if goes_sparse(optimizer, p):
        rows = optimizer._handles[p][0]
        p.grad = torch.zeros_like(p)
    else:
        rows = _gather_rows(optimizer, p, no_rows(p))
    return lambda: optimizer._gradcomp.take(p).add(rows())


def no_rows(p: torch.nn.Parameter) -> torch.Tensor:
    """Return a sparse gradient without rows."""
    shape = (0, *p.shape[1:])
    indices = torch.empty((1, 0), dtype=torch.int64, device=p.device)
    return torch.sparse_coo_tensor(indices, p.new_empty(shape), p.shape, check_invariants=False)


def _gather_rows(optimizer: Any, p: torch.nn.Parameter, rows: torch.Tensor) -> Reduced:
    """Start to gather rows; return a callable that waits for those of all ranks and sums them."""
    average, name = optimizer.op == horovod.Average, optimizer._parameter_names[p]
    wait = comm_horovod.sparse_allreduce(rows, name, optimizer.process_set, average)
    return lambda: optimizer._gradcomp.take_sparse(wait())
