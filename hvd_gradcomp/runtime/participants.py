"""Participants of an exchange: all ranks, or one leader of each host and bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_gradcomp.core.collectives import Collective, Inside
from hvd_gradcomp.runtime.hierarchy import Groups, HostPosition


class Participants:
    """Ranks that take part in an exchange, and this rank's position among hosts.

    Args:
        process_set: the ranks; has `rank()`, `size()` and `ranks`, which is None for all ranks.
        place: position of this rank, if only sums of hosts are compressed; see `hierarchy`.
        make_groups: makes the process sets of hosts, on all ranks together; needed with a `place`.
    """

    def __init__(
        self,
        process_set: Any,
        place: HostPosition | None = None,
        make_groups: Callable[[HostPosition], Groups] | None = None,
    ) -> None:
        if place is not None and make_groups is None:
            raise ValueError("hosts need process sets, which this transport does not have")
        self.process_set, self.place = process_set, place
        self._make_groups = make_groups
        self._groups: Groups | None = None  # made once all ranks are known to need them

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """Return them as compressors see them: those of hosts in a hierarchical exchange."""
        if self.place is not None:
            return self.place.host, self.place.hosts
        return self.process_set.rank(), self.process_set.size()

    def leads(self, leader: int) -> bool:
        """Return True if this rank compresses a bucket, and keeps its state.

        Args:
            leader: slot of the ranks that compress the bucket, one on each host.
        """
        return self.place is None or self.place.slot == leader

    @property
    def groups(self) -> Groups:
        """The process sets of this rank among hosts; the first access is collective."""
        assert self.place is not None and self._make_groups is not None
        if self._groups is None:
            self._groups = self._make_groups(self.place)
        return self._groups

    def among(self, request: Collective | None) -> Any:
        """Return the process set of a collective; for None, that of the compressed exchange."""
        if self.place is None:
            return self.process_set
        return self.groups.inside if isinstance(request, Inside) else self.groups.across
