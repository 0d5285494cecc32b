"""Moving averages that Keras's optimizers keep of what they train (`use_ema=True`).

With local steps a rank's optimizer averages the variables of that rank alone. What counts is an
average of the global variables, which is equal on all ranks without being exchanged.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from hvd_gradcomp.runtime.live_objects import live_instances
from hvd_gradcomp.tensorflow.interop.variables import new_variable, plain_variable, where_set

if TYPE_CHECKING:
    from keras.optimizers import Optimizer


class MovingAverage(NamedTuple):
    """Moving average of one variable.

    Attributes:
        value: the optimizer's variable that has it.
        momentum: the weight of the past in each step.
        optimizer: the optimizer that keeps it.
    """

    value: tf.Variable
    momentum: float
    optimizer: Optimizer


def inner_optimizers(optimizer: Optimizer | None) -> Iterator[Optimizer]:
    """Iterate over an optimizer and those inside it: of a loss scaler, of a `MultiOptimizer`."""
    if optimizer is None:
        return
    yield optimizer
    for inner in (
        getattr(optimizer, "inner_optimizer", None),
        *getattr(optimizer, "optimizers", ()),
    ):
        yield from inner_optimizers(inner)


def rate_of(optimizer: Optimizer) -> float:
    """Return an optimizer's learning rate, the largest of those inside of it."""
    rates = [getattr(each, "learning_rate", None) for each in inner_optimizers(optimizer)]
    return max(float(rate) for rate in rates if rate is not None)


def averages_of(optimizer: Optimizer | None) -> dict[int, MovingAverage]:
    """Return the moving averages that an optimizer keeps, by the `id` of TensorFlow's variable."""
    return {
        id(plain_variable(v)): MovingAverage(plain_variable(average), each.ema_momentum, each)
        for each in inner_optimizers(optimizer)
        if getattr(each, "use_ema", False) and each.built
        for v, average in zip(each._trainable_variables, each._model_variables_moving_average)
        if average is not None
    }


class UnknownAverages:
    """Search for an optimizer that keeps moving averages and that local steps were not told of.

    Variables do not know their optimizers, so all live objects are searched, once; an optimizer
    counts if it has stepped since.

    Args:
        variables: that are trained.
    """

    def __init__(self, variables: Sequence[object]) -> None:
        wanted = {id(plain_variable(v)) for v in variables}
        self._optimizers = [
            (weakref.ref(each), int(each.iterations))
            for each in _live_optimizers()
            if not wanted.isdisjoint(averages_of(each))
        ]

    def require_none(self) -> None:
        """Require that no such optimizer has stepped.

        Raises:
            ValueError: one has.
        """
        for ref, before in self._optimizers:
            optimizer = ref()
            if optimizer is not None and int(optimizer.iterations) != before:
                raise ValueError(
                    f"{optimizer.name} keeps moving averages of these variables, use_ema=True, and "
                    "each rank would end with its own: give LocalSteps(..., optimizer=...), which "
                    "makes them averages of the global variables"
                )


def _live_optimizers() -> Iterator[Optimizer]:
    keras = sys.modules.get("keras")
    return iter(()) if keras is None else live_instances(keras.optimizers.Optimizer)


class GlobalAverages:
    """Moving averages of the global variables of a fragment.

    Each exchange counts as a whole round of steps, for the schedule does so too.

    Args:
        sources: the model's variables.
        copies: the global variables, in the same order.
        averages: of the inner optimizer, by variable.
        every: steps of a round.

    Attributes:
        variables: the averages after the last exchange, in the precision of the global variables.
    """

    def __init__(
        self,
        sources: Sequence[object],
        copies: Sequence[tf.Variable],
        averages: dict[int, MovingAverage],
        every: int,
    ) -> None:
        places = [(averages.get(id(plain_variable(v))), c) for v, c in zip(sources, copies)]
        self._pairs = [(average, c) for average, c in places if average is not None]
        self._every = every
        self.variables = [
            new_variable("gradcomp_average", tf.zeros_like(c)) for _, c in self._pairs
        ]

    def take(self, keeps_equal: bool) -> None:
        """Begin with the optimizer's averages, or with the global variables before its first step.

        Args:
            keeps_equal: leave elements that the optimizer has as they were handed out.
        """
        for kept, (average, c) in zip(self.variables, self._pairs):
            if int(average.optimizer.iterations) == 0:
                kept.assign(c)
                continue
            value = tf.cast(average.value, kept.dtype)
            kept.assign(where_set(kept, value, average.value.dtype) if keeps_equal else value)

    def update(self) -> None:
        """Add the global variables after an outer step."""
        for kept, (average, c) in zip(self.variables, self._pairs):
            past = float(average.momentum) ** self._every
            kept.assign(past * kept + (1.0 - past) * c)

    def hand_out(self) -> None:
        """Set the optimizer's averages to these."""
        for kept, (average, _) in zip(self.variables, self._pairs):
            average.value.assign(tf.cast(kept, average.value.dtype))
