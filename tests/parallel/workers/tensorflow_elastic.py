"""Trains elastically: the first rank 0 is killed between two exchanges, and later one joins.

`fit` trains half of a model through its optimizer, a tape in a `tf.function` the other half, and
local steps a second model; one state holds all. Each process writes a diary; see `survival`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_gradcomp.tensorflow.keras as hvd
from hvd_gradcomp.method.compressor import is_replicated, leaves
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.tensorflow import DistributedGradientTape, LocalSteps, OuterSGD
from hvd_gradcomp.tensorflow.reduce.registry import reducer_of_variables
from tests.parallel.workers.results import digest
from tests.parallel.workers.survival import Diary, open_slot

KILLED, AFTER_KILL, AFTER_JOIN = 9, 3, 8  # batches
NAMES = "fit", "tape", "local"
MSE = keras.losses.MeanSquaredError()


def batch_of(batch: int, rank: int) -> tuple[tf.Tensor, tf.Tensor]:
    x = np.random.default_rng(1000 + 10 * batch + rank).standard_normal((16, 16)).astype(np.float32)
    return tf.constant(x), tf.constant(x.reshape(16, 4, 4).mean(2))


def state_of(reducers):
    """Names, values and whether they are replicated, of all that reducers hold."""
    for reducer in reducers:
        for bucket in reducer.buckets:
            for path, x in leaves(bucket.state):
                yield x.numpy(), is_replicated(bucket.compressor, path)


class Watch(keras.callbacks.Callback):
    """After each batch: the tape's step, the diary, and what befalls this rank."""

    def __init__(self, state, tape_step, local_step, diary, folder, first):
        super().__init__()
        self.state, self.tape_step, self.diary = state, tape_step, diary
        self.local_step = local_step
        self.folder, self.first = folder, first

    def on_train_batch_end(self, batch, logs=None):
        state = self.state
        if self.first and state.batch == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        self.tape_step(*batch_of(state.batch, hvd.rank()))
        alone = self.local_step(*batch_of(state.batch, hvd.rank()))
        state.local.step()
        state.batch += 1
        x, y = batch_of(-1, 0)
        outputs = *self.model(x), alone(x)
        losses = {name: float(MSE(y, z)) for name, z in zip(NAMES, outputs)}
        self.diary.note("batch", batch=state.batch, losses=losses, **kept(state))
        if hvd.size() == 1 and state.batch == KILLED + AFTER_KILL:
            open_slot(self.folder)
        if hvd.size() == 1 and state.batch > KILLED + AFTER_KILL:
            time.sleep(0.1)  # until one joins
        if state.joined is not None and state.batch >= state.joined + AFTER_JOIN:
            self.model.stop_training = True


def kept(state):
    """What this rank keeps back, as a digest and as a norm."""
    reducers = state._reducers()
    squares = 0.0
    for reducer in reducers:
        for bucket in reducer.buckets:
            residual = residual_of(bucket.compressor, bucket.state)
            if residual is not None:
                squares += float(np.square(residual.numpy().astype(np.float64)).sum())
    local = digest(x for x, shared in state_of(reducers) if not shared)
    return {"kept": local, "norm": squares**0.5}


def error_of(stale):
    """What a step says that was traced among other ranks."""
    try:
        stale(*batch_of(0, 0))
    except tf.errors.InvalidArgumentError as error:
        return error.message
    return "nothing was raised"


def main(folder: str) -> None:
    hvd.init()
    logging.basicConfig(level=logging.WARNING)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    diary = Diary(folder)
    keras.utils.set_random_seed(1 + hvd.rank())  # all begin differently
    taped = keras.Sequential([keras.Input((16,)), layers.Dense(24, "relu"), layers.Dense(4)])
    fitted = keras.Sequential([keras.Input((16,)), layers.Dense(24, "relu"), layers.Dense(4)])
    inputs = keras.Input((16,))
    model = keras.Model(inputs, [fitted(inputs), taped(inputs)])
    taped.trainable = False  # as far as the optimizer is concerned
    rate = 0.05
    model.compile(
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(rate, momentum=0.9), compression=hvd.DGCCompressor(density=0.1)
        ),
        [MSE, None],
        jit_compile=False,
    )
    variables = [v.value for v in taped.weights]
    alone = keras.Sequential([keras.Input((16,)), layers.Dense(24, "relu"), layers.Dense(4)])
    inner = keras.optimizers.Adam(0.01)
    inner.build(alone.trainable_variables)
    averaging = {"every": 4, "outer": OuterSGD(1.0, 0.0), "optimizer": inner}
    local = LocalSteps(
        alone.trainable_variables, compression=hvd.SparseGDCompressor(density=0.1), **averaging
    )
    state = hvd.elastic.KerasState(model, batch=0, joined=None, local=local)
    first = hvd.rank() == 0 and hvd.size() == 2
    steps = []  # as they were traced

    @hvd.elastic.run
    def train(state):
        assert all(reducer.exchange.scales == (1, 1 / hvd.size()) for reducer in state._reducers())
        diary.note("start", batch=state.batch, rank=hvd.rank(), size=hvd.size(), **kept(state))
        if hvd.size() == 2 and state.batch > 0 and state.joined is None:
            state.joined = state.batch

        @tf.function
        def tape_step(x, y):
            with tf.GradientTape() as tape:
                tape.watch(variables)
                loss = MSE(y, taped(x))
            tape = DistributedGradientTape(tape, compression=hvd.VarianceCompressor(alpha=0.5))
            for v, g in zip(variables, tape.gradient(loss, variables)):
                v.assign_sub(rate * g)

        def local_step(x, y):
            with tf.GradientTape() as tape:
                loss = MSE(y, alone(x))
            gradients = tape.gradient(loss, alone.trainable_variables)
            inner.apply(gradients, alone.trainable_variables)
            return alone

        if hvd.size() == 1:
            diary.note("stale", said=error_of(steps[0]), **kept(state))
        steps.append(tape_step)

        def batches():
            while True:
                yield batch_of(state.batch, hvd.rank())

        signature = (tf.TensorSpec((16, 16)), tf.TensorSpec((16, 4)))
        data = tf.data.Dataset.from_generator(batches, output_signature=signature)
        watch = Watch(state, tape_step, local_step, diary, folder, first)
        callbacks = [watch, hvd.elastic.CommitStateCallback(state)]
        model.fit(
            data.map(lambda x, y: (x, (y, y))),
            steps_per_epoch=10_000,
            verbose=0,
            callbacks=callbacks,
        )

    train(state)
    local.exchange()
    assert local.is_exchanged
    reducer = reducer_of_variables(variables)
    diary.note(
        "end",
        batch=state.batch,
        rank=hvd.rank(),
        size=hvd.size(),
        lost=state.lost,
        parameters=digest(v.numpy() for v in (*model.weights, *alone.weights)),
        replicated=digest(x for x, shared in state_of(state._reducers()) if shared),
        steps=[int(e.steps) for e in state._reducers()],
    )
    assert reducer in state._reducers()


if __name__ == "__main__":
    main(sys.argv[1])
