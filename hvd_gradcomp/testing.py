"""A world of P ranks in one process, in lockstep.

Programs run as they do over Horovod, and every tensor that would travel can be looked at, or
damaged, on its way.

>>> import torch
>>> from hvd_gradcomp import StromCompressor
>>> from hvd_gradcomp.layout import Layout
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
from typing import Any

from hvd_gradcomp import hierarchy
from hvd_gradcomp.aggregator import Compressor, Context, Program, State
from hvd_gradcomp.collectives import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Gather,
    Inside,
    Switch,
)
from hvd_gradcomp.layout import Layout
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.protocols import resizing


class World:
    """P ranks that share a process.

    Args:
        compressor: what they run.
        ops: the verbs they run it with.
        layout: of the one bucket.
        size: how many ranks.
        average: mean over ranks; the sum if False.
        tamper: called as `tamper(rank, request)` for each request before it is performed; returns
            the request that is performed instead. For faults.

    Attributes:
        states: each rank's state.
        steps: how many steps were made.
        traffic: the requests of the last step, `[round][rank]`.
        failures: what each rank has raised in the last step, or None.
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
        self.states: list[State] = [
            resizing.start(compressor, ops, layout, size) for _ in range(size)
        ]
        self.steps = 0
        self.traffic: list[list[Any]] = []
        self.failures: list[Exception | None] = [None] * size

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of the layers' shapes as one bucket."""
        pieces = []
        ends = (*self.layout.offsets[1:], self.layout.size)
        for x, size, start, end in zip(tensors, self.layout.sizes, self.layout.offsets, ends):
            pieces.append(self.ops.reshape(x, (size,)))
            pieces.append(self.ops.zeros((end - start - size,), self.layout.dtype))
        return self.ops.concat(pieces)

    def step(self, gradients: Sequence[Tensor], **extra: Sequence[Tensor]) -> list[Tensor]:
        """One step of all ranks; `extra` holds a sequence over ranks for each name.

        Returns:
            What each rank hands to its optimizer.
        """
        self.traffic, self.failures = [], [None] * self.size
        programs = [
            self.compressor.aggregate(
                self.ops,
                Context(self.layout, rank, self.size, self.steps, 1.0, self.postscale),
                gradients[rank] * 1,  # a program may write to what it is given
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
        """All programs to their end, round by round."""
        results: list[Any] = [None] * self.size
        requests = []
        for rank, program in enumerate(programs):
            try:
                requests.append(next(program))
            except StopIteration as stop:
                results[rank] = stop.value
        while requests:
            if len(requests) != self.size:
                raise AssertionError("some ranks ended while others still ask for a collective")
            if self.tamper is not None:
                requests = [self.tamper(rank, r) for rank, r in enumerate(requests)]
            if not isinstance(requests[0], Switch):
                self.traffic.append([_as_sent(request) for request in requests])
            replies, requests = self._perform(requests), []
            for rank, program in enumerate(programs):
                try:
                    requests.append(program.send(replies[rank]))
                except StopIteration as stop:
                    results[rank] = stop.value
                except Exception as error:
                    self.failures[rank] = error  # the other ranks have to see their replies too
            _raise_any(self.failures)
        return results

    def _perform(self, requests: list[Any]) -> list[Any]:
        kinds = {type(r) for r in requests}
        if len(kinds) != 1:
            raise AssertionError(f"ranks ask for different collectives: {kinds}")
        first = requests[0]
        if isinstance(first, Switch):
            chosen = {int(r.index) for r in requests}
            if len(chosen) != 1:
                raise AssertionError(f"ranks are in different phases: {chosen}")
            return self._run([r.branches[int(r.index)]() for r in requests])
        if isinstance(first, Gather):
            plans = {(r.root, r.lengths) for r in requests}
            if len(plans) != 1 or first.lengths != tuple(r.tensor.shape[0] for r in requests):
                raise AssertionError(f"ranks gather differently: {plans}")
            everything = self.ops.concat([r.tensor for r in requests])
            ranks = range(len(requests))
            return [everything if r == first.root else everything[:0] for r in ranks]
        shapes = {(tuple(r.tensor.shape), r.tensor.dtype) for r in requests}
        if len(shapes) != 1:
            raise AssertionError(f"ranks sent different shapes: {shapes}")
        tensors = [r.tensor for r in requests]
        if isinstance(first, Allgather):
            gathered = self.ops.stack(tensors)
            return [gathered] * len(tensors)
        if isinstance(first, Allreduce):
            total = tensors[0] * first.prescale
            for tensor in tensors[1:]:
                total = total + tensor * first.prescale
            return [total * first.postscale for _ in tensors]  # each rank may write to its own
        if isinstance(first, Alltoall):
            return [self.ops.stack([t[rank] for t in tensors]) for rank in range(len(tensors))]
        if isinstance(first, Broadcast):
            roots = {r.root for r in requests}
            if len(roots) != 1:
                raise AssertionError(f"ranks name different roots: {roots}")
            return [tensors[first.root]] * len(tensors)
        raise AssertionError(f"no collective: {first!r}")


def _raise_any(failures: Sequence[Exception | None]) -> None:
    for error in failures:
        if error is not None:
            raise error


def _as_sent(request: Any) -> Any:
    """A request that stays as it is, though what is donated may be written to."""
    if isinstance(request, Allreduce) and request.donated:
        return request._replace(tensor=request.tensor * 1)
    return request


class Hosts(World):
    """Hosts of several ranks, in one process; see `hierarchy`. Ranks are counted host by host.

    Args:
        compressor, ops, layout, average, tamper: as in `World`; ranks of `tamper` are hosts.
        hosts: how many.
        slots: ranks on each.
        leader: the slot whose ranks compress.

    Attributes:
        states: of each host's leader.
    """

    def __init__(
        self,
        compressor: Compressor,
        ops: Ops,
        layout: Layout,
        hosts: int,
        slots: int,
        *,
        leader: int = 0,
        average: bool = True,
        tamper: Callable[[int, Any], Any] | None = None,
    ) -> None:
        super().__init__(compressor, ops, layout, hosts, average=average, tamper=tamper)
        self.slots, self.leader = slots, leader
        self.share = 1.0 / slots if average else 1.0

    def step(self, gradients: Sequence[Tensor], **extra: Sequence[Tensor]) -> list[Tensor]:
        """One step of all ranks; gradients and the sequences in `extra` are over ranks.

        Raises:
            Exception: what the first rank has raised, once all have ended; then states stay.
        """
        self.traffic = []
        programs = [
            hierarchy.aggregate(
                self.compressor,
                self.ops,
                Context(self.layout, host, self.size, self.steps, 1.0, self.postscale),
                gradients[host * self.slots + slot] * 1,
                self.states[host] if slot == self.leader else None,
                place=hierarchy.Place(host, self.size, slot, self.slots, self.share),
                leader=self.leader,
                **{name: values[host * self.slots + slot] for name, values in extra.items()},
            )
            for host in range(self.size)
            for slot in range(self.slots)
        ]
        ranks = range(len(programs))
        self.failures, results = [None for _ in ranks], [(None, None) for _ in ranks]
        requests: list[Any] = [None for _ in ranks]

        def resume(rank: int, reply: Any) -> None:
            requests[rank] = None
            try:
                requests[rank] = programs[rank].send(reply)
            except StopIteration as stop:
                results[rank] = stop.value
            except Exception as error:
                self.failures[rank] = error

        for rank in ranks:
            resume(rank, None)
        hosts = [list(ranks[h * self.slots : (h + 1) * self.slots]) for h in range(self.size)]
        leaders = list(ranks[self.leader :: self.slots])
        while any(request is not None for request in requests):
            ready = [host for host in hosts if isinstance(requests[host[0]], Inside)]
            inside = [host for host in ready if all(isinstance(requests[r], Inside) for r in host)]
            group = inside[0] if inside else leaders
            asked = [requests[rank] for rank in group]
            if inside:
                asked = [request.request for request in asked]
            else:
                asked = [self.tamper(h, r) for h, r in enumerate(asked)] if self.tamper else asked
                if not isinstance(asked[0], Switch):
                    self.traffic.append([_as_sent(request) for request in asked])
            for rank, reply in zip(group, self._perform(asked)):
                resume(rank, reply)
        _raise_any(self.failures)
        self.steps += 1
        self.states = [results[rank][1] for rank in leaders]
        return [total for total, _ in results]
