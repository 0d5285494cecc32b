"""The passes of `ops.torch.passes` as operations of TensorFlow; see native_tensorflow.cc.

They write to nothing that they are given: a variable is assigned once the exchange has succeeded.
So what was sent is settled at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import PayloadError, Tensor
from hvd_gradcomp.ops.kernel_params import CapacityLevel, Collecting, Form, Rule, Written
from hvd_gradcomp.ops.scope import Scope


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
        rung: CapacityLevel,
        turn: Any,
        memory: Sequence[Tensor],
        gradient: Tensor,
        moment: Tensor | None,
        before: Tensor,
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
        per_layer = before + written.per_layer
        return Written(body, written.sent, written.wanted, per_layer, written.settled)

    def add(
        self,
        rule: Rule,
        layout: Layout,
        rung: CapacityLevel,
        bodies: Tensor,
        weights: Tensor,
        room: Tensor,
    ) -> Tensor:
        """`sum over ranks of weights[rank] * what the rank sent`; as `passes.WordPasses.add`.

        Raises:
            PayloadError: an index points outside of the bucket. In a graph that is TensorFlow's
                error with the same text.
        """
        with _eager_errors():
            return self.native.gradcomp_add_words(
                room, bodies, weights, _capacity(rung), **_numbers(rule, layout)
            )


class TensorFlowLargestPasses:
    """Those of the methods with a number of elements; see `ops.torch.passes.LargestPasses`.

    Args:
        native: the operations.
    """

    leads = True
    looks = shares = False

    def __init__(self, native: Any) -> None:
        self.native = native

    def write(
        self,
        how: Collecting,
        scope: Scope,
        form: Form | Tensor,
        turn: Any,
        quota: Tensor | None,
        most: Sequence[int],
        hint: Tensor,
        memory: Sequence[Tensor],
        gradient: Tensor,
        before: Tensor | int,
        looks: bool = False,
    ) -> Written:
        """One rank's step; as `passes.LargestPasses.write`, but that nothing is left to settle.

        With `looks` the memory stays as it is.
        """
        layout = scope.layout
        written = self.native.gradcomp_write_largest(
            list(memory),
            gradient,
            tf.constant(most, tf.int64) if quota is None else quota,
            tf.constant(scope.slack(most), tf.int64),
            hint,
            tf.cast(turn, tf.int64),
            _flat(form),
            **how._asdict(),
            looks=looks,
            whole=scope.whole,
            strides=layout.strides,
            **_bucket(layout),
        )
        body, sent, per_layer, hint = written.body, written.sent, written.per_layer, written.next
        if isinstance(form, Form):
            body = tf.ensure_shape(body, (form.size,))
        return Written(body, sent, sent, before + per_layer, written.settled, hint=hint)

    def choose(
        self,
        scope: Scope,
        form: Form,
        turn: Any,
        most: Sequence[int],
        r: Tensor,
        gradient: Tensor,
    ) -> Written:
        """What `write` would send of r and the gradient; as `passes.LargestPasses.choose`."""
        hint = tf.fill((scope.count,), float("inf"))
        given = Collecting(), scope, form, turn, None, most, hint
        return self.write(*given, (r,), gradient, 0, looks=True)

    def values(
        self, layout: Layout, form: Form, body: Tensor, r: Tensor, gradient: Tensor
    ) -> Tensor:
        """What r and the gradient are where a body says; as `passes.LargestPasses.values`."""
        with _eager_errors():
            values = self.native.gradcomp_read_chosen(
                r, gradient, body, _flat(form), **_bucket(layout)
            )
        return tf.ensure_shape(values, (form.capacity,))

    def replace(
        self,
        layout: Layout,
        form: Form,
        body: Tensor,
        total: Tensor,
        beta: float,
        r: Tensor,
        gradient: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What all ranks have sent comes in; as `passes.LargestPasses.replace`."""
        given, shares = (r, gradient, body, total, _flat(form)), {"beta": beta, "keeps": 1.0 - beta}
        with _eager_errors():
            replaced = self.native.gradcomp_replace_chosen(*given, **shares, **_bucket(layout))
        return replaced.mean, replaced.after, replaced.per_layer

    def add(
        self,
        layout: Layout,
        form: Form | Tensor,
        bodies: Tensor,
        weights: Tensor,
        room: Tensor,
    ) -> Tensor:
        """`sum over ranks of weights[rank] * what the rank sent`; raises as words' does."""
        with _eager_errors():
            return self.native.gradcomp_add_largest(
                room, bodies, weights, _flat(form), **_bucket(layout)
            )


@contextmanager
def _eager_errors() -> Iterator[None]:
    """What an operation says about payloads, as what it is."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        said = error.message.rpartition("hvd_gradcomp: ")[2]
        if said == error.message:
            raise
        raise PayloadError(said) from None


def _flat(form: Form | Tensor) -> Tensor:
    return tf.constant(form.numbers, tf.int64) if isinstance(form, Form) else form


def _bucket(layout: Layout) -> dict[str, Any]:
    return {"sizes": layout.sizes, "block_bits": layout.block_bits, "size": layout.size}


def _numbers(rule: Rule, layout: Layout) -> dict[str, Any]:
    return {"rule": [float(number) for number in rule.numbers], **_bucket(layout)}


def _capacity(rung: CapacityLevel) -> Tensor:
    """As the operations take it."""
    if isinstance(rung.dense, bool):
        return tf.constant(-1, tf.int64) if rung.dense else tf.cast(rung.capacity, tf.int64)
    return tf.where(rung.dense, tf.constant(-1, tf.int64), tf.cast(rung.capacity, tf.int64))
