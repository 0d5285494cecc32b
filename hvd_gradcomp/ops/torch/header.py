"""Frames around payloads, and checks of their content."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from hvd_gradcomp.ops import PayloadError, Tensor
from hvd_gradcomp.ops.interface.header import BEYOND, CheckedFrames, Field, ReductionSpec
from hvd_gradcomp.ops.torch.base import Base, walked
from hvd_gradcomp.ops.torch.kernels import walkable


class Headers(Base):
    """Ops for frames around payloads, and for checks of their content."""

    def frame(self, values: Sequence[Any], finite: Any, parts: Sequence[Tensor]) -> Tensor:
        if self.kernels is not None:
            return self.kernels.frame(values, finite, parts)
        if self.native is None or not _known(values, finite):
            return super().frame(values, finite, parts)
        words = array("q", (*values, not finite))
        front = 4 * (len(words) + 1) + sum(map(len, parts[:-1]))
        whole = self.before(parts[-1], front)
        if whole is None:
            whole = self._empty(front + len(parts[-1]), dtype=torch.uint8)
        self.native("frame", (words, *(part.contiguous() for part in parts)), (whole,), (0,))
        return whole

    def frames(
        self, values: Sequence[Any], finite: Any, bodies: Sequence[Sequence[Tensor]]
    ) -> Tensor:
        if self.native is None or not _known(values, finite):
            return super().frames(values, finite, bodies)
        words = array("q", (*values, not finite))
        size = 4 * (len(words) + 1) + sum(map(len, bodies[0]))
        whole = self._empty(len(bodies), size, dtype=torch.uint8)
        parts = [part.contiguous() for body in bodies for part in body]
        self.native("frame", (words, *parts), (whole,), (len(bodies),))
        return whole

    def examine(
        self, frames: Tensor, count: int, fields: Sequence[Field], expected: Sequence[Any]
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        if self.native is None:
            return super().examine(frames, count, fields, expected)
        frames = walkable(frames)
        if frames.shape[1] % 4 or frames.shape[1] < 4 * (count + 1):
            raise PayloadError(f"a frame has {frames.shape[1]} bytes: a payload is damaged")
        words = self._empty(frames.shape[0], count, dtype=torch.int64)
        held = self._empty(len(fields) + 1, frames.shape[0], dtype=torch.bool)
        given = frames, _numbers(tuple(fields)), array("q", map(int, expected))
        self.native("examine", given, (words, held), (count,))
        return words.unbind(1), list(held)

    def headed(self, head: Tensor, body: Tensor) -> Tensor:
        whole = self.before(body, len(head))
        if whole is None:
            return super().headed(head, body)
        whole[: len(head)] = head
        return whole

    def validate_headers(
        self,
        frames: Tensor,
        count: int,
        fields: Sequence[Field],
        expected: Sequence[Any],
        messages: Sequence[str],
        poisoned: tuple[str, type[Exception]],
        spec: ReductionSpec,
    ) -> CheckedFrames:
        if self.kernels is None:
            given = frames, count, fields, expected, messages, poisoned
            return super().validate_headers(*given, spec)
        words, said, intact, weights = self.kernels.look(frames, expected, spec)
        needed, held = self.kernels.split(self.stage(said))
        errors = [*[(message, PayloadError) for message in messages], poisoned, spec.refused]
        facts = [
            ((message,), fact[None], error)
            for (message, error), fact in zip((*errors, (BEYOND, PayloadError)), held)
        ]
        self.require_async(facts)
        return CheckedFrames(words.unbind(1), None if self.on_host else intact, needed, weights)

    def weigh(self, weight: float, intact: Tensor) -> Tensor:
        return torch.mul(intact, weight, out=self._empty(intact.shape))

    def checked_sides(self, sides: Sequence[Tensor], finite: Any) -> tuple[Sequence[Tensor], Any]:
        if self.kernels is None or not sides[0].numel():
            return super().checked_sides(sides, finite)
        return self.kernels.checked_sides(sides, finite)

    def check_finite(self, x: Tensor, how: str) -> tuple[Any, Tensor]:
        if self.kernels is not None:
            return self.kernels.check_finite(x, how), x
        if self.native is None or how == "elements" or not walked(x):
            return super().check_finite(x, how)
        fine = array("B", (0,))
        self.native("sum_finite", (x,), (fine,), (how == "squares",))
        return bool(fine[0]), x

    def check_finite_with(self, gradient: Tensor, moment: Tensor) -> tuple[Any, Tensor, Tensor]:
        if self.kernels is None:
            return super().check_finite_with(gradient, moment)
        return self.kernels.check_finite(gradient, "squares", moment), gradient, moment

    def accumulate_largest_checked(
        self, x: Tensor, factor: float, y: Tensor, length: int, k: int
    ) -> tuple[Any, Tensor, Tensor, Tensor]:
        if self.native is None:
            return super().accumulate_largest_checked(x, factor, y, length, k)
        room, rows, fine = self.room(y), -(-x.shape[0] // length), array("B", (0,))
        index, values = self._empty(rows, k, dtype=torch.int64), self._empty(rows, k)
        given, found = (x.contiguous(), y.contiguous()), (room, index, values, fine)
        self.native("accumulate_largest", given, found, (length, k), (factor,))
        return bool(fine[0]), room, index, values


def _known(values: Sequence[Any], finite: Any) -> bool:
    """Return True if none of the words of a frame is a tensor."""
    return not any(isinstance(x, torch.Tensor) for x in (*values, finite))


@lru_cache(maxsize=4)
def _numbers(fields: tuple[Field, ...]) -> array[int]:
    """Return the fields as structs `field` in kernels.h."""
    return array("q", (number for field in fields for number in field))
