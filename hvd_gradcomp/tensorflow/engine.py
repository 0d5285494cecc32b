"""Reducer of one optimizer's gradients on TensorFlow, or of the tapes over one list of variables.

While a `tf.function` is traced the exchange becomes part of it (`graph_exchange`). Eager calls go
through the reducer's own `tf.function`, like stock Horovod's. State lives in variables that the
owner creates, so checkpoints include it (`buckets`).

Everything that travels has a name that is the same on all ranks, see `hvd_gradcomp.runtime.naming`.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod import __version__ as horovod_version
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.algorithms.dense import as_compressor
from hvd_gradcomp.codecs.linear import LinearCompressor
from hvd_gradcomp.core import validate, wire
from hvd_gradcomp.core.compressor import Compressor, with_leaves
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.ops import NonFiniteGradientError, PayloadError
from hvd_gradcomp.ops.tensorflow import ASSERTION
from hvd_gradcomp.planning import worth
from hvd_gradcomp.runtime import config_check, errors, hierarchy, typed_json
from hvd_gradcomp.runtime import stats as runtime_stats
from hvd_gradcomp.runtime.unique_names import UniqueNames
from hvd_gradcomp.tensorflow import stall_inspector
from hvd_gradcomp.tensorflow.buckets import GATHERED, Layers
from hvd_gradcomp.tensorflow.graph_exchange import (
    GraphExchange,
    as_dtype,
    nothing_like,
    times,
    values_of,
)
from hvd_gradcomp.tensorflow.step_sync import JOINED
from hvd_gradcomp.tensorflow.variables import new_variable

LOGGER = logging.getLogger("hvd_gradcomp")
living: weakref.WeakSet[GraphReducer] = weakref.WeakSet()
TITLES = UniqueNames("gradcomp")


def gather_objects(item: Any, kind: Any, name: str, process_set: Any) -> list[Any]:
    """Gather every rank's item of a kind on all ranks, outside of traces; see `typed_json`."""

    def gather(data: tf.Tensor, title: str) -> Any:
        every = mpi_ops.allgather(
            data, name=f"{name}.{title}", ignore_name_scope=True, process_set=process_set
        )
        return every.numpy()

    def allgather(mine: bytes) -> Iterator[bytes]:
        lengths = gather(tf.constant([len(mine)], tf.int32), "sz")
        data, start = gather(tf.io.decode_raw(mine, tf.uint8), "t").tobytes(), 0
        for length in lengths.tolist():
            yield data[start : start + length]
            start += length

    return typed_json.gathered(item, kind, allgather, process_set.ranks)


def check(
    what: str,
    op: Any,
    groups: Any,
    num_groups: int,
    compression: Any,
    process_set: Any = horovod.global_process_set,
    hierarchical: bool = False,
) -> Compressor:
    """Refuse arguments that cannot work, and return the compressor."""
    validate.exchange(
        what,
        initialized=horovod.is_initialized(),
        groups=groups,
        num_groups=num_groups,
        op=op,
        allowed=(horovod.Average, horovod.Sum),
    )
    if hierarchical:
        hierarchy.place_of(mpi_ops, process_set, average=True)
    return as_compressor(compression, horovod.Compression)


def optimizer_of(model: Any) -> Any:
    """Return the optimizer that a model was compiled with, built."""
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return model.optimizer


def distributed_in(source: Any) -> Any:
    """Return the object that exchanges: the source, or the optimizer inside a loss scaler."""
    if hasattr(source, "_gradcomp"):
        return source
    return getattr(source, "inner_optimizer", source)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise Horovod's failures as its own exception, with their likely cause."""
    try:
        with stall_inspector.translated():
            yield
    except (tf.errors.UnknownError, tf.errors.FailedPreconditionError) as error:
        if "Horovod" not in error.message:
            raise
        said = error.message.rpartition("\n\n")[2]  # after the place in the graph
        raise HorovodInternalError(errors.explained(what, said)) from error


@contextmanager
def _explained_checks() -> Iterator[None]:
    """Raise failed checks of payloads and ranks in a graph as this package's exceptions."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if ASSERTION not in error.message:
            raise
        said = error.message.partition("assertion failed: ")[2].partition("\n")[0]
        kind = NonFiniteGradientError if wire.IS_NOT_FINITE in said else PayloadError
        raise kind(said or error.message) from None


def takes_part(process_set: Any) -> bool:
    """Return True if this rank belongs to the process set.

    `ProcessSet.included()` returns False wherever `horovod.torch` is imported after Horovod for
    TensorFlow, and then stock Horovod trains without reducing.
    """
    if process_set is horovod.global_process_set:
        return True
    return horovod.rank() in (process_set.ranks or ())


class GraphReducer(GraphExchange):
    """Reducer of one optimizer's gradients, or of the tapes over one list of variables.

    Args:
        layers: (name, shape, dtype) of everything that is reduced, in the same order on all ranks.
        compressor: of all layers.
        op: `Average` or `Sum`.
        predivide: splits the averaging before and after the sum.
        process_set: the ranks that take part.
        sparse_as_dense: compress `IndexedSlices` as dense tensors (True), gather them as they are
            (False), or whichever moves fewer bytes in the first step (None).
        hierarchical: compress only the sums of hosts; see `hierarchy`.
        nonfinite: handling of a step with a non-finite gradient: "raise", or "skip" or
            "propagate", which are the same here: gradients are NaN and nothing else changes.
        settings: other settings that must be equal on all ranks, for the config check.
        name: prefix of the names of everything that travels; see `UniqueNames`.
        make_variable: creates the variables that hold the state, for an owner that saves them.
            Without an owner, layers whose rows are gathered get no state and no bucket.
        tables: places of layers whose gradients are expected to be sparse.
        rollback: keep the state before the last exchange, so that the exchange can be discarded.

    Attributes:
        layouts: the buckets.
        variables: the state of each bucket, tensor by tensor.
        steps: exchanges so far, equal on all ranks.
        counters: this rank's counters, which `stats` reports.
        owned: whether an owner saves the variables, which are then not created anew.
        sums: of gradients that an owner accumulates on this rank for the next exchange.
        titles: with hosts, the names that each rank has in `replicated`.
    """

    def __init__(
        self,
        layers: Layers,
        compressor: Compressor,
        *,
        op: Any,
        predivide: float = 1.0,
        process_set: Any = horovod.global_process_set,
        sparse_as_dense: bool | None = None,
        hierarchical: bool = False,
        nonfinite: str = "raise",
        settings: str = "",
        name: str | None = None,
        make_variable: Callable[[str, tf.Tensor], tf.Variable] | None = None,
        tables: Collection[int] = (),
        rollback: bool = False,
    ) -> None:
        average = op == horovod.Average
        super().__init__(
            layers,
            compressor,
            op=op,
            predivide=predivide,
            process_set=process_set,
            place=hierarchy.place_of(mpi_ops, process_set, average) if hierarchical else None,
            name=name or TITLES.take(),
            make_variable=make_variable,
            sparse_as_dense=sparse_as_dense,
            undoes=nonfinite != "raise",
            rollback=rollback,
            left_out=tables if sparse_as_dense is False else (),
            apart=tables if sparse_as_dense is None and not hierarchical else (),
        )
        self.settings = (
            f"op={'Average' if average else 'Sum'}, gradient_predivide_factor={predivide}, "
            f"sparse_as_dense={sparse_as_dense}, hierarchical={hierarchical}, "
            f"nonfinite={nonfinite}, rollback={rollback}{settings}"
        )
        self.agreed = self._judged = False
        self._specs: list[Any] = [True] * len(self.layers)  # of the last gradients
        self.settled: set[int] = set()  # places of sparse gradients with a choice
        self.finite: Any = None  # whether the last exchange's gradients were, on all ranks
        self._eager = tf.function(self._reduce, autograph=False, reduce_retracing=True)
        living.add(self)

    def _make_groups(self, place: hierarchy.HostPosition) -> hierarchy.Groups:
        with tf.init_scope():
            return hierarchy.groups_of(mpi_ops, place, self._gather_objects)

    def _gather_objects(self, item: Any, kind: Any) -> list[Any]:
        with explained("the exchange of what the ranks train"):
            return gather_objects(item, kind, f"{self.name}.handshake", self.process_set)

    def rename(self, name: str) -> None:
        """Change the prefix of the names of what travels."""
        if name != self.name:
            self.name = name
            self._eager = tf.function(self._reduce, autograph=False, reduce_retracing=True)
        self._name_buckets()

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
        if not tf.executing_eagerly():
            with stall_inspector.unmarked():
                reduced, self.finite = self._reduce(list(gradients), list(moments))
            return reduced
        return self._run_eagerly(list(gradients), list(moments), None)

    def _run_eagerly(
        self, gradients: list[Any], moments: list[Any], everybody: tf.Tensor | None
    ) -> list[Any]:
        with _explained_checks(), explained("the exchange"), stall_inspector.unmarked():
            reduced, self.finite = self._eager(gradients, moments, everybody)
        return list(reduced)

    def take_part(self) -> int:
        """Exchange zeros and what the compressor keeps, until all ranks have joined.

        Returns:
            The number of exchanges in which this rank took part.

        Raises:
            DeadlockError: on all ranks, if a rank waits for something else.
        """
        ask = tf.function(self._gather_joined, autograph=False)
        taken = 0
        while True:
            with explained("hvd.join()"):
                everybody = ask()
            if tf.reduce_all((everybody[:, 0] == JOINED) | (everybody[:, 0] == 0)):
                return taken
            taken += 1
            nothing = [nothing_like(s, *layer[1:]) for s, layer in zip(self._specs, self.layers)]
            self._run_eagerly(nothing, [None] * len(nothing), everybody)

    def _reduce_scaled(
        self, gradients: Sequence[Any], moments: Sequence[Any] | None, scale: tf.Tensor
    ) -> list[Any]:
        """Reduce gradients times a scale, which saves small ones in half precision.

        The exchange sees them without it, in float32. Gradients that are summed in half precision,
        or gathered as they are, keep the scale meanwhile.
        """
        kept = set(range(len(gradients)))
        for (one, layout), places in zip(self._planned, self.places):
            if not (isinstance(one, LinearCompressor) and one.in_halves(layout)):
                kept.difference_update(places)
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

    def _agree(self, gradients: Sequence[Any]) -> None:
        """Compare what is about to be trained with the other ranks, once."""
        kinds = [self._kind(gradient) for gradient in gradients]
        sparse = [place for place, kind in enumerate(kinds) if kind == ", sparse"]
        if self.sparse_as_dense is False and self._plans_anew:
            self.leave_out({*self.left_out, *sparse})
        described = [
            (name, shape, f"{dtype}{kind}")
            for (name, shape, dtype), kind in zip(self.layers, kinds)
        ]
        mine = config_check.describe(
            described,
            self.compressor,
            self.layouts,
            self.settings,
            framework=f"tensorflow {tf.__version__}",
            horovod=horovod_version,
        )
        with tf.init_scope():
            every = self._gather_objects(mine, config_check.Description)
        config_check.agree(every, self.process_set.ranks)
        if self.sparse_as_dense is None:
            self._choose(gradients, sparse)
        if self.process_set.rank() == 0 and not self._judged and self._planned:
            for line in worth.warnings(self.compressor, self._planned, self.seat[1]):
                LOGGER.warning("%s", line)
        self._judged = True
        if self.place is not None:
            _ = self.participants.groups  # created while all ranks are here
            with tf.init_scope():
                own = [title for title, _ in self.replicated]
                self.titles = self._gather_objects(own, list[str])
        self.agreed = True

    @property
    def _plans_anew(self) -> bool:
        """Return True if buckets may change in the first step, since no owner saves their state."""
        return not (self.owned and any(self.variables))

    def _choose(self, gradients: Sequence[Any], sparse: Sequence[int]) -> None:
        """Decide on sparse gradients, once, or leave that to the graph.

        The graph decides if a number of rows is not known yet, as with batches of any size.
        """
        new = [p for p in sparse if p not in self.settled and p not in self.apart]
        if not new:
            return
        left_out, apart = set(self.left_out), set(self.apart)
        mine = [-1 if (n := gradients[p].values.shape[0]) is None else int(n) for p in new]
        with tf.init_scope():
            everybody = self._gather_objects(mine, list[int])
        for place, rows in zip(new, zip(*everybody)):
            most = self.most_rows(place, gradients[place].indices.dtype.size)
            splits = self.place is None and not self.assigned[place].whole_model
            if self._plans_anew and splits and min(rows) < 0:
                apart.add(place)
                continue
            self.settled.add(place)
            gathered = self._plans_anew and min(rows) >= 0 and max(rows) <= most
            if gathered:
                left_out.add(place)
            if self.process_set.rank() == 0:
                self.say_rows(place, gathered, max(rows))
        self.leave_out(left_out, apart)

    def stats(self) -> CompressionStats:
        """Return totals since the start; read from the device."""
        counted = {
            name: int(self.counters[name])
            for name in ("exchanges", "bytes_sent", "bytes_received", "skipped")
        }
        gathered = {place for place, choice in self.choices.items() if int(choice) == GATHERED}
        used = [b for b, places in enumerate(self.places) if not gathered.intersection(places)]
        mine = [bucket for bucket in used if self.leads(bucket)]
        planned = {name for bucket in used for name in self.layouts[bucket].names}
        theirs = planned - {name for bucket in mine for name in self.layouts[bucket].names}
        unbucketed = self.counters["unbucketed"].numpy().tolist()
        names = [name for name, _, _ in self.layers]
        steps = counted.pop("exchanges")
        return runtime_stats.stats(
            [
                runtime_stats.BucketTotals(
                    self.layouts[bucket],
                    self.compressors[bucket],
                    with_leaves(self.templates[bucket], list(self.variables[bucket])),
                    steps,
                )
                for bucket in mine
            ],
            runtime_stats.Counters(**counted),
            steps=steps,
            order=names,
            beside={name: sent for name, sent in zip(names, unbucketed) if name not in theirs},
            unplanned={name: prod(shape) for name, shape, _ in self.layers if name not in planned},
            norm=lambda x: float(tf.norm(x)),
            gradient_norms=() if self._norm is None else [float(self._norm)],
        )

    def watch(self) -> bool:
        """Let graphs that are traced from now on measure the gradient norm, at each `measure`.

        Returns:
            True if they could not before.
        """
        if self._norm is not None:
            return False
        with tf.init_scope():
            self._norm = new_variable("gradcomp_norm", tf.constant(math.nan))
            self._asked = new_variable("gradcomp_asked", tf.constant(False))
        self._eager = tf.function(self._reduce, autograph=False, reduce_retracing=True)
        return True

    def measure(self) -> None:
        """Request the norm of the next exchange's result; a no-op if nobody watches."""
        if self._norm is not None:
            self._asked.assign(True)

    def resize(self) -> set[Compressor]:
        anew = super().resize()
        self._eager = tf.function(self._reduce, autograph=False, reduce_retracing=True)
        self.agreed = False
        return anew


def poisoned(gradients: list[Any], others: Sequence[Any]) -> list[Any]:
    """Make gradients non-finite if `others` are, which are not exchanged themselves.

    So all ranks learn of it, and skip the step together.
    """
    zeros = [tf.cast(tf.reduce_sum(values_of(g) * 0), tf.float32) for g in others if g is not None]
    place = next((i for i, g in enumerate(gradients) if g is not None), None)
    if not zeros or place is None:
        return gradients
    first = times(gradients[place], 1.0 + tf.add_n(zeros))
    return [*gradients[:place], first, *gradients[place + 1 :]]
