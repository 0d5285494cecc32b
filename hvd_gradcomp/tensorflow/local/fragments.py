"""Parts of a model that local steps exchange, and the counts of their rounds, in variables.

`runtime/local_rounds.py` runs the rounds with them. The outer optimizer is its formula, in
variables that a checkpoint keeps.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvd_gradcomp.algorithms.combined.local_steps import OuterSGD
from hvd_gradcomp.algorithms.combined.round_length import FIRST, Round
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.local_rounds import Agreement, Exchange, Fragment
from hvd_gradcomp.tensorflow.interop.background_call import BackgroundCall
from hvd_gradcomp.tensorflow.interop.moving_averages import GlobalAverages, MovingAverage
from hvd_gradcomp.tensorflow.interop.variables import new_variable, plain_variable, where_set
from hvd_gradcomp.tensorflow.reduce.buckets import bytes_of
from hvd_gradcomp.tensorflow.reduce.reducer import GraphReducer

_NOTHING, _MEANS, _NOT_FINITE, _FAILED = range(4)  # what is in flight, of a fragment


def _count(name: str) -> Any:
    """Return a property that reads and sets a variable of the object."""

    def read(counters: Any) -> int:
        return int(getattr(counters, name))

    def assign(counters: Any, value: int) -> None:
        getattr(counters, name).assign(value)

    return property(read, assign)


class CounterVariables:
    """Counts of steps and rounds, in variables; see `Counters`.

    Args:
        fragments: their number.

    Attributes:
        steps_variable, clock_variable, rounds_variable: of the counts, for graphs and checkpoints.
        round_variable: the fields of the round, in float64.
        moved: by fragment, steps since this rank had the global variables.
        sent: by fragment, what is in flight.
    """

    steps = _count("steps_variable")
    clock = _count("clock_variable")
    rounds = _count("rounds_variable")

    def __init__(self, fragments: int) -> None:
        zero, zeros = tf.constant(0, tf.int64), tf.zeros((fragments,), tf.int64)
        self.steps_variable = new_variable("gradcomp_local_steps", zero)
        self.clock_variable = new_variable("gradcomp_local_clock", zero)
        self.rounds_variable = new_variable("gradcomp_local_rounds", zero)
        first = tf.constant(FIRST, tf.float64)
        self.round_variable = new_variable("gradcomp_local_round", first)
        self.moved = new_variable("gradcomp_local_moved", zeros)
        self.sent = new_variable("gradcomp_local_sent", zeros)

    @property
    def round(self) -> Round:
        """Return the round that the next local step belongs to."""
        *counts, rate = self.round_variable.numpy().tolist()
        begun, length, before = map(int, counts)
        return Round(begun, length, before, rate)

    @round.setter
    def round(self, round_: Round) -> None:
        self.round_variable.assign(round_)


class GraphExchange(Exchange):
    """Exchange by a reducer, which compares its settings and goes back by itself, in its graph."""

    def __init__(self, reducer: GraphReducer) -> None:
        self.reducer = reducer

    @property
    def made(self) -> int:
        return int(self.reducer.steps)


class GraphFragment(Fragment):
    """Fragment of variables; what is applied later is exchanged in a thread of its own.

    A collective blocks its thread. Until it has ended, the thread changes variables of the reducer:
    whoever reads or sets what checkpoints keep calls `settle` before.

    The variables are created here, and the global ones are those of this rank.

    Args:
        number: of the fragment.
        sources: the model's variables, of TensorFlow or Keras.
        reducer: of the layers of the global variables.
        counters: of the rounds.
        outer: settings of the outer optimizer.
        rate: its learning rate, a variable.
        averages: those that the inner optimizer keeps.
        every: steps of a round.
        is_delayed: what is reduced is applied later.

    Attributes:
        sources, reducer: as given.
        copies: the global variables, in float32 if the model's are narrower.
        averages: moving averages of the global variables, where the inner optimizer keeps such.
        seconds_waited: in which steps stood still for exchanges, compressing included.
    """

    def __init__(
        self,
        number: int,
        sources: list[Any],
        reducer: GraphReducer,
        counters: CounterVariables,
        outer: OuterSGD,
        rate: tf.Variable,
        averages: dict[int, MovingAverage],
        every: int,
        is_delayed: bool,
    ) -> None:
        self._number, self.sources, self.reducer = number, sources, reducer
        self._counters, self._outer, self._rate = counters, outer, rate
        self.exchange = GraphExchange(reducer)
        zeros = [tf.zeros(shape, dtype) for _, shape, dtype in reducer.layers]

        def created(name: str, needed: bool = True) -> list[tf.Variable]:
            return [new_variable(f"gradcomp_{name}", zero) for zero in zeros if needed]

        self.copies = created("global")
        self._velocities = created("velocity", bool(outer.momentum))
        self._means = created("mean", is_delayed)  # reduced, and yet to be applied
        self._reduced: Sequence[Any] | None = None  # the same without a delay
        self._call: BackgroundCall | None = None  # an exchange that has not ended
        self._failure: Exception | None = None  # of one that has
        self.averages = GlobalAverages(sources, self.copies, averages, every)
        self.seconds_waited = 0.0
        self.take_copies(keeps_equal=False)

    @property
    def variables(self) -> list[tf.Variable]:
        """Return the variables that a checkpoint keeps, without the reducer's."""
        return [*self._shared, *self._velocities, *self._means]

    @property
    def memory(self) -> dict[str, int]:
        """Return the bytes that it keeps besides the reducer; see `CompressionStats.memory`."""
        return {
            "global": bytes_of(self._shared),
            "outer": bytes_of(self._velocities),
            "in flight": bytes_of(self._means),
        }

    @property
    def _shared(self) -> list[tf.Variable]:
        return [*self.copies, *self.averages.variables]

    @property
    def moved(self) -> int:
        return int(self._counters.moved[self._number])

    @moved.setter
    def moved(self, steps: int) -> None:
        self._counters.moved.scatter_nd_update([[self._number]], [steps])

    @property
    def _sent(self) -> int:
        return int(self._counters.sent[self._number])

    @_sent.setter
    def _sent(self, content: int) -> None:
        self._counters.sent.scatter_nd_update([[self._number]], [content])

    @property
    def in_flight(self) -> bool:
        return self._call is not None or self._sent != _NOTHING

    def digest(self) -> int:
        checksum = 0
        for v in self._shared:
            checksum = zlib.crc32(v.numpy().reshape(-1).view("uint8"), checksum)
        return checksum

    # -- an exchange ---------------------------------------------------------------------------

    def _values(self) -> list[tf.Tensor]:
        """Return this rank's variables, in the precision of the global ones."""
        return [
            tf.cast(plain_variable(v).read_value(), c.dtype)
            for v, c in zip(self.sources, self.copies)
        ]

    def _pseudogradients(self) -> list[Any]:
        """Return the global variables minus those of this rank; None where nothing trains.

        In the model's precision, with which the ranks began: what only the copies can express is
        not taken back.
        """
        return [
            (c if v.dtype == c.dtype else tf.cast(tf.cast(c, v.dtype), c.dtype)) - value
            if v.trainable
            else None
            for v, c, value in zip(self.sources, self.copies, self._values())
        ]

    def send(self, agree: Agreement) -> None:
        pseudogradients, steps = self._pseudogradients(), self._counters.steps
        agree()

        def reduce() -> Sequence[Any] | None:
            return self._reduce(pseudogradients, steps)

        if self._means and self.reducer.agreed:  # the first one compares settings, and is traced
            self._call = BackgroundCall(reduce, "gradcomp-local")
            return
        with self._waiting():
            means = reduce()
        if self._means:
            self._keep(means)
        else:
            self._reduced = means

    def _reduce(self, pseudogradients: Sequence[Any], steps: int) -> Sequence[Any] | None:
        try:
            means = self.reducer.reduce(pseudogradients)
        except NonFiniteGradientError as error:
            raise NonFiniteGradientError(
                f"variables of some rank are not finite at the exchange after {steps} local steps. "
                "Look for what made them so; with nonfinite='skip' all ranks go back to the global "
                "variables"
            ) from error
        return means if bool(self.reducer.finite) else None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_waited += time.perf_counter() - begin

    def settle(self) -> None:
        """Wait for the exchange that is on its way, if any; then all variables are complete.

        An error of it is raised where the result is due.
        """
        call, self._call = self._call, None
        if call is None:
            return
        with self._waiting():
            try:
                means = call.wait()
            except Exception as error:
                self._failure, self._sent = error, _FAILED
                return
        self._keep(means)

    def _keep(self, means: Sequence[Any] | None) -> None:
        """Keep what was reduced until it is applied."""
        self._sent = _NOT_FINITE if means is None else _MEANS
        for kept, mean in zip(self._means, means or ()):
            kept.assign(tf.zeros_like(kept) if mean is None else mean)

    def receive(self) -> Sequence[Any] | None:
        if not self._means:
            means, self._reduced = self._reduced, None
            return means
        self.settle()
        failure, self._failure = self._failure, None
        content, self._sent = self._sent, _NOTHING
        if content == _FAILED and failure is not None:  # and nothing was loaded since
            raise failure
        return [m.read_value() for m in self._means] if content == _MEANS else None

    def drop(self) -> None:
        self.settle()
        self._sent, self._failure = _NOTHING, None

    def forget(self) -> None:
        self.reducer.planner.reset_local(counts=False)

    def step(self, means: Sequence[Any]) -> None:
        """Step the outer optimizer by reduced pseudogradients; None stays where it is.

        Then the constraints of the model's variables hold for the global ones.
        """
        outer = self._outer
        rates = {dtype: tf.cast(self._rate, dtype) for dtype in {c.dtype for c in self.copies}}
        for place, (v, c, mean) in enumerate(zip(self.sources, self.copies, means)):
            if mean is None or not v.trainable:
                continue
            change = mean
            if self._velocities:
                velocity = self._velocities[place]
                velocity.assign(outer.momentum * velocity + mean)
                change = mean + outer.momentum * velocity if outer.nesterov else velocity
            c.assign(_constrained(v, c - rates[c.dtype] * change))
        self.averages.update()

    # -- global variables and those of the rank ------------------------------------------------

    def hand_out(self, blend: float) -> None:
        for v, c in zip(self.sources, self.copies):
            plain, mixed = plain_variable(v), c.read_value()
            if blend:
                value = tf.cast(plain.read_value(), c.dtype)
                mixed = _constrained(v, blend * value + (1.0 - blend) * mixed)
            plain.assign(tf.cast(mixed, plain.dtype))
        self.averages.hand_out()
        if not blend:
            self.moved = 0

    def take_copies(self, keeps_equal: bool) -> None:
        for v, c, value in zip(self.sources, self.copies, self._values()):
            c.assign(where_set(c, value, v.dtype) if keeps_equal else value)
        self.averages.take(keeps_equal)
        self.moved = 0

    def is_handed_out(self) -> bool:
        """Return True if this rank's variables are the global ones, in their own precision."""
        pairs = zip(self.sources, self.copies)
        return all(bool(tf.reduce_all(tf.cast(c, v.dtype) == plain_variable(v))) for v, c in pairs)


def _constrained(variable: Any, value: tf.Tensor) -> tf.Tensor:
    """Return a value as the constraint of a variable, if it has one, allows it."""
    constraint = getattr(variable, "constraint", None)
    return value if constraint is None else tf.cast(constraint(value), value.dtype)
