"""Frames around payloads, and checks of their content."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from hvd_gradcomp.ops import PayloadError, Tensor
from hvd_gradcomp.ops.interface.header import BEYOND, Admitted, Field, ReductionSpec
from hvd_gradcomp.ops.torch.base import HEAD, Base, walkable, walked


class Headers(Base):
    """Ops for frames around payloads, and for checks of their content."""

    def frame(self, values: Sequence[Any], finite: Any, parts: Sequence[Tensor]) -> Tensor:
        if self.kernels is not None:
            return self.kernels.frame(values, finite, parts)
        known = not any(isinstance(x, torch.Tensor) for x in (*values, finite))
        if self.native is None or not known:
            return super().frame(values, finite, parts)
        body = self.concat(parts) if len(parts) > 1 else parts[0].contiguous()
        head = (ctypes.c_uint32 * (len(values) + 2))(*values, not finite)
        words = len(head) - 1, body.data_ptr(), body.shape[0] // 4, torch.get_num_threads()
        head[-1] = self.native.frame_sum(head, *words)
        return self.headed(torch.frombuffer(head, dtype=torch.uint8), body)

    def examine(
        self, frames: Tensor, count: int, fields: Sequence[Field], expected: Sequence[Any]
    ) -> tuple[Tensor, list[Tensor]]:
        if self.native is None:
            return super().examine(frames, count, fields, expected)
        frames = walkable(frames)
        rows, (length, rest) = frames.shape[0], divmod(frames.shape[1], 4)
        if rest or length <= count:  # C reads whole words, and this many, unchecked
            raise PayloadError(f"a frame has {frames.shape[1]} bytes: a payload is damaged")
        words = self._empty(rows, count, dtype=torch.int64)
        held = self._empty(len(fields) + 1, rows, dtype=torch.bool)
        numbers = (ctypes.c_int64 * len(expected))(*map(int, expected))
        given = frames.data_ptr(), rows, frames.stride(0) // 4, length, count
        asked = _numbers(tuple(fields)), len(fields), numbers
        into = words.data_ptr(), held.data_ptr(), torch.get_num_threads()
        self.native.examine(*given, *asked, *into)
        return words, list(held)

    def headed(self, head: Tensor, body: Tensor) -> Tensor:
        room, self._headless = self._headless, None
        if room is None or room[HEAD:].data_ptr() != body.data_ptr() or len(head) > HEAD:
            return super().headed(head, body)
        whole = room[HEAD - len(head) : HEAD + len(body)]
        whole[: len(head)] = head
        return whole

    def admit(
        self,
        frames: Tensor,
        count: int,
        fields: Sequence[Field],
        expected: Sequence[Any],
        messages: Sequence[str],
        poisoned: tuple[str, type[Exception]],
        weighing: ReductionSpec,
    ) -> Admitted:
        if self.kernels is None:
            given = frames, count, fields, expected, messages, poisoned
            return super().admit(*given, weighing)
        words, said, intact, weights = self.kernels.look(frames, expected, weighing)
        needed, held = self.kernels.split(self.stage(said))
        errors = [*[(message, PayloadError) for message in messages], poisoned, weighing.refused]
        facts = [
            ((message,), fact[None], error)
            for (message, error), fact in zip((*errors, (BEYOND, PayloadError)), held)
        ]
        self.demand(facts)
        return Admitted(words, None if self.on_host else intact, needed, weights)

    def weigh(self, weight: float, intact: Tensor) -> Tensor:
        return torch.mul(intact, weight, out=self._empty(intact.shape))

    def checked_sides(self, sides: Sequence[Tensor], finite: Any) -> tuple[Sequence[Tensor], Any]:
        if self.kernels is None or not sides[0].numel():
            return super().checked_sides(sides, finite)
        return self.kernels.checked_sides(sides, finite)

    def sound(self, x: Tensor, how: str) -> tuple[Any, Tensor]:
        if self.kernels is not None:
            return self.kernels.sound(x, how), x
        if self.native is None or how == "elements" or not walked(x):
            return super().sound(x, how)
        given = x.data_ptr(), x.numel(), how == "squares", torch.get_num_threads()
        return bool(self.native.sum_finite(*given)), x

    def sound_with(self, gradient: Tensor, moment: Tensor) -> tuple[Any, Tensor, Tensor]:
        if self.kernels is None:
            return super().sound_with(gradient, moment)
        return self.kernels.sound(gradient, "squares", moment), gradient, moment


@lru_cache(maxsize=4)
def _numbers(fields: tuple[Field, ...]) -> Any:
    """Return the fields as structs `field` in kernels.h."""
    return (ctypes.c_int64 * (3 * len(fields)))(*(number for field in fields for number in field))
