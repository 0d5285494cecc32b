"""`StatsWriter` on PyTorch; see `hvd_gradcomp.watching.reports`."""

from __future__ import annotations

from collections.abc import Sequence

import horovod.torch as horovod
import torch

from hvd_gradcomp.torch.optimizer import engine_of
from hvd_gradcomp.watching import reports


class StatsWriter(reports.StatsWriter):
    """Writes an optimizer's `compression_stats` every so many steps, and a line each epoch.

    ::

        stats = StatsWriter(optimizer, every=100, writers=[JSONLines("stats.jsonl")])
        for epoch in range(epochs):
            for x, y in batches:
                ...
                optimizer.step()
                stats.step()
            stats.epoch(epoch)

    Each record is of the steps since the last one. Make it after a checkpoint is loaded.

    Args:
        optimizer: a `DistributedOptimizer` of this package.
        every: steps in a span, at least 1.
        writers: of `JSONLines`, `TensorBoard`, and others that are a `Writer`.

    Raises:
        TypeError: the optimizer was not made by `hvd_gradcomp.torch.DistributedOptimizer`.
        ValueError, OSError: as in `hvd_gradcomp.watching.reports.StatsWriter`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        every: int = 100,
        writers: Sequence[reports.Writer] = (),
    ) -> None:
        engine = engine_of(optimizer)
        super().__init__(
            engine.stats,
            rank=horovod.rank(),
            first=engine.process_set.rank() == 0,
            writers=writers,
            every=every,
        )
