"""Keras per-sample second moments against a loop over single samples."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.single.older import skip_without_keras_3

skip_without_keras_3()
from hvd_gradcomp.tensorflow.keras import moments  # noqa: E402


def model_of(shape, *stack, dtype="float32"):
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input(shape, dtype=dtype), *stack])


CASES = {
    "dense": lambda: model_of((6,), layers.Dense(5, activation="relu"), layers.Dense(3)),
    "dense over time": lambda: model_of((4, 6), layers.Dense(5, activation="tanh")),
    "conv1d": lambda: model_of((9, 3), layers.Conv1D(4, 3, strides=2, activation="tanh")),
    "conv1d causal": lambda: model_of((9, 3), layers.Conv1D(4, 3, padding="causal")),
    "conv2d": lambda: model_of(
        (6, 7, 2), layers.Conv2D(3, 3, padding="same", activation="relu"), layers.Flatten()
    ),
    "conv2d dilated": lambda: model_of((8, 8, 2), layers.Conv2D(3, 2, dilation_rate=2)),
    "conv3d": lambda: model_of((4, 5, 4, 2), layers.Conv3D(3, 2, padding="same")),
    "embedding": lambda: model_of((6,), layers.Embedding(12, 4), dtype="int32"),
    "layer norm": lambda: model_of((4, 6), layers.LayerNormalization(), layers.Dense(2)),
}


def loss_of(model, x):
    y = model(x, training=True)
    y = tf.reshape(y, (tf.shape(y)[0], -1))
    weights = tf.linspace(0.5, 2.0, y.shape[1])
    return tf.reduce_mean(tf.reduce_sum(tf.sin(y) * tf.cast(weights, y.dtype), 1))


def draw(model):
    random = np.random.default_rng(3)
    shape = (5, *model.inputs[0].shape[1:])
    if "int" in model.inputs[0].dtype:
        return tf.constant(random.integers(0, 12, shape), tf.int32)
    return tf.constant(random.standard_normal(shape), tf.float32)


def tracked(model, x):
    with tf.GradientTape() as tape, moments._noting() as uses:
        value = loss_of(model, x)
    weights = model.trainable_weights
    sources = [w.value for w in weights], [use.output for use in uses]
    gradients, deltas = tape.gradient(value, sources)
    return gradients, moments.moments_of(weights, uses, deltas)


@pytest.mark.parametrize("case", CASES)
def test_equals_a_loop_over_samples(case):
    model = CASES[case]()
    x = draw(model)
    variables = [w.value for w in model.trainable_weights]
    for v in variables:
        v.assign(np.random.default_rng(5).standard_normal(v.shape))
    expected = [0.0] * len(variables)
    for z in range(len(x)):
        with tf.GradientTape() as tape:
            value = loss_of(model, x[z : z + 1])
        for i, g in enumerate(tape.gradient(value, variables)):
            expected[i] = expected[i] + (tf.convert_to_tensor(g).numpy().astype("f8") / 5) ** 2
    moments.track_moments(model)
    _, squares = tracked(model, x)
    for q, e in zip(squares, expected):
        assert (np.abs(q.numpy() - e) <= 1e-4 * e + 1e-6 * e.max()).all()
        assert np.linalg.norm(q.numpy() - e) <= 1e-5 * np.linalg.norm(e)


@pytest.mark.parametrize("case", ["dense over time", "conv1d causal", "conv2d", "conv3d"])
def test_a_few_samples_at_a_time_give_the_same(case, monkeypatch):
    model = CASES[case]()
    moments.track_moments(model)
    x = draw(model)
    _, whole = tracked(model, x)
    monkeypatch.setattr(moments, "_CHUNK", 2 * 1000)  # not a divisor of the batch
    _, pieces = tracked(model, x)
    for q, e in zip(pieces, whole):
        np.testing.assert_allclose(q, e, rtol=1e-5, atol=1e-6 * np.max(e))


def test_batch_normalization_as_the_layer_sees_it():
    model = model_of((4, 3, 6), layers.BatchNormalization())
    layer = model.layers[0]
    random = np.random.default_rng(5)
    layer.gamma.assign(random.standard_normal(6))
    layer.beta.assign(random.standard_normal(6))
    x = draw(model)
    moments.track_moments(model)
    _, (gamma, beta) = tracked(model, x)
    data = x.numpy().astype("f8")
    mean, variance = data.mean((0, 1, 2)), data.var((0, 1, 2))
    normalised = tf.constant((data - mean) / np.sqrt(variance + layer.epsilon))
    scale, shift = (tf.Variable(v.numpy().astype("f8")) for v in (layer.gamma, layer.beta))
    squares = [0.0, 0.0]
    for z in range(5):
        with tf.GradientTape() as tape:
            value = loss_of(lambda n, training: n * scale + shift, normalised[z : z + 1]) / 5
        for i, g in enumerate(tape.gradient(value, [scale, shift])):
            squares[i] = squares[i] + g.numpy() ** 2
    np.testing.assert_allclose(gamma, squares[0], rtol=2e-5)
    np.testing.assert_allclose(beta, squares[1], rtol=2e-5)


def test_unsupported_layers_are_all_named():
    model = model_of((5, 4), layers.LSTM(3, name="lstm"), layers.Dense(2))
    with pytest.raises(TypeError, match=r"lstm.* \(LSTM.*moments='microbatch'"):
        moments.track_moments(model)


def test_others_count_the_step_as_one_sample(monkeypatch):
    """A layer without a rule, and one that is used twice; the others as ever."""
    inputs = keras.Input((5, 4))
    shared = layers.Dense(4, name="shared")
    x = layers.LSTM(4, name="lstm")(shared(shared(inputs)))
    model = keras.Model(inputs, layers.Dense(2, name="last")(x))
    assert moments.track_moments(model, others="step") is model
    model.compile(keras.optimizers.SGD(0.0), "mse")
    received = {}

    class Kept:
        def __setattr__(self, name, value):
            received[name] = value

    monkeypatch.setattr(moments, "distributed_in", lambda optimizer: Kept())
    apply = model.optimizer.apply_gradients
    model.optimizer.apply_gradients = lambda pairs: (
        received.update(pairs=list(pairs)),
        apply(received["pairs"]),
    )
    data = draw(model), tf.ones((5, 2))
    model.run_eagerly = True
    model.train_step(data)
    for q, (g, weight) in zip(received["_moments"], received["pairs"]):
        as_step = np.allclose(q, tf.square(g), rtol=1e-5)
        assert as_step == (not weight.path.startswith("last")), weight.path
    with pytest.raises(ValueError, match="others must be one of 'error', 'step', got 'dense'"):
        moments.track_moments(model, others="dense")


def test_unbuilt_models_and_shared_layers():
    with pytest.raises(ValueError, match="build the model first"):
        moments.track_moments(keras.Sequential([layers.Dense(2)]))
    shared = layers.Dense(4)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, shared(shared(inputs)))
    moments.track_moments(model)
    with pytest.raises(ValueError, match="used more than once"):
        tracked(model, tf.ones((2, 4)))


def test_own_train_steps_are_refused():
    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    model = Own([keras.Input((3,)), layers.Dense(2)])
    with pytest.raises(TypeError, match="has its own train_step"):
        moments.track_moments(model)
