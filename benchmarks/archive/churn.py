"""Goodput of local steps while ranks are killed and started again.

    python -m benchmarks.archive.churn --ranks 4 --minutes 5 --json docs/measured/churn.json
    python -m benchmarks.archive.churn --over horovod --json docs/measured/churn-horovod.json

Over `torch.distributed` (`ddp.Elastic`), or on Horovod's elastic, whose driver starts the new
process on a host that it has not seen: one more name of this machine. There all ranks commit after
each exchange.

Trains twice, once undisturbed, and once with one rank killed (SIGKILL) every so many seconds and a
new process started in its place at once. Counts the local steps whose effect went into an exchange
that was applied, of all ranks, in the same time from when all were in their first step. A step
computes a little and then waits until it is `--step` milliseconds old, as a process waits for its
accelerator: so the cores that this machine has are not what is measured. What a new process needs
to import and to build is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hvd_gradcomp import Int8Compressor, OuterSGD
from hvd_gradcomp.torch import ddp
from hvd_gradcomp.torch.membership import rendezvous

LOCAL_STEPS, BATCH = 15, 32
GLOO_TIMEOUT = 5  # seconds, over Horovod


class Log:
    """Lines of JSON of one process, on disk at once: it may be killed."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, f"{os.getpid()}.jsonl")

    def note(self, event: str, **facts: Any) -> None:
        with self._path.open("a") as stream:
            stream.write(json.dumps({"event": event, "at": time.time(), **facts}) + "\n")


class Training:
    """A perceptron that learns from another one, and the steps that this rank makes.

    Args:
        folder: of the logs.
        step_ms: how long a step takes, in milliseconds.
        local_steps: wraps the optimizer, `LocalSteps` of a frontend.
    """

    def __init__(self, folder: str, step_ms: float, local_steps: Callable[..., Any]) -> None:
        torch.set_num_threads(1)
        self.log, self._seconds = Log(folder), step_ms / 1000
        torch.manual_seed(0)
        self._teacher = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.optimizer = local_steps(
            torch.optim.AdamW(self.model.parameters(), lr=0.003),
            self.model.named_parameters(),
            every=LOCAL_STEPS,
            outer=OuterSGD(1.0, 0.0),
            compression=Int8Compressor(),
        )
        self._alone, self._rounds = 0, 0

    def meet(self, size: int, lost: Any) -> None:
        """Note that the ranks have met, and count what they had exchanged before."""
        if self._rounds == self._alone == 0:
            self._rounds = self.optimizer.rounds  # of those that were here before
        self._count()
        self.log.note("meets", size=size, lost=lost)

    def forget(self) -> None:
        """Leave out the steps since the last exchange: they were undone."""
        self._alone = 0

    def step(self, rank: int) -> bool:
        """Make a step; return True if all ranks have exchanged."""
        begin, optimizer = time.perf_counter(), self.optimizer
        seed = optimizer.steps_made * 1000 + rank
        x = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            target = self._teacher(x).argmax(1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), target)
        loss.backward()
        time.sleep(max(0.0, self._seconds - (time.perf_counter() - begin)))
        self._alone += 1
        optimizer.step()
        exchanged = bool(optimizer.rounds > self._rounds)
        if exchanged:
            self.log.note("loss", value=loss.item())
        self._count()
        return exchanged

    def _count(self) -> None:
        if self.optimizer.rounds > self._rounds:
            self.log.note("exchanged", steps=self._alone)
            self._alone, self._rounds = 0, self.optimizer.rounds


def work(folder: str, endpoint: str, ranks: int, step_ms: float) -> None:
    """Train over `torch.distributed` until somebody ends this process."""
    elastic = ddp.Elastic(endpoint, min_ranks=2, max_ranks=ranks)
    training = Training(folder, step_ms, ddp.LocalSteps)

    @elastic.run
    def train(state: ddp.ElasticState) -> None:
        training.meet(dist.get_world_size(), state.lost)
        while True:
            training.step(dist.get_rank())

    train(ddp.ElasticState(training.model, training.optimizer))


def work_on_horovod(folder: str, step_ms: float) -> None:
    """Train on Horovod's elastic until somebody ends this process."""
    import hvd_gradcomp.torch as hvd

    hvd.init()
    training = Training(folder, step_ms, hvd.LocalSteps)

    @hvd.elastic.run
    def train(state: Any) -> None:
        training.forget()
        training.meet(hvd.size(), state.lost)
        while True:
            if training.step(hvd.rank()):
                state.commit()

    train(hvd.elastic.TorchState(model=training.model, optimizer=training.optimizer))


class Ranks:
    """Ranks that are started over `torch.distributed`, each by itself.

    Args:
        folder: of the logs.
        ranks: how many.
        options: further ones of the worker.
    """

    def __init__(self, folder: str, ranks: int, options: Sequence[str]) -> None:
        self._store = rendezvous.serve("localhost", 0)
        self._command = [*options, "--endpoint", f"localhost:{self._store.port}"]
        self._running = [self._started() for _ in range(ranks)]
        del folder

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stderr=subprocess.DEVNULL)

    def kill(self, dice: Random) -> None:
        """Kill one of them, and start another."""
        place = dice.randrange(len(self._running))
        self._running[place].send_signal(signal.SIGKILL)
        self._running[place].wait()
        self._running[place] = self._started()

    def ended(self) -> list[int]:
        """Return the codes of those that have ended by themselves."""
        return [p.returncode for p in self._running if p.poll() is not None]

    def stop(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


# Ways to write this machine's name: a host each to Horovod.
NAMES = (
    *("localhost", "127.0.0.1", "127.1", "127.0.1", "0x7f.1", "0x7f.0.1", "0x7f.0.0.1"),
    *("0177.1", "0177.0.1", "0177.0.0.1", "0x7f000001", "2130706433", "127.0x1", "127.0.0x1"),
)


class HorovodRanks:
    """Ranks that Horovod's elastic driver starts, each on a host of its own.

    Args:
        folder: of the logs, and of the list of hosts.
        ranks: how many.
        options: further ones of the worker.
    """

    def __init__(self, folder: str, ranks: int, options: Sequence[str]) -> None:
        self._folder, self._ranks, self._kills = Path(folder), ranks, 0
        self._hosts()
        script = self._folder / "discover"
        script.write_text(f"#!/bin/sh\ncat '{self._folder}/hosts'\n")
        script.chmod(0o755)
        command = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(ranks)]
        command += ["--min-np", "1", "--max-np", str(ranks), "--network-interface", "lo"]
        command += ["--host-discovery-script", str(script), *options]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        # Ranks that are no neighbours of a dead one wait for so long; Horovod's own is 30.
        variables = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_TIMEOUT), **os.environ}
        self._job = subprocess.Popen(command, start_new_session=True, env=variables, **quiet)

    def _hosts(self) -> None:
        names = NAMES[self._kills : self._kills + self._ranks]
        if len(names) < self._ranks:
            raise SystemExit(f"{len(NAMES)} names of this machine are enough for fewer kills")
        (self._folder / "hosts.new").write_text("".join(f"{name}:1\n" for name in names))
        (self._folder / "hosts.new").rename(self._folder / "hosts")

    def kill(self, dice: Random) -> None:
        """Kill the rank on the first host, and show the driver another one."""
        del dice
        running = [int(p.stem) for p in self._folder.glob("*.jsonl")]
        names = {self._name(pid): pid for pid in running}
        os.kill(names[NAMES[self._kills]], signal.SIGKILL)
        self._kills += 1
        self._hosts()

    @staticmethod
    def _name(pid: int) -> str:
        """Return the host that a process was started on, as Horovod has told it."""
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            return ""
        environment = dict(word.decode().partition("=")[::2] for word in words if b"=" in word)
        return environment.get("HOROVOD_HOSTNAME", "")

    def ended(self) -> list[int]:
        """Return the driver's code, if it has ended by itself."""
        return [] if self._job.poll() is None else [self._job.returncode]

    def stop(self) -> None:
        os.killpg(self._job.pid, signal.SIGTERM)
        self._job.wait()


FRONTENDS = {"ddp": Ranks, "horovod": HorovodRanks}


def measured(
    over: str, ranks: int, seconds: float, every: float, step_ms: float, seed: int
) -> dict[str, Any]:
    """Train for a while; kill one rank every so many seconds, if that is not 0."""
    dice = Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.archive.churn",
            "--worker",
            folder,
            "--over",
            over,
        ]
        command += ["--ranks", str(ranks), "--step", str(step_ms)]
        running = FRONTENDS[over](folder, ranks, command)
        kills: list[float] = []
        try:
            while sum(e["size"] == ranks for e in _events(folder, "meets")) < ranks:
                time.sleep(0.1)
            begin = time.time()
            while (now := time.time()) < begin + seconds:
                if every and now >= begin + (len(kills) + 0.5) * every:
                    running.kill(dice)
                    kills.append(time.time())
                if ended := running.ended():
                    raise SystemExit(f"a rank has ended by itself: {ended}")
                time.sleep(0.05)
            return _counted(folder, begin, begin + seconds, ranks, kills)
        finally:
            running.stop()


def _events(folder: str, kind: str) -> list[dict[str, Any]]:
    lines = [x for p in Path(folder).glob("*.jsonl") for x in p.read_text().splitlines()]
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return sorted((e for e in events if e["event"] == kind), key=lambda e: float(e["at"]))


def _counted(
    folder: str, begin: float, end: float, ranks: int, kills: list[float]
) -> dict[str, Any]:
    steps = sum(e["steps"] for e in _events(folder, "exchanged") if begin <= e["at"] <= end)
    meets = _events(folder, "meets")
    losses = [e["value"] for e in _events(folder, "loss") if e["at"] <= end]

    def until(at: float, size: int) -> float | None:
        """Seconds from a kill until all of so many ranks train."""
        later = [e["at"] for e in meets if e["at"] > at and e["size"] == size]
        return round(later[size - 1] - at, 2) if len(later) >= size else None

    return {
        "steps": steps,
        "steps_per_second": round(steps / (end - begin), 2),
        "kills": len(kills),
        "seconds_until_the_others_train": [until(at, ranks - 1) for at in kills],
        "seconds_until_all_train": [until(at, ranks) for at in kills],
        "loss": round(sum(losses[-20:]) / len(losses[-20:]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--over", choices=FRONTENDS, default="ddp")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=5.0, help="of each of the two trainings")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--step", type=float, default=100.0, help="milliseconds of a step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker and options.over == "horovod":
        work_on_horovod(options.worker, options.step)
        return
    if options.worker:
        work(options.worker, options.endpoint, options.ranks, options.step)
        return
    how = options.step, options.seed
    calm = measured(options.over, options.ranks, 60 * options.minutes, 0, *how)
    churn = measured(options.over, options.ranks, 60 * options.minutes, options.every, *how)
    result = {
        "over": options.over,
        "ranks": options.ranks,
        "minutes": options.minutes,
        "seconds_between_kills": options.every,
        "milliseconds_of_a_step": options.step,
        "local_steps": LOCAL_STEPS,
        "machine": {"cores": os.cpu_count()},
        "undisturbed": calm,
        "with_kills": churn,
        "goodput": round(churn["steps"] / calm["steps"], 4),
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if result["goodput"] >= 0.85 else 1)


if __name__ == "__main__":
    main()
