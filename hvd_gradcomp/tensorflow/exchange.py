"""Tracing of one exchange: the programs of all buckets, and the gradients without a bucket.

All programs run to their ends while the graph is built, round by round; the graph then runs what it
can in parallel, so buckets overlap. No variable is assigned before the payloads of all buckets have
been checked.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.core import wire
from hvd_gradcomp.core.collectives import Allreduce, Switch
from hvd_gradcomp.core.compressor import Context, Program, State, leaves, with_leaves
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.ops.tensorflow import ASSERTION, TensorFlowOps
from hvd_gradcomp.runtime import hierarchy, naming
from hvd_gradcomp.runtime.participants import Participants
from hvd_gradcomp.runtime.program_runner import ProgramRunner, known
from hvd_gradcomp.tensorflow.buckets import Bucket, BucketPlanner
from hvd_gradcomp.tensorflow.counters import ExchangeCounters
from hvd_gradcomp.tensorflow.gradients import GradientNorm, times, values_of
from hvd_gradcomp.tensorflow.options import ExchangeOptions
from hvd_gradcomp.tensorflow.program_tracer import ProgramTracer
from hvd_gradcomp.tensorflow.sparse_rows import SparseRows
from hvd_gradcomp.tensorflow.step_sync import StepSync


class _BucketRun(NamedTuple):
    """Program of a bucket in the step that is traced.

    Attributes:
        before: the state before the step.
        trained: a mask of the elements whose layers have a gradient; None if all have.
    """

    bucket: Bucket
    program: ProgramRunner
    before: State
    trained: tf.Tensor | None


class ExchangeTracer:
    """Adds exchanges to the graph that is traced.

    Args:
        options: of the exchange.
        planner: of the buckets, with their state.
        participants: the ranks.
        ops: the tensor operations.
        counters: of steps and traffic.
        rows: the exchange of sparse gradients.
        sync: the comparison of ranks in each step.

    Attributes:
        undoes: whether a step with a non-finite gradient is undone.
        norm: of the gradient, if somebody watches it.
    """

    def __init__(
        self,
        options: ExchangeOptions,
        planner: BucketPlanner,
        participants: Participants,
        ops: TensorFlowOps,
        counters: ExchangeCounters,
        rows: SparseRows,
        sync: StepSync,
    ) -> None:
        self._options, self._planner, self._participants = options, planner, participants
        self._ops, self._counters, self._rows, self._sync = ops, counters, rows, sync
        self._programs = ProgramTracer(counters, participants, ops)
        self.undoes = options.nonfinite != "raise"
        self.norm: GradientNorm | None = None

    @property
    def scales(self) -> tuple[float, float]:
        """Return the factors before and after the sum over ranks."""
        if not self._options.averages:
            return 1.0, 1.0
        factor = self._options.gradient_predivide_factor
        return 1.0 / factor, factor / self._participants.rank_and_size[1]

    def trace(
        self, gradients: list[Any], moments: list[Any], everybody: tf.Tensor | None = None
    ) -> tuple[list[Any], tf.Tensor]:
        """Add an exchange to the graph; return the reduced gradients, and whether they are finite.

        Args:
            gradients, moments: of all layers.
            everybody: messages of all ranks, if they have been exchanged already.
        """
        # If a leader finds a non-finite gradient, its host has to learn of it first.
        hosts = self._participants.place is not None
        self._ops.verdicts = [] if self.undoes or hosts else None
        dense, sparse, undecided = self._rows.split(gradients)
        checks = self._check_step(gradients, everybody)
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            with tf.control_dependencies([_still_valid()]):
                dense = [None if g is None else tf.identity(g) for g in dense]
        runs = [
            self._bucket_run(bucket, gradients, dense, moments, undecided.get(bucket.places[0]))
            for bucket in self._planner.buckets
        ]
        # In an eager run, all first rounds come before any second one.
        requests = [run.program.send(None) for run in runs]
        self._counters.checksums = []
        # Ranks in different phases would deadlock.
        phases = any(isinstance(request, Switch) for request in requests)
        with tf.control_dependencies(checks if phases else []):
            names = [bucket.name for bucket in self._planner.buckets]
            self._programs.finish([run.program for run in runs], requests, names)
        reduced = list(gradients)
        planned = {place for bucket in self._planner.buckets for place in bucket.places}
        # Ranks with gradients of different layers would deadlock.
        with tf.control_dependencies(checks):
            for place, gradient in enumerate(gradients):
                if place in sparse:
                    reduced[place] = self._rows.gather(place, gradient)
                elif gradient is not None and place not in planned:  # sparse at first, not now
                    reduced[place] = self._sum(place, dense[place])
        finite = self._programs.verdict()
        if not self.undoes and hosts:
            facts = {wire.ANY_NOT_FINITE: tf.reshape(finite, (1,))}
            finite = tf.reduce_all(self._ops.require(facts, NonFiniteGradientError))
        # The totals depend on the checks of the payloads: a step that fails leaves no trace.
        totals = [values_of(run.program.result[0]) for run in runs]
        with tf.control_dependencies([finite, *checks, *totals]):
            for run in runs:
                self._end_run(run, finite, dense, reduced)
            self._rows.end_step(finite)
            self._counters.end_step(finite)
        if self.undoes:
            reduced = [times(g, tf.where(finite, 1.0, float("nan"))) for g in reduced]
        if self.norm is not None:
            with tf.control_dependencies(totals):
                self.norm.measure(reduced)
        return reduced, finite

    def kind_of(self, gradient: Any) -> str:
        """Describe how a gradient is exchanged, for comparison between ranks."""
        if gradient is None:
            return " without a gradient"
        sparse = isinstance(gradient, tf.IndexedSlices) and not self._options.sparse_as_dense
        return ", sparse" if sparse else ""

    def _check_step(self, gradients: Sequence[Any], everybody: tf.Tensor | None) -> list[tf.Tensor]:
        """Return checks that fail, on all ranks, unless all are in the same step and phase."""
        rows = [
            tf.shape(gradients[p].values, tf.int64)[0]
            if isinstance(gradients[p], tf.IndexedSlices)
            else tf.constant(0, tf.int64)
            for p in self._planner.apart
        ]
        kinds = zlib.crc32(repr([self.kind_of(gradient) for gradient in gradients]).encode())
        checks, most = self._sync.check_step(kinds, rows, everybody, self._ops)
        self._rows.begin_step(most)
        return checks

    def _bucket_run(
        self,
        bucket: Bucket,
        gradients: Sequence[Any],
        dense: Sequence[Any],
        moments: Sequence[Any],
        undecided: tf.IndexedSlices | None,
    ) -> _BucketRun:
        """Prepare the program of a bucket.

        Args:
            bucket: the bucket.
            gradients, moments: of all layers.
            dense: of those that are compressed.
            undecided: the bucket's gradient, if the graph decides on its exchange.
        """
        extra = {}
        if bucket.planned.uses_moments and any(moments[p] is not None for p in bucket.places):
            extra["moment"] = bucket.flatten(self._ops, moments, "float32")
        context = Context(
            bucket.layout,
            *self._participants.rank_and_size,
            tf.identity(self._counters.steps),
            *self.scales,
        )
        before = state = bucket.state
        if undecided is not None:
            aggregate = partial(self._aggregate, bucket, context, state, extra)
            program = self._rows.gathered_or_compressed(bucket, undecided, state, aggregate)
            return _BucketRun(bucket, ProgramRunner(program, known), before, None)
        trained = self._trained(bucket, gradients)
        if trained is not None:
            zeros = with_leaves(state, [tf.zeros_like(x) for _, x in leaves(state)])
            state = _where(trained, state, zeros)
        flat = bucket.flatten(self._ops, dense, bucket.layout.dtype)
        program = self._aggregate(bucket, context, state, extra, flat)
        return _BucketRun(bucket, ProgramRunner(program, known), before, trained)

    def _aggregate(
        self, bucket: Bucket, context: Context, state: State, extra: Any, flat: tf.Tensor
    ) -> Program:
        arguments = self._ops, context, flat, state
        place = self._participants.place
        if place is None:
            return bucket.compressor.aggregate(*arguments, **extra)
        return hierarchy.aggregate(
            bucket.compressor, *arguments, place=place, leader=bucket.leader, **extra
        )

    def _trained(self, bucket: Bucket, gradients: Sequence[Any]) -> tf.Tensor | None:
        if all(gradients[place] is not None for place in bucket.places):
            return None
        ones = [
            None if gradient is None else tf.ones(shape)
            for gradient, (_, shape, _) in zip(gradients, self._planner.layers)
        ]
        return bucket.flatten(self._ops, ones, "float32") > 0

    def _end_run(
        self, run: _BucketRun, finite: tf.Tensor, dense: Sequence[Any], reduced: list[Any]
    ) -> None:
        """Keep the state after a bucket's program, and put its result into `reduced`."""
        bucket, (total, state) = run.bucket, run.program.result
        if run.trained is not None:
            state = _where(run.trained, state, run.before)
        for variable, (_, value) in zip(bucket.variables, leaves(state)):
            variable.assign(tf.where(finite, value, variable) if self.undoes else value)
        for variable, (_, value) in zip(bucket.previous, leaves(run.before)):
            variable.assign(value)  # no copy: a buffer that is read is not written to
        if isinstance(total, tf.IndexedSlices):
            reduced[bucket.places[0]] = total
            return
        for place, piece in zip(bucket.places, self._ops.cut(bucket.layout, total)):
            if dense[place] is not None:
                reduced[place] = tf.cast(piece, dense[place].dtype)

    def _sum(self, place: int, gradient: tf.Tensor) -> tf.Tensor:
        """Allreduce a dense gradient that has no bucket."""
        wide = tf.cast(gradient, tf.float32) if gradient.dtype == tf.bfloat16 else gradient
        position = self._participants.place
        share = 1.0 if position is None else position.share
        before, after = self.scales
        request = Allreduce(wide, before, after * share)
        self._counters.count_unbucketed(place, wide)
        name = (
            f"{self._planner.name}.dense{place}.{naming.readable(self._planner.layers[place][0])}"
        )
        total = self._programs.perform(request, name, 0, among=self._participants.process_set)
        if self._ops.verdicts is not None:
            self._ops.verdicts.append(self._ops.finite(total))
        return tf.cast(total, gradient.dtype)


def _where(trained: tf.Tensor, state: State, other: State) -> State:
    """Return a state with another's values in the elements that are not trained."""
    pairs = zip(leaves(state), leaves(other))
    values = [
        tf.where(trained, x, y) if y.shape == trained.shape else x for (_, x), (_, y) in pairs
    ]
    return with_leaves(state, values)


def _still_valid() -> Any:
    """Fail if a trace runs among other ranks than it was made for."""
    rank, size = horovod.rank(), horovod.size()
    same = tf.equal(mpi_ops.rank_op(), rank) & tf.equal(mpi_ops.size_op(), size)
    return tf.debugging.Assert(
        same,
        [
            f"{ASSERTION}: this was traced for rank {rank} of {size}, and the ranks have "
            "changed since. Make the tf.function inside the function that hvd.elastic.run "
            "wraps, so that it is traced again"
        ],
    )
