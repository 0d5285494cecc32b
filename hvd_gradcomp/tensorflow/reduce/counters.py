"""Counters of an exchange, in variables: steps, traffic, and whether the last step can go back."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from hvd_gradcomp.runtime.stats import TRAFFIC
from hvd_gradcomp.tensorflow.interop.variables import keep_local, new_variable
from hvd_gradcomp.tensorflow.reduce.buckets import MakeVariable

_COMMITTED, _EXCHANGED, _SKIPPED = 0, 1, 2  # states of the last exchange
_NOTHING = (
    "discard_step() takes back the last exchange, once: call it after an exchange and before the "
    "next one"
)


class ExchangeCounters:
    """Counters of steps and traffic; a `TrafficCounter` of `runtime.program_runner`.

    Args:
        make_variable: creates them, for an owner that saves them.
        layers: the number of layers.

    Attributes:
        steps: exchanges so far, equal on all ranks.
        local: this rank's counters, by name.
        checksum: that of the previous step's replies that are equal on all ranks; 0 for none.
        checksums: those of such replies in the step that is traced.
    """

    def __init__(self, make_variable: MakeVariable, layers: int) -> None:
        with tf.init_scope():
            zero = tf.constant(0, tf.int64)
            self.checksum = new_variable("gradcomp_checksum", zero)
            self._last = new_variable("gradcomp_last", tf.constant(_COMMITTED, tf.int64))
            self.steps = make_variable("gradcomp_steps", zero)
            self.local = {
                name: keep_local(make_variable(f"gradcomp_{name}", value))
                for name, value in {
                    "exchanges": zero,
                    **dict.fromkeys(TRAFFIC, zero),
                    "unbucketed": tf.zeros((layers,), tf.int64),
                }.items()
            }
        self.checksums: list[tf.Tensor] = []

    def sent(self, tensor: tf.Tensor) -> None:
        """Count the bytes passed to a collective."""
        self.local["bytes_sent"].assign_add(_bytes_of(tensor))

    def received(self, tensor: tf.Tensor) -> None:
        """Count the bytes returned by a collective."""
        self.local["bytes_received"].assign_add(_bytes_of(tensor))

    def record_checksum(self, reply: tf.Tensor) -> None:
        """Record a reply that is bit-identical on all ranks."""
        self.checksums.append(_sum_of_bits(reply))

    def count_unbucketed(self, place: int, values: tf.Tensor) -> None:
        """Count the values of a layer that were sent outside of the buckets."""
        layers = self.local["unbucketed"]
        here = tf.one_hot(place, layers.shape[0], dtype=tf.int64)
        layers.assign_add(here * tf.size(values, tf.int64))

    def finish_step(self, finite: tf.Tensor) -> None:
        """Count a step, as skipped unless it was finite, and keep its checksum."""
        self.checksum.assign(tf.add_n(self.checksums) if self.checksums else 0)
        exchanged = tf.cast(finite, tf.int64)
        self.steps.assign_add(exchanged)
        self._last.assign(tf.where(finite, tf.constant(_EXCHANGED, tf.int64), _SKIPPED))
        self.local["exchanges"].assign_add(exchanged)
        self.local["skipped"].assign_add(1 - exchanged)

    def commit(self) -> None:
        """Commit the last step: it can no longer be rolled back."""
        self._last.assign(_COMMITTED)

    def rollback(self, restore: Callable[[], None]) -> None:
        """Count the last step as skipped instead; eager, or in a graph.

        Args:
            restore: restores the state from before, unless the step was skipped already.

        Raises:
            RuntimeError: there is none to roll back; in a graph TensorFlow's
                `InvalidArgumentError`, with the same message.
        """
        if tf.executing_eagerly() and int(self._last) == _COMMITTED:
            raise RuntimeError(_NOTHING)

        def roll_back() -> None:
            restore()
            one = tf.constant(1, tf.int64)
            self.steps.assign_sub(one)
            self.local["exchanges"].assign_sub(one)
            self.local["skipped"].assign_add(one)
            self.commit()

        check = tf.debugging.Assert(tf.not_equal(self._last, _COMMITTED), [_NOTHING])
        with tf.control_dependencies([] if check is None else [check]):
            tf.cond(tf.equal(self._last, _EXCHANGED), roll_back, lambda: None)

    def reset_local(self) -> None:
        """Reset what belongs to this rank alone."""
        for counter in (*self.local.values(), self.checksum):
            counter.assign(tf.zeros_like(counter))


def _sum_of_bits(x: tf.Tensor) -> tf.Tensor:
    """Return a checksum that any flipped bit changes; an int64 scalar."""
    kinds = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}
    return tf.reduce_sum(tf.cast(tf.bitcast(x, kinds[x.dtype.size]), tf.int64))


def _bytes_of(tensor: tf.Tensor) -> tf.Tensor:
    """Return the bytes of a tensor; a constant if its shape is known."""
    known = tensor.shape.num_elements()
    if known is not None:
        return tf.constant(known * tensor.dtype.size, tf.int64)
    return tf.size(tensor, tf.int64) * tensor.dtype.size
