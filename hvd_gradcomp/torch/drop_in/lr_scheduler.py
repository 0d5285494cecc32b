"""EGC's automatic learning-rate correction for PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import horovod.torch as horovod
import torch
from torch.optim.lr_scheduler import LRScheduler

from hvd_gradcomp.algorithms.combined.schedule import EGCCorrection


class EGCScheduler(LRScheduler):
    """Scheduler that lowers learning rates when the validation loss has stopped falling.

    Kuang et al. 2019, section IV.B. After `patience`
    consecutive epochs without a loss below the lowest so far,
    `lr = max(lr / (1 + t * epoch), min_lr)` in every parameter group. For details, and differences
    between the paper's text and its Algorithm 2, see `algorithms.combined.schedule.EGCCorrection`.

    ::

        scheduler = hvd.EGCScheduler(optimizer, patience=3, t=0.1, min_lr=1e-4)
        for epoch in range(epochs):
            train(...)
            scheduler.step(validate(...))

    Args:
        optimizer: distributed or not.
        patience: epochs, at least 1.
        t: rate of attenuation; positive.
        min_lr: lower limit, not negative; one for all parameter groups, or one for each.
        process_set: the ranks that take part.

    Raises:
        ValueError: a parameter is out of range, or `min_lr` does not fit the parameter groups.
        TypeError: `optimizer` is no optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        patience: int = 3,
        t: float = 0.1,
        min_lr: float | Sequence[float] = 0.0,
        process_set: Any = horovod.global_process_set,
    ) -> None:
        # As in torch's ReduceLROnPlateau, not the base class's: that takes a step without a loss.
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is not an Optimizer")
        self.optimizer, self.process_set = optimizer, process_set
        self._rule = EGCCorrection(patience, t, min_lr)
        self._rule.floors(len(optimizer.param_groups))
        self._last_lr = self._rates()

    @property
    def last_epoch(self) -> int:
        """Return the number of epochs so far."""
        return self._rule.epoch

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, val_loss: float | torch.Tensor) -> None:
        """End an epoch.

        All ranks call it, and the mean of their losses counts, so learning rates stay equal.

        Args:
            val_loss: of this rank, one number. A non-finite one counts as no improvement.

        Raises:
            ValueError: parameter groups were added for which `min_lr` has no limit.
        """
        loss = float(val_loss)
        if horovod.is_initialized() and self.process_set.size() > 1:
            mean = horovod.allreduce(
                torch.tensor(loss, dtype=torch.float64, device="cpu"),
                name="gradcomp.EGCScheduler.val_loss",
                op=horovod.Average,
                process_set=self.process_set,
            )
            loss = float(mean)
        rates = self._rates()
        for group, old, new in zip(
            self.optimizer.param_groups, rates, self._rule.step(loss, rates)
        ):
            if new == old:
                continue
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(new)
            else:
                group["lr"] = new
        self._last_lr = self._rates()

    def get_lr(self) -> list[float]:
        """Return the current learning rates; the next ones depend on a loss."""
        return self._rates()

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, progress and last rates; the optimizer's state has the rates."""
        return {**asdict(self._rule), "_last_lr": list(self._last_lr)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where `state_dict()` was taken, with the parameters of that time."""
        state = dict(state_dict)
        self._last_lr = state.pop("_last_lr")
        self._rule = EGCCorrection(**state)
