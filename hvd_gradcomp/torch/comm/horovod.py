"""Horovod's collectives, safe against its background thread releasing tensors at any time.

PyTorch takes the GIL when a tensor's reference count drops to one. After another rank has stopped,
Horovod's thread drops its references while holding a lock, and an enqueue waits for that lock while
holding the GIL: a deadlock. So `Work` holds one more reference to each tensor, by a view of it. A
view references its base, which must not be a view itself, hence the `detach`. The view is made
before the enqueue, because Horovod's thread sets the shape of a result.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import horovod.torch as horovod
import torch
from horovod import __version__ as horovod_version
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from hvd_gradcomp.core.collectives import Allreduce, Gather, goes_as_sum
from hvd_gradcomp.ops import PayloadError
from hvd_gradcomp.runtime import hierarchy, stall_inspector, typed_json
from hvd_gradcomp.runtime.program_runner import Groups, HostPosition, TrafficCounter
from hvd_gradcomp.runtime.unique_names import UniqueNames
from hvd_gradcomp.torch.comm import recorded

# Seconds between two polls. Horovod's cycle is one millisecond, and a poll takes time from the core
# that its thread or another rank runs on: so the longer the wait, the rarer the polls, but a pause
# adds at most a sixteenth to the wait.
_SHORTEST, _LONGEST = 50e-6, 1e-3
_LONG = 1.0  # seconds of waiting before the deadlock check begins
TITLES = UniqueNames("gradcomp")  # of reducers
SEAM = ("_allgather_async", "_allreduce_async", "_alltoall_async", "_broadcast_async")


def pauses() -> Callable[[], None]:
    """Return a function that a polling loop calls between two polls.

    It sleeps, and raises a `DeadlockError` on all ranks if no pending collective can complete.
    """
    start = time.perf_counter()

    def pause() -> None:
        waited = time.perf_counter() - start
        if waited > _LONG:
            stalls.check()
        time.sleep(min(max(waited / 16, _SHORTEST), _LONGEST))

    return pause


@dataclass(frozen=True)
class Work:
    """Handle of a collective whose tensors Horovod uses until `wait` has returned.

    After an error Horovod may still use them, so the handle must stay alive.

    Attributes:
        key: unique to this handle.
        handle: Horovod's own.
        references: an extra reference to each tensor.
    """

    key: int
    handle: int
    references: list[torch.Tensor]

    def ready(self) -> bool:
        """Return True if `wait` would not block."""
        return bool(horovod.poll(self.handle))

    def wait(self) -> Any:
        """Wait without spinning; return and raise as `horovod.torch.synchronize` does."""
        # Horovod's own wait spins, on a core that its thread or another rank may need.
        pause = pauses()
        while not self.ready():
            pause()
        pending_ops.remove(self.key)
        result = recorded.synchronize(self.handle)
        self.references.clear()
        return result


def takes(device: torch.device) -> bool:
    """Return True if this Horovod has collectives for tensors on the device."""
    bytes_there = torch.empty(0, dtype=torch.uint8, device=device)
    return hasattr(mpi_ops.mpi_lib, mpi_ops._allgather_function_factory(bytes_there))


def _lend(name: str, process_set: Any, enqueue: Callable[..., int], *arguments: Any) -> Work:
    loan = _unwatched(enqueue, *arguments, name, process_set)
    pending_ops.operations[loan.key] = stall_inspector.PendingOp(name, process_set, loan.ready)
    return loan


def _unwatched(enqueue: Callable[..., int], *arguments: Any) -> Work:
    lent = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    references = [x.view(x.shape) for x in lent if isinstance(x, torch.Tensor)]
    return Work(next(_keys), enqueue(*lent), references)


def _summed(table: list[list[int]], name: str, process_set: Any) -> Work:
    """Sum a table over ranks, unseen by the stall inspector."""
    tensor = torch.tensor(table, dtype=torch.int64, device="cpu")
    sums = torch.empty_like(tensor), name, horovod.Sum, 1.0, 1.0, process_set
    return _unwatched(_stock["_allreduce_async"], tensor, *sums)


_keys = itertools.count()
_stock = recorded.STOCK  # the unrecorded functions: `_lend` records
pending_ops = recorded.PendingOps()
stalls = stall_inspector.StallInspector(
    pending_ops.pending, _summed, lambda: mpi_ops._basics._get_process_set_ids_and_ranks()
)


def forget() -> None:
    """Drop all records and reports after a restart of Horovod."""
    pending_ops.operations.clear()
    stalls.drop()


recorded.watch(pending_ops, forget, pauses)


def allgather(tensor: torch.Tensor, name: str, process_set: Any) -> Work:
    """Start an allgather as `horovod.torch.allgather_async`; `tensor` must be contiguous."""
    return _lend(name, process_set, _stock["_allgather_async"], tensor, tensor.new_empty(0))


def allreduce(
    tensor: torch.Tensor,
    name: str,
    process_set: Any,
    prescale: float = 1.0,
    postscale: float = 1.0,
    result: torch.Tensor | None = None,
) -> Work:
    """Start an allreduce as `horovod.torch.allreduce_async`, `op=Sum`, into `result` if given."""
    result = torch.empty_like(tensor) if result is None else result

    def enqueue(tensor: torch.Tensor, result: torch.Tensor, name: str, process_set: Any) -> Any:
        how = horovod.Sum, prescale, postscale
        return _stock["_allreduce_async"](tensor, result, name, *how, process_set)

    return _lend(name, process_set, enqueue, tensor, result)


def alltoall(tensor: torch.Tensor, splits: list[int], name: str, process_set: Any) -> Work:
    """Start an alltoall as `horovod.torch.alltoall_async`; with no splits, equal ones."""
    parts = torch.tensor(splits, dtype=torch.int32, device="cpu")
    received = torch.empty(process_set.size(), dtype=torch.int32, device="cpu")
    result = tensor.new_empty(0)
    return _lend(name, process_set, _stock["_alltoall_async"], tensor, parts, result, received)


def broadcast(tensor: torch.Tensor, root: int, name: str, process_set: Any) -> Work:
    """Start a broadcast as `horovod.torch.broadcast_async`."""
    result = torch.empty_like(tensor)
    return _lend(name, process_set, _stock["_broadcast_async"], tensor, result, root)


def sparse_allreduce(
    tensor: torch.Tensor, name: str, process_set: Any, average: bool, traffic: TrafficCounter
) -> Callable[[], torch.Tensor]:
    """Start a sparse allreduce as `horovod.torch.sparse_allreduce_async`; return its wait."""
    for part in (tensor._values(), tensor._indices()):
        traffic.sent(part)
    indices = allgather(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather(tensor._values().contiguous(), f"{name}.values", process_set)

    def wait() -> torch.Tensor:
        gathered, places = values.wait(), indices.wait().t()
        for part in (gathered, places):
            traffic.received(part)
        scaled = gathered / process_set.size() if average else gathered
        return torch.sparse_coo_tensor(places, scaled, tensor.size(), check_invariants=False)

    return wait


class _AsyncReply:
    """Handle of a collective, with a function that shapes its result."""

    def __init__(self, loan: Work, shaped: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._loan, self.ready, self._shaped = loan, loan.ready, shaped

    def wait(self) -> torch.Tensor:
        reply = self._loan.wait()
        if isinstance(reply, tuple):  # alltoall also returns the received splits
            reply = reply[0]
        if reply.is_cuda:
            # Horovod makes the default stream of its own thread wait, not the one used here.
            here = torch.cuda.current_stream(reply.device)
            if here != torch.cuda.default_stream(reply.device):
                here.wait_stream(torch.cuda.default_stream(reply.device))
        return self._shaped(reply)


def gather_objects(item: Any, kind: Any, name: str, process_set: Any) -> list[Any]:
    """Gather an item of type `kind` from every rank; see `runtime.typed_json`."""

    def gather(packed: bytes) -> Iterator[bytes]:
        data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int32, device="cpu")
        # Named as on TensorFlow, should another rank run that.
        lengths = allgather(length, f"{name}.sz", process_set).wait()
        everything = allgather(data, f"{name}.t", process_set).wait()
        return (piece.numpy().tobytes() for piece in everything.split(lengths.tolist()))

    return typed_json.gather(item, kind, gather, process_set.ranks)


class HorovodBackend:
    """Transport over Horovod; see `Backend`.

    Args:
        name: prefix of the names of collectives.
        process_set: the ranks.
    """

    library, version = "Horovod", horovod_version
    failure: type[Exception] = HorovodInternalError
    hangs_up = False

    def __init__(self, name: str, process_set: Any) -> None:
        self.name, self._set = name, process_set

    def check(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        for name, p in named_parameters:
            if not takes(p.device):
                raise ValueError(
                    f"{name} is on {p.device}, and this Horovod was built without collectives for "
                    "tensors there. Build it for this PyTorch with HOROVOD_GPU_OPERATIONS=NCCL "
                    "(hvd-gradcomp build-horovod), or train on the CPU"
                )

    def global_rank(self) -> int:
        return int(mpi_ops.rank())

    def gather_objects(self, item: Any, kind: Any, what: str) -> list[Any]:
        return gather_objects(item, kind, f"{self.name}.{what}", self._set)

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        every: torch.Tensor = mpi_ops.allgather(row[None], f"{self.name}.verify", self._set)
        return every

    def make_groups(self, place: HostPosition) -> Groups:
        """Make the process sets of hosts, on all ranks together; see `Participants`."""

        def gather(item: Any, kind: Any) -> list[Any]:
            return self.gather_objects(item, kind, "handshake")

        return hierarchy.groups_of(mpi_ops, place, gather)

    def allgather(self, tensor: torch.Tensor, name: str, group: Any) -> _AsyncReply:
        payload, ranks = tensor.contiguous(), group.size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if goes_as_sum(tensor.numel(), dtype, ranks, horovod.gloo_enabled()):
            both, rank = payload.new_empty((2, *payload.shape)), group.rank()
            both[rank] = payload
            sent, received = both[rank].view(torch.int32), both[1 - rank].view(torch.int32)

            def bytes_of_both(total: torch.Tensor) -> torch.Tensor:
                torch.sub(total, sent, out=received)
                return both

            return _AsyncReply(allreduce(sent, name, group, result=received), bytes_of_both)

        def rows(reply: torch.Tensor) -> torch.Tensor:
            if reply.numel() != ranks * payload.numel():
                raise PayloadError(
                    f"the ranks sent payloads of different sizes for {name}: {reply.numel()} items "
                    f"came from {ranks} ranks, this one sent {payload.numel()}. Load the same "
                    "checkpoint on all ranks"
                )
            return reply.view(ranks, *payload.shape)

        return _AsyncReply(allgather(payload, name, group), rows)

    def allreduce(self, request: Allreduce, name: str, group: Any) -> _AsyncReply:
        tensor, prescale, postscale, donated = request
        tensor = tensor.contiguous()
        how = prescale, postscale, tensor if donated else None
        loan = allreduce(tensor, name, group, *how)
        return _AsyncReply(loan, lambda reply: reply.view(tensor.shape))

    def alltoall(self, tensor: torch.Tensor, name: str, group: Any) -> _AsyncReply:
        loan = alltoall(tensor.contiguous().view(-1), [], name, group)
        return _AsyncReply(loan, lambda reply: reply.view(tensor.shape))

    def gather(self, request: Gather, name: str, group: Any) -> _AsyncReply:
        tensor, splits = request.tensor.contiguous(), [0] * group.size()
        splits[request.root] = tensor.numel()
        return _AsyncReply(alltoall(tensor, splits, name, group), lambda reply: reply)

    def broadcast(self, tensor: torch.Tensor, root: int, name: str, group: Any) -> _AsyncReply:
        loan = broadcast(tensor.contiguous(), root, name, group)
        return _AsyncReply(loan, lambda reply: reply.view(tensor.shape))

    def wait(self, pending: _AsyncReply) -> torch.Tensor:
        return pending.wait()
