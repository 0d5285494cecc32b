"""Loss scaling: gradients arrive in the units of a `GradScaler` and are returned in them.

In between they are divided by the scale, so that a compressor's state means the same at every
scale. A scale that is a power of two, PyTorch's default, rounds nothing.

A scaler learns of the optimizer only in `scaler.step(optimizer)`, after the exchange has begun. So
`GradScaler.scale` and `.update` are patched to record the active scaler here: the one that scaled
a loss last and was not updated since. A step that fails drops the record.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from hvd_gradcomp.torch.interop.shards import local_part

GRAD_SCALER: Any = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)
_scaling: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # most recent last


class GradScalerAdapter:
    """The scale of one optimizer's gradients.

    Args:
        scaler: the one that scales its loss; None for the one that last scaled a loss, if there
            is one; False for none.
    """

    def __init__(self, scaler: Any = None) -> None:
        self._explicit = scaler
        self.scaler: Any = None  # of the last step
        self._factor: Any = None  # the running step's loss scale
        self._inverse: Any = None

    def begin_step(self) -> bool:
        """Fix the scale until `end_step`; return True if there is one."""
        if self._factor is not None:
            return True
        scaler = self._noted()
        self.scaler = scaler if scaler and scaler.is_enabled() else None
        if self.scaler is None:
            return False
        scale = self.scaler._get_scale_async()
        if scale is None:
            raise RuntimeError(
                "the scaler that was given to DistributedOptimizer has scaled nothing: call "
                "scaler.scale(loss).backward()"
            )
        if scale.is_cuda:  # keep it on the device: no host sync
            self._factor, self._inverse = scale.clone(), scale.double().reciprocal().float()
        else:
            self._factor = float(scale)
            self._inverse = 1.0 / self._factor
        return True

    @property
    def is_active(self) -> bool:
        """Return True if the running step's gradients are scaled."""
        return self._factor is not None

    @property
    def known(self) -> float:
        """Return the running step's scale; 0 if there is none, or if it is on a GPU."""
        return self._factor if isinstance(self._factor, float) else 0.0

    def end_step(self) -> None:
        """Forget the scale of this step."""
        self._factor = self._inverse = None

    def reset(self) -> None:
        """Drop the scale and the recorded scaler after a failed step.

        The scaler may stay alive, for instance in the error's traceback. It is ignored until it
        scales a loss again.
        """
        self.end_step()
        scaler = self._noted()
        if scaler:
            _scaling.pop(scaler, None)

    def unscale(self, gradient: torch.Tensor, out: torch.Tensor, power: int = 1) -> None:
        """Copy `gradient` to `out`, divided by the scale to the power of `power`.

        Use `power=2` for squared gradients, and `power=0` to leave the scale in.
        """
        if gradient is not out:
            out.copy_(gradient)
        if self._inverse is not None:
            for _ in range(power):
                out.mul_(self._inverse)

    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        """Multiply a reduced gradient by the scale, in place, as the scaler expects it."""
        return gradient if self._factor is None else gradient.mul_(self._factor)

    def check_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that the scaler that was found steps this optimizer.

        Raises:
            RuntimeError: a scaler was found, but it is another optimizer's.
        """
        if self._explicit is None and self.scaler is not None and not self._stage(optimizer):
            raise RuntimeError(
                "a GradScaler had scaled a loss, so gradients were taken to be scaled, but it "
                "does not step this optimizer: call scaler.step(optimizer), or pass scaler=False "
                "to DistributedOptimizer"
            )

    def _noted(self) -> Any:
        """Return the scaler whose gradients arrive, if known; None or False for none."""
        return next(reversed([*_scaling]), None) if self._explicit is None else self._explicit

    def _stage(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the scaler's stage for the optimizer; "" if not seen since the last update."""
        states = {} if self.scaler is None else self.scaler._per_optimizer_states
        return states[id(optimizer)]["stage"].name if id(optimizer) in states else ""


def _leave_notes(cls: Any) -> None:
    scale, update = cls.scale, cls.update

    @functools.wraps(scale)
    def noted_scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        if self.is_enabled():
            _scaling.pop(self, None)
            _scaling[self] = None
        return scale(self, outputs)

    @functools.wraps(update)
    def noted_update(self: torch.amp.GradScaler, *arguments: Any, **named: Any) -> None:
        _scaling.pop(self, None)
        update(self, *arguments, **named)

    cls.scale, cls.update = noted_scale, noted_update


_leave_notes(GRAD_SCALER)


def unscale(groups: Sequence[dict[str, Any]], scale: torch.Tensor) -> None:
    """Divide the gradients of parameter groups by the scale of the loss, in place."""
    factor = scale.double().reciprocal().float()
    for group in groups:
        for p in group["params"]:
            if p.grad is not None:
                local_part(p.grad).mul_(factor.to(p.grad.device))
