"""Warm-up of an optimizer that exchanges something else than gradients later."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_gradcomp.runtime.local_rounds import DenseMeans
from hvd_gradcomp.torch.interop.shards import local_part, sharded_like
from hvd_gradcomp.torch.local.tensor_exchange import TensorExchange, copied


class WarmUp(DenseMeans):
    """First steps, in which the ranks average their gradients, dense, and step alike.

    Args:
        inner: the inner optimizer.
        parameters: that it trains.
        exchange: of their gradients.

    Attributes:
        exchange: as given.
    """

    exchange: TensorExchange

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        exchange: TensorExchange,
    ) -> None:
        self._inner, self._parameters, self.exchange = inner, parameters, exchange

    @torch.no_grad()
    def average(self) -> list[torch.Tensor] | None:
        self.exchange.start(copied([dense_gradient(p) for p in self._parameters]))
        return self.exchange.finish()

    def apply(self, means: Sequence[torch.Tensor]) -> None:
        """Step the inner optimizer by gradients that all ranks have."""
        for p, mean in zip(self._parameters, means):
            if p.requires_grad:
                p.grad = sharded_like(p, mean.to(p.dtype, copy=True))
        self._inner.step()


def dense_gradient(p: torch.nn.Parameter) -> torch.Tensor:
    """Return this rank's part of a parameter's gradient; zeros where there is none."""
    if p.grad is None:
        return torch.zeros_like(local_part(p))
    return p.grad.to_dense() if p.grad.is_sparse else local_part(p.grad)
