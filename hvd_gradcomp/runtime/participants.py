"""Who takes part in an exchange: all ranks, or of each host the one that leads a bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hvd_gradcomp.core.collectives import Collective, Inside
from hvd_gradcomp.runtime.hierarchy import Groups, HostPosition


class Participants(ABC):
    """What takes part in an exchange.

    Attributes:
        process_set: the ranks that take part: what has `rank()`, `size()` and `ranks`, which is
            None where they are all there are.
        place: of this rank among hosts, where only their sums are compressed; see `hierarchy`.
    """

    process_set: Any
    place: HostPosition | None
    _groups: Groups | None = None  # made when all are known to want them

    @abstractmethod
    def leader(self, bucket: Any) -> int:
        """The place in its host of the rank that compresses a bucket."""

    @abstractmethod
    def _make_groups(self, place: HostPosition) -> Groups:
        """All ranks make the process sets of hosts, together."""

    @property
    def seat(self) -> tuple[int, int]:
        """(rank, size) as compressors see them: of hosts, where only those exchange."""
        if self.place is not None:
            return self.place.host, self.place.hosts
        return self.process_set.rank(), self.process_set.size()

    def leads(self, bucket: Any) -> bool:
        """Whether this rank compresses a bucket, and keeps its state."""
        return self.place is None or self.place.slot == self.leader(bucket)

    @property
    def groups(self) -> Groups:
        """The process sets of this rank among hosts; all ranks ask together the first time."""
        assert self.place is not None
        if self._groups is None:
            self._groups = self._make_groups(self.place)
        return self._groups

    def among(self, request: Collective | None) -> Any:
        """The process set that a collective is for; of None, those that exchange compressed."""
        if self.place is None:
            return self.process_set
        return self.groups.inside if isinstance(request, Inside) else self.groups.across
