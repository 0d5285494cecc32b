"""`hvd.join()`, for ranks that have run out of batches."""

from __future__ import annotations

import gc
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.runtime.step_header import Kind
from hvd_gradcomp.tensorflow import checkpoint_barrier
from hvd_gradcomp.tensorflow.comm.horovod import explained, gather_objects
from hvd_gradcomp.tensorflow.comm.stall_inspector import RankSet
from hvd_gradcomp.tensorflow.reduce.reducer import GraphReducer, living


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
    for _ in range(2):  # unreferenced reducers take part on no rank: first the variables, then they
        gc.collect()
    reducers = list(living)
    if all(
        reducer.participants.place is None and reducer.compressor.is_linear for reducer in reducers
    ):
        with explained("hvd.join()"):
            return horovod.join()
    if not tf.executing_eagerly():
        raise RuntimeError("hvd.join() waits for other ranks: call it outside of a tf.function")
    reducers = [reducer for reducer in reducers if reducer.process_set.size() > 1]
    everywhere = horovod.global_process_set
    # In parallel: this rank does not know which optimizer the others step next.
    begin = checkpoint_barrier.summed(tf.zeros(1), "gradcomp.join.begin", everywhere)
    running = [checkpoint_barrier.started(reducer.take_part) for reducer in reducers]
    pending = {begin, *running}
    while not begin.done():
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
    messages = {_message_of(reducer) for reducer in reducers}
    with explained("hvd.join()"):
        gathered = gather_objects(
            sorted(messages), list[_Message], "gradcomp.join.words", everywhere
        )
    # Reducers that only some ranks have, as of a model that the others have collected.
    missing = {message for theirs in gathered for message in theirs} - messages
    submitted = [_submit(*message) for message in sorted(missing)]
    taken = sum(future.result() for future in running)
    for future in submitted:
        future.result()
    with explained("hvd.join()"):
        counts = gather_objects(taken, int, "gradcomp.join", everywhere)
    last = max(range(len(counts)), key=lambda rank: (-counts[rank], rank))
    return tf.constant(last, tf.int32)


_Message = tuple[str, int, int]  # the name of a sync message, its size, and its process set


def _message_of(reducer: GraphReducer) -> _Message:
    return reducer.sync.name, reducer.sync.size, int(reducer.process_set.process_set_id)


def _submit(name: str, size: int, process_set: int) -> Future[Any]:
    """Submit the sync message of a rank that has joined, for a reducer that it does not have."""
    ranks = list(mpi_ops._basics._get_process_set_ids_and_ranks()[process_set])
    if horovod.rank() not in ranks:
        return checkpoint_barrier.started(lambda: None)
    return checkpoint_barrier.submitted(Kind.JOINED, name, size, RankSet(process_set, ranks))
