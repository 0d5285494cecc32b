"""Trains with every method through one of the TensorFlow frontends, and writes digests."""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_gradcomp.tensorflow.keras as hvd
from hvd_gradcomp.method.handover import correction_of
from hvd_gradcomp.tensorflow import DistributedGradientTape
from tests.methods import (
    BALANCED,
    INT32,
    ONE_OF_TODAY,
    OUTSIDE,
    PRODUCTS,
    ROBUST,
    ROUNDED,
    WORDS,
    methods_by,
)
from tests.parallel.workers.results import digest, finish

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(6, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def fit(model, compressor, x, y, **options):
    if compressor.uses_moments and "backward_passes_per_step" not in options:
        hvd.track_moments(model)
    plain = keras.optimizers.Adam(0.01)
    if correction_of(compressor) is not None:  # a momentum of its own, which Adam has too
        plain = keras.optimizers.SGD(0.001)
    optimizer = hvd.DistributedOptimizer(plain, compression=compressor, **options)
    model.compile(optimizer, lambda true, logits: 20 * LOSS(true, logits))
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    history = model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
    return hvd.compression_stats(optimizer), history.history["loss"]


def tapes(model, compressor, x, y, graph):
    variables = [v.value for v in model.trainable_variables]
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)

    def step(images, labels):
        with tf.GradientTape() as tape:
            value = 20 * LOSS(labels, model(images, training=True))
        tape = DistributedGradientTape(tape, compression=compressor)
        optimizer.apply(tape.gradient(value, variables), model.trainable_variables)

    run = tf.function(step, reduce_retracing=True) if graph else step
    for start in range(0, len(y), 8):
        end = min(start + 8, len(y))
        run(tf.constant(x[start:end]), tf.constant(y[start:end]))
    return hvd.compression_stats(variables), []


def main(folder: str, kind: str, steps: str, settings: str = "") -> None:
    """Goes through the methods of this kind; or through those outside of the package."""
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    random = np.random.default_rng(100 + hvd.rank())
    # On two ranks the last batch is smaller: another trace, the same state.
    samples = 8 * int(steps) - (3 if hvd.size() == 2 else 0)
    x = random.standard_normal((samples, 8, 8, 1)).astype(np.float32)
    y = random.integers(0, 10, samples)
    result = {}
    methods_here = methods_by(kind, hvd.size())
    outside = OUTSIDE + ONE_OF_TODAY + ROUNDED[::2] + INT32 + PRODUCTS + ROBUST + BALANCED[1::2]
    for compressor in outside if settings == "outside" else methods_here:
        model = network()
        if kind == "fit":
            stats, logs = fit(model, compressor, x, y)
        elif kind == "passes":
            stats, logs = fit(model, compressor, x, y, backward_passes_per_step=4, batch_size=32)
        else:
            stats, logs = tapes(model, compressor, x, y, kind == "graph")
        assert stats.steps == int(steps) // (4 if kind == "passes" else 1), stats
        assert stats.bytes_sent > 0
        if compressor in WORDS:
            assert 0 < stats.elements_sent < stats.elements, stats
        weights = [v.numpy() for v in model.trainable_variables]
        result[repr(compressor)] = [digest(weights), logs]
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
