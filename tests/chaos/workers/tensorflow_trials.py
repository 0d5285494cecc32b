"""Attacks on ranks that train with TensorFlow; arguments: folder, options, names of cases."""

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
from hvd_gradcomp import (
    Compressor,
    DGCCompressor,
    LGCCompressor,
    NoneCompressor,
    StromCompressor,
    after,
)
from hvd_gradcomp.tensorflow.keras.callbacks import MetricAverageCallback
from hvd_gradcomp.tensorflow.reduce.reducer import living
from tests.chaos.workers import trials
from tests.chaos.workers.trials import Trial
from tests.parallel.workers.results import digest

FAULTY = 1
STROM = StromCompressor(tau=0.01)
METHODS: dict[str, Compressor] = {
    "None": NoneCompressor(),
    "Strom": STROM,
    "DGC": DGCCompressor(density=0.05, momentum=0.0),
    "after": after(3, None, StromCompressor(tau=0.01)),
    "LGC": LGCCompressor(alpha=0.1, full_steps=2, train_steps=4, momentum=0.0),
}


class Tape:
    """Descent by hand, in a graph."""

    def __init__(self, compressor: Compressor, outputs: int = 20, **options: Any) -> None:
        known = set(living)
        shapes = (30, 20), (20, 30), (30, outputs)
        self.weights = [tf.Variable(tf.ones(shape) * 0.1) for shape in shapes]
        self.poison = tf.Variable(0.0)

        @tf.function
        def step(x: Any) -> None:
            with tf.GradientTape() as plain:
                for w in self.weights:
                    x = x @ w
                value = tf.reduce_mean(tf.square(x)) + self.poison * tf.reduce_sum(self.weights[0])
            tape = hvd.DistributedGradientTape(plain, compression=compressor, **options)
            for w, gradient in zip(self.weights, tape.gradient(value, self.weights)):
                w.assign_sub(0.001 * gradient)

        self.step = step
        self.train(1)
        (self.reducer,) = set(living) - known

    def train(self, steps: int) -> None:
        random = np.random.default_rng(10 + hvd.rank())
        for _ in range(steps):
            self.step(tf.constant(random.standard_normal((4, 30)), tf.float32))

    def replicas(self) -> str:
        return digest([w.numpy() for w in self.weights])


class Fit:
    """Keras's own loop."""

    def __init__(self, compressor: Compressor, outputs: int = 4, **options: Any) -> None:
        keras.utils.set_random_seed(1)
        self.model = keras.Sequential(
            [keras.Input((12,)), keras.layers.Dense(30), keras.layers.Dense(outputs)]
        )
        plain = keras.optimizers.SGD(0.01)
        self.optimizer = hvd.DistributedOptimizer(plain, compression=compressor, **options)
        self.compile()
        self.train(1)
        self.reducer = self.optimizer._gradcomp

    def compile(self) -> None:
        self.model.compile(self.optimizer, "mse", jit_compile=False)

    def train(self, steps: int) -> None:
        random = np.random.default_rng(10 + hvd.rank())
        x = random.standard_normal((4 * steps, 12))
        y = np.ones((4 * steps, self.model.output_shape[-1]))
        self.model.fit(x, y, batch_size=4, verbose=0)

    def replicas(self) -> str:
        return digest([np.asarray(v.value) for v in self.model.variables])


def alone(trial: Trial, change: Callable[[], Any]) -> None:
    """One rank does what the others do not."""
    if hvd.rank() == FAULTY:
        trial.now()
        change()


def around(
    change: Callable[[Any], Any], compressor: Compressor = STROM, how: Any = Tape
) -> Callable[[Trial], str]:
    """Some steps, what one rank does alone, and more steps."""

    def case(trial: Trial) -> str:
        training = how(compressor)
        training.train(3)
        alone(trial, lambda: change(training))
        training.train(4)
        return training.replicas()

    return case


def frozen(training: Fit) -> None:
    training.model.layers[0].trainable = False
    training.compile()


def saved(mode: Callable[[], str | None], how: Any) -> Callable[[Trial], str]:
    """Ranks save in the mode that each is told; or not."""

    def case(trial: Trial) -> str:
        training = how(STROM)
        chosen = mode()
        trial.now()
        objects = {"model": training.model} if how is Fit else {"weights": training.weights}
        if chosen is not None:
            hvd.save_checkpoint(trial.folder, mode=chosen, **objects)
        training.train(3)
        return training.replicas()

    return case


def loaded(trial: Trial) -> str:
    training = Tape(STROM)
    hvd.save_checkpoint(trial.folder, weights=training.weights)
    alone(trial, lambda: hvd.load_checkpoint(trial.folder, weights=training.weights))
    training.train(3)
    return training.replicas()


def on_full_disk(trial: Trial) -> str:
    training = Fit(STROM)
    trial.now()
    if hvd.rank() == FAULTY:
        with trials.full_disk():
            hvd.save_checkpoint(trial.folder, model=training.model)
    else:
        hvd.save_checkpoint(trial.folder, model=training.model)
    return training.replicas()


def others(how: Any, **differing: Any) -> Callable[[Trial], str]:
    """One rank builds something else."""

    def case(trial: Trial) -> str:
        trial.now()
        chosen = {"compressor": STROM, **(differing if hvd.rank() == FAULTY else {})}
        training = how(**chosen)
        training.train(2)
        return training.replicas()

    return case


def poisoned(policy: str) -> Callable[[Trial], Any]:
    """One rank's gradient is infinite, in one step."""

    def case(trial: Trial) -> Any:
        training = Tape(STROM, nonfinite=policy)
        training.train(2)
        before = training.replicas()
        trial.now()
        training.poison.assign(float("inf") if hvd.rank() == FAULTY else 0.0)
        training.train(1)
        training.poison.assign(0.0)
        if policy == "propagate":
            return bool(np.isnan(training.weights[0].numpy()).any())
        return [training.replicas() == before, str(np.isfinite(training.weights[0].numpy()).all())]

    return case


@tf.custom_gradient
def _failing(x: Any) -> Any:
    def gradient(upstream: Any) -> Any:
        raise ArithmeticError("this rank has failed")

    return tf.identity(x), gradient


def fails(training: Tape) -> None:
    with tf.GradientTape() as tape:
        value = tf.add_n([tf.reduce_sum(_failing(w)) for w in training.weights])
    tape = hvd.DistributedGradientTape(tape, compression=STROM)
    tape.gradient(value, training.weights)


def stopped(training: Any) -> None:
    trials.stop_for(5)


def faulty(mode: str | None, otherwise: str | None) -> Callable[[], str | None]:
    return lambda: mode if hvd.rank() == FAULTY else otherwise


def uneven(how: Any, then: Callable[[Any], Any]) -> Callable[[Trial], str]:
    """One rank has a batch less; a collective of the user's that ends the epoch on all."""

    def case(trial: Trial) -> str:
        training = how(STROM)
        trial.now()
        training.train(2 if hvd.rank() == FAULTY else 3)
        then(training)
        return training.replicas()

    return case


def _allreduce(_: Any) -> None:
    hvd.allreduce(tf.ones(1), name="metric")


def _join(training: Any) -> None:
    hvd.broadcast_variables(training.weights, root_rank=int(hvd.join()))


def fitted(
    callbacks: Callable[[bool], list[Any]], validated: Callable[[bool], bool], size: int = 12
) -> Callable[[Trial], str]:
    """`fit` with callbacks and validation data that may be one rank's alone.

    Args:
        callbacks: given whether this is the faulty rank.
        validated: whether a rank has validation data; as given.
        size: samples of the faulty rank; others have 12.
    """

    def case(trial: Trial) -> str:
        training, faulty = Fit(STROM), hvd.rank() == FAULTY
        samples = size if faulty else 12
        x, y = np.ones((samples, 12)), np.ones((samples, 4))
        data = {"validation_data": (x, y)} if validated(faulty) else {}
        trial.now()
        how = {"batch_size": 4, "epochs": 3, "verbose": 0, **data}
        training.model.fit(x, y, callbacks=callbacks(faulty), **how)
        hvd.allgather_object(None)
        return training.replicas()

    return case


def _averaging(_: bool) -> list[Any]:
    return [MetricAverageCallback()]


def _stopping(faulty: bool) -> list[Any]:
    # Nothing gets better by so much, so one rank stops after its second epoch.
    return [keras.callbacks.EarlyStopping("loss", min_delta=1e9)] if faulty else []


COLLECTIVES: dict[str, Callable[[], Any]] = {
    "allreduce": lambda: hvd.allreduce(tf.ones(1), name="metric"),
    "allgather_object": lambda: hvd.allgather_object(1),
    "broadcast": lambda: hvd.broadcast(tf.ones(1), 0, name="metric"),
}
CASES: dict[str, Callable[[Trial], Any]] = {
    **{
        f"a user's {name} on one rank{title}": around(lambda _, call=call: call(), how=how)
        for name, call in COLLECTIVES.items()
        for title, how in (("", Tape), (", Keras", Fit))
    },
    "uneven data, and an allreduce": uneven(Tape, _allreduce),
    "uneven data, and an allreduce, Keras": uneven(Fit, _allreduce),
    "uneven data, and hvd.join()": uneven(Tape, _join),
    "uneven data, and metrics averaged, Keras": fitted(_averaging, lambda _: False, 8),
    "EarlyStopping on one rank, Keras": fitted(_stopping, lambda _: False),
    "validation on one rank, Keras": fitted(_averaging, lambda faulty: not faulty),
    **{
        f"another step on one rank, {name}": around(lambda t: t.reducer.steps.assign_add(1), one)
        for name, one in METHODS.items()
    },
    "another step on one rank, Keras": around(lambda t: t.reducer.steps.assign_add(1), how=Fit),
    "retrain on one rank, LGC": around(lambda t: t.reducer.retrain(), METHODS["LGC"]),
    "freezing on one rank, Keras": around(frozen, how=Fit),
    "save_checkpoint in other modes": saved(faulty("consolidated", "sharded"), Tape),
    "save_checkpoint in other modes, Keras": saved(faulty("consolidated", "sharded"), Fit),
    "save_checkpoint on one rank": saved(faulty("sharded", None), Tape),
    "save_checkpoint on one rank, Keras": saved(faulty("sharded", None), Fit),
    "load_checkpoint on one rank": loaded,
    "another compressor on one rank": others(Tape, compressor=StromCompressor(tau=0.3)),
    "another model on one rank": others(Tape, outputs=21),
    "another model on one rank, Keras": others(Fit, outputs=5),
    "SIGSTOP for 5 s": around(stopped),
    "SIGSTOP for 5 s, Keras": around(stopped, how=Fit),
    "a checkpoint, full disk on one rank, Keras": on_full_disk,
    **{f"inf on one rank, {policy}": poisoned(policy) for policy in ("raise", "skip", "propagate")},
    "kill -9": around(lambda t: os.kill(os.getpid(), signal.SIGKILL)),
    "kill -9, Keras": around(lambda t: os.kill(os.getpid(), signal.SIGKILL), how=Fit),
    "an exception on one rank": around(fails),
    "exit on one rank": around(lambda t: os._exit(0)),
    "SIGSTOP for ever": around(lambda t: trials.stop_for_ever()),
}


def main(folder: str, cases: str, *names: str) -> None:
    del cases
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    trials.run(folder, hvd.rank(), CASES, names, lambda: hvd.allgather_object(None))
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
