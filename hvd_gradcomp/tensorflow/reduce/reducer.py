"""Reducer of one optimizer's gradients on TensorFlow, or of the tapes over one list of variables.

While a `tf.function` is traced the exchange becomes part of it (`exchange`). Eager calls go through
the reducer's own `tf.function`, like stock Horovod's. State lives in variables that the owner
creates, so checkpoints include it (`buckets`).

Everything that travels has a name that is the same on all ranks, see `hvd_gradcomp.runtime.naming`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from horovod import __version__ as horovod_version
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import wire
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.ops import NonFiniteGradientError, PayloadError
from hvd_gradcomp.ops.tensorflow import ASSERTION, TensorFlowOps
from hvd_gradcomp.planning import worth
from hvd_gradcomp.planning.announcement import announce, announcement
from hvd_gradcomp.runtime import config_check, hierarchy
from hvd_gradcomp.runtime.program_runner import Groups, HostPosition, Participants
from hvd_gradcomp.runtime.step_header import SIZE, StepHeader
from hvd_gradcomp.runtime.unique_names import UniqueNames
from hvd_gradcomp.tensorflow.comm import horovod as comm
from hvd_gradcomp.tensorflow.comm import stall_inspector
from hvd_gradcomp.tensorflow.interop.variables import new_variable, plain_variable
from hvd_gradcomp.tensorflow.reduce.buckets import Bucket, BucketPlanner, Layers, MakeVariable
from hvd_gradcomp.tensorflow.reduce.counters import ExchangeCounters
from hvd_gradcomp.tensorflow.reduce.exchange import ExchangeTracer
from hvd_gradcomp.tensorflow.reduce.gradients import GradientNorm, as_dtype, times, zero_like
from hvd_gradcomp.tensorflow.reduce.options import ExchangeOptions
from hvd_gradcomp.tensorflow.reduce.sparse_rows import SparseRows
from hvd_gradcomp.tensorflow.reduce.step_sync import StepSync

LOGGER = logging.getLogger("hvd_gradcomp")
living: weakref.WeakSet[GraphReducer] = weakref.WeakSet()
TITLES = UniqueNames("gradcomp")


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
        trained: the variables whose gradients these are, if they are gradients.
        host: what exchanges them, as the user knows it.
        announces: log what begins; False for a part of what the owner announces.

    Attributes:
        planner: of the buckets, with their state.
        participants: the ranks.
        counters: of steps and traffic.
        steps: exchanges so far, equal on all ranks.
        rows: the exchange of sparse gradients.
        sync: the comparison of ranks in each step.
        exchange: adds an exchange to a graph.
        owned: whether an owner saves the variables, which are then not created anew.
        agreed: whether ranks have compared what they train.
        finite: whether the last exchange's gradients were, on all ranks.
        sums: of gradients that an owner accumulates on this rank for the next exchange.
        titles: with hosts, the names that each rank has in `planner.replicated`.
        host: as given.
        traced_in: a weak reference to the graph in which an exchange was traced last.
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
        trained: Sequence[Any] = (),
        host: str = "",
        announces: bool = True,
    ) -> None:
        self.layers, self.compressor, self.options = list(layers), compressor, options
        self._settings, self.owned = f"{options}{settings}", make_variable is not None
        make_variable = make_variable or new_variable
        self.ops = TensorFlowOps()
        self.participants = Participants(options.process_set, options.position, self._make_groups)
        self.planner = BucketPlanner(
            self.layers,
            compressor,
            self.participants,
            self.ops,
            name or TITLES.take(),
            make_variable,
            keeps_snapshot=options.rollback and not compressor.is_linear,
        )
        self.counters = ExchangeCounters(make_variable, len(self.layers))
        self.steps, self.process_set = self.counters.steps, options.process_set
        self.rows = SparseRows(options, self.planner, self.counters, tables)
        self.sync = StepSync(self.planner, self.counters)
        self.exchange = ExchangeTracer(options, self.planner, self.counters, self.rows, self.sync)
        self.agreed = self._judged = False
        self._announces = announces
        self.finite: Any = None
        self.sums: list[tf.Variable] = []
        self.titles: list[list[str]] = []
        self._specs: list[Any] = [True] * len(self.layers)  # of the last gradients
        plain = map(plain_variable, trained)
        self._sources = [weakref.ref(v) for v in plain if isinstance(v, tf.Variable)]
        self.host, self.traced_in = host, _nowhere
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
    def plan(self) -> list[tuple[Compressor, Layout]]:
        """Return the buckets with their compressors, whichever ranks lead them."""
        return [(bucket.planned, bucket.layout) for bucket in self.buckets]

    @property
    def variables(self) -> list[tf.Variable]:
        """Return all variables of the exchange."""
        return [self.steps, *self.counters.local.values(), *self.planner.variables]

    def sources(self) -> set[int]:
        """Return the `id`s of the variables whose gradients these are, as far as they exist."""
        return {id(v) for ref in self._sources if (v := ref()) is not None}

    def _make_groups(self, place: HostPosition) -> Groups:
        with tf.init_scope():
            return hierarchy.groups_of(mpi_ops, place, self._gather_objects)

    def _gather_objects(self, item: Any, kind: Any) -> list[Any]:
        with tf.init_scope(), comm.explained("the exchange of what the ranks train"):
            return comm.gather_objects(item, kind, f"{self.name}.handshake", self.process_set)

    def _retrace(self) -> None:
        """Trace the function for eager calls anew."""
        self._eager = tf.function(self.exchange.trace, autograph=False, reduce_retracing=True)

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
        require_one_replica(tf.distribute.get_strategy())
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
            reduced, self.finite = self.exchange.trace(list(gradients), list(moments))
        self.traced_in = weakref.ref(tf.compat.v1.get_default_graph())
        return reduced

    def _run_eagerly(
        self, gradients: list[Any], moments: list[Any], messages: tf.Tensor | None
    ) -> list[Any]:
        with _explained_checks(), comm.explained("the exchange"), stall_inspector.unmarked():
            reduced, self.finite = self._eager(gradients, moments, messages)
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
                messages = gather()
            headers = [StepHeader(*row[:SIZE]) for row in messages.numpy().tolist()]
            if not any(header.takes_part for header in headers):
                return taken
            taken += 1
            zeros = [zero_like(s, *layer[1:]) for s, layer in zip(self._specs, self.layers)]
            self._run_eagerly(zeros, [None] * len(zeros), messages)

    def _reduce_scaled(
        self, gradients: Sequence[Any], moments: Sequence[Any] | None, scale: tf.Tensor
    ) -> list[Any]:
        """Reduce gradients times a scale, which saves small ones in half precision.

        The exchange sees them without it, in float32. Gradients that are summed in half precision,
        or gathered as they are, keep the scale meanwhile.
        """
        kept = set(range(len(gradients)))
        for bucket in self.buckets:
            if not bucket.planned.in_halves(bucket.layout):
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

    def _agree(self, gradients: Sequence[Any]) -> None:
        """Compare what is about to be trained with the other ranks, once."""
        kinds = [self.exchange.kind_of(gradient) for gradient in gradients]
        sparse = {i: g for i, (g, kind) in enumerate(zip(gradients, kinds)) if kind == ", sparse"}
        # Buckets may change in the first step, unless an owner saves their state.
        replans = not (self.owned and self.planner.variables)
        if replans:
            self.rows.leave_out(sparse)
        description = config_check.describe(
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
        descriptions = self._gather_objects(description, config_check.Description)
        config_check.agree(descriptions, self.process_set.ranks)
        self.rows.decide(sparse, replans, self._gather_objects)
        if self.process_set.rank() == 0 and not self._judged and self.buckets:
            _, ranks = self.participants.rank_and_size
            for line in worth.warnings(self.compressor, self.plan, ranks):
                LOGGER.warning("%s", line)
            if self._announces:
                among_hosts = self.participants.place is not None
                scope = "between hosts" if among_hosts else ""
                announce(announcement(self.compressor, self.plan, ranks, scope=scope))
        self._judged = True
        if self.participants.place is not None:
            _ = self.participants.groups  # created while all ranks are here
            titles = [title for title, _ in self.planner.replicated]
            self.titles = self._gather_objects(titles, list[str])
        self.agreed = True

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
        if self.exchange.norm is not None:
            return False
        self.exchange.norm = GradientNorm()
        self._retrace()
        return True

    def rollback(self) -> None:
        """Roll back to the state before the last exchange, bit-exact; all ranks do the same.

        The exchange counts as skipped. A no-op if it was rolled back already, because of a
        non-finite gradient. Works eagerly, and as part of a traced graph.

        Raises:
            RuntimeError: there is nothing to roll back; see `ExchangeCounters.rollback`.
        """
        if not (self.options.rollback or self.compressor.is_linear):
            raise RuntimeError(
                "discard_step() needs what was kept before the exchange: make the tape without "
                "rollback=False, or the optimizer with rollback=True"
            )
        self.counters.rollback(self.planner.rollback)

    def reset_local(self) -> None:
        """Reset what belongs to this rank alone to its value before the first step."""
        self.counters.commit()
        self.counters.reset_local()
        for total in self.sums:
            total.assign(tf.zeros_like(total))
        self.planner.reset_local()

    def retrain(self) -> None:
        """Let the compressors learn anew, from the next step on."""
        self.counters.commit()
        self.planner.retrain(int(self.steps))

    def resize(self) -> set[Compressor]:
        """Adapt to another number of ranks; functions traced before must not run again.

        Returns:
            The compressors that have to learn anew.

        Raises:
            ValueError: on all ranks, if a compressor cannot work with so many.
        """
        self.rows.reset()
        self.counters.commit()
        self.counters.checksum.assign(0)  # the step before may have ended on some ranks only
        anew = self.planner.resize(int(self.steps))
        self._retrace()
        self.agreed = False
        return anew


def require_one_replica(strategy: tf.distribute.Strategy) -> None:
    """Require that no strategy of TensorFlow's has several replicas in this process.

    Raises:
        ValueError: it has.
    """
    if strategy.num_replicas_in_sync > 1:
        raise ValueError(
            f"{type(strategy).__name__} has {strategy.num_replicas_in_sync} replicas in this "
            "process and reduces their gradients itself, and Horovod's ranks are processes: start "
            "one for each device without tf.distribute. hvd.LocalSteps, or its callback, exchanges "
            "between processes that have replicas"
        )


def _nowhere() -> None:
    """Return nothing, as a weak reference to no graph."""


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
