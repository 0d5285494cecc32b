"""Agreement of processes on who trains together, over a store that outlives all of them.

The store is a `TCPStore` in a process of its own: `hvd-gradcomp rendezvous`. A *generation* is a
list of processes, in the order of their ranks. A process that wants to be in the next one says so
in the store: it joins, or it was in the last one and has lost a rank. The first living of these
proposes the list, once all processes of the last generation have arrived, have left or are silent;
one compare-and-set decides. A process is considered silent when its heartbeat counter has not
changed over several polls. No clocks are compared, and a process that was suspended polls again
before it judges others.

`torch.distributed.elastic`'s `DynamicRendezvousHandler` runs in a worker as well, and agrees in the
same cases. It looks once a second, waits for more ranks each time, and compares clocks of hosts.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple, Optional

import torch.distributed as dist

from hvd_gradcomp.runtime import typed_json

LOGGER = logging.getLogger("hvd_gradcomp")
_POLL = 0.03  # seconds between two looks at the store
_BEATS = 8  # counts in the time after which a process is silent
_SETTLE = 2.0  # seconds without another arrival before a first generation begins


class RendezvousError(RuntimeError):
    """Error: the ranks do not meet, as the store is gone or too few came in time."""


class Generation(NamedTuple):
    """Processes that train together.

    Attributes:
        number: from 1; each has the next.
        processes: in the order of their ranks.
        before: those of the generation before.
    """

    number: int
    processes: list[str]
    before: list[str]


class LeaveNotice(NamedTuple):
    """Last words of a process that leaves.

    Attributes:
        finished: its training is at the end.
        handed_over: another rank has its residual.
        exchanges: that it has applied, of each kind.
    """

    finished: bool
    handed_over: bool
    exchanges: list[int]


class Rendezvous:
    """Place where processes meet.

    Args:
        endpoint: "host:port" of `hvd-gradcomp rendezvous`.
        name: of the training; several may use one store.
        min_ranks: fewer do not train, except for those that are left at the end.
        max_ranks: more wait until one leaves; None for no limit.
        patience: seconds after which a process that gives no sign of life is taken for dead.
        timeout: seconds that the others wait for a process that lives and does not come, or for
            enough ranks.

    Raises:
        ValueError: the endpoint or a number is not possible.
        RendezvousError: no store answers there.

    Attributes:
        process: name of this process, never used again.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        min_ranks: int,
        max_ranks: int | None,
        patience: float,
        timeout: float,
    ) -> None:
        host, _, port = str(endpoint).rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"rendezvous= takes 'host:port' of `hvd-gradcomp rendezvous`, got {endpoint!r}"
            )
        if min_ranks < 1 or (max_ranks is not None and max_ranks < min_ranks):
            raise ValueError(
                f"min_ranks must be at least 1, and max_ranks no less, got {min_ranks} and "
                f"{max_ranks}"
            )
        if patience <= 0 or timeout <= 0:
            raise ValueError(f"patience and timeout are positive, got {patience} and {timeout}")
        self.process = f"{platform.node()}-{uuid.uuid4().hex}"
        self._endpoint, self._address, self._name = endpoint, (host.strip("[]"), int(port)), name
        self._min, self._max = min_ranks, max_ranks
        self._patience, self._timeout = patience, timeout
        self._newest, self._present = 0, 0
        self._silenced = False
        with self._explained("joining"):
            self._store = self._connect()
            self._pulse = _Pulse(self._connect(), self.process, patience)

    def _connect(self) -> dist.Store:
        wait = timedelta(seconds=max(10.0, self._patience))
        store = dist.TCPStore(*self._address, is_master=False, timeout=wait)
        return dist.PrefixStore(f"gradcomp/{self._name}", store)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RendezvousError):
                raise
            raise RendezvousError(
                f"{what} failed: the rendezvous at {self._endpoint} does not answer. Start "
                "`hvd-gradcomp rendezvous` there, or look if a firewall is between; if it has "
                "ended in mid-training, start it and all ranks again, from a checkpoint. "
                f"torch.distributed says: {error}"
            ) from error

    def store_of(self, generation: Generation) -> dist.Store:
        """Return a new store in which the ranks of a generation connect."""
        with self._explained("connecting the ranks"):
            return dist.PrefixStore(f"connections/{generation.number}", self._connect())

    # -- meeting -------------------------------------------------------------------------------

    def meet(self) -> Generation:
        """Return the next generation, with this process in it.

        Raises:
            RendezvousError: too few came in time, or the store is gone.
        """
        deadline = time.monotonic() + self._timeout
        with self._explained("a meeting of the ranks"):
            hint = self._store.get("newest") if self._store.check(["newest"]) else b"0"
            self._newest = max(self._newest, int(hint))
            while True:
                while self._store.check([f"{self._newest + 1}/processes"]):
                    self._newest += 1
                agreed = self._agree(self._newest + 1, deadline)
                if self.process in agreed:
                    self._newest, self._present = self._newest + 1, len(agreed)
                    self._store.set("newest", str(self._newest))
                    self._pulse.watch(agreed)  # who dies is known by the next meeting
                    return Generation(self._newest, agreed, self._processes(self._newest - 1))

    def _agree(self, number: int, deadline: float) -> list[str]:
        """Return the processes of a generation, as soon as they are agreed on."""
        store, decided = self._store, f"{number}/processes"
        before = self._processes(number - 1)
        place = store.add(f"{number}/arrivals", 1)
        store.set(f"{number}/arrival/{place}", self.process)
        arrived: list[str] = []
        since = time.monotonic()
        while not store.check([decided]):
            now = time.monotonic()
            come = self._arrivals(number)
            if len(come) > len(arrived):
                arrived, since = come, now
            self._pulse.watch({*arrived, *before})
            here = [p for p in arrived if not self._pulse.silent(p)]
            gone = {p: self.leave_notice(p) for p in before if p not in here}
            awaited = [
                p for p, notice in gone.items() if notice is None and not self._pulse.silent(p)
            ]
            finished = sum(notice is not None and notice.finished for notice in gone.values())
            first = not any(p in here for p in before)
            if first and finished and not awaited:
                raise RendezvousError(
                    f"the training {self._name!r} has ended: give another name= to begin one at "
                    f"{self._endpoint}"
                )
            # Who joins does not leave out those that train, however long they take.
            enough = len(here) >= max(1, self._min - finished) and not (first and awaited)
            if now > deadline and not enough:
                raise self._too_few(here, awaited)
            if first and len(here) != self._max and now - since < _SETTLE:
                enough = False
            late = now - since - self._timeout  # of those that are awaited
            if enough and here[:1] == [self.process] and (not awaited or late > 0):
                if awaited:
                    LOGGER.warning(
                        "going on without %s: alive, and in no exchange for %.0f s",
                        ", ".join(awaited),
                        self._timeout,
                    )
                ranks = [p for p in before if p in here] + [p for p in here if p not in before]
                listed = typed_json.dumps(ranks[: self._max]).decode()
                store.compare_set(decided, "", listed)
            elif now > deadline and late > 2 * self._patience:
                raise self._too_few(here, awaited)
            else:
                time.sleep(_POLL)
        return self._processes(number)

    def _too_few(self, here: Sequence[str], awaited: Sequence[str]) -> RendezvousError:
        alive = ""
        if awaited:
            alive = (
                f"; alive, but in no exchange meanwhile, or with no place to give as max_ranks="
                f"{self._max}: {', '.join(awaited)}"
            )
        return RendezvousError(
            f"{len(here)} of at least {self._min} ranks have met at {self._endpoint} in "
            f"{self._timeout:.0f} s ({', '.join(here)}{alive}). Start the others with "
            f"rendezvous={self._endpoint!r} and the same name, or lower min_ranks="
        )

    def _processes(self, number: int) -> list[str]:
        if number < 1:
            return []
        processes: list[str] = typed_json.loads(self._store.get(f"{number}/processes"), list[str])
        return processes

    def _arrivals(self, number: int) -> list[str]:
        count, processes = self._store.add(f"{number}/arrivals", 0), []
        for place in range(1, count + 1):
            key = f"{number}/arrival/{place}"
            if self._store.check([key]):  # else it is about to say who it is, or died there
                processes.append(self._store.get(key).decode())
        return list(dict.fromkeys(processes))

    @property
    def called(self) -> bool:
        """Return True if another process waits for the next generation, and has room in it."""
        if self._present == self._max or self._silenced:
            return False
        try:
            return bool(self._store.add(f"{self._newest + 1}/arrivals", 0))
        except RuntimeError as error:
            self._silenced = True
            LOGGER.warning(
                "the rendezvous at %s does not answer: training goes on, but no rank can join, and "
                "none may die (%s)",
                self._endpoint,
                error,
            )
            return False

    # -- leaving -------------------------------------------------------------------------------

    def leave(self, leave_notice: LeaveNotice) -> None:
        """Say that this process does not come back; without an answer it is silent soon."""
        self._pulse.stop()
        try:
            self._store.set(f"left/{self.process}", typed_json.dumps(leave_notice).decode())
        except RuntimeError as error:
            LOGGER.warning("the rendezvous at %s does not answer: %s", self._endpoint, error)

    def leave_notice(self, process: str) -> LeaveNotice | None:
        """Return the last words of a process; None if it has not left."""
        if not self._store.check([f"left/{process}"]):
            return None
        notice = typed_json.loads(self._store.get(f"left/{process}"), Optional[LeaveNotice])
        assert notice is None or isinstance(notice, LeaveNotice)
        return notice


class _Pulse:
    """Thread that counts up a number in the store, and watches those of others.

    Args:
        store: of its own: another thread may wait in one.
        process: this one.
        patience: seconds after which another is silent.
    """

    def __init__(self, store: dist.Store, process: str, patience: float) -> None:
        self._store, self._process, self._patience = store, process, patience
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._last: dict[str, tuple[int, int]] = {}  # the number, and looks since it was new
        store.add(f"pulse/{process}", 1)
        threading.Thread(target=self._beat, name="gradcomp-pulse", daemon=True).start()

    def _beat(self) -> None:
        interval = self._patience / _BEATS
        while not self._ended.wait(interval):
            with self._lock:
                watched = [*self._last]
            try:
                self._store.add(f"pulse/{self._process}", 1)
                counts = {p: self._store.add(f"pulse/{p}", 0) for p in watched}
            except RuntimeError:
                return  # what needs the store says so
            with self._lock:
                for process, count in counts.items():
                    before, looks = self._last.get(process, (count, 0))
                    if process in self._last:
                        self._last[process] = count, (looks + 1 if count == before else 0)

    def watch(self, processes: Collection[str]) -> None:
        """Watch these, and no others; those that were watched before are known already."""
        with self._lock:
            self._last = {p: self._last.get(p, (-1, 0)) for p in processes}

    def silent(self, process: str) -> bool:
        """Return True if a watched process has given no sign for as long as patience lasts."""
        with self._lock:
            _, looks = self._last[process]
        return process != self._process and looks >= _BEATS

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()


def serve(host: str, port: int) -> dist.TCPStore:
    """Return a store that answers at an address, as long as somebody holds it.

    A `TCPStore` that is given a host listens on all addresses all the same; so it is given a
    socket.

    Args:
        host: to listen on; no other address of this machine answers.
        port: 0 for any that is free.

    Raises:
        OSError: this machine has no such address, or the port is taken.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = min(addresses, key=lambda each: each[0] != socket.AF_INET)
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # "::" is for IPv4 as well
    with socket.create_server(address[:2], family=family, dualstack_ipv6=both) as listener:
        free = listener.getsockname()[1]
        how = {"is_master": True, "wait_for_workers": False}
        if "master_listen_fd" not in str(dist.TCPStore.__init__.__doc__):  # PyTorch 2.0
            listener.close()
            return dist.TCPStore(host, free, **how)
        return dist.TCPStore(host, free, **how, master_listen_fd=os.dup(listener.fileno()))
