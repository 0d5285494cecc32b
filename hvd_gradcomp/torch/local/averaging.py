"""Means over ranks, dense: of gradients in the warm-up, and of buffers after each round."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.torch.local.fragment import Connect, wide
from hvd_gradcomp.torch.options import ExchangeOptions
from hvd_gradcomp.torch.tensor_exchange import TensorExchange
from hvd_gradcomp.torch.wrapped_optimizer import dense_gradient


def _mean(named: Sequence[tuple[str, torch.Tensor]], connect: Connect, name: str) -> TensorExchange:
    """Return an exchange of dense means; what is not finite counts as skipped."""
    shapes = [(n, wide(x)) for n, x in named]
    options = ExchangeOptions(nonfinite="skip", scaler=False)
    return TensorExchange(shapes, shapes, NoneCompressor(), connect(name), options, name)


class WarmUp:
    """First steps, in which the ranks average their gradients, and step alike.

    Args:
        inner: the inner optimizer.
        named: (name, parameter) of all that it trains.
        connect: returns the connection of the exchange.

    Attributes:
        exchange: of the gradients.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        connect: Connect,
    ) -> None:
        self._inner, self._parameters = inner, [p for _, p in named]
        self.exchange = _mean(named, connect, "warmup")

    @torch.no_grad()
    def average(self) -> list[torch.Tensor] | None:
        """Return the mean gradients; None if one of some rank is not finite."""
        self.exchange.start([dense_gradient(p) for p in self._parameters])
        return self.exchange.finish()

    def step(self, means: Sequence[torch.Tensor]) -> None:
        """Step the inner optimizer by gradients that all ranks have."""
        for p, mean in zip(self._parameters, means):
            if p.requires_grad:
                p.grad = mean.to(p.dtype, copy=True)
        self._inner.step()


class BufferMeans:
    """Averaging of a model's buffers, such as running means.

    Args:
        named: (name, buffer) of those in floating point.
        connect: returns the connection of the exchange.

    Attributes:
        exchange: of the buffers.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], connect: Connect) -> None:
        self._buffers = [buffer for _, buffer in named]
        self.exchange = _mean(named, connect, "buffers")

    def average(self) -> list[torch.Tensor] | None:
        """Return the mean of each buffer; None if one of some rank is not finite."""
        self.exchange.start(self._buffers)
        return self.exchange.finish()

    def apply(self, means: Sequence[torch.Tensor]) -> None:
        """Set the buffers."""
        for buffer, mean in zip(self._buffers, means):
            buffer.detach().copy_(mean)
