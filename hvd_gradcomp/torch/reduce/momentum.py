"""Transfer of the momentum of `torch.optim.SGD` to compressors with momentum correction.

The optimizer's momentum is 0 while it is wrapped; `state_dict()` shows the original. Weight decay
stays with the optimizer, still with momentum: SGD adds `decay * p` to the gradient before the
momentum, so the velocity of the decay is kept here, dense. It needs no exchange, because parameters
are equal on all ranks.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

from hvd_gradcomp.algorithms.combined.wrappers import take_over
from hvd_gradcomp.algorithms.dense import as_compressor
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.method.handover import correction_of
from hvd_gradcomp.torch.interop import dcp
from hvd_gradcomp.torch.reduce.reducer import Reducer

LOGGER = logging.getLogger("hvd_gradcomp")
_VELOCITY = "decay_velocity"  # in the optimizer's state, so that it is saved and broadcast


def momentum_of(optimizer: torch.optim.Optimizer) -> tuple[float, bool] | None:
    """Return (momentum, nesterov) of SGD; None for any other optimizer.

    Raises:
        ValueError: groups differ, or the momentum is dampened.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return None
    settings = {(float(g["momentum"]), bool(g["nesterov"])) for g in optimizer.param_groups}
    if len(settings) > 1:
        raise ValueError(
            f"momentum cannot be taken over: the groups of SGD have {sorted(settings)} as "
            "(momentum, nesterov). Give all groups the same, or the compressor momentum=0"
        )
    if any(g["momentum"] and g["dampening"] for g in optimizer.param_groups):
        raise ValueError(
            "momentum cannot be taken over from SGD with dampening: set dampening=0, or give the "
            "compressor momentum=0"
        )
    return settings.pop()


class MomentumTransfer:
    """Momentum that was taken over from an optimizer, for its `state_dict` and its weight decay.

    Args:
        optimizer: the distributed one.
        momentum, nesterov: its original values.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, momentum: float, nesterov: bool) -> None:
        self.optimizer = weakref.proxy(optimizer)  # which keeps this
        self.momentum, self.nesterov = momentum, nesterov
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
        original = {"momentum": self.momentum, "nesterov": self.nesterov}
        groups = [{**group, **original} for group in state_dict["param_groups"]]
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


def resolve_compressor(
    compression: Any, optimizer: torch.optim.Optimizer | None, stock: Any = None
) -> tuple[Compressor, tuple[float, bool] | None]:
    """Return the compressor that a `compression=` argument stands for, with its momentum decided.

    Args:
        compression: see `as_compressor`.
        optimizer: whose gradients are exchanged; None if it is not known.
        stock: Horovod's `Compression`, if there is Horovod.

    Returns:
        The compressor, and the (momentum, nesterov) that it takes over from the optimizer; None if
        it takes none over.

    Raises:
        TypeError: `compression` is no compressor.
        ValueError: the compressor corrects momentum, and the optimizer has none to hand over, or
            a different one, or is not known.
    """
    compressor = as_compressor(compression, stock)
    wanted = correction_of(compressor)
    if optimizer is None:
        if wanted is not None and wanted[0] is None:
            raise ValueError(
                "the compressor corrects momentum: pass optimizer=, whose momentum it takes over; "
                "or give the compressor momentum=0.9 and the optimizer none; or momentum=0 to go "
                f"without. Got {compressor}"
            )
        return compressor, None
    if wanted is None or wanted[0] == 0:
        return compressor, None
    momentum = momentum_of(optimizer)
    compressor, gives_up = take_over(compressor, type(optimizer).__name__, momentum)
    return compressor, momentum if gives_up else None


def take_over_momentum(
    optimizer: torch.optim.Optimizer, transfer: MomentumTransfer, reducer: Reducer
) -> None:
    """Take over the momentum of SGD, which steps without it; its `state_dict` still shows it."""
    cls = type(optimizer)

    def copied(protocol: Any) -> Any:
        """Restore the momentum in a copy, for a model that exchanges gradients uncompressed."""
        del protocol
        state = transfer.restored(torch.optim.Optimizer.__getstate__(transfer.optimizer))
        return object.__new__, (cls,), state

    def before_step(*_: Any) -> None:
        transfer.check()
        # A checkpoint may step to make a first state.
        if not reducer.rolled_back and not dcp.from_checkpoint():
            transfer.decay()

    vars(optimizer)["__reduce_ex__"] = copied  # where `copy` and `pickle` look for it first
    optimizer.register_step_pre_hook(before_step)
    optimizer.register_state_dict_post_hook(lambda _, state: transfer.restored(state))
    optimizer.register_load_state_dict_post_hook(lambda _: transfer.take())
