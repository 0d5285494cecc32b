"""Detection of deadlocks between ranks, with a report of the collectives that each rank waits for.

Horovod starts a collective once all its ranks have submitted it. If one rank submits another
collective than the rest, all wait, and none can tell: a rank that computes for long looks the same.
So a rank that has waited for `PATIENCE` seconds reports its pending collectives by a collective of
its own, which only waiting ranks join. It completes once all ranks wait; if no pending collective
was submitted by all of its ranks, none can complete. Since such a report may be outdated when it
arrives, the ranks report once more, and raise if all reports are the same: then all ranks have
waited in between.

A report that only some ranks submit stays pending in Horovod, which warns of it and may stop it as
stalled. The next round of a step on PyTorch (`torch/reduce/step_sync.py`), or the next step on
TensorFlow, completes it. A frontend supplies what is pending, and the sum of a table over ranks:
see
`StallInspector` and `StallChannel`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

PATIENCE = 10.0  # seconds of waiting before a rank reports
MAX_LISTED = 64  # collectives in a report
_TEXT = 160  # bytes of their names
_REPORT_SIZE = 2 + 2 * MAX_LISTED + _TEXT // 4  # numbers in a report
_RUNNING = -1  # instead of the number of collectives: this rank does not wait


class DeadlockError(RuntimeError):
    """Deadlock: all ranks wait, and no pending collective can complete."""


class PendingOp(NamedTuple):
    """A collective that this rank has submitted and that has not completed.

    Attributes:
        name: equal on all ranks.
        process_set: the ranks that it is for.
        ready: returns True if it has completed by now.
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
        operations: (key of its name, id of its process set) of each pending collective.
        complete: `operations` lists all of them; False for a rank that does not wait.
        text: names of the pending collectives.
    """

    operations: frozenset[tuple[int, int]]
    complete: bool
    text: str


def pack_report(operations: Sequence[PendingOp], wait_id: int = 0) -> list[int]:
    """Return the report of a rank that waits, as `_REPORT_SIZE` numbers.

    Args:
        operations: the pending collectives.
        wait_id: number of the wait; another wait for the same collectives has another number.
    """
    listed = [
        n for op in operations[:MAX_LISTED] for n in (_key(op.name), op.process_set.process_set_id)
    ]
    shown = ", ".join(
        op.shown or op.name for op in operations[-2:]
    )  # the last two: collectives that failed before may still be listed
    if len(operations) > 2:
        shown += f" and {len(operations) - 2} more"
    text = shown.encode("ascii", "replace")[:_TEXT].ljust(_TEXT)
    packed = [int.from_bytes(text[i : i + 4], "little") for i in range(0, _TEXT, 4)]
    return [len(operations), *listed, *[0] * (2 * MAX_LISTED - len(listed)), *packed, wait_id]


def pack_running() -> list[int]:
    """Return the report of a rank that does not wait."""
    return [_RUNNING, *[0] * (_REPORT_SIZE - 1)]


def parse_report(numbers: Sequence[int]) -> StallReport | None:
    """Parse a report's numbers; return None for a joined rank, which adds zeros."""
    count, pairs = numbers[0], numbers[1 : 1 + 2 * MAX_LISTED]
    if count == 0:
        return None
    end = 2 * min(max(count, 0), MAX_LISTED)
    text = b"".join(n.to_bytes(4, "little") for n in numbers[1 + 2 * MAX_LISTED : -1])
    operations = frozenset(zip(pairs[0:end:2], pairs[1:end:2]))
    return StallReport(operations, 0 < count <= MAX_LISTED, text.decode("ascii", "replace").strip())


def is_deadlocked(
    reports: dict[int, StallReport | None], members: dict[int, Sequence[int]]
) -> bool:
    """Return True if no pending collective can complete.

    Args:
        reports: the report of each rank.
        members: the ranks of each process set, by its id.
    """
    waiting = {rank: report for rank, report in reports.items() if report is not None}
    if not waiting or not all(report.complete for report in waiting.values()):
        return False
    for key, process_set in set().union(*(report.operations for report in waiting.values())):
        ranks = members.get(process_set)
        if ranks is None or not set(ranks) <= reports.keys():
            return False  # depends on ranks that have not reported here
        submitted = (
            rank not in waiting or (key, process_set) in waiting[rank].operations for rank in ranks
        )
        if all(submitted):
            return False
    return True


def _key(name: str) -> int:
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


class StallChannel:
    """Channel for the reports of the ranks of one process set.

    Args:
        process_set: the ranks.
        submit: submits the sum over ranks of an int64 table, under a name. Returns an object with
            `ready()` and `wait()`; the latter returns an object with `tolist()`, or raises a
            RuntimeError.
        members: the ranks of each process set, by its id.

    Attributes:
        report: the pending report of this rank, an object of `submit`; None if there is none.
    """

    def __init__(
        self,
        process_set: Any,
        submit: Callable[[list[list[int]], str, Any], Any],
        members: Callable[[], dict[int, Sequence[int]]],
    ) -> None:
        self._set, self._submit, self._members = process_set, submit, members
        self.report: Any = None
        self._completing = False
        self._before: list[list[int]] | None = None

    @property
    def pending(self) -> bool:
        """True if a report of this rank is pending."""
        return self.report is not None

    def check(self, operations: Sequence[PendingOp], wait_id: int = 0) -> None:
        """Report the collectives that this rank waits for, and read other reports.

        Raises:
            DeadlockError: on all ranks.
        """
        if self._completing:
            return
        if self.report is None:
            self._publish(pack_report(operations, wait_id))
        elif self.report.ready():
            pending, self.report = self.report, None
            try:
                table = pending.wait().tolist()
            except RuntimeError:  # from Horovod: the pending collectives have failed, too
                self._before = None
                return
            self._compare(table)
            self._publish(pack_report(operations, wait_id))

    def complete(self) -> None:
        """Complete a report that only some ranks have submitted; all ranks call it."""
        if self.report is None:
            self._publish(pack_running())
        self._completing = True  # blocks, but not in a deadlock
        try:
            self.report.wait()
        finally:
            self._completing = False
            self.drop()

    def drop(self) -> None:
        """Drop the pending report after a restart of Horovod."""
        self.report = self._before = None

    def _publish(self, numbers: list[int]) -> None:
        table = [[0] * _REPORT_SIZE for _ in range(self._set.size())]
        table[self._set.rank()] = numbers
        name = f"gradcomp.waiting.{self._set.process_set_id}"
        self.report = self._submit(table, name, self._set)

    def _compare(self, table: list[list[int]]) -> None:
        before, self._before = self._before, table
        if table != before:
            return
        ranks = list(self._set.ranks or range(len(table)))
        reports = {rank: parse_report(numbers) for rank, numbers in zip(ranks, table)}
        if not is_deadlocked(reports, self._members()):
            return
        listed = "; ".join(
            f"rank {r} waits for {t.text}" for r, t in reports.items() if t is not None
        )
        raise DeadlockError(
            f"the ranks wait for each other, each for something else, and have done so for "
            f"{PATIENCE:g} seconds: {listed}. What is done on one rank (a batch more or less, "
            "add_param_group, retrain, save_checkpoint, a branch that depends on the rank) has to "
            "be done on all, before the same step; for uneven data see hvd.join()"
        )


class StallInspector:
    """Watch over this rank's pending collectives: reports them if they stay the same.

    Args:
        pending: returns the pending collectives that this rank waits for, by key; another wait for
            the same collective has another key. None while another thread may still submit what
            other ranks wait for.
        submit, members: see `StallChannel`.
    """

    def __init__(
        self,
        pending: Callable[[], Mapping[Hashable, PendingOp]],
        submit: Callable[..., Any],
        members: Callable[..., Any],
    ) -> None:
        self._pending, self._callbacks = pending, (submit, members)
        self._channels: dict[int, tuple[Any, StallChannel]] = {}
        self._since, self._wait_id = 0.0, 0
        self._last_keys: tuple[Hashable, ...] = ()

    def among(self, process_set: Any) -> StallChannel:
        """Return the channel of the ranks of a process set; they are watched from now on."""
        number = process_set.process_set_id
        known = self._channels.get(number)
        if known is None or known[0] != process_set:
            self._channels[number] = process_set, StallChannel(process_set, *self._callbacks)
        return self._channels[number][1]

    def overdue(self) -> list[PendingOp]:
        """Return the collectives that this rank has waited for during `PATIENCE`, all of them.

        Costs microseconds. None if one of them has come, or another wait has begun.
        """
        pending = self._pending()
        keys = tuple(pending)
        if keys != self._last_keys:
            self._last_keys, self._since = keys, time.monotonic()
            self._wait_id = (self._wait_id + 1) & 0x7FFFFFFF
        if time.monotonic() - self._since < PATIENCE:
            return []
        return [op for op in list(pending.values()) if not op.ready()]

    def report(self, waiting: Sequence[PendingOp], channel: StallChannel) -> None:
        """Report what `overdue` has returned.

        Raises:
            DeadlockError: on all ranks.
        """
        channel.check(waiting, self._wait_id)

    def check(self) -> None:
        """Report to all ranks that are watched, if this rank has waited for `PATIENCE`.

        Raises:
            DeadlockError: on all ranks.
        """
        if waiting := self.overdue():
            for process_set, channel in list(self._channels.values()):
                if process_set.process_set_id is not None and process_set.included():
                    self.report(waiting, channel)

    def drop(self) -> None:
        """Drop all reports after a restart of Horovod."""
        for _, channel in self._channels.values():
            channel.drop()
