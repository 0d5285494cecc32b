"""The probe beside a training on TensorFlow: eager, in a graph, and under Keras' `fit`."""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

import hvd_gradcomp.tensorflow as hvd
from hvd_gradcomp.tensorflow.keras.callbacks import ProbeCallback
from hvd_gradcomp.tensorflow.probing import Probe
from tests.parallel.workers.results import digest, errors_of, finish

STEPS = 20


def weights():
    random = np.random.default_rng(1)
    shapes = ((3, 3, 2, 4), (4 * 16, 5), (5,))
    return [tf.Variable(random.standard_normal(shape).astype(np.float32)) for shape in shapes]


def train(graph, compression, every=None, given_moments=False):
    variables = weights()
    probe = Probe(variables, every) if every else None
    rows = np.random.default_rng(10 + hvd.rank()).standard_normal((STEPS, 6, 6, 6, 2))

    def step(x):
        with tf.GradientTape() as tape:
            y = tf.nn.relu(tf.nn.conv2d(x, variables[0], 1, "VALID"))
            y = tf.reshape(y, (6, -1)) @ variables[1] + variables[2]
            value = tf.reduce_mean(tf.square(y))
        gradients = tape.gradient(value, variables)
        if probe is not None:
            probe.step(gradients, [tf.square(g) for g in gradients] if given_moments else None)
        reduced = hvd.reduce_gradients(gradients, variables, compression=compression)
        for v, g in zip(variables, reduced):
            v.assign_sub(0.01 * g)

    run = tf.function(step) if graph else step
    for x in rows:
        run(tf.constant(x, tf.float32))
    if probe is not None:
        assert probe.steps == STEPS
    return digest(v.numpy() for v in variables), probe


def fit(probed):
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.3, seed=5),
            layers.Dense(5),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05), compression=hvd.NoneCompressor()
    )
    model.compile(optimizer, loss, jit_compile=False)
    random = np.random.default_rng(10 + hvd.rank())
    x = random.standard_normal((40, 6, 6, 2)).astype(np.float32)
    y = random.integers(0, 5, 40)
    numbers = []

    def batch(number):
        numbers.append(number)
        return x[:8], y[:8]

    callback = ProbeCallback(model, batch, loss, every=2)
    model.fit(x, y, 8, 3, shuffle=False, verbose=0, callbacks=[callback] if probed else [])
    assert not probed or numbers == list(range(0, 15, 2))
    # The seed of the Dropout and the moving averages too.
    return digest(np.asarray(v.value) for v in model.variables), callback.probe


def embedding():
    """Sparse gradients and missing ones."""
    table, idle = tf.Variable(tf.ones((50, 4))), tf.Variable(tf.ones((3,)))
    probe = Probe([table, idle], 1, pair=(1, 0))
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(tf.square(tf.gather(table, [hvd.rank(), 7, 7])))
    gradients = tape.gradient(value, [table, idle])
    assert isinstance(gradients[0], tf.IndexedSlices) and gradients[1] is None
    probe.step(gradients)
    return [r._asdict() for r in probe.readings]


def main(folder: str) -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    pairs, readings = {}, {}
    for name, compression in {
        "none": hvd.NoneCompressor(),
        "strom": hvd.StromCompressor(tau=0.05),
    }.items():
        for graph in (False, True):
            plain, _ = train(graph, compression)
            probed, probe = train(graph, compression, 2)
            pairs[f"{name}, {graph}"] = [plain, probed]
            readings[f"{name}, {graph}"] = [r._asdict() for r in probe.readings]
    _, probe = train(True, hvd.NoneCompressor(), 2, given_moments=True)
    readings["moments"] = [r._asdict() for r in probe.readings]
    plain, _ = fit(False)
    probed, probe = fit(True)
    pairs["fit"] = [plain, probed]
    readings["fit"] = [r._asdict() for r in probe.readings]
    variables = weights()
    result = {
        "pairs": pairs,
        "readings": readings,
        "embedding": embedding(),
        "errors": errors_of(
            {
                "count": lambda: Probe(variables).step([None]),
                "pair": lambda: Probe(variables, pair=(0, 5)).step([None] * 3),
            }
        ),
    }
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
