"""Worker of `make worth`: trains in each way of a job; rank 0 prints a line of JSON for each.

horovodrun --gloo -np 2 python -m benchmarks.worth.worker JOB.json
"""

from __future__ import annotations

import itertools
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as horovod
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvd_gradcomp
import hvd_gradcomp.torch as hvd
from benchmarks.papers.hook import PowerSGDHook, connect
from benchmarks.papers.parts import Scale
from benchmarks.papers.training import TASKS as DATA
from benchmarks.papers.training import Loss
from benchmarks.worth.ways import LIMIT, LOOK, MARK, SEPARATE, TASKS, TIMED, Training, Way


class Run:
    """One training in one way.

    Args:
        training: what is trained.
        way: how ranks exchange; None for not at all.
        data: of the task.
        seed: of the model and the batches.
    """

    def __init__(self, training: Training, way: Way | None, data: Any, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = data.model()
        self._data, self._seed, self._way = data, seed, way
        self.forward: nn.Module = self.model
        parameters, decay = self.model.parameters(), data.decay
        plain: torch.optim.Optimizer
        if training.optimizer == "adamw":
            plain = torch.optim.AdamW(parameters, lr=training.rate, weight_decay=decay)
        else:
            plain = torch.optim.SGD(parameters, training.rate, 0.9, weight_decay=decay)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.optimizer: Any = plain
        self._hook: PowerSGDHook | None = None
        self._bytes: Callable[[], int] = lambda: 0
        if way is not None:
            self._exchange(way, plain, 0.0 if training.optimizer == "adamw" else 0.9)
        self._losses = self._batches()

    def _exchange(self, way: Way, plain: torch.optim.Optimizer, momentum: float) -> None:
        named = self.model.named_parameters()
        compressor = eval(way.compressor.format(momentum=momentum), vars(hvd_gradcomp))
        if way.hook_rank:
            self._hook = PowerSGDHook(self.model, way.hook_rank)
            self.forward = self._hook.model
            self._bytes = lambda: self._hook.stats().bytes_sent if self._hook else 0
        elif way.library == "ddp":
            connect()
            self.forward = DistributedDataParallel(self.model)
        elif way.library == "horovod":
            self.optimizer = horovod.DistributedOptimizer(plain, named)
        else:
            if way.local:
                how = eval(f"dict({way.local})", vars(hvd_gradcomp))
                self.optimizer = hvd.LocalSteps(plain, named, compression=compressor, **how)
            else:
                self.optimizer = hvd.DistributedOptimizer(plain, named, compression=compressor)
            statistics_of = partial(hvd.compression_stats, self.optimizer)
            self._bytes = lambda: statistics_of().bytes_sent

    def _batches(self) -> Iterator[Loss]:
        for epoch in itertools.count():
            yield from self._data.epoch(self.forward, 1000 * self._seed + epoch)

    def step(self) -> None:
        loss = next(self._losses)
        self.optimizer.zero_grad()
        loss().backward()
        stock = self._way is not None and self._way.library == "horovod"
        if stock:
            self.optimizer.synchronize()
        if self._data.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._data.clip)
        if stock:
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        else:
            self.optimizer.step()

    def look(self) -> float:
        """Return the loss on what is held out."""
        with torch.no_grad():
            return float(self._data.look(self.model)[0])

    def bytes_of(self, steps: int) -> float:
        """Return the bytes that this rank sent in each of so many steps, if it counts them."""
        whole = 4 * sum(p.numel() for p in self.model.parameters())
        return self._bytes() / steps or whole

    def close(self) -> None:
        if self._hook is not None:
            self._hook.close()


def train(run: Run, goal: int, target: float | None, limit: int) -> dict[str, Any]:
    """Train to the target; without one as far as the goal, whose loss is the target."""
    looks, seconds, reached, step = [], 0.0, None, 0
    while step < (goal if target is None else limit):
        hvd.barrier()
        begin = time.perf_counter()
        for _ in range(LOOK):
            run.step()
        hvd.barrier()
        seconds, step = seconds + time.perf_counter() - begin, step + LOOK
        looks.append([step, run.look()])
        if target is not None and looks[-1][1] <= target:
            reached = step
            break
    if target is None:
        reached, target = step, looks[-1][1]
    found = {"steps": reached, "target": target, "looks": looks, "seconds": seconds}
    return {**found, "bytes_a_step": run.bytes_of(step)}


def timed(run: Run, lead: int, steps: int) -> dict[str, Any]:
    """Return the time of a step, after so many that are not timed."""
    for _ in range(lead):
        run.step()
    hvd.barrier()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        run.step()
        times.append(1e3 * (time.perf_counter() - begin))
    begin = time.perf_counter()
    hvd.barrier()
    late = 1e3 * (time.perf_counter() - begin)
    return {"ms": (sum(times) + late) / steps, "median_ms": statistics.median(times)}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    logging.basicConfig(level=logging.ERROR)
    hvd.init()
    torch.set_num_threads(1)
    training, seed = TASKS[job["task"]], job["seed"]
    data = DATA[training.task](Path(job["data"]) if job["data"] else None, Scale(6400, 4))
    target = job["target"]
    for key in job["ways"]:
        way = training.ways[key] if key else None
        run = Run(training, way, data, seed)
        if job["mode"] == "train":
            goal = job.get("goal", training.goal)
            found = train(run, goal, target, LIMIT * goal)
            target = found["target"]
        else:
            lead, steps = (5, SEPARATE) if way is None else (way.lead, TIMED)
            found = timed(run, lead, job.get("timed", steps))
        found["parameters"] = sum(p.numel() for p in run.model.parameters())
        run.close()
        if hvd.rank() == 0:
            result = {"method": key, "seed": seed, **found}
            print(MARK + json.dumps(result), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
