"""Submission of a program's collectives to a transport: name, process set and byte counts.

    sent = runner.submit(request, bucket, round)     # in flight
    reply = runner.receive(sent)                     # the reply that `core.collectives` documents

Between the two calls the transport may work in the background (PyTorch), or nothing happens
(TensorFlow, where both are steps of a trace).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from hvd_gradcomp.core.collectives import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Collective,
    Gather,
    Inside,
)
from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.runtime.participants import Participants


class Transport(Protocol):
    """Transport of tensors between ranks that make the same calls with the same names.

    Each collective returns a handle for `wait`. `group` has `rank()`, `size()` and `ranks`.
    """

    def allgather(self, tensor: Tensor, name: str, group: Any) -> Any:
        """Gather the tensor of every rank, [size, *shape]; an error unless shapes are equal."""

    def allreduce(self, request: Allreduce, name: str, group: Any) -> Any:
        """Sum over ranks; see `Allreduce`."""

    def alltoall(self, tensor: Tensor, name: str, group: Any) -> Any:
        """Send row i of the tensor to rank i."""

    def gather(self, request: Gather, name: str, group: Any) -> Any:
        """Gather to one rank; see `Gather`."""

    def broadcast(self, tensor: Tensor, root: int, name: str, group: Any) -> Any:
        """Broadcast the tensor of the global rank `root`."""

    def wait(self, pending: Any) -> Tensor:
        """Return the reply to a collective."""


class TrafficCounter(Protocol):
    """Counter of the tensors that this rank sends and receives."""

    def sent(self, tensor: Tensor) -> None:
        """Count a tensor that was handed to a collective for other ranks."""

    def received(self, tensor: Tensor) -> None:
        """Count a tensor that a collective returned."""

    def heard(self, reply: Tensor) -> None:
        """Record a reply that is bit-identical on all ranks."""


class PendingCollective(NamedTuple):
    """A collective in flight.

    Attributes:
        request: the collective.
        group: the process set that runs it.
        counts: whether its bytes are counted: traffic inside a host is not.
        pending: the handle that the transport returned.
    """

    request: Any
    group: Any
    counts: bool
    pending: Any


class CollectiveRunner:
    """Runner of collectives.

    Args:
        transport: moves the tensors.
        ledger: counts them.
        participants: selects the process set.
    """

    def __init__(
        self, transport: Transport, ledger: TrafficCounter, participants: Participants
    ) -> None:
        self.transport, self.ledger, self._participants = transport, ledger, participants

    def submit(
        self, request: Collective, bucket: str, path: object, group: Any = None
    ) -> PendingCollective:
        """Start a collective.

        Args:
            request: the collective.
            bucket: name of the bucket.
            path: the round; inside branches of a graph also the branch and the round in it.
            group: process set, if it is not the default one of the request.

        Raises:
            TypeError: the request is no collective.
        """
        name = name_of(bucket, request, path)
        group, counts = group or self._participants.among(request), not isinstance(request, Inside)
        inner: Any = request.request if isinstance(request, Inside) else request
        if not isinstance(inner, (Allgather, Allreduce, Alltoall, Broadcast, Gather)):
            raise TypeError(f"{inner!r} is no collective; {bucket} has asked for it")
        if counts and _root(inner) in (None, group.rank()):
            self.ledger.sent(_for_others(inner))
        return PendingCollective(inner, group, counts, self._begin(inner, name, group))

    def _begin(self, request: Any, name: str, group: Any) -> Any:
        transport = self.transport
        if isinstance(request, Allgather):
            return transport.allgather(request.tensor, name, group)
        if isinstance(request, Allreduce):
            return transport.allreduce(request, name, group)
        if isinstance(request, Alltoall):
            return transport.alltoall(request.tensor, name, group)
        if isinstance(request, Gather):
            return transport.gather(request, name, group)
        root = group.ranks[request.root] if group.ranks else request.root
        return transport.broadcast(request.tensor, root, name, group)

    def receive(self, sent: PendingCollective) -> Tensor:
        """Return the reply to a submitted collective once it has arrived."""
        reply = self.transport.wait(sent.pending)
        if isinstance(sent.request, (Allreduce, Broadcast)) and self._participants.place is None:
            self.ledger.heard(reply)
        if sent.counts and _root(sent.request) != sent.group.rank():
            self.ledger.received(reply)
        return reply


def name_of(bucket: str, request: Collective, path: object) -> str:
    """Return the name of one collective of a bucket.

    Args:
        bucket: the bucket's name.
        request: the collective.
        path: the round; inside branches of a graph also the branch and the round in it.

    >>> from hvd_gradcomp.core.collectives import Broadcast
    >>> name_of("gradcomp.0.bucket3.fc.weight", Broadcast(None, 0), 1)
    'gradcomp.0.bucket3.fc.weight.broadcast.1'
    """
    if isinstance(request, Inside):  # once a step, but in a later round on leaders
        return f"{bucket}.inside.{request.what}"
    return f"{bucket}.{type(request).__name__.lower()}.{path}"


def _for_others(request: Any) -> Tensor:
    """Return a tensor of as many bytes as leave this rank: one row of an alltoall stays here."""
    return request.tensor[1:] if isinstance(request, Alltoall) else request.tensor


def _root(request: Any) -> int | None:
    """Return the only rank that sends data, or None if several do."""
    return request.root if isinstance(request, Broadcast) else None
