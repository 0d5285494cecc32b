"""Callers of an optimizer, read from the stack because Keras has no other way to tell."""

from __future__ import annotations

import sys
from typing import Any

import keras
from keras.optimizers import LossScaleOptimizer


def scaler_around(optimizer: keras.optimizers.Optimizer) -> LossScaleOptimizer | None:
    """Return the loss scaler that is calling this optimizer, or None."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if (
            isinstance(owner, LossScaleOptimizer)
            and owner is not optimizer
            and owner.inner_optimizer is optimizer
        ):
            return owner
        frame = frame.f_back
    return None


def refuse_xla() -> None:
    """Raise if the function being traced belongs to a model that compiles with XLA."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.Model) and owner.jit_compile:
            raise ValueError(
                "Horovod's collectives are no XLA operations: call model.compile(..., "
                "jit_compile=False), or pass hvd.callbacks.BroadcastGlobalVariablesCallback to "
                "fit, which sees to it"
            )
        frame = frame.f_back
