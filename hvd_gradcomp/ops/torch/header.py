"""Frames around payloads, and checks of their content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_gradcomp.ops import PayloadError, Tensor
from hvd_gradcomp.ops.interface.header import BEYOND, CheckedFrames, Field, ReductionSpec
from hvd_gradcomp.ops.torch.base import Base


class Headers(Base):
    """Ops for frames around payloads, and for checks of their content."""

    def frame(self, values: Sequence[Any], finite: Any, parts: Sequence[Tensor]) -> Tensor:
        if self.kernels is None:
            return super().frame(values, finite, parts)
        return self.kernels.frame(values, finite, parts)

    def columns(self, x: Tensor, count: int) -> Sequence[Tensor]:
        return x.unbind(1)

    def each_row(self, x: Tensor, count: int) -> list[Tensor]:
        return list(x)

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
            checked = self._checked_at_once(frames, count, fields, expected, spec)
            return checked or super().validate_headers(
                frames, count, fields, expected, messages, poisoned, spec
            )
        words, results, intact, weights = self.kernels.validate_headers(frames, expected, spec)
        needed, checks = self.kernels.split(self.stage(results))
        errors = [*[(message, PayloadError) for message in messages], poisoned, spec.refused]
        facts = [
            ((message,), check[None], error)
            for (message, error), check in zip((*errors, (BEYOND, PayloadError)), checks)
        ]
        self.require_async(facts)
        return CheckedFrames(words.unbind(1), None if self.on_host else intact, needed, weights)

    def _checked_at_once(
        self,
        frames: Tensor,
        count: int,
        fields: Sequence[Field],
        expected: Sequence[Any],
        spec: ReductionSpec,
    ) -> CheckedFrames | None:
        """Return the words of frames that are all as expected; None if one may not be.

        One look at all facts together: `validate_headers` asks for each by itself.
        """
        if self.native is None or spec.powers:
            return None
        words, intact = self._examined(frames, count, fields, expected)
        columns = words.unbind(1)
        if not bool(intact.all()) or bool(columns[-1].any()):
            return None
        if spec.vectors:
            start = 4 * (count + 1)
            sides = self.rows(frames).tensor[:, start : start + 4 * spec.groups * spec.vectors]
            low, high = sides.view(torch.float32).aminmax()
            largest = max(-low.item(), high.item())  # a bound of all sums; False for NaN
            if not largest * len(words) * spec.weight <= spec.limit:
                return None
        return CheckedFrames(columns, None)

    def weigh(self, weight: float, intact: Tensor) -> Tensor:
        return torch.mul(intact, weight, out=self.empty(intact.shape))

    def checked_sides(self, sides: Sequence[Tensor], finite: Any) -> tuple[Sequence[Tensor], Any]:
        if self.kernels is None or not sides[0].numel():
            return super().checked_sides(sides, finite)
        return self.kernels.checked_sides(sides, finite)

    def check_finite(self, x: Tensor, how: str) -> tuple[Any, Tensor]:
        if self.kernels is None:
            return super().check_finite(x, how)
        return self.kernels.check_finite(x, how), x

    def check_finite_with(self, gradient: Tensor, moment: Tensor) -> tuple[Any, Tensor, Tensor]:
        if self.kernels is None:
            return super().check_finite_with(gradient, moment)
        return self.kernels.check_finite(gradient, "squares", moment), gradient, moment
