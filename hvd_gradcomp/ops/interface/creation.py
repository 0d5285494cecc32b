"""Verbs that make tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.tensors import Tensor


class Making(ABC):
    """Verbs that make tensors."""

    @abstractmethod
    def zeros(self, shape: Sequence[Any], dtype: str = "float32") -> Tensor: ...

    @abstractmethod
    def full(self, shape: Sequence[Any], value: Any, dtype: str = "int64") -> Tensor: ...

    @abstractmethod
    def arange(self, count: Any) -> Tensor:
        """0, 1, ... count - 1 as int64; count may be a scalar tensor in a graph."""

    @abstractmethod
    def table(self, layout: Layout, field: str) -> Tensor:
        """A tuple of integers that the layout knows, as an int64 tensor (cached where possible)."""

    @abstractmethod
    def words(self, values: Sequence[Any]) -> Tensor:
        """Python integers and int64 scalars as one int64 vector."""

    @abstractmethod
    def reals(self, values: Sequence[float]) -> Tensor:
        """Python floats as a float32 vector."""

    @abstractmethod
    def host(self, value: Any) -> Tensor:
        """An int64 scalar that lives on the host: rungs and counters, never data."""

    # -- made of others --------------------------------------------------------------------

    def constants(self: Any, values: tuple[float, ...]) -> Tensor:
        """`reals` that nobody writes to."""
        return self.reals(values)
