"""Agreement of ranks that step at different speeds on when they exchange.

After a step a rank submits how many it has made since the last exchange, and goes on without
waiting for the others: the gather of these numbers ends when the slowest rank has submitted its
own. All ranks read the same numbers, so all decide alike: to exchange, or to submit the next ones.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

SHARE = 0.05  # of a step: how long a rank waits for numbers that may be on their way


class RoundProgress(NamedTuple):
    """Numbers of one rank.

    Attributes:
        steps: made since the last exchange.
        waited: milliseconds since it had made as many as a round has; -1 if it has not.
        requested: 1 if it is in `exchange()`.
        settings: checksum of what all ranks decide by.
    """

    steps: int
    waited: int
    requested: int
    settings: int


class PendingProgress(Protocol):
    """Numbers of all ranks that are on their way."""

    def ready(self) -> bool:
        """Return True if they are there."""

    def wait(self) -> Sequence[Sequence[int]]:
        """Return the numbers of each rank, once they are there."""


class ProgressGather(Protocol):
    """Gather of the numbers of all ranks, over connections on which nothing else travels."""

    def submit(self, progress: Sequence[int], slot: int) -> PendingProgress:
        """Submit this rank's numbers, without waiting for those of others.

        Args:
            progress: as many numbers on all ranks.
            slot: 0 or 1, in turns. Horovod caches names, so two suffice for all collectives.
        """


class RoundClock:
    """Clock of the rounds, of one rank.

    Args:
        gather: to the other ranks.
        every: steps of a round.
        deadline: seconds.

    Attributes:
        every: as given; set anew when a round of another length begins.
    """

    def __init__(self, gather: ProgressGather, every: int, deadline: float) -> None:
        self._gather, self.every, self._deadline = gather, every, deadline
        self.reconnect()

    def restart(self) -> None:
        """Begin a round."""
        self._steps, self._ready = 0, 0.0
        self._last = time.monotonic()

    def reconnect(self) -> None:
        """Begin a round among other ranks; numbers that are on their way are of those before."""
        self._pending: PendingProgress | None = None
        self._count = 0
        self.restart()

    def step(self, steps: int = 1) -> bool:
        """Count steps; return True if all ranks exchange now.

        A rank whose deadline is over waits here for the others.

        Args:
            steps: made since the last call.
        """
        now = time.monotonic()
        lasted, self._last = now - self._last, now
        before, self._steps = self._steps, self._steps + steps
        if before < self.every <= self._steps:
            self._ready = now
        new = over = False
        while over or not new:
            pending = self._pending
            if pending is None:
                pending, new = self._submit(requested=False), True
            over = self._waited() >= self._deadline
            if not over and not _arrives(pending, SHARE * lasted):
                break
            if self._is_due(self._receive(pending)):
                self.restart()
                return True
        return False

    def meet(self) -> bool:
        """Wait until all ranks are in `exchange()`; return False if a round is due before."""
        while True:
            every = self._receive(self._pending or self._submit(requested=True))
            together = all(progress.requested for progress in every)
            if together or self._is_due(every):
                self.restart()
                return together

    def _waited(self) -> float:
        """Return the seconds since this rank had made the steps of a round; -1 before."""
        return time.monotonic() - self._ready if self._steps >= self.every else -1.0

    def _submit(self, requested: bool) -> PendingProgress:
        waited = self._waited()
        milliseconds = int(1e3 * waited) if waited >= 0 else -1
        settings = zlib.crc32(repr((self.every, float(self._deadline))).encode())
        progress = RoundProgress(self._steps, milliseconds, int(requested), settings)
        self._count = (self._count + 1) % 2
        self._pending = self._gather.submit(progress, self._count)
        return self._pending

    def _receive(self, pending: PendingProgress) -> list[RoundProgress]:
        rows, self._pending = pending.wait(), None
        return [RoundProgress(*row) for row in rows]

    def _is_due(self, every: Sequence[RoundProgress]) -> bool:
        if len({progress.settings for progress in every}) > 1:
            return True  # ranks would decide differently; an exchange compares all settings
        complete = all(progress.steps >= self.every for progress in every)
        return complete or max(progress.waited for progress in every) >= 1e3 * self._deadline


def _arrives(pending: PendingProgress, seconds: float) -> bool:
    """Return True if the numbers of all ranks are there, or come within so many seconds."""
    end = time.monotonic() + seconds
    while not pending.ready():
        if time.monotonic() >= end:
            return False
        time.sleep(min(2e-4, seconds))
    return True
