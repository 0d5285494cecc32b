"""Finds out that ranks wait for each other for ever, and says what each of them waits for.

Horovod begins a collective once all its ranks have asked for it. Where a rank asks for another one
than the rest, all wait, and none can know it: a rank that computes for long looks the same from
here. So a rank that has waited for `PATIENCE` seconds tells what it has asked for by a collective
of its own, in which only ranks take part that wait. It ends once all do; if nothing was asked for
by all ranks that it is for, nothing can come any more. Such a word may be old when it is heard. So
the ranks tell once more, and raise if all have said the same: between the two they all waited.

A word that not all ranks have told would lie with Horovod, which warns of that, and may stop what
it takes for stalled. So the next round of a step, on PyTorch (`torch/step_sync.py`), or the next
step, on TensorFlow, brings it to its end. A frontend says how a table is summed over ranks: see
`StallChannel`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

PATIENCE = 10.0  # seconds of waiting, after which a rank tells
_MOST = 64  # collectives that a rank tells of
_TEXT = 160  # bytes of what it calls them
_WORD = 2 + 2 * _MOST + _TEXT // 4  # numbers
_BUSY = -1  # in the place of how many: this rank does not wait


class DeadlockError(RuntimeError):
    """All ranks wait, and none for what another one waits for."""


class PendingOp(NamedTuple):
    """A collective that this rank has asked for and that has not come.

    Attributes:
        name: equal on all ranks.
        process_set: the ranks that it is for.
        ready: whether it has come by now.
        thread: the thread that has asked for it; None for one that waits for this rank's backward.
        shown: the name for those who read it; the name if empty.
    """

    name: str
    process_set: Any
    ready: Callable[[], bool]
    thread: int | None = None
    shown: str = ""


class StallReport(NamedTuple):
    """One rank's word.

    Attributes:
        asked: (key of its name, id of its process set) of each collective.
        complete: whether these are all; not those of a rank that does not wait.
        text: what it waits for.
    """

    asked: frozenset[tuple[int, int]]
    complete: bool
    text: str


def word(asked: Sequence[PendingOp], turn: int = 0) -> list[int]:
    """What a rank tells that waits, as `_WORD` numbers.

    Args:
        asked: what it waits for.
        turn: of its waits; another one for the same collectives is another wait.
    """
    listed = [n for one in asked[:_MOST] for n in (_key(one.name), one.process_set.process_set_id)]
    shown = ", ".join(
        one.shown or one.name for one in asked[-2:]
    )  # what failed before may still be asked for
    if len(asked) > 2:
        shown += f" and {len(asked) - 2} more"
    text = shown.encode("ascii", "replace")[:_TEXT].ljust(_TEXT)
    packed = [int.from_bytes(text[i : i + 4], "little") for i in range(0, _TEXT, 4)]
    return [len(asked), *listed, *[0] * (2 * _MOST - len(listed)), *packed, turn]


def busy() -> list[int]:
    """What a rank tells that does not wait."""
    return [_BUSY, *[0] * (_WORD - 1)]


def read(numbers: Sequence[int]) -> StallReport | None:
    """The inverse of `word` and `busy`; None for a rank that has joined, which adds zeros."""
    count, pairs = numbers[0], numbers[1 : 1 + 2 * _MOST]
    if count == 0:
        return None
    held = 2 * min(max(count, 0), _MOST)
    text = b"".join(n.to_bytes(4, "little") for n in numbers[1 + 2 * _MOST : -1])
    asked = frozenset(zip(pairs[0:held:2], pairs[1:held:2]))
    return StallReport(asked, 0 < count <= _MOST, text.decode("ascii", "replace").strip())


def stuck(told: dict[int, StallReport | None], members: dict[int, Sequence[int]]) -> bool:
    """Whether nothing that a rank waits for can ever come.

    Args:
        told: the word of each rank.
        members: the ranks of each process set, by its id.
    """
    words = {rank: one for rank, one in told.items() if one is not None}
    if not words or not all(one.complete for one in words.values()):
        return False
    for key, process_set in set().union(*(one.asked for one in words.values())):
        ranks = members.get(process_set)
        if ranks is None or not set(ranks) <= told.keys():
            return False  # other ranks have a say, who do not take part here
        if all(told[rank] is None or (key, process_set) in told[rank].asked for rank in ranks):  # type: ignore[union-attr]
            return False
    return True


def _key(name: str) -> int:
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


class StallChannel:
    """Of the ranks of one process set.

    Args:
        process_set: the ranks.
        tell: asks for the sum over ranks of a table of int64, by a name. Gives an object with
            `ready()` and `wait()`; this returns what has `tolist()`, or raises a RuntimeError.
        members: the ranks of each process set, by its id.
    """

    def __init__(
        self,
        process_set: Any,
        tell: Callable[[list[list[int]], str, Any], Any],
        members: Callable[[], dict[int, Sequence[int]]],
    ) -> None:
        self._set, self._tell, self._members = process_set, tell, members
        self._pending: Any = None
        self._completing = False
        self._before: list[list[int]] | None = None

    @property
    def pending(self) -> bool:
        """Whether this rank has told something that has not come yet."""
        return self._pending is not None

    def look(self, asked: Sequence[PendingOp], turn: int = 0) -> None:
        """Tells what this rank has waited for in vain, and hears what others do; see `word`.

        Raises:
            DeadlockError: on all ranks.
        """
        if self._completing:
            return
        if self._pending is None:
            self._say(word(asked, turn))
        elif self._pending.ready():
            pending, self._pending = self._pending, None
            try:
                table = pending.wait().tolist()
            except RuntimeError:  # of Horovod's: what the rank waits for has failed, too
                self._before = None
                return
            self._hear(table)
            self._say(word(asked, turn))

    def complete(self) -> None:
        """Brings a word to its end that not all ranks have told; all ranks call it."""
        if self._pending is None:
            self._say(busy())
        self._completing = True  # waits, but not in vain
        try:
            self._pending.wait()
        finally:
            self._completing = False
            self.drop()

    def drop(self) -> None:
        """Forgets what was told: Horovod has begun anew."""
        self._pending = self._before = None

    def _say(self, numbers: list[int]) -> None:
        everybody = [[0] * _WORD for _ in range(self._set.size())]
        everybody[self._set.rank()] = numbers
        name = f"gradcomp.waiting.{self._set.process_set_id}"
        self._pending = self._tell(everybody, name, self._set)

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
    """What this rank has asked for, and since when nothing has come.

    Args:
        tell, members: see `StallChannel`.
    """

    def __init__(self, tell: Callable[..., Any], members: Callable[..., Any]) -> None:
        self._how = tell, members
        self._watches: dict[int, tuple[Any, StallChannel]] = {}
        self._asked: dict[Hashable, PendingOp] = {}
        self._threads: set[int] = set()
        self._since, self._turn = 0.0, 0
        self._looked: tuple[Hashable, ...] = ()

    def among(self, process_set: Any) -> StallChannel:
        """Watches the ranks of a process set from now on."""
        number = process_set.process_set_id
        known = self._watches.get(number)
        if known is None or known[0] is not process_set:
            self._watches[number] = process_set, StallChannel(process_set, *self._how)
        return self._watches[number][1]

    def ask(self, key: Hashable, asked: PendingOp) -> None:
        """Takes note of a collective."""
        if len(self._asked) > _MOST:  # nobody has waited for them
            for known, one in list(self._asked.items()):
                if one.ready():
                    self.came(known)
        self._asked[key] = asked
        if asked.thread is not None:
            self._threads.add(asked.thread)

    def came(self, key: Hashable) -> None:
        """It has come, or has failed."""
        self._asked.pop(key, None)

    def look(self) -> None:
        """Looks whether this rank waits in vain; a matter of microseconds while it has not long.

        Raises:
            DeadlockError: on all ranks.
        """
        keys = tuple(self._asked)
        if keys != self._looked:
            self._looked, self._since = keys, time.monotonic()
            self._turn = (self._turn + 1) & 0x7FFFFFFF
        if time.monotonic() - self._since < PATIENCE:
            return
        coming = [one for one in list(self._asked.values()) if not one.ready()]
        if not coming or len(self._threads) > 1:
            return  # another thread may still ask for what other ranks wait for
        for process_set, watch in list(self._watches.values()):
            if process_set.process_set_id is not None and process_set.included():
                watch.look(coming, self._turn)

    def drop(self) -> None:
        """Forgets all: Horovod has begun anew."""
        self._asked.clear()
        for _, watch in self._watches.values():
            watch.drop()
