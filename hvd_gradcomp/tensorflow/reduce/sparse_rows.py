"""Exchange of sparse gradients: their rows are gathered, or they go as other layers do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.core.collectives import Switch
from hvd_gradcomp.method.compressor import Program, State, leaves, with_leaves
from hvd_gradcomp.planning import worth
from hvd_gradcomp.runtime import naming
from hvd_gradcomp.tensorflow.interop.variables import new_variable
from hvd_gradcomp.tensorflow.reduce.buckets import Bucket, BucketPlanner
from hvd_gradcomp.tensorflow.reduce.counters import ExchangeCounters
from hvd_gradcomp.tensorflow.reduce.options import ExchangeOptions

LOGGER = logging.getLogger("hvd_gradcomp")
UNDECIDED, GATHERED, COMPRESSED = 0, 1, 2  # choices for a layer apart


class RowChoices(NamedTuple):
    """Places of layers, by what was decided for their sparse gradients."""

    left_out: list[int]
    apart: list[int]
    decided: list[int]


class SparseRows:
    """Choice for each layer with a sparse gradient, which the first step makes by bytes.

    Args:
        options: of the exchange.
        planner: plans the buckets, without the layers whose rows are gathered.
        counters: of what is sent.
        tables: places of layers whose gradients are expected to be sparse.
    """

    def __init__(
        self,
        options: ExchangeOptions,
        planner: BucketPlanner,
        counters: ExchangeCounters,
        tables: Collection[int],
    ) -> None:
        self._options, self._planner, self._counters = options, planner, counters
        self._participants, self._ops = planner.participants, planner.ops
        self._decided: set[int] = set()  # places of sparse gradients with a choice
        self._choices: dict[int, tf.Variable] = {}  # of the layers apart
        self._rows: dict[int, tf.Tensor] = {}  # of these in this step, the maximum over ranks
        self._chosen: dict[int, tf.Tensor] = {}  # their choice in the step that is traced
        chooses = options.sparse_as_dense is None
        self._plan(
            tables if options.sparse_as_dense is False else (),
            tables if chooses and not options.hierarchical else (),
        )

    def _plan(self, left_out: Collection[int], apart: Collection[int]) -> None:
        self._planner.plan(left_out, apart)
        with tf.init_scope():
            undecided, apart = tf.constant(UNDECIDED, tf.int64), self._planner.apart
            self._choices = {p: new_variable("gradcomp_rows", undecided) for p in apart}

    def _replan(self, left_out: Collection[int], apart: Collection[int]) -> None:
        """Plan without some layers, unless that is the plan already; see `BucketPlanner.plan`."""
        if self._planner.left_out != sorted(left_out) or self._planner.apart != sorted(apart):
            self._plan(left_out, apart)

    @property
    def choices(self) -> RowChoices:
        """Return what was decided, for ranks that come later."""
        return RowChoices(self._planner.left_out, self._planner.apart, sorted(self._decided))

    def adopt(self, choices: RowChoices) -> None:
        """Take the decisions of another rank."""
        self._replan(choices.left_out, choices.apart)
        self._decided = set(choices.decided)

    def reset(self) -> None:
        """Let the next step decide on the layers apart."""
        for choice in self._choices.values():
            choice.assign(UNDECIDED)

    @property
    def gathered(self) -> set[int]:
        """Return the places of layers apart whose rows are gathered; read from the device."""
        return {place for place, choice in self._choices.items() if int(choice) == GATHERED}

    def split(
        self, gradients: Sequence[Any]
    ) -> tuple[list[Any], dict[int, tf.IndexedSlices], dict[int, tf.IndexedSlices]]:
        """Sort gradients by their exchange.

        Returns:
            Gradients to compress, with None in place of others; sparse ones to gather, by place;
            and those about which the graph decides.
        """
        dense: list[Any] = list(gradients)
        sparse: dict[int, tf.IndexedSlices] = {}
        undecided: dict[int, tf.IndexedSlices] = {}
        policy = self._options.sparse_as_dense
        for place, gradient in enumerate(gradients):
            if not isinstance(gradient, tf.IndexedSlices):
                continue
            if policy is None and place in self._planner.apart:
                dense[place], undecided[place] = None, gradient
            elif place in self._planner.left_out if policy is None else not policy:
                dense[place], sparse[place] = None, gradient
            else:
                dense[place] = tf.convert_to_tensor(gradient)
        return dense, sparse, undecided

    # -- the choice ------------------------------------------------------------------------------

    def leave_out(self, sparse: Collection[int]) -> None:
        """Plan without these layers, if rows are always gathered."""
        if self._options.sparse_as_dense is False:
            self._replan({*self._planner.left_out, *sparse}, ())

    def decide(
        self,
        sparse: dict[int, tf.IndexedSlices],
        replans: bool,
        gather: Callable[[Any, Any], list[Any]],
    ) -> None:
        """Decide on sparse gradients, once, or leave that to the graph; collective.

        The graph decides if a number of rows is not known yet, as with batches of any size.

        Args:
            sparse: gradients by place.
            replans: whether buckets may still change.
            gather: gathers an item of a type from every rank.
        """
        planner = self._planner
        new = [p for p in sparse if p not in self._decided and p not in planner.apart]
        if self._options.sparse_as_dense is not None or not new:
            return
        left_out, apart = set(planner.left_out), set(planner.apart)
        row_counts = [-1 if (n := sparse[p].values.shape[0]) is None else int(n) for p in new]
        for place, rows in zip(new, zip(*gather(row_counts, list[int]))):
            splits = self._participants.place is None and not planner.assigned[place].whole_model
            if replans and splits and min(rows) < 0:
                apart.add(place)
                continue
            self._decided.add(place)
            limit = self._most_rows(place, sparse[place])
            gathered = replans and min(rows) >= 0 and max(rows) <= limit
            if gathered:
                left_out.add(place)
            if self._participants.process_set.rank() == 0:
                self._log(place, gathered, max(rows))
        self._replan(left_out, apart)

    def _most_rows(self, place: int, gradient: tf.IndexedSlices) -> int:
        """Return the most rows that are worth gathering; see `worth.most_rows`."""
        return worth.most_rows(
            self._planner.assigned[place],
            self._planner.layers[place],
            self._participants.rank_and_size[1],
            gradient.indices.dtype.size,
            filters_last=True,
        )

    def _log(self, place: int, gathered: bool, rows: int) -> None:
        """Log the choice for a sparse gradient; -1 rows means that their number is unknown."""
        LOGGER.warning(
            "the gradient of %s is sparse%s: %s. sparse_as_dense=True or False decides otherwise",
            self._planner.layers[place][0],
            f", {rows} rows a rank at most" if rows >= 0 else "",
            "its rows are gathered as they are, which moves fewer bytes than its compressor would"
            if gathered
            else "it is sent as other layers are, compressed where that pays",
        )

    # -- the choice of the graph -----------------------------------------------------------------

    def begin_step(self, rows: Sequence[tf.Tensor]) -> None:
        """Begin to trace a step, with the maximum over ranks of the rows of each layer apart."""
        self._rows, self._chosen = dict(zip(self._planner.apart, rows)), {}

    def finish_step(self, finite: tf.Tensor) -> None:
        """Keep the first step's choice from then on; rank 0 logs it."""
        for place, chosen in self._chosen.items():
            choice = self._choices[place]
            first = tf.equal(choice, UNDECIDED) & finite
            if self._participants.process_set.rank() == 0:
                self._log_first(place, first, chosen)
            choice.assign(tf.where(first, chosen, choice))

    def _log_first(self, place: int, first: tf.Tensor, chosen: tf.Tensor) -> None:
        def on_host(choice: Any, rows: Any) -> int:
            self._log(place, int(choice) == GATHERED, int(rows))
            return 0

        def log() -> tf.Tensor:
            return tf.numpy_function(on_host, [chosen, self._rows[place]], tf.int64)

        tf.cond(first, log, lambda: tf.constant(0, tf.int64))

    def _choose(self, place: int, gradient: tf.IndexedSlices) -> tf.Tensor:
        """Return 1 if the rows are gathered in this step, else 0."""
        limit = self._most_rows(place, gradient)
        choice = tf.identity(self._choices[place])
        now = tf.where(self._rows[place] <= limit, GATHERED, COMPRESSED)
        chosen = tf.where(choice == UNDECIDED, tf.cast(now, tf.int64), choice)
        self._chosen[place] = chosen
        return tf.cast(chosen == GATHERED, tf.int32)

    def gathered_or_compressed(
        self,
        bucket: Bucket,
        gradient: tf.IndexedSlices,
        state: State,
        aggregate: Callable[[tf.Tensor], Program],
    ) -> Program:
        """Gather rows, or exchange the layer as any other; the result is rows."""
        (place,), layout = bucket.places, bucket.layout

        def compressed() -> Program:
            table = tf.convert_to_tensor(gradient)
            flat = self._ops.flatten(layout, [table], layout.dtype)
            total, after = yield from aggregate(flat)
            (table,) = self._ops.cut(layout, total)
            rows = tf.range(self._planner.layers[place][1][0], dtype=gradient.indices.dtype)
            return (tf.cast(table, gradient.dtype), rows, *(x for _, x in leaves(after)))

        def gathered() -> Program:
            yield from ()
            rows = self.gather(place, gradient)
            return (rows.values, rows.indices, *(x for _, x in leaves(state)))

        index = self._choose(place, gradient)
        values, indices, *kept = yield Switch(index, (compressed, gathered))
        return tf.IndexedSlices(values, indices, gradient.dense_shape), with_leaves(state, kept)

    # -- rows ------------------------------------------------------------------------------------

    def gather(self, place: int, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
        """Gather every rank's slices, as stock Horovod does: nothing is compressed."""
        planner = self._planner
        name = f"{planner.name}.sparse{place}.{naming.readable(planner.layers[place][0])}"
        values = self._gather_rows(gradient.values, f"{name}.values")
        indices = self._gather_rows(gradient.indices, f"{name}.indices")
        if self._options.averages:
            ranks = self._participants.process_set.size()
            values = values / tf.cast(ranks, values.dtype)
        self._counters.count_unbucketed(place, gradient.values)
        if self._ops.verdicts is not None:  # all ranks see all values
            self._ops.verdicts.append(self._ops.finite(values))
        return tf.IndexedSlices(values, indices, gradient.dense_shape)

    def _gather_rows(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        wire = tf.cast(rows, tf.float32) if rows.dtype == tf.bfloat16 else rows
        reply = mpi_ops.allgather(
            wire,
            name=name,
            ignore_name_scope=True,
            process_set=self._participants.process_set,
        )
        self._counters.sent(wire)
        self._counters.received(reply)
        return tf.cast(reply, rows.dtype)
