"""Hands what a program asks for to what moves tensors: by which name, among whom, and counted.

    sent = dispatch.submit(request, bucket, round)     # it travels
    reply = dispatch.receive(sent)                     # what `collectives` says the reply is

Between the two a transport may be at work by itself (PyTorch), or nothing may happen (TensorFlow,
where both are steps of a trace).
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
from hvd_gradcomp.runtime import naming
from hvd_gradcomp.runtime.participants import Participants


class Transport(Protocol):
    """What moves tensors, between ranks that call the same with the same name.

    Each collective returns what `wait` is given. `group` has `rank()`, `size()` and `ranks`.
    """

    def allgather(self, tensor: Tensor, name: str, group: Any) -> Any:
        """Everybody's tensor, [size, *shape]; an error unless shapes are equal."""

    def allreduce(self, request: Allreduce, name: str, group: Any) -> Any:
        """See `Allreduce`."""

    def alltoall(self, tensor: Tensor, name: str, group: Any) -> Any:
        """Row i of the tensor goes to rank i."""

    def gather(self, request: Gather, name: str, group: Any) -> Any:
        """See `Gather`."""

    def broadcast(self, tensor: Tensor, root: int, name: str, group: Any) -> Any:
        """The tensor of a rank, which is counted among all there are."""

    def wait(self, pending: Any) -> Tensor:
        """The reply to a collective."""


class TrafficCounter(Protocol):
    """Where it is written down what this rank has moved."""

    def sent(self, tensor: Tensor) -> None:
        """Was handed to a collective for other ranks."""

    def received(self, tensor: Tensor) -> None:
        """Was handed back by one."""

    def heard(self, reply: Tensor) -> None:
        """Came back, and is the same to the bit on all ranks."""


class PendingCollective(NamedTuple):
    """What is on its way.

    Attributes:
        request: what was asked for.
        group: whom it is among.
        counts: whether its bytes are counted: those that stay in a host are not.
        pending: what the transport has given for it.
    """

    request: Any
    group: Any
    counts: bool
    pending: Any


class CollectiveRunner:
    """Performs collectives.

    Args:
        transport: moves tensors.
        ledger: counts them.
        seated: says among whom.
    """

    def __init__(self, transport: Transport, ledger: TrafficCounter, seated: Participants) -> None:
        self.transport, self.ledger, self._seated = transport, ledger, seated

    def submit(
        self, request: Collective, bucket: str, path: object, group: Any = None
    ) -> PendingCollective:
        """Lets a collective begin.

        Args:
            request: what is asked for.
            bucket: for which bucket, by its name.
            path: the round; inside branches of a graph also which, and the round there.
            group: whom it is among, where it is another than the request is for.

        Raises:
            TypeError: it is no collective.
        """
        name = naming.collective(bucket, request, path)
        group, counts = group or self._seated.among(request), not isinstance(request, Inside)
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
        """The reply to what was submitted, once it is there."""
        reply = self.transport.wait(sent.pending)
        if isinstance(sent.request, (Allreduce, Broadcast)) and self._seated.place is None:
            self.ledger.heard(reply)
        if sent.counts and _root(sent.request) != sent.group.rank():
            self.ledger.received(reply)
        return reply


def _for_others(request: Any) -> Tensor:
    """As many bytes as leave this rank: of an alltoall one row stays where it is."""
    return request.tensor[1:] if isinstance(request, Alltoall) else request.tensor


def _root(request: Any) -> int | None:
    """The one rank that gives something, where it is only one."""
    return request.root if isinstance(request, Broadcast) else None
