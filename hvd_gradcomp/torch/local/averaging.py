"""Dense means over ranks, of buffers and of gradients in the warm-up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.runtime.local_rounds import DenseMeans
from hvd_gradcomp.torch.interop.shards import local_part
from hvd_gradcomp.torch.local.fragment import Connect
from hvd_gradcomp.torch.local.outer import shaped_like
from hvd_gradcomp.torch.local.tensor_exchange import TensorExchange, copied
from hvd_gradcomp.torch.reduce.options import ExchangeOptions


def mean_exchange(
    named: Sequence[tuple[str, torch.Tensor]], connect: Connect, name: str
) -> TensorExchange:
    """Return an exchange of dense means; what is not finite counts as skipped.

    Args:
        named: (name, tensor) of what has the shapes.
        connect: returns the connection.
        name: of the exchange.
    """
    shapes = [(n, shaped_like(local_part(x))) for n, x in named]
    options = ExchangeOptions(nonfinite="skip", scaler=False)
    return TensorExchange(shapes, shapes, NoneCompressor(), connect(name), options, name)


class BufferMeans(DenseMeans):
    """Averaging of a model's buffers, such as running means.

    Args:
        named: (name, buffer) of those in floating point.
        connect: returns the connection of the exchange.

    Attributes:
        exchange: of the buffers.
    """

    exchange: TensorExchange

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], connect: Connect) -> None:
        self._buffers = [buffer for _, buffer in named]
        self.exchange = mean_exchange(named, connect, "buffers")

    def average(self) -> list[torch.Tensor] | None:
        self.exchange.start(copied(self._buffers))
        return self.exchange.finish()

    def apply(self, means: Sequence[torch.Tensor]) -> None:
        for buffer, mean in zip(self._buffers, means):
            buffer.detach().copy_(mean)
