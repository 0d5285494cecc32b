"""Ranks with local steps that have a deadline: slow, stopped and killed at times drawn."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.chaos.outcomes import Input
from tests.chaos.ranks import CAUSES
from tests.parallel.launch import environment, launch

RANKS, LIMIT = 4, 200.0  # of a job; seconds until it counts as hung
PACKAGE = "tests.chaos.workers"
WORKER = "straggler_trials"
SLOW, KILLED = "ranks that are slow and stop", "the same, and one is killed"


class Job(NamedTuple):
    """Trainings over one library.

    Attributes:
        where: what the table calls them.
        backend: of Horovod; empty for `torch.distributed` over gloo.
    """

    where: str
    backend: str = ""

    def run(self, folder: Path, plan: dict[str, Any]) -> str:
        """Run a training; return what it printed."""
        text = json.dumps(plan)
        if self.backend:
            with contextlib.suppress(AssertionError):  # what each rank has written says more
                how = {"deadline": LIMIT, "fails": True, "package": PACKAGE}
                launch(WORKER, RANKS, self.backend, folder, text, **how)
            return (folder / "output").read_text()
        command = [sys.executable, "-m", f"{PACKAGE}.{WORKER}", str(folder), text]
        with (folder / "output").open("w+") as output:
            how = {"stdout": output, "stderr": output, "env": environment()}
            ranks = [subprocess.Popen([*command, str(r), str(RANKS)], **how) for r in range(RANKS)]
            try:
                for rank in ranks:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        rank.wait(LIMIT)
            finally:
                for rank in ranks:
                    rank.kill()
        return (folder / "output").read_text()


JOBS = (
    Job(f"local steps with a deadline, {RANKS} ranks, torch.distributed"),
    Job(f"local steps with a deadline, {RANKS} ranks, Horovod over gloo", "gloo"),
    Job(f"local steps with a deadline, {RANKS} ranks, Horovod over MPI", "mpi"),
)
RUNS = 4  # trainings of each job


def attacks(seed: int, share: float = 1.0, only: Sequence[str] = ()) -> Iterator[Input]:
    """Yield the attacks of this part.

    Args:
        seed: of what is drawn.
        share: of the trainings.
        only: words, of which one has to be in what the table calls a job; all if empty.
    """
    for job in JOBS:
        if only and not any(word in job.where for word in only):
            continue
        for number in range(max(1, round(RUNS * share))):
            dies = 2 if number % 4 == 3 else None
            compression = ("none", "sparse")[number % 2]
            plan = {"seed": f"{seed} {number}", "compression": compression, "dies": dies}
            yield _tried(job, plan, f"run {number}")


def _tried(job: Job, plan: dict[str, Any], case: str) -> Input:
    """One training; what came of it."""
    attack = SLOW if plan["dies"] is None else KILLED
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output = job.run(folder, plan)
        paths = {rank: folder / f"{rank}.json" for rank in range(RANKS) if rank != plan["dies"]}
        reports = [json.loads(p.read_text()) for p in paths.values() if p.exists()]
        hung = any(path.stat().st_size for path in folder.glob("hangs-*"))
    errors = [one["error"] for one in reports if "error" in one]
    message = next(iter(errors), output.strip()[-300:])
    if hung:
        return Input(job.where, attack, "hung", message, case=case)
    if plan["dies"] is not None:
        # `mpirun` ends the other ranks itself as soon as one has died, and says so.
        named = len(errors) == len(paths) and all(map(CAUSES.search, errors))
        ended = named or (job.backend == "mpi" and "mpirun" in output)
        return Input(job.where, attack, "ended" if ended else "unexplained", message, case=case)
    if errors or len(reports) < RANKS:
        return Input(job.where, attack, "unexplained", message, case=case)
    return Input(job.where, attack, outcome(reports), case=case)


def outcome(reports: Sequence[dict[str, Any]]) -> str:
    """Return what ranks that have trained to the end came to.

    With plain SGD, means and a rate of 1, the parameters are the mean of all gradients ever made,
    less what is held back.
    """
    if any(one["parameters"] != reports[0]["parameters"] for one in reports):
        return "diverged"
    made, kept_ = (
        torch.tensor([one[key] for one in reports]).double().sum(0) for key in ("made", "held")
    )
    mean = (kept_ - made) / len(reports)
    close = torch.allclose(torch.tensor(reports[0]["parameters"]).double(), mean, atol=1e-3)
    return "survived" if close else "lost"
