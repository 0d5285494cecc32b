"""One file of tests on the ranks of one backend, in as many jobs as it takes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.parallel.launch import HOROVODRUN, ROOT, environment

STANDINS = Path(__file__).parent / "standins"
NOTES = "COMPAT_FOLDER"  # where ranks note what they did
ALONE = "alone"  # a test that starts ranks itself, or none
START = 60  # seconds beyond its limit that a job has to start and to end
WORSE = ("passed", "skipped", "failed", "dies", "hangs")


class Result(NamedTuple):
    """What came of a test: one of `WORSE`, and why."""

    outcome: str
    message: str = ""


def run_tests(
    folder: Path,
    file: str,
    backend: str,
    *,
    ranks: int,
    limit: int,
    only: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    expression: str = "",
) -> dict[str, Result]:
    """Runs the tests of a file, each with a time limit.

    Args:
        folder: a copy of Horovod's `test`.
        file: a path in it.
        backend: "gloo", "mpi" or `ALONE`.
        limit: seconds, for each test.
        only: these tests, in this order; all if None.
        skip: not these.
        expression: pytest's `-k`.
    """
    results: dict[str, Result] = {}
    program = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.compat.plugin",
        "-p",
        "no:cacheprovider",
    ]
    program += ["-q", "--rootdir", str(folder), *(["-k", expression] if expression else []), file]
    while True:
        with tempfile.TemporaryDirectory() as notes:
            plan = {"ranks": ranks, "limit": limit, "only": only, "done": [*skip, *results]}
            (Path(notes) / "plan.json").write_text(json.dumps(plan))
            output = run(program, folder, backend, ranks, limit, **{NOTES: notes})
            entries = [read(Path(notes) / f"rank-{rank}.jsonl") for rank in range(ranks)]
            traces = [path.read_text() for path in sorted(Path(notes).glob("trace-*"))]
        news = merge(entries, traces)
        results.update(news)
        finished = all(any("finished" in entry for entry in rank) for rank in entries)
        if finished or (only is not None and set(only) <= set(results)):
            return results
        if not news:  # before the first test, or after the last
            hangs = any("Timeout" in trace for trace in traces)
            outcome = "hangs" if hangs else "dies"
            where = "(end)" if any(entries) else "(import)"
            return {
                **results,
                f"{file}::{where}": Result(outcome, "".join(traces)[-800:] or output),
            }


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def merge(ranks: list[list[dict[str, Any]]], traces: list[str]) -> dict[str, Result]:
    """Each test's worst result on any rank; one that began and did not end hangs, or dies."""
    by_test: dict[str, list[Result]] = {}
    began: set[str] = set()
    for entries in ranks:
        ended = [entry for entry in entries if "ended" in entry]
        for entry in ended:
            result = Result(entry["outcome"], entry["message"])
            by_test.setdefault(entry["ended"], []).append(result)
        names = {entry["ended"] for entry in ended}
        began |= {entry["began"] for entry in entries if "began" in entry} - names
    hangs = [trace for trace in traces if "Timeout" in trace]
    for test in began:
        kind = Result("hangs", where(hangs[0])) if hangs else Result("dies")
        by_test.setdefault(test, []).append(kind)
    return {
        test: max(all_, key=lambda one: WORSE.index(one.outcome)) for test, all_ in by_test.items()
    }


def where(trace: str) -> str:
    """The end of a trace of all threads, without pytest's own frames."""
    lines = [line for line in trace.splitlines() if "pytest" not in line and "pluggy" not in line]
    return "\n".join(lines)[-1500:]


def run_recipe(
    folder: Path, file: str, arguments: Sequence[str], backend: str, *, ranks: int, limit: int
) -> Result:
    """Runs an example; passed if it ends with exit code 0."""
    program = [sys.executable, "-m", "tests.compat.recipe", str(folder / file), *arguments]
    with tempfile.TemporaryDirectory() as place:
        begin = time.monotonic()
        output = run(program, Path(place), backend, ranks, limit, HOME=place)
    if output is None:
        return Result("passed")
    hangs = time.monotonic() - begin > limit
    return Result("hangs" if hangs else "failed", output)


def run(
    program: list[str], folder: Path, backend: str, ranks: int, limit: int, **variables: str
) -> str | None:
    """Runs ranks of a program in a folder; the end of what it printed, None if all went well."""
    command = program
    if backend != ALONE:
        command = [*HOROVODRUN, f"--{backend}", "-np", str(ranks), *program]
    path = os.pathsep.join(
        [str(ROOT), str(STANDINS), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    env = environment(PYTHONPATH=path, TF_ENABLE_ONEDNN_OPTS="0", **variables)
    with tempfile.TemporaryFile("w+") as stream:
        job = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = wait(job, limit, Path(variables.get(NOTES, folder)))
        finally:  # Ctrl-C too: horovodrun ends its ranks, which are in sessions of their own
            if job.poll() is None:
                job.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(15)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
        stream.seek(0)
        return stream.read()[-3000:] if code else None


def wait(job: subprocess.Popen[Any], limit: int, notes: Path) -> int:
    """The exit code of a job; not zero if there was no word from a rank for too long.

    Ranks watch their own tests. This is for what they cannot see: a start or an end that hangs.
    """
    begin = time.time()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return job.wait(1)
        last = max([begin, *(path.stat().st_mtime for path in notes.glob("rank-*"))])
        if time.time() - last > limit + START:
            return 1
