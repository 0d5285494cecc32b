"""Ranks over `torch.distributed` that are killed, stopped, leave and join at times drawn."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos.outcomes import Input
from tests.chaos.ranks import LIMIT
from tests.parallel.test_churn import Job

RANKS, RUNS, SECONDS = 4, 10, 12.0  # processes at first, trainings, and for how long each is shaken
WHERE = f"local steps, {RANKS} ranks that come and go, gloo"
ACTIONS = ("kill", "kill", "kill two", "join", "join", "leave", "stop for 3 s")
CAUSES = re.compile("RendezvousError: the training '.*' has ended")
# What is exchanged, and how: each training has another one.
PLANS: Sequence[dict[str, Any]] = (
    {},
    {"fragments": 2, "delay": 1},
    {"compression": "none", "outer": (0.7, 0.9)},
    {"warmup": 60},
)


def attacks(seed: int, share: float = 1.0, only: Sequence[str] = ()) -> Iterator[Input]:
    """Yield the attacks of this part.

    Args:
        seed: of what is drawn.
        share: of the trainings.
        only: words, of which one has to be in what the table calls the place; all if empty.
    """
    if only and not any(word in WHERE for word in only):
        return
    for number in range(max(1, round(RUNS * share))):
        dice = Random(f"{seed} {number}")
        plan = PLANS[number % len(PLANS)]
        yield _shaken(dice, plan, f"run {number}")


def _shaken(dice: Random, plan: dict[str, Any], case: str) -> Input:
    """One training; what came of it."""
    attack = ", ".join(f"{k}={v}" for k, v in plan.items()) or "plain"
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), polite=True, pause=0.05, patience=2.0, timeout=20.0, **plan)
        job.plan |= {"steps": 10**9, "stops": True}
        job.start(RANKS)
        killed: set[int] = set()
        done: list[str] = []
        try:
            job.until(lambda diaries: sum(d[-1]["step"] > 3 for d in diaries) >= RANKS)
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                time.sleep(dice.uniform(0.2, 3.0))
                done.append(_act(job, dice, killed))
            last = max(d[-1]["step"] for d in job.diaries() if d)
            (Path(folder) / "stop").write_text(str(last + 60))
            job.end(LIMIT)
        except AssertionError as error:
            return Input(WHERE, attack, "hung", str(error)[-300:], case=f"{case}: {done}")
        outcome, message = _outcome(job, killed)
    return Input(WHERE, attack, outcome, message, case=f"{case}: {', '.join(done)}")


def _act(job: Job, dice: Random, killed: set[int]) -> str:
    """Do something to the processes; two of them are always left alone."""
    alive = [
        (number, pid)
        for number, process in enumerate(job.processes)
        if process.poll() is None and (pid := job.pid(number))
    ]
    action = dice.choice(ACTIONS)
    if action == "join" or len(alive) < 4:
        job.start()
        return "join"
    for number, pid in dice.sample(alive, 2 if action == "kill two" else 1):
        with suppress(ProcessLookupError):
            if action.startswith("kill"):
                os.kill(pid, signal.SIGKILL)
                killed.add(number)
            elif action == "leave":
                os.kill(pid, signal.SIGTERM)
            else:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(3.0)
                os.kill(pid, signal.SIGCONT)
    return action


def _outcome(job: Job, killed: set[int]) -> tuple[str, str]:
    """Return what a training came to, and the first problem that was said."""
    diaries = {}
    for number in range(len(job.processes)):
        path = job.folder / f"process-{job.pid(number)}.jsonl"
        if path.exists():
            diaries[number] = [json.loads(line) for line in path.read_text().splitlines()]
    ends = {n: d[-1] for n, d in diaries.items() if d and d[-1]["event"] == "end"}
    problems = [end["problem"] for end in ends.values() if end["problem"]]
    strange = [problem for problem in problems if not CAUSES.search(problem)]
    silent = set(range(len(job.processes))) - killed - set(ends)
    if strange or silent:
        return "unexplained", (strange or [f"processes {silent} said nothing: {job.output()}"])[0]
    finished = [end for end in ends.values() if end["said"] == "finished"]
    if not finished:
        return "unexplained", f"nobody came to the end: {job.output()}"
    alike = len({(end["step"], end["replica"], end["rate"]) for end in finished}) == 1
    if not alike or not all(end["loss"] < 100.0 for end in finished):
        return "diverged", str([(end["step"], end["loss"]) for end in finished])
    trained = sum(any(e["event"] == "step" for e in diaries.get(n, ())) for n in killed)
    for number, end in ends.items():
        stayed = number < RANKS and end["said"] == "finished"
        if stayed and not trained <= len(end["lost"]) <= len(killed):
            return "lost", f"{trained} of {len(killed)} killed had trained, lost: {end['lost']}"
    return "survived", ""
