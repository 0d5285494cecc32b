"""Trains with the methods that learn, through all their phases; digests every 10 steps."""

from __future__ import annotations

import os
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_gradcomp.tensorflow.keras as hvd
from hvd_gradcomp.tensorflow import DistributedGradientTape
from tests.methods import learned_by
from tests.parallel.workers.results import digest, finish

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(6, 3, activation="relu"),
            layers.Conv2D(24, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(48, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


class Notes:
    """Digests of the parameters, and bytes of each step."""

    def __init__(self, model, steps) -> None:
        self.model, self.steps = model, steps
        self.digests, self.bytes, self.before = [], [], 0

    def take(self, step, source) -> None:
        sent = hvd.compression_stats(source).bytes_sent
        self.bytes.append(sent - self.before)
        self.before = sent
        if step % 10 == 9:
            self.digests.append(digest([v.numpy() for v in self.model.trainable_variables]))
        if step == self.steps - 30:
            hvd.retrain(source)


class Noting(keras.callbacks.Callback):
    def __init__(self, notes, optimizer) -> None:
        super().__init__()
        self.notes, self.distributed = notes, optimizer

    def on_train_batch_end(self, batch, logs=None) -> None:
        self.notes.take(batch, self.distributed)


def train(compressor, kind: str, steps: int) -> dict:
    model = network()
    notes = Notes(model, steps)
    random = np.random.default_rng(100 + hvd.rank())
    x = random.standard_normal((8 * steps, 8, 8, 1)).astype(np.float32)
    y = np.clip((x.mean((1, 2, 3)) * 40).astype(np.int64), -5, 4) + 5
    if kind == "fit":
        source = hvd.DistributedOptimizer(keras.optimizers.SGD(0.002), compression=compressor)
        model.compile(source, LOSS)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Noting(notes, source)]
        model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
    else:
        source = [v.value for v in model.trainable_variables]
        optimizer = keras.optimizers.SGD(0.002)
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(images, labels):
            with tf.GradientTape() as tape:
                value = LOSS(labels, model(images, training=True))
            tape = DistributedGradientTape(tape, compression=compressor)
            optimizer.apply(tape.gradient(value, source), model.trainable_variables)

        for number in range(steps):
            batch = slice(8 * number, 8 * number + 8)
            step(tf.constant(x[batch]), tf.constant(y[batch]))
            notes.take(number, source)
    return {
        "digests": notes.digests,
        "losses": hvd.compression_stats(source).losses,
        "bytes": notes.bytes,
        "finite": all(bool(np.isfinite(v.numpy()).all()) for v in model.trainable_variables),
    }


def main(folder: str, kind: str, steps: str, fusion: str) -> None:
    os.environ["HOROVOD_FUSION_THRESHOLD"] = fusion
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    methods = learned_by(kind, hvd.size())
    result = {repr(c): train(c, kind, int(steps)) for c in methods}
    if kind == "graph" and hvd.size() == 2:
        again = methods[0]
        twice = train(again, kind, int(steps))["digests"][-1]
        result["again"] = [twice, result[repr(again)]["digests"][-1]]
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
