"""Transport of your own: what `ddp.compress` sends travels over MPI, by mpi4py.

    mpirun -np 2 python examples/extending/mpi_backend.py

`torch.distributed` still connects the ranks: it broadcasts the first parameters, and compares what
ranks are about to do. `MPIBackend` moves all that is compressed. See docs/extending-transport.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp import QSGDCompressor
from hvd_gradcomp.torch import ddp
from hvd_gradcomp.torch.comm.c10d import C10dBackend, ProcessGroup

PATIENCE = 120.0  # seconds that a rank waits for others
SUMS = {torch.float32, torch.float64, torch.int32, torch.int64}  # that MPI adds up


class Pending:
    """Handle of a collective; it keeps the tensors that MPI reads and writes."""

    def __init__(
        self, request: MPI.Request, result: Callable[[], torch.Tensor], *buffers: torch.Tensor
    ) -> None:
        self._request, self._result, self._buffers = request, result, buffers

    def ready(self) -> bool:
        return self._request.Test()

    def wait(self) -> torch.Tensor:
        """Wait for the result.

        Raises:
            RuntimeError: another rank does not take part. MPI itself would wait for ever.
        """
        deadline = time.monotonic() + PATIENCE
        while not self._request.Test():
            if time.monotonic() > deadline:
                raise RuntimeError(f"a rank has not taken part for {PATIENCE:.0f} s")
            time.sleep(0)
        return self._result()


class MPIBackend(C10dBackend):
    """Transport over MPI, on CPUs, between ranks that `torch.distributed` numbers as MPI does."""

    library = "MPI"

    def __init__(self, group: ProcessGroup, name: str) -> None:
        super().__init__(group, name)
        self.version = f"none, MPI {'.'.join(map(str, MPI.Get_version()))}"
        self._communicators: dict[tuple[int, ...], MPI.Intracomm] = {}

    def _communicator(self, group: ProcessGroup) -> MPI.Intracomm:
        """Return this transport's communicator of a group, whose ranks all make it together."""
        ranks = tuple(group.ranks)
        if ranks not in self._communicators:
            members = MPI.COMM_WORLD.group.Incl(ranks)
            self._communicators[ranks] = MPI.COMM_WORLD.Create_group(members)
        return self._communicators[ranks]

    def allgather(self, tensor: torch.Tensor, name: str, group: Any) -> Pending:
        sent = tensor.contiguous()
        rows = sent.new_empty((group.size(), *sent.shape))
        request = self._communicator(group).Iallgather(bytes_of(sent), bytes_of(rows))
        return Pending(request, lambda: rows, sent)

    def allreduce(self, request: Any, name: str, group: Any) -> Pending:
        tensor, prescale, postscale, _ = request
        sent = (tensor if prescale == 1.0 else tensor * prescale).contiguous()
        if sent.dtype not in SUMS:  # such as bfloat16: gathered, and added up in the ranks' order
            rows = self.allgather(sent, name, group)
            return Pending(rows._request, lambda: rows.wait().sum(0).mul_(postscale), sent)
        total = torch.empty_like(sent)
        reduction = self._communicator(group).Iallreduce(sent, total)
        return Pending(reduction, lambda: total if postscale == 1.0 else total * postscale, sent)

    def alltoall(self, tensor: torch.Tensor, name: str, group: Any) -> Pending:
        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        request = self._communicator(group).Ialltoall(bytes_of(sent), bytes_of(received))
        return Pending(request, lambda: received, sent)

    def gather(self, request: Any, name: str, group: Any) -> Pending:
        sent = request.tensor.contiguous()
        is_root = group.rank() == request.root
        lengths = list(request.lengths) if is_root else []
        received = sent.new_empty(sum(lengths))
        sizes = [length * sent.element_size() for length in lengths]
        into = [bytes_of(received), sizes] if is_root else None
        communicator = self._communicator(group)
        return Pending(
            communicator.Igatherv(bytes_of(sent), into, request.root),
            lambda: received,
            sent,
        )

    def broadcast(self, tensor: torch.Tensor, root: int, name: str, group: Any) -> Pending:
        copied = tensor.contiguous().clone()
        place = group.ranks.index(root)
        return Pending(self._communicator(group).Ibcast(bytes_of(copied), place), lambda: copied)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's bytes: MPI has no type for bfloat16."""
    return tensor.view(-1).view(torch.uint8)


def connect() -> None:
    """Connect the ranks of MPI by `torch.distributed` too, in the same order."""
    world, host = MPI.COMM_WORLD, os.environ.get("MASTER_ADDR", "localhost")
    server = (
        dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if not world.rank else None
    )
    port = world.bcast(server.port if server else 0)
    store = server or dist.TCPStore(host, port)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)


def main() -> None:
    connect()
    torch.manual_seed(dist.get_rank())  # other data on each rank
    inputs, truth = torch.randn(256, 20), torch.arange(20.0).unsqueeze(1) / 20
    model = DistributedDataParallel(torch.nn.Linear(20, 1))
    state = ddp.compress(model, QSGDCompressor(bits=4), backend=MPIBackend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(60):
        loss = (model(inputs) - inputs @ truth).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
    ddp.verify(model)  # an error if replicas differ in a bit
    if dist.get_rank() == 0:
        print(f"loss {loss:.6f}; {state.stats().bytes_sent} bytes sent over MPI")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
