"""Frames around payloads, and checks of their content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.interface.header import Field
from hvd_gradcomp.ops.tensorflow.base import Base


class Headers(Base):
    """Ops for frames around payloads, and for checks of their content."""

    def frame(self, values: Sequence[Any], finite: Any, parts: Sequence[Tensor]) -> Tensor:
        if self.native is None:
            return super().frame(values, finite, parts)
        words = self.listed_words(values, finite)
        outputs = [(tf.uint8, (_size(len(words), parts),))]
        return self.native("frame", (words, *parts), outputs, (0,))[0]

    def frames(
        self, values: Sequence[Any], finite: Any, bodies: Sequence[Sequence[Tensor]]
    ) -> Tensor:
        if self.native is None:
            return super().frames(values, finite, bodies)
        words, parts = self.listed_words(values, finite), [part for body in bodies for part in body]
        outputs = [(tf.uint8, (len(bodies), _size(len(words), bodies[0])))]
        return self.native("frame", (words, *parts), outputs, (len(bodies),))[0]

    def framed(self, words: Tensor, body: Tensor) -> Tensor:
        if self.native is None:
            return super().framed(words, body)
        outputs = [(tf.uint8, (_size(words.shape[0], [body]),))]
        return self.native("frame", (words, body), outputs, (0,))[0]

    def examine(
        self, frames: Tensor, count: int, fields: Sequence[Field], expected: Sequence[Any]
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        if self.native is None:
            return super().examine(frames, count, fields, expected)
        numbers = [number for field in fields for number in field]
        outputs = [
            (tf.int64, (frames.shape[0], count)),
            (tf.bool, (1 + len(fields), frames.shape[0])),
        ]
        given = frames, numbers, list(expected)
        words, held = self.native("examine", given, outputs, (count,))
        return self.columns(words, count), tf.unstack(held, 1 + len(fields))

    def columns(self, x: Tensor, count: int) -> Sequence[Tensor]:
        return tf.unstack(x, count, axis=1)

    def check_finite(self, x: Tensor, how: str) -> tuple[Any, Tensor]:
        if self.native is None or how == "elements":
            return super().check_finite(x, how)
        finite = self.native("sum_finite", (x,), [(tf.bool, ())], (how == "squares",))[0]
        return bool(finite) if tf.executing_eagerly() else finite, x


def _size(words: int | None, parts: Sequence[Tensor]) -> int | None:
    """Return the bytes of a frame of so many words, as far as they are known."""
    lengths = [words, *(x.shape[0] for x in parts)]
    return None if None in lengths else 4 * (lengths[0] + 1) + sum(lengths[1:])
