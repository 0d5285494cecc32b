"""The passes of `passes` as operations of TensorFlow; see native_tensorflow.cc.

They write to nothing that they are given: a variable is assigned once the exchange has succeeded.
So what was sent is settled at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd_gradcomp.ops import PayloadError, Tensor
from hvd_gradcomp.ops.rules import Rule, Written

if TYPE_CHECKING:
    from hvd_gradcomp.ladder import Rung
    from hvd_gradcomp.layout import Layout


class TensorFlowWordPasses:
    """Those of the methods with a rule for each element.

    Args:
        native: the operations.
    """

    def __init__(self, native: Any) -> None:
        self.native = native

    def write(
        self,
        rule: Rule,
        layout: Layout,
        rung: Rung,
        turn: Any,
        memory: Sequence[Tensor],
        gradient: Tensor,
        moment: Tensor | None,
    ) -> Written:
        """One rank's step; as `passes.WordPasses.write`, but that nothing is left to settle."""
        memory = [memory[0], memory[1]] if rule.ambiguity else [memory[0]]
        moments = [] if moment is None or not rule.ambiguity else [moment]
        turn, capacity = tf.cast(turn, tf.int64), _capacity(rung)
        written = self.native.gradcomp_write_words(
            memory, gradient, moments, turn, capacity, **_numbers(rule, layout)
        )
        body = written.body
        if isinstance(rung.dense, bool) and isinstance(rung.capacity, int):
            body = tf.ensure_shape(body, (rule.body_bytes(layout, rung),))
        return Written(body, written.sent, written.wanted, written.per_layer, written.settled)

    def add(
        self,
        rule: Rule,
        layout: Layout,
        rung: Rung,
        bodies: Tensor,
        weights: Tensor,
        room: Tensor,
    ) -> Tensor:
        """`sum over ranks of weights[rank] * what the rank sent`; as `passes.WordPasses.add`.

        Raises:
            PayloadError: an index points outside of the bucket. In a graph that is TensorFlow's
                error with the same text.
        """
        try:
            return self.native.gradcomp_add_words(
                room, bodies, weights, _capacity(rung), **_numbers(rule, layout)
            )
        except tf.errors.InvalidArgumentError as error:
            raise PayloadError(error.message.rpartition("hvd_gradcomp: ")[2]) from None


def _numbers(rule: Rule, layout: Layout) -> dict[str, Any]:
    blocks = [-(-size // layout.block) for size in layout.sizes]
    blocks[-1] = layout.size // layout.block - sum(blocks[:-1])  # and the sink's
    numbers = [float(number) for number in rule.numbers]
    return {"rule": numbers, "blocks": blocks, "block_bits": layout.block_bits}


def _capacity(rung: Rung) -> Tensor:
    """As the operations take it."""
    if isinstance(rung.dense, bool):
        return tf.constant(-1, tf.int64) if rung.dense else tf.cast(rung.capacity, tf.int64)
    return tf.where(rung.dense, tf.constant(-1, tf.int64), tf.cast(rung.capacity, tf.int64))
