"""Conversion of numbers to bytes, and of codes to bits."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP
from hvd_gradcomp.ops.tensorflow.base import WORD, Base, low_word, shape_of


class BitPacking(Base):
    """Ops that convert numbers to bytes, and codes to bits."""

    def to_bytes(self, x: Tensor, dtype: str) -> Tensor:
        if dtype == "uint8":
            return tf.cast(x, tf.uint8)
        narrow = low_word(x) if dtype == "uint32" else tf.cast(x, tf.as_dtype(dtype))
        data = tf.bitcast(narrow, tf.uint8)
        return data if dtype == "int8" else tf.reshape(data, shape_of((*head_of(x), -1)))

    def from_bytes(self, x: Tensor, dtype: str) -> Tensor:
        if dtype == "uint8":
            return tf.cast(x, tf.int64)
        if dtype == "int8":
            return tf.cast(tf.bitcast(x, tf.int8), tf.int64)
        wide = tf.int32 if dtype == "uint32" else tf.as_dtype(dtype)
        items = tf.bitcast(tf.reshape(x, shape_of((*head_of(x), -1, wide.size))), wide)
        return tf.cast(items, tf.int64) % WORD if dtype == "uint32" else items

    def length(self, x: Tensor) -> Any:
        known = x.shape[-1]
        return tf.shape(x, tf.int64)[-1] if known is None else known

    def bit_planes(self, groups: Tensor, bits: int) -> Tensor:
        if self.native is None:
            return super().bit_planes(groups, bits)
        outputs = [(tf.int64, (groups.shape[0], bits))]
        return self.native("bit_planes", (groups,), outputs, (bits,))[0]

    def from_bit_planes(self, planes: Tensor) -> Tensor:
        if self.native is None:
            return super().from_bit_planes(planes)
        return self.native("from_bit_planes", (planes,), [(tf.int64, (planes.shape[0], GROUP))])[0]

    def encode_ascending(
        self, numbers: Tensor, low: Any, width: Any, universe: int, apart: bool = False
    ) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().encode_ascending(numbers, low, width, universe, apart)
        outputs = [(tf.int64, (numbers.shape[0], None) if apart else (None,))] * 2
        lows, highs = self.native("encode_ascending", (numbers,), outputs, (low, width, apart))
        return lows, highs

    def decode_ascending(
        self,
        code: tuple[Tensor, Tensor],
        shape: tuple[int, Any],
        low: Any,
        width: Any,
        universe: int,
    ) -> Tensor:
        if self.native is None:
            return super().decode_ascending(code, shape, low, width, universe)
        codes = code[0].shape[0] if code[0].shape.rank == 2 else 1
        rows = shape[0] * codes if isinstance(shape[0], int) and codes is not None else None
        known = rows, shape[1] if isinstance(shape[1], int) else None
        ints = *shape, low, width, universe
        return self.native("decode_ascending", code, [(tf.int64, known)], ints)[0]

    def encode_words(
        self, body: Tensor, side: int, count: Any, low: Any, width: Any, universe: int, bits: int
    ) -> Tensor:
        if self.native is None:
            return super().encode_words(body, side, count, low, width, universe, bits)
        ints = side, count, low, width, bits
        return self.native("encode_words", (body,), [(tf.uint8, (None,))], ints)[0]

    def decode_words(
        self, bodies: Tensor, side: int, count: Any, low: Any, width: Any, universe: int, bits: int
    ) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().decode_words(bodies, side, count, low, width, universe, bits)
        ranks = bodies.shape[0]
        outputs = [(tf.uint8, (ranks, None)), (tf.bool, (ranks,))]
        ints = side, count, low, width, bits, universe
        words, sound = self.native("decode_words", (bodies,), outputs, ints)
        return words, sound


def head_of(x: Tensor) -> tuple[Any, ...]:
    """Return all axes but the last."""
    if x.shape[:-1].is_fully_defined():
        return tuple(x.shape[:-1])
    return tuple(tf.unstack(tf.shape(x, tf.int64)[:-1]))
