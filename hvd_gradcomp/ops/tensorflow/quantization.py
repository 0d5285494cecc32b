"""Quantization of every element, and the random numbers for rounding."""

from __future__ import annotations

from typing import Any

from hvd_gradcomp.core.row_groups import Bands
from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.tensorflow.base import Base, integer, numbers


class Quantization(Base):
    """Ops that quantize every element, and the random numbers for rounding."""

    def key(self, step: Any, salt: int) -> Tensor:
        if self.native is None:
            return super().key(step, salt)
        return self.native.gradcomp_key(integer(step), salt=salt)

    def group_maxima(self, bands: Bands, x: Tensor) -> Tensor:
        if self.native is None:
            return super().group_maxima(bands, x)
        return self.native.gradcomp_group_maxima(x, bands=numbers(bands))

    def group_squares(self, bands: Bands, x: Tensor) -> Tensor:
        if self.native is None:
            return super().group_squares(bands, x)
        return self.native.gradcomp_group_squares(x, bands=numbers(bands))

    def encode_levels(
        self, bands: Bands, x: Tensor, scale: Tensor, bits: int, key: Tensor
    ) -> Tensor:
        if self.native is None:
            return super().encode_levels(bands, x, scale, bits, key)
        return self.native.gradcomp_encode_levels(x, scale, key, bands=numbers(bands), bits=bits)

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
        if self.native is None:
            return super().add_levels(bands, base, room, packed, scale, bits, weights)
        return self.native.gradcomp_add_levels(
            room if base is None else base,
            packed,
            scale,
            weights,
            bands=numbers(bands),
            bits=bits,
            from_zero=base is None,
        )

    def encode_signs(self, bands: Bands, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.native is None:
            return super().encode_signs(bands, x)
        above, below, packed = self.native.gradcomp_encode_signs(x, bands=numbers(bands))
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
        if self.native is None:
            return super().add_signs(bands, base, room, packed, above, below, weights)
        return self.native.gradcomp_add_signs(
            room if base is None else base,
            packed,
            above,
            below,
            weights,
            bands=numbers(bands),
            from_zero=base is None,
        )
