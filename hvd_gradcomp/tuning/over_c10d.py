"""Job of the ranks of `torch.distributed`, or of one process that nobody else is with."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_gradcomp.core.collectives import Allreduce
from hvd_gradcomp.torch.comm.c10d import C10dBackend, ProcessGroup
from hvd_gradcomp.torch.local.wrapped_c10d import LocalSteps, MomentumExchange
from hvd_gradcomp.torch.local.wrapped_optimizer import WrappedOptimizer
from hvd_gradcomp.torch.reduce.backend import Backend
from hvd_gradcomp.torch.reduce.bucket import Named
from hvd_gradcomp.torch.reduce.reducer import BucketPrograms
from hvd_gradcomp.tuning.job import Timed

_FIRST_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20  # buckets of `DistributedDataParallel`


class TorchJob:
    """Ranks of `torch.distributed` over gloo; see `Job`.

    It connects the ranks that torchrun has started; a process that torchrun has not started is a
    job of one rank. A process group that is there already is used, and stays.

    Args:
        shards: ranks that shard a model between them, as `fully_shard` does: neighbours, such as
            those of a host. The ranks that have the same shard exchange it.

    Raises:
        ValueError: there are several ranks, and `shards` does not divide their number.
    """

    library = "torch.distributed"

    def __init__(self, shards: int = 1) -> None:
        self._is_ours = not dist.is_initialized()
        if self._is_ours and dist.is_torchelastic_launched():
            dist.init_process_group("gloo")
        elif self._is_ours:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.shards, ranks = shards, dist.get_world_size()
        self._everybody = self.group = ProcessGroup()
        self.shard = dist.get_rank() % shards
        if ranks > 1 and ranks % shards:
            raise ValueError(f"{shards} shards cannot be laid out on {ranks} ranks")
        if ranks > 1 and shards > 1:
            self.group = self._everybody.split(
                [list(range(shard, ranks, shards)) for shard in range(shards)]
            )

    def rank(self) -> int:
        return dist.get_rank()

    def size(self) -> int:
        return dist.get_world_size()

    def hosts(self) -> int:
        return int(os.environ.get("GROUP_WORLD_SIZE", 1))

    def barrier(self) -> None:
        self.slowest(0.0)

    def slowest(self, seconds: float) -> float:
        slowest = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._everybody.handle)
        return float(slowest)

    def gather_objects(self, item: Any, kind: Any) -> list[Any]:
        return self._everybody.gather_objects(item, kind)

    def backend(self) -> Backend:
        return C10dBackend(self.group, "measured")

    def exchange_dense(self, gradients: list[torch.Tensor]) -> float:
        """Exchange as `DistributedDataParallel`: last layers first, in its buckets."""
        backend, mean = self.backend(), 1.0 / self.group.size()
        pending = []
        for places in _buckets([4.0 * gradient.numel() for gradient in gradients]):
            bucket = [gradients[place] for place in places]
            flat = torch.cat([gradient.view(-1) for gradient in bucket])
            request = Allreduce(flat, postscale=mean, donated=True)
            pending.append((bucket, backend.allreduce(request, "dense", self.group)))
        submitted = time.perf_counter()
        for bucket, work in pending:
            parts = backend.wait(work).split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts):
                gradient.copy_(part.view_as(gradient))
        return submitted

    def dense_exchanges(self, layers: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return DDP's buckets, each of which waits for the last of its layers.

        Of shards the layers: `fully_shard` reduces each of its units by itself.
        """
        if self.shards > 1:
            return list(layers)
        buckets = _buckets([size for _, size in layers])
        of_each = [[layers[place] for place in places] for places in buckets]
        return [
            (max(ready for ready, _ in each), sum(size for _, size in each)) for each in of_each
        ]

    def run_to_end(self, programs: BucketPrograms, timed: Timed) -> None:
        """Run them bucket by bucket: collectives are matched by order."""
        programs.wait_all()

    def local_steps(
        self, optimizer: torch.optim.Optimizer, named: Named, **settings: Any
    ) -> WrappedOptimizer:
        return LocalSteps(optimizer, named, process_group=self.group.handle, **settings)

    def momentum_exchange(
        self, optimizer: torch.optim.Optimizer, named: Named, **settings: Any
    ) -> WrappedOptimizer:
        return MomentumExchange(optimizer, named, process_group=self.group.handle, **settings)

    def close(self) -> None:
        self._everybody.hang_up()
        if self._is_ours and dist.is_initialized():
            dist.destroy_process_group()


def _buckets(sizes: Sequence[float]) -> Iterator[list[int]]:
    """Yield the places of gradients by their bytes, last ones first.

    A first bucket of 1 MiB and then buckets of 25 MiB, or little more, as
    `DistributedDataParallel` makes them by a function that PyTorch keeps private.
    """
    places: list[int] = []
    limit = _FIRST_BYTES
    for place in reversed(range(len(sizes))):
        places.append(place)
        if sum(sizes[each] for each in places) >= limit:
            yield places
            places, limit = [], _BUCKET_BYTES
    if places:
        yield places
