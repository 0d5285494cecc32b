"""Sparse gradients whose rows Horovod gathers, uncompressed."""

from __future__ import annotations

import torch


def no_rows(p: torch.nn.Parameter) -> torch.Tensor:
    """Return a sparse gradient of zero: no rows."""
    shape = (0, *p.shape[1:])
    indices = torch.empty((1, 0), dtype=torch.int64, device=p.device)
    return torch.sparse_coo_tensor(indices, p.new_empty(shape), p.shape, check_invariants=False)


def all_zero(gradient: torch.Tensor) -> bool:
    """Return True if a gradient, dense or sparse, has no element but zeros."""
    values = gradient._values() if gradient.is_sparse else gradient
    return not bool(values.any())
