"""Comparison of what all ranks do in a step, before its results are used.

Each rank has a row of an int64 table that is summed over ranks. A sum works with Horovod's own join
as well: a rank that has joined there adds a row of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.core import wire
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.tensorflow import stall_inspector

# Actions of a rank that submits a message; see `checkpoint_barrier` and `uneven_inputs`.
STEPPING, SAVING, JOINED = 1, 2, 3
FIELDS = 5  # of a message, besides counters and rows
_OTHER_CALL = (
    "rank {ranks} saves or loads a checkpoint while others train; call save_checkpoint and "
    "load_checkpoint on all ranks, between the same two steps"
)
_OTHER_GRADIENTS = (
    "rank {ranks} has gradients of other layers; freeze and thaw the same ones on all ranks, "
    "before the same step"
)
_OTHER_SUMS = (
    "rank {ranks} has heard another sum in the exchange before, so replicas have diverged: a reply "
    "was damaged on its way. Load the last checkpoint on all ranks; if it happens again, suspect "
    "memory or the network"
)
_OTHER_PHASE = (
    "rank {ranks} is in another phase of a compressor that learns; load the same checkpoint and "
    "call hvd.retrain on all ranks, before the same step"
)


class SyncMessage(NamedTuple):
    """Row of one rank, scalars of int64.

    Attributes:
        does: `STEPPING`, `SAVING` or `JOINED`.
        kinds: a checksum of which layers have a gradient, and of which kind.
        steps: exchanges so far.
        summed: a checksum of the previous step's replies; 0 for none.
        counters: integers of the states that are equal on all ranks; they tell the phase.
        rows: of sparse gradients; they may differ between ranks.
    """

    does: int
    kinds: int
    steps: tf.Tensor
    summed: tf.Tensor
    counters: Sequence[tf.Tensor]
    rows: Sequence[tf.Tensor]

    def compared(self) -> tf.Tensor:
        """Return the fields that must be equal on all ranks."""
        head = [tf.constant(self.does, tf.int64), tf.constant(self.kinds, tf.int64)]
        counters = [tf.cast(counter, tf.int64) for counter in self.counters]
        return tf.stack([*head, self.steps, self.summed, *counters])


def gather(word: SyncMessage, name: str, process_set: Any) -> tf.Tensor:
    """Gather the messages of all ranks, one a row: compared fields, rows, and the report round.

    Args:
        word: this rank's.
        name: the same on all ranks.
        process_set: the ranks.
    """
    rounds = stall_inspector.rounds(process_set)
    mine = tf.concat((word.compared(), tf.stack([*word.rows, tf.identity(rounds.told)])), 0)
    table = tf.one_hot([process_set.rank()], process_set.size(), dtype=tf.int64, axis=0) * mine
    with stall_inspector.marked():
        everybody = mpi_ops._allreduce(
            table, op=horovod.Sum, name=name, ignore_name_scope=True, process_set=process_set
        )
    rounds.due.assign(tf.reduce_max(everybody[:, -1]))
    return everybody


def most_rows(word: SyncMessage, everybody: tf.Tensor) -> list[tf.Tensor]:
    """Return the maximum over ranks, for each of `word.rows`."""
    count = len(word.rows)
    return tf.unstack(tf.reduce_max(everybody[:, -1 - count : -1], 0), count)


def check(word: SyncMessage, everybody: tf.Tensor, ops: TensorFlowOps) -> tf.Tensor:
    """Fail, on all ranks, unless they are in the same step and phase, or have joined."""
    mine = word.compared()
    everybody = everybody[:, : FIELDS - 1 + len(word.counters)]
    joined = (everybody[:, 0] == 0) | (everybody[:, 0] == JOINED)
    alike = joined[:, None] | (everybody == mine)
    summed = alike[:, 3] | (everybody[:, 3] == 0) | (mine[3] == 0)
    alike = tf.concat((alike[:, :3], alike[:, 4:]), 1)
    return ops.require(
        {
            _OTHER_CALL: everybody[:, 0] != SAVING,
            _OTHER_GRADIENTS: alike[:, 1],
            wire.OTHER_STEP: alike[:, 2],
            _OTHER_PHASE: tf.reduce_all(alike, 1),
            _OTHER_SUMS: summed,
        }
    )
