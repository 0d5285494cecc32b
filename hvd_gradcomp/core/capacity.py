"""Capacity of a payload: a schedule of levels, raised at once and lowered slowly.

Horovod renegotiates whenever a size changes, and NCCL gathers unequal sizes by one broadcast per
rank. So a payload has a fixed capacity that all ranks share. Every header says how many elements
its rank should have sent; all ranks read all headers, so all move to the same level
(`CapacityState.rung`) without another message: up as soon as one rank needs it; down when no rank
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


class Pace(NamedTuple):
    """How a capacity follows what is needed."""

    patience: int  # steps that a level is kept for after it was needed last
    per_octave: int  # levels; a power of two up to `_LOWEST`
    waits: int = 0  # one in so many of what was needed is left for the next step; 0: none

    def room_for(self, needed: Tensor) -> Tensor:
        """Return how many elements to make room for."""
        return needed - needed // self.waits if self.waits else needed


PACES = {"largest": Pace(PATIENCE, 4), "latest": Pace(1, 16, 4)}


class CapacityState(NamedTuple):
    """Current level and its history, equal on all ranks; scalars on the host."""

    rung: Tensor  # int64 []
    calm: Tensor  # int64 [] steps since a level this high was needed
    peak: Tensor  # int64 [] the highest level needed in these steps
    needed: Tensor  # int64 [] the most elements that a rank wanted in the last step
    changes: Tensor  # int64 [] steps whose level differed from the previous step's


class CapacitySchedule:
    """Capacity levels of one bucket.

    Args:
        capacities: ascending. A single one means payloads of a fixed size.
        summed: whether the dense level is a sum.
        pace: how it follows what is needed.
    """

    def __init__(
        self, capacities: Sequence[int], summed: bool = False, pace: Pace = PACES["largest"]
    ) -> None:
        self.capacities, self.summed, self.pace = tuple(capacities), summed, pace
        self.top = len(self.capacities)  # the dense level, if there is one

    @classmethod
    def up_to(
        cls, top: int, summed: bool = False, pace: Pace = PACES["largest"]
    ) -> CapacitySchedule:
        """Make some levels per octave, below the capacity from which the dense level is cheaper.

        >>> CapacitySchedule.up_to(100).capacities
        (16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96)
        """
        capacities: list[int] = []
        octave = _LOWEST
        while octave < top:
            capacities += [octave + octave * i // pace.per_octave for i in range(pace.per_octave)]
            octave *= 2
        return cls([c for c in capacities if c < top], summed, pace)

    def init(self, ops: Ops, level: int | None = None) -> CapacityState:
        """Return the initial state, at the middle level.

        A first burst is then neither delayed as a whole nor sent dense.

        Args:
            level: level to start at instead, for the first step only; the second step has the
                capacity that the first needed.
        """
        latest = self.pace.patience - 2
        start, calm = (self.top // 2, 0) if level is None else (level, latest)
        calm = min(calm, latest)  # so that no pace leaves it before the first step
        zeros = [ops.host(0) for _ in CapacityState._fields[2:]]
        return CapacityState(ops.host(start), ops.host(calm), *zeros)

    def next_level(self, ops: Ops, state: CapacityState) -> tuple[CapacityLevel, CapacityState]:
        """Return this step's level and the new state, from the ranks' demand in the last step.

        The state may come from a longer schedule: of fewer ranks, or of another phase.
        """
        wanted, patience = self.pace.room_for(state.needed), self.pace.patience
        if ops.next_level is not None:
            given = state._replace(needed=wanted)
            numbers = ops.next_level(self.capacities, patience, given)
            level, capacity, dense, calm, peak, changes = numbers
            return CapacityLevel(level, capacity, dense), CapacityState(
                level, calm, peak, state.needed, changes
            )
        last, calm, peak, needed, changes = (ops.staged(x) for x in state._replace(needed=wanted))
        last, peak = (ops.pick(x > self.top, self.top, x) for x in (last, peak))
        demand = ops.bisect(self.capacities, needed)
        below = demand < last
        calm = ops.pick(below, calm + 1, 0)
        peak = ops.pick(below, ops.pick(demand > peak, demand, peak), 0)
        rested = calm >= patience
        level = ops.pick(rested, peak, ops.pick(below, last, demand))
        changes = ops.pick(level == last, changes, changes + 1)
        calm, peak = ops.pick(rested, 0, calm), ops.pick(rested, 0, peak)
        room = CapacityLevel(level, ops.choice((*self.capacities, 0), level), level == self.top)
        level, calm, peak, changes = (ops.host(x) for x in (level, calm, peak, changes))
        return room, CapacityState(level, calm, peak, state.needed, changes)
