"""Transfer of the momentum of `torch.optim.SGD` to compressors with momentum correction.

The optimizer's momentum is 0 while it is wrapped; `state_dict()` shows the original. Weight decay
stays with the optimizer, still with momentum: SGD adds `decay * p` to the gradient before the
momentum, so the velocity of the decay is kept here, dense. It needs no exchange, because parameters
are equal on all ranks.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from hvd_gradcomp.algorithms.wrappers import take_over
from hvd_gradcomp.core.compressor import Compressor

LOGGER = logging.getLogger("hvd_gradcomp")
_VELOCITY = "decay_velocity"  # in the optimizer's state, so that it is saved and broadcast


def momentum_of(optimizer: torch.optim.Optimizer) -> tuple[float, bool] | None:
    """Return (momentum, nesterov) of SGD; None for any other optimizer.

    Raises:
        ValueError: groups differ, or the momentum is dampened.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return None
    found = {(float(g["momentum"]), bool(g["nesterov"])) for g in optimizer.param_groups}
    if len(found) > 1:
        raise ValueError(
            f"momentum cannot be taken over: the groups of SGD have {sorted(found)} as (momentum, "
            "nesterov). Give all groups the same, or the compressor momentum=0"
        )
    if any(g["momentum"] and g["dampening"] for g in optimizer.param_groups):
        raise ValueError(
            "momentum cannot be taken over from SGD with dampening: set dampening=0, or give the "
            "compressor momentum=0"
        )
    return found.pop()


class MomentumTransfer:
    """Momentum that was taken over from an optimizer, for its `state_dict` and its weight decay.

    Args:
        optimizer: the distributed one.
        momentum, nesterov: its original values.
    """

    def __init__(self, optimizer: Any, momentum: float, nesterov: bool) -> None:
        self.optimizer, self.momentum, self.nesterov = optimizer, momentum, nesterov
        self.take()

    def take(self) -> None:
        """Set the optimizer's own momentum to 0; call it again after a load has set it.

        Raises:
            ValueError: it was set to another value than the one taken over.
        """
        for group in self.optimizer.param_groups:
            if group["momentum"] not in (0, self.momentum):
                raise ValueError(
                    f"the optimizer got momentum={group['momentum']}, the compressor has taken "
                    f"{self.momentum} over: it cannot change meanwhile"
                )
            group["momentum"], group["nesterov"] = 0, False

    def restored(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizer's state with its original momentum."""
        own = {"momentum": self.momentum, "nesterov": self.nesterov}
        groups = [{**group, **own} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    def check(self) -> None:
        """Raise a RuntimeError if the optimizer's own momentum has been set meanwhile."""
        for group in self.optimizer.param_groups:
            if group["momentum"]:
                raise RuntimeError(
                    f"momentum={group['momentum']} was set on an optimizer whose momentum the "
                    "compressor has taken over; it would be applied twice. Do not cycle momentum "
                    "(OneCycleLR: cycle_momentum=False)"
                )

    def decay(self) -> None:
        """Add the momentum of earlier weight decay to the reduced gradients."""
        with torch.no_grad():
            for group in self.optimizer.param_groups:
                if group["weight_decay"]:
                    sign = -1.0 if group.get("maximize") else 1.0
                    for p in group["params"]:
                        if p.grad is not None:
                            self._decay(p, group["weight_decay"], sign)

    def _decay(self, p: torch.nn.Parameter, decay: float, sign: float) -> None:
        """Add the momentum of earlier decay to the gradient; SGD adds this step's decay."""
        state = self.optimizer.state[p]
        if _VELOCITY not in state:
            state[_VELOCITY] = torch.zeros_like(p)
        velocity = state[_VELOCITY]
        if self.nesterov:
            velocity.mul_(self.momentum).add_(p, alpha=decay)
            p.grad.add_(velocity, alpha=sign * self.momentum)
        else:
            p.grad.add_(velocity, alpha=sign * self.momentum)
            velocity.mul_(self.momentum).add_(p, alpha=decay)


def hand_over(optimizer: torch.optim.Optimizer, compressor: Compressor) -> tuple[Compressor, bool]:
    """Return (the compressor with its momentum set, True if it takes over the optimizer's)."""
    if (compressor.correction or (0.0,))[0] == 0:
        return compressor, False
    return take_over(compressor, type(optimizer).__name__, momentum_of(optimizer))
