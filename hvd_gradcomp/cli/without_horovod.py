"""The ranks of `torch.distributed`, where a command knows Horovod's module otherwise."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


class Distributed:
    """What a command asks of a job: its ranks, and what they have moved."""

    def __init__(self) -> None:
        self._dist: Any = import_module("torch.distributed")
        self._ddp: Any = import_module("hvd_gradcomp.torch.ddp")
        self._group: Any = import_module("hvd_gradcomp.torch.comm.c10d").ProcessGroup()

    @classmethod
    def of(cls, source: Any) -> Distributed | None:
        """The job of a model that `ddp.compress` has been given, or of its state; else None."""
        ddp: Any = sys.modules.get("hvd_gradcomp.torch.ddp")
        if ddp is None or not isinstance(
            source, (ddp.CompressionState, ddp.DistributedDataParallel)
        ):
            return None
        return cls()

    def rank(self) -> int:
        return int(self._dist.get_rank())

    def size(self) -> int:
        return int(self._dist.get_world_size())

    def compression_stats(self, source: Any) -> Any:
        """As `hvd_gradcomp.torch.ddp.compression_stats`."""
        return self._ddp.compression_stats(source)

    def gather_objects(self, item: Any, kind: Any) -> list[Any]:
        """Everybody's item; see `hvd_gradcomp.runtime.typed_json`."""
        return list(self._group.gather_objects(item, kind))

    def shutdown(self) -> None:
        self._group.hang_up()
        self._dist.destroy_process_group()
