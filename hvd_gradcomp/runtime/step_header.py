"""Header of a step: the row of integers that ranks compare before they act.

Ranks at different places would add up gradients of different batches, or wait for collectives that
the others never start. So each rank first sends a header to all others, by whatever moves a row of
integers, and all of them compare the same headers:

    header = StepHeader(Kind.STEP, step=reducer.steps, policy=int(scaled))
    headers = {rank: StepHeader(*row) for rank, row in gather_rows([*header]).items()}
    if error := compare(headers):
        raise error  # on all ranks, the same
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from hvd_gradcomp.runtime.errors import OutOfStepError


class Kind(IntEnum):
    """Action that a rank is about to take."""

    ABSENT = 0  # none: the row of zeros that Horovod's own join adds for a rank
    STEP = 1  # exchange the gradients of a step
    REDUCED = 2  # apply the gradients of a step, which are reduced
    SAVE = 3  # save or load a checkpoint
    JOINED = 4  # contribute to the steps of others: this rank has no more batches
    VERIFY = 5  # compare the replicas
    EXCHANGE = 6  # exchange what local steps have changed, when the schedule says so
    REQUESTED_EXCHANGE = 7  # the same in `exchange()`, maybe after other numbers of steps


class StepHeader(NamedTuple):
    """Header of one rank.

    Attributes:
        kind: the action that the rank is about to take; see `Kind`.
        step: exchanges before this one.
        part: number of the part of the model that is exchanged; 0 for all of it, and negative for
            something else that all ranks do together, as a frontend numbers it.
        policy: 1 if a step with a non-finite gradient is rolled back on all ranks.
        clock: local steps that a schedule has counted.
        settings: digest of settings that must be equal in this step; 0 for none.
        digest: digest of data that must be bit-identical; 0 for none.
        fault: code of a problem that this rank has; 0 for none. Never compared.
        flags: bits of the protocol that sends the header. Never compared.
    """

    kind: int
    step: int = 0
    part: int = 0
    policy: int = 0
    clock: int = 0
    settings: int = 0
    digest: int = 0
    fault: int = 0
    flags: int = 0

    @property
    def takes_part(self) -> bool:
        """Return True unless the rank has joined, so that it has no settings of its own."""
        return self.kind not in (Kind.ABSENT, Kind.JOINED)


SIZE = len(StepHeader._fields)
"""Number of integers in a header."""
HEADER = 2
"""First integer of a header's row where others travel too, which begin with a flag: 0 or 1."""

Headers = Mapping[int, StepHeader]  # by rank


def compare(headers: Headers, *, clocks: bool = True) -> OutOfStepError | None:
    """Return the error of ranks that are not at the same place; None if they are.

    Ranks that have joined have to be in the same step as the others, and nothing more; absent ones
    are not compared.

    Args:
        headers: of all ranks.
        clocks: ranks must have made the same number of local steps, except in `exchange()`.

    >>> compare({0: StepHeader(Kind.STEP, step=3), 1: StepHeader(Kind.STEP, step=3)})
    >>> str(compare({0: StepHeader(Kind.STEP, step=3), 1: StepHeader(Kind.STEP, step=4)}))[:73]
    'the ranks are in different steps: rank 0 in step 3, rank 1 in step 4. Loa'
    """
    active = {rank: header for rank, header in headers.items() if header.takes_part}
    steps = {header.step for header in headers.values() if header.kind != Kind.ABSENT}
    verifying = _those(active, Kind.VERIFY)
    if verifying and len(verifying) < len(active):
        return OutOfStepError(
            f"rank {_listed(verifying)} calls verify, and the other ranks are in backward: call it "
            "on all ranks, between the same two steps"
        )
    if len({_place(header, clocks) for header in active.values()}) > 1 or len(steps) > 1:
        return OutOfStepError(_different_places(headers))
    behind = _those(active, Kind.STEP)
    if behind and len(behind) < len(active):
        return OutOfStepError(
            f"rank {_listed(behind)} has begun another step, while other ranks still are to call "
            "step(): call zero_grad() and step() equally often on all ranks"
        )
    return None


def different_comparisons(first: Mapping[int, int]) -> OutOfStepError | None:
    """Return the error of ranks that compare headers while others begin a round of local steps.

    Args:
        first: the first integer of each rank's row.

    >>> different_comparisons({0: 0, 1: 1})
    >>> str(different_comparisons({0: HEADER, 1: 0}))[:63]
    'rank 0 calls verify or ends an exchange, and rank 1 begins one:'
    """
    those = [rank for rank, tag in first.items() if tag == HEADER]
    if not those or len(those) == len(first):
        return None
    others = [rank for rank in first if rank not in those]
    return OutOfStepError(
        f"rank {_listed(those)} calls verify or ends an exchange, and rank {_listed(others)} "
        "begins one: call step(), exchange(), restart() and verify at the same places on all ranks"
    )


def values(headers: Headers, field: str) -> dict[int, int]:
    """Return a field by rank, of the ranks that take part and have set it.

    >>> values({0: StepHeader(Kind.STEP, digest=7), 1: StepHeader(Kind.STEP)}, "digest")
    {0: 7}
    """
    by_rank = {
        rank: getattr(header, field) for rank, header in headers.items() if header.takes_part
    }
    return {rank: value for rank, value in by_rank.items() if value}


def _place(header: StepHeader, clocks: bool) -> tuple[int, ...]:
    kind = Kind.STEP if header.kind == Kind.REDUCED else header.kind
    counted = clocks and kind != Kind.REQUESTED_EXCHANGE
    return kind, header.step, header.part, header.policy, header.clock if counted else 0


def _those(headers: Headers, kind: Kind) -> list[int]:
    return [rank for rank, header in headers.items() if header.kind == kind]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


_STEPS = (
    "Load the same checkpoint on all ranks, and call backward() and step() equally often on all of "
    "them"
)
_SCALERS = "Use a GradScaler on all ranks or on none"
_EXCHANGES = (
    "Call step() equally often on all ranks, exchange() on all or none, and load the same "
    "checkpoint on all of them"
)


def _different_places(headers: Headers) -> str:
    """Return the message that lists where each rank is."""
    active = [header for header in headers.values() if header.takes_part]
    if any(header.kind >= Kind.EXCHANGE for header in active):
        head, describe, remedy = "the ranks are in different exchanges", _exchange, _EXCHANGES
    elif len({header.step for header in headers.values() if header.kind != Kind.ABSENT}) > 1:
        head, describe, remedy = "the ranks are in different steps", _step, _STEPS
    else:
        head, describe, remedy = "only some of the ranks use a GradScaler", _step, _SCALERS
    listed = ", ".join(f"rank {r} {describe(h)}" for r, h in headers.items() if h.kind)
    return f"{head}: {listed}. {remedy}"


def _step(header: StepHeader) -> str:
    return f"in step {header.step}{' with a GradScaler' * bool(header.policy)}"


def _exchange(header: StepHeader) -> str:
    where = " in exchange()" * (header.kind == Kind.REQUESTED_EXCHANGE)
    return f"after {header.clock} steps{where}, with {header.step} exchanges before it"
