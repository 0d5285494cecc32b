"""Quantization of every element, and the random numbers for rounding."""

from __future__ import annotations

from array import array
from typing import Any

import torch

from hvd_gradcomp.core.row_groups import Bands
from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.interface.quantization import FACTOR
from hvd_gradcomp.ops.torch.base import Base
from hvd_gradcomp.ops.torch.kernels import walkable


class Quantization(Base):
    """Ops that quantize every element, and the random numbers for rounding."""

    def key(self, step: Any, salt: int) -> Any:
        """Return the key of a step; with kernels two integers, since the device needs no tensor."""
        if self.kernels is None:
            return super().key(step, salt)
        first = _mix(_mix(step % (1 << 32)) ^ salt)
        return first, _mix(first ^ 0x9E3779B9)

    def uniform(self, key: Any, count: Any) -> Tensor:
        return super().uniform(self.words(key) if isinstance(key, tuple) else key, count)

    def group_maxima(self, bands: Bands, x: Tensor) -> Tensor:
        if self.quantizers is not None:
            return self.quantizers.group_maxima(bands, x)
        if self.native is None:
            return super().group_maxima(bands, x)
        x, out = x.contiguous(), self._empty(bands.groups)
        self.native("group_maxima", (self._of(bands), x), (out,))
        return out

    def group_squares(self, bands: Bands, x: Tensor) -> Tensor:
        if self.quantizers is not None:
            return self.quantizers.group_squares(bands, x)
        if self.native is None:
            return super().group_squares(bands, x)
        x, out = x.contiguous(), self._empty(bands.groups)
        self.native("group_squares", (self._of(bands), x), (out,))
        return out

    def group_norms(self, bands: Bands, x: Tensor) -> Tensor:
        if self.quantizers is None:
            return super().group_norms(bands, x)
        return self.quantizers.group_norms(bands, x)

    def clipped_maxima(self, bands: Bands, x: Tensor, clip: float) -> Tensor:
        if self.quantizers is None:
            return super().clipped_maxima(bands, x, clip)
        return self.quantizers.clipped_maxima(bands, x, clip)

    def encode_levels(
        self, bands: Bands, x: Tensor, scale: Tensor, bits: int, key: Tensor
    ) -> Tensor:
        if self.quantizers is not None:
            return self.quantizers.encode_levels(bands, x, scale, bits, key)
        if self.native is None:
            return super().encode_levels(bands, x, scale, bits, key)
        x, scale = x.contiguous(), scale.contiguous()
        packed = self._empty(x.shape[0] * bits // 8, dtype=torch.uint8)
        self.native("encode_levels", (self._of(bands), x, scale, key), (packed,), (bits,))
        return packed

    def add_levels(
        self,
        bands: Bands,
        base: Tensor | None,
        room: Tensor,
        packed: Tensor,
        scale: Tensor,
        bits: int,
        weights: Tensor,
    ) -> Tensor:
        if self.quantizers is not None:
            return self.quantizers.add_levels(bands, base, room, packed, scale, bits, weights)
        if self.native is None:
            return super().add_levels(bands, base, room, packed, scale, bits, weights)
        room = self.room(room)
        packed, scale, weights = walkable(packed), walkable(scale), weights.contiguous()
        start = room if base is None else base.contiguous()
        given = self._of(bands), start, packed, scale, weights
        self.native("add_levels", given, (room,), (bits, base is None))
        return room

    def encode_signs(self, bands: Bands, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.quantizers is not None:
            return self.quantizers.encode_signs(bands, x)
        if self.native is None:
            return super().encode_signs(bands, x)
        x, (above, below) = x.contiguous(), self._empty(2, bands.groups)
        packed = self._empty(x.shape[0] // 8, dtype=torch.uint8)
        self.native("encode_signs", (self._of(bands), x), (above, below, packed))
        return above, below, packed

    def add_signs(
        self,
        bands: Bands,
        base: Tensor | None,
        room: Tensor,
        packed: Tensor,
        above: Tensor,
        below: Tensor,
        weights: Tensor,
    ) -> Tensor:
        if self.quantizers is not None:
            return self.quantizers.add_signs(bands, base, room, packed, above, below, weights)
        if self.native is None:
            return super().add_signs(bands, base, room, packed, above, below, weights)
        room = self.room(room)
        packed, above, below = walkable(packed), above.contiguous(), below.contiguous()
        start = room if base is None else base.contiguous()
        given = self._of(bands), start, packed, above, below, weights.contiguous()
        self.native("add_signs", given, (room,), (base is None,))
        return room

    def _of(self, bands: Bands) -> array[int]:
        """Return the bands as C takes them."""
        if bands not in self._bands:
            numbers = [number for band in bands.bands for number in band]
            self._bands[bands] = array("q", numbers)
        return self._bands[bands]


def _mix(x: int) -> int:
    """Compute `Quantization.mix` of one number."""
    for _ in range(2):
        x = (x ^ x >> 16) * FACTOR % (1 << 32)
    return x ^ x >> 16
