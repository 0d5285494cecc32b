"""Reducer of one optimizer's gradients on TensorFlow, or of the tapes over one list of variables.

While a `tf.function` is traced the exchange becomes part of it. Eager calls go through the
reducer's own `tf.function`, like stock Horovod's. All programs run to their ends while the graph is
built, round by round; the graph then runs what it can in parallel, so buckets overlap. No variable
is assigned before the payloads of all buckets have been checked.

State lives in variables that the owner creates, so checkpoints include it (`buckets`). Everything
that travels has a name that is the same on all ranks, see `hvd_gradcomp.runtime.naming`.
"""

from __future__ import annotations

import logging
import os
import weakref
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod import __version__ as horovod_version
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.codecs.linear import LinearCompressor
from hvd_gradcomp.core import wire
from hvd_gradcomp.core.collectives import Allreduce, Switch
from hvd_gradcomp.core.compressor import Compressor, Context, Program, State, leaves, with_leaves
from hvd_gradcomp.ops import NonFiniteGradientError, PayloadError
from hvd_gradcomp.ops.tensorflow import ASSERTION, TensorFlowOps
from hvd_gradcomp.planning import worth
from hvd_gradcomp.runtime import config_check, hierarchy, naming
from hvd_gradcomp.runtime.participants import Participants
from hvd_gradcomp.runtime.program_runner import ProgramRunner, known
from hvd_gradcomp.runtime.unique_names import UniqueNames
from hvd_gradcomp.tensorflow import comm, stall_inspector
from hvd_gradcomp.tensorflow.buckets import Bucket, BucketPlanner, Layers, MakeVariable
from hvd_gradcomp.tensorflow.gradients import GradientNorm, as_dtype, times, values_of, zero_like
from hvd_gradcomp.tensorflow.options import ExchangeOptions
from hvd_gradcomp.tensorflow.program_tracer import ProgramTracer
from hvd_gradcomp.tensorflow.sparse_rows import SparseRows
from hvd_gradcomp.tensorflow.step_sync import JOINED, StepSync
from hvd_gradcomp.tensorflow.variables import new_variable

LOGGER = logging.getLogger("hvd_gradcomp")
COMMITTED, DISCARDABLE, LEFT_OUT = 0, 1, 2  # states of the last exchange
living: weakref.WeakSet[GraphReducer] = weakref.WeakSet()
TITLES = UniqueNames("gradcomp")


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


class GraphReducer:
    """Reducer of one optimizer's gradients, or of the tapes over one list of variables.

    Args:
        layers: (name, shape, dtype) of everything that is reduced, in the same order on all ranks.
        compressor: of all layers.
        options: of the exchange, with a policy for non-finite gradients: "raise", or "skip" or
            "propagate", which are the same here: gradients are NaN and nothing else changes.
        name: prefix of the names of everything that travels; see `UniqueNames`.
        settings: other settings that must be equal on all ranks, for the config check.
        make_variable: creates the variables that hold the state, for an owner that saves them.
            Without an owner, layers whose rows are gathered get no state and no bucket.
        tables: places of layers whose gradients are expected to be sparse.

    Attributes:
        planner: of the buckets.
        participants: the ranks.
        rows: the exchange of sparse gradients.
        sync: the comparison of ranks in each step.
        traffic: counters of this rank.
        norm: of the gradient, if somebody watches it.
        steps: exchanges so far, equal on all ranks.
        owned: whether an owner saves the variables, which are then not created anew.
        undoes: whether a step with a non-finite gradient is undone.
        agreed: whether ranks have compared what they train.
        finite: whether the last exchange's gradients were, on all ranks.
        sums: of gradients that an owner accumulates on this rank for the next exchange.
        titles: with hosts, the names that each rank has in `planner.replicated`.
    """

    def __init__(
        self,
        layers: Layers,
        compressor: Compressor,
        options: ExchangeOptions,
        *,
        name: str | None = None,
        settings: str = "",
        make_variable: MakeVariable | None = None,
        tables: Collection[int] = (),
    ) -> None:
        self.layers, self.compressor, self.options = list(layers), compressor, options
        self._settings = f"{options}{settings}"
        self.undoes, self.owned = options.nonfinite != "raise", make_variable is not None
        make_variable = make_variable or new_variable
        self.ops = TensorFlowOps()
        self.participants = Participants(options.process_set, options.position, self._make_groups)
        self.planner = BucketPlanner(
            layers,
            compressor,
            self.participants,
            self.ops,
            name or TITLES.take(),
            make_variable,
            keeps_previous=options.rollback and not compressor.is_linear,
        )
        with tf.init_scope():
            self._last = new_variable("gradcomp_last", tf.constant(COMMITTED, tf.int64))
            self.steps = make_variable("gradcomp_steps", tf.constant(0, tf.int64))
            self.traffic = comm.TrafficCounter(make_variable, len(self.layers))
        self.rows = SparseRows(
            options, self.planner, self.participants, self.traffic, self.ops, tables
        )
        self.sync = StepSync(self.planner, options.process_set, self.steps, self.traffic.summed)
        self._tracer = ProgramTracer(self.traffic, self.participants, self.ops)
        self.agreed = self._judged = False
        self.norm: GradientNorm | None = None
        self.finite: Any = None
        self.sums: list[tf.Variable] = []
        self.titles: list[list[str]] = []
        self._specs: list[Any] = [True] * len(self.layers)  # of the last gradients
        self._retrace()
        living.add(self)

    @property
    def name(self) -> str:
        """Return the prefix of the names of everything that travels."""
        return self.planner.name

    @property
    def buckets(self) -> list[Bucket]:
        """Return the buckets, in the order in which backward fills them."""
        return self.planner.buckets

    @property
    def process_set(self) -> Any:
        """Return the ranks that take part."""
        return self.options.process_set

    @property
    def prescale(self) -> float:
        """Return the factor of gradients before the sum over ranks."""
        return 1.0 / self.options.gradient_predivide_factor if self.options.averages else 1.0

    @property
    def postscale(self) -> float:
        """Return the factor of the sum over ranks."""
        ranks = self.participants.rank_and_size[1]
        return self.options.gradient_predivide_factor / ranks if self.options.averages else 1.0

    @property
    def variables(self) -> list[tf.Variable]:
        """Return all variables of the exchange."""
        return [self.steps, *self.traffic.variables.values(), *self.planner.variables]

    def _make_groups(self, place: hierarchy.HostPosition) -> hierarchy.Groups:
        with tf.init_scope():
            return hierarchy.groups_of(mpi_ops, place, self._gather_objects)

    def _gather_objects(self, item: Any, kind: Any) -> list[Any]:
        with tf.init_scope(), comm.explained("the exchange of what the ranks train"):
            return comm.gather_objects(item, kind, f"{self.name}.handshake", self.process_set)

    def _retrace(self) -> None:
        """Trace the function for eager calls anew."""
        self._eager = tf.function(self._trace, autograph=False, reduce_retracing=True)

    # -- one exchange --------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def reduce(
        self,
        gradients: Sequence[Any],
        moments: Sequence[Any] | None = None,
        loss_scale: Any = None,
    ) -> list[Any]:
        """Perform one exchange.

        Args:
            gradients: one for each layer, or None; None stays None. The same layers have none on
                all ranks, and what was accumulated for them waits.
            moments: sums of squared sample gradients, for compressors that use them.
            loss_scale: factor of the gradients, and of the result; moments have its square. State
                is kept without it.

        Returns:
            The reduced gradients, in their dtypes. `finite` says whether they are.
        """
        if loss_scale is not None:
            return self._reduce_scaled(gradients, moments, tf.cast(loss_scale, tf.float32))
        if len(gradients) != len(self.layers):
            raise ValueError(f"{len(gradients)} gradients for {len(self.layers)} layers")
        if not self.agreed:
            self._agree(gradients)
        if moments is None or not self.compressor.uses_moments:
            moments = [None] * len(gradients)
        self._specs = [None if g is None else tf.type_spec_from_value(g) for g in gradients]
        if tf.executing_eagerly():
            return self._run_eagerly(list(gradients), list(moments), None)
        with stall_inspector.unmarked():
            reduced, self.finite = self._trace(list(gradients), list(moments))
        return reduced

    def _run_eagerly(
        self, gradients: list[Any], moments: list[Any], everybody: tf.Tensor | None
    ) -> list[Any]:
        with _explained_checks(), comm.explained("the exchange"), stall_inspector.unmarked():
            reduced, self.finite = self._eager(gradients, moments, everybody)
        return list(reduced)

    def take_part(self) -> int:
        """Exchange zeros and what the compressor keeps, until all ranks have joined.

        Returns:
            The number of exchanges in which this rank took part.

        Raises:
            DeadlockError: on all ranks, if a rank waits for something else.
        """
        gather = tf.function(self.sync.gather_joined, autograph=False)
        taken = 0
        while True:
            with comm.explained("hvd.join()"):
                everybody = gather()
            if tf.reduce_all((everybody[:, 0] == JOINED) | (everybody[:, 0] == 0)):
                return taken
            taken += 1
            zeros = [zero_like(s, *layer[1:]) for s, layer in zip(self._specs, self.layers)]
            self._run_eagerly(zeros, [None] * len(zeros), everybody)

    def _reduce_scaled(
        self, gradients: Sequence[Any], moments: Sequence[Any] | None, scale: tf.Tensor
    ) -> list[Any]:
        """Reduce gradients times a scale, which saves small ones in half precision.

        The exchange sees them without it, in float32. Gradients that are summed in half precision,
        or gathered as they are, keep the scale meanwhile.
        """
        kept = set(range(len(gradients)))
        for bucket in self.buckets:
            compressor = bucket.planned
            if not (
                isinstance(compressor, LinearCompressor) and compressor.in_halves(bucket.layout)
            ):
                kept.difference_update(bucket.places)
        dtypes = [None if g is None else g.dtype for g in gradients]
        unscaled = [
            g if place in kept else times(as_dtype(g, tf.float32), 1.0 / scale)
            for place, g in enumerate(gradients)
        ]
        if moments is not None:
            square = scale * scale
            moments = [times(as_dtype(m, tf.float32), 1.0 / square) for m in moments]
        return [
            g if place in kept else as_dtype(times(g, scale), dtype)
            for place, (g, dtype) in enumerate(zip(self.reduce(unscaled, moments), dtypes))
        ]

    # -- the first exchange --------------------------------------------------------------------

    def _kind(self, gradient: Any) -> str:
        if gradient is None:
            return " without a gradient"
        sparse = isinstance(gradient, tf.IndexedSlices) and not self.options.sparse_as_dense
        return ", sparse" if sparse else ""

    def _agree(self, gradients: Sequence[Any]) -> None:
        """Compare what is about to be trained with the other ranks, once."""
        kinds = [self._kind(gradient) for gradient in gradients]
        sparse = {i: g for i, (g, kind) in enumerate(zip(gradients, kinds)) if kind == ", sparse"}
        # Buckets may change in the first step, unless an owner saves their state.
        replans = not (self.owned and self.planner.variables)
        if replans:
            self.rows.leave_out(sparse)
        mine = config_check.describe(
            [
                (name, shape, f"{dtype}{kind}")
                for (name, shape, dtype), kind in zip(self.layers, kinds)
            ],
            self.compressor,
            self.planner.layouts,
            self._settings,
            framework=f"tensorflow {tf.__version__}",
            horovod=horovod_version,
        )
        everybody = self._gather_objects(mine, config_check.Description)
        config_check.agree(everybody, self.process_set.ranks)
        self.rows.decide(sparse, replans, self._gather_objects)
        if self.process_set.rank() == 0 and not self._judged and self.buckets:
            plan = [(bucket.planned, bucket.layout) for bucket in self.buckets]
            ranks = self.participants.rank_and_size[1]
            for line in worth.warnings(self.compressor, plan, ranks):
                LOGGER.warning("%s", line)
        self._judged = True
        if self.participants.place is not None:
            _ = self.participants.groups  # created while all ranks are here
            own = [title for title, _ in self.planner.replicated]
            self.titles = self._gather_objects(own, list[str])
        self.agreed = True

    # -- the graph -------------------------------------------------------------------------------

    def _trace(
        self, gradients: list[Any], moments: list[Any], everybody: tf.Tensor | None = None
    ) -> tuple[list[Any], tf.Tensor]:
        """Add an exchange to the graph; return the reduced gradients, and whether they are finite.

        Args:
            gradients, moments: of all layers.
            everybody: messages of all ranks, if they have been exchanged already.
        """
        # If a leader finds a non-finite gradient, its host has to learn of it first.
        hosts = self.participants.place is not None
        self.ops.verdicts = [] if self.undoes or hosts else None
        dense, sparse, undecided = self.rows.split(gradients)
        checks = self._check_step(gradients, everybody)
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            with tf.control_dependencies([_still_valid()]):
                dense = [None if g is None else tf.identity(g) for g in dense]
        runs = [
            self._bucket_run(bucket, gradients, dense, moments, undecided.get(bucket.places[0]))
            for bucket in self.buckets
        ]
        # In an eager run, all first rounds come before any second one.
        requests = [run.program.send(None) for run in runs]
        self.traffic.checksums = []
        # Ranks in different phases would deadlock.
        phases = any(isinstance(request, Switch) for request in requests)
        with tf.control_dependencies(checks if phases else []):
            names = [bucket.name for bucket in self.buckets]
            self._tracer.finish([run.program for run in runs], requests, names)
        reduced = list(gradients)
        planned = {place for bucket in self.buckets for place in bucket.places}
        # Ranks with gradients of different layers would deadlock.
        with tf.control_dependencies(checks):
            for place, gradient in enumerate(gradients):
                if place in sparse:
                    reduced[place] = self.rows.gather(place, gradient)
                elif gradient is not None and place not in planned:  # sparse at first, not now
                    reduced[place] = self._sum(place, dense[place])
        finite = self._tracer.verdict()
        if not self.undoes and hosts:
            facts = {wire.ANY_NOT_FINITE: tf.reshape(finite, (1,))}
            finite = tf.reduce_all(self.ops.require(facts, NonFiniteGradientError))
        # The totals depend on the checks of the payloads: a step that fails leaves no trace.
        totals = [values_of(run.program.result[0]) for run in runs]
        with tf.control_dependencies([finite, *checks, *totals]):
            for run in runs:
                self._end_run(run, finite, dense, reduced)
            self.rows.end_step(finite)
            self.traffic.end_step(finite)
            self.steps.assign_add(tf.cast(finite, tf.int64))
            self._last.assign(tf.where(finite, tf.constant(DISCARDABLE, tf.int64), LEFT_OUT))
        if self.undoes:
            reduced = [times(g, tf.where(finite, 1.0, float("nan"))) for g in reduced]
        if self.norm is not None:
            with tf.control_dependencies(totals):
                self.norm.measure(reduced)
        return reduced, finite

    def _check_step(self, gradients: Sequence[Any], everybody: tf.Tensor | None) -> list[tf.Tensor]:
        """Return checks that fail, on all ranks, unless all are in the same step and phase."""
        rows = [
            tf.shape(gradients[p].values, tf.int64)[0]
            if isinstance(gradients[p], tf.IndexedSlices)
            else tf.constant(0, tf.int64)
            for p in self.planner.apart
        ]
        kinds = zlib.crc32(repr([self._kind(gradient) for gradient in gradients]).encode())
        checks, most = self.sync.check_step(kinds, rows, everybody, self.ops)
        self.rows.begin_step(most)
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
            extra["moment"] = bucket.flatten(self.ops, moments, "float32")
        context = Context(
            bucket.layout,
            *self.participants.rank_and_size,
            tf.identity(self.steps),
            self.prescale,
            self.postscale,
        )
        before = state = bucket.state
        if undecided is not None:
            aggregate = partial(self._aggregate, bucket, context, state, extra)
            program = self.rows.gathered_or_compressed(bucket, undecided, state, aggregate)
            return _BucketRun(bucket, ProgramRunner(program, known), before, None)
        trained = self._trained(bucket, gradients)
        if trained is not None:
            zeros = with_leaves(state, [tf.zeros_like(x) for _, x in leaves(state)])
            state = _where(trained, state, zeros)
        flat = bucket.flatten(self.ops, dense, bucket.layout.dtype)
        program = self._aggregate(bucket, context, state, extra, flat)
        return _BucketRun(bucket, ProgramRunner(program, known), before, trained)

    def _aggregate(
        self, bucket: Bucket, context: Context, state: State, extra: Any, flat: tf.Tensor
    ) -> Program:
        arguments = self.ops, context, flat, state
        place = self.participants.place
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
            for gradient, (_, shape, _) in zip(gradients, self.layers)
        ]
        return bucket.flatten(self.ops, ones, "float32") > 0

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
        for place, piece in zip(bucket.places, self.ops.cut(bucket.layout, total)):
            if dense[place] is not None:
                reduced[place] = tf.cast(piece, dense[place].dtype)

    def _sum(self, place: int, gradient: tf.Tensor) -> tf.Tensor:
        """Allreduce a dense gradient that has no bucket."""
        wide = tf.cast(gradient, tf.float32) if gradient.dtype == tf.bfloat16 else gradient
        position = self.participants.place
        share = 1.0 if position is None else position.share
        request = Allreduce(wide, self.prescale, self.postscale * share)
        self.traffic.count_unbucketed(place, wide)
        name = f"{self.name}.dense{place}.{naming.readable(self.layers[place][0])}"
        total = self._tracer.perform(request, name, 0, among=self.process_set)
        if self.ops.verdicts is not None:
            self.ops.verdicts.append(self.ops.finite(total))
        return tf.cast(total, gradient.dtype)

    # -- between exchanges ---------------------------------------------------------------------

    def rename(self, name: str) -> None:
        """Change the prefix of the names of what travels."""
        if name != self.name:
            self.planner.rename(name)
            self._retrace()

    def watch(self) -> bool:
        """Let graphs that are traced from now on measure the gradient norm, when requested.

        Returns:
            True if they could not before.
        """
        if self.norm is not None:
            return False
        self.norm = GradientNorm()
        self._retrace()
        return True

    def commit(self) -> None:
        """Commit the last exchange: it can no longer be discarded."""
        self._last.assign(COMMITTED)

    def discard(self) -> None:
        """Roll back to the state before the last exchange, bit-exact; all ranks do the same.

        The exchange counts as skipped. A no-op if it was undone already, because of a non-finite
        gradient. Works eagerly, and as part of a traced graph.

        Raises:
            RuntimeError: there is nothing to discard; in a graph TensorFlow's
                `InvalidArgumentError`, with the same message.
        """
        if not (self.options.rollback or self.compressor.is_linear):
            raise RuntimeError(
                "discard_step() needs what was kept before the exchange: make the tape without "
                "rollback=False, or the optimizer with rollback=True"
            )
        nothing = (
            "discard_step() takes back the last exchange, once: call it after an exchange and "
            "before the next one"
        )
        if tf.executing_eagerly() and int(self._last) == COMMITTED:
            raise RuntimeError(nothing)

        def restore() -> None:
            self.planner.restore_previous()
            self.steps.assign_sub(tf.constant(1, tf.int64))
            self.traffic.discard_step()
            self.commit()

        check = tf.debugging.Assert(tf.not_equal(self._last, COMMITTED), [nothing])
        with tf.control_dependencies([] if check is None else [check]):
            tf.cond(tf.equal(self._last, DISCARDABLE), restore, lambda: None)

    def forget(self) -> None:
        """Reset what belongs to this rank alone to its value before the first step."""
        self.commit()
        for variable in (*self.traffic.variables.values(), *self.sums, self.traffic.summed):
            variable.assign(tf.zeros_like(variable))
        self.planner.reset_local()

    def retrain(self) -> None:
        """Let the compressors learn anew, from the next step on."""
        self.commit()
        self.planner.retrain(int(self.steps))

    def resize(self) -> set[Compressor]:
        """Adapt to another number of ranks; functions traced before must not run again.

        Returns:
            The compressors that have to learn anew.

        Raises:
            ValueError: on all ranks, if a compressor cannot work with so many.
        """
        self.rows.reset()
        self.commit()
        self.traffic.summed.assign(0)  # the step before may have ended on some ranks only
        anew = self.planner.resize(int(self.steps))
        self._retrace()
        self.agreed = False
        return anew


@contextmanager
def _explained_checks() -> Iterator[None]:
    """Raise failed checks of payloads and ranks in a graph as this package's exceptions."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if ASSERTION not in error.message:
            raise
        message = error.message.partition("assertion failed: ")[2].partition("\n")[0]
        kind = NonFiniteGradientError if wire.IS_NOT_FINITE in message else PayloadError
        raise kind(message or error.message) from None


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
