"""Trainings with TensorFlow: `by_PLACE(method, clock)` trains by the lines that README has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_gradcomp.tensorflow as hvd
import hvd_gradcomp.tensorflow.keras as hvd_keras
from benchmarks.places.clock import (
    BLOCKS,
    HEADS,
    LENGTH,
    RATE,
    STEPS,
    WIDTH,
    WINDOWS,
    WORDS,
    Clock,
)
from hvd_gradcomp.ops import native
from hvd_gradcomp.ops.tensorflow import TensorFlowOps

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
if native.enabled() and TensorFlowOps().native is None:
    raise SystemExit("the operations for TensorFlow are not built: hvd-gradcomp build")


def gpt() -> Any:
    keras.utils.set_random_seed(1)
    tokens = keras.Input((LENGTH,), dtype="int32")
    places = keras.ops.arange(LENGTH)
    x = layers.Embedding(WORDS, WIDTH)(tokens) + layers.Embedding(LENGTH, WIDTH)(places)
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y, use_causal_mask=True)
        y = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(WIDTH)(y)
    return keras.Model(tokens, layers.Dense(WORDS)(layers.LayerNormalization()(x)))


def loss_of_words() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def adamw() -> Any:
    return keras.optimizers.AdamW(RATE)


def alone(place: str) -> tuple[float, int]:
    """Return the milliseconds of a step without an exchange, and the number of parameters."""
    model, optimizer, clock = gpt(), adamw(), Clock()
    step, tokens = training_step(model, optimizer, tf.GradientTape), windows()
    for _ in range(STEPS):
        step(tokens)
        clock.step()
    return clock.ms, model.count_params()


def training_step(model: Any, optimizer: Any, make_tape: Callable[[], Any]) -> Any:
    """Return a step of a loop whose tape is plain, or exchanges."""
    loss, variables = loss_of_words(), model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def step(tokens: Any) -> None:
        with make_tape() as tape:
            value = loss(tokens, model(tokens, training=True))
        gradients = tape.gradient(value, variables)
        optimizer.apply_gradients(zip(gradients, variables))

    return step


def by_tape(method: str, clock: Clock) -> None:
    model, optimizer = gpt(), adamw()
    hvd.broadcast_variables(model.variables, 0)
    compressor = hvd.QSGDCompressor() if method == "qsgd" else None

    def tape() -> Any:
        plain = tf.GradientTape()
        if method == "local":
            return plain
        return hvd.DistributedGradientTape(plain, compression=compressor)

    step = training_step(model, optimizer, tape)
    local = hvd.LocalSteps(model.trainable_variables) if method == "local" else None
    tokens = windows()
    for _ in range(STEPS):
        step(tokens)
        if local is not None:
            local.step()
        clock.step()


def by_keras(method: str, clock: Clock) -> None:
    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            clock.step()

    model, optimizer = gpt(), adamw()
    callbacks: list[Any] = [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0), Watch()]
    if method == "local":
        callbacks = [hvd_keras.callbacks.LocalSteps(), Watch()]
    else:
        compressor = hvd.QSGDCompressor() if method == "qsgd" else None
        optimizer = hvd_keras.DistributedOptimizer(optimizer, compression=compressor)
    model.compile(optimizer, loss_of_words())
    x = np.concatenate([windows() for _ in range(STEPS)])
    model.fit(x, x, batch_size=WINDOWS, epochs=1, callbacks=callbacks, verbose=0)


def windows() -> Any:
    return np.random.randint(0, WORDS, (WINDOWS, LENGTH), np.int32)
