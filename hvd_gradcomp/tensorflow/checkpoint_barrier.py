"""Barrier for ranks that save or load; if others train, it raises an error instead of a deadlock.

A step waits in TensorFlow's graph, where no timeout applies; but it always requests a sync message
from all ranks, under a name of its reducer (see `step_sync`). So a rank that has waited for
`PATIENCE` seconds to save submits a message of its own under the name of each step that another
rank may be in. Ranks in a step learn that this one is not, and it learns of them. A rank that is
merely late notices nothing: before all go on they complete these messages.

The rank that saves raises its error at once. A step ends once all its collectives have completed or
failed, at the latest when the rank that saves ends, or goes on to a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from threading import Thread
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.runtime.step_header import SIZE, Kind, StepHeader
from hvd_gradcomp.tensorflow.comm import stall_inspector
from hvd_gradcomp.tensorflow.comm.horovod import gather_objects
from hvd_gradcomp.tensorflow.reduce.reducer import living

PATIENCE = 10.0  # seconds of waiting before a rank submits its messages
_NAME = "gradcomp.checkpoint"
_begun: dict[int, Future[Any]] = {}  # by process set: barriers not yet complete
_Message = tuple[str, int]  # name and size of a step's message


def barrier(process_set: Any) -> None:
    """Wait until all ranks are here, to save or to load.

    Args:
        process_set: the ranks.

    Raises:
        CheckpointError: others are in a step of training. They raise an error, too.
        DeadlockError: others wait for something else, on all ranks.
    """
    if process_set.size() > 1:
        with stall_inspector.translated():
            _meet(process_set)


def _meet(process_set: Any) -> None:
    key, messages = process_set.process_set_id, dict[_Message, Future[Any]]()
    if key not in _begun:  # a failed call may have left one behind
        _begun[key] = summed(tf.zeros(1), f"{_NAME}.begin", process_set)
    begin = _begun[key]
    wait([begin], PATIENCE)
    if not begin.done():
        syncs = [r.sync for r in living if r.process_set.process_set_id == key]
        _submit(messages, ((sync.name, sync.size) for sync in syncs), process_set)
    while not begin.done():
        wait([begin, *_pending(messages, process_set)], return_when=FIRST_COMPLETED)
    del _begun[key]
    if begin.exception():
        wait(messages.values(), PATIENCE)
        _pending(messages, process_set)  # raises the reason, if they have it
    begin.result()
    gathered = gather_objects([*messages], list[_Message], f"{_NAME}.words", process_set)
    _submit(messages, (message for theirs in gathered for message in theirs), process_set)
    for message in messages.values():
        message.result()


def _submit(
    messages: dict[_Message, Future[Any]], wanted: Iterable[_Message], process_set: Any
) -> None:
    """Submit the messages that were not submitted yet."""
    for name, size in wanted:
        if (name, size) not in messages:
            messages[name, size] = submitted(Kind.SAVE, name, size, process_set)


def _pending(messages: dict[_Message, Future[Any]], process_set: Any) -> list[Future[Any]]:
    """Return the messages that are still pending; raise what other ranks have told with theirs.

    Replies are read before errors: ranks that have told something may have ended since. Then
    nothing is on its way any more, but for replies that threads here have not handed over yet.
    """
    if any(message.done() and message.exception() for message in messages.values()):
        wait(messages.values(), PATIENCE)
    done = {message for message in messages.values() if message.done()}
    for message in sorted(done, key=lambda message: message.exception() is not None):
        _check(message.result(), process_set)
    return [message for message in messages.values() if message not in done]


def _check(table: Any, process_set: Any) -> None:
    ranks = process_set.ranks or range(len(table))
    headers = {rank: StepHeader(*map(int, row[:SIZE])) for rank, row in zip(ranks, table)}
    stepping = {rank: each for rank, each in headers.items() if each.kind == Kind.STEP}
    if stepping:
        listed = ", ".join(f"rank {r} waits in step {each.step}" for r, each in stepping.items())
        raise CheckpointError(
            f"nothing was saved or loaded: rank {horovod.rank()} saves or loads a checkpoint, but "
            f"{listed}. Call save_checkpoint and load_checkpoint on all ranks, between the same "
            "two steps"
        )


def submitted(kind: Kind, name: str, size: int, process_set: Any) -> Future[Any]:
    """Submit a sync message of a rank that is not in a step; see `step_sync`.

    Args:
        kind: SAVE or JOINED.
        name, size: of the messages.
        process_set: the ranks.
    """
    row = tf.one_hot(0, size, on_value=int(kind), off_value=0, dtype=tf.int64)
    table = tf.one_hot([process_set.rank()], process_set.size(), dtype=tf.int64, axis=0) * row
    return summed(table, name, process_set)


def summed(tensor: tf.Tensor, name: str, process_set: Any) -> Future[Any]:
    """Start a sum over ranks in another thread; in a graph, where collectives pair by name."""

    def total() -> tf.Tensor:
        return mpi_ops._allreduce(
            tensor, op=horovod.Sum, name=name, ignore_name_scope=True, process_set=process_set
        )

    graph = tf.function(total, autograph=False).get_concrete_function()
    return started(lambda: graph().numpy())


def started(run: Callable[[], Any]) -> Future[Any]:
    """Run a function in a thread that does not keep the process alive."""
    future: Future[Any] = Future()

    def target() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=target, daemon=True).start()
    return future
