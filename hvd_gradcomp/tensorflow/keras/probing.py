"""Probe under `model.fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvd_gradcomp.tensorflow.interop.variables import plain_variable
from hvd_gradcomp.tensorflow.probing import Probe


class ProbeCallback(keras.callbacks.Callback):
    """Callback that probes a Keras 3 model under `fit`, after every so many batches.

    `fit` does not show its gradients, so this computes some: of one batch, with the weights after
    the step. Each rank should give a batch of its own data. Side effects of the pass in training
    mode (moving averages of a batch normalisation, counters of dropout) are undone, so training
    goes on as if nothing had happened; TensorFlow's global random generator is not restored.

    Args:
        model: the model in training.
        batch: inputs and targets, or a function of the probed batch's number that returns them.
        loss: `loss(targets, outputs)`; its mean is differentiated.
        every: one batch in so many is probed, the first one too.
        **options: those of `Probe`.

    Attributes:
        probe: with the readings; None before the first batch has ended.
    """

    def __init__(
        self,
        model: keras.Model,
        batch: Any,
        loss: Callable[[Any, Any], Any],
        every: int = 50,
        **options: Any,
    ) -> None:
        super().__init__()
        self.probe: Probe | None = None
        self._probed, self._batch, self._loss = model, batch, loss
        self._every, self._options = every, options
        self._count = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        if self.probe is None:
            variables = self._probed.trainable_variables
            self.probe = Probe(variables, self._every, **self._options)
        count, self._count = self._count, self._count + 1
        due = self.probe.due(count)
        self.probe.step(self._gradients(count) if due else [None] * len(self.probe.samples))

    def _gradients(self, count: int) -> list[Any]:
        inputs, targets = self._batch(count) if callable(self._batch) else self._batch
        weights = [plain_variable(v) for v in self._probed.trainable_variables]
        rest = self._probed.non_trainable_variables
        before = [keras.ops.copy(v.value) for v in rest]
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(self._loss(targets, self._probed(inputs, training=True)))
        for variable, value_before in zip(rest, before):
            variable.assign(value_before)
        return list(tape.gradient(value, weights))
