"""Tracing of one exchange: the programs of all buckets, and the gradients without a bucket.

All programs run to their ends while the graph is built, round by round; the graph then runs what it
can in parallel, so buckets overlap. No variable is assigned before the payloads of all buckets have
been checked.
"""

from __future__ import annotations

import itertools
import os
import weakref
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.core import wire
from hvd_gradcomp.core.collectives import Allreduce, Gather, Switch
from hvd_gradcomp.core.compressor import Context, Program, State, leaves, with_leaves
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.ops.tensorflow import ASSERTION
from hvd_gradcomp.runtime import hierarchy, naming
from hvd_gradcomp.runtime.collectives import CollectiveRunner
from hvd_gradcomp.runtime.program_runner import ProgramRunner, known, run
from hvd_gradcomp.tensorflow import comm, step_sync
from hvd_gradcomp.tensorflow.buckets import DISCARDABLE, LEFT_OUT
from hvd_gradcomp.tensorflow.sparse_rows import SparseRows


class GraphExchange(SparseRows):
    """Exchange that is traced into a graph, and counter of its traffic.

    Args:
        layers, compressor: see `GraphReducer`.
        undoes: whether a step with a non-finite gradient is undone.
        how: for `SparseRows`.
    """

    _asked: tf.Variable  # whether the norm was requested

    def __init__(self, layers: Any, compressor: Any, *, undoes: bool, **how: Any) -> None:
        super().__init__(layers, compressor, **how)
        self.undoes = undoes
        self.dispatch = CollectiveRunner(
            comm.HorovodBackend(), weakref.proxy(self), self.participants
        )
        self._heard: list[tf.Tensor] = []  # checksums of replies that are equal on all ranks
        self._norm: tf.Variable | None = None  # of the gradient, if somebody watches

    def _kind(self, gradient: Any) -> str:
        if gradient is None:
            return " without a gradient"
        sparse = isinstance(gradient, tf.IndexedSlices) and not self.sparse_as_dense
        return ", sparse" if sparse else ""

    def _reduce(
        self, gradients: list[Any], moments: list[Any], everybody: tf.Tensor | None = None
    ) -> tuple[list[Any], Any]:
        # If a leader finds a non-finite gradient, its host has to learn of it first.
        self.ops.verdicts = [] if self.undoes or self.place is not None else None
        dense: list[Any] = list(gradients)
        sparse: dict[int, Any] = {}
        undecided: dict[int, Any] = {}  # the graph chooses
        for place, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                if self.sparse_as_dense is None and place in self.apart:
                    dense[place], undecided[place] = None, gradient
                elif self.gathers(place):
                    dense[place], sparse[place] = None, gradient
                else:
                    dense[place] = tf.convert_to_tensor(gradient)
        together = self._together(gradients, everybody)
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            with tf.control_dependencies([_still_valid()]):
                dense = [None if g is None else tf.identity(g) for g in dense]
        stacks: list[ProgramRunner] = []
        before: list[State] = []
        trained = [self._trained(bucket, gradients) for bucket in range(len(self.layouts))]
        for bucket, layout in enumerate(self.layouts):
            context = Context(
                layout,
                *self.seat,
                tf.identity(self.steps),
                self.prescale,
                self.postscale,
            )
            extra = {}
            if self._moments[bucket] and any(
                moments[place] is not None for place in self.places[bucket]
            ):
                extra["moment"] = self._flat(bucket, moments, "float32")
            state = with_leaves(
                self.templates[bucket], [tf.identity(v) for v in self.variables[bucket]]
            )
            before.append(state)
            place = self.places[bucket][0]
            if place in undecided:
                how = partial(self._program, bucket, context, state, extra)
                either = self._rows_or(bucket, undecided[place], state, how)
                stacks.append(ProgramRunner(either, known))
                continue
            if trained[bucket] is not None:
                nothing = with_leaves(state, [tf.zeros_like(x) for _, x in leaves(state)])
                state = _where(trained[bucket], state, nothing)
            flat = self._flat(bucket, dense, layout.dtype)
            stacks.append(ProgramRunner(self._program(bucket, context, state, extra, flat), known))
        # In an eager run, all first rounds come before any second one.
        requests = [stack.send(None) for stack in stacks]
        self._heard = []
        # Ranks in different phases would deadlock.
        phases = any(isinstance(request, Switch) for request in requests)
        with tf.control_dependencies(together if phases else []):
            self._finish(stacks, requests)
        results = [stack.result for stack in stacks]
        reduced = list(gradients)
        planned = {place for places in self.places for place in places}
        # Ranks with gradients of different layers would deadlock.
        with tf.control_dependencies(together):
            for place, gradient in enumerate(gradients):
                if place in sparse:
                    reduced[place] = self._gather(place, gradient)
                elif gradient is not None and place not in planned:  # sparse at first, not now
                    reduced[place] = self._sum(place, dense[place])
        finite = self._verdict()
        if not self.undoes and self.place is not None:
            facts = {wire.ANY_NOT_FINITE: tf.reshape(finite, (1,))}
            finite = tf.reduce_all(self.ops.require(facts, NonFiniteGradientError))
        one = tf.cast(finite, tf.int64)
        # The totals depend on the checks of the payloads: a step that fails leaves no trace.
        totals = [values_of(total) for total, _ in results]
        with tf.control_dependencies([finite, *together, *totals]):
            for bucket, (total, state) in enumerate(results):
                if trained[bucket] is not None:
                    state = _where(trained[bucket], state, before[bucket])
                for variable, (_, value) in zip(self.variables[bucket], leaves(state)):
                    variable.assign(tf.where(finite, value, variable) if self.undoes else value)
                for variable, (_, value) in zip(self._previous[bucket], leaves(before[bucket])):
                    variable.assign(value)  # no copy: a buffer that is read is not written to
                if isinstance(total, tf.IndexedSlices):
                    reduced[self.places[bucket][0]] = total
                else:
                    self._cut(bucket, total, dense, reduced)
            self._settle(finite)
            self._summed.assign(tf.add_n(self._heard) if self._heard else 0)
            self.steps.assign_add(one)
            self._last.assign(tf.where(finite, tf.constant(DISCARDABLE, tf.int64), LEFT_OUT))
            self.counters["exchanges"].assign_add(one)
            self.counters["skipped"].assign_add(1 - one)
        if self.undoes:
            reduced = [times(g, tf.where(finite, 1.0, float("nan"))) for g in reduced]
        if self._norm is not None:
            with tf.control_dependencies(totals):
                self._measure(reduced)
        return reduced, finite

    def _program(
        self, bucket: int, context: Context, state: State, extra: Any, flat: tf.Tensor
    ) -> Program:
        one, how = self.compressors[bucket], (self.ops, context, flat, state)
        if self.place is None:
            return one.aggregate(*how, **extra)
        leader = self.leader(bucket)
        return hierarchy.aggregate(one, *how, place=self.place, leader=leader, **extra)

    def _finish(self, stacks: Sequence[ProgramRunner], requests: list[Any]) -> None:
        """Run all programs from their first requests to their ends."""
        rounds = 0
        while any(request is not None for request in requests):
            due = [request for request in requests if request is not None]
            # In an eager run, results from other leaders come last.
            due = [request for request in due if not hierarchy.is_result(request)] or due
            replies = [
                self._perform(request, name, rounds) if any(request is d for d in due) else None
                for name, request in zip(self.names, requests)
            ]
            for bucket, reply in enumerate(replies):
                if reply is not None:
                    requests[bucket] = stacks[bucket].send(reply)
            rounds += 1

    def _together(self, gradients: Sequence[Any], everybody: tf.Tensor | None) -> list[tf.Tensor]:
        """Fail, on all ranks, unless they are in the same step and phase; a no-op for one rank.

        Args:
            gradients: of this rank.
            everybody: the messages of all ranks; None requests them.
        """
        rows = [
            tf.shape(gradients[p].values, tf.int64)[0]
            if isinstance(gradients[p], tf.IndexedSlices)
            else tf.constant(0, tf.int64)
            for p in self.apart
        ]
        self._rows, self._chosen = dict(zip(self.apart, rows)), {}
        if self.process_set.size() == 1:
            return []
        kinds = repr([self._kind(gradient) for gradient in gradients]).encode()
        word = self._word(step_sync.STEPPING, zlib.crc32(kinds), rows)
        if everybody is None:
            everybody = step_sync.gather(word, self.word_name, self.process_set)
        self._rows = dict(zip(self.apart, step_sync.most_rows(word, everybody)))
        return [step_sync.check(word, everybody, self.ops)]

    def _word(self, does: int, kinds: int, rows: Sequence[tf.Tensor]) -> step_sync.SyncMessage:
        return step_sync.SyncMessage(
            does, kinds, tf.identity(self.steps), tf.identity(self._summed), self._alike, rows
        )

    def _gather_joined(self) -> tf.Tensor:
        """Gather the messages of all ranks; this one's says that it has joined."""
        word = self._word(step_sync.JOINED, 0, [tf.constant(0, tf.int64)] * len(self.apart))
        return step_sync.gather(word, self.word_name, self.process_set)

    def _verdict(self) -> Any:
        """Return True if all gradients of the step were finite, unless that has raised already."""
        verdicts, self.ops.verdicts = self.ops.verdicts, None
        return tf.reduce_all(tf.stack(verdicts)) if verdicts else tf.constant(True)

    def _sum(self, place: int, gradient: tf.Tensor) -> tf.Tensor:
        """Allreduce a dense gradient that has no bucket."""
        wire = tf.cast(gradient, tf.float32) if gradient.dtype == tf.bfloat16 else gradient
        share = 1.0 if self.place is None else self.place.share
        request = Allreduce(wire, self.prescale, self.postscale * share)
        self._count(place, wire)
        name = f"{self.name}.dense{place}.{naming.readable(self.layers[place][0])}"
        total = self._perform(request, name, 0, among=self.process_set)
        if self.ops.verdicts is not None:
            self.ops.verdicts.append(self.ops.finite(total))
        return tf.cast(total, gradient.dtype)

    def _flat(self, bucket: int, values: Sequence[Any], dtype: str) -> tf.Tensor:
        mine = [values[place] for place in self.places[bucket]]
        return self.ops.flatten(self.layouts[bucket], mine, dtype)

    def _trained(self, bucket: int, gradients: Sequence[Any]) -> tf.Tensor | None:
        """Return a mask of the elements whose layers have a gradient; None if all have."""
        if all(gradients[place] is not None for place in self.places[bucket]):
            return None
        ones = [
            None if gradient is None else tf.ones(shape)
            for gradient, (_, shape, _) in zip(gradients, self.layers)
        ]
        return self._flat(bucket, ones, "float32") > 0

    def _cut(self, bucket: int, total: tf.Tensor, given: list[Any], reduced: list[Any]) -> None:
        pieces = self.ops.cut(self.layouts[bucket], total)
        for place, piece in zip(self.places[bucket], pieces):
            if given[place] is not None:
                reduced[place] = tf.cast(piece, given[place].dtype)

    def _perform(
        self, request: Any, name: str, path: Any, taken: Any = None, among: Any = None
    ) -> Any:
        """Perform a collective, and return its reply.

        Args:
            request: a collective.
            name: of the bucket.
            path: the round.
            taken: true if the branch that requests it is the one that runs.
            among: the process set, if it is another than the request is for.
        """
        if isinstance(request, Switch):
            index = request.index
            branches = [
                lambda branch=branch, i=i: self._run(
                    branch(), name, f"{path}.{i}", tf.equal(index, i)
                )
                for i, branch in enumerate(request.branches)
            ]
            reply, finite, summed = tf.switch_case(tf.cast(index, tf.int32), branches)
            if self.ops.verdicts is not None:
                self.ops.verdicts.append(finite)
            self._heard.append(summed)
            return reply
        if taken is not None:
            request = comm.asked_in_branch(request, taken)
        sent = self.dispatch.submit(request, name, path, among)
        reply = self.dispatch.receive(sent)
        if isinstance(request, Gather):  # counted before its shape is known, see `comm`
            here = sent.group.rank()
            reply = tf.reshape(reply, (sum(request.lengths) if request.root == here else 0,))
        return reply

    def heard(self, reply: tf.Tensor) -> None:
        """Record a reply that is bit-identical on all ranks."""
        self._heard.append(comm.sum_of_bits(reply))

    def _run(self, program: Program, name: str, path: str, taken: tf.Tensor) -> Any:
        """Run a branch of a `Switch` to its end; return results, finiteness and checksum."""
        outside, sums = self.ops.verdicts, self._heard
        self.ops.verdicts, self._heard = None if outside is None else [], [tf.constant(0, tf.int64)]
        try:
            results = self._run_to_end(program, name, path, taken)
            return results, self._verdict(), tf.add_n(self._heard)
        finally:
            self.ops.verdicts, self._heard = outside, sums

    def _run_to_end(self, program: Program, name: str, path: str, taken: tf.Tensor) -> Any:
        turns = itertools.count()
        return run(program, lambda r: self._perform(r, name, f"{path}.{next(turns)}", taken), known)

    def _measure(self, reduced: list[Any]) -> None:
        def measured() -> None:
            known = [tf.cast(values_of(g), tf.float32) for g in reduced if g is not None]
            self._norm.assign(tf.linalg.global_norm(known))  # type: ignore[union-attr]
            self._asked.assign(False)

        tf.cond(self._asked, measured, lambda: None)


def _where(trained: tf.Tensor, state: State, other: State) -> State:
    """Return a state with another's values in the elements that are not trained."""
    pairs = zip(leaves(state), leaves(other))
    held = [tf.where(trained, x, y) if y.shape == trained.shape else x for (_, x), (_, y) in pairs]
    return with_leaves(state, held)


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


def times(gradient: Any, factor: tf.Tensor) -> Any:
    """Multiply a gradient, which may be sparse or None, by a scalar."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = times(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    wide = gradient.dtype if gradient.dtype.size >= 4 else tf.float32
    return tf.cast(tf.cast(gradient, wide) * tf.cast(factor, wide), gradient.dtype)


def as_dtype(gradient: Any, dtype: Any) -> Any:
    """Cast a gradient, which may be sparse or None, to a precision; float64 stays as it is."""
    if gradient is None or gradient.dtype == tf.float64:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.cast(gradient.values, dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.cast(gradient, dtype)


def values_of(gradient: Any) -> tf.Tensor:
    """Return a gradient, or the rows of a sparse one."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def nothing_like(spec: Any, shape: Sequence[int], dtype: str) -> Any:
    """Return a gradient of zero, or of no rows.

    Args:
        spec: the type specification of a gradient; None for a missing one.
        shape, dtype: of the layer.
    """
    if isinstance(spec, tf.IndexedSlicesSpec):
        indices = tf.zeros((0,), spec._indices_dtype)
        return tf.IndexedSlices(tf.zeros((0, *shape[1:]), dtype), indices, tf.constant(shape))
    return None if spec is None else tf.zeros(shape, dtype)
