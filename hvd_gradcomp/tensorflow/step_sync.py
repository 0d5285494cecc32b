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
from hvd_gradcomp.tensorflow.buckets import BucketPlanner

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


class StepSync:
    """Exchange of the messages of one reducer.

    Args:
        planner: names the reducer, and has the states' counters and the layers apart.
        process_set: the ranks.
        steps: exchanges so far.
        summed: a checksum of the previous step's replies.
    """

    def __init__(
        self, planner: BucketPlanner, process_set: Any, steps: tf.Variable, summed: tf.Variable
    ) -> None:
        self._planner, self.process_set = planner, process_set
        self._steps, self._summed = steps, summed

    @property
    def name(self) -> str:
        """Return the name of the collective that carries the messages."""
        return f"{self._planner.name}.step"

    @property
    def size(self) -> int:
        """Return the number of integers in a message."""
        return FIELDS + len(self._planner.counters) + len(self._planner.apart)

    def _message(self, does: int, kinds: int, rows: Sequence[tf.Tensor]) -> SyncMessage:
        steps, summed = tf.identity(self._steps), tf.identity(self._summed)
        return SyncMessage(does, kinds, steps, summed, self._planner.counters, rows)

    def _gather(self, message: SyncMessage) -> tf.Tensor:
        """Gather the messages of all ranks, one a row: compared fields, rows, report round."""
        ranks, rounds = self.process_set, stall_inspector.rounds(self.process_set)
        told = tf.identity(rounds.told)
        mine = tf.concat((message.compared(), tf.stack([*message.rows, told])), 0)
        table = tf.one_hot([ranks.rank()], ranks.size(), dtype=tf.int64, axis=0) * mine
        with stall_inspector.marked():
            everybody = mpi_ops._allreduce(
                table, op=horovod.Sum, name=self.name, ignore_name_scope=True, process_set=ranks
            )
        rounds.due.assign(tf.reduce_max(everybody[:, -1]))
        return everybody

    def gather_joined(self) -> tf.Tensor:
        """Gather the messages of all ranks; this one's says that it has joined."""
        none = [tf.constant(0, tf.int64)] * len(self._planner.apart)
        return self._gather(self._message(JOINED, 0, none))

    def check_step(
        self,
        kinds: int,
        rows: list[tf.Tensor],
        everybody: tf.Tensor | None,
        ops: TensorFlowOps,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Fail, on all ranks, unless they are in the same step and phase; a no-op for one rank.

        Args:
            kinds: a checksum of this rank's gradients.
            rows: of this rank's sparse gradients of layers apart.
            everybody: the messages of all ranks; None requests them.
            ops: the tensor operations.

        Returns:
            The checks, and the maximum over ranks of each of `rows`.
        """
        if self.process_set.size() == 1:
            return [], rows
        message = self._message(STEPPING, kinds, rows)
        if everybody is None:
            everybody = self._gather(message)
        most = tf.unstack(tf.reduce_max(everybody[:, -1 - len(rows) : -1], 0), len(rows))
        return [_check(message, everybody, ops)], most


def _check(message: SyncMessage, everybody: tf.Tensor, ops: TensorFlowOps) -> tf.Tensor:
    """Fail, on all ranks, unless they are in the same step and phase, or have joined."""
    mine = message.compared()
    everybody = everybody[:, : FIELDS - 1 + len(message.counters)]
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
