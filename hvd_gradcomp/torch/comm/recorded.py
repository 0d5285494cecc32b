"""Horovod's own collectives, recorded: if none can complete, all ranks raise a DeadlockError.

`hvd.allreduce(metric)` on one rank while another is in backward deadlocks in stock Horovod. So the
functions that enqueue a collective or wait for one are replaced in Horovod's modules: each enqueued
collective is recorded until it completes, and a waiting rank checks from time to time whether the
wait can end (see `runtime.stall_inspector`). Their results stay Horovod's own.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from horovod.torch import mpi_ops

from hvd_gradcomp.runtime.stall_inspector import MAX_LISTED, PendingOp

_PREFIXES = {  # of the names by which Horovod matches collectives, by enqueueing function
    "_allreduce_async": "allreduce",
    "_grouped_allreduce_async": "grouped_allreduce",
    "_allgather_async": "allgather",
    "_grouped_allgather_async": "grouped_allgather",
    "_broadcast_async": "broadcast",
    "_alltoall_async": "alltoall",
    "_reducescatter_async": "reducescatter",
    "_grouped_reducescatter_async": "grouped_reducescatter",
}
STOCK: dict[str, Callable[..., Any]] = {name: getattr(mpi_ops, name) for name in _PREFIXES}
"""Horovod's own functions that enqueue, which record nothing."""

synchronize: Callable[[int], Any] = mpi_ops.synchronize
"""Horovod's own function that waits for a handle."""

_REPLACED = {name: getattr(mpi_ops, name) for name in ("synchronize", "barrier", "shutdown")}
_unnamed: dict[tuple[str, int], int] = {}  # count of unnamed ones, by prefix and process set


class PendingOps:
    """Record of the collectives that this rank has submitted and that have not completed.

    Attributes:
        operations: the pending collectives, by key. Handles that are always waited for add and
            remove theirs; `add` and `remove` are for those that may be dropped.
    """

    def __init__(self) -> None:
        self.operations: dict[Hashable, PendingOp] = {}
        self._threads: set[int] = set()

    def add(self, key: Hashable, operation: PendingOp) -> None:
        """Record a submitted collective."""
        if len(self.operations) > MAX_LISTED:  # nobody has waited for the completed ones
            for known, op in list(self.operations.items()):
                if op.ready():
                    self.remove(known)
        self.operations[key] = operation
        if operation.thread is not None:
            self._threads.add(operation.thread)

    def remove(self, key: Hashable) -> None:
        """Remove a collective that has completed or failed."""
        self.operations.pop(key, None)

    def pending(self) -> Mapping[Hashable, PendingOp]:
        """Return what this rank waits for; see `StallInspector`."""
        return self.operations if len(self._threads) < 2 else {}


def watch(
    pending: PendingOps, forget: Callable[[], None], pauses: Callable[[], Callable[[], None]]
) -> None:
    """Replace the functions that enqueue or wait in all of Horovod's modules for PyTorch.

    Args:
        pending: records collectives.
        forget: drops what is recorded of a Horovod that has ended.
        pauses: makes a function to call between two polls; see `comm.horovod.pauses`.
    """

    def wait(handle: int) -> Any:
        if handle in mpi_ops._handle_map:
            pause = pauses()
            try:
                while not mpi_ops.poll(handle):
                    pause()
            finally:
                pending.remove(_key(handle))
        return synchronize(handle)

    def barrier(process_set: Any = mpi_ops.global_process_set) -> None:
        key = _key(object())
        pending.add(key, PendingOp("barrier", process_set, lambda: False, _thread()))
        try:
            _REPLACED["barrier"](process_set)  # enqueues, and calls the `wait` above
        finally:
            pending.remove(key)

    def shutdown(*arguments: Any, **options: Any) -> Any:
        _unnamed.clear()
        forget()
        return _REPLACED["shutdown"](*arguments, **options)

    for name, stock in STOCK.items():
        setattr(mpi_ops, name, _recorded(pending, stock, _PREFIXES[name]))
    ours: dict[str, Callable[..., Any]] = {
        "synchronize": wait,
        "barrier": barrier,
        "shutdown": shutdown,
    }
    for title, module in list(sys.modules.items()):
        if title == "horovod.torch" or title.startswith("horovod.torch."):
            for name, stock in _REPLACED.items():
                if vars(module).get(name) is stock:
                    setattr(module, name, functools.wraps(stock)(ours[name]))


def _recorded(pending: PendingOps, stock: Callable[..., int], prefix: str) -> Callable[..., int]:
    """Wrap an enqueueing function so that it records each collective."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def enqueue(*arguments: Any, **options: Any) -> int:
        call = signature.bind(*arguments, **options).arguments
        process_set = call["process_set"]
        if not call["name"]:
            series = prefix, process_set.process_set_id
            _unnamed[series] = _unnamed.get(series, 0) + 1
            call["name"] = f"noname.{_unnamed[series]}"
        handle: int = stock(**call)

        def ready() -> bool:  # also if it was waited for elsewhere
            return handle not in mpi_ops._handle_map or bool(mpi_ops.poll(handle))

        pending.add(
            _key(handle), PendingOp(f"{prefix}.{call['name']}", process_set, ready, _thread())
        )
        return handle

    return enqueue


def _key(handle: Hashable) -> Hashable:
    return "horovod", handle


def _thread() -> int | None:
    """Return the calling Python thread; None for a thread of the autograd engine."""
    thread = threading.current_thread()
    return None if thread.name.startswith("Dummy-") else thread.ident
