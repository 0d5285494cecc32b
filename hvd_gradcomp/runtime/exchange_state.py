"""Messages with which ranks of local steps compare what they are about to exchange."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from hvd_gradcomp.monitoring.verify import DivergedError
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.runtime.step_header import Kind, StepHeader, compare


class ExchangeState(NamedTuple):
    """State of one rank before an exchange.

    Attributes:
        number: of the fragment, or a negative number for something else.
        explicit: 1 in `exchange()`, where ranks may have made different numbers of steps.
        exchanges: of the same before.
        clock: steps that the schedule counts.
        moved: above 0 if the rank has made a step since it had the global parameters.
        digest: checksum of the global parameters.
        fault: what the frontend has found on this rank, 0 for nothing.
        begun: steps before the round that is to begin, or has begun.
        length: its steps; negative if what decides them has failed.
    """

    number: int
    explicit: int
    exchanges: int
    clock: int
    moved: int
    digest: int
    fault: int
    begun: int
    length: int


States = Mapping[int, ExchangeState]  # by rank


def out_of_step(states: States, counted: bool = True) -> OutOfStepError | None:
    """Return the error of ranks that are in different exchanges; None if they are in the same.

    Args:
        states: of the ranks.
        counted: whether ranks have to have made as many steps, where `exchange()` does not ask.
    """
    headers = {
        rank: StepHeader(
            Kind.REQUESTED_EXCHANGE if state.explicit else Kind.EXCHANGE,
            state.exchanges,
            part=state.number,
            clock=state.clock,
        )
        for rank, state in states.items()
    }
    return compare(headers, clocks=counted)


def digests_of(states: States) -> dict[int, int]:
    """Return the checksum of each rank's global parameters."""
    return {rank: state.digest for rank, state in states.items()}


def diverged(
    digests: Mapping[int, int], what: str, remedy: str, replicas: Sequence[Collection[int]] = ()
) -> DivergedError | None:
    """Return the error of ranks whose global parameters differ; None if they are equal.

    Args:
        digests: of the parameters, by rank.
        what: "parameters" or "variables".
        remedy: how to make them equal.
        replicas: the ranks in sets that have the same parameters; () if all of them do.

    >>> diverged({0: 7, 1: 8, 2: 7, 3: 8}, "parameters", "", [{0, 2}, {1, 3}])
    """
    for ranks in replicas or [digests]:
        of_these = {rank: digests[rank] for rank in sorted(ranks)}
        if len(set(of_these.values())) > 1:
            return DivergedError(
                f"the global {what} of the ranks differ; digests by rank: {of_these}. {remedy}"
            )
    return None


def different_lengths(states: States) -> MismatchError | None:
    """Return the error of ranks whose next round has other numbers of steps; None if it has not.

    Ranks that have begun different rounds, where some are lost, are not compared.

    Args:
        states: of the ranks.
    """
    last = max(state.begun for state in states.values())
    lengths = {rank: state.length for rank, state in states.items() if state.begun == last}
    if len(set(lengths.values())) == 1:
        return None
    return MismatchError(
        f"every= decides on another number of steps for the round after step {last}, by rank: "
        f"{lengths}. Let it depend on nothing that differs between ranks: on the step that it is "
        "given, or a learning rate that is scheduled alike on all of them"
    )
