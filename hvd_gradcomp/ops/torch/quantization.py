"""Quantization of every element, and the random numbers for rounding."""

from __future__ import annotations

from array import array
from typing import Any

import torch

from hvd_gradcomp.core.row_groups import RowGroups
from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP
from hvd_gradcomp.ops.interface.quantization import FACTOR
from hvd_gradcomp.ops.torch.base import Base
from hvd_gradcomp.ops.torch.kernels import walkable

_NEAREST = array("q")  # the key of no random numbers
_MORE = 64  # bytes: values of groups of another shard, whose part has that size
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

    def group_maxima(self, row_groups: RowGroups, x: Tensor) -> Tensor:
        if self.quantizers is not None:
            return self.quantizers.group_maxima(row_groups, x)
        if self.native is None:
            return super().group_maxima(row_groups, x)
        x, out = x.contiguous(), self._empty(row_groups.groups)
        self.native("group_maxima", (self._of(row_groups), x), (out,))
        return out

    def group_squares(self, row_groups: RowGroups, x: Tensor) -> Tensor:
        if self.quantizers is not None:
            return self.quantizers.group_squares(row_groups, x)
        if self.native is None:
            return super().group_squares(row_groups, x)
        x, out = x.contiguous(), self._empty(row_groups.groups)
        self.native("group_squares", (self._of(row_groups), x), (out,))
        return out

    def group_means(self, row_groups: RowGroups, x: Tensor) -> Tensor:
        if self.quantizers is not None:
            return self.quantizers.group_means(row_groups, x)
        if self.native is None:
            return super().group_means(row_groups, x)
        x, out = x.contiguous(), self._empty(row_groups.groups)
        self.native("group_means", (self._of(row_groups), x), (out,))
        return out

    def group_norms(self, row_groups: RowGroups, x: Tensor) -> Tensor:
        if self.quantizers is None:
            return super().group_norms(row_groups, x)
        return self.quantizers.group_norms(row_groups, x)

    def clipped_maxima(self, row_groups: RowGroups, x: Tensor, clip: float) -> Tensor:
        if self.quantizers is None:
            return super().clipped_maxima(row_groups, x, clip)
        return self.quantizers.clipped_maxima(row_groups, x, clip)

    def encode_levels(
        self, row_groups: RowGroups, x: Tensor, scale: Tensor, bits: int, key: Tensor | None
    ) -> Tensor:
        if self.quantizers is not None:
            return self.quantizers.encode_levels(row_groups, x, scale, bits, key)
        if self.native is None:
            return super().encode_levels(row_groups, x, scale, bits, key)
        x, scale = x.contiguous(), scale.contiguous()
        packed = self.body(x.shape[0] * bits // 8, 4 * len(scale) + _MORE)
        given = self._of(row_groups), x, scale, _NEAREST if key is None else key
        self.native("encode_levels", given, (packed,), (bits,))
        return packed

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
        if self.quantizers is not None:
            return self.quantizers.add_levels(row_groups, base, room, packed, scale, bits, weights)
        if self.native is None:
            return super().add_levels(row_groups, base, room, packed, scale, bits, weights)
        room = self.room(room)
        packed, scale, weights = walkable(packed), walkable(scale), weights.contiguous()
        start = room if base is None else base.contiguous()
        given = self._of(row_groups), start, packed, scale, weights
        self.native("add_levels", given, (room,), (bits, base is None))
        return room

    def encode_floats(
        self, row_groups: RowGroups, x: Tensor, unit: Tensor | None, bits: int, key: Tensor | None
    ) -> Tensor:
        if self.native is None:
            return self._plain_floats(row_groups, x, unit, bits, key)
        x, units = x.contiguous(), self._empty(0) if unit is None else unit.contiguous()
        packed = self.body(x.shape[0] * bits // 8, 4 * len(units) + _MORE)
        given = self._of(row_groups), x, units, _NEAREST if key is None else key
        self.native("encode_floats", given, (packed,), (bits,))
        return packed

    def _plain_floats(
        self, row_groups: RowGroups, x: Tensor, unit: Tensor | None, bits: int, key: Tensor | None
    ) -> Tensor:
        """Return `encode_floats`; on a GPU by PyTorch's own types, which round alike.

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

    def encode_bfloat16(self, x: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().encode_bfloat16(x, key)
        packed, largest = self.body(2 * x.shape[0]), self._empty(1)
        given = x.contiguous(), _NEAREST if key is None else key
        self.native("encode_bfloat16", given, (packed, largest))
        return packed, largest

    def encode_peaks(
        self, row_groups: RowGroups, x: Tensor, bits: int, key: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().encode_peaks(row_groups, x, bits, key)
        scale = self._empty(row_groups.groups)
        packed = self.body(x.shape[0] * bits // 8, 4 * len(scale) + _MORE)
        given = self._of(row_groups), x.contiguous(), _NEAREST if key is None else key
        self.native("encode_peaks", given, (scale, packed), (bits,))
        return scale, packed

    def encode_e4m3(
        self, row_groups: RowGroups, x: Tensor, power_of_two: bool
    ) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().encode_e4m3(row_groups, x, power_of_two)
        unit = self._empty(row_groups.groups)
        codes = self.body(x.shape[0], 4 * len(unit) + _MORE)
        given = self._of(row_groups), x.contiguous()
        self.native("encode_e4m3", given, (unit, codes), (power_of_two,))
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
        room = self.room(room)
        units = self._empty(0) if unit is None else walkable(unit)
        start = room if base is None else base.contiguous()
        given = self._of(row_groups), start, walkable(packed), units, weights.contiguous()
        self.native("add_floats", given, (room,), (bits, base is None))
        return room

    def add_bfloat16(
        self, base: Tensor | None, room: Tensor, packed: Tensor, weights: Tensor
    ) -> tuple[Tensor, Any]:
        if self.native is None:
            return super().add_bfloat16(base, room, packed, weights)
        room, finite = self.room(room), array("B", (0,))
        start = room if base is None else base.contiguous()
        given = _NEAREST, start, walkable(packed), self._empty(0), weights.contiguous()
        self.native("add_floats", given, (room, finite), (16, base is None))
        return room, bool(finite[0])

    def encode_powers(self, x: Tensor, key: Tensor) -> Tensor:
        if self.native is None:
            return super().encode_powers(x, key)
        packed = self.body(x.shape[0] // 8 * 9, _MORE)
        self.native("encode_powers", (x.contiguous(), key), (packed,))
        return packed

    def add_powers(
        self, base: Tensor | None, room: Tensor, packed: Tensor, weights: Tensor
    ) -> Tensor:
        if self.native is None:
            return super().add_powers(base, room, packed, weights)
        room = self.room(room)
        start = room if base is None else base.contiguous()
        given = start, walkable(packed), weights.contiguous()
        self.native("add_powers", given, (room,), (base is None,))
        return room

    def encode_signs(self, row_groups: RowGroups, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.quantizers is not None:
            return self.quantizers.encode_signs(row_groups, x)
        if self.native is None:
            return super().encode_signs(row_groups, x)
        x, (above, below) = x.contiguous(), self._empty(2, row_groups.groups)
        packed = self._empty(x.shape[0] // 8, dtype=torch.uint8)
        self.native("encode_signs", (self._of(row_groups), x), (above, below, packed))
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
        if self.quantizers is not None:
            return self.quantizers.add_signs(row_groups, base, room, packed, above, below, weights)
        if self.native is None:
            return super().add_signs(row_groups, base, room, packed, above, below, weights)
        room = self.room(room)
        packed, above, below = walkable(packed), above.contiguous(), below.contiguous()
        if above.stride(0) != below.stride(0):  # of a single row any is contiguous
            above, below = (x.clone(memory_format=torch.contiguous_format) for x in (above, below))
        start = room if base is None else base.contiguous()
        given = self._of(row_groups), start, packed, above, below, weights.contiguous()
        self.native("add_signs", given, (room,), (base is None,))
        return room

    def momentum_signs(
        self, row_groups: RowGroups, m: Tensor, gradient: Tensor, momentum: float, negative: Any
    ) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().momentum_signs(row_groups, m, gradient, momentum, negative)
        room, packed = self.room(gradient), self.body(gradient.shape[0] // 8)
        given = self._of(row_groups), m.contiguous(), gradient.contiguous()
        reals = momentum, 1.0 - momentum
        self.native("momentum_signs", given, (room, packed), (int(negative),), reals)
        return room, packed

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
        total, room = self.room(m), self.room(room)
        given = self._of(row_groups), walkable(packed), weights.contiguous(), m
        self.native("majority", given, (total, room), (m.shape[0],), (unit,))
        return total, room

    def encode_bins(
        self, x: Tensor, group: Tensor, entries: tuple[int, ...], bits: int
    ) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().encode_bins(x, group, entries, bits)
        coded, means = -(-x.numel() // GROUP) * GROUP // 8 * bits, self._empty(sum(entries))
        codes = self._empty(coded, dtype=torch.uint8)
        inputs = x.contiguous(), group.contiguous(), array("q", entries)
        self.native("encode_bins", inputs, (codes, means), (bits,))
        return codes, means

    def decode_bins(
        self, packed: Tensor, means: Tensor, group: Tensor, entries: tuple[int, ...], bits: int
    ) -> Tensor:
        if self.native is None:
            return super().decode_bins(packed, means, group, entries, bits)
        values = self._empty(group.numel())
        packed = packed if packed.storage_offset() % 4 == 0 else packed.clone()
        inputs = packed.contiguous(), means.contiguous(), group.contiguous(), array("q", entries)
        self.native("decode_bins", inputs, (values,), (bits,))
        return values

    def _of(self, row_groups: RowGroups) -> array[int]:
        """Return the bands as C takes them."""
        if row_groups not in self._bands:
            numbers = [number for band in row_groups.runs for number in band]
            self._bands[row_groups] = array("q", numbers)
        return self._bands[row_groups]


def _mix(x: int) -> int:
    """Compute `Quantization.mix` of one number."""
    for _ in range(2):
        x = (x ^ x >> 16) * FACTOR % (1 << 32)
    return x ^ x >> 16
