"""Runner of a program over a transport, among the ranks that take part.

    runner = ProgramRunner(program)
    request = runner.send(None)                          # the first collective, through branches
    sent = collectives.submit(request, bucket, round)    # in flight
    reply = collectives.receive(sent)                    # as `core.collectives` documents it
    request = runner.send(reply)                         # ... until None: `runner.result`

Between `submit` and `receive` the transport may work in the background (PyTorch), or nothing
happens (TensorFlow, where both are steps of a trace).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol

from hvd_gradcomp.core.collectives import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Collective,
    Gather,
    Inside,
    Switch,
)
from hvd_gradcomp.ops import Tensor

Steps = Generator[Any, Any, Any]


def always(index: Any) -> bool:
    """Return True, to enter every branch; outside of a trace the index may be a tensor."""
    return True


def known(index: Any) -> bool:
    """Return True if the branch is known: its index is a number, not a tensor of a graph."""
    return isinstance(index, int)


def never(index: Any) -> bool:
    """Return False, to enter no branch here: all ranks enter theirs together."""
    return False


class ProgramRunner:
    """A program and the branches that it has switched to, innermost last.

    Args:
        program: the generator to step.
        enters: takes the index of a `Switch` and says whether to enter its branch here. Otherwise
            `send` returns the switch, and its reply is the result of its branch.

    Attributes:
        result: return value of the program.
    """

    def __init__(self, program: Steps, enters: Callable[[Any], bool] = always) -> None:
        self._programs, self._enters = [program], enters
        self.result: Any = None

    def send(self, reply: Any) -> Collective | None:
        """Resume with a reply, None at first; return the next request, None at the end."""
        while self._programs:
            try:
                request = self._programs[-1].send(reply)
            except StopIteration as stop:
                self._programs.pop()
                reply = stop.value
                continue
            if not isinstance(request, Switch) or not self._enters(request.index):
                return request
            self._programs.append(request.branches[int(request.index)]())
            reply = None
        self.result = reply
        return None


def run(program: Steps, perform: Callable[[Any], Any], enters: Any = always) -> Any:
    """Run a program, performing each collective at once, and return its result."""
    stack = ProgramRunner(program, enters)
    request = stack.send(None)
    while request is not None:
        request = stack.send(perform(request))
    return stack.result


def unswitched(program: Steps) -> Steps:
    """Return the program with branches of known index inlined in place of their `Switch`.

    So an error in a branch is raised here, as from a function call.
    """
    stack = ProgramRunner(program, known)
    request = stack.send(None)
    while request is not None:
        request = stack.send((yield request))
    return stack.result


# -- who takes part --------------------------------------------------------------------------


class HostPosition(NamedTuple):
    """Position of a rank: its host, and its slot on that host.

    `share` is the weight of a rank's gradient in its host's.
    """

    host: int
    hosts: int
    slot: int
    slots: int
    share: float = 1.0


class Groups(NamedTuple):
    """Horovod's process sets of a rank."""

    inside: Any  # the ranks of its host
    across: Any  # the ranks at its slot, one on each host


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


# -- collectives -------------------------------------------------------------------------------


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

    def record_checksum(self, reply: Tensor) -> None:
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
        traffic: counts them.
        participants: selects the process set.
    """

    def __init__(
        self, transport: Transport, traffic: TrafficCounter, participants: Participants
    ) -> None:
        self.transport, self.traffic, self._participants = transport, traffic, participants

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
            self.traffic.sent(_for_others(inner))
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
            self.traffic.record_checksum(reply)
        if sent.counts and _root(sent.request) != sent.group.rank():
            self.traffic.received(reply)
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
