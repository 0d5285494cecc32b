"""Variables that an exchange keeps, and the record of those that belong to one rank."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

_rank_local: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()
_per_rank: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()
_apart: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()


def new_variable(
    name: str, value: Any, dtype: Any = None, device: str = "", shape: Any = None
) -> tf.Variable:
    """Create a variable that belongs to nobody's checkpoint.

    It is created outside of any trace: a `tf.function` that creates one is traced a second time.
    """

    def create() -> tf.Variable:
        with tf.device(device or None):
            return tf.Variable(value, trainable=False, name=name, dtype=dtype, shape=shape)

    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(create).result()


def is_rank_local(variable: Any) -> bool:
    """Return True if a variable holds what a compressor accumulated here; never broadcast it."""
    return _rank_local.get(id(variable)) is variable


def keep_local(variable: tf.Variable) -> tf.Variable:
    """Mark a variable as this rank's alone."""
    _rank_local[id(variable)] = variable
    return variable


def is_own(variable: Any) -> bool:
    """Return True if a parameter is trained on this rank alone; never save it for all."""
    return _per_rank.get(id(variable)) is variable


def keep_own(variable: tf.Variable) -> None:
    """Mark a parameter whose gradient is not exchanged."""
    _per_rank[id(variable)] = variable


def is_apart(variable: Any) -> bool:
    """Return True if a variable differs between ranks for a while, as with local steps."""
    return _apart.get(id(variable)) is variable


def keep_apart(variable: tf.Variable) -> None:
    """Mark a variable that differs between ranks for a while: sharded files keep each rank's."""
    _apart[id(variable)] = variable


def plain_variable(source: Any) -> Any:
    """Return TensorFlow's variable of a Keras variable; anything else as it is."""
    if isinstance(source, tf.Variable):
        return source
    value = getattr(source, "value", None)
    return value if isinstance(value, tf.Variable) else source


def where_set(wide: Any, value: tf.Tensor, dtype: Any) -> tf.Tensor:
    """Return `value`, but `wide` where it is what `value` becomes in a narrower precision.

    Args:
        wide: what was rounded and handed out.
        value: what the narrow variable has now, in the precision of `wide`.
        dtype: of the narrow variable.
    """
    return tf.where(tf.cast(tf.cast(wide, dtype), wide.dtype) == value, wide, value)
