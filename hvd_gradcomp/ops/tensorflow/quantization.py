"""Quantization of every element, and the random numbers for rounding."""

from __future__ import annotations

from typing import Any

from hvd_gradcomp.core.row_groups import RowGroups
from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.tensorflow.base import Base, integer, numbers


class Quantization(Base):
    """Ops that quantize every element, and the random numbers for rounding."""

    def key(self, step: Any, salt: int) -> Tensor:
        if self.native is None:
            return super().key(step, salt)
        return self.native.gradcomp_key(integer(step), salt=salt)

    def group_maxima(self, row_groups: RowGroups, x: Tensor) -> Tensor:
        if self.native is None:
            return super().group_maxima(row_groups, x)
        return self.native.gradcomp_group_maxima(x, bands=numbers(row_groups))

    def group_squares(self, row_groups: RowGroups, x: Tensor) -> Tensor:
        if self.native is None:
            return super().group_squares(row_groups, x)
        return self.native.gradcomp_group_squares(x, bands=numbers(row_groups))

    def encode_levels(
        self, row_groups: RowGroups, x: Tensor, scale: Tensor, bits: int, key: Tensor | None
    ) -> Tensor:
        if self.native is None or key is None:
            return super().encode_levels(row_groups, x, scale, bits, key)
        return self.native.gradcomp_encode_levels(
            x, scale, key, bands=numbers(row_groups), bits=bits
        )

    def add_levels(
        self,
        row_groups: RowGroups,
        base: Tensor | None,
        room: Tensor,
        packed: Tensor,
        scale: Tensor,
        bits: int,
        weights: Tensor,
    ) -> Tensor:
        if self.native is None:
            return super().add_levels(row_groups, base, room, packed, scale, bits, weights)
        return self.native.gradcomp_add_levels(
            room if base is None else base,
            packed,
            scale,
            weights,
            bands=numbers(row_groups),
            bits=bits,
            from_zero=base is None,
        )

    def encode_signs(self, row_groups: RowGroups, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.native is None:
            return super().encode_signs(row_groups, x)
        above, below, packed = self.native.gradcomp_encode_signs(x, bands=numbers(row_groups))
        return above, below, packed

    def add_signs(
        self,
        row_groups: RowGroups,
        base: Tensor | None,
        room: Tensor,
        packed: Tensor,
        above: Tensor,
        below: Tensor,
        weights: Tensor,
    ) -> Tensor:
        if self.native is None:
            return super().add_signs(row_groups, base, room, packed, above, below, weights)
        return self.native.gradcomp_add_signs(
            room if base is None else base,
            packed,
            above,
            below,
            weights,
            bands=numbers(row_groups),
            from_zero=base is None,
        )
