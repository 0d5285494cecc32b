"""Detection of a second exchange of the same variables in one step.

Gradients that a tape has reduced and an optimizer reduces again, or variables that local steps
exchange although their gradients were, cost both and are what nobody meant.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.tensorflow.interop.variables import plain_variable
from hvd_gradcomp.tensorflow.reduce.reducer import GraphReducer, living
from hvd_gradcomp.tensorflow.reduce.registry import tape_reducers


class RivalExchanges:
    """Exchanges of gradients of some variables, beside the one that asks.

    Eagerly, and where another graph has run, they are known by their counts of exchanges; in a
    graph that is traced, by what was traced there before.

    Args:
        variables: of TensorFlow or Keras.
        of_tapes: count the exchanges of tapes alone. An optimizer asks so: what a tape has reduced
            may be the gradients it gets, while another optimizer over the same variables has
            gradients of its own loss.
    """

    def __init__(self, variables: Sequence[Any], of_tapes: bool = False) -> None:
        self._ids = frozenset(id(plain_variable(v)) for v in variables)
        self._of_tapes = of_tapes
        self._counts: weakref.WeakKeyDictionary[GraphReducer, int] = weakref.WeakKeyDictionary()
        self.forget()

    def forget(self) -> None:
        """Take what was exchanged so far as another phase of the training."""
        for reducer in self._all():
            self._counts[reducer] = int(reducer.steps)

    def find(self) -> GraphReducer | None:
        """Return one that has exchanged since the last call, or in the graph that is traced."""
        if not tf.executing_eagerly():
            graphs = list(_graphs())
            return next((r for r in self._all() if r.traced_in() in graphs), None)
        seen = None
        for reducer in self._all():
            count = int(reducer.steps)
            if count != self._counts.get(reducer, 0):
                self._counts[reducer], seen = count, reducer
        return seen

    def _all(self) -> Iterator[GraphReducer]:
        for reducer in tape_reducers() if self._of_tapes else list(living):
            if not self._ids.isdisjoint(reducer.sources()):
                yield reducer


def _graphs() -> Iterator[Any]:
    """Iterate over the graph being traced, and those around it."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph.building_function:
        yield graph
        graph = graph.outer_graph
