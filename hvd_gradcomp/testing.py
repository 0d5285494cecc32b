"""In-process world of P ranks that run in lockstep.

Programs run as they do over Horovod, and every tensor that would travel can be inspected or
damaged in transit.

>>> import torch
>>> from hvd_gradcomp import StromCompressor
>>> from hvd_gradcomp.core.layout import Layout
>>> from hvd_gradcomp.ops.torch import TorchOps
>>> world = World(StromCompressor(tau=0.5), TorchOps(), Layout(("w",), ((4,),)), size=2)
>>> gradients = [world.flat([torch.tensor([1.0, 0.0, 0.0, -0.2])]) for _ in range(2)]
>>> world.step(gradients)[0][:4]
tensor([0.5000, 0.0000, 0.0000, 0.0000])
>>> world.states[0].memory.r[:4]
tensor([ 0.5000,  0.0000,  0.0000, -0.2000])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hvd_gradcomp.core.collectives import Allreduce, Gather, Switch
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor, Context, Program, State
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.runtime import naming
from hvd_gradcomp.runtime.program_runner import CollectiveRunner, Participants, ProgramRunner, never


class Group(NamedTuple):
    """Ranks that take part in a collective, and the calling one."""

    ranks: Sequence[int]
    this_rank: int

    def rank(self) -> int:
        return self.ranks.index(self.this_rank)

    def size(self) -> int:
        return len(self.ranks)


class _Uncounted:
    """Traffic counter that discards everything."""

    def sent(self, tensor: Tensor) -> None:
        """Do nothing: `World.traffic` records the requests."""

    received = record_checksum = sent


class _Table:
    """Inputs of the ranks for one collective, and their replies."""

    def __init__(self) -> None:
        self.inputs: dict[int, Any] = {}
        self.replies: list[Tensor] | None = None


class InMemory:
    """Transport between ranks of one process: a collective completes once all have submitted."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._tables: dict[tuple[str, tuple[int, ...]], _Table] = {}

    def _submit(
        self, item: Any, name: str, group: Group, replies: Callable[[list[Any]], list[Tensor]]
    ) -> Any:
        key = name, tuple(group.ranks)
        table = self._tables.setdefault(key, _Table())
        table.inputs[group.rank()] = item
        if len(table.inputs) == group.size():
            del self._tables[key]
        return table, group, replies

    def wait(self, pending: Any) -> Tensor:
        table, group, replies = pending
        if len(table.inputs) < group.size():
            raise AssertionError("a rank waits for what others have not asked for")
        if table.replies is None:
            table.replies = replies([table.inputs[rank] for rank in range(group.size())])
        return table.replies[group.rank()]

    def allgather(self, tensor: Tensor, name: str, group: Group) -> Any:
        def replies(tensors: list[Tensor]) -> list[Tensor]:
            return [self._ops.stack(_alike(tensors))] * len(tensors)

        return self._submit(tensor, name, group, replies)

    def allreduce(self, request: Allreduce, name: str, group: Group) -> Any:
        def replies(tensors: list[Tensor]) -> list[Tensor]:
            total = _alike(tensors)[0] * request.prescale
            for tensor in tensors[1:]:
                total = total + tensor * request.prescale
            return [total * request.postscale for _ in tensors]  # each rank may write to its copy

        return self._submit(request.tensor, name, group, replies)

    def alltoall(self, tensor: Tensor, name: str, group: Group) -> Any:
        def replies(tensors: list[Tensor]) -> list[Tensor]:
            ranks = range(len(_alike(tensors)))
            return [self._ops.stack([tensor[rank] for tensor in tensors]) for rank in ranks]

        return self._submit(tensor, name, group, replies)

    def gather(self, request: Gather, name: str, group: Group) -> Any:
        def replies(requests: list[Gather]) -> list[Tensor]:
            plans = {(r.root, r.lengths) for r in requests}
            lengths = tuple(r.tensor.shape[0] for r in requests)
            if len(plans) != 1 or request.lengths != lengths:
                raise AssertionError(f"ranks gather differently: {plans}")
            everything = self._ops.concat([r.tensor for r in requests])
            ranks = range(len(requests))
            return [everything if r == request.root else everything[:0] for r in ranks]

        return self._submit(request, name, group, replies)

    def broadcast(self, tensor: Tensor, root: int, name: str, group: Group) -> Any:
        def replies(item: list[tuple[Tensor, int]]) -> list[Tensor]:
            roots = {root for _, root in item}
            if len(roots) != 1:
                raise AssertionError(f"ranks name different roots: {roots}")
            tensors = _alike([tensor for tensor, _ in item])
            return [tensors[group.ranks.index(root)]] * len(tensors)

        return self._submit((tensor, root), name, group, replies)


def _alike(tensors: list[Tensor]) -> list[Tensor]:
    shapes = {(tuple(x.shape), x.dtype) for x in tensors}
    if len(shapes) != 1:
        raise AssertionError(f"ranks sent different shapes: {shapes}")
    return tensors


class World:
    """World of P ranks that share a process.

    Args:
        compressor: the compressor that they run.
        ops: the operations that they run it with.
        layout: of the one bucket.
        size: number of ranks.
        average: mean over ranks; the sum if False.
        tamper: called as `tamper(rank, request)` for each request before it is performed; returns
            the request to perform instead. For fault injection.

    Attributes:
        states: each rank's state.
        steps: number of steps so far.
        traffic: the requests of the last step, `[round][rank]`.
        failures: each rank's exception in the last step, or None.
    """

    def __init__(
        self,
        compressor: Compressor,
        ops: Ops,
        layout: Layout,
        size: int,
        *,
        average: bool = True,
        tamper: Callable[[int, Any], Any] | None = None,
    ) -> None:
        self.compressor, self.ops, self.layout, self.size = compressor, ops, layout, size
        self.postscale = 1.0 / size if average else 1.0
        self.tamper = tamper
        self.states: list[State] = [compressor.start(ops, layout, size) for _ in range(size)]
        self.steps = 0
        self.traffic: list[list[Any]] = []
        self.failures: list[Exception | None] = [None] * size
        everybody = [Group(range(size), rank) for rank in range(size)]
        self._connect([Participants(group) for group in everybody])

    def _connect(self, members: list[Participants]) -> None:
        transport, counter = InMemory(self.ops), _Uncounted()
        self._runners = [CollectiveRunner(transport, counter, member) for member in members]
        self._name = naming.bucket("world", 0, self.layout)

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Flatten tensors of the layers' shapes into one bucket."""
        pieces = []
        ends = (*self.layout.offsets[1:], self.layout.size)
        for x, size, start, end in zip(tensors, self.layout.sizes, self.layout.offsets, ends):
            pieces.append(self.ops.reshape(x, (size,)))
            pieces.append(self.ops.zeros((end - start - size,), self.layout.dtype))
        return self.ops.concat(pieces)

    def step(self, gradients: Sequence[Tensor], **extra: Sequence[Tensor]) -> list[Tensor]:
        """Run one step of all ranks; `extra` holds a sequence over ranks for each name.

        Returns:
            Each rank's reduced gradient, for its optimizer.
        """
        self.traffic, self.failures = [], [None] * self.size
        programs = [
            self.compressor.aggregate(
                self.ops,
                Context(self.layout, rank, self.size, self.steps, 1.0, self.postscale),
                gradients[rank] * 1,  # a program may write to its arguments
                self.states[rank],
                **{name: values[rank] for name, values in extra.items()},
            )
            for rank in range(self.size)
        ]
        results = self._run(programs)
        self.steps += 1
        self.states = [state for _, state in results]
        return [total for total, _ in results]

    def _run(self, programs: list[Program]) -> list[Any]:
        """Run all programs to completion, round by round."""
        stacks = [ProgramRunner(program, enters=never) for program in programs]
        requests = [stack.send(None) for stack in stacks]
        while any(request is not None for request in requests):
            if any(request is None for request in requests):
                raise AssertionError("some ranks ended while others still ask for a collective")
            if self.tamper is not None:
                requests = [self.tamper(rank, r) for rank, r in enumerate(requests)]
            self._record(requests)
            replies = self._perform(requests)
            for rank, stack in enumerate(stacks):
                try:
                    requests[rank] = stack.send(replies[rank])
                except Exception as error:
                    self.failures[rank] = error  # the other ranks must get their replies too
            self._raise_failure()
        return [stack.result for stack in stacks]

    def _record(self, requests: list[Any]) -> None:
        if not isinstance(requests[0], Switch):
            self.traffic.append([_as_sent(request) for request in requests])

    def _raise_failure(self) -> None:
        for error in self.failures:
            if error is not None:
                raise error

    def _perform(self, requests: list[Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """Perform concurrent requests of the ranks, all by default, and return the replies."""
        kinds = {type(r) for r in requests}
        if len(kinds) != 1:
            raise AssertionError(f"ranks ask for different collectives: {kinds}")
        if isinstance(requests[0], Switch):
            chosen = {int(r.index) for r in requests}
            if len(chosen) != 1:
                raise AssertionError(f"ranks are in different phases: {chosen}")
            return self._run([r.branches[int(r.index)]() for r in requests])
        runners = [self._runners[rank] for rank in ranks or range(len(requests))]
        sent = [
            runner.submit(r, self._name, len(self.traffic)) for runner, r in zip(runners, requests)
        ]
        return [runner.receive(pending) for runner, pending in zip(runners, sent)]


def _as_sent(request: Any) -> Any:
    """Copy a donated tensor, which may be written to, so that the recorded request is unchanged."""
    if isinstance(request, Allreduce) and request.donated:
        return request._replace(tensor=request.tensor * 1)
    return request
