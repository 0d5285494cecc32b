"""AutoGraph translates users' functions, and none of this package's or Horovod's: it takes long."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

from tests.single.older import skip_without_keras_3

skip_without_keras_3()
import hvd_gradcomp.tensorflow as hvd  # noqa: E402
import hvd_gradcomp.tensorflow.keras as hvd_keras  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_rank")
QSGD = hvd.QSGDCompressor()


@pytest.fixture
def translated(monkeypatch):
    """Names of the functions that AutoGraph translates."""
    names, translate = [], api._convert_actual

    def recorded(entity, context):
        names.append(f"{entity.__module__}.{entity.__qualname__}")
        return translate(entity, context)

    monkeypatch.setattr(api, "_convert_actual", recorded)
    return names


def limited(gradient):
    """Give a gradient, or zeros; Python's `if` on a tensor, which AutoGraph has to translate."""
    if tf.reduce_sum(gradient) > 1.0:
        return tf.zeros_like(gradient)
    return gradient


def recorded(variables):
    """Record a loss whose gradient is the user's, defined in what AutoGraph has translated."""

    @tf.custom_gradient
    def doubled(x):
        return 2.0 * x, lambda gradient: limited(2.0 * gradient)

    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(doubled(v)) for v in variables])
    return hvd.DistributedGradientTape(tape, compression=QSGD), loss


def by_tape(variables):
    tape, loss = recorded(variables)
    return tape.gradient(loss, variables)


def by_pairs(variables):
    tape, loss = recorded(variables)
    _, pairs = tape.get_local_and_global_gradients(loss, variables)
    return [gradient for _, gradient in pairs]


@pytest.mark.parametrize("exchange", [by_tape, by_pairs])
def test_a_tape_has_users_functions_translated_alone(translated, exchange):
    """Custom gradients among them, which the tape calls."""
    variables = [tf.Variable([1.0, 2.0]), tf.Variable([0.5])]
    gradients = tf.function(lambda: exchange(variables))()
    assert [g.numpy().tolist() for g in gradients] == [[0.0, 0.0], [0.0]]
    theirs = [name for name in translated if not name.startswith(__name__)]
    assert not theirs, theirs
    assert f"{__name__}.limited" in translated


def test_an_optimizer_and_local_steps_translate_nothing(translated):
    variables = [keras.Variable([1.0, 2.0]), keras.Variable([0.5])]
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=QSGD)
    local = hvd.LocalSteps([tf.Variable([1.0])], 2, compression=None, warmup_steps=1)

    @tf.function
    def step():
        optimizer.apply([tf.ones([2]), tf.ones([1])], variables)
        local.reduce_gradients([tf.ones([1])])

    step()
    theirs = [name for name in translated if not name.startswith(__name__)]
    assert not theirs, theirs
