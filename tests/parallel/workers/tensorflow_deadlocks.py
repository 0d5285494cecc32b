"""Ranks that wait for each other on TensorFlow, and some that only seem to."""

from __future__ import annotations

import logging
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import hvd_gradcomp.tensorflow as tape_hvd
import hvd_gradcomp.tensorflow.keras as hvd
from hvd_gradcomp.runtime import stall_inspector
from tests.parallel.workers.results import errors_of, write

SENT = hvd.StromCompressor(0.01)


def fit(batches, callbacks=(), epochs=1, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=SENT), "mse")
    x, y = np.ones((4 * batches, 6)), np.ones((4 * batches, 3))
    how = {"batch_size": 4, "epochs": epochs, "verbose": 0, **options}
    return model.fit(x, y, callbacks=list(callbacks), **how)


def uneven():
    """How many batches this rank has."""
    return 4 - hvd.rank()


def metric_after_fit():
    fit(uneven())
    hvd.allreduce(tf.constant(1.0), name="metric")


def averaged_metrics():
    fit(uneven(), [hvd.callbacks.MetricAverageCallback()])


def stopped_early():
    class Stopping(keras.callbacks.EarlyStopping):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = hvd.rank() == 1

    fit(2, [Stopping("loss")], epochs=2)
    tape_hvd.allgather_object(None, name="after fit")


def validated_alone():
    here = hvd.rank() == 0
    more = {"validation_data": (np.ones((4, 6)), np.ones((4, 3)))} if here else {}
    fit(2, [hvd.callbacks.MetricAverageCallback()], epochs=2, **more)


def taped(traced):
    """Descent by hand, one step less on one rank, and a collective of the user's."""
    weight = tf.Variable(tf.ones((4, 2)))

    def step():
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.square(weight))
        tape = tape_hvd.DistributedGradientTape(tape, compression=SENT)
        weight.assign_sub(0.1 * tape.gradient(value, [weight])[0])

    step = tf.function(step) if traced else step
    for _ in range(uneven()):
        step()

    def metric(x):
        return tape_hvd.allreduce(x, name="metric")

    metric = tf.function(metric) if traced else metric
    metric(tf.constant(1.0))


def slow_rank():
    """Rank 1 computes for longer than the patience, in `fit` and between collectives."""

    class Slow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            time.sleep(3 * stall_inspector.PATIENCE * (batch == 1) * hvd.rank())

    fit(3, [Slow(), hvd.callbacks.MetricAverageCallback()])
    for _ in range(2):
        assert float(hvd.allreduce(tf.constant(1.0 + hvd.rank()), name="metric")) == 1.5
        time.sleep(3 * stall_inspector.PATIENCE * hvd.rank())
        assert len(tape_hvd.allgather_object(hvd.rank())) == 2


def rounds_of(pause, alone=lambda: None):
    """Rounds with a deadline, in which one rank pauses in its steps, or does something alone."""
    weight = tf.Variable(tf.ones((4, 2)))
    local = tape_hvd.LocalSteps([weight], 2, deadline=0.1)
    local.step()
    while local.rounds < 2:
        time.sleep(pause * hvd.rank())
        if hvd.rank():
            alone()
        local.step()
    local.exchange()


CASES = {
    "slow": slow_rank,
    "slow rounds": lambda: rounds_of(3 * stall_inspector.PATIENCE),
    "rounds": lambda: rounds_of(0.0, lambda: hvd.allreduce(tf.constant(1.0), name="metric")),
    "metric": metric_after_fit,
    "callback": averaged_metrics,
    "early stopping": stopped_early,
    "validation": validated_alone,
    "tape": lambda: taped(traced=False),
    "tf.function": lambda: taped(traced=True),
}


class Log(logging.Handler):
    """What was logged as an error, by the case."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.case, self.messages = "", {}

    def emit(self, record):
        self.messages[self.case] = record.getMessage()


def main(folder: str, *names: str) -> None:
    hvd.init()
    rank = hvd.rank()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    stall_inspector.PATIENCE = 0.5
    log = Log()
    logging.getLogger("hvd_gradcomp").addHandler(log)
    results = {"log": log.messages}
    for log.case in names:  # a deadlock ends Horovod, so it comes last
        results.update(errors_of({log.case: CASES[log.case]}))
    write(folder, rank, results)
    if hvd.is_initialized():
        hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
