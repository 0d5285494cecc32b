"""Job of Horovod's ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import horovod.torch as horovod
import torch

from hvd_gradcomp.runtime.driver import run_until_done
from hvd_gradcomp.torch.comm.horovod import TITLES, HorovodBackend, gather_objects, pauses
from hvd_gradcomp.torch.drop_in.wrapped_horovod import LocalSteps, MomentumExchange
from hvd_gradcomp.torch.local.wrapped_optimizer import WrappedOptimizer
from hvd_gradcomp.torch.reduce.backend import Backend
from hvd_gradcomp.torch.reduce.bucket import Named
from hvd_gradcomp.torch.reduce.reducer import BucketPrograms
from hvd_gradcomp.tuning.job import Timed


class HorovodJob:
    """Ranks started by horovodrun or mpirun; see `Job`. It initializes Horovod for PyTorch."""

    library = "Horovod"
    shard, shards = 0, 1

    def __init__(self) -> None:
        horovod.init()
        self.group: Any = horovod.global_process_set

    def rank(self) -> int:
        return int(horovod.rank())

    def size(self) -> int:
        return int(horovod.size())

    def hosts(self) -> int:
        return int(horovod.cross_size())

    def barrier(self) -> None:
        horovod.barrier()

    def slowest(self, seconds: float) -> float:
        every = horovod.allgather(torch.tensor([seconds], dtype=torch.float64), name="slowest")
        return float(every.max())

    def gather_objects(self, item: Any, kind: Any) -> list[Any]:
        return gather_objects(item, kind, "gradcomp.job", self.group)

    def backend(self) -> Backend:
        return HorovodBackend(TITLES.take(), self.group)

    def exchange_dense(self, gradients: list[torch.Tensor]) -> float:
        """Exchange as stock Horovod's optimizer: last layers first, fused by Horovod."""
        handles = [
            horovod.allreduce_async_(g, name=f"dense.{place}")
            for place, g in reversed(list(enumerate(gradients)))
        ]
        submitted = time.perf_counter()
        for handle in handles:
            horovod.synchronize(handle)
        return submitted

    def dense_exchanges(self, layers: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return the layers: Horovod fuses what is there in one of its cycles of a millisecond."""
        return list(layers)

    def run_to_end(self, programs: BucketPrograms, timed: Timed) -> None:
        """Run them as replies come: Horovod matches collectives by name."""
        run_until_done([timed(programs.poll_all())], pauses())

    def local_steps(
        self, optimizer: torch.optim.Optimizer, named: Named, **settings: Any
    ) -> WrappedOptimizer:
        return LocalSteps(optimizer, named, **settings)

    def momentum_exchange(
        self, optimizer: torch.optim.Optimizer, named: Named, **settings: Any
    ) -> WrappedOptimizer:
        return MomentumExchange(optimizer, named, **settings)

    def close(self) -> None:
        horovod.shutdown()
