"""Parts of a model that local steps exchange, and the counts of their rounds.

The outer optimizer is its formula, in variables that a checkpoint keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvd_gradcomp.algorithms.local_steps import OuterSGD
from hvd_gradcomp.tensorflow.moving_averages import GlobalAverages, MovingAverage
from hvd_gradcomp.tensorflow.reducer import GraphReducer
from hvd_gradcomp.tensorflow.variables import new_variable, plain_variable, where_set


class RoundCounters:
    """Counts of steps and rounds, in variables.

    Args:
        fragments: their number.

    Attributes:
        steps: local steps so far.
        clock: steps that the schedule counts.
        rounds: how often pseudogradients of the whole model were applied.
        moved: by fragment, steps since this rank had the global variables.
        sent: by fragment, what is on its way.
    """

    def __init__(self, fragments: int) -> None:
        zero, zeros = tf.constant(0, tf.int64), tf.zeros((fragments,), tf.int64)
        self.steps = new_variable("gradcomp_local_steps", zero)
        self.clock = new_variable("gradcomp_local_clock", zero)
        self.rounds = new_variable("gradcomp_local_rounds", zero)
        self.moved = new_variable("gradcomp_local_moved", zeros)
        self.sent = new_variable("gradcomp_local_sent", zeros)

    @property
    def of_steps(self) -> tuple[tf.Variable, ...]:
        """Return those that differ between ranks which make different numbers of steps."""
        return self.steps, self.clock, self.moved

    @property
    def is_exchanged(self) -> bool:
        """Return True if no fragment has moved, and nothing is on its way."""
        return not (bool(tf.reduce_any(self.moved > 0)) or bool(tf.reduce_any(self.sent > 0)))


@dataclass(frozen=True, eq=False)
class Fragment:
    """Variables that are exchanged together.

    Attributes:
        sources: the model's, of TensorFlow or Keras.
        reducer: of their pseudogradients.
        copies: the global variables, in float32 if the model's are narrower.
        velocities: of the outer optimizer; none without momentum.
        means: reduced pseudogradients that are yet to be applied; none without a delay.
        averages: moving averages of the global variables, where the inner optimizer keeps such.
    """

    sources: list[Any]
    reducer: GraphReducer
    copies: list[tf.Variable]
    velocities: list[tf.Variable]
    means: list[tf.Variable]
    averages: GlobalAverages

    @classmethod
    def create(
        cls,
        sources: list[Any],
        reducer: GraphReducer,
        has_momentum: bool,
        is_delayed: bool,
        averages: dict[int, MovingAverage],
        every: int,
    ) -> Fragment:
        """Create a fragment's variables; the global ones are those of this rank.

        Args:
            sources: the model's.
            reducer: of the layers of the global variables.
            has_momentum: the outer optimizer has momentum.
            is_delayed: what is reduced is applied later.
            averages: those that the inner optimizer keeps.
            every: steps of a round.
        """
        zeros = [tf.zeros(shape, dtype) for _, shape, dtype in reducer.layers]

        def created(name: str, needed: bool = True) -> list[tf.Variable]:
            return [new_variable(f"gradcomp_{name}", zero) for zero in zeros if needed]

        copies = created("global")
        velocities, means = created("velocity", has_momentum), created("mean", is_delayed)
        kept = GlobalAverages(sources, copies, averages, every)
        fragment = cls(sources, reducer, copies, velocities, means, kept)
        fragment.take_copies()
        return fragment

    @property
    def variables(self) -> list[tf.Variable]:
        """Return the variables that a checkpoint keeps, without the reducer's."""
        return [*self.shared, *self.velocities, *self.means]

    @property
    def shared(self) -> list[tf.Variable]:
        """Return the variables that all ranks compare before an exchange."""
        return [*self.copies, *self.averages.variables]

    def values(self) -> list[tf.Tensor]:
        """Return this rank's variables, in the precision of the global ones."""
        return [
            tf.cast(plain_variable(v).read_value(), c.dtype)
            for v, c in zip(self.sources, self.copies)
        ]

    def pseudogradients(self) -> list[Any]:
        """Return the global variables minus those of this rank; None where nothing trains.

        In the model's precision, with which the ranks began: what only the copies can express is
        not taken back.
        """
        return [
            tf.cast(tf.cast(c, v.dtype), c.dtype) - value if v.trainable else None
            for v, c, value in zip(self.sources, self.copies, self.values())
        ]

    def take_copies(self, keeps_equal: bool = False) -> None:
        """Set the global variables to those of this rank.

        Args:
            keeps_equal: leave elements that this rank has as they were handed out: rounded to the
                precision of the model, they would lose what the global variables know beyond it.
        """
        for v, c, value in zip(self.sources, self.copies, self.values()):
            c.assign(where_set(c, value, v.dtype) if keeps_equal else value)
        self.averages.take(keeps_equal)

    def hand_out(self, blend: float) -> None:
        """Set this rank's variables to the global ones, blended with its own."""
        for v, c, value in zip(self.sources, self.copies, self.values()):
            mixed = _constrained(v, blend * value + (1.0 - blend) * c) if blend else c
            v.assign(tf.cast(mixed, plain_variable(v).dtype))
        self.averages.hand_out()

    def is_handed_out(self) -> bool:
        """Return True if this rank's variables are the global ones, in their own precision."""
        pairs = zip(self.sources, self.copies)
        return all(bool(tf.reduce_all(tf.cast(c, v.dtype) == plain_variable(v))) for v, c in pairs)

    def keep_means(self, means: Sequence[Any]) -> None:
        """Keep reduced pseudogradients until they are applied."""
        for kept, mean in zip(self.means, means):
            kept.assign(tf.zeros_like(kept) if mean is None else mean)

    def step(self, means: Sequence[Any], outer: OuterSGD, rate: tf.Tensor) -> None:
        """Step the outer optimizer by reduced pseudogradients; None stays where it is.

        Then the constraints of the model's variables hold for the global ones.
        """
        for place, (v, c, mean) in enumerate(zip(self.sources, self.copies, means)):
            if mean is None or not v.trainable:
                continue
            change = mean
            if self.velocities:
                velocity = self.velocities[place]
                velocity.assign(outer.momentum * velocity + mean)
                change = mean + outer.momentum * velocity if outer.nesterov else velocity
            c.assign(_constrained(v, c - tf.cast(rate, c.dtype) * change))
        self.averages.update()


def _constrained(variable: Any, value: tf.Tensor) -> tf.Tensor:
    """Return a value as the constraint of a variable, if it has one, allows it."""
    constraint = getattr(variable, "constraint", None)
    return value if constraint is None else tf.cast(constraint(value), value.dtype)
