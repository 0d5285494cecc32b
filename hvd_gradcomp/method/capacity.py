"""Capacity of a payload: a schedule of levels, raised at once and lowered slowly.

Horovod renegotiates whenever a size changes, and NCCL gathers unequal sizes by one broadcast per
rank. So a payload has a fixed capacity that all ranks share. Every header says how many elements
its rank should have sent; all ranks read all headers, so all move to the same level
(`CapacityState.level`) without another message: up as soon as one rank needs it; down when no rank
has needed it for `patience` steps, to the highest level needed in that time. Elements that do not
fit stay in the state.

How long to wait is a trade. "largest", the default, waits for `PATIENCE` steps, with four levels
an octave: sizes hardly ever change, and payloads are one and a half to three times what is sent.
"latest" follows the last step alone, with sixteen levels an octave, and its capacity is three
quarters of what that step needed: ranks and steps differ by so much, and unused capacity is
transmitted too. A rank that needs the full size sends three quarters now, and the rest usually in
the next step.

The top level is *dense*: everything fits. It sends one small code per element and no index. If
gathering these codes would bring a rank more bytes, the payload is *summed* instead: a float32
allreduce, whose bytes hardly grow with the number of ranks. So the levels depend on the number of
ranks, but level i has the same capacity for every number of ranks that has it. If the largest
capacity holds all that may be sent, as EGC's does, only a summed level is dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.kernel_params import CapacityLevel

PATIENCE = 16
_LOWEST = 16


class CapacityPolicy(NamedTuple):
    """How a capacity follows what is needed."""

    patience: int  # steps that a level is kept for after it was needed last
    per_octave: int  # levels; a power of two up to `_LOWEST`
    waits: int = 0  # one in so many of what was needed is left for the next step; 0: none

    def room_for(self, needed: Tensor) -> Tensor:
        """Return how many elements to make room for."""
        return needed - needed // self.waits if self.waits else needed


POLICIES = {"largest": CapacityPolicy(PATIENCE, 4), "latest": CapacityPolicy(1, 16, 4)}


class CapacityState(NamedTuple):
    """Current level and its history, equal on all ranks; scalars on the host."""

    level: Tensor  # int64 []
    steps_unneeded: Tensor  # int64 [] steps since a level this high was needed
    highest: Tensor  # int64 [] the highest level needed in these steps
    needed: Tensor  # int64 [] the most elements that a rank wanted in the last step
    changes: Tensor  # int64 [] steps whose level differed from the previous step's


class CapacitySchedule:
    """Capacity levels of one bucket.

    Args:
        capacities: ascending. A single one means payloads of a fixed size.
        summed: whether the dense level is a sum.
        policy: how it follows what is needed.
    """

    def __init__(
        self,
        capacities: Sequence[int],
        summed: bool = False,
        policy: CapacityPolicy = POLICIES["largest"],
    ) -> None:
        self.capacities, self.summed, self.policy = tuple(capacities), summed, policy
        self.top = len(self.capacities)  # the dense level, if there is one

    @classmethod
    def up_to(
        cls, top: int, summed: bool = False, policy: CapacityPolicy = POLICIES["largest"]
    ) -> CapacitySchedule:
        """Make some levels per octave, below the capacity from which the dense level is cheaper.

        >>> CapacitySchedule.up_to(100).capacities
        (16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96)
        """
        capacities: list[int] = []
        octave = _LOWEST
        while octave < top:
            levels = policy.per_octave
            capacities += [octave + octave * i // levels for i in range(levels)]
            octave *= 2
        return cls([c for c in capacities if c < top], summed, policy)

    def init(self, ops: Ops, level: int | None = None) -> CapacityState:
        """Return the initial state, at the middle level.

        A first burst is then neither delayed as a whole nor sent dense.

        Args:
            level: level to start at instead, for the first step only; the second step has the
                capacity that the first needed.
        """
        latest = self.policy.patience - 2
        start, steps_unneeded = (self.top // 2, 0) if level is None else (level, latest)
        # No policy may leave the level before the first step.
        steps_unneeded = min(steps_unneeded, latest)
        zeros = [ops.host(0) for _ in CapacityState._fields[2:]]
        return CapacityState(ops.host(start), ops.host(steps_unneeded), *zeros)

    def next_level(self, ops: Ops, state: CapacityState) -> tuple[CapacityLevel, CapacityState]:
        """Return this step's level and the new state, from the ranks' demand in the last step.

        The state may come from a longer schedule: of fewer ranks, or of another phase.
        """
        demanded = state._replace(needed=self.policy.room_for(state.needed))
        patience = self.policy.patience
        if ops.next_level is not None:
            numbers = ops.next_level(self.capacities, patience, demanded)
            level, capacity, dense, steps_unneeded, highest, changes = numbers
            return CapacityLevel(level, capacity, dense), CapacityState(
                level, steps_unneeded, highest, state.needed, changes
            )
        last, steps_unneeded, highest, needed, changes = (ops.staged(x) for x in demanded)
        last, highest = (ops.pick(x > self.top, self.top, x) for x in (last, highest))
        demand = ops.bisect(self.capacities, needed)
        below = demand < last
        steps_unneeded = ops.pick(below, steps_unneeded + 1, 0)
        highest = ops.pick(below, ops.pick(demand > highest, demand, highest), 0)
        rested = steps_unneeded >= patience
        level = ops.pick(rested, highest, ops.pick(below, last, demand))
        changes = ops.pick(level == last, changes, changes + 1)
        steps_unneeded, highest = ops.pick(rested, 0, steps_unneeded), ops.pick(rested, 0, highest)
        chosen = CapacityLevel(level, ops.choice((*self.capacities, 0), level), level == self.top)
        return chosen, CapacityState(
            ops.host(level),
            ops.host(steps_unneeded),
            ops.host(highest),
            state.needed,
            ops.host(changes),
        )
