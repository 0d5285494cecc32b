"""Dense means beside the exchanges of local steps: of gradients, and of variables not trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.runtime.local_rounds import DenseMeans
from hvd_gradcomp.runtime.program_runner import Participants
from hvd_gradcomp.tensorflow.interop.layers import named_layers, widened
from hvd_gradcomp.tensorflow.interop.variables import new_variable, plain_variable
from hvd_gradcomp.tensorflow.local.fragments import GraphExchange
from hvd_gradcomp.tensorflow.reduce.options import ExchangeOptions
from hvd_gradcomp.tensorflow.reduce.reducer import GraphReducer


def mean_reducer(name: str, layers: Sequence[Layer], process_set: Any) -> GraphReducer:
    """Return a reducer to dense means, which are NaN if a value of some rank is not finite."""
    return GraphReducer(
        layers,
        NoneCompressor(),
        ExchangeOptions(sparse_as_dense=True, process_set=process_set, nonfinite="propagate"),
        name=name,
        make_variable=new_variable,
    )


class BufferAverage(DenseMeans):
    """Averaging of variables that are not trained.

    Args:
        sources: the model's, in floating point.
        name: prefix of the collectives' names.
        process_set: the ranks.

    Attributes:
        exchange: of their values.
    """

    exchange: GraphExchange

    def __init__(self, sources: Sequence[Any], name: str, process_set: Any) -> None:
        self._sources = list(sources)
        layers = [widened(layer) for layer in named_layers(sources)]
        self.exchange = GraphExchange(mean_reducer(name, layers, process_set))

    def average(self) -> Sequence[Any] | None:
        reducer = self.exchange.reducer
        wide = [
            tf.cast(plain_variable(v), dtype)
            for v, (_, _, dtype) in zip(self._sources, reducer.layers)
        ]
        means = reducer.reduce(wide)
        return means if bool(reducer.finite) else None

    def apply(self, means: Sequence[Any]) -> None:
        for v, mean in zip(self._sources, means):
            v.assign(tf.cast(mean, v.dtype))


class GradientAverage:
    """Averaging of gradients over all ranks during warm-up, and then over those of a host.

    Args:
        layers: of the gradients.
        title: prefix of the collectives' names.
        process_set: all ranks.
        warms_up: there is a warm-up.
        has_neighbours: a host has several ranks, over which gradients are averaged later on.

    Attributes:
        warmup: the reducer of warm-up; None without one.
        has_neighbours: as given.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        title: str,
        process_set: Any,
        warms_up: bool,
        has_neighbours: bool,
    ) -> None:
        self._layers, self.has_neighbours = layers, has_neighbours
        self.warmup = mean_reducer(f"{title}.warmup", layers, process_set) if warms_up else None
        self._inside: GraphReducer | None = None
        self._before: dict[int, int] = {}  # by fragment, averages in a host before its exchange

    @property
    def is_used(self) -> bool:
        """Return True if gradients are averaged in some steps."""
        return self.has_neighbours or self.warmup is not None

    def connect(self, title: str, participants: Participants) -> None:
        """Average over the ranks of a host from now on, if there are several; all ranks agree to.

        Args:
            title: prefix of the collectives' names.
            participants: the ranks, and their hosts.
        """
        if self.has_neighbours and self._inside is None:
            inside = participants.groups.inside
            self._inside = mean_reducer(f"{title}.inside", self._layers, inside)

    def has_missed(self, number: int) -> bool:
        """Return True if none were averaged in a host since this was asked of a fragment before."""
        if self._inside is None:
            return False
        now = int(self._inside.steps)
        before, self._before[number] = self._before.get(number, 0), now
        return now <= before

    def reduce(self, gradients: Sequence[Any], warms_up: Any) -> list[Any]:
        """Return the means; gradients that are not averaged, as they are.

        Args:
            gradients: one for each layer, or None.
            warms_up: all ranks average; a boolean tensor where this is traced.
        """
        if tf.executing_eagerly():
            reducer = self.warmup if warms_up else self._inside
            return list(gradients) if reducer is None else reducer.reduce(gradients)
        dense = [None if g is None else tf.convert_to_tensor(g) for g in gradients]

        def means(reducer: GraphReducer | None) -> list[Any]:
            reduced = dense if reducer is None else reducer.reduce(dense)
            return [g for g in reduced if g is not None]

        if self.warmup is None:
            present = means(self._inside)
        else:
            present = tf.cond(warms_up, lambda: means(self.warmup), lambda: means(self._inside))
        rest = iter(present)
        return [None if g is None else next(rest) for g in dense]
