"""Moments of micro-batches, by `microbatch_gradients` and by Keras, beside single samples'."""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

import hvd_gradcomp.tensorflow as tape
import hvd_gradcomp.tensorflow.keras as hvd
from tests.parallel.workers.passes import BATCH, PASSES, draws, loss_weights, share_of_truth
from tests.parallel.workers.results import finish

RECORDED: list = []


class Recording(hvd.VarianceCompressor):
    """Keeps the moments that it is handed, whenever the graph runs."""

    def aggregate(self, ops, context, gradient, state, **extra):
        tf.numpy_function(lambda q: RECORDED.append(q.copy()), [extra["moment"]], [])
        return super().aggregate(ops, context, gradient, state, **extra)


def by_tape(passes, known):
    w, results = tf.Variable(loss_weights()), []
    shapes = [tf.TensorSpec((BATCH if known else None, n), tf.float32) for n in (10, 6)]

    @tf.function(input_signature=shapes)
    def moments(x, y):
        def loss(x, y):
            return tf.reduce_mean(tf.reduce_sum(tf.square(x @ w - y), 1))

        return tape.microbatch_gradients(loss, [w], [x, y], passes)[2]

    for x, y in draws():
        results += [moments(x, y)[0].numpy()]
    assert all((q >= 0).all() for q in results)
    return share_of_truth(np.stack(results))


def by_keras(passes, known):
    keras.utils.set_random_seed(1)
    inputs, outputs = loss_weights().shape
    model = keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(outputs, use_bias=False)])
    model.set_weights([loss_weights()])
    model.compile(
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.0),
            compression=Recording(moments="microbatch"),
            backward_passes_per_step=passes,
            average_aggregated_gradients=True,
            batch_size=BATCH if known else None,
        ),
        lambda y, predicted: tf.reduce_sum(tf.square(predicted - y), -1),
    )
    x, y = (np.concatenate(part) for part in zip(*draws()))
    RECORDED.clear()
    model.fit(x, y, batch_size=BATCH // passes, shuffle=False, verbose=0)
    assert all((q >= 0).all() for q in RECORDED)
    size = inputs * outputs
    return share_of_truth(np.stack([q[:size].reshape(inputs, outputs) for q in RECORDED]))


def main(folder: str) -> None:
    hvd.init()
    result = {}
    for passes in PASSES:
        for known in (True, False):
            result[f"keras {passes} {known}"] = by_keras(passes, known)
            result[f"tape {passes} {known}"] = by_tape(passes, known)
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
