"""Ranks over `torch.distributed` that die, leave and come while the others train."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_gradcomp.torch.membership import rendezvous
from tests.parallel.forkserver import ROOT, python
from tests.parallel.launch import environment

pytestmark = pytest.mark.parallel
STEPS = 36
Diaries = list[list[dict[str, Any]]]


class Job:
    """Processes that meet at a store of this one."""

    def __init__(self, folder: Path, **plan: Any) -> None:
        self.folder, self.plan = folder, {"steps": STEPS, **plan}
        self.store = rendezvous.serve("localhost", 0)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, count: int = 1, **more: Any) -> None:
        variables = environment()
        begin = [*python("torch", variables), "-m", "tests.parallel.workers.ddp_churn"]
        for _ in range(count):
            number = len(self.processes)
            log = (self.folder / f"output-{number}").open("w")
            text = json.dumps({**self.plan, "id": number, **more})
            command = [*begin, str(self.folder), f"localhost:{self.store.port}", text]
            self.processes.append(
                subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log)
            )

    def pid(self, number: int) -> int | None:
        """Return that of a process, which its starter's is not; None before it runs."""
        path = self.folder / f"pid-{number}"
        return int(path.read_text() or 0) or None if path.exists() else None

    def diaries(self) -> Diaries:
        paths = sorted(self.folder.glob("process-*.jsonl"))
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]

    def until(self, holds: Callable[[Diaries], bool], limit: float = 60.0) -> None:
        """Wait for what the processes note."""
        end = time.monotonic() + limit
        while not holds(self.diaries()):
            assert time.monotonic() < end, f"hangs: {self.output()}"
            time.sleep(0.05)

    def output(self) -> str:
        return "\n".join(p.read_text()[-3000:] for p in sorted(self.folder.glob("output-*")))

    def end(self, limit: float = 60.0) -> Diaries:
        """Wait for all processes."""
        end = time.monotonic() + limit
        try:
            for process in self.processes:
                process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"hangs: {self.output()}") from None
        finally:
            for process in self.processes:
                process.kill()
        return self.diaries()


def sizes(diary: list[dict[str, Any]]) -> list[int]:
    return [event["size"] for event in diary if event["event"] == "start"]


def trained(diaries: Diaries, output: str) -> Diaries:
    """Require that the processes that came to the end have the same model, and a good one."""
    ended = [diary for diary in diaries if diary[-1]["event"] == "end"]
    ends = [diary[-1] for diary in ended if diary[-1]["said"] == "finished"]
    assert ends and all(end["problem"] is None for end in ends), output
    assert all(end["step"] >= STEPS for end in ends), output
    alike = {(end["step"], end["replica"], end["rounds"], end["rate"]) for end in ends}
    assert len(alike) == 1, output
    assert all(end["loss"] < 2.5 for end in ends), [end["loss"] for end in ends]
    return ended


PLACES = {
    "in the exchange": {},
    "before it confirms": {"kills": [2], "warmup": 3},
    "after it has confirmed": {"kills": [1]},
    "between exchanges": {"fragments": 2, "delay": 1},
    "in the warm-up": {"warmup": 24},
}


@pytest.mark.parametrize("place", PLACES)
def test_the_others_outlive_a_killed_rank(place, tmp_path):
    how = {"kills": [0], "step": 12, **PLACES[place]}
    job = Job(tmp_path, at=place, ranks=3, **how)
    job.start(3)
    diaries = job.end()
    ended = trained(diaries, job.output())
    (killed,) = (diary for diary in diaries if diary not in ended)
    rank = killed[0]["rank"]
    for diary in ended:
        assert sizes(diary) == [3, 2]
        ((lost, norm),) = diary[-1]["lost"]
        assert lost == rank == how["kills"][0] and norm == pytest.approx(killed[-1]["norm"])
        # No survivor's step is lost, nor one made twice.
        made = [event["step"] for event in diary if event["event"] == "step"]
        assert sorted(set(made)) == made and len(made) >= STEPS - 1
    assert job.output().count("has died, or gives no sign of life") == 1


def test_two_are_killed_at_once_and_two_join(tmp_path):
    job = Job(tmp_path, at="in the exchange", ranks=4, kills=[0, 3], step=8, until=4)
    job.start(4)
    job.until(lambda diaries: sum(2 in sizes(d) for d in diaries) == 2)
    job.start(2, kills=[])
    ended = trained(job.end(), job.output())
    stayed = [diary for diary in ended if diary[0]["step"] == 0]
    assert len(ended) == 4 and len(stayed) == 2
    for diary in stayed:
        assert sizes(diary)[:2] == [4, 2] and sizes(diary)[-1] == 4
        assert sorted(rank for rank, _ in diary[-1]["lost"]) == [0, 3]
    for diary in ended:
        if diary not in stayed:
            assert diary[0]["step"] >= 8 and diary[0]["norm"] == 0 and diary[-1]["lost"] == []


@pytest.mark.parametrize(
    "place", ["while it is given the state", "before it connects", "while it connects"]
)
def test_a_rank_is_killed_while_it_joins(place, tmp_path):
    job = Job(tmp_path, ranks=3, until=3)
    job.start(2)
    job.until(lambda diaries: len(diaries) == 2)
    job.start(1, at=place, step=0, kills=[], joins=True)
    job.processes[2].wait(60)
    job.start()
    ended = trained(job.end(), job.output())
    assert len(ended) == 3
    for diary in ended:
        assert sizes(diary)[-1] == 3
        # Nobody had anything to lose.
        assert all(norm == 0 for _, norm in diary[-1]["lost"])


def test_a_rank_that_leaves_hands_over_its_residual(tmp_path):
    job = Job(tmp_path, ranks=3, polite=True, pause=0.05)
    job.start(3)
    job.until(lambda diaries: len(diaries) == 3 and all(d[-1]["step"] > 5 for d in diaries))
    job.processes[1].send_signal(signal.SIGTERM)
    ended = trained(job.end(), job.output())
    (left,) = (diary for diary in ended if diary[-1]["said"] is None)
    stayed = [diary for diary in ended if diary is not left]
    assert left[-1]["problem"] is None and len(stayed) == 2
    before = after = 0.0
    for diary in stayed:
        assert sizes(diary) == [3, 2] and diary[-1]["lost"] == []
        at = next(i for i, event in enumerate(diary) if event["event"] == "part")
        assert diary[at + 1]["event"] == "start"
        before, after = before + diary[at]["kept"], after + diary[at + 1]["kept"]
    (parted,) = (event for event in left if event["event"] == "part")
    assert parted["norm"] > 0
    assert after == pytest.approx(before + parted["kept"], rel=1e-4)


def test_too_few_ranks_end_with_a_message_on_all(tmp_path):
    job = Job(tmp_path, at="in the exchange", ranks=3, min=3, kills=[1], step=8, timeout=5.0)
    job.start(3)
    diaries = job.end()
    ends = [diary[-1] for diary in diaries if diary[-1]["event"] == "end"]
    assert len(ends) == 2
    for end in ends:
        assert "RendezvousError: 2 of at least 3 ranks have met at localhost:" in end["problem"]


def test_a_rank_that_stands_still_is_given_up_and_comes_back(tmp_path):
    job = Job(tmp_path, ranks=3, until=3, timeout=4.0, pause=0.05)
    job.start(3)
    job.until(lambda diaries: len(diaries) == 3 and all(d[-1]["step"] > 5 for d in diaries))
    pid = job.pid(2)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    job.until(lambda diaries: sum(2 in sizes(d) for d in diaries) == 2)
    os.kill(pid, signal.SIGCONT)
    ended = trained(job.end(), job.output())
    assert len(ended) == 3
    for diary in ended:
        assert sizes(diary)[-1] == 3
        assert diary[-1]["lost"] == []  # it came back with what it had kept


def test_a_rank_that_trains_otherwise_is_refused(tmp_path):
    job = Job(tmp_path, ranks=3, until=3)
    job.start(2)
    job.until(lambda diaries: len(diaries) == 2)
    job.start(1, every=5)
    job.processes[2].wait(60)
    job.start()
    diaries = job.end()
    refused = [d for d in diaries if d[-1].get("problem")]
    assert len(refused) == 1
    assert "MismatchError" in refused[0][-1]["problem"] and "every=5" in refused[0][-1]["problem"]
    assert len(trained([d for d in diaries if d not in refused], job.output())) == 3


def test_a_rank_that_raises_an_error_ends_alone(tmp_path):
    job = Job(tmp_path, ranks=3, raises=14)
    job.start(3)
    diaries = job.end()
    failed = [d for d in diaries if d[-1]["problem"]]
    assert [d[-1]["problem"] for d in failed] == [
        "RuntimeError: this rank has failed, and not because of gloo"
    ]
    ended = trained([d for d in diaries if d not in failed], job.output())
    assert len(ended) == 2 and all(len(d[-1]["lost"]) == 1 for d in ended)


def test_a_rank_that_has_finished_is_not_waited_for_while_its_process_lives(tmp_path):
    job = Job(tmp_path, ranks=3, early=14)
    job.start(3)
    diaries = job.end(30.0)
    (early,) = (d for d in diaries if d[-1]["said"] == "early")
    assert "train to the end in one call" in early[-1]["problem"]  # the second one
    ended = trained([d for d in diaries if d is not early], job.output())
    assert len(ended) == 2 and all(sizes(d) == [3, 2] for d in ended)
