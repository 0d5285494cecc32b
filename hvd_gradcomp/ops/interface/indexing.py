"""Verbs of shape and place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any

from hvd_gradcomp.ops.tensors import Tensor


class Placing(ABC):
    """Verbs of shape and place."""

    @abstractmethod
    def reshape(self, x: Tensor, shape: Sequence[Any]) -> Tensor: ...

    @abstractmethod
    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        """Along the last axis."""

    @abstractmethod
    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        """Along a new first axis."""

    @abstractmethod
    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        """`x[index]` for a vector x."""

    @abstractmethod
    def gather_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """`x[row, index[row]]` for x [rows, n] and index [rows, k]."""

    @abstractmethod
    def put(self, x: Tensor, index: Tensor, values: Any) -> Tensor:
        """`x[index] = values`. Donating. An index that repeats must repeat its value."""

    @abstractmethod
    def overwrite(self, x: Tensor, y: Tensor) -> Tensor:
        """y, in the place of x where a framework writes in place. Donating."""

    @abstractmethod
    def assemble(self, room: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """The pieces one after another, cut to the length of room. Donating for room.

        A piece may be the part of room where it belongs; or have several axes, in any order of
        memory, and then fit whole; or be what `lift` gave.
        """

    @abstractmethod
    def add_slice(self, x: Tensor, start: int, y: Tensor) -> Tensor:
        """`x[start:start + len(y)] += y` for vectors; y may reach beyond the end. Donating."""

    @abstractmethod
    def add_at(self, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        """`x[index] += values`. Donating. Indices are unique, but for the sink."""

    @abstractmethod
    def clear_last(self, x: Tensor) -> Tensor:
        """x with 0 as its last element. Donating."""

    # -- made of others --------------------------------------------------------------------

    def shares(
        self: Any, wanted: Tensor, most: Sequence[int], capacity: Any
    ) -> tuple[Tensor, Tensor]:
        """How many of the elements that groups want have room, int64 [groups]; and all wanted.

        One of each group has, and of the rest all groups have the same share.

        Args:
            wanted: int64 [groups]; 0 for the most.
            most: of each group.
            capacity: of the room.
        """
        wanted = self.where(wanted > 0, wanted, self.words(most))
        one = self.minimum(wanted, 1)
        total, least = self.sum(wanted), self.sum(one)
        share = (wanted - one) * (capacity - least) // self.maximum(total - least, 1)
        return self.where(total > capacity, one + share, wanted), total

    def unturned(self: Any, flat: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
        """What runs through axes of a shape in an order, and maybe beyond, as a tensor of them."""
        flat = flat[: prod(shape)]
        if tuple(order) == tuple(range(len(order))):
            return flat
        turned = self.reshape(flat, tuple(shape[axis] for axis in order))
        return self.transpose(turned, [order.index(axis) for axis in range(len(order))])
