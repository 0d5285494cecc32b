"""`torch.distributed` as a transport: gloo, NCCL and any other backend with the five collectives.

Collectives are matched by order, not by name: all ranks must submit the same in the same order.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from hvd_gradcomp.core.collectives import Allreduce, Gather
from hvd_gradcomp.runtime import errors, typed_json
from hvd_gradcomp.runtime.program_runner import TrafficCounter
from hvd_gradcomp.torch.step_sync import OutOfStepError

VERIFY = -1  # said in the place of a step
_CLOSED = (
    "the connections were closed after an error of this rank, or what ddp.Elastic has run has ended"
)
_open: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


@atexit.register
def _let_go() -> None:
    """End gloo's threads while they can still take the GIL to release tensors.

    At interpreter exit they would abort the process. They end when nobody holds the group any
    longer, neither we nor `torch.distributed`.
    """
    for group in list(_open):
        if group.backend == "gloo" and dist.is_initialized():
            with suppress(ValueError):  # a group of a job that ended before this one began
                group.hang_up()
        group.release()


class ProcessGroup:
    """Process group of our own over the ranks of the user's; all of them construct it.

    So our collectives never match the user's, and a rank that fails can close the connections: then
    the others fail too instead of waiting.

    Args:
        group: `torch.distributed`'s, whose backend and timeout ours has; None for all ranks.
        ranks: of ours, if they are not those of `group`.
        by_all: all ranks of the job construct it, also those that are not in it.

    Attributes:
        failed: a collective has failed, as another rank has stopped.
    """

    def __init__(
        self, group: Any = None, ranks: list[int] | None = None, *, by_all: bool = False
    ) -> None:
        everybody = list(range(dist.get_world_size()))
        if ranks is None:
            ranks = everybody if group is None else dist.get_process_group_ranks(group)
        self.ranks = ranks
        self.device = torch.device("cpu")
        backend = dist.get_backend(group)
        if backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        among: dict[str, Any] = {}
        if self.ranks != everybody:  # other ranks do not call new_group
            among = {"ranks": self.ranks, "use_local_synchronization": not by_all}
        self.backend = backend
        timeout = _timeout_of(group, self.device)
        self._handle: Any = dist.new_group(backend=backend, timeout=timeout, **among)
        self.failed = False
        self.pending: weakref.WeakSet[Work] = weakref.WeakSet()
        self._parts: list[ProcessGroup] = []
        _open.add(self)

    def split(self, parts: list[list[int]]) -> ProcessGroup:
        """Make a group of each part; return the one of this rank, which closes with this group.

        All ranks of the job call it with the same parts. If members alone did, PyTorch would name a
        group by the number of groups that a rank knows, and ranks with other numbers would wait.
        """
        every = [ProcessGroup(self.handle, ranks, by_all=True) for ranks in parts]
        (own,) = (part for part in every if dist.get_rank() in part.ranks)
        self._parts.append(own)
        return own

    def rank(self) -> int:
        """Return this rank's index in the group."""
        return self.ranks.index(dist.get_rank())

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def closed(self) -> bool:
        """Return True after `hang_up`."""
        return self._handle is None

    @property
    def handle(self) -> Any:
        """Return `torch.distributed`'s group.

        Raises:
            RuntimeError: after `hang_up`. To `torch.distributed` no group means all ranks.
        """
        if self._handle is None:
            raise RuntimeError(_CLOSED)
        return self._handle

    def release(self) -> Any:
        """Let go of `torch.distributed`'s group, and return it; None if that was done before."""
        handle, self._handle = self._handle, None
        return handle

    def hang_up(self) -> None:
        """Close the connections, those of parts too: ranks that wait for this one fail.

        Collectives that nobody will wait for would keep gloo's open.
        """
        for work in self.pending:
            work.release()
        if handle := self.release():
            dist.destroy_process_group(handle)
        for part in self._parts:
            part.hang_up()

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
        self.ranks, self.failed = list(range(dist.get_world_size())), False
        timeout = _timeout_of(None, self.device)
        self._handle = dist.new_group(backend=self.backend, timeout=timeout)
        _open.add(self)

    def gather_objects(self, item: Any, kind: Any) -> list[Any]:
        """Gather an item of type `kind` from every rank; see `runtime.typed_json`."""

        def allgather(mine: bytes) -> Iterator[bytes]:
            data = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
            length = torch.tensor([data.numel()], device=self.device)
            lengths = [int(x) for x in Work.of(dist.all_gather, length, self).wait()]
            room = data.new_zeros(max(lengths))
            room[: data.numel()] = data
            rows = Work.of(dist.all_gather, room, self).wait()
            return (bytes(row[:n].tolist()) for row, n in zip(rows, lengths))

        return typed_json.gather(item, kind, allgather, self.ranks)


def _timeout_of(group: Any, device: torch.device) -> Any:
    """Return a group's timeout; None, for PyTorch's default, if its backend has none."""
    backend = (group or dist.group.WORLD)._get_backend(device)
    return getattr(getattr(backend, "options", None), "_timeout", None)


class Work:
    """Handle of a pending collective of a group, and the function that shapes its result."""

    def __init__(self, work: Any, shaped: Callable[[], torch.Tensor], group: ProcessGroup) -> None:
        self._work, self._shaped, self._group = work, shaped, group
        group.pending.add(self)

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


def out_of_step(said: dict[int, list[int]]) -> OutOfStepError:
    """Return an error that lists the step of each rank; see `C10dBackend.gather_words`."""
    verifying = [str(rank) for rank, (step, *_) in said.items() if step == VERIFY]
    if verifying:
        return OutOfStepError(
            f"rank {', '.join(verifying)} calls verify, and the other ranks are in backward: call "
            "it on all ranks, between the same two steps"
        )
    listed = {rank: tuple(words[:2]) for rank, words in said.items()}
    return OutOfStepError(
        "the ranks are in different steps, or only some of them use a GradScaler: load the same "
        f"checkpoint on all ranks. By rank (step, whether it can be undone): {listed}"
    )


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
        said = self.gather_words([VERIFY, 0, 0], "verify")
        if any(step != VERIFY for step, *_ in said.values()):
            raise out_of_step(said)
        return Work.of(dist.all_gather, row.to(self._group.device), self._group).wait()

    def gather_words(self, words: list[int], what: str) -> dict[int, list[int]]:
        """Gather three numbers by rank, so that ranks notice if they begin different things.

        Args:
            words: the step, if it can be undone, and if this rank has joined.
            what: begins, for errors.
        """
        mine = torch.tensor(words, device=self._group.device)
        try:
            every = Work.of(dist.all_gather, mine, self._group).wait().tolist()
        except RuntimeError as error:
            raise RuntimeError(errors.explain(what, str(error), self.library)) from error
        return dict(zip(self._group.ranks, every))

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
        given, received = tensor.contiguous(), torch.empty_like(tensor)
        work = dist.all_to_all_single(received, given, group=group.handle, async_op=True)
        return Work(work, lambda: received, group)

    def gather(self, request: Gather, name: str, group: ProcessGroup) -> Work:
        del name
        given, here, nothing = request.tensor.contiguous(), group.rank(), [0] * group.size()
        to, of = list(nothing), nothing
        to[request.root] = given.numel()
        if here == request.root:
            of = list(request.lengths)
        received = given.new_empty(sum(of))
        work = dist.all_to_all_single(received, given, of, to, group=group.handle, async_op=True)
        return Work(work, lambda: received, group)

    def broadcast(self, tensor: torch.Tensor, root: int, name: str, group: ProcessGroup) -> Work:
        del name
        given = tensor.clone()
        work = dist.broadcast(given, root, group=group.handle, async_op=True)
        return Work(work, lambda: given, group)

    def wait(self, pending: Work) -> torch.Tensor:
        return pending.wait()
