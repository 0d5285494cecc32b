"""Statistics and verification of an exchange, over Horovod or `DistributedDataParallel`.

Each function takes the optimizer that `DistributedOptimizer`, `LocalSteps` or `MomentumExchange`
returned, the model that `ddp.compress` was given, or the state that it returned. Nothing here needs
Horovod.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.planning import description
from hvd_gradcomp.torch.interop.inference import outside_inference
from hvd_gradcomp.torch.local.wrapped_optimizer import WrappedOptimizer
from hvd_gradcomp.torch.reduce import checksums
from hvd_gradcomp.torch.reduce.reducer import Reducer

_reducers: weakref.WeakKeyDictionary[Any, Reducer] = weakref.WeakKeyDictionary()


def know(source: Any, reducer: Reducer) -> None:
    """Register the reducer of an optimizer, a model or a state; the last registration counts."""
    _reducers[source] = reducer


def reducer_of(source: Any) -> Reducer:
    """Return the reducer of an optimizer, a model or a state.

    Raises:
        TypeError: it has none.
    """
    inside = getattr(source, "_orig_mod", source)  # a compiled model is registered by its inner one
    hashable = isinstance(inside, torch.nn.Module) or type(inside).__hash__ is not None
    reducer = _reducers.get(inside) if hashable and hasattr(inside, "__weakref__") else None
    if reducer is None:
        raise TypeError(
            f"{type(source).__name__} exchanges nothing compressed here: pass the optimizer "
            "that hvd_gradcomp.torch.DistributedOptimizer returned, on a rank of its process set; "
            "with DistributedDataParallel the model that ddp.compress was given, or the state that "
            "it returned. A copy of such a model is compressed no more"
        )
    return reducer


def reducers_of(source: Any) -> list[Reducer]:
    """Return all reducers of a source: with local steps one for each fragment.

    Raises:
        TypeError: it has none.
    """
    if isinstance(source, WrappedOptimizer):
        return source.reducers
    return [reducer_of(source)]


def stats_of(source: Any) -> Callable[[], CompressionStats]:
    """Return what reads the statistics of a source.

    Raises:
        TypeError: it has none.
    """
    return source.stats if isinstance(source, WrappedOptimizer) else reducer_of(source).stats


def compression_stats(source: Any) -> CompressionStats:
    """Return the measured traffic of this rank's exchanges so far; see `CompressionStats`.

    Args:
        source: the optimizer that `DistributedOptimizer`, `MomentumExchange` or `LocalSteps`
            returned, whose `steps` are then local ones; with `DistributedDataParallel` the model,
            or the state that `ddp.compress` returned.

    Raises:
        TypeError: it is none of these.
    """
    return stats_of(source)()


def describe(source: Any) -> str:
    """Return a table of each layer's compressor and bytes per exchange, without communication.

    A script prints it, `print(describe(optimizer))`; a notebook shows it.

    Bytes are per rank (with `hierarchical=True` per host): the layer's share of a payload; or of
    its elements, if payloads are summed among so many ranks. If the compressor's rule decides how
    much is sent, 4 bytes for each element expected to be sent; unknown if the method does not say.
    With per-sample moments the table shows how each layer's are found, once it has been used.

    Args:
        source: as in `compression_stats`.

    Raises:
        TypeError: it is none of these.
    """
    return description.Table("\n".join(map(_described, reducers_of(source))))


def _described(reducer: Reducer) -> str:
    planner, (_, ranks) = reducer.planner, reducer.participants.rank_and_size
    return description.describe(
        planner.compressor, planner.used, len(planner.buckets), ranks, planner.moments_of_layers
    )


@outside_inference()
def retrain(source: Any) -> None:
    """Retrain the compressor from the next step on: GradiVeQ's basis, LGC's autoencoder.

    All ranks call it at the same step. For other compressors it is a no-op.

    Args:
        source: as in `compression_stats`.

    Raises:
        TypeError: it is none of these.
    """
    for reducer in reducers_of(source):
        reducer.retrain()


@outside_inference()
def verify(source: Any) -> None:
    """Compare parameters and the compressor's replicated state over the ranks, bit by bit.

    All ranks that take part call it at the same place, between steps. Buffers, such as the running
    means of a batch normalization, are each rank's own and are not compared. With local steps the
    global parameters are compared.

    Args:
        source: as in `compression_stats`.

    Raises:
        DivergedError: on all ranks, naming the first tensor that differs, and where.
        TypeError: it is none of these.
    """
    for reducer in reducers_of(source):
        checksums.check(reducer)
