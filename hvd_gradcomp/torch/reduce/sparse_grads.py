"""Sparse gradients: compressed as dense ones, or their rows gathered, uncompressed."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from hvd_gradcomp.torch.reduce.bucket import as_real
from hvd_gradcomp.torch.reduce.reducer import Reducer

LOGGER = logging.getLogger("hvd_gradcomp")


class SparseGradients:
    """Sparse gradients of one optimizer, or of one model.

    Args:
        reducer: of the gradients.
        allreduce: the `sparse_allreduce` of a transport.
        average: gradients are averaged, not summed.
        as_dense: compress them as dense ones, and do not gather their rows.
        by_default: `as_dense` was not requested; that is logged once.
    """

    def __init__(
        self,
        reducer: Reducer,
        allreduce: Callable[..., Callable[[], torch.Tensor]],
        *,
        average: bool,
        as_dense: bool,
        by_default: bool,
    ) -> None:
        self._reducer, self._sum_rows = reducer, allreduce
        self._average, self._as_dense = average, as_dense
        self._says = as_dense and by_default

    def is_gathered(self, p: torch.nn.Parameter) -> bool:
        """Return True if the rows of a parameter's gradient are gathered."""
        return p.grad is not None and p.grad.is_sparse and not self._as_dense

    def as_dense(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return a sparse gradient as a dense one."""
        if self._says and self._reducer.participants.process_set.rank() == 0:
            LOGGER.info(
                "the sparse gradient of %s is compressed as a dense one: its bucket has room for "
                "it in any case, so gathered rows would come on top (sparse_as_dense=None)",
                name,
            )
        self._says = False
        return gradient.to_dense()

    def in_bucket(self, p: torch.nn.Parameter, rows: torch.Tensor) -> torch.Tensor | None:
        """Return what lies in the bucket of a gradient whose rows are gathered: None for zeros.

        Or NaN, which tells the other ranks that the gradient is not finite.
        """
        nothing = (as_real(rows._values()) * 0).sum().to(as_real(p.detach()).dtype)
        return None if not nothing.is_cuda and nothing == 0 else nothing

    def gather(self, name: str, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to gather rows, and count them; return a function that waits for all ranks'."""
        group, traffic = self._reducer.participants.process_set, self._reducer.traffic
        count = rows._values().numel()
        if count:
            traffic.gathered[name] = traffic.gathered.get(name, 0) + count
        return self._sum_rows(rows, name, group, self._average, traffic)


def no_rows(p: torch.nn.Parameter) -> torch.Tensor:
    """Return a sparse gradient of zero: no rows."""
    shape = (0, *p.shape[1:])
    indices = torch.empty((1, 0), dtype=torch.int64, device=p.device)
    return torch.sparse_coo_tensor(indices, p.new_empty(shape), p.shape, check_invariants=False)


def all_zero(gradient: torch.Tensor) -> bool:
    """Return True if a gradient, dense or sparse, has no element but zeros."""
    values = gradient._values() if gradient.is_sparse else gradient
    return not bool(values.any())
