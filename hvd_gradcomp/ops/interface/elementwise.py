"""Elementwise ops."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from hvd_gradcomp.ops.interface.native import Native
from hvd_gradcomp.ops.tensors import Tensor


class Elementwise(Native):
    """Elementwise ops."""

    @abstractmethod
    def abs(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def square(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def times(self, x: Tensor, factor: float) -> Tensor: ...

    @abstractmethod
    def log2(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def sqrt(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def maximum(self, x: Tensor, y: Any) -> Tensor: ...

    @abstractmethod
    def minimum(self, x: Tensor, y: Any) -> Tensor: ...

    @abstractmethod
    def where(self, condition: Tensor, x: Any, y: Any) -> Tensor: ...

    @abstractmethod
    def greater(self, x: Tensor, y: Any) -> Tensor:
        """Return `x > y` as bool. Donating: compares in place where that is faster."""

    @abstractmethod
    def accumulate(self, x: Tensor, y: Tensor) -> Tensor:
        """Return `x + y`. Donating."""

    @abstractmethod
    def clear(self, x: Tensor) -> Tensor:
        """Return x with every element 0. Donating."""

    @abstractmethod
    def scale(self, x: Tensor, factor: Any) -> Tensor:
        """Return `x * factor`. Donating."""

    @abstractmethod
    def cast(self, x: Tensor, dtype: Any) -> Tensor:
        """Cast to a dtype, given by name or as the framework's own."""

    @abstractmethod
    def split_bits(self, x: Tensor, low: int) -> tuple[Tensor, Tensor]:
        """Return `(x // 2**low, x % 2**low)` of non-negative int64."""

    @abstractmethod
    def shift_right(self, x: Tensor, amount: Tensor) -> Tensor:
        """Return `x // 2**amount` of non-negative int64; amount is int64."""

    @abstractmethod
    def xor(self, x: Tensor, y: Any) -> Tensor:
        """Return the bitwise exclusive or of int64."""

    @abstractmethod
    def float_bits(self, x: Tensor) -> Tensor:
        """Return the IEEE-754 bits of float32 as int64 in [0, 2**32)."""

    @abstractmethod
    def bits_float(self, bits: Tensor) -> Tensor:
        """Invert `float_bits`."""

    # -- composite ops ---------------------------------------------------------------------

    def advance(
        self, r: Tensor, u: Tensor, gradient: Tensor, momentum: float, nesterov: bool
    ) -> tuple[Tensor, Tensor]:
        """Return (r, u) after `u = momentum*u + g`, `r += u` (Nesterov: `r += momentum*u + g`).

        Elementwise, donating for r and u.
        """
        if self.native is not None:
            outputs = self.writable(r), self.writable(u)
            r, u = self.native("add_momentum", (r, u, gradient), outputs, (nesterov,), (momentum,))
            return r, u
        u = self.accumulate(self.scale(u, momentum), gradient)
        ahead = self.accumulate(self.times(u, momentum), gradient) if nesterov else u
        return self.accumulate(r, ahead), u

    def signs(self, x: Tensor, unit: float) -> Tensor:
        """Return the unit with the sign of each element, 0 for 0; elementwise. Donating."""
        positive, negative = (self.cast(side, "float32") for side in (x > 0, x < 0))
        return self.scale(positive - negative, unit)

    def leaky_relu(self, x: Tensor, slope: float) -> Tensor:
        """Return x where it is positive, `slope * x` elsewhere."""
        return self.where(x > 0, x, x * slope)
