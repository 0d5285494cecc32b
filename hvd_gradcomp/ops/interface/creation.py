"""Ops that create tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hvd_gradcomp.ops.tensors import Tensor


class Creation(ABC):
    """Ops that create tensors."""

    @abstractmethod
    def zeros(self, shape: Sequence[Any], dtype: str = "float32") -> Tensor: ...

    @abstractmethod
    def full(self, shape: Sequence[Any], value: Any, dtype: str = "int64") -> Tensor: ...

    @abstractmethod
    def arange(self, count: Any) -> Tensor:
        """Return 0, 1, ... count - 1 as int64; count may be a scalar tensor in a graph."""

    @abstractmethod
    def table(self, static: Any, field: str) -> Tensor:
        """Return an integer tuple of a static object as an int64 tensor (cached where possible).

        Args:
            static: a layout, or another that is hashable and has the field.
            field: its name.
        """

    @abstractmethod
    def words(self, values: Sequence[Any]) -> Tensor:
        """Return Python integers and int64 scalars as one int64 vector."""

    @abstractmethod
    def reals(self, values: Sequence[float]) -> Tensor:
        """Return Python floats as a float32 vector."""

    @abstractmethod
    def host(self, value: Any) -> Tensor:
        """Return an int64 scalar on the host: capacity levels and counters, never data."""

    # -- composite ops ---------------------------------------------------------------------

    def constants(self, values: tuple[float, ...]) -> Tensor:
        """Return `reals` that must not be written to."""
        return self.reals(values)
