"""Detection of deadlocks between ranks, with a report of the collectives that each rank waits for.

Horovod starts a collective once all its ranks have submitted it. If one rank submits another
collective than the rest, all wait, and none can tell: a rank that computes for long looks the same.
So a rank that has waited for `PATIENCE` seconds reports its pending collectives by a collective of
its own, which only waiting ranks join. It completes once all ranks wait; if no pending collective
was submitted by all of its ranks, none can complete. Since such a report may be outdated when it
arrives, the ranks report once more, and raise if all reports are the same: then all ranks have
waited in between.

A report that only some ranks submit stays pending in Horovod, which warns of it and may stop it as
stalled. The next round of a step on PyTorch (`torch/step_sync.py`), or the next step on TensorFlow,
completes it. A frontend supplies the sum of a table over ranks: see `StallChannel`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

PATIENCE = 10.0  # seconds of waiting before a rank reports
_MOST = 64  # collectives in a report
_TEXT = 160  # bytes of their names
_WORD = 2 + 2 * _MOST + _TEXT // 4  # numbers in a report
_BUSY = -1  # instead of the number of collectives: this rank does not wait


class DeadlockError(RuntimeError):
    """Deadlock: all ranks wait, and no pending collective can complete."""


class PendingOp(NamedTuple):
    """A collective that this rank has submitted and that has not completed.

    Attributes:
        name: equal on all ranks.
        process_set: the ranks that it is for.
        ready: whether it has completed by now.
        thread: the thread that has submitted it; None if it waits for this rank's backward pass.
        shown: the name in error messages; `name` if empty.
    """

    name: str
    process_set: Any
    ready: Callable[[], bool]
    thread: int | None = None
    shown: str = ""


class StallReport(NamedTuple):
    """Report of one rank.

    Attributes:
        asked: (key of its name, id of its process set) of each pending collective.
        complete: whether `asked` lists all of them; False for a rank that does not wait.
        text: names of the pending collectives.
    """

    asked: frozenset[tuple[int, int]]
    complete: bool
    text: str


def word(asked: Sequence[PendingOp], turn: int = 0) -> list[int]:
    """Return the report of a rank that waits, as `_WORD` numbers.

    Args:
        asked: the pending collectives.
        turn: number of the wait; another wait for the same collectives has another number.
    """
    listed = [n for one in asked[:_MOST] for n in (_key(one.name), one.process_set.process_set_id)]
    shown = ", ".join(
        one.shown or one.name for one in asked[-2:]
    )  # the last two: collectives that failed before may still be listed
    if len(asked) > 2:
        shown += f" and {len(asked) - 2} more"
    text = shown.encode("ascii", "replace")[:_TEXT].ljust(_TEXT)
    packed = [int.from_bytes(text[i : i + 4], "little") for i in range(0, _TEXT, 4)]
    return [len(asked), *listed, *[0] * (2 * _MOST - len(listed)), *packed, turn]


def busy() -> list[int]:
    """Return the report of a rank that does not wait."""
    return [_BUSY, *[0] * (_WORD - 1)]


def read(numbers: Sequence[int]) -> StallReport | None:
    """Parse the numbers of `word` or `busy`; return None for a joined rank, which adds zeros."""
    count, pairs = numbers[0], numbers[1 : 1 + 2 * _MOST]
    if count == 0:
        return None
    held = 2 * min(max(count, 0), _MOST)
    text = b"".join(n.to_bytes(4, "little") for n in numbers[1 + 2 * _MOST : -1])
    asked = frozenset(zip(pairs[0:held:2], pairs[1:held:2]))
    return StallReport(asked, 0 < count <= _MOST, text.decode("ascii", "replace").strip())


def stuck(told: dict[int, StallReport | None], members: dict[int, Sequence[int]]) -> bool:
    """Return True if no pending collective can complete.

    Args:
        told: the report of each rank.
        members: the ranks of each process set, by its id.
    """
    words = {rank: one for rank, one in told.items() if one is not None}
    if not words or not all(one.complete for one in words.values()):
        return False
    for key, process_set in set().union(*(one.asked for one in words.values())):
        ranks = members.get(process_set)
        if ranks is None or not set(ranks) <= told.keys():
            return False  # depends on ranks that have not reported here
        if all(told[rank] is None or (key, process_set) in told[rank].asked for rank in ranks):  # type: ignore[union-attr]
            return False
    return True


def _key(name: str) -> int:
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


class StallChannel:
    """Channel for the reports of the ranks of one process set.

    Args:
        process_set: the ranks.
        tell: submits the sum over ranks of an int64 table, under a name. Returns an object with
            `ready()` and `wait()`; the latter returns an object with `tolist()`, or raises a
            RuntimeError.
        members: the ranks of each process set, by its id.

    Attributes:
        report: the pending report of this rank, an object of `tell`; None if there is none.
    """

    def __init__(
        self,
        process_set: Any,
        tell: Callable[[list[list[int]], str, Any], Any],
        members: Callable[[], dict[int, Sequence[int]]],
    ) -> None:
        self._set, self._tell, self._members = process_set, tell, members
        self.report: Any = None
        self._completing = False
        self._before: list[list[int]] | None = None

    @property
    def pending(self) -> bool:
        """True if a report of this rank is pending."""
        return self.report is not None

    def look(self, asked: Sequence[PendingOp], turn: int = 0) -> None:
        """Report the collectives that this rank waits for, and read other reports; see `word`.

        Raises:
            DeadlockError: on all ranks.
        """
        if self._completing:
            return
        if self.report is None:
            self._say(word(asked, turn))
        elif self.report.ready():
            pending, self.report = self.report, None
            try:
                table = pending.wait().tolist()
            except RuntimeError:  # from Horovod: the pending collectives have failed, too
                self._before = None
                return
            self._hear(table)
            self._say(word(asked, turn))

    def complete(self) -> None:
        """Complete a report that only some ranks have submitted; all ranks call it."""
        if self.report is None:
            self._say(busy())
        self._completing = True  # blocks, but not in a deadlock
        try:
            self.report.wait()
        finally:
            self._completing = False
            self.drop()

    def drop(self) -> None:
        """Drop the pending report after a restart of Horovod."""
        self.report = self._before = None

    def _say(self, numbers: list[int]) -> None:
        everybody = [[0] * _WORD for _ in range(self._set.size())]
        everybody[self._set.rank()] = numbers
        name = f"gradcomp.waiting.{self._set.process_set_id}"
        self.report = self._tell(everybody, name, self._set)

    def _hear(self, table: list[list[int]]) -> None:
        before, self._before = self._before, table
        if table != before:
            return
        ranks = list(self._set.ranks or range(len(table)))
        told = {rank: read(numbers) for rank, numbers in zip(ranks, table)}
        if not stuck(told, self._members()):
            return
        listed = "; ".join(f"rank {r} waits for {t.text}" for r, t in told.items() if t is not None)
        raise DeadlockError(
            f"the ranks wait for each other, each for something else, and have done so for "
            f"{PATIENCE:g} seconds: {listed}. What is done on one rank (a batch more or less, "
            "add_param_group, retrain, save_checkpoint, a branch that depends on the rank) has to "
            "be done on all, before the same step; for uneven data see hvd.join()"
        )


class StallInspector:
    """Record of this rank's pending collectives, and of the time of the last change.

    Args:
        tell, members: see `StallChannel`.

    Attributes:
        asked: the pending collectives, by key. Handles that are always waited for add and remove
            theirs; `ask` and `came` are for those that may be dropped.
    """

    def __init__(self, tell: Callable[..., Any], members: Callable[..., Any]) -> None:
        self._how = tell, members
        self._watches: dict[int, tuple[Any, StallChannel]] = {}
        self.asked: dict[Hashable, PendingOp] = {}
        self._threads: set[int] = set()
        self._since, self._turn = 0.0, 0
        self._looked: tuple[Hashable, ...] = ()

    def among(self, process_set: Any) -> StallChannel:
        """Watch the ranks of a process set from now on."""
        number = process_set.process_set_id
        known = self._watches.get(number)
        if known is None or known[0] is not process_set:
            self._watches[number] = process_set, StallChannel(process_set, *self._how)
        return self._watches[number][1]

    def ask(self, key: Hashable, asked: PendingOp) -> None:
        """Record a submitted collective."""
        if len(self.asked) > _MOST:  # nobody has waited for the completed ones
            for known, one in list(self.asked.items()):
                if one.ready():
                    self.came(known)
        self.asked[key] = asked
        if asked.thread is not None:
            self._threads.add(asked.thread)

    def came(self, key: Hashable) -> None:
        """Remove a collective that has completed or failed."""
        self.asked.pop(key, None)

    def look(self) -> None:
        """Report if this rank has waited for `PATIENCE`; costs microseconds before.

        Raises:
            DeadlockError: on all ranks.
        """
        keys = tuple(self.asked)
        if keys != self._looked:
            self._looked, self._since = keys, time.monotonic()
            self._turn = (self._turn + 1) & 0x7FFFFFFF
        if time.monotonic() - self._since < PATIENCE:
            return
        coming = [one for one in list(self.asked.values()) if not one.ready()]
        if not coming or len(self._threads) > 1:
            return  # another thread may still submit what other ranks wait for
        for process_set, watch in list(self._watches.values()):
            if process_set.process_set_id is not None and process_set.included():
                watch.look(coming, self._turn)

    def drop(self) -> None:
        """Drop all records after a restart of Horovod."""
        self.asked.clear()
        for _, watch in self._watches.values():
            watch.drop()
