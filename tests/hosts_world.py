"""Hosts of several ranks in one process, in lockstep: `testing.World` with `runtime.hierarchy`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvd_gradcomp.core.collectives import Inside
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor, Context
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.runtime import hierarchy
from hvd_gradcomp.runtime.program_runner import (
    Groups,
    HostPosition,
    Participants,
    ProgramRunner,
    never,
)
from hvd_gradcomp.testing import Group, World


class Hosts(World):
    """World of hosts with several ranks; see `hierarchy`. Ranks are numbered host by host.

    Args:
        compressor, ops, layout, average, tamper: as in `World`; ranks of `tamper` are hosts.
        hosts: number of hosts.
        slots: ranks on each host.
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
        ranks = range(hosts * slots)
        self._hosts = [list(ranks[host * slots : (host + 1) * slots]) for host in range(hosts)]
        positions = [
            HostPosition(host, hosts, slot, slots, self.share)
            for host in range(hosts)
            for slot in range(slots)
        ]
        self._connect([self._member(rank, place) for rank, place in enumerate(positions)])

    def _member(self, rank: int, place: HostPosition) -> Participants:
        inside = Group(self._hosts[place.host], rank)
        across = Group(range(self.size * self.slots)[place.slot :: self.slots], rank)
        return Participants(across, place, lambda _: Groups(inside, across))

    def step(self, gradients: Sequence[Tensor], **extra: Sequence[Tensor]) -> list[Tensor]:
        """Run one step of all ranks; gradients and the sequences in `extra` are over ranks.

        Raises:
            Exception: the first rank's error, once all ranks have ended; states are unchanged.
        """
        self.traffic = []
        programs = [
            hierarchy.aggregate(
                self.compressor,
                self.ops,
                Context(self.layout, host, self.size, self.steps, 1.0, self.postscale),
                gradients[host * self.slots + slot] * 1,
                self.states[host] if slot == self.leader else None,
                place=HostPosition(host, self.size, slot, self.slots, self.share),
                leader=self.leader,
                **{name: values[host * self.slots + slot] for name, values in extra.items()},
            )
            for host in range(self.size)
            for slot in range(self.slots)
        ]
        stacks = [ProgramRunner(program, enters=never) for program in programs]
        self.failures = [None for _ in stacks]
        requests: list[Any] = [None for _ in stacks]

        def resume(rank: int, reply: Any) -> None:
            requests[rank] = None
            try:
                requests[rank] = stacks[rank].send(reply)
            except Exception as error:
                self.failures[rank] = error

        for rank in range(len(stacks)):
            resume(rank, None)
        leaders = list(range(self.leader, len(stacks), self.slots))
        while any(request is not None for request in requests):
            inside = [h for h in self._hosts if all(isinstance(requests[r], Inside) for r in h)]
            group = inside[0] if inside else leaders
            batch = [requests[rank] for rank in group]
            if not inside:
                batch = [self.tamper(h, r) for h, r in enumerate(batch)] if self.tamper else batch
                self._record(batch)
            for rank, reply in zip(group, self._perform(batch, group)):
                resume(rank, reply)
        self._raise_failure()
        self.steps += 1
        self.states = [stacks[rank].result[1] for rank in leaders]
        return [stack.result[0] for stack in stacks]
