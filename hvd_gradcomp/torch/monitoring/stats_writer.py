"""`StatsWriter` for PyTorch; see `hvd_gradcomp.monitoring.reports`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_gradcomp.monitoring import reports
from hvd_gradcomp.torch.monitoring.inspection import reducers_of, stats_of


class StatsWriter(reports.StatsWriter):
    """Writer of `compression_stats` every so many steps, and of a line each epoch.

    ::

        stats = StatsWriter(optimizer, every=100, writers=[JSONLines("stats.jsonl")])
        for epoch in range(epochs):
            for x, y in batches:
                ...
                optimizer.step()
                stats.step()
            stats.epoch(epoch)

    Each record covers the steps since the last one. Make it after a checkpoint is loaded.

    Args:
        source: a `DistributedOptimizer` or `LocalSteps` of this package; with
            `DistributedDataParallel` the model, or the state that `ddp.compress` returned.
        every: steps in a span, at least 1.
        writers: `JSONLines`, `TensorBoard`, or any other `Writer`.

    Raises:
        TypeError: `source` is none of these.
        ValueError, OSError: as in `hvd_gradcomp.monitoring.reports.StatsWriter`.
    """

    def __init__(
        self,
        source: Any,
        every: int = 100,
        writers: Sequence[reports.Writer] = (),
    ) -> None:
        reducer = reducers_of(source)[0]
        super().__init__(
            stats_of(source),
            rank=reducer.transport.global_rank(),
            first=reducer.participants.process_set.rank() == 0,
            writers=writers,
            every=every,
        )
