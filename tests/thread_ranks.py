"""Ranks as threads of one process: a transport whose collectives meet in memory, by their order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hvd_gradcomp.core.collectives import Allreduce, Gather
from hvd_gradcomp.runtime.program_runner import Participants
from hvd_gradcomp.torch.local.tensor_exchange import Connection
from hvd_gradcomp.torch.reduce import reducer_state
from hvd_gradcomp.torch.reduce.reducer_state import OF_HOOKS

_SECONDS = 60.0


class _Hub:
    """Place where ranks put what they send, under the number of the collective."""

    def __init__(self, size: int) -> None:
        self.size, self._condition = size, threading.Condition()
        self._items: dict[int, dict[int, Any]] = {}
        self.gone = False

    def post(self, number: int, rank: int, item: Any) -> None:
        with self._condition:
            self._items.setdefault(number, {})[rank] = item
            self._condition.notify_all()

    def has_all(self, number: int) -> bool:
        return len(self._items.get(number, ())) == self.size

    def wait(self, number: int) -> list[Any]:
        with self._condition:
            self._condition.wait_for(lambda: self.gone or self.has_all(number), _SECONDS)
            if not self.has_all(number):
                raise RuntimeError(f"connection closed by another rank, or it is late ({number})")
            return [self._items[number][rank] for rank in range(self.size)]

    def hang_up(self) -> None:
        with self._condition:
            self.gone = True
            self._condition.notify_all()


class _Reply:
    def __init__(self, hub: _Hub, number: int, shaped: Callable[[list[Any]], Any]) -> None:
        self._hub, self._number, self._shaped = hub, number, shaped

    def ready(self) -> bool:
        return self._hub.has_all(self._number)

    def wait(self) -> Any:
        return self._shaped(self._hub.wait(self._number))


class _Group:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size, self.ranks = rank, size, None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class ThreadRank:
    """One of several ranks; `connect` is what `LocalStepsOptimizer` takes."""

    library, version, failure = "threads", "none", RuntimeError
    hangs_up = True

    def __init__(self, hub: _Hub, rank: int, other: _Hub | None = None) -> None:
        self.rank, self._hub, self._number, self._other = rank, hub, 0, other
        self.group, self.name = _Group(rank, hub.size), "threads"

    def apart(self) -> ThreadRank:
        """Return the rank with connections of its own; once."""
        assert self._other is not None
        return ThreadRank(self._other, self.rank)

    def connect(self, name: str) -> Connection:
        del name
        save = lambda reducer, mode: reducer_state.save(reducer)  # noqa: E731
        how = save, partial(reducer_state.load, remedies=OF_HOOKS), self._hub.hang_up
        return Connection(self, Participants(self.group), *how)

    def _meet(self, item: Any, shaped: Callable[[list[Any]], Any]) -> _Reply:
        self._number += 1
        self._hub.post(self._number, self.rank, item)
        return _Reply(self._hub, self._number, shaped)

    def check(self, named_parameters: Any) -> None:
        del named_parameters

    def global_rank(self) -> int:
        return self.rank

    def gather_objects(self, item: Any, kind: Any, what: str) -> list[Any]:
        del kind
        every = self._meet((what, item), list).wait()
        assert len({what for what, _ in every}) == 1, every
        return [item for _, item in every]

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        return self._meet(row.clone(), torch.stack).wait()

    def allgather(self, tensor: torch.Tensor, name: str, group: Any) -> _Reply:
        return self._meet(tensor.clone(), torch.stack)

    def allreduce(self, request: Allreduce, name: str, group: Any) -> _Reply:
        tensor, prescale, postscale, _ = request
        total = lambda every: torch.stack(every).sum(0) * postscale  # noqa: E731
        return self._meet(tensor * prescale, total)

    def alltoall(self, tensor: torch.Tensor, name: str, group: Any) -> _Reply:
        parts = tensor.clone().view(self._hub.size, -1)
        at_rank = lambda every: torch.stack([p[self.rank] for p in every]).view(tensor.shape)  # noqa: E731
        return self._meet(parts, at_rank)

    def gather(self, request: Gather, name: str, group: Any) -> _Reply:
        here = request.root == self.rank
        joined = lambda every: torch.cat(every) if here else every[0][:0]  # noqa: E731
        return self._meet(request.tensor.clone(), joined)

    def broadcast(self, tensor: torch.Tensor, root: int, name: str, group: Any) -> _Reply:
        return self._meet(tensor.clone(), lambda every: every[root].clone())

    def wait(self, pending: _Reply) -> Any:
        return pending.wait()


def run(size: int, work: Callable[[ThreadRank], Any]) -> Sequence[Any]:
    """Run `work` on each of several ranks; return their results, or errors, in order of rank."""
    hub, other, results = _Hub(size), _Hub(size), [None] * size

    def one(rank: int) -> None:
        try:
            results[rank] = work(ThreadRank(hub, rank, other))
        except Exception as error:
            results[rank] = error
            hub.hang_up()
            other.hang_up()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
