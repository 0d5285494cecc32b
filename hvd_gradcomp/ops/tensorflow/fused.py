"""Fused kernels of `ops.torch.fused` as TensorFlow custom ops; see c/tensorflow.cc.

They write to none of their inputs: a variable is assigned once the exchange has succeeded. So sent
elements are settled at once.
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


class ThresholdKernels:
    """Fused kernels of the methods with a rule for each element.

    Args:
        native: the custom ops.
    """

    def __init__(self, native: Any) -> None:
        self.native = native

    def write(
        self,
        rule: Rule,
        layout: Layout,
        level: CapacityLevel,
        turn: Any,
        memory: Sequence[Tensor],
        gradient: Tensor,
        moment: Tensor | None,
        before: Tensor,
    ) -> Written:
        """Encode one rank's step, like PyTorch's kernel, but nothing is left to settle."""
        memory = [memory[0], memory[1]] if rule.ambiguity else [memory[0]]
        moments = [] if moment is None or not rule.ambiguity else [moment]
        turn, capacity = tf.cast(turn, tf.int64), _capacity(level)
        written = self.native.gradcomp_write_words(
            memory, gradient, moments, turn, capacity, **_numbers(rule, layout)
        )
        body = written.body
        if isinstance(level.dense, bool) and isinstance(level.capacity, int):
            body = tf.ensure_shape(body, (rule.body_bytes(layout, level),))
        per_layer = before + written.per_layer
        return Written(body, written.sent, written.wanted, per_layer, written.settled)

    def add(
        self,
        rule: Rule,
        layout: Layout,
        level: CapacityLevel,
        bodies: Tensor,
        weights: Tensor,
        room: Tensor,
    ) -> Tensor:
        """Sum `weights[rank] * values of the rank`, like PyTorch's kernel.

        Raises:
            PayloadError: an index points outside of the bucket. In a graph that is TensorFlow's
                error with the same text.
        """
        with _eager_errors():
            return self.native.gradcomp_add_words(
                room, bodies, weights, _capacity(level), **_numbers(rule, layout)
            )


class TopKKernels:
    """Fused kernels of the methods with a number of elements; see `ops.torch.fused`.

    Args:
        native: the custom ops.
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
        """Encode one rank's step, like PyTorch's kernel, but nothing is left to settle.

        With `looks` the memory is not changed.
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
        """Return the payload that `write` would send, like PyTorch's kernel."""
        hint = tf.fill((scope.count,), float("inf"))
        given = Collecting(), scope, form, turn, None, most, hint
        return self.write(*given, (r,), gradient, 0, looks=True)

    def values(
        self, layout: Layout, form: Form, body: Tensor, r: Tensor, gradient: Tensor
    ) -> Tensor:
        """Return r plus the gradient at a body's indices, like PyTorch's kernel."""
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
        """Replace values at a body's indices, like PyTorch's kernel."""
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
        """Sum `weights[rank] * values of the rank`; raises like `ThresholdKernels.add`."""
        with _eager_errors():
            return self.native.gradcomp_add_largest(
                room, bodies, weights, _flat(form), **_bucket(layout)
            )


@contextmanager
def _eager_errors() -> Iterator[None]:
    """Convert a custom op's error about payloads to a `PayloadError`."""
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


def _capacity(level: CapacityLevel) -> Tensor:
    """Return the capacity as the custom ops take it; -1 for dense."""
    if isinstance(level.dense, bool):
        return tf.constant(-1, tf.int64) if level.dense else tf.cast(level.capacity, tf.int64)
    return tf.where(level.dense, tf.constant(-1, tf.int64), tf.cast(level.capacity, tf.int64))
