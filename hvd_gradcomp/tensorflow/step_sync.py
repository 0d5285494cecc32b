"""Comparison of what all ranks do in a step, before its results are used.

Each rank has a row of an int64 table that is summed over ranks. A sum works with Horovod's own join
as well: a rank that has joined there adds a row of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.core import wire
from hvd_gradcomp.tensorflow import stall_inspector
from hvd_gradcomp.tensorflow.buckets import BucketPlanner
from hvd_gradcomp.tensorflow.counters import ExchangeCounters

# Actions of a rank that submits a message; see `checkpoint_barrier` and `uneven_inputs`.
STEPPING, SAVING, JOINED = 1, 2, 3
_HEAD = 4  # integers of a message before the states'
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


class StepSync:
    """Exchange of the messages of one reducer.

    A message is a row of int64: action; checksum of which layers have a gradient, and of which
    kind; exchanges so far; checksum of the previous step's replies, 0 for none; integers of the
    states that are equal on all ranks, which tell the phase. Then, what may differ between ranks:
    rows of sparse gradients, and the report round.

    Args:
        planner: names the reducer, and has the states' integers and the layers apart.
        counters: of the steps.
    """

    def __init__(self, planner: BucketPlanner, counters: ExchangeCounters) -> None:
        self._planner, self._counters = planner, counters
        self._process_set = planner.participants.process_set
        self._records: set[Any] = set()  # of the stall inspector

    @property
    def name(self) -> str:
        """Return the name of the collective that carries the messages."""
        return f"{self._planner.name}.step"

    @property
    def size(self) -> int:
        """Return the number of integers in a message."""
        return _HEAD + len(self._planner.counters) + len(self._planner.apart) + 1

    def _compared(self, action: int, kinds: int) -> tf.Tensor:
        """Return the part of a message that must be equal on all ranks."""
        head = [tf.constant(action, tf.int64), tf.constant(kinds, tf.int64)]
        step = [tf.identity(self._counters.steps), tf.identity(self._counters.summed)]
        counters = [tf.cast(counter, tf.int64) for counter in self._planner.counters]
        return tf.stack([*head, *step, *counters])

    def _gather(self, compared: tf.Tensor, rows: Sequence[tf.Tensor]) -> tf.Tensor:
        """Gather the messages of all ranks."""
        ranks, rounds = self._process_set, stall_inspector.rounds(self._process_set)
        own = tf.concat((compared, tf.stack([*rows, tf.identity(rounds.told)])), 0)
        table = tf.one_hot([ranks.rank()], ranks.size(), dtype=tf.int64, axis=0) * own
        with stall_inspector.marked(self._records):
            messages = mpi_ops._allreduce(
                table, op=horovod.Sum, name=self.name, ignore_name_scope=True, process_set=ranks
            )
        rounds.due.assign(tf.reduce_max(messages[:, -1]))
        return messages

    def gather_joined(self) -> tf.Tensor:
        """Gather the messages of all ranks; this one's says that it has joined."""
        none = [tf.constant(0, tf.int64)] * len(self._planner.apart)
        return self._gather(self._compared(JOINED, 0), none)

    def check_step(
        self, kinds: int, rows: list[tf.Tensor], messages: tf.Tensor | None
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Fail, on all ranks, unless they are in the same step and phase; a no-op for one rank.

        Args:
            kinds: a checksum of this rank's gradients.
            rows: of this rank's sparse gradients of layers apart.
            messages: those of all ranks; None requests them.

        Returns:
            The checks, and the maximum over ranks of each of `rows`.
        """
        if self._process_set.size() == 1:
            return [], rows
        own = self._compared(STEPPING, kinds)
        if messages is None:
            messages = self._gather(own, rows)
        most = tf.unstack(tf.reduce_max(messages[:, -1 - len(rows) : -1], 0), len(rows))
        messages = messages[:, : own.shape[0]]
        joined = (messages[:, 0] == 0) | (messages[:, 0] == JOINED)
        alike = joined[:, None] | (messages == own)
        summed = alike[:, 3] | (messages[:, 3] == 0) | (own[3] == 0)
        alike = tf.concat((alike[:, :3], alike[:, 4:]), 1)
        facts = {
            _OTHER_CALL: messages[:, 0] != SAVING,
            _OTHER_GRADIENTS: alike[:, 1],
            wire.OTHER_STEP: alike[:, 2],
            _OTHER_PHASE: tf.reduce_all(alike, 1),
            _OTHER_SUMS: summed,
        }
        return [self._planner.ops.require(facts)], most
