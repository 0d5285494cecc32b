"""Numbers of the ranks for `RoundClock` on TensorFlow.

An eager collective blocks its thread, and has no name of its own to tell it from others, so each
gather is a graph of its own, in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.tensorflow.comm import horovod as comm
from hvd_gradcomp.tensorflow.comm import stall_inspector
from hvd_gradcomp.tensorflow.interop.background_call import BackgroundCall


class _PendingRows:
    """Rows of numbers that are on their way.

    Args:
        gather: returns them, from a graph.
        row: of this rank.
        name: of the collective.
        process_set: the ranks.
    """

    def __init__(
        self,
        gather: Callable[[tf.Tensor], tf.Tensor],
        row: tf.Tensor,
        name: str,
        process_set: Any,
    ) -> None:
        self._name, self._process_set = name, process_set
        self._call = BackgroundCall(lambda: gather(row).numpy(), "gradcomp-clock")
        self.ready = self._call.ready

    def wait(self) -> list[list[int]]:
        what = "the comparison of how many steps the ranks have made"
        waits = stall_inspector.waiting(self._name, self._process_set)
        with comm.explained(what), waits:
            rows: list[list[int]] = self._call.wait().tolist()
        return rows


class GraphProgressGather:
    """Gather of one row of numbers a rank, without waiting for it.

    Args:
        title: prefix of the collectives' names, equal on all ranks.
        process_set: the ranks.
    """

    def __init__(self, title: str, process_set: Any) -> None:
        self._process_set = process_set
        self.rename(title)

    def rename(self, title: str) -> None:
        """Go on under another title, maybe among other ranks."""
        self._title = title
        self._graphs: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {}

    def submit(self, progress: Sequence[int], slot: int) -> _PendingRows:
        """Submit this rank's numbers; see `ProgressGather`."""
        name = f"{self._title}.clock.{slot}"
        with tf.device("/cpu:0"):
            row = tf.constant(list(progress), tf.int64)
        if name not in self._graphs:
            self._graphs[name] = self._traced(name, row)
        return _PendingRows(self._graphs[name], row, name, self._process_set)

    def _traced(self, name: str, row: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
        """Return the graph of a collective, which the stall inspector does not record.

        A rank that has submitted numbers goes on; it waits for them where they are due.
        """

        def gather(local_row: tf.Tensor) -> tf.Tensor:
            with tf.device("/cpu:0"):
                return comm.HorovodBackend().allgather(local_row, name, self._process_set)

        with stall_inspector.unmarked():
            traced = tf.function(gather, autograph=False).get_concrete_function(row)
        graph: Callable[[tf.Tensor], tf.Tensor] = traced
        return graph
