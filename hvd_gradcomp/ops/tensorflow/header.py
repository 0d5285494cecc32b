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

    def framed(self, words: Tensor, body: Tensor) -> Tensor:
        if self.native is None:
            return super().framed(words, body)
        known = body.shape[0] is not None and words.shape[0] is not None
        size = 4 * (words.shape[0] + 1) + body.shape[0] if known else None
        return self.native("frame", (words, body), [(tf.uint8, (size,))])[0]

    def examine(
        self, frames: Tensor, count: int, fields: Sequence[Field], expected: Sequence[Any]
    ) -> tuple[Tensor, list[Tensor]]:
        if self.native is None:
            return super().examine(frames, count, fields, expected)
        numbers = [number for field in fields for number in field]
        outputs = [
            (tf.int64, (frames.shape[0], count)),
            (tf.bool, (1 + len(fields), frames.shape[0])),
        ]
        given = frames, numbers, self.words(expected)
        words, held = self.native("examine", given, outputs, (count,))
        return words, tf.unstack(held, 1 + len(fields))
