"""Fused kernels of `ops.torch.fused` as TensorFlow custom ops; see c/tensorflow.cc.

They write to none of their inputs: a variable is assigned once the exchange has succeeded. So sent
elements are committed at once.
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
        """Encode one rank's step, like PyTorch's kernel, but nothing is left to commit."""
        memory = [memory[0], memory[1]] if rule.ambiguity else [memory[0]]
        moments = [] if moment is None or not rule.ambiguity else [moment]
        known = isinstance(level.dense, bool) and isinstance(level.capacity, int)
        size = rule.body_bytes(layout, level) if known else None
        counts = [(tf.int64, ()), (tf.int64, ()), (tf.int64, (len(layout.sizes),))]
        outputs = [(tf.uint8, (size,)), *counts, *[(tf.float32, x.shape) for x in memory]]
        ints = turn, _capacity(level), rule.flags, 1
        body, sent, wanted, per_layer, *committed = self.native(
            "threshold_write",
            (layout.numbers, gradient, *memory, *moments),
            outputs,
            ints,
            rule.reals,
        )
        return Written(body, sent, wanted, before + per_layer, committed)

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
            given = layout.numbers, bodies, weights, room
            ints, outputs = (_capacity(level), rule.flags), [(tf.float32, room.shape)]
            return self.native("threshold_add", given, outputs, ints, rule.reals)[0]


class TopKKernels:
    """Fused kernels of the methods with a number of elements; see `ops.torch.fused`.

    Args:
        native: the custom ops.
    """

    leads = True
    looks = shares = False
    removes = True

    def __init__(self, native: Any) -> None:
        self.native = native

    def write(
        self,
        how: Collecting,
        scope: Scope,
        form: Form,
        turn: Any,
        quota: Tensor | None,
        most: Sequence[int],
        hint: Tensor,
        memory: Sequence[Tensor],
        gradient: Tensor,
        before: Tensor | int,
        looks: bool = False,
    ) -> Written:
        """Encode one rank's step, like PyTorch's kernel, but nothing is left to commit.

        With `looks` the memory is not changed.
        """
        layout = scope.layout
        given = (
            *(layout.numbers, form.numbers, layout.strides),
            *(most if quota is None else quota, scope.slack(most), hint, gradient, *memory),
        )
        counts = [(tf.int64, ()), (tf.int64, ()), (tf.int64, (len(layout.sizes),))]
        size = form.size if isinstance(form.capacity, int) else None
        outputs = [(tf.uint8, (size,)), *counts, (tf.float32, hint.shape)]
        outputs += [] if looks else [(tf.float32, x.shape) for x in memory]
        ints = turn, scope.whole, how.nesterov, how.masking, 1
        body, sent, _, per_layer, hint, *committed = self.native(
            "topk_write", given, outputs, ints, (how.momentum,)
        )
        return Written(body, sent, sent, before + per_layer, committed, hint=hint)

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
            given = layout.numbers, form.numbers, body, r, gradient
            return self.native("topk_values", given, [(tf.float32, (form.capacity,))])[0]

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
        given = layout.numbers, form.numbers, body, r, gradient, total
        sums = (tf.float32, r.shape)
        outputs = sums, sums, (tf.int64, (len(layout.sizes),))
        with _eager_errors():
            mean, after, per_layer = self.native(
                "topk_replace", given, outputs, (), (beta, 1.0 - beta)
            )
        return mean, after, per_layer

    def add(
        self,
        layout: Layout,
        form: Form,
        bodies: Tensor,
        weights: Tensor,
        room: Tensor,
    ) -> Tensor:
        """Sum `weights[rank] * values of the rank`; raises like `ThresholdKernels.add`."""
        with _eager_errors():
            given = layout.numbers, form.numbers, bodies, weights, room
            return self.native("topk_add", given, [(tf.float32, room.shape)])[0]


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


def _capacity(level: CapacityLevel) -> Any:
    """Return the capacity as C takes it; -1 for dense."""
    if isinstance(level.dense, bool):
        return -1 if level.dense else level.capacity
    return tf.where(level.dense, tf.constant(-1, tf.int64), tf.cast(level.capacity, tf.int64))
