"""Patch of Keras's `fit`: it raises a `DeadlockError`, traces a step once, and ends local steps."""

from __future__ import annotations

import functools
from typing import Any

import keras

from hvd_gradcomp.tensorflow.comm.stall_inspector import translated
from hvd_gradcomp.tensorflow.keras.local_steps import end_fit
from hvd_gradcomp.tensorflow.keras.optimizer import refusal
from hvd_gradcomp.tensorflow.reduce.registry import optimizer_of

_STOCK = keras.Model.fit


@functools.wraps(_STOCK)
def _fit(model: keras.Model, *arguments: Any, **options: Any) -> Any:
    _build(model)
    try:
        with translated():
            return _STOCK(model, *arguments, **options)
    finally:
        end_fit(model)


def _build(model: keras.Model) -> None:
    """Build an optimizer that exchanges, before the first step is traced.

    Keras builds it while it traces, and TensorFlow traces a function again that has created
    variables. A `train_step` of the user's may train other variables than the model's: it decides.
    """
    stock = type(model).train_step is keras.Model.train_step
    optimizer = getattr(model, "optimizer", None)
    if stock and model.built and optimizer is not None and not refusal(optimizer):
        optimizer_of(model)


def translate() -> None:
    """Patch the `fit` of all models."""
    setattr(keras.Model, "fit", _fit)  # noqa: B010 - a method, which mypy lets nobody assign to
