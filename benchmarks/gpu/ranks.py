"""Processes that measure one method after the other, and what came of each."""

from __future__ import annotations

import datetime
import itertools
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.gpu.part import Row, Setting

RANKS = 2
PATIENCE = datetime.timedelta(minutes=1)  # with a rank that compiles
GRACE = 15.0  # seconds after the deadline, in which a method that has begun may end
Measure = Callable[[Setting, str], Row]


class Job(NamedTuple):
    """A method on so many ranks; its text is a row's name, and the first columns of a table."""

    method: str
    backend: str
    ranks: int

    def __str__(self) -> str:
        return " | ".join(map(str, self))

    @classmethod
    def of(cls, name: str) -> Job:
        method, backend, ranks = name.split(" | ")
        return cls(method, backend, int(ranks))


def alone_or_two(setting: Setting) -> list[tuple[str, int]]:
    """Return backends with their ranks: with one GPU NCCL has one, and two share it over gloo."""
    if setting.is_small:
        return [("gloo", RANKS)]
    return [("nccl", RANKS)] if setting.devices >= RANKS else [("nccl", 1), ("gloo", RANKS)]


def names_of(methods: Sequence[str], places: Sequence[tuple[str, int]]) -> list[str]:
    """Return the names of all methods in the first place, then of those in the next."""
    return [str(Job(method, *place)) for place in places for method in methods]


def measured(
    setting: Setting, names: Sequence[str], deadline: float, measure: Measure
) -> Iterator[Row]:
    """Yield a row for each name; one that fails has an error, and new processes go on.

    Args:
        setting: of the part.
        names: texts of `Job`, those of one backend together.
        deadline: of `time.monotonic()`; what would end later is left out.
        measure: is called by all ranks, and returns the row of a method.
    """
    for (backend, ranks), group in itertools.groupby(map(Job.of, names), lambda job: job[1:]):
        methods = [job.method for job in group]
        while methods and time.monotonic() < deadline:
            processes = _Processes(setting, backend, ranks, methods, deadline, measure)
            for row in processes.rows():
                methods.remove(row["method"])
                yield {"name": str(Job(row["method"], backend, ranks)), **row}
            if not processes.ended:
                break  # what is left does not fit
            if methods:
                yield {"name": str(Job(methods.pop(0), backend, ranks)), **processes.ended}


class _Processes:
    """Processes that measure methods in turn, until one fails or the time is over."""

    def __init__(self, setting: Setting, backend: str, ranks: int, *rest: Any) -> None:
        self._arguments, self._ranks = (setting, backend, ranks, *rest), ranks
        self._latest = rest[1] + GRACE
        self.ended: Row = {}

    def rows(self) -> Iterator[Row]:
        """Yield rows as they are written; then `ended` says what has ended the processes early."""
        with tempfile.TemporaryDirectory() as folder:
            file, seen, runs = Path(folder, "rows"), 0, True
            file.touch()
            context = torch.multiprocessing.spawn(
                _ranked, (folder, *self._arguments), self._ranks, join=False
            )
            try:
                while runs:
                    runs = self._runs(context)
                    lines = [x for x in file.read_text().splitlines(True) if x.endswith("\n")]
                    yield from map(json.loads, lines[seen:])
                    seen = len(lines)
            finally:
                for process in context.processes:
                    if process.is_alive():
                        process.kill()
                    process.join()

    def _runs(self, context: Any) -> bool:
        """Wait for a moment; return True if the processes go on."""
        try:
            if context.join(timeout=0.2):
                return False
        except Exception as error:
            self.ended = {"error": str(error).strip()[-2000:]}
            return False
        if time.monotonic() > self._latest:
            self.ended = {"cut": "its time was over"}
            return False
        return True


def _ranked(
    rank: int,
    folder: str,
    setting: Setting,
    backend: str,
    ranks: int,
    methods: list[str],
    deadline: float,
    measure: Measure,
) -> None:
    """Measure methods as one of the processes; rank 0 writes the rows, and says when to stop."""
    if setting.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_num_threads(1)
    logging.getLogger("hvd_gradcomp").setLevel(logging.ERROR)
    store = f"file://{folder}/store"
    dist.init_process_group(backend, store, rank=rank, world_size=ranks, timeout=PATIENCE)
    place = "cuda" if backend == "nccl" else "cpu"
    longest = 0.0
    for method in methods:
        begin = time.monotonic()
        fits = torch.tensor(int(begin + longest <= deadline), device=place)
        dist.broadcast(fits, 0)
        if not fits:
            break
        row = {"method": method, **measure(setting, method)}
        longest = max(longest, time.monotonic() - begin)
        if rank == 0:
            with Path(folder, "rows").open("a") as stream:
                stream.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def timed(step: Callable[[], None], bytes_sent: Callable[[], int], steps: int, device: str) -> Row:
    """Return the milliseconds of steps, and the bytes that this rank has sent.

    "ms" is of the later half, once all is compiled: the median, or the mean where some of the steps
    exchange; then "step_ms" and "round_ms" are the medians of those that do not, and that do.
    """
    times, sent = [], [bytes_sent()]
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
        sent.append(bytes_sent())
    late = times[steps // 2 :]
    exchanges = [after > before for before, after in zip(sent, sent[1:])][steps // 2 :]
    row = {"first_ms": times[0], "least_ms": min(late), "bytes_sent": sent[-1] - sent[0]}
    row |= {"steps": steps, "ms": _median(late)}
    if any(exchanges) and not all(exchanges):
        row["ms"] = sum(late) / len(late)
        row["step_ms"] = _median([ms for ms, does in zip(late, exchanges) if not does])
        row["round_ms"] = _median([ms for ms, does in zip(late, exchanges) if does])
    return row


def _median(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5))


def require_equal(parameters: Sequence[torch.Tensor]) -> None:
    """Check that all ranks have the same parameters, to the bit, and finite ones.

    Raises:
        AssertionError: they have not.
    """
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    if not (all(torch.equal(every[0], x) for x in every) and bool(flat.isfinite().all())):
        raise AssertionError("replicas differ, or are not finite")
