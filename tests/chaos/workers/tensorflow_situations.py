"""Situations on TensorFlow and Keras, in loops and in `fit`: folder, options, cases."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

import hvd_gradcomp.tensorflow as hvd
from hvd_gradcomp.tensorflow import keras as hvd_keras
from tests.chaos.situations import AGAIN, ANEW, BACK, EVERY, MODES, PAIRS, STEPS, Case
from tests.chaos.workers import trials
from tests.chaos.workers.traces import CLOSE, Leftovers, Trace, compare, compare_pair
from tests.chaos.workers.trials import Trial
from tests.parallel.workers.results import digest

METHODS = {
    "None": hvd.NoneCompressor(),
    "QSGD": hvd.QSGDCompressor(),
    "Sparse GD": hvd.SparseGDCompressor(density=0.1),
    "1-bit": hvd.OneBitCompressor(),
    "Int8": hvd.Int8Compressor(),
    "chunked": hvd.ChunkedTopKCompressor(),
    "PowerSGD": hvd.PowerSGDCompressor(),
}
OUTER = hvd.OuterSGD(0.7, 0.9)
CYCLES = 4  # trainings one after another
WORDS = 32  # elements of a collective that is more than a message
RATE = 0.05
Mode = Callable[["Training"], AbstractContextManager[Any]]
Situation = Callable[["Training"], Any]


class _Counted:
    """Horovod's library; collectives that carry more than words are counted when they run."""

    def __init__(self, library: Any) -> None:
        self._library, self.count = library, 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if name.partition("_")[2] not in ("allreduce", "allgather", "alltoall", "broadcast"):
            return function

        def counted(tensor: Any, **options: Any) -> Any:
            if (tf.TensorShape(tensor.shape).num_elements() or WORDS) >= WORDS:
                tf.numpy_function(self._add, [], [])
            return function(tensor, **options)

        return counted

    def _add(self) -> None:
        self.count += 1


_counted = mpi_ops.MPI_LIB = _Counted(mpi_ops.MPI_LIB)


def rank() -> int:
    return hvd.rank()


def inputs(step: int, dtype: Any = tf.float32) -> Any:
    random = np.random.default_rng([step, rank()])
    return tf.cast(random.standard_normal((8, 12)).astype("f4"), dtype)


class Training:
    """A model in training, with what exchanges for it.

    Attributes:
        variables: of the model.
        holder: what `hvd.verify` and others take.
        saves: what a checkpoint has.
        made: steps so far.
    """

    variables: list[tf.Variable]
    holder: Any
    saves: dict[str, Any]
    made = 0
    kept: Callable[[], list[tf.Variable]]

    def train(self, at: int = -1, situation: Situation | None = None) -> Trace:
        raise NotImplementedError

    def evaluate(self) -> Any:
        raise NotImplementedError

    def weights(self) -> np.ndarray:
        flat = [tf.cast(tf.reshape(v, [-1]), tf.float32) for v in self.variables]
        return tf.concat(flat, 0).numpy()


class Loop(Training):
    """Descent by hand, with local steps, or with a tape that exchanges.

    Args:
        host: of the table.
        method: the compressor.
        dtype: of the variables.
        mode: in which what exchanges is made.
    """

    def __init__(
        self, host: str, method: Any, dtype: str = "float32", mode: Mode | None = None
    ) -> None:
        shapes = (12, 24), (24, 4)
        # Multiples of 1/256, so that they are the same in all dtypes.
        values = [np.arange(a * b).reshape(a, b) % 7 / 64 - 3 / 64 for a, b in shapes]
        self.variables = [tf.Variable(x, dtype=getattr(tf, dtype)) for x in values]
        self.method, self.local = method, None
        self.tape: Callable[[Any], Any] = lambda tape: tape
        self.apply = self._descend
        if host == "tensorflow.LocalSteps":
            with (mode or IN_MODES[""])(self):
                self.local = hvd.LocalSteps(self.variables, EVERY, OUTER, method)
            self.holder, kept = self.local, {"local": self.local}
            self.kept = lambda: [v for v in self.local.kept if isinstance(v, tf.Variable)]
        else:
            state = hvd.tape_state(self.variables, method)
            self.tape = functools.partial(hvd.DistributedGradientTape, compression=method)
            self.holder, kept = self.variables, {"exchange": state}
            self.kept = lambda: []
        self.saves = {"weights": self.variables, **kept}

    def _descend(self, gradients: list[Any]) -> None:
        for v, gradient in zip(self.variables, gradients):
            v.assign_sub(tf.cast(RATE, v.dtype) * tf.cast(gradient, v.dtype))

    def gradients(self) -> list[Any]:
        x = inputs(self.made, self.variables[0].dtype)
        with tf.GradientTape() as tape:
            y = tf.tanh(x @ self.variables[0]) @ self.variables[1] - x[:, :4]
            value = tf.reduce_mean(tf.square(tf.cast(y, tf.float32)))
        return self.tape(tape).gradient(value, self.variables)

    def step(self) -> None:
        self.apply(self.gradients())
        self.made += 1
        if self.local is not None:
            self.local.step()

    def train(self, at: int = -1, situation: Situation | None = None) -> Trace:
        weights = []
        for step in range(STEPS):
            if step == at and situation is not None:
                situation(self)
            if step == 2:
                before = _counted.count
            self.step()
            weights.append(self.weights())
        return Trace(weights, _digest(self.kept()), _counted.count - before)

    def evaluate(self) -> Any:
        x = tf.ones((2, 12), self.variables[0].dtype)
        return tf.tanh(x @ self.variables[0]) @ self.variables[1]


class _Recorder(keras.callbacks.Callback):
    """Notes weights after each batch, and calls a situation before one."""

    def __init__(self, training: Fit, at: int, situation: Situation | None) -> None:
        super().__init__()
        self._training, self._at, self._situation = training, at, situation
        self.weights: list[np.ndarray] = []
        self.before = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        del logs
        if self._training.made == self._at and self._situation is not None:
            self._situation(self._training)
        if self._training.made == 2:
            self.before = _counted.count

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del logs
        self._training.made += 1
        self.weights.append(self._training.weights())


class Fit(Training):
    """Keras's own loop, an epoch a round, with a distributed optimizer or the callback.

    Args:
        host: of the table.
        method: the compressor.
        optimizer: instead of the host's own.
        averages: Keras averages the weights, for `SwapEMAWeights`.
    """

    def __init__(
        self, host: str, method: Any, *, optimizer: Any = None, averages: bool = False
    ) -> None:
        keras.utils.set_random_seed(1)
        layers = keras.layers.Dense(24, "tanh"), keras.layers.Dense(4)
        self.model = keras.Sequential([keras.Input((12,)), *layers])
        self.callbacks: list[keras.callbacks.Callback] = []
        self.local = None
        how = {"use_ema": True, "ema_momentum": 0.5} if averages else {}
        name = host.rpartition(".")[2]
        if optimizer is None:
            optimizer = optimizer_of(name, method, **how)
        self.optimizer = optimizer
        self.model.compile(self.optimizer, "mse", jit_compile=False)
        self.saves = {"model": self.model}
        if name == "LocalSteps":
            self.callbacks.append(
                hvd_keras.callbacks.LocalSteps(EVERY, OUTER, method, at_epoch_end=False)
            )
            self.local = self.callbacks[0].build(self.model)
            self.saves["local"] = self.local
        self.holder = self.optimizer if self.local is None else self.local
        self.variables = [v.value for v in self.model.trainable_variables]
        self.kept = lambda: [v.value for v in self.optimizer.variables]

    def train(self, at: int = -1, situation: Situation | None = None) -> Trace:
        return self._fit(_Recorder(self, at, situation), STEPS // EVERY)

    def train_twice(self, at: int, situation: Situation) -> Trace:
        """Train in two calls of `fit`, with something between them."""
        recorder = _Recorder(self, -1, None)
        if at:
            self._fit(recorder, at // EVERY)
        situation(self)
        return self._fit(recorder, (STEPS - at) // EVERY)

    def _fit(self, recorder: _Recorder, epochs: int) -> Trace:
        x = tf.concat([inputs(step) for step in range(EVERY)], 0).numpy()
        self.model.fit(
            *(x, x[:, :4]),
            batch_size=8,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[*self.callbacks, recorder],
        )
        count = _counted.count - recorder.before
        return Trace(recorder.weights, _digest(self.kept()), count)

    def evaluate(self) -> Any:
        return self.model(tf.ones((2, 12)), training=False)


def optimizer_of(name: str, method: Any, **how: Any) -> Any:
    """Return what a model of a host is compiled with."""
    if name == "MomentumExchange":
        return hvd_keras.MomentumExchange(keras.optimizers.AdamW(0.01, **how), method, 2)
    sgd = keras.optimizers.SGD(RATE, momentum=0.5, **how)
    return sgd if name == "LocalSteps" else hvd_keras.DistributedOptimizer(sgd, compression=method)


def _digest(variables: list[Any]) -> str:
    return digest(v.numpy() for v in variables)


def make(case: Case, mode: Mode | None = None) -> Training:
    if case.host.startswith("keras."):
        return Fit(case.host, METHODS[case.method], averages=case.what == "SwapEMAWeights")
    dtype = case.how if case.kind in (BACK, ANEW) else "float32"
    return Loop(case.host, METHODS[case.method], dtype, mode)


@functools.cache
def undisturbed(case: Case) -> Trace:
    return make(case).train()


def oracle_of(case: Case) -> Trace:
    """The training without a situation: what most cases are held to."""
    what = case.what if case.what == "SwapEMAWeights" else ""
    how = case.how if case.kind in (BACK, ANEW) else "float32"
    return undisturbed(Case(BACK, case.host, what, how, case.method))


# -- weights set, and put back ------------------------------------------------------------------


def put_back(case: Case, trial: Trial) -> Any:
    trial.details["step"] = case.step
    oracle = oracle_of(case)
    training = make(case)
    if case.what == "SwapEMAWeights":
        training.callbacks.append(keras.callbacks.SwapEMAWeights(swap_on_epoch=True))
        return compare(training.train(), oracle, CLOSE)

    def situation(training: Training) -> None:
        if "one rank" in case.what and rank() != 1:
            return
        before = [v.numpy() for v in training.variables]
        place(training, case.what, [0.5 * x + 1.0 for x in before])
        training.evaluate()
        place(training, case.what, before)

    return compare(training.train(case.step, situation), oracle)


def place(training: Training, how: str, values: list[np.ndarray]) -> None:
    if how.startswith("set_weights") and isinstance(training, Fit):
        training.model.set_weights(values)
        return
    for v, value in zip(training.variables, values):
        v.assign(tf.cast(value, v.dtype))


def set_anew(case: Case, trial: Trial) -> Any:
    """New weights on all ranks between two fits; held to the same and a restart."""
    trial.details["step"] = case.step
    traces = []
    for restarts in (False, True):
        training = make(case)
        assert isinstance(training, Fit)
        traces.append(training.train_twice(case.step, functools.partial(_renew, restarts)))
    return compare(*traces)


def _renew(restarts: bool, training: Any) -> None:
    place(training, "set_weights", [0.5 * v.numpy() + 1.0 for v in training.variables])
    if restarts and training.local is not None:
        training.local.restart()


# -- calls in other modes -----------------------------------------------------------------------


@contextmanager
def _under_policy(training: Training) -> Iterator[None]:
    del training
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@contextmanager
def _not_recorded(training: Training) -> Iterator[None]:
    del training
    with tf.GradientTape() as tape, tape.stop_recording():
        yield


@contextmanager
def _after_compiled(training: Training) -> Iterator[None]:
    tf.function(training.evaluate)()
    yield


IN_MODES: dict[str, Mode] = {
    "": lambda _: nullcontext(),
    "a tape": lambda _: tf.GradientTape(persistent=True),
    "stop_recording": _not_recorded,
    "mixed_bfloat16": _under_policy,
    "compiled": _after_compiled,
}
MOVING = ("step", "exchange", "restart", "discard_step")  # calls that train


def call(name: str, mode: Mode, folder: Path) -> Situation:
    """Return a situation that makes a public call in a mode."""

    def situation(training: Any) -> None:
        local = getattr(training, "local", None)
        if name == "restart":
            local.exchange()
        elif name == "load_checkpoint":
            hvd.save_checkpoint(folder, **training.saves)
        elif name == "step":
            training.apply(training.gradients())
        elif name == "discard_step":
            training.gradients()
        with mode(training):
            if name in ("exchange", "restart", "step"):
                getattr(local, name)()
            elif name == "evaluate":
                training.evaluate()
            elif name == "stats":
                hvd.compression_stats(training.holder)
                hvd.describe(training.holder)
            elif name in ("verify", "discard_step"):
                getattr(hvd, name)(training.holder)
            elif name == "allreduce":
                hvd.allreduce(tf.ones(3), name="metric")
            elif name == "broadcast_variables":
                hvd.broadcast_variables(training.variables, 0)
            else:
                getattr(hvd, name)(folder, **training.saves)
        training.made += name in ("step", "discard_step")

    return situation


def in_mode(case: Case, trial: Trial) -> Any:
    """A call in a mode; held to the same call outside of it, or to none where it moves nothing."""
    trial.details["step"] = case.step
    mode = IN_MODES[case.how]
    if case.what in MOVING:
        plain = call(case.what, IN_MODES[""], trial.folder / "oracle")
        oracle = make(case).train(case.step, plain)
    else:
        oracle = oracle_of(case)
    if case.what == "make":
        return compare(make(case, mode).train(), oracle)
    trace = make(case).train(case.step, call(case.what, mode, trial.folder / "tried"))
    return compare(trace, oracle)


# -- trainings one after another ----------------------------------------------------------------


def made_again(case: Case, trial: Trial) -> Any:
    trial.details["step"] = 0
    variables: list[weakref.ref[Any]] = []

    def cycle() -> None:
        training = make(case)
        variables.extend(map(weakref.ref, training.variables))
        if isinstance(training, Loop):
            for _ in range(3):
                training.step()
        else:
            training.train()

    counts = {"variables": lambda: sum(v() is not None for v in variables)}
    return Leftovers(counts).after(cycle, CYCLES)


# -- two exchanges ------------------------------------------------------------------------------


def paired(case: Case, trial: Trial) -> Any:
    trial.details["step"] = 0
    method = METHODS[case.method]
    made: Any = _paired_fit if case.host.startswith("keras.") else _paired_loop
    training, others = made(case, method)
    trace = training.train(-1)
    alone = {case.host: undisturbed(Case(BACK, case.host, "", "float32", case.method))}
    return compare_pair(trace, alone | {name: one.train() for name, one in others.items()})


def _paired_loop(case: Case, method: Any) -> Any:
    loop, others = Loop(case.host, method), {}
    if case.what == "tape":
        inner = loop.tape
        loop.tape = lambda tape: hvd.DistributedGradientTape(inner(tape), compression=method)
        others["a tape"] = Loop("DistributedGradientTape", method)
    elif case.what == "DistributedOptimizer":
        optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(RATE), compression=method)
        loop.apply = lambda gradients: optimizer.apply_gradients(zip(gradients, loop.variables))
    else:
        second, step = hvd.LocalSteps(loop.variables, EVERY, OUTER, method), loop.step

        def both() -> None:
            step()
            second.step()

        loop.step = both  # type: ignore[method-assign]
    return loop, others


def _paired_fit(case: Case, method: Any) -> Any:
    name = case.host.rpartition(".")[2]
    if case.how == "inside":
        first = optimizer_of(case.what, method)
        second: Any = first
        if name == "DistributedOptimizer":
            second = hvd_keras.DistributedOptimizer(first, compression=method)
        elif name == "MomentumExchange":
            adam = hvd_keras.DistributedOptimizer(keras.optimizers.AdamW(0.01))
            second = hvd_keras.MomentumExchange(adam, method, 2)
        return Fit(case.host, method, optimizer=second), {}
    if case.how == "around":
        optimizer = hvd_keras.DistributedOptimizer(optimizer_of(name, method), compression=method)
        return Fit(case.host, method, optimizer=optimizer), {}
    fit = Fit(case.host, method)
    if case.what == "callbacks.LocalSteps":
        fit.callbacks.append(
            hvd_keras.callbacks.LocalSteps(EVERY, OUTER, method, at_epoch_end=False)
        )
    else:
        second = hvd.LocalSteps(fit.model.trainable_variables, EVERY, OUTER, method)
        step = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs=None: second.step()
        )
        fit.callbacks.append(step)
    return fit, {}


KINDS: dict[str, Callable[[Case, Trial], Any]] = {
    PAIRS: paired,
    BACK: put_back,
    ANEW: set_anew,
    AGAIN: made_again,
    MODES: in_mode,
}


def main(folder: str, options: str, *names: str) -> None:
    del options
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    cases = {name: Case.parse(name) for name in names}
    tried = {name: functools.partial(KINDS[case.kind], case) for name, case in cases.items()}
    trials.run(folder, rank(), tried, names, lambda: hvd.allgather_object(None))
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
