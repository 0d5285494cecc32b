"""Numbers of the ranks for `RoundClock`, by collectives of PyTorch's transports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hvd_gradcomp.torch.local.tensor_exchange import Connection
from hvd_gradcomp.torch.reduce.backend import Backend


class _PendingRows(NamedTuple):
    """Rows that are on their way, and the transport that waits for them."""

    transport: Backend
    work: Any

    def ready(self) -> bool:
        return bool(self.work.ready())

    def wait(self) -> list[list[int]]:
        rows: list[list[int]] = self.transport.wait(self.work).tolist()
        return rows


class TensorProgressGather:
    """Gather of one row of numbers a rank.

    Args:
        connection: to the other ranks, on which nothing else travels.
        device: of the numbers.
    """

    def __init__(self, connection: Connection, device: torch.device) -> None:
        self._transport, self._device = connection.transport, device
        self._group = connection.participants.process_set

    def submit(self, progress: Sequence[int], slot: int) -> _PendingRows:
        """Submit this rank's numbers; see `ProgressGather`."""
        row = torch.tensor(progress, dtype=torch.int64, device=self._device)
        name = f"{self._transport.name}.clock.{slot}"
        work = self._transport.allgather(row, name, self._group)
        return _PendingRows(self._transport, work)
