"""Who takes part in an elastic run, what they have all committed, and what is lost with one.

At each commit the ranks gather who they are and the norm of what they keep back; a few bytes beside
the broadcast that Horovod's own commit makes. So when one has died, the others still know what it
held.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

LOGGER = logging.getLogger("hvd_gradcomp")


class RankState(NamedTuple):
    """One process at one commit."""

    process: str  # unlike its slot, never taken again
    rank: int
    host: str
    slot: int
    commits: int  # 0 for one that is new
    squares: float  # of what it keeps back, summed


class Lost(NamedTuple):
    """What was lost with a rank that left: the norm of what it had not sent."""

    rank: int
    norm: float


class Membership(ABC):
    """Goes before one of Horovod's elastic states; `begin` comes after its constructor.

    When a rank dies, the collective that it died in may have ended on some of the others and not
    on the rest, so these are a commit apart, and no more: a commit gathers from all. Each keeps its
    last two, and all go back to the newest that all have. A rank that stayed ahead would count as
    sent what the parameters of the others have not seen.

    Attributes:
        lost: (rank, norm) of each that left since this process joined.
    """

    lost: list[Lost]

    # -- the frontend's part -----------------------------------------------------------------

    @abstractmethod
    def _gather(self, seat: RankState) -> Sequence[RankState]:
        """Everybody's, in the order of ranks."""

    @abstractmethod
    def _place(self) -> tuple[int, int]:
        """(rank, slot) of this process now."""

    @abstractmethod
    def _squares(self) -> float:
        """The sum of squares of what this rank keeps back."""

    @abstractmethod
    def _committed(self) -> Any:
        """What `save` has copied, without copying it again."""

    @abstractmethod
    def _recommit(self, copies: Any) -> None:
        """Makes earlier copies those that `restore` goes back to."""

    @abstractmethod
    def _forget(self) -> None:
        """Sets what belongs to this rank alone to what it was before the first step."""

    @abstractmethod
    def _resize(self) -> None:
        """Settles what depends on the number of ranks; without a collective."""

    # -- Horovod's events --------------------------------------------------------------------

    def begin(self) -> None:
        """This process is new, and has committed nothing."""
        self._process = uuid.uuid4().hex
        self._host = os.environ.get("HOROVOD_HOSTNAME") or platform.node()
        self._commits = 0
        self._seats: Sequence[RankState] = []
        self._committed_seats: Sequence[RankState] = []
        self._before: tuple[Any, int, Sequence[RankState]] | None = None
        self.lost = []

    def commit(self) -> None:
        """Saves, after all have said what they keep back; on all ranks together."""
        self._note(self._call_roll())
        super().commit()  # type: ignore[misc]

    def save(self) -> None:
        """Copies everything to memory, and keeps the copies before these."""
        self._before = (self._committed(), self._commits, self._committed_seats)
        super().save()  # type: ignore[misc]
        self._commits, self._committed_seats = self._commits + 1, self._seats

    def reset(self) -> None:
        """Horovod has begun anew, with other ranks perhaps."""
        self._resize()

    def sync(self) -> None:
        """Brings all ranks to one commit: rank 0's, but for what belongs to each rank alone.

        Raises:
            RuntimeError: on all ranks, if they have not committed together.
        """
        seats = self._call_roll()
        common = min((s.commits for s in seats if s.commits), default=0)
        if common and max(s.commits for s in seats) > common + 1:
            raise RuntimeError(
                f"the ranks have committed {[s.commits for s in seats]} times: call state.commit() "
                "on all ranks at the same step"
            )
        if self._commits > common:
            assert self._before is not None
            copies, self._commits, self._seats = self._before
            self._recommit(copies)
            self.restore()  # type: ignore[attr-defined]
            self._resize()
        if common and not self._commits:
            self._forget()
        super().sync()  # type: ignore[misc]
        self._commits = common
        self._note(self._call_roll())
        self.save()

    # -- the roll ----------------------------------------------------------------------------

    def _call_roll(self) -> Sequence[RankState]:
        rank, slot = self._place()
        mine = RankState(self._process, rank, self._host, slot, self._commits, self._squares())
        return self._gather(mine)

    def _note(self, seats: Sequence[RankState]) -> None:
        """Takes the new roll, and reports who is no longer on it."""
        present = {seat.process for seat in seats}
        known = {seat.process for seat in self._seats}
        oldest = next((seat.process for seat in seats if seat.process in known), None)
        total = math.sqrt(sum(seat.squares for seat in self._seats))
        for seat in self._seats:
            if seat.process in present:
                continue
            norm = math.sqrt(seat.squares)
            self.lost.append(Lost(seat.rank, norm))
            if oldest == self._process:
                LOGGER.warning(
                    "rank %d (%s, slot %d) left: a residual of norm %.4g (of %.4g in all), "
                    "accumulated since it was last sent, is lost",
                    seat.rank,
                    seat.host,
                    seat.slot,
                    norm,
                    total,
                )
        self._seats = seats
