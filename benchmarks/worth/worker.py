"""Worker of `make worth`: trains with each method of a job; rank 0 prints a line of JSON for each.

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
from benchmarks.worth.methods import LIMIT, LOOK, MARK, SEPARATE, TASKS, TIMED, Method, Training


class Run:
    """One training with one method.

    Args:
        training: what is trained.
        method: how ranks exchange; None for not at all.
        data: of the task.
        seed: of the model and the batches.
    """

    def __init__(self, training: Training, method: Method | None, data: Any, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = data.model()
        self._data, self._seed, self._method = data, seed, method
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
        if method is not None:
            self._exchange(method, plain, 0.0 if training.optimizer == "adamw" else 0.9)
        self._losses = self._batches()

    def _exchange(self, method: Method, plain: torch.optim.Optimizer, momentum: float) -> None:
        named = self.model.named_parameters()
        compressor = eval(method.compressor.format(momentum=momentum), vars(hvd_gradcomp))
        if method.hook_rank:
            self._hook = PowerSGDHook(self.model, method.hook_rank)
            self.forward = self._hook.model
            self._bytes = lambda: self._hook.stats().bytes_sent if self._hook else 0
        elif method.library == "ddp":
            connect()
            self.forward = DistributedDataParallel(self.model)
        elif method.library == "horovod":
            self.optimizer = horovod.DistributedOptimizer(plain, named)
        else:
            if method.local:
                how = eval(f"dict({method.local})", vars(hvd_gradcomp))
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
        stock = self._method is not None and self._method.library == "horovod"
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
    result = {"steps": reached, "target": target, "looks": looks, "seconds": seconds}
    return {**result, "bytes_a_step": run.bytes_of(step)}


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
    for key in job["methods"]:
        method = training.methods[key] if key else None
        run = Run(training, method, data, seed)
        if job["mode"] == "train":
            goal = job.get("goal", training.goal)
            measured = train(run, goal, target, LIMIT * goal)
            target = measured["target"]
        else:
            lead, steps = (5, SEPARATE) if method is None else (method.lead, TIMED)
            measured = timed(run, lead, job.get("timed", steps))
        measured["parameters"] = sum(p.numel() for p in run.model.parameters())
        run.close()
        if hvd.rank() == 0:
            result = {"method": key, "seed": seed, **measured}
            print(MARK + json.dumps(result), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
