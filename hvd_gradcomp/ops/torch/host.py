"""Decisions on the host, and checks that stop a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvd_gradcomp.ops import LOGGER, PayloadError, Tensor
from hvd_gradcomp.ops.torch.base import Base, raise_false


class HostControl(Base):
    """Ops for decisions on the host, and for checks that stop a step."""

    def cond(self, dense: bool, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        return if_true() if dense else if_false()

    def map_bytes(self, function: Callable[[bytes], bytes], data: Tensor) -> Tensor:
        result = function(data.cpu().contiguous().numpy().tobytes())
        return torch.frombuffer(bytearray(result), dtype=torch.uint8).to(self.device)

    def warn(self, condition: Any, message: str) -> None:
        if condition:
            LOGGER.warning("%s", message)

    def stage(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return x
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        copy.copy_(x, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(x.device))
        return copy

    def staged(self, x: Tensor) -> int:
        if self._copied is not None:
            self._copied.synchronize()
            self._raise_pending()
        return int(x)

    def pick(self, condition: bool, x: int, y: int) -> int:
        return x if condition else y

    def bisect(self, ascending: Sequence[int], x: int) -> int:
        return bisect_left(ascending, x)

    def choice(self, values: Sequence[int], index: int) -> int:
        return values[index]

    def require(
        self, facts: Mapping[str, Tensor], error: type[Exception] = PayloadError
    ) -> Tensor | None:
        known = tuple(facts.values())
        holds = torch.stack(known) if len(known) > 1 else known[0][None]  # [facts, world]
        if self.on_host:
            raise_false(tuple(facts), holds, error)
            return None
        self._pending.append((tuple(facts), self.stage(holds), error))
        return holds.all(0) if len(known) > 1 else known[0]

    def found_finite(self) -> bool:
        self.raise_found()
        return True
