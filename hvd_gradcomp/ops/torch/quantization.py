"""Quantization of every element, and the random numbers for rounding."""

from __future__ import annotations

from typing import Any

import torch

from hvd_gradcomp.core.row_groups import RowGroups
from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.interface.quantization import FACTOR
from hvd_gradcomp.ops.torch.base import Base

_E4M3 = getattr(torch, "float8_e4m3fn", None)  # since PyTorch 2.1


class Quantization(Base):
    """Ops that quantize every element, and the random numbers for rounding."""

    def key(self, step: Any, salt: int) -> Any:
        """Return the key of a step; with kernels two integers, since the device needs no tensor."""
        if self.kernels is None and not self.on_host:
            return super().key(step, salt)
        first = _mix(_mix(step % (1 << 32)) ^ salt)
        both = first, _mix(first ^ 0x9E3779B9)
        return self.words(both) if self.kernels is None else both

    def random_words(self, key: Any, count: Any) -> Tensor:
        return super().random_words(self.words(key) if isinstance(key, tuple) else key, count)

    def encode_floats(
        self, row_groups: RowGroups, x: Tensor, unit: Tensor | None, bits: int, key: Tensor | None
    ) -> Tensor:
        """Return the interface's; on a GPU by PyTorch's own types, which round alike.

        The code of a NaN is another one there. No step that has one is taken.
        """
        narrow = torch.bfloat16 if bits == 16 else _E4M3
        if self.on_host or key is not None or narrow is None:
            return super().encode_floats(row_groups, x, unit, bits, key)
        if unit is not None:
            x = self._by_group(row_groups, x, self._inverse(unit, 1.0))
        return x.to(narrow).view(torch.uint8)

    def _by_group(self, row_groups: RowGroups, x: Tensor, factor: Tensor) -> Tensor:
        """Return the interface's; on a GPU in a few launches for any number of groups."""
        if self.on_host:
            return super()._by_group(row_groups, x, factor)
        size = x.shape[0]
        if (row_groups, size) not in self._spreads:
            which, counts, done, group = [], [], 0, 0
            for band in row_groups.runs:
                which += [row_groups.groups, *range(group, group + band.rows)]
                counts += [band.start - done, *[band.length] * band.rows]
                done, group = band.end, group + band.rows
            which, counts = [*which, group], [*counts, size - done]
            tables = tuple(self.from_host(numbers, torch.int64) for numbers in (which, counts))
            self._spreads[row_groups, size] = tables
        which, counts = self._spreads[row_groups, size]
        padded = torch.cat((factor, factor.new_zeros(1)))
        each = padded[which].repeat_interleave(counts, output_size=size)
        inside = (which < row_groups.groups).repeat_interleave(counts, output_size=size)
        return torch.where(inside, x * each, 0.0)

    def _code_bytes(self, codes: Tensor, bits: int) -> Tensor:
        if self.on_host:
            return super()._code_bytes(codes, bits)
        return codes.to(torch.uint8 if bits == 8 else torch.int16).view(torch.uint8)

    def _codes_in(self, data: Tensor, bits: int) -> Tensor:
        if self.on_host:
            return super()._codes_in(data, bits)
        if bits == 8:
            return data.to(torch.int64)
        return data.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF


def _mix(x: int) -> int:
    """Compute `Quantization.mix` of one number."""
    for _ in range(2):
        x = (x ^ x >> 16) * FACTOR % (1 << 32)
    return x ^ x >> 16
