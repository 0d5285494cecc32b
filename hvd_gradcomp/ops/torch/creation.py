"""Ops that create tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.torch.base import DTYPES, Base


class Creation(Base):
    """Ops that create tensors."""

    def zeros(self, shape: Sequence[int], dtype: str = "float32") -> Tensor:
        return torch.zeros(tuple(shape), dtype=DTYPES[dtype], device=self.device)

    def full(self, shape: Sequence[int], value: Any, dtype: str = "int64") -> Tensor:
        return torch.full(tuple(shape), value, dtype=DTYPES[dtype], device=self.device)

    def arange(self, count: int) -> Tensor:
        return torch.arange(count, device=self.device)

    def table(self, static: Any, field: str) -> Tensor:
        key = (static, field)
        if key not in self._tables:
            self._tables[key] = torch.tensor(
                getattr(static, field), dtype=torch.int64, device=self.device
            )
        return self._tables[key]

    def words(self, values: Sequence[Any]) -> Tensor:
        known = [v if isinstance(v, int) else 0 for v in values]
        if self.on_host:
            return self.from_host([int(v) for v in values], torch.int64)
        words = self.from_host(known, torch.int64)
        for place, value in enumerate(values):
            if not isinstance(value, int):
                words[place] = value
        return words

    def reals(self, values: Sequence[float]) -> Tensor:
        return self.from_host(values, torch.float32)

    def host(self, value: int) -> Tensor:
        return torch.tensor(value, dtype=torch.int64, device="cpu")

    def constants(self, values: tuple[float, ...]) -> Tensor:
        if values not in self._constants:
            self._constants[values] = self.reals(values)
        return self._constants[values]
