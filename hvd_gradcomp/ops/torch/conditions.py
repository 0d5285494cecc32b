"""Conditions on a tile, which find indices without forming flags, by the C library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from hvd_gradcomp.ops import Tensor


class Condition(ABC):
    """Lazy condition on a tile: indices are found without forming flags."""

    def __and__(self, other: Greater | Both) -> Both:
        return Both(self, other)

    @abstractmethod
    def find(self, native: Any, base: int, out: Tensor) -> int:
        """Write the indices, from base on, and return their number."""


class Greater(Condition):
    """Condition `x > y`."""

    def __init__(self, x: Tensor, y: Any) -> None:
        self.x, self.y = x, y

    def at(self, index: Tensor) -> Tensor:
        """Evaluate at some indices, as bool."""
        y = self.y[index] if isinstance(self.y, torch.Tensor) else self.y
        return self.x[index] > y

    def find(self, native: Any, base: int, out: Tensor) -> int:
        x, size, room = self.x.data_ptr(), self.x.shape[0], out.data_ptr()
        if isinstance(self.y, torch.Tensor):
            return int(native.find_greater(x, self.y.data_ptr(), size, base, room))
        return int(native.find_beyond(x, self.y, size, base, room))


class Found(Condition):
    """Evaluated condition: the indices where it held."""

    def __init__(self, index: Tensor) -> None:
        self.index = index

    def find(self, native: Any, base: int, out: Tensor) -> int:
        del native
        count = self.index.shape[0]
        torch.add(self.index, base, out=out[:count])
        return count


class Both(Condition):
    """Conjunction of two conditions; the second is evaluated only where the first holds."""

    def __init__(self, first: Condition, second: Greater | Both) -> None:
        self.first, self.second = first, second

    def at(self, index: Tensor) -> Tensor:
        """Evaluate at some indices, as bool."""
        assert isinstance(self.first, (Greater, Both))
        return self.first.at(index) & self.second.at(index)

    def find(self, native: Any, base: int, out: Tensor) -> int:
        index = out[: self.first.find(native, 0, out)]
        kept = index[self.second.at(index)]
        out[: kept.shape[0]] = kept + base
        return kept.shape[0]


class Above(Condition):
    """Condition `|x| >= bound` of the block, and x is not 0."""

    def __init__(self, x: Tensor, bound: Tensor, block: int) -> None:
        self.x, self.bound, self.block = x, bound, block

    def flags(self) -> Tensor:
        """Evaluate everywhere, as bool."""
        magnitude = self.x.abs().view(-1, self.block)
        bounds = self.bound[: magnitude.shape[0], None]
        return ((magnitude >= bounds) & (magnitude > 0)).view(-1)

    def find(self, native: Any, base: int, out: Tensor) -> int:
        x, size, bound = self.x.data_ptr(), self.x.shape[0], self.bound.data_ptr()
        return int(native.find_above(x, size, bound, self.block, base, out.data_ptr()))
