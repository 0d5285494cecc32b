"""Attacks on TensorFlow's local steps, in loops and in `fit`: folder, options, names of cases."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_gradcomp.tensorflow as hvd
from hvd_gradcomp.tensorflow.keras.callbacks import LocalSteps as Callback
from tests.chaos.workers import trials
from tests.chaos.workers.trials import Trial
from tests.parallel.workers.results import digest

FAULTY, EVERY = 1, 3
SPARSE = hvd.SparseGDCompressor(density=0.1)


class Loop:
    """Descent by hand, with two fragments that are applied a step later."""

    def __init__(self, every: int = EVERY, **options: Any) -> None:
        self.weights = [tf.Variable(tf.ones(shape) * 0.1) for shape in ((12, 40), (40, 4))]
        how = {"fragments": 2, "delay": 1, "compression": SPARSE, **options}
        self.local = hvd.LocalSteps(self.weights, every, **how)
        self.random = np.random.default_rng(10 + hvd.rank())

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = tf.constant(self.random.standard_normal((8, 12)), tf.float32)
            with tf.GradientTape() as tape:
                y = tf.tanh(x @ self.weights[0]) @ self.weights[1] - x[:, :4]
                value = tf.reduce_mean(tf.square(y))
            for w, g in zip(self.weights, tape.gradient(value, self.weights)):
                w.assign_sub(0.1 * g)
            self.local.step()

    def end(self) -> str:
        self.local.exchange()
        return digest([w.numpy() for w in self.weights])


def faulty(here: Any, elsewhere: Any) -> Any:
    return here if hvd.rank() == FAULTY else elsewhere


def around(change: Callable[[Loop], Any], **options: Any) -> Callable[[Trial], str]:
    """Some steps, what one rank does alone, and more steps."""

    def case(trial: Trial) -> str:
        loop = Loop(**options)
        loop.train(4)
        if hvd.rank() == FAULTY:
            trial.now()
            change(loop)
        loop.train(8)
        return loop.end()

    return case


def others(**more: Any) -> Callable[[Trial], str]:
    """Other settings on one rank."""

    def case(trial: Trial) -> str:
        trial.now()
        loop = Loop(**faulty(more, {}))
        loop.train(12)
        return loop.end()

    return case


def spoil(loop: Loop) -> None:
    loop.weights[0].assign(tf.fill((12, 40), float("nan")))


def saved(modes: Callable[[], Any]) -> Callable[[Trial], str]:
    """A checkpoint in a mode of each rank's own; None saves nothing."""

    def case(trial: Trial) -> str:
        loop = Loop()
        loop.train(EVERY)
        loop.local.exchange()
        trial.now()
        mode = modes()
        if mode:
            hvd.save_checkpoint(trial.folder, mode=mode, weights=loop.weights, local=loop.local)
        loop.train(4)
        return loop.end()

    return case


def loaded(trial: Trial) -> str:
    """A rank of two loads."""
    loop = Loop()
    loop.train(4)
    hvd.save_checkpoint(trial.folder, weights=loop.weights, local=loop.local)
    loop.train(4)
    trial.now()
    if hvd.rank() == FAULTY:
        hvd.load_checkpoint(trial.folder, weights=loop.weights, local=loop.local)
    loop.train(8)
    return loop.end()


def fitted(batches: Callable[[], int], **settings: Any) -> Callable[[Trial], str]:
    """Keras's loop, over a number of batches of each rank's own."""

    def case(trial: Trial) -> str:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(4)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        x = np.random.default_rng(hvd.rank()).standard_normal((8 * batches(), 12)).astype("f4")
        trial.now()
        callback = Callback(**faulty({"every": EVERY, **settings}, {"every": EVERY}))
        model.fit(x, x[:, :4], batch_size=8, verbose=0, callbacks=[callback])
        return digest([np.asarray(w.value) for w in model.weights])

    return case


def swap(loop: Loop) -> None:
    """Other weights for an evaluation, and the own ones back."""
    weights_here = [w.read_value() for w in loop.weights]
    for w in loop.weights:
        w.assign(tf.zeros_like(w))
    for w, value in zip(loop.weights, weights_here):
        w.assign(value)


def taped(trial: Trial) -> str:
    """A tape reduces gradients whose variables local steps exchange, on all ranks."""
    loop = Loop()
    loop.train(4)
    trial.now()
    hvd.reduce_gradients([tf.ones(w.shape) for w in loop.weights], loop.weights)
    loop.train(8)
    return loop.end()


def fails(loop: Loop) -> None:
    raise ArithmeticError("this rank has failed")


CASES: dict[str, Callable[[Trial], Any]] = {
    "another every on one rank": others(every=5),
    "another compressor on one rank": others(compression=hvd.OneBitCompressor()),
    "another outer rate on one rank": others(outer=hvd.OuterSGD(0.5)),
    "warmup_steps on one rank": others(warmup_steps=2),
    "a step more on one rank": around(lambda loop: loop.train(1)),
    "exchange() on one rank": around(lambda loop: loop.local.exchange()),
    "restart() on one rank": around(lambda loop: loop.local.restart()),
    "verify on one rank": around(lambda loop: hvd.verify(loop.local)),
    "a user's allreduce on one rank": around(lambda _: hvd.allreduce(tf.ones(1), name="metric")),
    "a variable set on one rank": around(lambda loop: loop.weights[1].assign(tf.ones((40, 4)))),
    "weights put back after an evaluation on one rank": around(swap),
    "another LocalSteps on one rank": around(lambda loop: hvd.LocalSteps(loop.weights, 5)),
    "gradients reduced by a tape": taped,
    "nan on one rank, raise": around(spoil),
    "nan on one rank, skip": around(spoil, nonfinite="skip"),
    "save_checkpoint in other modes": saved(lambda: faulty("consolidated", "sharded")),
    "save_checkpoint on one rank": saved(lambda: faulty("sharded", None)),
    "load_checkpoint on one rank": loaded,
    "uneven data, Keras": fitted(lambda: faulty(7, 5)),
    "another every on one rank, Keras": fitted(lambda: 8, every=4),
    "no exchange at the end of an epoch on one rank, Keras": fitted(lambda: 8, at_epoch_end=False),
    "SIGSTOP for 5 s": around(lambda _: trials.stop_for(5)),
    "kill -9": around(lambda _: os.kill(os.getpid(), signal.SIGKILL)),
    "an exception on one rank": around(fails),
    "exit on one rank": around(lambda _: os._exit(0)),
    "SIGSTOP for ever": around(lambda _: trials.stop_for_ever()),
}


def main(folder: str, cases: str, *names: str) -> None:
    del cases
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    trials.run(folder, hvd.rank(), CASES, names, lambda: hvd.allgather_object(None))
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
