"""Exchange behind a hook of PyTorch's: all ranks begin a step alike, or none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.runtime.step_header import Kind, StepHeader, compare
from hvd_gradcomp.torch.comm.c10d import ProcessGroup
from hvd_gradcomp.torch.reduce.backend import GroupBackend
from hvd_gradcomp.torch.reduce.reducer import Reducer


class HookExchange:
    """Base of the exchanges of `DistributedDataParallel` and of `fully_shard`.

    Args:
        reducer: reduces the buckets.
        transport: compares the steps of all ranks.
        groups: the connections that are closed when this rank fails.
    """

    def __init__(
        self, reducer: Reducer, transport: GroupBackend, groups: Sequence[ProcessGroup]
    ) -> None:
        self._reducer, self._transport, self._groups = reducer, transport, groups
        self._error: Exception | None = None  # of this step, raised when backward has ended
        self._wait_for_headers: Callable[[], dict[int, StepHeader]] = dict

    def _require_connections(self) -> None:
        """Check that no earlier step has failed.

        Raises:
            RuntimeError: one has.
        """
        if any(group.closed for group in self._groups):
            raise RuntimeError(
                "the exchange of an earlier step has failed, and what was kept is lost: start all "
                "ranks again, from a checkpoint"
            )

    def _begin_step(self, kind: Kind, settings: int = 0, *, at_once: bool = False) -> None:
        """Begin a step; all ranks check that they begin the same one before anything is sent.

        The check waits for the slowest rank. Until something is to be sent, this rank goes on with
        backward and compresses, if its state can be restored should the ranks differ.

        Args:
            kind: of the step.
            settings: see `StepHeader`.
            at_once: wait here.

        Raises:
            OutOfStepError: on all ranks, here or before the first collective of the step.
        """
        reducer = self._reducer
        reducer.begin_step(self._agree)
        policy = int(reducer.rolls_back_nonfinite)
        header = StepHeader(kind, reducer.steps, policy=policy, settings=settings)
        self._wait_for_headers = self._transport.start_headers(header, "the beginning of a step")
        if at_once or not reducer.can_abort:
            reducer.programs.agree()

    def _agree(self) -> None:
        """Check that all ranks have begun the same step.

        Raises:
            OutOfStepError: on all ranks.
        """
        wait, self._wait_for_headers = self._wait_for_headers, dict
        headers = wait()
        if error := compare(headers):
            raise error
        self._take_headers(headers)

    def _take_headers(self, headers: dict[int, StepHeader]) -> None:
        """Take what the headers of all ranks say, before anything is sent."""

    def _fail(self, error: Exception) -> None:
        """Record an error; close the connections unless all ranks have the same error."""
        self._error = error
        if isinstance(error, OutOfStepError):
            self._reducer.abort()
        elif not isinstance(error, NonFiniteGradientError):
            for group in self._groups:
                group.hang_up()

    def _pop_error(self) -> Exception | None:
        """Return the error of this step, and clear it."""
        error, self._error = self._error, None
        return error
