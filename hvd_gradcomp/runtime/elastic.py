"""Membership of an elastic run: the ranks' common commit, and the residual lost with a rank.

At each commit the ranks gather their identities and the norms of their residuals: a few bytes next
to the broadcast of Horovod's own commit. So after a rank has died, the others still know the norm
of its residual.
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
    """State of one process at one commit."""

    process: str  # unlike the slot, never reused
    rank: int
    host: str
    slot: int
    commits: int  # 0 for a new process
    squares: float  # sum of squares of its residuals


class Lost(NamedTuple):
    """Loss through a rank that left: the norm of its unsent residual."""

    rank: int
    norm: float


class Membership(ABC):
    """Mixin that precedes one of Horovod's elastic states; call `begin` after its constructor.

    When a rank dies, the collective in progress may have completed on some of the others and not on
    the rest. So the survivors may be one commit apart, but no more, since a commit gathers from
    all. Each rank keeps its last two commits, and all go back to the newest common one. A rank that
    stayed ahead would count elements as sent that the parameters of the others have not seen.

    Attributes:
        lost: (rank, norm) of each rank that left since this process joined.
    """

    lost: list[Lost]

    # -- implemented by the frontend ---------------------------------------------------------

    @abstractmethod
    def _gather(self, member: RankState) -> Sequence[RankState]:
        """Gather the state of every rank, in rank order."""

    @abstractmethod
    def _place(self) -> tuple[int, int]:
        """Return (rank, slot) of this process now."""

    @abstractmethod
    def _squares(self) -> float:
        """Return the sum of squares of this rank's residuals."""

    @abstractmethod
    def _committed(self) -> Any:
        """Return the copies that `save` made, without copying again."""

    @abstractmethod
    def _recommit(self, copies: Any) -> None:
        """Make earlier copies the ones that `restore` goes back to."""

    @abstractmethod
    def _forget(self) -> None:
        """Reset the rank-local state to its value before the first step."""

    @abstractmethod
    def _resize(self) -> None:
        """Adapt to the number of ranks, without a collective."""

    # -- Horovod's events --------------------------------------------------------------------

    def begin(self) -> None:
        """Initialize this process as new, with no commits."""
        self._process = uuid.uuid4().hex
        self._host = os.environ.get("HOROVOD_HOSTNAME") or platform.node()
        self._commits = 0
        self._members: Sequence[RankState] = []
        self._committed_members: Sequence[RankState] = []
        self._before: tuple[Any, int, Sequence[RankState]] | None = None
        self.lost = []

    def commit(self) -> None:
        """Save, after all ranks have gathered the norms of their residuals; collective."""
        self._record_members(self._gather_members())
        super().commit()  # type: ignore[misc]

    def save(self) -> None:
        """Copy the state to memory, and keep the copies of the previous commit."""
        self._before = (self._committed(), self._commits, self._committed_members)
        super().save()  # type: ignore[misc]
        self._commits, self._committed_members = self._commits + 1, self._members

    def reset(self) -> None:
        """Adapt to Horovod's restart, possibly with other ranks."""
        self._resize()

    def sync(self) -> None:
        """Bring all ranks to one commit: rank 0's, except for rank-local state.

        Raises:
            RuntimeError: on all ranks, if they have not committed together.
        """
        members = self._gather_members()
        common = min((s.commits for s in members if s.commits), default=0)
        if common and max(s.commits for s in members) > common + 1:
            raise RuntimeError(
                f"the ranks have committed {[s.commits for s in members]} times: call "
                "state.commit() on all ranks at the same step"
            )
        if self._commits > common:
            assert self._before is not None
            copies, self._commits, self._members = self._before
            self._recommit(copies)
            self.restore()  # type: ignore[attr-defined]
            self._resize()
        if common and not self._commits:
            self._forget()
        super().sync()  # type: ignore[misc]
        self._commits = common
        self._record_members(self._gather_members())
        self.save()

    # -- the list of ranks -------------------------------------------------------------------

    def _gather_members(self) -> Sequence[RankState]:
        rank, slot = self._place()
        record = RankState(self._process, rank, self._host, slot, self._commits, self._squares())
        return self._gather(record)

    def _record_members(self, members: Sequence[RankState]) -> None:
        """Store the new list of ranks, and report those that left."""
        present = {member.process for member in members}
        known = {member.process for member in self._members}
        oldest = next((member.process for member in members if member.process in known), None)
        total = math.sqrt(sum(member.squares for member in self._members))
        for member in self._members:
            if member.process in present:
                continue
            norm = math.sqrt(member.squares)
            self.lost.append(Lost(member.rank, norm))
            if oldest == self._process:
                LOGGER.warning(
                    "rank %d (%s, slot %d) left: a residual of norm %.4g (of %.4g in all), "
                    "accumulated since it was last sent, is lost",
                    member.rank,
                    member.host,
                    member.slot,
                    norm,
                    total,
                )
        self._members = members
