"""Checksums of what must be equal on all ranks, computed on the device; eager and in graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.monitoring import verify
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.tensorflow.comm import horovod as comm
from hvd_gradcomp.tensorflow.interop.variables import plain_variable
from hvd_gradcomp.tensorflow.reduce.reducer import GraphReducer


def check(reducer: GraphReducer, sources: Sequence[Any]) -> None:
    """Compare variables and replicated state over the ranks of a reducer.

    Args:
        reducer: the reducer.
        sources: the variables that it trains, in the order of its layers.

    Raises:
        DivergedError: on all ranks, if they differ. In a graph the error is TensorFlow's
            `UnknownError`, with the same message in it.
    """
    compared = [
        (f"parameter {name}", plain_variable(source))
        for (name, _, _), source in zip(reducer.layers, sources)
    ]
    compared += reducer.planner.replicated
    own_digests = digests_of(reducer.ops, [x for _, x in compared])
    process_set = reducer.process_set
    with comm.explained("hvd.verify"):
        digests = mpi_ops.allgather(
            own_digests if reducer.participants.place else own_digests[None],
            name=f"{reducer.name}.verify",
            ignore_name_scope=True,
            process_set=process_set,
        )
    names = [name for name, _ in compared]
    ranks = process_set.ranks or range(process_set.size())

    def compare(digests: tf.Tensor, steps: tf.Tensor) -> None:
        rows = digests.numpy().tolist()
        if reducer.participants.place is None:
            verify.compare(names, rows, ranks, int(steps))
            return
        # A rank has the state of the buckets that it leads.
        parameters, rest = names[: len(reducer.layers)], iter(rows)
        rows_of_ranks = [
            {name: next(rest) for name in (*parameters, *titles)} for titles in reducer.titles
        ]
        known = list(dict.fromkeys(name for row in rows_of_ranks for name in row))
        digests_by_rank = [[row.get(name) for name in known] for row in rows_of_ranks]
        verify.compare(known, digests_by_rank, ranks, int(steps))

    if tf.executing_eagerly():
        compare(digests, reducer.steps)
    else:
        tf.py_function(compare, [digests, reducer.steps], [])


def digests_of(ops: TensorFlowOps, tensors: Sequence[Any]) -> tf.Tensor:
    """Return a digest of each tensor's bits, as an int64 vector."""
    weights = verify.weights(ops)
    return tf.stack([verify.digest(ops, _bytes(x), weights) for x in tensors])


def _bytes(x: Any) -> tf.Tensor:
    flat = tf.reshape(x, (-1,))
    return flat if flat.dtype == tf.uint8 else tf.reshape(tf.bitcast(flat, tf.uint8), (-1,))
