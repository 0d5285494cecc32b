"""Reducers by what they train: those of optimizers, and those of tapes, by their sources."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.tensorflow.comm.horovod import takes_part
from hvd_gradcomp.tensorflow.interop.layers import named_layers
from hvd_gradcomp.tensorflow.interop.moving_averages import inner_optimizers
from hvd_gradcomp.tensorflow.interop.variables import plain_variable
from hvd_gradcomp.tensorflow.reduce.options import ExchangeOptions
from hvd_gradcomp.tensorflow.reduce.reducer import TITLES, GraphReducer

if TYPE_CHECKING:
    from keras.optimizers import Optimizer


class _Key(NamedTuple):
    """Identity of a tape's reducer."""

    sources: tuple[Any, ...]
    compressor: Compressor
    process_set: int
    options: ExchangeOptions


_known: dict[_Key, GraphReducer | None] = {}  # None on ranks that are not in the process set


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
    if key in _known:
        return _known[key]
    name = TITLES.take()  # taken on all ranks, or later names would differ
    reducer = None
    if takes_part(process_set):
        layers, host = named_layers(sources, names), "hvd.DistributedGradientTape"
        reducer = GraphReducer(layers, compressor, options, name=name, trained=sources, host=host)
    _known[key] = reducer
    for source in map(plain_variable, sources):
        if isinstance(source, tf.Variable):
            weakref.finalize(source, _known.pop, key, None).atexit = False
    return reducer


def _identities(sources: Sequence[Any]) -> tuple[Any, ...]:
    plain = map(plain_variable, sources)
    return tuple(id(p) if isinstance(p, tf.Variable) else (p.shape, p.dtype) for p in plain)


def reducer_of_variables(variables: Sequence[Any]) -> GraphReducer | None:
    """Return the newest reducer whose sources are these variables, or None."""
    wanted = _identities(variables)
    reducers = [reducer for key, reducer in _known.items() if key.sources == wanted]
    return reducers[-1] if reducers else None


def reducers_over(variables: Sequence[Any]) -> list[tuple[GraphReducer, list[int]]]:
    """Return the reducers whose sources are all among these variables, and the sources' places."""
    places = {id(plain_variable(v)): place for place, v in enumerate(variables)}
    return [
        (reducer, [places[i] for i in key.sources])
        for key, reducer in _known.items()
        if reducer is not None and all(i in places for i in key.sources)
    ]


def tape_reducers() -> list[GraphReducer]:
    """Return the reducers of all tapes, over any variables."""
    return [reducer for reducer in _known.values() if reducer is not None]


def drop_reducers(reducers: Iterable[GraphReducer]) -> None:
    """Drop reducers as if nobody had asked for them."""
    dropped = set(reducers)
    for key in [key for key, reducer in _known.items() if reducer in dropped]:
        del _known[key]


def optimizer_of(model: Any) -> Any:
    """Return the optimizer that a model was compiled with, built."""
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return model.optimizer


def exchanges_in(optimizer: Optimizer | None) -> str:
    """Return what in an optimizer exchanges gradients, as the user knows it; "" if nothing does."""
    for each in inner_optimizers(optimizer):
        if hasattr(each, "_gradcomp"):
            return str(each.host)
        if hasattr(each, "_allreduce_grads"):
            return "stock Horovod's DistributedOptimizer"
    return ""


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
