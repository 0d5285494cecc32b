"""Stats to watch: a reading as scalars and as a line, and where these are written to.

A frontend's `StatsWriter` reads an optimizer's `CompressionStats` every so many steps, takes the
difference to the last reading, and hands it to writers; between readings it counts. Nothing is
exchanged, so ranks that write nothing read nothing.

Each writer has a thread of its own, so that no disk, full or slow, can stop a training: the others
would wait for this rank.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvd_gradcomp.monitoring.stats import CompressionStats

LOGGER = logging.getLogger("hvd_gradcomp")
# Seconds that a training waits for a writer to begin, imports included, and to end.
_TO_BEGIN, _TO_END = 60.0, 10.0
_WAITING = 64  # records


def scalars(stats: CompressionStats) -> dict[str, float]:
    """A reading by tags that sort well; what is unknown or infinite is left out.

    Counts and bytes are those of the reading, so of a span where it is a difference; densities and
    `residual_ratio` are shares, norms are in units of the gradient.

    >>> scalars(CompressionStats(steps=2, bytes_dense=80, bytes_sent=8))["compression/ratio"]
    10.0
    """
    values = {
        "steps": stats.steps,
        "bytes_dense": stats.bytes_dense,
        "bytes_sent": stats.bytes_sent,
        "bytes_received": stats.bytes_received,
        "ratio": stats.ratio,
        "element_ratio": stats.element_ratio,
        "skipped": stats.skipped,
        "rung_changes": stats.rung_changes,
        "residual_norm": stats.residual_norm,
        "gradient_norm": stats.gradient_norm,
        "residual_ratio": stats.residual_ratio,
        **{f"loss/{name}": value for name, value in stats.losses.items()},
        **{f"density/{layer}": value for layer, value in stats.density.items()},
    }
    return {
        f"compression/{name}": value
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }


def summary(stats: CompressionStats) -> str:
    """A reading in one line.

    >>> summary(CompressionStats(3, 3000, 12, 12_000, 400, losses={"basis": 0.123}, skipped=1))
    '3 steps, 400 B sent of 12.0 kB (30x), 0.4 % of elements, 1 skipped, basis loss 0.12'
    """
    parts = [_counted(stats.steps, "step")]
    if stats.bytes_sent:
        moved = f"{_size(stats.bytes_sent)} sent of {_size(stats.bytes_dense)}"
        parts.append(f"{moved} ({_short(stats.ratio)}x)")
    if stats.elements:
        parts.append(f"{_short(100 * stats.elements_sent / stats.elements)} % of elements")
    if stats.residual_ratio is not None:
        parts.append(f"residual {_short(stats.residual_ratio)} x gradient")
    if stats.skipped:
        parts.append(f"{stats.skipped:,} skipped")
    if stats.rung_changes:
        parts.append(_counted(stats.rung_changes, "rung change"))
    parts += [f"{name} loss {_short(value)}" for name, value in stats.losses.items()]
    return ", ".join(parts)


class Writer(ABC):
    """Where readings go. A thread calls the methods, which may take as long as they like.

    Attributes:
        all_ranks: whether each rank writes its own; else the first rank of the process set alone.
    """

    all_ranks: bool

    @abstractmethod
    def open(self, rank: int) -> None:
        """Begins to write for this rank."""

    @abstractmethod
    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes the scalars of the span that ends at this step."""

    @abstractmethod
    def close(self) -> None:
        """Ends; may be opened again."""


class JSONLines(Writer):
    """One JSON object a line: `step`, `rank`, `time` (seconds since 1970) and the scalars.

    A file that is there is written on, as a run that resumes does.

    Args:
        path: of the file; its folder is made. With `all_ranks` rank 3 writes to `stats.3.jsonl`
            where this is `stats.jsonl`.
        all_ranks: see `Writer`.
    """

    def __init__(self, path: str | os.PathLike[str], all_ranks: bool = False) -> None:
        self.path, self.all_ranks = Path(path), all_ranks

    def __repr__(self) -> str:
        return f"JSONLines({str(self.path)!r}, all_ranks={self.all_ranks})"

    def open(self, rank: int) -> None:
        path = self.path
        if self.all_ranks:
            path = path.with_name(f"{path.stem}.{rank}{path.suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rank, self._stream = rank, path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, values: dict[str, float]) -> None:
        record = {"step": step, "rank": self._rank, "time": time.time(), **values}
        self._stream.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._stream.close()


class TensorBoard(Writer):
    """Event files for TensorBoard, by the package tensorboardX.

    Args:
        logdir: a folder; each rank's files are in `rank<n>` in it.
        all_ranks: see `Writer`.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(self, logdir: str | os.PathLike[str], all_ranks: bool = False) -> None:
        if find_spec("tensorboardX") is None:  # on all ranks, before one of them opens it
            raise ImportError("TensorBoard(...) needs tensorboardX: pip install tensorboardX")
        self.logdir, self.all_ranks = Path(logdir), all_ranks

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.logdir)!r}, all_ranks={self.all_ranks})"

    def open(self, rank: int) -> None:
        folder = self.logdir / f"rank{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        # Not `SummaryWriter`: a full disk ends its thread, and then its queue fills for good.
        files = import_module("tensorboardX.event_file_writer")
        self._event = import_module("tensorboardX.proto.event_pb2").Event
        self._scalar = import_module("tensorboardX.summary").scalar
        self._events: Any = files.EventsWriter(str(folder / "events"))

    def write(self, step: int, values: dict[str, float]) -> None:
        for tag, value in values.items():
            summary = self._scalar(tag, value)
            self._events.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class _Behind(threading.Thread):
    """Writes with one writer, behind the training.

    Attributes:
        ended: whether nothing is written any more.
    """

    def __init__(self, writer: Writer, rank: int) -> None:
        super().__init__(name=repr(writer), daemon=True)
        self.writer, self._rank = writer, rank
        self._records: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_WAITING)
        self._opened: Future[None] = Future()
        self._late = False  # whether records were left out
        self.ended = False

    def begin(self) -> bool:
        """Opens the writer; whether it is open in time.

        Raises:
            Exception: what `open` raises.
        """
        self.start()
        try:
            self._opened.result(_TO_BEGIN)
        except FutureTimeout:
            LOGGER.error("%r is given up: it is not opened after %g s", self.writer, _TO_BEGIN)
            return False
        return True

    def give(self, step: int, values: dict[str, float]) -> None:
        """Has a record written; leaves it out where too many wait."""
        try:
            self._records.put_nowait((step, values))
        except queue.Full:
            if not self._late:
                LOGGER.warning(
                    "%r does not keep up: from step %d on records are left out. The training goes "
                    "on",
                    self.writer,
                    step,
                )
            self._late = True

    def end(self) -> None:
        """Ends the writer, once it has written what waits; not for longer than is good."""
        until = time.monotonic() + _TO_END
        with suppress(queue.Full):
            self._records.put(None, timeout=0 if self.ended else _TO_END)
        self.join(max(0.0, until - time.monotonic()))
        if self.is_alive() and not self._late:
            LOGGER.error(
                "%r has not ended after %g s: its last records may be missing",
                self.writer,
                _TO_END,
            )

    def run(self) -> None:
        try:
            self.writer.open(self._rank)
        except Exception as error:
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        step, written = 0, True
        while written:
            record = self._records.get()
            if record is None:
                break
            step, values = record
            written = self._tried(lambda: self.writer.write(step, values), step)  # noqa: B023
        self.ended = True
        if written:
            self._tried(self.writer.close, step)
            return
        with suppress(Exception):  # which would say the same once more
            self.writer.close()

    def _tried(self, write: Callable[[], None], step: int) -> bool:
        try:
            write()
        except Exception as error:
            LOGGER.error("%r is given up at step %d: %s", self.writer, step, error)
            return False
        return True


def _end(behind: list[_Behind]) -> None:
    while behind:
        behind.pop().end()


class StatsWriter:
    """Writes what the exchanges of each span of steps did; what the frontends' have in common.

    Args:
        read: the totals so far; called where something is written, and once at the start.
        rank: of this process.
        first: whether it is the first of its process set.
        writers: of these it opens those that write for this rank.
        every: steps in a span, at least 1.

    Attributes:
        reads: whether anything is written on this rank.

    Raises:
        ValueError: `every` is no positive whole number.
        OSError: a file cannot be opened. One that cannot be written later is given up, with an
            error in the log, and so is one that is not opened in a minute. Where a disk is slow,
            records are left out, with a warning. Training goes on.
    """

    def __init__(
        self,
        read: Callable[[], CompressionStats],
        *,
        rank: int,
        first: bool,
        writers: Sequence[Writer],
        every: int,
    ) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every must be a whole number of steps, at least 1, got {every!r}")
        self.every, self._read, self._first = every, read, first
        self._behind: list[_Behind] = []
        # Also where nobody closes it: at the end of the process, or once nobody knows it any more.
        self._finish = weakref.finalize(self, _end, self._behind)
        for writer in writers:
            if first or writer.all_ranks:
                behind = _Behind(writer, rank)
                if behind.begin():
                    self._behind.append(behind)
        self._count = 0
        self.reads = first or bool(self._behind)
        self._at_write = self._at_epoch = read() if self.reads else CompressionStats()

    @property
    def due(self) -> bool:
        """Whether the next step is the last of its span."""
        return (self._count + 1) % self.every == 0

    def step(self) -> None:
        """Counts a step. To be called after each one; the last of a span is written."""
        due = self.due
        self._count += 1
        writing = [behind for behind in self._behind if not behind.ended]
        if due and writing:
            now, before = self._read(), self._at_write
            self._at_write = now
            for behind in writing:
                behind.give(now.steps, scalars(now - before))

    def epoch(self, number: int) -> None:
        """Logs one line on what happened since the last epoch, at INFO, on the first rank.

        Args:
            number: how the line calls the epoch.
        """
        if self._first:
            now, before = self._read(), self._at_epoch
            self._at_epoch = now
            LOGGER.info("epoch %d: %s", number, summary(now - before))

    def close(self) -> None:
        """Ends the files; waits ten seconds for each at most."""
        self._finish()


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _size(count: float) -> str:
    """Bytes in decimal units.

    >>> _size(999), _size(1_234), _size(42_100_000)
    ('999 B', '1.2 kB', '42.1 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
