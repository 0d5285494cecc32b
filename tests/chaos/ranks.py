"""Mistakes and faults of one rank of several, in real processes."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.outcomes import Input
from tests.parallel.launch import launch

FAULTY = 1
LIMIT = 60.0  # seconds that a rank may wait because of what another one did
# Each ends the run, and so has one of its own.
ALONE = (
    "kill -9",
    "kill -9 in backward",
    "kill -9 in an exchange",
    "an exception on one rank",
    "exit on one rank",
    "SIGSTOP for ever",
    "kill -9, Keras",
)
# Says nothing.
GONE = (
    "kill -9",
    "kill -9 in backward",
    "kill -9 in an exchange",
    "exit on one rank",
    "SIGSTOP for ever",
    "kill -9, Keras",
)
HOSTS = "localhost:2,127.0.0.1:2"  # two of them to Horovod, one machine
CAUSES = re.compile(
    "DeadlockError|OutOfStepError|MismatchError|PayloadError|CheckpointError|DivergedError"
    "|NonFiniteGradientError|another rank has stopped, or raised an error|this rank has failed"
    "|NaN or an infinity|another step|another phase|damaged payload|payloads of different sizes"
    "|saves or loads a checkpoint|Horovod has been shut down|gradients of other layers"
    "|the ranks do different things|Timed out waiting|another rank has not come to it"
    "|caused by a remote worker crashing|caused by a remote worker hanging"  # gloo, below FSDP
)


class Job(NamedTuple):
    """Ranks that go through trials.

    Attributes:
        where: what the table calls them.
        worker: of `tests.chaos.workers`.
        ranks: how many.
        backend: "gloo" or "mpi".
        options: for what is built.
        hosts: as `-H` of horovodrun takes them.
        cases: a pattern of those that are tried.
    """

    where: str
    worker: str
    ranks: int
    backend: str
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody writes to it
    hosts: str = ""
    cases: str = ""


SHORT = "Strom|LGC, |dense|modes|scaler|damaged|SIGSTOP for 5|kill|nan on one rank, skip"
JOBS = (
    Job("PyTorch, 2 ranks, gloo", "torch_trials", 2, "gloo"),
    Job("PyTorch, 4 ranks, gloo", "torch_trials", 4, "gloo", cases=SHORT),
    Job("PyTorch, 2 ranks, MPI", "torch_trials", 2, "mpi", cases=SHORT),
    Job(
        "PyTorch, 2 hosts of 2 ranks, gloo",
        "torch_trials",
        4,
        "gloo",
        {"hierarchical": True},
        HOSTS,
        cases="Strom|dense|scaler|compressor|kill",
    ),
    Job("local steps and momenta, 2 ranks, gloo", "local_trials", 2, "gloo"),
    Job("local steps on TensorFlow, 2 ranks, gloo", "tensorflow_local_trials", 2, "gloo"),
    Job("DistributedDataParallel, 2 ranks, gloo", "ddp_trials", 2, "gloo"),
    Job("FSDP, 2 replicas of 2 shards, gloo", "fsdp_trials", 4, "gloo"),
    Job(
        "local steps of DistributedDataParallel, 2 ranks, gloo",
        "c10d_local_trials",
        2,
        "gloo",
        {"of": "ddp"},
        cases="^(?!another mesh)",
    ),
    Job(
        "local steps of FSDP, 2 hosts of 2 shards, gloo",
        "c10d_local_trials",
        4,
        "gloo",
        {"of": "fsdp"},
    ),
    Job("TensorFlow, 2 ranks, gloo", "tensorflow_trials", 2, "gloo"),
    Job("TensorFlow, 2 ranks, MPI", "tensorflow_trials", 2, "mpi", cases="Strom|modes|kill"),
)


def attacks(seed: int, share: float = 1.0, only: Sequence[str] = ()) -> Iterator[Input]:
    """Yield the attacks of this part; nothing in it is drawn.

    Args:
        seed: not used.
        share: of the jobs' cases; below 1, each second, third and so on.
        only: words, of which one has to be in what the table calls a job; all if empty.
    """
    for job in JOBS:
        if only and not any(word in job.where for word in only):
            continue
        names = names_of(job)[:: max(1, round(1 / share))]
        together = [name for name in names if name not in ALONE]
        yield from series(job, together)
        for name in names:
            if name in ALONE:
                yield from series(job, [name])


def names_of(job: Job) -> list[str]:
    """The cases of a job."""
    cases = importlib.import_module(f"tests.chaos.workers.{job.worker}").CASES
    return [name for name in cases if re.search(job.cases, name)]


def series(job: Job, names: Sequence[str], judge: Judge | None = None) -> Iterator[Input]:
    """Go through cases; begin anew behind one that has ended the run.

    Args:
        job: the ranks.
        names: of the cases.
        judge: takes the job, its folder, a case and what was printed, and returns what came of
            it, or None if the case was not reached.
    """
    judge = judge or _input
    rest = list(names)
    while rest:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            output = _launched(job, folder, rest)
            outcomes = [judge(job, folder, case, output) for case in rest]
        reached = [one for one in outcomes if one is not None]
        if not reached:
            last = output.strip().splitlines()[-1:] or ["nothing was printed"]
            reached = [Input(job.where, rest[0], "unexplained", last[0], case=rest[0])]
        yield from reached
        rest = rest[len(reached) :]


Judge = Callable[[Job, Path, str, str], "Input | None"]


def _launched(job: Job, folder: Path, names: Sequence[str]) -> str:
    """Runs them; the end of what was printed."""
    arguments = (json.dumps(job.options), *names)
    limit = 60 + 30.0 * len(names) + 4 * LIMIT
    with contextlib.suppress(AssertionError):  # what each rank has written says more
        launch(
            job.worker,
            job.ranks,
            job.backend,
            folder,
            *arguments,
            hosts=job.hosts,
            deadline=limit,
            fails=True,
            package="tests.chaos.workers",
        )
    return (folder / "output").read_text()[-3000:]


def read(folder: Path, kind: str, ranks: Sequence[int], case: str) -> dict[int, Any]:
    """What each rank has noted of a case."""
    outcomes = {}
    for rank in ranks:
        path = folder / f"{kind}-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        for line in map(json.loads, lines):
            if line["case"] == case:
                outcomes[rank] = line
    return outcomes


def _input(job: Job, folder: Path, case: str, output: str) -> Input | None:
    """What came of a case; None if it was not reached."""
    ranks = [r for r in range(job.ranks) if not (case in GONE and r == FAULTY)]
    mistakes = read(folder, "mistakes", range(job.ranks), case)
    lines = read(folder, "trials", ranks, case)
    if not mistakes and not lines:
        return None
    begun = max((line["at"] for line in mistakes.values()), default=None)
    seconds = None if begun is None else max((x["at"] - begun for x in lines.values()), default=0.0)
    message = next((line["said"] for line in lines.values() if line["said"]), "")
    outcome = _outcome(job, case, folder, lines, len(ranks), seconds, output)
    if outcome == "hung":
        message = "; ".join(f"rank {r}: {place(folder, r)}" for r in ranks if r not in lines)
    waited = seconds if outcome == "ended" else None
    return Input(job.where, case, outcome, message, waited, case)


def _outcome(
    job: Job,
    case: str,
    folder: Path,
    lines: dict[int, Any],
    expected: int,
    seconds: float | None,
    output: str,
) -> str:
    hangs = any(path.stat().st_size for path in folder.glob("hangs-*"))
    if (hangs and len(lines) < expected) or (seconds or 0.0) > LIMIT:
        return "hung"
    if len(lines) < expected:
        # `mpirun` ends the other ranks itself as soon as one has died, and says so.
        stops = job.backend == "mpi" and case in ALONE
        return "ended" if stops and "mpirun" in output else "unexplained"
    errors = [line["said"] for line in lines.values()]
    if all(errors):
        return "ended" if all(map(CAUSES.search, errors)) else "unexplained"
    alike = len({json.dumps(line["replicas"]) for line in lines.values()}) == 1
    return "survived" if alike and not any(errors) else "diverged"


def place(folder: Path, rank: int) -> str:
    """Where a rank hangs."""
    path = folder / f"hangs-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    ours = [line.strip() for line in lines if "hvd_gradcomp" in line]
    return ours[0] if ours else "ended"
