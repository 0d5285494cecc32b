"""Trains replicas in one process, in lockstep: on one GPU, or as more hosts than there are cores.

Payloads are those of `hvd_gradcomp.testing.World`: encoded and decoded, but no link carries them.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hvd_gradcomp
from benchmarks.ratios import of_round
from benchmarks.worth.methods import METHODS
from benchmarks.worth.recipes import RECIPES, Recipe, Task, precision, share, task
from benchmarks.worth.results import Run
from hvd_gradcomp import Compressor, NoneCompressor, OuterSGD
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World

LOOK = 10  # steps between looks at the clock


class Replica:
    """Model of one rank, with its optimizer and batches."""

    def __init__(self, model: nn.Module, recipe: Recipe, rate: float, data: Task, seed: int):
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = recipe.optimizer(self.parameters, rate)
        self.batches: Iterator[Any] = data.batches(model, seed)
        self._clip = recipe.clip

    def step(self, rate: float) -> None:
        """Apply the gradients, at this rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def flat(self, world: World) -> torch.Tensor:
        return world.flat([p.detach() for p in self.parameters])


class Training:
    """Replicas that exchange gradients, or their changes after some local steps.

    Args:
        run: what is trained, by a method of one compressor, of local steps, or of both.
        tasks: data of each rank.
        device: "cuda" or "cpu".
    """

    def __init__(self, run: Run, tasks: list[Task], device: str) -> None:
        torch.manual_seed(run.seed)
        recipe, method, rate = RECIPES[run.recipe], METHODS[run.method], run.rate
        steps = round(run.length * recipe.steps)
        names = {**vars(hvd_gradcomp), "warmup": recipe.warmup_steps}
        local: dict[str, Any] = eval(f"dict({method.local})", names)
        self._ops = TorchOps(device)
        self._every, self._first = local.get("every", 1), local.get("warmup_steps", 0)
        self._outer = local.get("outer", OuterSGD(1, 0)) if method.local else None
        compressor = eval(method.compressor, names) if method.compressor else NoneCompressor()
        model = tasks[0].model().to(device)
        self.replicas = [
            Replica(copy.deepcopy(model), recipe, rate, data, run.seed) for data in tasks
        ]
        self._dense = self._world(NoneCompressor())
        self._compressed = self._world(compressor)
        self._begun = self.replicas[0].flat(self._compressed)
        self._momentum = torch.zeros_like(self._begun)
        self._recipe, self._rate, self._steps, self._made = recipe, rate, steps, 0
        self._seconds, self._exchanges, self._bytes = 0.0, 0, 0.0

    def _world(self, compressor: Compressor) -> World:
        shapes = tuple(tuple(p.shape) for p in self.replicas[0].parameters)
        names = tuple(map(str, range(len(shapes))))
        layout = Layout(names, shapes, block=compressor.block)
        return World(compressor, self._ops, layout, len(self.replicas))

    def step(self) -> None:
        """Make a step of all replicas."""
        rate = self._rate * share(self._made, self._steps, self._recipe.warmup_steps)
        for replica in self.replicas:
            next(replica.batches)().backward()
        first = self._made < self._first
        if self._outer is None or first:
            world = self._dense if first else self._compressed
            gradients = [world.flat([p.grad for p in r.parameters]) for r in self.replicas]
            for replica, total in zip(self.replicas, self._exchanged(world, gradients)):
                _put(world.layout, total, [p.grad for p in replica.parameters])
        for replica in self.replicas:
            replica.step(rate)
        self._made += 1
        if self._outer is not None and first:
            self._begun = self.replicas[0].flat(self._compressed)
        elif self._outer is not None and (self._made - self._first) % self._every == 0:
            self._round(self._outer)

    @torch.no_grad()
    def _round(self, outer: OuterSGD) -> None:
        """Average the changes since the last round, and move all replicas by the outer step."""
        world = self._compressed
        changes = [self._begun - replica.flat(world) for replica in self.replicas]
        change = self._exchanged(world, changes)[0]
        if outer.momentum:
            self._momentum.mul_(outer.momentum).add_(change)
            change = change + outer.momentum * self._momentum
        self._begun = self._begun - outer.lr * change
        for replica in self.replicas:
            _put(world.layout, self._begun, [p.data for p in replica.parameters])

    def _exchanged(self, world: World, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        _settle(tensors[0])
        begin = time.perf_counter()
        totals: list[torch.Tensor] = world.step(tensors)
        _settle(tensors[0])
        self._ops.raise_found()
        rounds = (of_round(requests, world.size).sent for requests in world.traffic)
        self._bytes += sum(rounds)
        if world is self._compressed:
            self._seconds += time.perf_counter() - begin
            self._exchanges += 1
        return totals

    def clock(self) -> float:
        """Return `time.monotonic()` once all steps have ended, on a GPU too."""
        _settle(self._begun)
        return time.monotonic()

    @torch.no_grad()
    def row(self, data: Task) -> dict[str, Any]:
        """Return the loss on what is held out, after a last round, and what a rank sent.

        `encode_ms` is the time that a rank takes to encode and decode an exchange.
        """
        made = max(1, self._made)
        row = {
            "bytes_a_step": self._bytes / made,
            "encode_ms": 1e3 * self._seconds / max(1, self._exchanges) / len(self.replicas),
            "parameters": sum(p.numel() for p in self.replicas[0].parameters),
        }
        if self._outer is not None and (self._made - self._first) % self._every:
            self._round(self._outer)
        sums = data.sums(self.replicas[0].model)
        dtype = precision(self._begun.device.type)
        loss = {"loss": float(sums[0] / sums[1]), "precision": str(dtype)[6:]}
        return {**loss, **row, "lockstep": True}


def _put(layout: Layout, flat: torch.Tensor, tensors: list[Any]) -> None:
    for start, size, tensor in zip(layout.offsets, layout.sizes, tensors):
        tensor.copy_(flat[start : start + size].view_as(tensor))


def _settle(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def trained(
    runs: list[Run], folder: Path | None, deadline: float = math.inf
) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Train in this process; yield the rows as they come.

    After some steps it shows how long a training takes. One that would end too late ends there,
    without a row, and the next ones are tried.

    Args:
        runs: of one recipe and as many hosts.
        folder: in the place of Debian's packages.
        deadline: of `time.monotonic()`.

    Raises:
        SystemExit: a method is more than one compressor and local steps by a number.
    """
    for run in runs:
        method = METHODS[run.method]
        plain = not (
            method.peer or method.inner or "Rule" in method.local or "{" in method.compressor
        )
        if not plain or method.passes > 1:
            raise SystemExit(f"{run.method} needs ranks: leave --lockstep out")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    recipe, hosts, each = runs[0].recipe, runs[0].hosts, runs[0].batch // runs[0].hosts
    tasks = [task(recipe, each, rank, hosts, folder) for rank in range(hosts)]
    whole = task(recipe, each, 0, 1, folder)
    for run in runs:
        if time.monotonic() > deadline:
            return
        training = Training(run, tasks, device)
        seconds = _train(training, run, deadline)
        if seconds is not None:
            yield run, {**training.row(whole), "seconds": seconds, "device": name}
        del training  # so that there is memory for the next one


def _train(training: Training, run: Run, deadline: float) -> float | None:
    """Make all steps; return the seconds that they took, or None if they would end too late."""
    steps, begin = round(run.length * RECIPES[run.recipe].steps), training.clock()
    settled = begin
    for made in range(1, steps + 1):
        training.step()
        if made % LOOK:
            continue
        now = training.clock()
        if made == LOOK:
            settled = now  # what was compiled is compiled
            continue
        pace = (now - settled) / (made - LOOK)
        left = pace * (steps - made)
        if made == 2 * LOOK:
            print(f"  {run.method}: {1e3 * pace:.0f} ms a step, {left:.0f} s to go", flush=True)
        if now + left > deadline:
            print(f"  {run.method}: stopped at step {made}, it would end too late", flush=True)
            return None
    return training.clock() - begin
