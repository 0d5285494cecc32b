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

from hvd_gradcomp.method import wire
from hvd_gradcomp.runtime.step_header import SIZE, Kind, StepHeader
from hvd_gradcomp.tensorflow.comm import stall_inspector
from hvd_gradcomp.tensorflow.reduce.buckets import BucketPlanner
from hvd_gradcomp.tensorflow.reduce.counters import ExchangeCounters

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

    A message is a row of int64: a header, whose settings are a checksum of the layers that have a
    gradient, and of its kind, and whose digest is that of the previous step's replies; integers of
    the states that are equal on all ranks, which tell the phase. Then, what may differ between
    ranks: rows of sparse gradients, and the report round.

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
        return SIZE + len(self._planner.counters) + len(self._planner.apart) + 1

    def _compared(self, kind: Kind, gradients: int) -> tf.Tensor:
        """Return the part of a message that must be equal on all ranks."""
        steps, digest = tf.identity(self._counters.steps), tf.identity(self._counters.checksum)
        header = StepHeader(kind, steps, settings=gradients, digest=digest)
        return tf.stack([tf.cast(x, tf.int64) for x in (*header, *self._planner.counters)])

    def _gather(self, compared: tf.Tensor, rows: Sequence[tf.Tensor]) -> tf.Tensor:
        """Gather the messages of all ranks."""
        ranks, rounds = self._process_set, stall_inspector.rounds(self._process_set)
        message = tf.concat((compared, tf.stack([*rows, tf.identity(rounds.pending)])), 0)
        table = tf.one_hot([ranks.rank()], ranks.size(), dtype=tf.int64, axis=0) * message
        with stall_inspector.marked(self._records):
            messages = mpi_ops._allreduce(
                table, op=horovod.Sum, name=self.name, ignore_name_scope=True, process_set=ranks
            )
        rounds.due.assign(tf.reduce_max(messages[:, -1]))
        return messages

    def gather_joined(self) -> tf.Tensor:
        """Gather the messages of all ranks; this one's says that it has joined."""
        none = [tf.constant(0, tf.int64)] * len(self._planner.apart)
        return self._gather(self._compared(Kind.JOINED, 0), none)

    def check_step(
        self, gradients: int, rows: list[tf.Tensor], messages: tf.Tensor | None
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Fail, on all ranks, unless they are in the same step and phase; a no-op for one rank.

        Args:
            gradients: a checksum of this rank's gradients.
            rows: of this rank's sparse gradients of layers apart.
            messages: those of all ranks; None requests them.

        Returns:
            The checks, and the maximum over ranks of each of `rows`.
        """
        if self._process_set.size() == 1:
            return [], rows
        compared = self._compared(Kind.STEP, gradients)
        if messages is None:
            messages = self._gather(compared, rows)
        highest = tf.unstack(tf.reduce_max(messages[:, -1 - len(rows) : -1], 0), len(rows))
        # A column of all ranks for each field.
        headers = StepHeader(*tf.unstack(messages[:, :SIZE], SIZE, axis=1))
        header = StepHeader(*tf.unstack(compared[:SIZE], SIZE))
        joined = (headers.kind == Kind.ABSENT) | (headers.kind == Kind.JOINED)
        phases = messages[:, SIZE : compared.shape[0]] == compared[SIZE:]
        unknown = (headers.digest == 0) | (header.digest == 0)
        facts = {
            _OTHER_CALL: headers.kind != Kind.SAVE,
            _OTHER_GRADIENTS: joined | (headers.settings == header.settings),
            wire.OTHER_STEP: joined | (headers.step == header.step),
            _OTHER_PHASE: joined | tf.reduce_all(phases, 1),
            _OTHER_SUMS: joined | unknown | (headers.digest == header.digest),
        }
        return [self._planner.ops.require(facts)], highest
