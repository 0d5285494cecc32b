"""Loss scalers around an optimizer.

Callers are read from the stack because Keras has no other way to tell.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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


class OuterScaler:
    """Loss scaler around a distributed optimizer, with the exchange before its own check.

    By itself it would skip a step whose gradients are not finite on some ranks only, while the
    others wait for them.

    Args:
        scaler: the loss scaler, whose update is replaced.
        exchange: returns what the exchange makes of gradients, given them, variables and the scale.
        all_variables: returns those that stand for None.
        verify: compares the ranks after the update.

    Attributes:
        is_applying: it applies what was exchanged.
    """

    def __init__(
        self,
        scaler: LossScaleOptimizer,
        exchange: Callable[[Sequence[Any], list[Any], Any], list[Any]],
        all_variables: Callable[[], Sequence[Any]],
        verify: Callable[[], None],
    ) -> None:
        self._exchange, self._all_variables, self._verify = exchange, all_variables, verify
        self.is_applying = False

        def apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            self._apply(scaler, grads, trainable_variables)

        # `apply` builds the scaler, and so the optimizer inside, before it calls this.
        scaler._tf_apply = apply

    def _apply(self, scaler: LossScaleOptimizer, grads: Sequence[Any], variables: Any) -> None:
        variables = list(self._all_variables() if variables is None else variables)
        reduced = self._exchange(grads, variables, scaler.dynamic_scale)
        self.is_applying = True
        try:
            type(scaler)._tf_apply(scaler, reduced, variables)
        finally:
            self.is_applying = False
        self._verify()
