"""Quantization of every element, and the random numbers for rounding."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_gradcomp.core.row_groups import RowGroups
from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP
from hvd_gradcomp.ops.tensorflow.base import Base, numbers


class Quantization(Base):
    """Ops that quantize every element, and the random numbers for rounding."""

    def key(self, step: Any, salt: int) -> Tensor:
        if self.native is None:
            return super().key(step, salt)
        return self.native("key", (), [(tf.int64, (2,))], (step, salt))[0]

    def group_maxima(self, row_groups: RowGroups, x: Tensor) -> Tensor:
        if self.native is None:
            return super().group_maxima(row_groups, x)
        outputs = [(tf.float32, (row_groups.groups,))]
        return self.native("group_maxima", (numbers(row_groups), x), outputs)[0]

    def group_squares(self, row_groups: RowGroups, x: Tensor) -> Tensor:
        if self.native is None:
            return super().group_squares(row_groups, x)
        outputs = [(tf.float32, (row_groups.groups,))]
        return self.native("group_squares", (numbers(row_groups), x), outputs)[0]

    def group_means(self, row_groups: RowGroups, x: Tensor) -> Tensor:
        if self.native is None:
            return super().group_means(row_groups, x)
        outputs = [(tf.float32, (row_groups.groups,))]
        return self.native("group_means", (numbers(row_groups), x), outputs)[0]

    def encode_levels(
        self, row_groups: RowGroups, x: Tensor, scale: Tensor, bits: int, key: Tensor | None
    ) -> Tensor:
        if self.native is None:
            return super().encode_levels(row_groups, x, scale, bits, key)
        given = numbers(row_groups), x, scale, [] if key is None else key
        return self.native("encode_levels", given, [(tf.uint8, _packed(x, bits))], (bits,))[0]

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
        start = room if base is None else base
        given = numbers(row_groups), start, packed, scale, weights
        return self.native("add_levels", given, [(tf.float32, start.shape)], (bits, base is None))[
            0
        ]

    def encode_floats(
        self, row_groups: RowGroups, x: Tensor, unit: Tensor | None, bits: int, key: Tensor | None
    ) -> Tensor:
        if self.native is None:
            return super().encode_floats(row_groups, x, unit, bits, key)
        units = tf.zeros((0,)) if unit is None else unit
        given = numbers(row_groups), x, units, [] if key is None else key
        return self.native("encode_floats", given, [(tf.uint8, _packed(x, bits))], (bits,))[0]

    def encode_bfloat16(self, x: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().encode_bfloat16(x, key)
        outputs = [(tf.uint8, _packed(x, 16)), (tf.float32, (1,))]
        given = x, [] if key is None else key
        packed, largest = self.native("encode_bfloat16", given, outputs)
        return packed, largest

    def encode_peaks(
        self, row_groups: RowGroups, x: Tensor, bits: int, key: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().encode_peaks(row_groups, x, bits, key)
        outputs = [(tf.float32, (row_groups.groups,)), (tf.uint8, _packed(x, bits))]
        given = numbers(row_groups), x, [] if key is None else key
        scale, packed = self.native("encode_peaks", given, outputs, (bits,))
        return scale, packed

    def encode_e4m3(
        self, row_groups: RowGroups, x: Tensor, power_of_two: bool
    ) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().encode_e4m3(row_groups, x, power_of_two)
        outputs = [(tf.float32, (row_groups.groups,)), (tf.uint8, _packed(x, 8))]
        given = numbers(row_groups), x
        unit, codes = self.native("encode_e4m3", given, outputs, (int(power_of_two),))
        return unit, codes

    def add_floats(
        self,
        row_groups: RowGroups,
        base: Tensor | None,
        room: Tensor,
        packed: Tensor,
        unit: Tensor | None,
        bits: int,
        weights: Tensor,
    ) -> Tensor:
        if self.native is None:
            return super().add_floats(row_groups, base, room, packed, unit, bits, weights)
        start, units = room if base is None else base, tf.zeros((0,)) if unit is None else unit
        given = numbers(row_groups), start, packed, units, weights
        ints = bits, base is None
        return self.native("add_floats", given, [(tf.float32, start.shape)], ints)[0]

    def add_bfloat16(
        self, base: Tensor | None, room: Tensor, packed: Tensor, weights: Tensor
    ) -> tuple[Tensor, Any]:
        if self.native is None:
            return super().add_bfloat16(base, room, packed, weights)
        start = room if base is None else base
        outputs = [(tf.float32, start.shape), (tf.bool, ())]
        given: tuple[Any, ...] = [], start, packed, tf.zeros((0,)), weights
        total, finite = self.native("add_floats", given, outputs, (16, base is None))
        return total, bool(finite) if tf.executing_eagerly() else finite

    def encode_powers(self, x: Tensor, key: Tensor) -> Tensor:
        if self.native is None:
            return super().encode_powers(x, key)
        return self.native("encode_powers", (x, key), [(tf.uint8, _packed(x, 9))])[0]

    def add_powers(
        self, base: Tensor | None, room: Tensor, packed: Tensor, weights: Tensor
    ) -> Tensor:
        if self.native is None:
            return super().add_powers(base, room, packed, weights)
        start = room if base is None else base
        outputs = [(tf.float32, start.shape)]
        return self.native("add_powers", (start, packed, weights), outputs, (base is None,))[0]

    def encode_signs(self, row_groups: RowGroups, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.native is None:
            return super().encode_signs(row_groups, x)
        means = (tf.float32, (row_groups.groups,))
        outputs = means, means, (tf.uint8, _packed(x, 1))
        above, below, packed = self.native("encode_signs", (numbers(row_groups), x), outputs)
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
        start = room if base is None else base
        given = numbers(row_groups), start, packed, above, below, weights
        return self.native("add_signs", given, [(tf.float32, start.shape)], (base is None,))[0]

    def momentum_signs(
        self, row_groups: RowGroups, m: Tensor, gradient: Tensor, momentum: float, negative: Any
    ) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().momentum_signs(row_groups, m, gradient, momentum, negative)
        outputs = [(tf.float32, gradient.shape), (tf.uint8, _packed(gradient, 1))]
        given, reals = (numbers(row_groups), m, gradient), (momentum, 1.0 - momentum)
        m, packed = self.native("momentum_signs", given, outputs, (negative,), reals)
        return m, packed

    def majority(
        self,
        row_groups: RowGroups,
        packed: Tensor,
        weights: Tensor,
        unit: float,
        m: Tensor,
        room: Tensor,
    ) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().majority(row_groups, packed, weights, unit, m, room)
        given, size = (numbers(row_groups), packed, weights), self.length(m)
        total = self.native("majority", given, [(tf.float32, m.shape)], (size,), (unit,))[0]
        return total, m

    def encode_bins(
        self, x: Tensor, group: Tensor, entries: tuple[int, ...], bits: int
    ) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().encode_bins(x, group, entries, bits)
        coded = -(-x.shape[0] // GROUP) * GROUP // 8 * bits
        outputs = [(tf.uint8, (coded,)), (tf.float32, (sum(entries),))]
        codes, means = self.native("encode_bins", (x, group, list(entries)), outputs, (bits,))
        return codes, means

    def decode_bins(
        self, packed: Tensor, means: Tensor, group: Tensor, entries: tuple[int, ...], bits: int
    ) -> Tensor:
        if self.native is None:
            return super().decode_bins(packed, means, group, entries, bits)
        inputs = packed, means, group, list(entries)
        return self.native("decode_bins", inputs, [(tf.float32, group.shape)], (bits,))[0]


def _packed(x: Tensor, bits: int) -> tuple[int | None]:
    """Return the shape of packed codes."""
    return (None if x.shape[0] is None else x.shape[0] * bits // 8,)
