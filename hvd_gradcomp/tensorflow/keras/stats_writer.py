"""`StatsWriter` under Keras 3's `fit`; see `hvd_gradcomp.monitoring.reports`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as horovod
import keras

from hvd_gradcomp.monitoring.reports import Writer
from hvd_gradcomp.tensorflow import stats_writer
from hvd_gradcomp.tensorflow.comm.horovod import takes_part
from hvd_gradcomp.tensorflow.keras.local_steps import callback_of
from hvd_gradcomp.tensorflow.keras.optimizer import refusal
from hvd_gradcomp.tensorflow.reduce.registry import distributed_in, optimizer_of, reducer_of


class StatsWriter(keras.callbacks.Callback):
    """Callback version of `hvd.StatsWriter`: a record per span of batches, a line per epoch.

    The model's optimizer is a `DistributedOptimizer` of this package, or a `LossScaleOptimizer`
    around one; or it trains with `callbacks.LocalSteps`. Epochs are numbered from 1, as `fit`
    prints them. Another `fit` appends to existing files. With `steps_per_execution` of `compile`
    an execution counts as one batch.

    Args:
        every: batches in a span, at least 1.
        writers: `JSONLines`, `TensorBoard`, and others that are a `Writer`.
        process_set: the ranks that take part.

    Raises:
        TypeError: in `fit`, the optimizer is no `DistributedOptimizer`, and no `LocalSteps` trains
            the model.
        ValueError, OSError: in `fit`, as in `hvd_gradcomp.monitoring.reports.StatsWriter`.
    """

    def __init__(
        self,
        every: int = 100,
        writers: Sequence[Writer] = (),
        process_set: Any = horovod.global_process_set,
    ) -> None:
        super().__init__()
        self.every, self.writers, self.process_set = every, writers, process_set
        self._stats: stats_writer.StatsWriter | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        if not takes_part(self.process_set):
            return
        callback = callback_of(self.model)
        if callback is not None:
            self._open(callback.build(self.model))
            return
        if not refusal(self.model.optimizer) and not self.model.built:
            open_late = partial(self._open, self.model.optimizer)
            distributed_in(self.model.optimizer).when_built(open_late)  # in the first step
            return
        if reducer_of(optimizer_of(self.model)).watch():  # existing traces cannot measure
            self.model.make_train_function(force=True)
        self._open(self.model.optimizer)

    def _open(self, source: Any) -> None:
        self._stats = stats_writer.StatsWriter(source, self.every, self.writers)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        if self._stats is not None:
            self._stats.step()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        del logs
        if self._stats is not None:
            self._stats.epoch(epoch + 1)

    def on_train_end(self, logs: Any = None) -> None:
        del logs
        if self._stats is not None:
            self._stats.close()
