"""Reducers by what they train: those of optimizers, and those of tapes, by their sources."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvd_gradcomp.core.compressor import Compressor
from hvd_gradcomp.tensorflow.comm import takes_part
from hvd_gradcomp.tensorflow.layers import named_layers
from hvd_gradcomp.tensorflow.options import ExchangeOptions
from hvd_gradcomp.tensorflow.reducer import TITLES, GraphReducer
from hvd_gradcomp.tensorflow.variables import plain_variable


class _Key(NamedTuple):
    """Identity of a tape's reducer."""

    sources: tuple[Any, ...]
    compressor: Compressor
    process_set: int
    options: ExchangeOptions


class _Entry(NamedTuple):
    """Reducer of some sources; None on a rank that is not in the process set."""

    reducer: GraphReducer | None
    sources: list[weakref.ref[tf.Variable]]

    @property
    def is_live(self) -> bool:
        """Return True if all of its variables still exist."""
        return all(ref() is not None for ref in self.sources)


_known: dict[_Key, _Entry] = {}


def reducer_for(
    sources: Sequence[Any],
    compressor: Compressor,
    options: ExchangeOptions,
    names: Sequence[str | None] | None = None,
) -> GraphReducer | None:
    """Return the reducer of these sources and options, created when they are first seen.

    None on a rank that is not in the process set.

    Raises:
        RuntimeError: within a graph of TensorFlow 1.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            "gradients are computed in a graph of TensorFlow 1, which a session runs: nothing "
            "would initialize the state of compressors there. Compute them eagerly or in a "
            "tf.function, or use stock Horovod"
        )
    process_set = options.process_set
    key = _Key(_identities(sources), compressor, process_set.process_set_id, options)
    if key in _known and _known[key].is_live:
        return _known[key].reducer
    drop_stale()
    plain = [plain_variable(source) for source in sources]
    name = TITLES.take()  # taken on all ranks, or later names would differ
    reducer = None
    if takes_part(process_set):
        reducer = GraphReducer(named_layers(sources, names), compressor, options, name=name)
    _known[key] = _Entry(reducer, [weakref.ref(p) for p in plain if isinstance(p, tf.Variable)])
    return reducer


def _identities(sources: Sequence[Any]) -> tuple[Any, ...]:
    plain = map(plain_variable, sources)
    return tuple(id(p) if isinstance(p, tf.Variable) else (p.shape, p.dtype) for p in plain)


def reducer_of_variables(variables: Sequence[Any]) -> GraphReducer | None:
    """Return the newest reducer whose sources are these variables, or None."""
    wanted = _identities(variables)
    found = [entry.reducer for key, entry in _known.items() if key.sources == wanted]
    return found[-1] if found else None


def reducers_over(variables: Sequence[Any]) -> list[tuple[GraphReducer, list[int]]]:
    """Return the reducers whose sources are all among these variables, and the sources' places."""
    places = {id(plain_variable(v)): place for place, v in enumerate(variables)}
    return [
        (entry.reducer, [places[i] for i in key.sources])
        for key, entry in _known.items()
        if entry.reducer is not None and entry.is_live and all(i in places for i in key.sources)
    ]


def drop_stale() -> None:
    """Drop the reducers of variables that no longer exist."""
    for stale in [key for key, entry in _known.items() if not entry.is_live]:
        del _known[stale]


def drop_reducers(reducers: Iterable[GraphReducer]) -> None:
    """Drop reducers as if nobody had asked for them."""
    dropped = set(reducers)
    for key in [key for key, entry in _known.items() if entry.reducer in dropped]:
        del _known[key]


def optimizer_of(model: Any) -> Any:
    """Return the optimizer that a model was compiled with, built."""
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return model.optimizer


def distributed_in(source: Any) -> Any:
    """Return the object that exchanges: the source, or the optimizer inside a loss scaler."""
    if hasattr(source, "_gradcomp"):
        return source
    return getattr(source, "inner_optimizer", source)


def reducer_in(source: Any) -> GraphReducer | None:
    """Return the reducer of an optimizer or a tape; None if it has none."""
    return getattr(distributed_in(source), "_gradcomp", None)


def reducer_of(source: Any) -> GraphReducer:
    """Return the reducer of an optimizer, a tape or a list of variables.

    Raises:
        TypeError: nothing is known to be exchanged for it.
    """
    reducer = reducer_in(source)
    if reducer is None and isinstance(source, (list, tuple)):
        reducer = reducer_of_variables(source)
    if reducer is None:
        raise TypeError(
            f"no exchange is known for {type(source).__name__}: pass the optimizer or tape that "
            "hvd_gradcomp.tensorflow made, or the list of variables, after the first step"
        )
    return reducer
