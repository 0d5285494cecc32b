"""Shape and indexing ops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hvd_gradcomp.ops.tensors import Tensor


class Indexing(ABC):
    """Shape and indexing ops."""

    @abstractmethod
    def reshape(self, x: Tensor, shape: Sequence[Any]) -> Tensor: ...

    @abstractmethod
    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        """Concatenate along the last axis."""

    @abstractmethod
    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        """Stack along a new first axis."""

    @abstractmethod
    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        """Return `x[index]` for a vector x."""

    @abstractmethod
    def gather_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """Return `x[row, index[row]]` for x [rows, n] and index [rows, k]."""

    @abstractmethod
    def put(self, x: Tensor, index: Tensor, values: Any) -> Tensor:
        """Set `x[index] = values`. Donating. An index that repeats must repeat its value."""

    @abstractmethod
    def overwrite(self, x: Tensor, y: Tensor) -> Tensor:
        """Return y, written to x where a framework writes in place. Donating."""

    @abstractmethod
    def assemble(self, out: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """Concatenate the pieces, cut to the length of out. Donating for out.

        A piece may be the slice of out where it belongs; or have several axes, in any memory
        order, and then fit whole; or be the result of `lift`.
        """

    @abstractmethod
    def add_slice(self, x: Tensor, start: int, y: Tensor) -> Tensor:
        """Add `x[start:start + len(y)] += y` for vectors; y may reach beyond the end. Donating."""

    @abstractmethod
    def add_at(self, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        """Add `x[index] += values`. Donating.

        Indices are unique, except for the sink; what is added there may be any of its values.
        """

    @abstractmethod
    def clear_last(self, x: Tensor) -> Tensor:
        """Return x with 0 as its last element. Donating."""
