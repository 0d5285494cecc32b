"""Broadcast of one rank's variables to all ranks, except for what belongs to one rank alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.tensorflow.comm.horovod import gather_objects
from hvd_gradcomp.tensorflow.interop.variables import is_rank_local, plain_variable
from hvd_gradcomp.tensorflow.reduce.reducer import LOGGER, TITLES, GraphReducer, living

_TRAVEL = frozenset({"uint8", "int8", "int32", "int64", "float16", "float32", "float64", "bool"})


class _Roll(NamedTuple):
    """Variables and reducers that one rank wants to broadcast."""

    variables: list[str]
    names: list[str]  # of the reducers
    compressors: list[str]
    steps: list[int]
    number: int  # of the next exchange


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: Any = horovod.global_process_set,
    inplace: bool = False,
) -> Any:
    """Broadcast variables like Horovod's own; also takes Keras 3's, as in `optimizer.variables`.

    What a compressor has accumulated on this rank is left out: a broadcast residual would be
    applied once per rank. If the root resumes from a checkpoint that only it has read, the others
    take its steps and its replicated state, and their own state starts anew; the log says so once.

    Variables are matched by their place, so their names may differ between ranks: a Keras model
    that was loaded names them differently.

    Args:
        variables: of TensorFlow or Keras, in the same order on all ranks; a repeated one is sent
            once.
        root_rank: the rank whose values count.
        process_set: the ranks that take part.
        inplace: as in Horovod.

    Returns:
        The result of Horovod's own: inside a graph the operation to run.

    Raises:
        MismatchError: on all ranks, if their variables or their compressors differ.
    """
    plain = {id(v): v for v in map(plain_variable, variables)}
    shared = [v for v in plain.values() if not is_rank_local(v)]
    if inplace or not tf.executing_eagerly():
        return horovod.broadcast_variables(shared, root_rank, process_set, inplace)
    places = {key: place for place, key in enumerate(plain)}
    reducers = sorted(
        (reducer for reducer in living if id(reducer.steps) in plain),
        key=lambda reducer: places[id(reducer.steps)],
    )
    rolls = _agreed(shared, reducers, process_set)
    ranks = list(process_set.ranks or range(process_set.size()))
    root = rolls[ranks.index(root_rank)]
    TITLES.continue_from(max(roll.number for roll in rolls))
    anew = []
    for place, reducer in enumerate(reducers):
        step = root.steps[place]
        others = [rank for rank, roll in zip(ranks, rolls) if roll.steps[place] != step]
        reducer.rename(root.names[place])
        if horovod.rank() in others:
            reducer.reset_local()
        owned = reducer.planner.learned_by_one(step)
        shared += [variable for variable, _ in owned]
        if others and any(owner != root_rank for _, owner in owned):
            anew.append(reducer)
        if others and reducer.planner.keeps_local and horovod.rank() == root_rank:
            LOGGER.warning(
                "all ranks continue from step %d of rank %d, with what all have in common. Only "
                "rank %d has its residual again: rank%s %s begin%s with an empty one. "
                "hvd.save_checkpoint and hvd.load_checkpoint keep those of all ranks",
                step,
                root_rank,
                root_rank,
                "s" if len(others) > 1 else "",
                ", ".join(map(str, others)),
                "" if len(others) > 1 else "s",
            )

    def copy() -> None:
        for place, variable in enumerate(shared):
            value = variable.read_value()
            travels = value.dtype.name in _TRAVEL
            value = mpi_ops.broadcast(
                value if travels else tf.bitcast(value, tf.uint8),
                root_rank,
                name=f"gradcomp.broadcast.{place}",
                ignore_name_scope=True,
                process_set=process_set,
            )
            variable.assign(value if travels else tf.bitcast(value, variable.dtype))

    tf.function(copy, autograph=False)()  # all at the same time
    for reducer in anew:
        reducer.retrain()
    return None


def _agreed(
    shared: Sequence[tf.Variable], reducers: Sequence[GraphReducer], process_set: Any
) -> list[_Roll]:
    """Gather what all ranks want to broadcast, and require that it is the same.

    Raises:
        MismatchError: on all ranks, if it differs: some ranks would deadlock.
    """
    own_roll = _Roll(
        [f"{v.dtype.name} {tuple(v.shape)}" for v in shared],
        [reducer.name for reducer in reducers],
        [str(reducer.compressor) for reducer in reducers],
        [int(reducer.steps) for reducer in reducers],
        TITLES.number,
    )
    rolls: list[_Roll] = gather_objects(own_roll, _Roll, "gradcomp.broadcast.roll", process_set)
    first, *ranks = process_set.ranks or range(len(rolls))
    for rank, roll in zip(ranks, rolls[1:]):
        for ours, theirs, what in (
            (rolls[0].compressors, roll.compressors, "compressor"),
            (rolls[0].variables, roll.variables, "variable"),
        ):
            if ours == theirs:
                continue
            place = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b),
                min(len(ours), len(theirs)),
            )
            a, b = ((x[place : place + 1] or ["missing"])[0] for x in (ours, theirs))
            raise MismatchError(
                f"the ranks cannot take each other's variables: {what} {place} of {len(ours)} is "
                f"{a} on rank {first}, and of {len(theirs)} {b} on rank {rank}. Make the same "
                "model and optimizer on all ranks, with the same compression=; a rank that loads "
                "a model uses hvd.load_model, from hvd_gradcomp.tensorflow.keras"
            )
    return rolls
