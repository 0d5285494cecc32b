"""Family of linear methods, whose codes can be summed: `encode(a) + encode(b) == encode(a + b)`.

Only these also work inside stock Horovod, whose `Compressor` interface allreduces the payload.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any

from hvd_gradcomp.core.collectives import Allreduce
from hvd_gradcomp.core.cost_model import Exchange
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns
from hvd_gradcomp.method.compressor import Compressor, Context, Program, State
from hvd_gradcomp.ops import Ops, Tensor, ops_of


class LinearCompressor(Compressor):
    """Base of the family."""

    is_linear = True
    itemsize = 4  # bytes that a float32 element takes on the wire
    block = 1  # every element is sent, and padding would be too

    @abstractmethod
    def to_code(self, ops: Ops, gradient: Tensor) -> Tensor:
        """Encode the gradient for the allreduce."""

    @abstractmethod
    def from_code(self, ops: Ops, layout: Layout, code: Tensor) -> Tensor:
        """Decode the gradient, in the layout's dtype."""

    def in_halves(self, layout: Layout) -> bool:
        """Return True if it sums float32 or float16 elements in half precision."""
        return self.itemsize == 2 or layout.dtype == "float16"

    def layer_bytes(self, shape: Sequence[int]) -> float:
        return self.itemsize * prod(shape)

    def exchange_of(self, layout: Layout, ranks: int) -> Exchange:
        width = 2 if self.in_halves(layout) else 8 if layout.dtype == "float64" else 4
        return Exchange("allreduce", (("allreduce", float(width * layout.size)),))

    def init(self, ops: Ops, layout: Layout) -> tuple[()]:
        del ops, layout
        return ()

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: State, **extra: Tensor
    ) -> Program:
        """Allreduce the ranks' codes.

        A non-finite sum reveals a non-finite gradient, or an overflow of the dtype that is sent.
        """
        del extra
        code = self.to_code(ops, gradient)
        total = yield Allreduce(code, context.prescale, context.postscale, donated=True)
        return patterns.check_sum(ops, self.from_code(ops, context.layout, total)), state

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the code that stock Horovod allreduces, and the dtype to restore."""
        ops = ops_of(tensor)
        return self.to_code(ops, tensor), tensor.dtype

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """Restore the dtype after stock Horovod's allreduce."""
        return ops_of(tensor).cast(tensor, context)
