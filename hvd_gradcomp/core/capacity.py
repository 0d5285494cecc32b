"""How much room a payload has: a ladder of capacities, climbed at once and left slowly.

Horovod negotiates anew whenever a size changes, and NCCL gathers unequal sizes by one broadcast a
rank. So a payload has a fixed capacity that all ranks share. Every header says how many elements
its rank should have sent; all ranks read all headers, so all move to the same rung without another
message: up as soon as one rank needs it, down when no rank needed the room for `PATIENCE` steps,
and then to what was needed at most in that time. What does not fit stays in the state.

The top rung is *dense*: everything fits. There is one small code for each element, and no index;
or, where gathering these would bring a rank more bytes, what is sent is *summed* on the way: an
allreduce of float32, whose bytes hardly grow with the number of ranks. So the rungs depend on how
many ranks there are. Rung i has one capacity for all numbers of ranks that have it. Where the
largest capacity holds all that may be sent, as EGC's does, no rung but a summed one is dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.kernel_params import CapacityLevel

PATIENCE = 16
_PER_OCTAVE = 4
_LOWEST = 16


class CapacityState(NamedTuple):
    """Equal on all ranks; scalars on the host."""

    rung: Tensor  # int64 []
    calm: Tensor  # int64 [] steps since a rung this high was needed
    peak: Tensor  # int64 [] the highest rung needed in them
    needed: Tensor  # int64 [] the most elements that a rank wanted in the last step
    changes: Tensor  # int64 [] steps whose rung was another than that of the step before


class CapacitySchedule:
    """The rungs of one bucket.

    Args:
        capacities: ascending. One alone is a payload of a fixed size.
        summed: whether the dense rung is.
    """

    def __init__(self, capacities: Sequence[int], summed: bool = False) -> None:
        self.capacities, self.summed = tuple(capacities), summed
        self.top = len(self.capacities)  # the dense rung, where there is one

    @classmethod
    def up_to(cls, top: int, summed: bool = False) -> CapacitySchedule:
        """Four rungs to an octave, below the capacity from which the dense rung is cheaper.

        >>> Ladder.up_to(100).capacities
        (16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96)
        """
        capacities: list[int] = []
        octave = _LOWEST
        while octave < top:
            capacities += [octave + octave * i // _PER_OCTAVE for i in range(_PER_OCTAVE)]
            octave *= 2
        return cls([c for c in capacities if c < top], summed)

    def init(self, ops: Ops, rung: int | None = None) -> CapacityState:
        """Starts in the middle: a first burst neither waits as a whole nor is sent dense.

        Args:
            rung: to start on instead, for the first step alone: the second has the room that the
                first has needed.
        """
        start, calm = (self.top // 2, 0) if rung is None else (rung, PATIENCE - 2)
        zeros = [ops.host(0) for _ in CapacityState._fields[2:]]
        return CapacityState(ops.host(start), ops.host(calm), *zeros)

    def climb(self, ops: Ops, state: CapacityState) -> tuple[CapacityLevel, CapacityState]:
        """The rung for this step, from what the ranks needed in the last one.

        The state may be that of a longer ladder: of fewer ranks, or of another phase.
        """
        if ops.climb is not None:
            numbers = ops.climb(self.capacities, PATIENCE, state)
            rung, capacity, dense, calm, peak, changes = numbers
            return CapacityLevel(rung, capacity, dense), CapacityState(
                rung, calm, peak, state.needed, changes
            )
        last, calm, peak, needed, changes = (ops.staged(x) for x in state)
        last, peak = (ops.pick(x > self.top, self.top, x) for x in (last, peak))
        demand = ops.bisect(self.capacities, needed)
        below = demand < last
        calm = ops.pick(below, calm + 1, 0)
        peak = ops.pick(below, ops.pick(demand > peak, demand, peak), 0)
        rested = calm >= PATIENCE
        rung = ops.pick(rested, peak, ops.pick(below, last, demand))
        changes = ops.pick(rung == last, changes, changes + 1)
        calm, peak = ops.pick(rested, 0, calm), ops.pick(rested, 0, peak)
        room = CapacityLevel(rung, ops.choice((*self.capacities, 0), rung), rung == self.top)
        rung, calm, peak, changes = (ops.host(x) for x in (rung, calm, peak, changes))
        return room, CapacityState(rung, calm, peak, state.needed, changes)
