"""Exchange behind a hook of PyTorch's: all ranks begin a step alike, or none does."""

from __future__ import annotations

from collections.abc import Sequence

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

    def _begin_step(self, kind: Kind, settings: int = 0) -> dict[int, StepHeader]:
        """Begin a step, after a check that all ranks begin the same one; return their headers.

        Raises:
            OutOfStepError: on all ranks.
        """
        reducer = self._reducer
        reducer.begin_step()
        policy = int(reducer.rolls_back_nonfinite)
        header = StepHeader(kind, reducer.steps, policy=policy, settings=settings)
        headers = self._transport.gather_headers(header, "the beginning of a step")
        if error := compare(headers):
            raise error
        return headers

    def _fail(self, error: Exception) -> None:
        """Record an error; close the connections unless all ranks have the same error."""
        self._error = error
        if not isinstance(error, (NonFiniteGradientError, OutOfStepError)):
            for group in self._groups:
                group.hang_up()

    def _pop_error(self) -> Exception | None:
        """Return the error of this step, and clear it."""
        error, self._error = self._error, None
        return error
