"""Decisions on the host, and checks that stop a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.ops import LOGGER, NonFiniteGradientError, PayloadError, Tensor
from hvd_gradcomp.ops.tensorflow.base import ASSERTION, Base, assertion
from hvd_gradcomp.ops.tensorflow.kernels import integer


class HostControl(Base):
    """Ops for decisions on the host, and for checks that stop a step."""

    def cond(self, dense: Any, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        if isinstance(dense, bool):
            return if_true() if dense else if_false()
        return tf.cond(dense, if_true, if_false)

    def map_bytes(self, function: Callable[[bytes], bytes], data: Tensor) -> Tensor:
        if tf.executing_eagerly():
            return tf.io.decode_raw(function(data.numpy().tobytes()), tf.uint8)
        # Not tf.py_function: it runs ops of its own, and waits for a thread to do so.
        result = tf.numpy_function(lambda array: function(array.tobytes()), [data], tf.string)
        return tf.reshape(tf.io.decode_raw(result, tf.uint8), (-1,))

    def warn(self, condition: Any, message: str) -> None:
        def log() -> bool:
            LOGGER.warning("%s", message)
            return True

        if isinstance(condition, bool) or tf.executing_eagerly():
            if bool(condition):
                log()
        else:
            tf.cond(condition, lambda: tf.numpy_function(log, [], tf.bool), lambda: False)

    def stage(self, x: Tensor) -> Tensor:
        return x

    def staged(self, x: Tensor) -> Any:
        return int(x) if tf.executing_eagerly() else x

    def pick(self, condition: Any, x: Any, y: Any) -> Any:
        if isinstance(condition, bool):
            return x if condition else y
        return tf.where(condition, integer(x), integer(y))

    def bisect(self, ascending: Sequence[int], x: Any) -> Any:
        if isinstance(x, int):
            return sum(value < x for value in ascending)
        return tf.reduce_sum(tf.cast(tf.constant(ascending, tf.int64) < x, tf.int64))

    def choice(self, values: Sequence[int], index: Any) -> Any:
        return (
            values[index]
            if isinstance(index, int)
            else tf.gather(tf.constant(values, tf.int64), index)
        )

    def require(
        self, facts: Mapping[str, Tensor], error: type[Exception] = PayloadError
    ) -> Tensor | None:
        if error is NonFiniteGradientError and self.verdicts is not None:
            finite = tf.reduce_all(tf.stack(list(facts.values())), 0)
            self.verdicts.append(tf.reduce_all(finite))
            return finite
        if tf.executing_eagerly():
            for message, holds in facts.items():
                if not bool(tf.reduce_all(holds)):
                    ranks = tf.where(~holds)[:, 0].numpy().tolist()
                    raise error(message.replace("{ranks}", ", ".join(map(str, ranks))))
            return None
        # In a graph the sum depends on the assertion, so nothing is assigned before it holds. One
        # assertion for all facts; `tf.debugging.Assert` would trace two functions for each.
        texts = [
            f"{ASSERTION}: {message.replace('rank {ranks}', 'a rank')}; fine by rank:"
            for message in facts
        ]
        if len(facts) == 1:
            (holds,) = facts.values()
            with tf.control_dependencies([assertion(tf.reduce_all(holds), texts[0], holds)]):
                return tf.identity(holds)
        holds = tf.stack(list(facts.values()))  # [facts, world]
        fine = tf.reduce_all(holds, 1)
        first = tf.argmin(tf.cast(fine, tf.int32))
        what, by_rank = tf.gather(texts, first), tf.gather(holds, first)
        with tf.control_dependencies([assertion(tf.reduce_all(fine), what, by_rank)]):
            return tf.reduce_all(holds, 0)

    def found_finite(self) -> Any:
        return tf.reduce_all(tf.stack(self.verdicts)) if self.verdicts else True
