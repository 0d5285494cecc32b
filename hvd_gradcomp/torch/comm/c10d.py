"""`torch.distributed` as a transport: gloo, NCCL and any other backend with the five collectives.

Collectives are matched by order, not by name: all ranks must submit the same in the same order.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hvd_gradcomp.core.collectives import Allreduce, Gather
from hvd_gradcomp.runtime import errors, typed_json
from hvd_gradcomp.runtime.program_runner import TrafficCounter
from hvd_gradcomp.runtime.step_header import (
    HEADER,
    Kind,
    StepHeader,
    compare,
    different_comparisons,
)

_CLOSED = (
    "the connections are closed: this rank failed earlier, destroy_process_group() was called, or "
    "the function run by ddp.Elastic has returned"
)
_FREE, _USED, _UNCLEAN, _CLOSED_HERE = "fuxc"  # states of a connection on a rank
_numbers = itertools.count()  # of collectives


class _Connection:
    """Process group of `torch.distributed`, which one `ProcessGroup` after another uses.

    Args:
        handle: of `torch.distributed`, which keeps it alive until it is destroyed.

    Attributes:
        parts: of the ranks; the connection of this rank's, by all parts.
        unfinished: collectives that nobody has waited for, by the number of their `Work`.
    """

    def __init__(self, handle: Any) -> None:
        self._handle: Callable[[], Any] = weakref.ref(handle)
        self._user: Callable[[], ProcessGroup | None] = lambda: None
        self.parts: dict[str, _Connection] = {}
        self.unfinished: dict[int, Any] = {}

    @property
    def handle(self) -> Any:
        """Return `torch.distributed`'s group; None if it was destroyed."""
        return self._handle()

    def lend(self, user: ProcessGroup) -> None:
        """Let a group use this connection until it is collected."""
        self._user = weakref.ref(user)

    def state(self, timeout: Any, device: torch.device) -> str:
        """Return if a group with this timeout can use the connection, as far as this rank knows."""
        every = [self, *self.parts.values()]
        if any(each.handle is None for each in every):
            return _CLOSED_HERE
        if any(each._user() is not None for each in every):
            return _USED
        if _timeout_of(self.handle, device) != timeout:
            return _USED
        works = [work for each in every for work in each.unfinished.values()]
        return _FREE if all(map(_has_succeeded, works)) else _UNCLEAN

    def close(self) -> None:
        """Close the connection and those of its parts."""
        for each in (self, *self.parts.values()):
            each.unfinished.clear()
            handle, each._handle = each.handle, lambda: None
            if handle is not None:
                with suppress(ValueError):  # of a job that has ended
                    dist.destroy_process_group(handle)


class _Pool:
    """Connections among the same ranks, in the order in which all of these have made them.

    They are used again, not destroyed: ranks collect their garbage at different moments, but NCCL
    destroys together; and PyTorch names a group of some ranks by how many groups a rank has, so
    that a group made after another was destroyed gets its name, and hangs.

    Args:
        ranks: that the connections are among.
        is_whole: these are all ranks of the job, whose groups PyTorch names by a counter.
    """

    def __init__(self, ranks: list[int], is_whole: bool) -> None:
        self._ranks, self._is_whole = ranks, is_whole
        self.connections: list[_Connection] = []
        self._meetings = 0

    def take(self, timeout: Any, device: torch.device) -> _Connection | None:
        """Return a connection that no rank uses; None if another is needed. All ranks call it."""
        if not self.connections:
            return None

        def states() -> str:
            return "".join(each.state(timeout, device) for each in self.connections)

        if _FREE not in states() and _USED in states():
            gc.collect()  # a model that is in reference cycles keeps its connection until then
        every = self._gather(states())
        for number, column in enumerate(zip(*every)):
            if set(column) == {_FREE}:
                self.connections[number].unfinished.clear()
                return self.connections[number]
            if _USED not in column and self._is_whole:
                self.connections[number].close()  # a collective that not all ranks have started
        return None

    def _gather(self, states: str) -> list[str]:
        """Gather the states of all ranks by the store: there is no group for it yet."""
        if len(self._ranks) == 1:
            return [states]
        self._meetings += 1
        digest = hashlib.sha1(repr(self._ranks).encode(), usedforsecurity=False).hexdigest()
        prefix, rank = f"gradcomp/{digest}/{self._meetings}", dist.get_rank()
        store = dist.PrefixStore(prefix, _get_default_store())
        store.set(str(rank), states)
        if rank == self._ranks[0]:  # so that a rank reads one key, and not one of each rank
            listed = [store.get(str(each)).decode() for each in self._ranks]
            store.set("every", ",".join(listed))
        every: list[str] = store.get("every").decode().split(",")
        if store.add("read", 1) == len(self._ranks):
            for key in ("every", "read", *map(str, self._ranks)):
                store.delete_key(key)
        return every


_open: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
_pools: weakref.WeakKeyDictionary[Any, dict[str, _Pool]] = weakref.WeakKeyDictionary()


def _pool_of(ranks: list[int], backend: str) -> _Pool:
    """Return the pool of some ranks, in this job of `torch.distributed`."""
    pools = _pools.setdefault(dist.group.WORLD, {})
    is_whole = ranks == list(range(dist.get_world_size()))
    return pools.setdefault(f"{backend} {ranks}", _Pool(ranks, is_whole))


@atexit.register
def _close_connections() -> None:
    """End gloo's threads while they can still take the GIL to release tensors.

    At interpreter exit they would abort the process. They end when nobody holds the group any
    longer, neither we nor `torch.distributed`.
    """
    for group in list(_open):
        group.drop_works()
    if not dist.is_initialized():
        return
    for name, pool in _pools.get(dist.group.WORLD, {}).items():
        for connection in pool.connections if name.startswith("gloo") else ():
            connection.close()


class ProcessGroup:
    """Process group of our own over the ranks of the user's; all of them construct it.

    So our collectives never match the user's, and a rank that fails can close the connections: then
    the others fail too instead of waiting. When all ranks have collected it, another one uses its
    connections.

    Args:
        group: `torch.distributed`'s, whose backend and timeout ours has; None for all ranks.
        ranks: of ours, if they are not those of `group`.
        backend: of ours, if it is not that of `group`.

    Attributes:
        failed: a collective has failed, as another rank has stopped.
    """

    def __init__(
        self, group: Any = None, ranks: list[int] | None = None, backend: str | None = None
    ) -> None:
        everybody = list(range(dist.get_world_size()))
        if ranks is None:
            ranks = everybody if group is None else dist.get_process_group_ranks(group)
        timeout = _timeout_of(group, _device_of(dist.get_backend(group)))
        backend = backend or dist.get_backend(group)
        device = _device_of(backend)
        pool = _pool_of(ranks, backend)
        connection = pool.take(timeout, device)
        if connection is None:
            among: dict[str, Any] = {}
            if ranks != everybody:  # other ranks do not call new_group
                among = {"ranks": ranks, "use_local_synchronization": True}
            connection = _Connection(dist.new_group(backend=backend, timeout=timeout, **among))
            pool.connections.append(connection)
        self._use(connection, ranks, backend, device)

    def _use(
        self, connection: _Connection, ranks: list[int], backend: str, device: torch.device
    ) -> None:
        self._connection, self.ranks, self.backend, self.device = connection, ranks, backend, device
        self.failed = False
        self.pending: weakref.WeakSet[Work] = weakref.WeakSet()
        self._parts: list[ProcessGroup] = []
        connection.lend(self)
        _open.add(self)

    def split(self, parts: list[list[int]]) -> ProcessGroup:
        """Make a group of each part; return the one of this rank, which closes with this group.

        All ranks of the job call it with the same parts. If members alone did, PyTorch would name a
        group by the number of groups that a rank knows, and ranks with other numbers would wait.
        """
        (ranks,) = (part for part in parts if dist.get_rank() in part)
        known = self._connection.parts
        if repr(parts) not in known:
            timeout = _timeout_of(self.handle, self.device)
            for part in parts:
                handle = dist.new_group(part, backend=self.backend, timeout=timeout)
                if part is ranks:
                    known[repr(parts)] = _Connection(handle)
        part_group = object.__new__(ProcessGroup)
        part_group._use(known[repr(parts)], ranks, self.backend, self.device)
        self._parts.append(part_group)
        return part_group

    def rank(self) -> int:
        """Return this rank's index in the group."""
        return self.ranks.index(dist.get_rank())

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def closed(self) -> bool:
        """Return True after `hang_up`."""
        return self._connection.handle is None

    @property
    def handle(self) -> Any:
        """Return `torch.distributed`'s group.

        Raises:
            RuntimeError: after `hang_up`. To `torch.distributed` no group means all ranks.
        """
        handle = self._connection.handle
        if handle is None:
            raise RuntimeError(_CLOSED)
        return handle

    def add(self, work: Work, collective: Any) -> None:
        """Remember a collective until it was waited for."""
        self.pending.add(work)
        unfinished = self._connection.unfinished
        for key in [key for key, each in unfinished.items() if _has_succeeded(each)]:
            del unfinished[key]  # it would keep a payload that was dropped
        unfinished[work.number] = collective

    def has_ended(self, work: Work) -> None:
        """Forget a collective that was waited for, with success."""
        self._connection.unfinished.pop(work.number, None)

    def drop_works(self) -> None:
        """Release the collectives that nobody will wait for: they would keep gloo's threads."""
        for work in self.pending:
            work.release()

    def hang_up(self) -> None:
        """Close the connections, those of parts too: ranks that wait for this one fail."""
        for group in (self, *self._parts):
            group.drop_works()
        self._connection.close()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Remember that a collective on the group has failed."""
        try:
            yield
        except RuntimeError:
            self.failed = True
            raise

    def reopen(self) -> None:
        """Connect all ranks of `torch.distributed`, which was initialized anew; all call it.

        So what holds this group goes on with other ranks.
        """
        self.hang_up()
        self.__init__()  # type: ignore[misc]

    def gather_objects(self, item: Any, kind: Any) -> list[Any]:
        """Gather an item of type `kind` from every rank; see `runtime.typed_json`."""

        def allgather(packed: bytes) -> Iterator[bytes]:
            data = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(self.device)
            length = torch.tensor([data.numel()], device=self.device)
            lengths = [int(x) for x in Work.of(dist.all_gather, length, self).wait()]
            padded = data.new_zeros(max(lengths))
            padded[: data.numel()] = data
            rows = Work.of(dist.all_gather, padded, self).wait()
            return (bytes(row[:n].tolist()) for row, n in zip(rows, lengths))

        return typed_json.gather(item, kind, allgather, self.ranks)


def _device_of(backend: str) -> torch.device:
    """Return the device whose tensors a backend moves."""
    if backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _timeout_of(group: Any, device: torch.device) -> Any:
    """Return a group's timeout; None, for PyTorch's default, if its backend has none."""
    backend = (group or dist.group.WORLD)._get_backend(device)
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _has_succeeded(collective: Any) -> bool:
    """Return True if a collective has ended on this rank, and so was started on all ranks."""
    try:
        return bool(collective.is_completed() and collective.wait())
    except RuntimeError:
        return False


class Work:
    """Handle of a pending collective of a group, and the function that shapes its result."""

    def __init__(self, work: Any, shaped: Callable[[], torch.Tensor], group: ProcessGroup) -> None:
        self._work, self._shaped, self._group = work, shaped, group
        self.number = next(_numbers)
        group.add(self, work)

    @classmethod
    def of(cls, allgather: Any, tensor: torch.Tensor, group: ProcessGroup) -> Work:
        """Start an allgather; its result has one row for each rank."""
        rows = tensor.new_empty((group.size(), *tensor.shape))
        work = allgather(list(rows.unbind(0)), tensor, group=group.handle, async_op=True)
        return cls(work, lambda: rows, group)

    def ready(self) -> bool:
        """Return True if `wait` would not block."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> torch.Tensor:
        """Wait and return the result; on a GPU the current stream waits, not the host."""
        if self._work is None:
            raise RuntimeError(_CLOSED)
        with self._group.watched():
            self._work.wait()
        self._group.has_ended(self)
        return self._shaped()

    def release(self) -> None:
        """Let go of the collective; nothing can wait for it afterwards."""
        self._work = None


def sparse_allreduce(
    tensor: torch.Tensor, name: str, group: ProcessGroup, average: bool, traffic: TrafficCounter
) -> Callable[[], torch.Tensor]:
    """Start to gather the rows of all ranks; return a function that waits for them.

    As collectives want tensors of one size, ranks gather how many rows each has, and pad theirs.
    The result is not coalesced.
    """
    del name
    indices, values = tensor._indices().t().contiguous(), tensor._values().contiguous()
    rows = len(indices)
    counts = Work.of(dist.all_gather, torch.tensor([rows], device=group.device), group)

    def gather(part: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        padded = part.new_zeros((max(lengths), *part.shape[1:]))
        padded[:rows] = part
        traffic.sent(padded)
        every = Work.of(dist.all_gather, padded, group).wait()
        traffic.received(every)
        return torch.cat([piece[:length] for piece, length in zip(every, lengths)])

    def wait() -> torch.Tensor:
        lengths = [int(length) for length in counts.wait()]
        places, gathered = indices, values
        if any(lengths):
            places, gathered = gather(indices, lengths), gather(values, lengths)
        scaled = gathered / group.size() if average else gathered
        return torch.sparse_coo_tensor(places.t(), scaled, tensor.size(), check_invariants=False)

    return wait


class C10dBackend:
    """Transport over `torch.distributed`; see `Backend`.

    Args:
        group: the ranks.
        name: prefix of the names of buckets; collectives have none here.
    """

    library = "torch.distributed"
    failure: type[Exception] = RuntimeError
    hangs_up = True

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self.name, self._group = name, group
        self.version = f"none, torch.distributed's {group.backend}"

    def check(self, named_parameters: Any) -> None:
        """Do nothing: `DistributedDataParallel` has taken the parameters already."""

    def global_rank(self) -> int:
        return dist.get_rank()

    def gather_objects(self, item: Any, kind: Any, what: str) -> list[Any]:
        del what
        return self._group.gather_objects(item, kind)

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        if error := compare(self.gather_headers(StepHeader(Kind.VERIFY), "verify")):
            raise error
        return Work.of(dist.all_gather, row.to(self._group.device), self._group).wait()

    def gather_headers(self, header: StepHeader, what: str) -> dict[int, StepHeader]:
        return self.start_headers(header, what)()

    def start_headers(self, header: StepHeader, what: str) -> Callable[[], dict[int, StepHeader]]:
        """Start to gather the header of every rank; see `runtime.step_header`.

        Args:
            header: of this rank.
            what: what begins or ends, for errors.

        Returns:
            A function that waits for the headers of all ranks, by rank. It raises an OutOfStepError
            on all ranks if others begin a round of local steps (their rows have the same length,
            since gloo would end a process that receives another one), and a RuntimeError if a rank
            has failed.

        Raises:
            RuntimeError: a rank has failed.
        """
        row, group = torch.tensor([HEADER, *header], device=self._group.device), self._group
        with errors.explain_errors(RuntimeError, what, self.library):
            pending = Work.of(dist.all_gather, row, group)

        def wait() -> dict[int, StepHeader]:
            with errors.explain_errors(RuntimeError, what, self.library):
                rows = pending.wait().tolist()
            by_rank = dict(zip(group.ranks, rows))
            if different := different_comparisons({rank: row[0] for rank, row in by_rank.items()}):
                raise different
            return {rank: StepHeader(*row[1:]) for rank, row in by_rank.items()}

        return wait

    def allgather(self, tensor: torch.Tensor, name: str, group: ProcessGroup) -> Work:
        del name
        return Work.of(dist.all_gather, tensor.contiguous(), group)

    def allreduce(self, request: Allreduce, name: str, group: ProcessGroup) -> Work:
        del name
        tensor, prescale, postscale, donated = request
        if prescale != 1.0:
            total = tensor * prescale
        else:
            total = tensor.contiguous() if donated else tensor.clone()
        work = dist.all_reduce(total, group=group.handle, async_op=True)
        return Work(work, lambda: total if postscale == 1.0 else total.mul_(postscale), group)

    def alltoall(self, tensor: torch.Tensor, name: str, group: ProcessGroup) -> Work:
        del name
        sent, received = tensor.contiguous(), torch.empty_like(tensor)
        work = dist.all_to_all_single(received, sent, group=group.handle, async_op=True)
        return Work(work, lambda: received, group)

    def gather(self, request: Gather, name: str, group: ProcessGroup) -> Work:
        del name
        sent, ranks = request.tensor.contiguous(), group.size()
        sizes_in, sizes_out = [0] * ranks, [0] * ranks
        sizes_out[request.root] = sent.numel()
        if group.rank() == request.root:
            sizes_in = list(request.lengths)
        received = sent.new_empty(sum(sizes_in))
        work = dist.all_to_all_single(
            received, sent, sizes_in, sizes_out, group=group.handle, async_op=True
        )
        return Work(work, lambda: received, group)

    def broadcast(self, tensor: torch.Tensor, root: int, name: str, group: ProcessGroup) -> Work:
        del name
        copied = tensor.clone()
        work = dist.broadcast(copied, root, group=group.handle, async_op=True)
        return Work(work, lambda: copied, group)

    def wait(self, pending: Work) -> torch.Tensor:
        return pending.wait()
