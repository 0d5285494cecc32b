"""Participants of an exchange: all ranks, or one leader of each host and bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hvd_gradcomp.core.collectives import Collective, Inside
from hvd_gradcomp.runtime.hierarchy import Groups, HostPosition


class Participants(ABC):
    """Participants of an exchange.

    Attributes:
        process_set: the ranks that take part; has `rank()`, `size()` and `ranks`, which is None for
            all ranks.
        place: position of this rank, if only sums of hosts are compressed; see `hierarchy`.
    """

    process_set: Any
    place: HostPosition | None
    _groups: Groups | None = None  # created once all ranks are known to need them

    @abstractmethod
    def leader(self, bucket: Any) -> int:
        """Return the slot of the rank that compresses a bucket for its host."""

    def _make_groups(self, place: HostPosition) -> Groups:
        """Make the process sets of hosts, on all ranks together; only Horovod's have them."""
        raise NotImplementedError(f"{type(self).__name__} has no hosts, and is at {place}")

    @property
    def seat(self) -> tuple[int, int]:
        """(rank, size) as compressors see them: numbers of hosts in a hierarchical exchange."""
        if self.place is not None:
            return self.place.host, self.place.hosts
        return self.process_set.rank(), self.process_set.size()

    def leads(self, bucket: Any) -> bool:
        """Return True if this rank compresses a bucket and keeps its state."""
        return self.place is None or self.place.slot == self.leader(bucket)

    @property
    def groups(self) -> Groups:
        """The process sets of this rank among hosts; the first access is collective."""
        assert self.place is not None
        if self._groups is None:
            self._groups = self._make_groups(self.place)
        return self._groups

    def among(self, request: Collective | None) -> Any:
        """Return the process set of a collective; for None, that of the compressed exchange."""
        if self.place is None:
            return self.process_set
        return self.groups.inside if isinstance(request, Inside) else self.groups.across
