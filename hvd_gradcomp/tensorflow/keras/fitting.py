"""Keras's `fit`, which raises a `DeadlockError` as such: it blocks in TensorFlow's graph."""

from __future__ import annotations

import functools
from typing import Any

import keras

from hvd_gradcomp.tensorflow.stall_inspector import translated

_STOCK = keras.Model.fit


@functools.wraps(_STOCK)
def _fit(model: keras.Model, *given: Any, **named: Any) -> Any:
    with translated():
        return _STOCK(model, *given, **named)


def translate() -> None:
    """Has the `fit` of all models raise what has ended it, where that is a deadlock."""
    setattr(keras.Model, "fit", _fit)  # noqa: B010 - a method, which mypy lets nobody assign to
