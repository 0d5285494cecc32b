"""What the ranks of an engine compare before they train, and tell each other in each step."""

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
    """Of the ranks of one engine.

    Args:
        run: the engine; a weak reference does.
        settings: what else must be equal on all ranks.
        gather: everybody's item of a kind, on all ranks; see `messages`.

    Attributes:
        reached: whether all ranks train the same, as far as is known.
    """

    def __init__(
        self, run: BucketPlanner, settings: str, gather: Callable[[Any, Any], list[Any]]
    ) -> None:
        self._run, self._settings, self._gather = run, settings, gather
        self.reached = False

    def description(self) -> config_check.Description:
        """What has to be equal on all ranks."""
        return config_check.describe(
            self._run.layers,
            self._run.compressor,
            [bucket.layout for bucket in self._run.buckets],
            self._settings,
            framework=f"torch {torch.__version__.partition('+')[0]}",
            horovod=horovod_version,
        )

    def agree(self) -> None:
        """All ranks compare what they train; once, before anything travels."""
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
        """All ranks' numbers, below 2**31 and equally many; yields while it waits for them.

        Added up, each rank's in a place of its own, since that is what works with `hvd.join()`.
        """
        run, size = self._run, self._run.process_set.size()
        if size == 1:
            return [list(numbers)]
        everybody = torch.zeros(size, len(numbers), dtype=torch.int32, device="cpu")
        everybody[run.process_set.rank()] = torch.tensor(numbers, device="cpu")
        try:
            with errors.named(HorovodInternalError, f"the end of step {run.steps}'s exchange"):
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
