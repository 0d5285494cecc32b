"""Loss scaling: gradients arrive in the units of a `GradScaler`, and go back in them.

Between, they are divided by the scale, so that what a compressor keeps from step to step means the
same at every scale. A scale that is a power of two, as PyTorch's are by default, rounds nothing.

A scaler does not know the optimizer before `scaler.step(optimizer)`, when the gradients are long
under way. So `GradScaler.scale` and `.update` are made to leave a note here: the scaler that has
scaled a loss last, and was not updated since, is the one whose gradients arrive. A step that fails
drops the note.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

GRAD_SCALER: Any = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)
_scaling: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # the last one last


class GradScalerAdapter:
    """The scale of one optimizer's gradients.

    Args:
        scaler: the one that scales its loss; None for the one that has scaled a loss, if there is
            one, False for none.
    """

    def __init__(self, scaler: Any = None) -> None:
        self._given = scaler
        self.scaler: Any = None  # of the last step
        self._factor: Any = None  # of the running step: what gradients are multiplied with
        self._inverse: Any = None

    def begin_step(self) -> bool:
        """Fixes the scale until `end_step`; whether there is one."""
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
        if scale.is_cuda:  # stays there: the host does not wait for it
            self._factor, self._inverse = scale.clone(), scale.double().reciprocal().float()
        else:
            self._factor = float(scale)
            self._inverse = 1.0 / self._factor
        return True

    @property
    def known(self) -> float:
        """The scale of the running step; 0 where there is none, or only a GPU knows it."""
        return self._factor if isinstance(self._factor, float) else 0.0

    def end_step(self) -> None:
        """Gradients that come next have another scale."""
        self._factor = self._inverse = None

    def forget(self) -> None:
        """The step has failed, and its scaler may live on, in the error's traceback say.

        It has nothing to do with gradients that come next, unless it scales a loss anew.
        """
        self.end_step()
        scaler = self._noted()
        if scaler:
            _scaling.pop(scaler, None)

    def unscale(self, gradient: torch.Tensor, out: torch.Tensor, power: int = 1) -> None:
        """Writes a gradient to its place, without the scale; a square of one with `power=2`.

        With `power=0` as it is.
        """
        if gradient is not out:
            out.copy_(gradient)
        if self._inverse is not None:
            for _ in range(power):
                out.mul_(self._inverse)

    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        """The reduced gradient as the scaler expects it. In place."""
        return gradient if self._factor is None else gradient.mul_(self._factor)

    def check_stepped(self, optimizer: Any) -> None:
        """What has to hold when the optimizer steps.

        Raises:
            RuntimeError: a scaler was found, but it is another optimizer's.
        """
        if self._given is None and self.scaler is not None and not self._stage(optimizer):
            raise RuntimeError(
                "a GradScaler had scaled a loss, so gradients were taken to be scaled, but it "
                "does not step this optimizer: call scaler.step(optimizer), or pass scaler=False "
                "to DistributedOptimizer"
            )

    def _noted(self) -> Any:
        """The scaler whose gradients arrive, as far as is known; None or False for none."""
        return next(reversed([*_scaling]), None) if self._given is None else self._given

    def _stage(self, optimizer: Any) -> str:
        """How far the scaler is with the optimizer; "" if it has not seen it since its update."""
        states = {} if self.scaler is None else self.scaler._per_optimizer_states
        return states[id(optimizer)]["stage"].name if id(optimizer) in states else ""


def _leave_notes(cls: Any) -> None:
    scale, update = cls.scale, cls.update

    @functools.wraps(scale)
    def noted_scale(self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            _scaling.pop(self, None)
            _scaling[self] = None
        return scale(self, outputs)

    @functools.wraps(update)
    def noted_update(self: Any, *arguments: Any, **named: Any) -> None:
        _scaling.pop(self, None)
        update(self, *arguments, **named)

    cls.scale, cls.update = noted_scale, noted_update


_leave_notes(GRAD_SCALER)
