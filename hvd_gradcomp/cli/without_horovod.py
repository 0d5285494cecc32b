"""Adapters of other jobs to the part of Horovod's module that `compare` uses."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


def transport_of(source: Any) -> str:
    """Return the library under `LocalSteps` or `MomentumExchange`; "" for everything else."""
    wrapped: Any = sys.modules.get("hvd_gradcomp.torch.local.wrapped_optimizer")
    if wrapped is None or not isinstance(source, wrapped.WrappedOptimizer):
        return ""
    return str(source.reducers[0].transport.library)


class Distributed:
    """Job of `torch.distributed`: its ranks, and their statistics."""

    def __init__(self) -> None:
        self._dist: Any = import_module("torch.distributed")
        self._ddp: Any = import_module("hvd_gradcomp.torch.ddp")
        self._group: Any = import_module("hvd_gradcomp.torch.comm.c10d").ProcessGroup()

    @classmethod
    def of(cls, source: Any) -> Distributed | None:
        """Return the job of what `ddp` or `fsdp` of this package compresses; else None."""
        kinds: tuple[Any, ...] = ()
        ddp: Any = sys.modules.get("hvd_gradcomp.torch.ddp")
        if ddp is not None:
            kinds += ddp.CompressionState, ddp.DistributedDataParallel
        fsdp: Any = sys.modules.get("hvd_gradcomp.torch.fsdp")
        if fsdp is not None:
            kinds += fsdp.ShardedCompression, fsdp.FSDPModule
        wrapped = transport_of(source) == "torch.distributed"
        return cls() if wrapped or isinstance(source, kinds) else None

    def rank(self) -> int:
        return int(self._dist.get_rank())

    def size(self) -> int:
        return int(self._dist.get_world_size())

    def compression_stats(self, source: Any) -> Any:
        """Call `hvd_gradcomp.torch.ddp.compression_stats`."""
        return self._ddp.compression_stats(source)

    def gather_objects(self, item: Any, kind: Any) -> list[Any]:
        """Gather the items of all ranks; see `hvd_gradcomp.runtime.typed_json`."""
        return list(self._group.gather_objects(item, kind))

    def shutdown(self) -> None:
        self._group.hang_up()
        self._dist.destroy_process_group()


class OfJob:
    """Job of `hvd_gradcomp.tuning`: its ranks, and the statistics of what it trains."""

    def __init__(self, job: Any) -> None:
        self._job = job

    def rank(self) -> int:
        return int(self._job.rank())

    def size(self) -> int:
        return int(self._job.size())

    def compression_stats(self, source: Any) -> Any:
        """Return the statistics of what a training has yielded first."""
        return source.stats()

    def gather_objects(self, item: Any, kind: Any) -> list[Any]:
        """Gather the items of all ranks; see `hvd_gradcomp.runtime.typed_json`."""
        return list(self._job.gather_objects(item, kind))

    def shutdown(self) -> None:
        """Leave the job to the command that made it."""
