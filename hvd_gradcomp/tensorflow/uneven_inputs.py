"""`hvd.join()`, for ranks that have run out of batches."""

from __future__ import annotations

import gc
from concurrent.futures import FIRST_EXCEPTION, wait

import horovod.tensorflow as horovod
import tensorflow as tf

from hvd_gradcomp.tensorflow import checkpoint_barrier, tape
from hvd_gradcomp.tensorflow.engine import explained, gather_objects, living


def join() -> tf.Tensor:
    """Wait until all ranks have run out of batches, and take part in their exchanges until then.

    All ranks call it, at the end of an epoch of a custom loop; for `fit` use `hvd.even_batches`. A
    rank that has joined contributes gradients of zero, and its compressor's residual; means stay
    those over all ranks. It works with every compressor, and with `hierarchical=True`. As with
    Horovod's own, ranks that joined earlier have missed updates: broadcast the variables of the
    rank that is returned, with `hvd.broadcast_variables`.

    Until all have joined, the others call no collectives but those of their tapes and optimizers:
    any other, such as `hvd.allreduce` of a metric, is a DeadlockError on all ranks. If gradients
    are only summed (no compression, half precision) Horovod's own join waits, which adds zeros to
    any allreduce. Each rank must have made a step with each tape or optimizer before.

    Returns:
        The rank that joined last, an int32 scalar; with a compressor, the highest of several.

    Raises:
        DeadlockError: on all ranks, if a rank waits for something else.
        RuntimeError: in a graph that is traced, with a compressor.
    """
    tape.drop_stale()
    gc.collect()  # so that unreferenced reducers take part on no rank
    engines = list(living)
    if all(engine.place is None and engine.compressor.is_linear for engine in engines):
        with explained("hvd.join()"):
            return horovod.join()
    if not tf.executing_eagerly():
        raise RuntimeError("hvd.join() waits for other ranks: call it outside of a tf.function")
    # In parallel: this rank does not know which optimizer the others step next.
    engines = [engine for engine in engines if engine.process_set.size() > 1]
    running = [checkpoint_barrier.started(engine.take_part) for engine in engines]
    ended, _ = wait(running, return_when=FIRST_EXCEPTION)
    taken = sum(one.result() for one in ended)
    with explained("hvd.join()"):
        everybody = gather_objects(taken, int, "gradcomp.join", horovod.global_process_set)
    last = max(range(len(everybody)), key=lambda rank: (-everybody[rank], rank))
    return tf.constant(last, tf.int32)
