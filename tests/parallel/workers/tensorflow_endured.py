"""What a run survives on TensorFlow: planted differences, refused settings."""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

import hvd_gradcomp.tensorflow.keras as hvd
from hvd_gradcomp import wire
from hvd_gradcomp.tensorflow import DistributedGradientTape
from tests.parallel.workers.results import errors_of, write

FAULTY = 1
SENT = hvd.StromCompressor(0.01)


class Plant(keras.callbacks.Callback):
    """Changes something on one rank after so many batches."""

    def __init__(self, batch, change):
        super().__init__()
        self.batch, self.change = batch, change

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.batch and hvd.rank() == FAULTY:
            self.change(self.model)


def fit(compressor=SENT, callbacks=(), **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor, **options),
        "mse",
    )
    random = np.random.default_rng(hvd.rank())
    x, y = random.standard_normal((32, 6)), random.standard_normal((32, 3))
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def clean():
    for compressor in (SENT, hvd.OneBitCompressor()):
        fit(compressor, [hvd.callbacks.VerifyCallback(4)], verify_every=3)
    fit(hvd.ScaleComCompressor(density=0.2), verify_every=2, backward_passes_per_step=2)


def planted(**options):
    nudge = Plant(3, lambda model: model.layers[0].bias.value.assign_add([0.0, 2.0**-10, 0.0]))
    fit(callbacks=[nudge, *options.pop("callbacks", ())], **options)


def other_rung():
    model = fit()
    engine = model.optimizer._gradcomp
    if hvd.rank() == FAULTY:
        rung = next(v for v in engine.variables[0] if "rung" in v.name)
        rung.assign_add(1)
    hvd.verify(model.optimizer)


def taped():
    variables = [tf.Variable(tf.ones((4, 2)))]
    for _ in range(3):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.square(variables[0]))
        tape = DistributedGradientTape(tape, compression=SENT)
        variables[0].assign_sub(0.1 * tape.gradient(value, variables)[0])
    hvd.verify(variables)
    if hvd.rank() == FAULTY:
        variables[0].assign_add(tf.one_hot([0, 0, 0, 1], 2) * 2.0**-10)
    hvd.verify(tape)


def other_version():
    if hvd.rank() == FAULTY:
        wire.VERSION += 1
    try:
        taped()
    finally:
        wire.VERSION = 1


def main(folder: str) -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    errors = errors_of(
        {
            "clean": clean,
            "fit": lambda: planted(verify_every=4),
            "callback": lambda: planted(callbacks=[hvd.callbacks.VerifyCallback(4)]),
            "tape": taped,
            "rung": other_rung,
            "version": other_version,
            "join": hvd.join,
        }
    )
    write(folder, hvd.rank(), errors)
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
