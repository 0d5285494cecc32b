"""Goodput of local steps while ranks are killed and started again, over `torch.distributed`.

    python -m benchmarks.churn --ranks 4 --minutes 5 --every 60 --json docs/measured/churn.json

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
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hvd_gradcomp import Int8Compressor, OuterSGD
from hvd_gradcomp.torch import ddp, rendezvous

LOCAL_STEPS, BATCH = 15, 32


class Log:
    """Lines of JSON of one process, on disk at once: it may be killed."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, f"{os.getpid()}.jsonl")

    def note(self, event: str, **facts: Any) -> None:
        with self._path.open("a") as stream:
            stream.write(json.dumps({"event": event, "at": time.time(), **facts}) + "\n")


def work(folder: str, endpoint: str, ranks: int, step_ms: float) -> None:
    """Train until somebody ends this process."""
    torch.set_num_threads(1)
    log = Log(folder)
    elastic = ddp.Elastic(endpoint, min_ranks=2, max_ranks=ranks)
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = ddp.LocalSteps(
        torch.optim.AdamW(model.parameters(), lr=0.003),
        model.named_parameters(),
        every=LOCAL_STEPS,
        outer=OuterSGD(1.0, 0.0),
        compression=Int8Compressor(),
    )
    state = ddp.ElasticState(model, optimizer)
    alone, rounds = 0, 0

    def count() -> None:
        nonlocal alone, rounds
        if optimizer.rounds > rounds:
            log.note("exchanged", steps=alone)
            alone, rounds = 0, optimizer.rounds

    @elastic.run
    def train(state: ddp.ElasticState) -> None:
        nonlocal alone, rounds
        if rounds == alone == 0:
            rounds = optimizer.rounds  # of those that were here before
        count()
        log.note("meets", size=dist.get_world_size(), lost=state.lost)
        while True:
            begin = time.perf_counter()
            seed = optimizer.steps_made * 1000 + dist.get_rank()
            x = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                target = teacher(x).argmax(1)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), target)
            loss.backward()
            time.sleep(max(0.0, step_ms / 1000 - (time.perf_counter() - begin)))
            alone += 1
            optimizer.step()
            if optimizer.rounds > rounds:
                log.note("loss", value=loss.item())
            count()

    train(state)


def measured(ranks: int, seconds: float, every: float, step_ms: float, seed: int) -> dict[str, Any]:
    """Train for a while; kill one rank every so many seconds, if that is not 0."""
    store, dice = rendezvous.serve("localhost", 0), Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.churn", "--worker", folder]
        command += ["--endpoint", f"localhost:{store.port}"]
        command += ["--ranks", str(ranks), "--step", str(step_ms)]

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, stderr=subprocess.DEVNULL)

        running = [start() for _ in range(ranks)]
        kills: list[float] = []
        try:
            while sum(e["size"] == ranks for e in _events(folder, "meets")) < ranks:
                time.sleep(0.1)
            begin = time.time()
            while (now := time.time()) < begin + seconds:
                if every and now >= begin + (len(kills) + 0.5) * every:
                    place = dice.randrange(ranks)
                    running[place].send_signal(signal.SIGKILL)
                    running[place].wait()
                    kills.append(time.time())
                    running[place] = start()
                ended = [p.returncode for p in running if p.poll() is not None]
                if ended:
                    raise SystemExit(f"a rank has ended by itself: {ended}")
                time.sleep(0.05)
            return _counted(folder, begin, begin + seconds, ranks, kills)
        finally:
            for process in running:
                process.kill()
                process.wait()


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
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=5.0, help="of each of the two trainings")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--step", type=float, default=100.0, help="milliseconds of a step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.endpoint, options.ranks, options.step)
        return
    how = options.step, options.seed
    calm = measured(options.ranks, 60 * options.minutes, 0, *how)
    churn = measured(options.ranks, 60 * options.minutes, options.every, *how)
    found = {
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
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(0 if found["goodput"] >= 0.85 else 1)


if __name__ == "__main__":
    main()
