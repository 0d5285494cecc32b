"""The family of methods whose codes may be added up: `encode(a) + encode(b) == encode(a + b)`.

Only these also work inside stock Horovod, whose `Compressor` interface allreduces the payload.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any

import hvd_gradcomp.ops as verbs
from hvd_gradcomp.core import patterns
from hvd_gradcomp.core.collectives import Allreduce
from hvd_gradcomp.core.compressor import Compressor, Context, Program, State
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Ops, Tensor


class LinearCompressor(Compressor):
    """Base of the family."""

    is_linear = True
    itemsize = 4  # bytes that a float32 element takes on the wire
    block = 1  # every element travels, so padding would too

    @abstractmethod
    def encode(self, ops: Ops, gradient: Tensor) -> Tensor:
        """What is allreduced."""

    @abstractmethod
    def decode(self, ops: Ops, layout: Layout, code: Tensor) -> Tensor:
        """The gradient back, in the layout's dtype."""

    def in_halves(self, layout: Layout) -> bool:
        """Whether a float32 or float16 element is rounded to half precision on its way."""
        return self.itemsize == 2 or layout.dtype == "float16"

    def layer_bytes(self, shape: Sequence[int]) -> float:
        return self.itemsize * prod(shape)

    def init(self, ops: Ops, layout: Layout) -> tuple[()]:
        del ops, layout
        return ()

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: State, **extra: Tensor
    ) -> Program:
        """The ranks' codes are added up on the way.

        The sum itself says whether all were finite; or too large together for what travels.
        """
        del extra
        code = self.encode(ops, gradient)
        total = yield Allreduce(code, context.prescale, context.postscale, donated=True)
        return patterns.usable(ops, self.decode(ops, context.layout, total)), state

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Stock Horovod's entry: what it shall allreduce, and the dtype to come back to."""
        ops = verbs.of(tensor)
        return self.encode(ops, tensor), tensor.dtype

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """Stock Horovod's way back."""
        return verbs.of(tensor).cast(tensor, context)
