"""Codes of the values that a sparse method sends: float32, or few bits with side values.

Values that share side values, a scale or a codebook, are a group: what is sent of a stretch of a
layer. No group reaches into another layer, so the scale of one does not touch the values of
another. Whoever reads the values knows their places, and these tell the groups.

Rounding errors are not lost: whoever keeps a residual subtracts what was decoded.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.row_groups import RowGroups
from hvd_gradcomp.method.wire import Part
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP
from hvd_gradcomp.ops.interface.quantization import TINY

_NO_BANDS = RowGroups(())
MOST_IN_GROUP = 4096  # values that are expected in a group, where a layer has more


class Stretch(NamedTuple):
    """Places from `start` to `end`, of which at most `limit` values are sent."""

    start: int
    end: int
    limit: int


@dataclass(frozen=True)
class ValueGroups:
    """Groups of values, by the places where the values lie.

    Args:
        stretches: the places of each group, in ascending order. What lies outside is in no group;
            nothing is sent of it, but for unused slots.
        ascending: whether messages have their places in ascending order, so that the few borders
            are searched for among them, and not each place among the borders.
    """

    stretches: tuple[Stretch, ...]
    ascending: bool = False

    @classmethod
    def of(cls, layers: Sequence[Stretch], expected: Sequence[float] | None = None) -> ValueGroups:
        """Cut layers into stretches of equal length, where many values are sent.

        Args:
            layers: the places of each.
            expected: how many values are sent of each; by default as many as can be.

        >>> ValueGroups.of([Stretch(0, 10000, 10000), Stretch(10240, 10250, 1)]).stretches[1:]
        (Stretch(start=3333, end=6666, limit=3333), Stretch(start=6666, end=10000, limit=3334), \
Stretch(start=10240, end=10250, limit=1))
        """
        stretches = []
        for number, (start, end, limit) in enumerate(layers):
            share = limit if expected is None else expected[number]
            groups = max(min(math.ceil(share / MOST_IN_GROUP), end - start), 1)
            cuts = [start + (end - start) * group // groups for group in range(groups + 1)]
            stretches += [Stretch(a, b, min(b - a, limit)) for a, b in zip(cuts, cuts[1:]) if a < b]
        return cls(tuple(stretches or [Stretch(0, 1, 1)]))  # side values are never none

    @classmethod
    def of_layers(cls, layout: Layout, limits: Sequence[int]) -> ValueGroups:
        """Return groups of what is sent of the layers of a bucket, at most so much of each."""
        spans = zip(layout.offsets, layout.sizes, limits)
        return cls.of([Stretch(at, at + size, count) for at, size, count in spans])

    @classmethod
    def of_model(cls, layout: Layout, count: int, limit: int | None = None) -> ValueGroups:
        """Return groups of what is sent of a whole bucket.

        Args:
            layout: of the bucket.
            count: how many values are sent of all layers.
            limit: how many at most of one; by default all.
        """
        limit = count if limit is None else limit
        spans = list(zip(layout.offsets, layout.sizes))
        layers = [Stretch(at, at + size, min(size, limit)) for at, size in spans]
        return cls.of(layers, [count * size / max(layout.elements, 1) for _, size in spans])

    def between(self, begin: int, end: int) -> ValueGroups:
        """Return the groups within [begin, end), with places counted from begin."""
        cut = [(max(s.start, begin), min(s.end, end), s.limit) for s in self.stretches]
        return replace(
            self,
            stretches=tuple(
                Stretch(a - begin, b - begin, min(b - a, limit)) for a, b, limit in cut if a < b
            ),
        )

    @property
    def count(self) -> int:
        """Return the number of groups."""
        return len(self.stretches)

    @property
    def end(self) -> int:
        """Return the place behind the last group."""
        return self.stretches[-1].end if self.stretches else 0

    def entries(self, sides: int) -> tuple[int, ...]:
        """Return how many side values each group has: as many as values, `sides` at most."""
        return tuple(min(stretch.limit, sides) for stretch in self.stretches)

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Return where stretches begin, and where they end if the next does not begin there."""
        return tuple(border for border, _ in self._pieces)

    @cached_property
    def group_behind(self) -> tuple[int, ...]:
        """Return the group before the first border, and behind each; `count` for none."""
        return (self.count, *(group for _, group in self._pieces))

    @cached_property
    def _pieces(self) -> list[tuple[int, int]]:
        pieces: dict[int, int] = {}
        for group, stretch in enumerate(self.stretches):
            pieces[stretch.start], pieces[stretch.end] = group, self.count
        return sorted(pieces.items())

    def of_places(self, ops: Ops, places: Tensor) -> Tensor:
        """Return the group of each place, `count` for none; int64 [count]."""
        borders = ops.table(self, "borders")
        if self.ascending:
            count, first = ops.length(places), ops.count_below(places, borders)
            passed = ops.segment_sum(ops.full(first.shape, 1), first, count + 1)
            border = ops.cumsum(passed[:count])
        else:
            border = ops.count_below(borders, places + 1)
        return ops.gather(ops.table(self, "group_behind"), border)

    @cached_property
    def _hash(self) -> int:
        return hash(self.stretches)

    def __hash__(self) -> int:
        return self._hash  # they key tables in the hot path


class ValueCoding(ABC):
    """Code of a fixed number of float32 values, which are all finite.

    Attributes:
        bits: of a code.
        sides: most float32 side values of a group; one with fewer values has fewer.
    """

    bits: int
    sides: int

    @abstractmethod
    def parts(self, count: Any, *groups: ValueGroups) -> dict[str, Part]:
        """Return the payload parts for `count` values of any of some groups."""

    @abstractmethod
    def encode(
        self, ops: Ops, values: Tensor, places: Tensor, groups: ValueGroups
    ) -> dict[str, Tensor]:
        """Encode values.

        Args:
            ops: the tensor operations.
            values: float32 [count].
            places: int64 [count]. What lies in no group is decoded as 0, if it is rounded.
            groups: by the places.
        """

    @abstractmethod
    def decode(
        self, ops: Ops, payload: Mapping[str, Tensor], places: Tensor, groups: ValueGroups
    ) -> Tensor:
        """Decode one rank's parts; float32 [count]. Side values may be more than the groups'."""

    @abstractmethod
    def ceiling(self, ops: Ops, payload: Mapping[str, Tensor]) -> Tensor:
        """Return a bound of each rank's decoded magnitudes; float32 [ranks, 1].

        payload: the parts of all ranks, [ranks, ...].
        """

    def layer_bytes(self, count: float) -> float:
        """Return the bytes that so many values of a layer take among those of others."""
        whole = math.ceil(count)
        groups = ValueGroups.of([Stretch(0, whole, whole)])
        return count * self.bits / 8 + 4 * sum(groups.entries(self.sides))


class Float(ValueCoding):
    """Floats of 32 bits, or the 16 of bfloat16.

    Args:
        bits: 32 or 16.
    """

    sides = 0

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def parts(self, count: Any, *groups: ValueGroups) -> dict[str, Part]:
        del groups
        if self.bits == 32:
            return {"values": Part("float32", count)}
        return {"values": Part("bytes", 2 * _padded(count, 2))}

    def encode(
        self, ops: Ops, values: Tensor, places: Tensor, groups: ValueGroups
    ) -> dict[str, Tensor]:
        del places, groups
        if self.bits == 32:
            return {"values": values}
        values = _padded_to(ops, values, 2)
        return {"values": ops.encode_floats(_NO_BANDS, values, None, 16, None)}

    def decode(
        self, ops: Ops, payload: Mapping[str, Tensor], places: Tensor, groups: ValueGroups
    ) -> Tensor:
        del groups
        if self.bits == 32:
            return payload["values"]
        return self._decoded(ops, payload["values"], ops.length(places))

    def ceiling(self, ops: Ops, payload: Mapping[str, Tensor]) -> Tensor:
        values = payload["values"]
        if self.bits == 16:
            count = ops.length(values) // 2
            values = ops.stack(
                [self._decoded(ops, values[rank], count) for rank in range(values.shape[0])]
            )
        return ops.reshape(ops.peaks(values), (-1, 1))

    def _decoded(self, ops: Ops, codes: Tensor, count: Any) -> Tensor:
        out, weight = ops.zeros((_padded(count, 2),)), ops.reals((1.0,))
        codes = ops.reshape(codes, (1, -1))
        return ops.add_floats(_NO_BANDS, None, out, codes, None, 16, weight)[:count]


class _Grouped(ValueCoding):
    """Base of codes with side values for each group."""

    def parts(self, count: Any, *groups: ValueGroups) -> dict[str, Part]:
        sides = max(sum(each.entries(self.sides)) for each in groups)
        return {
            "sides": Part("float32", sides),
            "codes": Part("bytes", _padded(count, GROUP) // 8 * self.bits),
        }

    def encode(
        self, ops: Ops, values: Tensor, places: Tensor, groups: ValueGroups
    ) -> dict[str, Tensor]:
        group = groups.of_places(ops, places)
        codes, sides = self.encode_groups(ops, values, group, groups)
        return {"sides": sides, "codes": codes}

    def decode(
        self, ops: Ops, payload: Mapping[str, Tensor], places: Tensor, groups: ValueGroups
    ) -> Tensor:
        sides = payload["sides"][: sum(groups.entries(self.sides))]
        group = groups.of_places(ops, places)
        return self.decode_groups(ops, payload["codes"], sides, group, groups)

    def ceiling(self, ops: Ops, payload: Mapping[str, Tensor]) -> Tensor:
        return ops.reshape(ops.peaks(payload["sides"]), (-1, 1))

    @abstractmethod
    def encode_groups(
        self, ops: Ops, values: Tensor, group: Tensor, groups: ValueGroups
    ) -> tuple[Tensor, Tensor]:
        """Return packed codes, uint8, and side values, float32.

        Args:
            ops: the tensor operations.
            values: float32 [count].
            group: of each, int64 [count]; `groups.count` for none.
            groups: how many values each can have.
        """

    @abstractmethod
    def decode_groups(
        self, ops: Ops, codes: Tensor, sides: Tensor, group: Tensor, groups: ValueGroups
    ) -> Tensor:
        """Return the values; float32 [count]."""


class Codebook(_Grouped):
    """Bins of equal width, each decoded as the mean of its values.

    As SparseLoCo quantizes (Sarfi et al. 2025); see `Ops.encode_bins`.

    Args:
        bits: of a code.
    """

    def __init__(self, bits: int) -> None:
        self.bits, self.sides = bits, 1 << bits

    def encode_groups(
        self, ops: Ops, values: Tensor, group: Tensor, groups: ValueGroups
    ) -> tuple[Tensor, Tensor]:
        return ops.encode_bins(values, group, groups.entries(self.sides), self.bits)

    def decode_groups(
        self, ops: Ops, codes: Tensor, sides: Tensor, group: Tensor, groups: ValueGroups
    ) -> Tensor:
        return ops.decode_bins(codes, sides, group, groups.entries(self.sides), self.bits)


class Levels(_Grouped):
    """Levels of equal distance up to the group's largest magnitude, rounded to the nearest.

    Args:
        bits: of a code; there are `2**(bits-1) - 1` levels and a sign.
    """

    sides = 1

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.levels = (1 << bits - 1) - 1

    def encode_groups(
        self, ops: Ops, values: Tensor, group: Tensor, groups: ValueGroups
    ) -> tuple[Tensor, Tensor]:
        scale = ops.peaks_of_groups(values, group, groups.count)
        used = scale >= TINY
        inverse = ops.where(used, 1.0 / ops.where(used, scale, 1.0), 0.0) * float(self.levels)
        height = ops.abs(values) * _of_values(ops, inverse, group) + 0.5
        level = ops.cast(ops.minimum(height, float(self.levels)), "int64")
        code = ops.where(values < 0, self.levels - level, self.levels + level)
        unit = ops.where(used, scale * (1.0 / self.levels), 0.0)
        return ops.pack_bytes(code, self.bits), unit

    def decode_groups(
        self, ops: Ops, codes: Tensor, sides: Tensor, group: Tensor, groups: ValueGroups
    ) -> Tensor:
        level = ops.unpack_bytes(codes, self.bits)[: group.shape[0]] - self.levels
        return ops.cast(level, "float32") * _of_values(ops, sides, group)

    def ceiling(self, ops: Ops, payload: Mapping[str, Tensor]) -> Tensor:
        # Codes run to `levels` below 0 and `levels + 1` above, which no encoder of ours sends.
        return super().ceiling(ops, payload) * float(self.levels + 1)


class Signs(_Grouped):
    """One bit: plus or minus the mean magnitude of the group."""

    bits = sides = 1

    def encode_groups(
        self, ops: Ops, values: Tensor, group: Tensor, groups: ValueGroups
    ) -> tuple[Tensor, Tensor]:
        codes = ops.pack_bytes(ops.cast(values < 0, "int64"), self.bits)
        return codes, ops.means_of_groups(ops.abs(values), group, groups.count)

    def decode_groups(
        self, ops: Ops, codes: Tensor, sides: Tensor, group: Tensor, groups: ValueGroups
    ) -> Tensor:
        sign = 1 - 2 * ops.unpack_bytes(codes, self.bits)[: group.shape[0]]
        return ops.cast(sign, "float32") * _of_values(ops, sides, group)


def _of_values(ops: Ops, sides: Tensor, group: Tensor) -> Tensor:
    """Return the side value of each value's group, 0 where it has none."""
    return ops.gather(ops.concat((sides, ops.zeros((1,)))), group)


def _padded(count: Any, unit: int) -> Any:
    return (count + unit - 1) // unit * unit


def _padded_to(ops: Ops, x: Tensor, unit: int) -> Tensor:
    """Append zeros up to a multiple of `unit`."""
    count = ops.length(x)
    missing = _padded(count, unit) - count
    if isinstance(missing, int) and missing == 0:
        return x
    return ops.concat((x, ops.zeros((missing,))))


# By the name that compressors take as `values=`, the finest first.
VALUES: dict[str, ValueCoding] = {
    "float32": Float(32),
    "bfloat16": Float(16),
    "int8": Levels(8),
    "int4": Codebook(4),
    "int2": Codebook(2),
    "sign": Signs(),
}
