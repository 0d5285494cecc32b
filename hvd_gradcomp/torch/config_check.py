"""Configuration check among the ranks of a reducer, before training and in each step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from horovod import __version__ as horovod_version
from horovod.common.exceptions import HorovodInternalError

from hvd_gradcomp.runtime import config_check, errors
from hvd_gradcomp.torch.bucketing import BucketPlanner
from hvd_gradcomp.torch.comm import horovod


class ConfigCheck:
    """Configuration check among the ranks of one reducer.

    Args:
        run: the reducer, or a weak proxy of it.
        settings: other settings that must be equal on all ranks.
        gather: gathers a typed item from every rank; see `runtime.typed_json`.

    Attributes:
        reached: the check has passed, and nothing has changed since.
    """

    def __init__(
        self, run: BucketPlanner, settings: str, gather: Callable[[Any, Any], list[Any]]
    ) -> None:
        self._run, self._settings, self._gather = run, settings, gather
        self.reached = False

    def description(self) -> config_check.Description:
        """Describe everything that must be equal on all ranks."""
        return config_check.describe(
            self._run.layers,
            self._run.compressor,
            [bucket.layout for bucket in self._run.buckets],
            self._settings,
            framework=f"torch {torch.__version__.partition('+')[0]}",
            horovod=horovod_version,
        )

    def agree(self) -> None:
        """Compare the descriptions of all ranks, once before the first collective."""
        if self.reached:
            return
        mine = self.description()
        if not self._run.compressor.is_linear:  # sums are the same in every step
            mine = {**mine, config_check.STEP: str(self._run.steps)}
        every = self._gather(mine, config_check.Description)
        config_check.agree(every, self._run.process_set.ranks)
        if self._run.place is not None:
            _ = self._run.groups  # all ranks are here together
        self.reached = True

    def exchange_flags(
        self, numbers: Sequence[int], what: str
    ) -> Generator[None, None, list[list[int]]]:
        """Exchange a row of numbers below 2**31, of equal length on all ranks; yield while waiting.

        An allreduce with a row for each rank, rather than an allgather, works with `hvd.join()`.
        """
        run, size = self._run, self._run.process_set.size()
        if size == 1:
            return [list(numbers)]
        everybody = torch.zeros(size, len(numbers), dtype=torch.int32, device="cpu")
        everybody[run.process_set.rank()] = torch.tensor(numbers, device="cpu")
        try:
            with errors.explain_errors(
                HorovodInternalError, f"the end of step {run.steps}'s exchange"
            ):
                loan = horovod.allreduce(everybody, f"{run.name}.{what}", run.process_set)
                while not loan.ready():
                    if not run.poll():
                        yield
                return loan.wait().tolist()
        except HorovodInternalError:
            run.poll()
            if run.errors:  # which name what was on its way
                raise run.errors[0] from None
            raise
