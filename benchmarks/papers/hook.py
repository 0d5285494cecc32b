"""PyTorch's own PowerSGD hook in the place of a compressor: DDP among Horovod's ranks."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.monitoring.stats import CompressionStats

WARM_UP = 10  # steps that the hook does uncompressed; it takes 2 at least


class PowerSGDHook:
    """Model whose gradients PyTorch's hook reduces; no compressor of this package is at work.

    Bytes are counted at `torch.distributed.all_reduce`.

    Args:
        model: to wrap.
        rank: of the matrices.

    Attributes:
        model: to call forward on.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        connect()
        # One bucket: with two, the hook's callbacks took all of gloo's threads and waited forever.
        self.model = DistributedDataParallel(model, bucket_cap_mb=1024)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=WARM_UP
        )
        self.model.register_comm_hook(state, lambda state, bucket: self._reduce(state, bucket))
        self._elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._steps, self._bytes = 0, 0
        self._all_reduce = dist.all_reduce  # which the hook calls later too, when one has ended
        dist.all_reduce = self._counted

    def _reduce(self, state: Any, bucket: Any) -> Any:
        self._steps += bucket.is_last()
        return powerSGD_hook.powerSGD_hook(state, bucket)

    def _counted(self, tensor: torch.Tensor, *args: Any, **how: Any) -> Any:
        self._bytes += tensor.numel() * tensor.element_size()
        return self._all_reduce(tensor, *args, **how)

    def close(self) -> None:
        """Count no more."""
        dist.all_reduce = self._all_reduce

    def stats(self) -> CompressionStats:
        """Return what was sent: elements of the factors, as of our PowerSGD."""
        elements = self._elements * self._steps
        return CompressionStats(
            steps=self._steps,
            elements=elements,
            elements_sent=self._bytes // 4,
            bytes_dense=4 * elements,
            bytes_sent=self._bytes,
        )


def connect() -> None:
    """Make a process group of Horovod's ranks, if there is none."""
    if dist.is_initialized():
        return
    one_host = hvd.size() == hvd.local_size()
    host = "127.0.0.1" if one_host else socket.gethostbyname(socket.gethostname())
    place = None
    if hvd.rank() == 0:
        with socket.socket() as free:
            free.bind((host, 0))
            place = f"{host}:{free.getsockname()[1]}"
    address = f"tcp://{hvd.broadcast_object(place, name='papers.address')}"
    dist.init_process_group("gloo", address, rank=hvd.rank(), world_size=hvd.size())
