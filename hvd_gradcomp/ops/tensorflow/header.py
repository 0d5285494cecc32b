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
        return self.native.gradcomp_frame(words, body)

    def examine(
        self, frames: Tensor, count: int, fields: Sequence[Field], expected: Sequence[Any]
    ) -> tuple[Tensor, list[Tensor]]:
        if self.native is None:
            return super().examine(frames, count, fields, expected)
        numbers = [number for field in fields for number in field]
        given = frames, self.words(expected)
        words, held = self.native.gradcomp_examine(*given, count=count, fields=numbers)
        return words, tf.unstack(held, 1 + len(fields))
