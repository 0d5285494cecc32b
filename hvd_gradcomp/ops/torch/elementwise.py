"""Elementwise ops."""

from __future__ import annotations

from typing import Any

import torch

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.torch.base import DTYPES, WORD, Base, low_word


class Elementwise(Base):
    """Elementwise ops."""

    def abs(self, x: Tensor) -> Tensor:
        return torch.abs(x, out=self._scratch(x))

    def square(self, x: Tensor) -> Tensor:
        return torch.mul(x, x, out=self._scratch(x))

    def times(self, x: Tensor, factor: float) -> Tensor:
        return torch.mul(x, factor, out=self._scratch(x))

    def log2(self, x: Tensor) -> Tensor:
        return torch.log2(x)

    def sqrt(self, x: Tensor) -> Tensor:
        return torch.sqrt(x)

    def maximum(self, x: Tensor, y: Any) -> Tensor:
        return torch.maximum(x, y) if isinstance(y, torch.Tensor) else x.clamp(min=y)

    def minimum(self, x: Tensor, y: Any) -> Tensor:
        return torch.minimum(x, y) if isinstance(y, torch.Tensor) else x.clamp(max=y)

    def where(self, condition: Tensor, x: Any, y: Any) -> Tensor:
        return torch.where(condition, x, y)

    def greater(self, x: Tensor, y: Any) -> Tensor:
        if self.on_host and x.dtype == torch.float32:
            flags = self._scratch(x, torch.bool)
            return x.gt_(y).bool() if flags is None else flags.copy_(x.gt_(y))
        return x > y

    def accumulate(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, y, out=self.writable(x))

    def clear(self, x: Tensor) -> Tensor:
        return self.writable(x).zero_()

    def scale(self, x: Tensor, factor: Any) -> Tensor:
        return torch.mul(x, factor, out=self.writable(x))

    def signs(self, x: Tensor, unit: float) -> Tensor:
        return torch.sign(x, out=self.writable(x)).mul_(unit)

    def cast(self, x: Tensor, dtype: Any) -> Tensor:
        return x.to(DTYPES.get(dtype, dtype))

    def split_bits(self, x: Tensor, low: int) -> tuple[Tensor, Tensor]:
        return x >> low, x & ((1 << low) - 1)

    def shift_right(self, x: Tensor, amount: Tensor) -> Tensor:
        return x >> amount

    def xor(self, x: Tensor, y: Any) -> Tensor:
        return x ^ y

    def float_bits(self, x: Tensor) -> Tensor:
        return x.view(torch.int32).to(torch.int64) & WORD

    def bits_float(self, bits: Tensor) -> Tensor:
        return low_word(bits).view(torch.float32)

    def leaky_relu(self, x: Tensor, slope: float) -> Tensor:
        return torch.nn.functional.leaky_relu(x, slope)
