"""Rank of `benchmarks.places`: trains in one place, by one method; the first prints its times.

python -m benchmarks.places.worker keras local      # started by horovodrun
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from benchmarks.places.clock import Clock

METHODS = ("own", "qsgd", "local")
MARK = "PLACE "


class Place(NamedTuple):
    """Where a model is trained.

    Attributes:
        title: in the table.
        module: of this package, which has `by_PLACE`.
        frontend: whose ranks it has; "" for those of `torch.distributed`.
    """

    title: str
    module: str = "with_torch"
    frontend: str = ""


PLACES = {
    "ddp": Place("`DistributedDataParallel`"),
    "fsdp": Place("FSDP2"),
    "trainer": Place("Trainer of Transformers"),
    "accelerate": Place("Accelerate"),
    "lightning": Place("Lightning"),
    "horovod": Place("Horovod, PyTorch", frontend="torch"),
    "tape": Place("Horovod, a TensorFlow loop", "with_tensorflow", "tensorflow"),
    "keras": Place("Horovod, Keras's `fit`", "with_tensorflow", "tensorflow"),
}


@contextmanager
def rank_of(frontend: str) -> Iterator[int]:
    """Connect this rank with the others that Horovod's launcher has started."""
    if frontend:
        hvd = importlib.import_module(f"hvd_gradcomp.{frontend}")
        hvd.init()
        yield hvd.rank()
        hvd.shutdown()
        return
    import torch.distributed as dist

    rank, size = os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]
    variables = {"RANK": rank, "NODE_RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": "0"}
    variables |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "host1", "MASTER_PORT": "29500"}
    os.environ.update(variables)  # as torchrun does
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    name, method = sys.argv[1:]
    place, clock = PLACES[name], Clock()
    torch.set_num_threads(1)
    with rank_of(place.frontend) as rank:
        module = importlib.import_module(f"benchmarks.places.{place.module}")
        alone_ms, parameters = module.alone(name)
        getattr(module, f"by_{name}")(method, clock)
    row = {"place": name, "method": method, "ms": clock.ms, "alone_ms": alone_ms}
    if rank == 0:
        print(MARK + json.dumps({**row, "parameters": parameters}), flush=True)


if __name__ == "__main__":
    main()
