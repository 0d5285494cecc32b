"""Statistics and control of the exchanges of an optimizer, a tape or a list of variables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import tensorflow as tf

from hvd_gradcomp.method.compressor import with_leaves
from hvd_gradcomp.monitoring.stats import CompressionStats, combined
from hvd_gradcomp.planning import description
from hvd_gradcomp.runtime import stats as runtime_stats
from hvd_gradcomp.tensorflow.local_steps import LocalSteps
from hvd_gradcomp.tensorflow.reduce import checksums
from hvd_gradcomp.tensorflow.reduce.buckets import bytes_of
from hvd_gradcomp.tensorflow.reduce.reducer import GraphReducer
from hvd_gradcomp.tensorflow.reduce.registry import distributed_in, reducer_of


def compression_stats(source: Any) -> CompressionStats:
    """Return this rank's traffic so far, as measured; see `CompressionStats`.

    Args:
        source: a distributed optimizer or tape of this package, or the list of variables that
            tapes (or `reduce_gradients`) were asked about; or a `LocalSteps`, whose `steps` are
            local ones.

    Raises:
        TypeError: nothing was exchanged for it.
    """
    return reader_of(source)()


def reducers_of(source: Any) -> list[GraphReducer]:
    """Return all reducers of a source: with local steps one for each fragment.

    Raises:
        TypeError: it has none.
    """
    return source.reducers if isinstance(source, LocalSteps) else [reducer_of(source)]


def reader_of(source: Any) -> Callable[[], CompressionStats]:
    """Return what reads the statistics of a source.

    Raises:
        TypeError: it has none.
    """
    if isinstance(source, LocalSteps):
        return partial(_stats_of_local_steps, source)
    return partial(stats_of, reducer_of(source))


def _stats_of_local_steps(local: LocalSteps) -> CompressionStats:
    parts, beside = map(stats_of, local.reducers), map(stats_of, local.others)
    stats = combined([*parts], [*beside], local.steps_made, local.memory)
    return replace(stats, seconds_waited=local.seconds_waited)


def stats_of(reducer: GraphReducer) -> CompressionStats:
    """Return a reducer's totals since the start; read from the device."""
    planner, local = reducer.planner, reducer.counters.local
    gathered, leads = reducer.rows.gathered, reducer.participants.leads
    used = [bucket for bucket in planner.buckets if not gathered.intersection(bucket.places)]
    planned = {name for bucket in used for name in bucket.layout.names}
    led = [bucket for bucket in used if leads(bucket.leader)]
    of_others = planned - {name for bucket in led for name in bucket.layout.names}
    names, norm = [name for name, _, _ in reducer.layers], reducer.exchange.norm
    snapshot = 0 if planner.snapshot is None else planner.snapshot.nbytes
    memory = {"state": bytes_of(v for b in led for v in b.variables), "rollback": snapshot}
    unbucketed = zip(names, local["unbucketed"].numpy().tolist())
    steps = int(local["exchanges"])
    return runtime_stats.stats(
        [
            runtime_stats.BucketTotals(
                bucket.layout,
                bucket.compressor,
                with_leaves(bucket.template, bucket.variables),
                steps,
            )
            for bucket in led
        ],
        runtime_stats.TrafficCounts(**{name: int(local[name]) for name in runtime_stats.TRAFFIC}),
        steps=steps,
        order=names,
        beside={name: sent for name, sent in unbucketed if name not in of_others},
        unplanned={name: prod(shape) for name, shape, _ in reducer.layers if name not in planned},
        norm=lambda x: float(tf.norm(x)),
        gradient_norms=[] if norm is None else [norm.read()],
        memory={purpose: size for purpose, size in memory.items() if size},
    )


def describe(source: Any) -> str:
    """Return a table of each layer's compressor and bytes per step; nothing is sent.

    A script prints it, `print(hvd.describe(optimizer))`; a notebook shows it.

    Bytes are a rank's (with `hierarchical=True` a host's): the layer's share of a payload, or its
    elements, if payloads are summed among so many ranks. For compressors whose rule decides how
    much is sent, 4 bytes for each element that is sent.

    Args:
        source: as in `compression_stats`; an optimizer has to be built.

    Raises:
        TypeError: as in `compression_stats`.
    """
    return description.Table("\n".join(map(_described, reducers_of(source))))


def _described(reducer: GraphReducer) -> str:
    ranks = reducer.participants.rank_and_size[1]
    return description.describe(
        reducer.compressor, reducer.layers, len(reducer.buckets), ranks, filters_last=True
    )


def retrain(source: Any) -> None:
    """Let the compressor learn anew from the next step on: GradiVeQ's basis, LGC's autoencoder.

    All ranks call it at the same step. Other compressors have nothing to learn.

    Args:
        source: as in `compression_stats`.

    Raises:
        TypeError: as in `compression_stats`.
    """
    for reducer in reducers_of(source):
        reducer.retrain()


@tf.autograph.experimental.do_not_convert
def discard_step(source: Any) -> None:
    """Discard the last exchange, of a step that is skipped, as if it had not happened.

    For guards such as "the norm of the reduced gradients is far too large": the compressor's state
    is rolled back, bit-exact, so that a bad batch does not come back with later gradients. The
    exchange is counted in `compression_stats(...).skipped`. Weights and the optimizer's own
    variables stay as they are: do not apply the gradients.

    All ranks call it, or none: otherwise the next exchange raises an error on all of them. It
    works eagerly and in a `tf.function`, also in a branch there::

        gradients = tape.gradient(loss, variables)
        if tf.linalg.global_norm(gradients) > limit:
            hvd.discard_step(tape)
        else:
            optimizer.apply_gradients(zip(gradients, variables))

    Args:
        source: as in `compression_stats`.

    Raises:
        RuntimeError: it was made with `rollback=False`, which is the default of a Keras optimizer;
            or there is no exchange that was not rolled back yet (in a graph: TensorFlow's
            `InvalidArgumentError`, with the same message).
        TypeError: as in `compression_stats`.
    """
    reducer_of(source).rollback()


def verify(source: Any) -> None:
    """Compare variables and replicated compressor state over the ranks, bit by bit.

    All ranks of the process set call it at the same place, between steps, eager or in a graph.
    Variables that are not trained, such as the running means of a batch normalization, are each
    rank's own and are not compared. With local steps the global variables are compared.

    Args:
        source: as in `compression_stats`.

    Raises:
        DivergedError: on all ranks, naming the first tensor that differs, and where. In a graph it
            is TensorFlow's `UnknownError`, with the same message in it.
        TypeError: as in `compression_stats`.
    """
    if isinstance(source, LocalSteps):
        for of_fragment, copies in zip(source.reducers, source.global_variables):
            checksums.check(of_fragment, copies)
        return
    reducer, variables = reducer_of(source), source
    if not isinstance(source, (list, tuple)):
        variables = distributed_in(source).exchanged_variables
    checksums.check(reducer, variables)
