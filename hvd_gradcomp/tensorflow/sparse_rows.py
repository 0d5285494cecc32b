"""Exchange of sparse gradients: their rows are gathered, or they go as other layers do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.core.collectives import Switch
from hvd_gradcomp.core.compressor import Program, State, leaves, with_leaves
from hvd_gradcomp.planning import worth
from hvd_gradcomp.runtime import naming
from hvd_gradcomp.tensorflow import comm
from hvd_gradcomp.tensorflow.buckets import COMPRESSED, GATHERED, UNDECIDED, Buckets

LOGGER = logging.getLogger("hvd_gradcomp")


class SparseRows(Buckets):
    """Choice for each layer, which the first step makes by bytes; and the count of bytes.

    Args:
        layers, compressor: see `GraphReducer`.
        sparse_as_dense: as there.
        how: for `Buckets`.
    """

    def __init__(
        self, layers: Any, compressor: Any, *, sparse_as_dense: bool | None, **how: Any
    ) -> None:
        super().__init__(layers, compressor, **how)
        self.sparse_as_dense = sparse_as_dense
        self._rows: dict[int, tf.Tensor] = {}  # of the layers apart, the maximum over ranks
        self._chosen: dict[int, tf.Tensor] = {}  # their choice in the step being traced

    def gathers(self, place: int) -> bool:
        """Return True if a sparse gradient's rows are gathered as they are, as far as is known."""
        if self.sparse_as_dense is None:
            return place in self.left_out
        return not self.sparse_as_dense

    def most_rows(self, place: int, index_bytes: int) -> int:
        """Return the most rows that are worth gathering; see `worth.most_rows`."""
        return worth.most_rows(
            self.assigned[place], self.layers[place], self.seat[1], index_bytes, filters_last=True
        )

    def say_rows(self, place: int, gathered: bool, rows: int) -> None:
        """Log the choice for a sparse gradient; -1 rows means that their number is unknown."""
        LOGGER.warning(
            "the gradient of %s is sparse%s: %s. sparse_as_dense=True or False decides otherwise",
            self.layers[place][0],
            f", {rows} rows a rank at most" if rows >= 0 else "",
            "its rows are gathered as they are, which moves fewer bytes than its compressor would"
            if gathered
            else "it is sent as other layers are, compressed where that pays",
        )

    def _choose_now(self, place: int, gradient: tf.IndexedSlices) -> tf.Tensor:
        """Return 1 if the rows are gathered in this step, else 0."""
        most = self.most_rows(place, gradient.indices.dtype.size)
        choice = tf.identity(self.choices[place])
        now = tf.where(self._rows[place] <= most, GATHERED, COMPRESSED)
        chosen = tf.where(choice == UNDECIDED, tf.cast(now, tf.int64), choice)
        self._chosen[place] = chosen
        return tf.cast(chosen == GATHERED, tf.int32)

    def _settle(self, finite: tf.Tensor) -> None:
        """Keep the first step's choice from then on; rank 0 logs it."""
        for place, chosen in self._chosen.items():
            choice = self.choices[place]
            first = tf.equal(choice, UNDECIDED) & finite
            if self.process_set.rank() == 0:
                self._say(place, first, chosen)
            choice.assign(tf.where(first, chosen, choice))

    def _say(self, place: int, first: tf.Tensor, chosen: tf.Tensor) -> None:
        def told(kind: Any, most: Any) -> int:
            self.say_rows(place, int(kind) == GATHERED, int(most))
            return 0

        def say() -> tf.Tensor:
            return tf.numpy_function(told, [chosen, self._rows[place]], tf.int64)

        tf.cond(first, say, lambda: tf.constant(0, tf.int64))

    def _rows_or(
        self, bucket: int, gradient: tf.IndexedSlices, state: State, program: Callable[..., Program]
    ) -> Program:
        """Gather rows, or exchange the layer as any other; the result is rows."""
        (place,) = self.places[bucket]

        def compressed() -> Program:
            table = tf.convert_to_tensor(gradient)
            layout = self.layouts[bucket]
            flat = self.ops.flatten(layout, [table], layout.dtype)
            total, after = yield from program(flat)
            (table,) = self.ops.cut(layout, total)
            rows = tf.range(self.layers[place][1][0], dtype=gradient.indices.dtype)
            return (tf.cast(table, gradient.dtype), rows, *(x for _, x in leaves(after)))

        def gathered() -> Program:
            yield from ()
            found = self._gather(place, gradient)
            return (found.values, found.indices, *(x for _, x in leaves(state)))

        index = self._choose_now(place, gradient)
        values, indices, *kept = yield Switch(index, (compressed, gathered))
        return tf.IndexedSlices(values, indices, gradient.dense_shape), with_leaves(state, kept)

    def _gather(self, place: int, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
        """Gather every rank's slices, as stock Horovod does: nothing is compressed."""
        name = f"{self.name}.sparse{place}.{naming.readable(self.layers[place][0])}"
        values = self._gather_rows(gradient.values, f"{name}.values")
        indices = self._gather_rows(gradient.indices, f"{name}.indices")
        if self.op == horovod.Average:
            values = values / tf.cast(self.process_set.size(), values.dtype)
        self._count(place, gradient.values)
        if self.ops.verdicts is not None:  # all ranks see all values
            self.ops.verdicts.append(self.ops.finite(values))
        return tf.IndexedSlices(values, indices, gradient.dense_shape)

    def _gather_rows(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        wire = tf.cast(rows, tf.float32) if rows.dtype == tf.bfloat16 else rows
        reply = mpi_ops.allgather(
            wire,
            name=name,
            ignore_name_scope=True,
            process_set=self.process_set,
        )
        self.sent(wire)
        self.received(reply)
        return tf.cast(reply, rows.dtype)

    def sent(self, tensor: tf.Tensor) -> None:
        """Count the bytes passed to a collective."""
        self.counters["bytes_sent"].assign_add(comm.bytes_of(tensor))

    def received(self, tensor: tf.Tensor) -> None:
        """Count the bytes returned by a collective."""
        self.counters["bytes_received"].assign_add(comm.bytes_of(tensor))

    def _count(self, place: int, sent: tf.Tensor) -> None:
        here = tf.one_hot(place, len(self.layers), dtype=tf.int64)
        self.counters["unbucketed"].assign_add(here * tf.size(sent, tf.int64))
