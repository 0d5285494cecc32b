"""Agreement of ranks that step at different speeds on when they exchange.

After a step a rank submits how many it has made since the last exchange, and goes on without
waiting for the others: the gather of these numbers ends when the slowest rank has submitted its
own. All ranks read the same numbers, so all decide alike: to exchange, or to submit the next ones.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hvd_gradcomp.torch.tensor_exchange import Connection

SHARE = 0.05  # of a step: how long a rank waits for numbers that may be on their way


class RoundProgress(NamedTuple):
    """Numbers of one rank.

    Attributes:
        steps: made since the last exchange.
        waited: milliseconds since it had made as many as a round has; -1 if it has not.
        asked: 1 if it is in `exchange()`.
        settings: checksum of what all ranks decide by.
    """

    steps: int
    waited: int
    asked: int
    settings: int


class RoundClock:
    """Clock of the rounds, of one rank.

    Args:
        connection: to the other ranks, on which nothing else travels.
        every: steps of a round.
        deadline: seconds.
        device: of the numbers.
    """

    def __init__(
        self, connection: Connection, every: int, deadline: float, device: torch.device
    ) -> None:
        self._transport = connection.transport
        self._group = connection.participants.process_set
        self._every, self._deadline, self._device = every, deadline, device
        self._settings = zlib.crc32(repr((every, float(deadline))).encode())
        self.reconnect()

    def restart(self) -> None:
        """Begin a round."""
        self._steps, self._ready = 0, 0.0
        self._last = time.monotonic()

    def reconnect(self) -> None:
        """Begin a round among other ranks; numbers that are on their way are of those before."""
        self._pending: Any = None
        self._count = 0
        self.restart()

    def step(self) -> bool:
        """Count a step; return True if all ranks exchange now.

        A rank whose deadline is over waits here for the others.
        """
        now = time.monotonic()
        lasted, self._last = now - self._last, now
        self._steps += 1
        if self._steps == self._every:
            self._ready = now
        new = over = False
        while over or not new:
            if self._pending is None:
                self._submit(asked=False)
                new = True
            over = self._waited() >= self._deadline
            if not over and not self._arrives(SHARE * lasted):
                break
            if self._is_due(self._receive()):
                self.restart()
                return True
        return False

    def meet(self) -> bool:
        """Wait until all ranks are in `exchange()`; return False if a round is due before."""
        while True:
            if self._pending is None:
                self._submit(asked=True)
            every = self._receive()
            together = all(progress.asked for progress in every)
            if together or self._is_due(every):
                self.restart()
                return together

    def _waited(self) -> float:
        """Return the seconds since this rank had made the steps of a round; -1 before."""
        return time.monotonic() - self._ready if self._steps >= self._every else -1.0

    def _submit(self, asked: bool) -> None:
        waited = self._waited()
        milliseconds = int(1e3 * waited) if waited >= 0 else -1
        progress = RoundProgress(self._steps, milliseconds, int(asked), self._settings)
        row = torch.tensor(progress, dtype=torch.int64, device=self._device)
        # As many names as there can be collectives at a time: Horovod caches what it knows.
        self._count = (self._count + 1) % 2
        name = f"{self._transport.name}.clock.{self._count}"
        self._pending = self._transport.allgather(row, name, self._group)

    def _arrives(self, seconds: float) -> bool:
        """Return True if the numbers of all ranks are there, or come within so many seconds."""
        end = time.monotonic() + seconds
        while not self._pending.ready():
            if time.monotonic() >= end:
                return False
            time.sleep(min(2e-4, seconds))
        return True

    def _receive(self) -> list[RoundProgress]:
        rows, self._pending = self._transport.wait(self._pending), None
        return [RoundProgress(*row) for row in rows.tolist()]

    def _is_due(self, every: Sequence[RoundProgress]) -> bool:
        if len({progress.settings for progress in every}) > 1:
            return True  # ranks would decide differently; an exchange compares all settings
        complete = all(progress.steps >= self._every for progress in every)
        return complete or max(progress.waited for progress in every) >= 1e3 * self._deadline
