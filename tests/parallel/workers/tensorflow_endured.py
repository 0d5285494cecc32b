"""What a run survives on TensorFlow: planted differences, refused settings."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import hvd_gradcomp.tensorflow.keras as hvd
from hvd_gradcomp.method import wire
from hvd_gradcomp.tensorflow import DistributedGradientTape, checkpoint_barrier
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


def other_level():
    model = fit()
    reducer = model.optimizer._gradcomp
    if hvd.rank() == FAULTY:
        level = next(v for v in reducer.buckets[0].variables if "level" in v.name)
        level.assign_add(1)
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


class Tape:
    """Descent in a graph, which has been traced."""

    def __init__(self):
        self.weight = weight = tf.Variable(tf.ones((40, 20)))

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(tf.square(weight))
            tape = DistributedGradientTape(tape, compression=SENT)
            weight.assign_sub(0.01 * tape.gradient(value, [weight])[0])

        self.step = step
        step()


def saved_late(folder):
    """A rank that comes late is none that trains, and what others have told it is settled."""
    tape = Tape()
    if hvd.rank() == FAULTY:
        time.sleep(2 * checkpoint_barrier.PATIENCE)
    for _ in range(2):
        hvd.save_checkpoint(folder, weights=[tape.weight])
        tape.step()


def saved_alone(folder):
    others = [Tape() for _ in range(6)]  # whose words are given behind that which is heard

    class Saving(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3 and hvd.rank() == FAULTY:
                hvd.save_checkpoint(folder, model=self.model)

    fit(callbacks=[Saving()])
    del others


def main(folder: str) -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    checkpoint_barrier.PATIENCE = 1.0
    saved = Path(folder, "saved")
    errors = errors_of(
        {
            "clean": clean,
            "fit": lambda: planted(verify_every=4),
            "callback": lambda: planted(callbacks=[hvd.callbacks.VerifyCallback(4)]),
            "tape": taped,
            "level": other_level,
            "version": other_version,
            "saved late": lambda: saved_late(saved),
            "saved alone": lambda: saved_alone(saved),  # the last: it ends the run
        }
    )
    write(folder, hvd.rank(), errors)
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
