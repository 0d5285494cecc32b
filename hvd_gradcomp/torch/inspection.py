"""What looks into an exchange, whatever runs it: Horovod, or `DistributedDataParallel`.

Each takes what a user has at hand: the optimizer that `DistributedOptimizer` returned, the model
that `ddp.compress` was given, or the state that it returned. Nothing here needs Horovod.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.planning import description
from hvd_gradcomp.torch import checksums, exchange
from hvd_gradcomp.torch.bucketing import BucketPlanner

_exchanges: weakref.WeakKeyDictionary[Any, BucketPlanner] = weakref.WeakKeyDictionary()


def know(source: Any, run: BucketPlanner) -> None:
    """Lets an exchange be found by a model, or by a state; by the last that says so."""
    _exchanges[source] = run


def exchange_of(source: Any) -> BucketPlanner:
    """The exchange behind an optimizer, a model or a state.

    Raises:
        TypeError: nothing is exchanged by it.
    """
    found = getattr(source, "_gradcomp", None)
    if found is None:  # a compiled model is known by the one inside
        inside = getattr(source, "_orig_mod", source)
        hashable = isinstance(inside, torch.nn.Module) or type(inside).__hash__ is not None
        found = _exchanges.get(inside) if hashable and hasattr(inside, "__weakref__") else None
    if found is None:
        raise TypeError(
            f"{type(source).__name__} exchanges nothing compressed here: pass the optimizer "
            "that hvd_gradcomp.torch.DistributedOptimizer returned, on a rank of its process set; "
            "with DistributedDataParallel the model that ddp.compress was given, or the state that "
            "it returned. A copy of such a model is compressed no more"
        )
    return found


def compression_stats(source: Any) -> CompressionStats:
    """What this rank's exchanges have moved so far, measured; see `CompressionStats`.

    Args:
        source: the optimizer that `DistributedOptimizer` returned; with `DistributedDataParallel`
            the model, or the state that `ddp.compress` returned.

    Raises:
        TypeError: it is none of these.
    """
    return exchange_of(source).stats()


def describe(source: Any) -> str:
    """Returns a table of what each layer gets: compressor and bytes a step; nothing is sent.

    A script prints it, `print(describe(optimizer))`; a notebook shows it.

    Bytes are a rank's (with `hierarchical=True` a host's), of the layer's share of a payload; or of
    its elements, where payloads are summed among so many ranks. For compressors whose rule decides
    how much is sent, 4 bytes for each element that will be; what a method does not say is not
    known. With per-sample moments the table says how each layer's are found, as far as it has been
    used.

    Args:
        source: as in `compression_stats`.

    Raises:
        TypeError: it is none of these.
    """
    run = exchange_of(source)
    return description.describe(
        run.compressor, run.used, len(run.buckets), run.seat[1], run.moments_of_layers
    )


def retrain(source: Any) -> None:
    """Lets the compressor learn anew from the next step on: GradiVeQ's basis, LGC's autoencoder.

    To be called by all ranks at the same step. Other compressors have nothing to learn.

    Args:
        source: as in `compression_stats`.

    Raises:
        TypeError: it is none of these.
    """
    exchange.retrain(exchange_of(source))


def verify(source: Any) -> None:
    """Compares parameters and replicated state of the compressor over the ranks, bit by bit.

    To be called by all ranks that take part at the same place, between steps. Buffers, such as the
    running means of a batch normalization, are each rank's own and not looked at.

    Args:
        source: as in `compression_stats`.

    Raises:
        DivergedError: on all ranks, naming the first tensor that differs, and where.
        TypeError: it is none of these.
    """
    checksums.check(exchange_of(source))
