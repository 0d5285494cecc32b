"""The variables that an exchange keeps, and which of them belong to one rank."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

_rank_local: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()
_own: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()


def new_variable(name: str, value: tf.Tensor) -> tf.Variable:
    """A variable that belongs to nobody's checkpoint.

    Made where nothing is traced: a `tf.function` that has made a variable is traced a second time.
    """
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(tf.Variable, value, trainable=False, name=name).result()


def is_rank_local(variable: Any) -> bool:
    """Whether it holds what a compressor accumulated on this rank: never to be broadcast."""
    return _rank_local.get(id(variable)) is variable


def keep_local(variable: tf.Variable) -> tf.Variable:
    """Marks a variable as this rank's alone."""
    _rank_local[id(variable)] = variable
    return variable


def is_own(variable: Any) -> bool:
    """Whether it is a parameter that is trained on this rank alone: never to be saved for all."""
    return _own.get(id(variable)) is variable


def keep_own(variable: tf.Variable) -> None:
    """Marks a parameter whose gradient is not exchanged."""
    _own[id(variable)] = variable


def plain_variable(source: Any) -> Any:
    """TensorFlow's variable of a Keras variable; anything else as it is."""
    if isinstance(source, tf.Variable):
        return source
    value = getattr(source, "value", None)
    return value if isinstance(value, tf.Variable) else source
