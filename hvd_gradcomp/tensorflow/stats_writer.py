"""`StatsWriter` in custom loops on TensorFlow; see `hvd_gradcomp.monitoring.reports`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as horovod

from hvd_gradcomp.monitoring import reports
from hvd_gradcomp.tensorflow.local_steps import LocalSteps
from hvd_gradcomp.tensorflow.stats import reader_of, reducers_of


class StatsWriter(reports.StatsWriter):
    """Writer of `compression_stats` every so many steps, and a line per epoch, in a custom loop.

    ::

        stats = StatsWriter(optimizer, every=100, writers=[JSONLines("stats.jsonl")])
        for epoch in range(epochs):
            for x, y in batches:
                train_step(x, y)
                stats.step()
            stats.epoch(epoch)

    Each record covers the steps since the last one. The gradient norm is measured in the step that
    ends a span; a `tf.function` that was traced before this object was made cannot measure it.

    Args:
        source: as in `compression_stats`: an optimizer that is built; a tape or a list of
            variables after the first step; a `LocalSteps`, which has no gradient norm.
        every: steps in a span, at least 1.
        writers: `JSONLines`, `TensorBoard`, and others that are a `Writer`.

    Raises:
        TypeError: nothing is exchanged for the source.
        ValueError, OSError: as in `hvd_gradcomp.monitoring.reports.StatsWriter`.
    """

    def __init__(
        self, source: Any, every: int = 100, writers: Sequence[reports.Writer] = ()
    ) -> None:
        self._reducer = reducers_of(source)[0]
        super().__init__(
            reader_of(source),
            rank=horovod.rank(),
            first=self._reducer.process_set.rank() == 0,
            writers=writers,
            every=every,
        )
        if not isinstance(source, LocalSteps):  # what it exchanges is no gradient
            self._reducer.watch()
        self._request_norm()

    def step(self) -> None:
        super().step()
        self._request_norm()

    def _request_norm(self) -> None:
        norm = self._reducer.exchange.norm
        if self.reads and self.due and norm is not None:
            norm.request()
