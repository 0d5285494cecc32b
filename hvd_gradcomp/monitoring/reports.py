"""Reports of statistics: a reading as scalars and as a line, and writers for them.

A frontend's `StatsWriter` reads an optimizer's `CompressionStats` every `every` steps and hands the
difference to the last reading to writers; between readings it only counts. Nothing is exchanged, so
ranks that write nothing read nothing.

Each writer has its own thread, so that a full or slow disk cannot stop the training: the other
ranks would wait for this one.
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
# Timeouts, in seconds, for a writer to open, imports included, and to close.
_TO_BEGIN, _TO_END = 60.0, 10.0
_WAITING = 64  # maximum number of queued records
_SCALARS = (
    *("steps", "bytes_dense", "bytes_sent", "bytes_received", "ratio", "element_ratio", "skipped"),
    *("level_changes", "residual_norm", "gradient_norm", "residual_ratio", "ms_waited"),
)


def scalars(stats: CompressionStats) -> dict[str, float]:
    """Convert a reading to tagged scalars, without unknown and infinite values.

    Counts and bytes are those of the reading, so of a span if it is a difference; densities and
    `residual_ratio` are ratios, norms are in units of the gradient.

    >>> scalars(CompressionStats(steps=2, bytes_dense=80, bytes_sent=8))["compression/ratio"]
    10.0
    """
    values: dict[str, float | None] = {
        **{name: getattr(stats, name) for name in _SCALARS},
        **{f"loss/{name}": value for name, value in stats.losses.items()},
        **{f"density/{layer}": value for layer, value in stats.density.items()},
    }
    return {
        f"compression/{name}": value
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }


def summary(stats: CompressionStats) -> str:
    """Format a reading as one line.

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
    if stats.ms_waited is not None:
        parts.append(f"{_short(stats.ms_waited)} ms waiting a step")
    if stats.skipped:
        parts.append(f"{stats.skipped:,} skipped")
    if stats.level_changes:
        parts.append(_counted(stats.level_changes, "level change"))
    parts += [f"{name} loss {_short(value)}" for name, value in stats.losses.items()]
    return ", ".join(parts)


class Writer(ABC):
    """Writer of readings. A separate thread calls the methods, so they may block.

    Attributes:
        all_ranks: True if each rank writes its own; else only the first rank of the process set.
    """

    all_ranks: bool

    @abstractmethod
    def open(self, rank: int) -> None:
        """Open the output of this rank."""

    @abstractmethod
    def write(self, step: int, values: dict[str, float]) -> None:
        """Write the scalars of the span that ends at this step."""

    @abstractmethod
    def close(self) -> None:
        """Close the output; `open` may be called again."""


class JSONLines(Writer):
    """Writer of JSON lines: `step`, `rank`, `time` (seconds since 1970) and the scalars.

    An existing file is appended to, so that a run can resume.

    Args:
        path: of the file; its folder is created. With `all_ranks`, rank 3 writes to
            `stats.3.jsonl` for `stats.jsonl`.
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
    """Writer of event files for TensorBoard, by the package tensorboardX.

    Args:
        logdir: a folder; each rank's files are in its subfolder `rank<n>`.
        all_ranks: see `Writer`.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(self, logdir: str | os.PathLike[str], all_ranks: bool = False) -> None:
        if find_spec("tensorboardX") is None:  # on all ranks, before one of them opens a writer
            raise ImportError("TensorBoard(...) needs tensorboardX: pip install tensorboardX")
        self.logdir, self.all_ranks = Path(logdir), all_ranks

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.logdir)!r}, all_ranks={self.all_ranks})"

    def open(self, rank: int) -> None:
        folder = self.logdir / f"rank{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        # Not `SummaryWriter`: a full disk ends its thread, and then its queue blocks forever.
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
    """Background thread that runs one writer.

    Attributes:
        ended: True once nothing is written any more.
    """

    def __init__(self, writer: Writer, rank: int) -> None:
        super().__init__(name=repr(writer), daemon=True)
        self.writer, self._rank = writer, rank
        self._records: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_WAITING)
        self._opened: Future[None] = Future()
        self._late = False  # True once records were dropped
        self.ended = False

    def begin(self) -> bool:
        """Open the writer; return False if it times out.

        Raises:
            Exception: any error of `open`.
        """
        self.start()
        try:
            self._opened.result(_TO_BEGIN)
        except FutureTimeout:
            LOGGER.error("%r is given up: it is not opened after %g s", self.writer, _TO_BEGIN)
            return False
        return True

    def give(self, step: int, values: dict[str, float]) -> None:
        """Queue a record for writing; drop it if the queue is full."""
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
        """Close the writer after its queued records, within a timeout."""
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
        with suppress(Exception):  # it would repeat the error above
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
    """Base of the frontends' writers of statistics for each span of steps.

    Args:
        read: returns the totals so far; called for each report, and once at the start.
        rank: of this process.
        first: True if this rank is the first of its process set.
        writers: those that write for this rank are opened.
        every: steps in a span, at least 1.

    Attributes:
        reads: True if anything is written on this rank.

    Raises:
        ValueError: `every` is not a positive integer.
        OSError: a file cannot be opened. A writer that fails later, or does not open within a
            minute, is abandoned with an error in the log. If a disk is slow, records are
            dropped with a warning. Training continues.
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
        # Also without `close`: at the end of the process, or when this object is collected.
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
        """True if the next step is the last of its span."""
        return (self._count + 1) % self.every == 0

    def step(self) -> None:
        """Count a step, and write a report after the last one of a span. Call after each step."""
        due = self.due
        self._count += 1
        writing = [behind for behind in self._behind if not behind.ended]
        if due and writing:
            now, before = self._read(), self._at_write
            self._at_write = now
            for behind in writing:
                behind.give(now.steps, scalars(now - before))

    def epoch(self, number: int) -> None:
        """Log one line about the steps since the last epoch, at INFO, on the first rank.

        Args:
            number: the epoch's number in the line.
        """
        if self._first:
            now, before = self._read(), self._at_epoch
            self._at_epoch = now
            LOGGER.info("epoch %d: %s", number, summary(now - before))

    def close(self) -> None:
        """Close the writers; wait at most ten seconds for each."""
        self._finish()


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _size(count: float) -> str:
    """Format bytes in decimal units.

    >>> _size(999), _size(1_234), _size(42_100_000)
    ('999 B', '1.2 kB', '42.1 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
