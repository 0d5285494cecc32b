"""Brings all ranks to one rank's variables, but for what belongs to each rank alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.tensorflow.engine import is_rank_local, plain_variable


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: Any = horovod.global_process_set,
    inplace: bool = False,
) -> Any:
    """Like Horovod's own; also takes Keras 3 variables, as in `optimizer.variables`.

    Left out is what a compressor has accumulated on this rank: copied to all ranks, the root's
    debt would be paid once a rank. Variables are matched by their place, so they may have other
    names on other ranks: a Keras model that was loaded names them differently.

    Args:
        variables: of TensorFlow or Keras, in the same order on all ranks; one that is given twice
            is sent once.
        root_rank: whose values count.
        process_set: the ranks that take part.
        inplace: as in Horovod.

    Returns:
        What Horovod's own returns: inside a graph the operation to run.
    """
    plain = {id(v): v for v in map(plain_variable, variables)}
    shared = [v for v in plain.values() if not is_rank_local(v)]
    if inplace or not tf.executing_eagerly():
        return horovod.broadcast_variables(shared, root_rank, process_set, inplace)

    def copy() -> None:
        for place, variable in enumerate(shared):
            narrow = variable.dtype == tf.bfloat16  # which no collective knows
            value = mpi_ops.broadcast(
                tf.cast(variable, tf.float32) if narrow else variable.read_value(),
                root_rank,
                name=f"gradcomp.broadcast.{place}",
                ignore_name_scope=True,
                process_set=process_set,
            )
            variable.assign(tf.cast(value, variable.dtype))

    tf.function(copy, autograph=False)()  # all at the same time
    return None
