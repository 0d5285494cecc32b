"""Tracing of one exchange: the programs of all buckets, and the gradients without a bucket.

All programs run to their ends while the graph is built, round by round; the graph then runs what it
can in parallel, so buckets overlap. No variable is assigned before the payloads of all buckets have
been checked.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.core.collectives import Allreduce, Gather, Switch
from hvd_gradcomp.method import wire
from hvd_gradcomp.method.compressor import Context, Program, State, leaves, with_leaves
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.ops.tensorflow import ASSERTION, TensorFlowOps
from hvd_gradcomp.runtime import hierarchy, naming
from hvd_gradcomp.runtime.program_runner import (
    CollectiveRunner,
    Participants,
    ProgramRunner,
    known,
    run,
)
from hvd_gradcomp.tensorflow.comm import horovod as comm
from hvd_gradcomp.tensorflow.reduce.buckets import Bucket, BucketPlanner
from hvd_gradcomp.tensorflow.reduce.counters import ExchangeCounters
from hvd_gradcomp.tensorflow.reduce.gradients import GradientNorm, times, values_of
from hvd_gradcomp.tensorflow.reduce.options import ExchangeOptions
from hvd_gradcomp.tensorflow.reduce.sparse_rows import SparseRows
from hvd_gradcomp.tensorflow.reduce.step_sync import StepSync


class _TracedBucket(NamedTuple):
    """Program of a bucket in the step that is traced.

    Attributes:
        before: the state before the step.
        trained: a mask of the elements whose layers have a gradient; None if all have.
    """

    bucket: Bucket
    program: ProgramRunner
    before: State
    trained: tf.Tensor | None


class ProgramTracer:
    """Runner of programs to their ends, round by round.

    Args:
        counters: of what they send.
        participants: the ranks.
        ops: the tensor operations, which collect whether gradients were finite.
    """

    def __init__(
        self, counters: ExchangeCounters, participants: Participants, ops: TensorFlowOps
    ) -> None:
        self._runner = CollectiveRunner(comm.HorovodBackend(), counters, participants)
        self._counters, self._ops = counters, ops

    def finish(
        self, programs: Sequence[ProgramRunner], requests: list[Any], names: Sequence[str]
    ) -> None:
        """Run all programs from their first requests to their ends.

        Args:
            programs: of the buckets.
            requests: the first ones; None of a program that has ended.
            names: of the buckets.
        """
        rounds = 0
        while any(request is not None for request in requests):
            due = [request for request in requests if request is not None]
            # In an eager run, results from other leaders come last.
            due = [request for request in due if not hierarchy.is_result(request)] or due
            replies = [
                self.perform(request, name, rounds) if any(request is d for d in due) else None
                for name, request in zip(names, requests)
            ]
            for bucket, reply in enumerate(replies):
                if reply is not None:
                    requests[bucket] = programs[bucket].send(reply)
            rounds += 1

    def perform(
        self, request: Any, name: str, path: Any, taken: Any = None, among: Any = None
    ) -> Any:
        """Perform a collective, or run the branches of a `Switch`; return its reply.

        Args:
            request: what a program yields.
            name: of the bucket.
            path: the round.
            taken: true if the branch that requests it is the one that runs.
            among: the process set, if it is another than the request is for.
        """
        if isinstance(request, Switch):
            index = request.index
            branches = [
                lambda branch=branch, i=i: self._branch(
                    branch(), name, f"{path}.{i}", tf.equal(index, i)
                )
                for i, branch in enumerate(request.branches)
            ]
            reply, finite, summed = tf.switch_case(tf.cast(index, tf.int32), branches)
            if self._ops.verdicts is not None:
                self._ops.verdicts.append(finite)
            self._counters.checksums.append(summed)
            return reply
        if taken is not None:
            request = comm.requested_in_branch(request, taken)
        sent = self._runner.submit(request, name, path, among)
        reply = self._runner.receive(sent)
        if isinstance(request, Gather):  # counted before its shape is known, see `comm`
            here = sent.group.rank()
            reply = tf.reshape(reply, (sum(request.lengths) if request.root == here else 0,))
        return reply

    def _branch(self, program: Program, name: str, path: str, taken: tf.Tensor) -> Any:
        """Run a branch to its end; return its result, finiteness and checksum."""
        rounds = itertools.count()
        ops, counters = self._ops, self._counters
        outside, checksums = ops.verdicts, counters.checksums
        ops.verdicts = None if outside is None else []
        counters.checksums = [tf.constant(0, tf.int64)]
        try:
            result = run(
                program, lambda r: self.perform(r, name, f"{path}.{next(rounds)}", taken), known
            )
            return result, self.verdict(), tf.add_n(counters.checksums)
        finally:
            ops.verdicts, counters.checksums = outside, checksums

    def verdict(self) -> tf.Tensor:
        """Return True if all gradients so far were finite, unless that has raised already."""
        verdicts, self._ops.verdicts = self._ops.verdicts, None
        return tf.reduce_all(tf.stack(verdicts)) if verdicts else tf.constant(True)


class ExchangeTracer:
    """Tracer of exchanges, which it adds to the graph that is built.

    Args:
        options: of the exchange.
        planner: of the buckets, with their state.
        counters: of steps and traffic.
        rows: the exchange of sparse gradients.
        sync: the comparison of ranks in each step.

    Attributes:
        rolls_back_nonfinite: a step with a non-finite gradient is rolled back.
        norm: of the gradient, if somebody watches it.
    """

    def __init__(
        self,
        options: ExchangeOptions,
        planner: BucketPlanner,
        counters: ExchangeCounters,
        rows: SparseRows,
        sync: StepSync,
    ) -> None:
        self._options, self._planner, self._counters = options, planner, counters
        self._rows, self._sync = rows, sync
        self._participants, self._ops = planner.participants, planner.ops
        self._programs = ProgramTracer(counters, self._participants, self._ops)
        self.rolls_back_nonfinite = options.nonfinite != "raise"
        self.norm: GradientNorm | None = None

    @property
    def scales(self) -> tuple[float, float]:
        """Return the factors before and after the sum over ranks."""
        if not self._options.averages:
            return 1.0, 1.0
        factor = self._options.gradient_predivide_factor
        return 1.0 / factor, factor / self._participants.rank_and_size[1]

    def trace(
        self, gradients: list[Any], moments: list[Any], messages: tf.Tensor | None = None
    ) -> tuple[list[Any], tf.Tensor]:
        """Add an exchange to the graph; return the reduced gradients, and whether they are finite.

        Args:
            gradients, moments: of all layers.
            messages: of all ranks, if they have been exchanged already.
        """
        # If a leader finds a non-finite gradient, its host has to learn of it first.
        hosts = self._participants.place is not None
        self._ops.verdicts = [] if self.rolls_back_nonfinite or hosts else None
        dense, sparse, undecided = self._rows.split(gradients)
        checks = self._check_step(gradients, messages)
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            with tf.control_dependencies([_still_valid()]):
                dense = [None if g is None else tf.identity(g) for g in dense]
        buckets = [
            self._begin_bucket(bucket, gradients, dense, moments, undecided.get(bucket.places[0]))
            for bucket in self._planner.buckets
        ]
        # In an eager run, all first rounds come before any second one.
        requests = [each.program.send(None) for each in buckets]
        self._counters.checksums = []
        # Ranks in different phases would deadlock.
        phases = any(isinstance(request, Switch) for request in requests)
        with tf.control_dependencies(checks if phases else []):
            names = [bucket.name for bucket in self._planner.buckets]
            self._programs.finish([each.program for each in buckets], requests, names)
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
        if not self.rolls_back_nonfinite and hosts:
            facts = {wire.ANY_NOT_FINITE: tf.reshape(finite, (1,))}
            finite = tf.reduce_all(self._ops.require(facts, NonFiniteGradientError))
        # The totals depend on the checks of the payloads: a step that fails leaves no trace.
        totals = [values_of(each.program.result[0]) for each in buckets]
        with tf.control_dependencies([finite, *checks, *totals]):
            for each in buckets:
                self._end_bucket(each, finite, dense, reduced)
            if self._planner.snapshot is not None:
                states = [value for each in buckets for _, value in leaves(each.before)]
                self._planner.snapshot.assign(states)
            self._rows.finish_step(finite)
            self._counters.finish_step(finite)
        if self.rolls_back_nonfinite:
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

    def _check_step(self, gradients: Sequence[Any], messages: tf.Tensor | None) -> list[tf.Tensor]:
        """Return checks that fail, on all ranks, unless all are in the same step and phase."""
        rows = [
            tf.shape(gradients[p].values, tf.int64)[0]
            if isinstance(gradients[p], tf.IndexedSlices)
            else tf.constant(0, tf.int64)
            for p in self._planner.apart
        ]
        kinds = zlib.crc32(repr([self.kind_of(gradient) for gradient in gradients]).encode())
        checks, most_rows = self._sync.check_step(kinds, rows, messages)
        self._rows.begin_step(most_rows)
        return checks

    def _begin_bucket(
        self,
        bucket: Bucket,
        gradients: Sequence[Any],
        dense: Sequence[Any],
        moments: Sequence[Any],
        undecided: tf.IndexedSlices | None,
    ) -> _TracedBucket:
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
            return _TracedBucket(bucket, ProgramRunner(program, known), before, None)
        trained = self._trained(bucket, gradients)
        if trained is not None:
            zeros = with_leaves(state, [tf.zeros_like(x) for _, x in leaves(state)])
            state = _where(trained, state, zeros)
        flat = bucket.flatten(self._ops, dense, bucket.layout.dtype)
        program = self._aggregate(bucket, context, state, extra, flat)
        return _TracedBucket(bucket, ProgramRunner(program, known), before, trained)

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

    def _end_bucket(
        self, traced: _TracedBucket, finite: tf.Tensor, dense: Sequence[Any], reduced: list[Any]
    ) -> None:
        """Keep the state after a bucket's program, and put its result into `reduced`."""
        bucket, (total, state) = traced.bucket, traced.program.result
        if traced.trained is not None:
            state = _where(traced.trained, state, traced.before)
        for variable, (_, value) in zip(bucket.variables, leaves(state)):
            variable.assign(
                tf.where(finite, value, variable) if self.rolls_back_nonfinite else value
            )
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
