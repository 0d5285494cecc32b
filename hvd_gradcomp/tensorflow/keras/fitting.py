"""Patch of Keras's `fit`, which blocks in TensorFlow's graph, to raise a `DeadlockError`."""

from __future__ import annotations

import functools
from typing import Any

import keras

from hvd_gradcomp.tensorflow.stall_inspector import translated

_STOCK = keras.Model.fit


@functools.wraps(_STOCK)
def _fit(model: keras.Model, *arguments: Any, **options: Any) -> Any:
    with translated():
        return _STOCK(model, *arguments, **options)


def translate() -> None:
    """Make the `fit` of all models raise a `DeadlockError` if a deadlock has ended it."""
    setattr(keras.Model, "fit", _fit)  # noqa: B010 - a method, which mypy lets nobody assign to
