"""Momentum that a compressor takes over, poisoned gradients and the dry run: Keras 3."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from io import StringIO

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_gradcomp.tensorflow as tape_hvd
import hvd_gradcomp.tensorflow.keras as hvd
from tests.parallel.workers.results import digest, errors_of, finish


def network():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((12,)), layers.Dense(20, "tanh"), layers.Dense(4)])


def data():
    random = np.random.default_rng(5)
    return random.standard_normal((200, 12), "f4"), random.standard_normal((200, 4), "f4")


def pair(**settings):
    """The largest difference of DGC at density 1 and SGD in one process, over 50 steps."""
    x, y = data()
    model, alone = network(), network()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05, **settings), compression=hvd.DGCCompressor(density=1.0)
    )
    assert float(optimizer.momentum) == 0.0
    assert optimizer.get_config()["momentum"] == settings["momentum"]
    gradients_here = np.concatenate(
        [np.arange(4 * i, 4 * i + 4)[hvd.rank() :: hvd.size()] for i in range(50)]
    )
    model.compile(optimizer, "mse")
    model.fit(
        x[gradients_here], y[gradients_here], 4 // hvd.size(), epochs=1, shuffle=False, verbose=0
    )
    alone.compile(keras.optimizers.SGD(0.05, **settings), "mse")
    alone.fit(x, y, 4, epochs=1, shuffle=False, verbose=0)
    weights = [v.numpy() for v in model.trainable_variables]
    expected = [v.numpy() for v in alone.trainable_variables]
    return [max(float(np.abs(a - b).max()) for a, b in zip(weights, expected)), digest(weights)]


def poisoned(graph):
    model = network()
    variables = [v.value for v in model.trainable_variables]
    compressor = hvd.SparseGDCompressor(density=0.1)

    def step(scale):
        with tf.GradientTape() as tape:
            loss = scale * tf.reduce_sum(model(tf.ones((2, 12))))
        tape = tape_hvd.DistributedGradientTape(tape, compression=compressor)
        return tape.gradient(loss, variables)

    run = tf.function(step) if graph else step
    run(tf.constant(1.0))
    run(tf.constant(float("nan") if hvd.rank() == 1 else 1.0))


def taped():
    model = network()
    variables = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones((2, 12))))
    tape = tape_hvd.DistributedGradientTape(tape, compression=hvd.DGCCompressor())
    tape.gradient(loss, variables)


def wrap(optimizer, compressor):
    return hvd.DistributedOptimizer(optimizer, compression=compressor)


def main(folder: str) -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    result = {"pairs": {"plain": pair(momentum=0.9), "nesterov": pair(momentum=0.8, nesterov=True)}}
    model = network()
    optimizer = wrap(keras.optimizers.SGD(0.1, momentum=0.9), hvd.DGCCompressor(density=0.1))
    optimizer.build(model.trainable_variables)
    with redirect_stdout(StringIO()) as printed:
        result["description"] = hvd.describe(optimizer)
    assert not printed.getvalue() and repr(result["description"]) == result["description"]
    adam, sgd = keras.optimizers.Adam(), keras.optimizers.SGD(0.1, momentum=0.9)
    result["errors"] = errors_of(
        {
            "adam": lambda: wrap(adam, hvd.DGCCompressor()),
            "another": lambda: wrap(sgd, hvd.EGCCompressor(momentum=0.5)),
            "taped": taped,
            "poisoned": lambda: poisoned(graph=False),
            "poisoned graph": lambda: poisoned(graph=True),
        }
    )
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(sys.argv[1])
