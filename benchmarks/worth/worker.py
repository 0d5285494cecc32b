"""Rank of a training: trains or times the methods of a job; rank 0 prints a line of JSON for each.

torchrun --standalone --nproc-per-node 2 -m benchmarks.worth.worker JOB.json
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import hvd_gradcomp
from benchmarks.worth.methods import METHODS, PERIOD, Method
from benchmarks.worth.recipes import RECIPES, Task, precision, share, task
from benchmarks.worth.results import Run
from benchmarks.worth.trainings import MARK
from hvd_gradcomp.torch import ddp

HOOK_RANK, HOOK_FIRST = 4, 10
FIRST = 5  # dense steps of a training that is timed, of methods that begin so
NOTES = 20  # of the training's loss
Optimizers = list[Any]


class Training:
    """One training by one method, on this rank.

    Args:
        run: what is trained, and how.
        data: of its recipe.
        warmup_steps: of the rate, and dense ones.
    """

    def __init__(self, run: Run, data: Task, warmup_steps: int) -> None:
        torch.manual_seed(run.seed)
        self.plain = data.model().to("cuda" if torch.cuda.is_available() else "cpu")
        self.parameters = [p for p in self.plain.parameters() if p.requires_grad]
        self._recipe, self._method, self._data = RECIPES[run.recipe], METHODS[run.method], data
        self._rate, self.steps = run.rate, round(run.length * self._recipe.steps)
        self._warmup_steps = warmup_steps
        # One bucket: with two, the hook's callbacks took all of gloo's threads and waited forever.
        bucket = {"bucket_cap_mb": 1024} if self._method.peer == "powerSGD_hook" else {}
        self.model = DistributedDataParallel(self.plain, **bucket)
        self._inner = self._optimizers()
        self.optimizers: Optimizers = self._inner
        self._sent: Callable[[], int] | None = None
        self._exchange()
        self._batches = data.batches(self.model, run.seed)
        self.step_made, self.losses = 0, torch.zeros(self.steps)

    def _optimizers(self) -> Optimizers:
        recipe, rate = self._recipe, self._rate
        if self._method.inner != "muon":
            return [recipe.optimizer(self.parameters, rate)]
        matrices = [p for p in self.plain.blocks.parameters() if p.dim() == 2]
        others = [p for p in self.parameters if not any(p is m for m in matrices)]
        muon = torch.optim.Muon(
            matrices, rate, weight_decay=recipe.decay, adjust_lr_fn="match_rms_adamw"
        )
        return [muon, recipe.optimizer(others, rate)]

    def _exchange(self) -> None:
        """Let the method exchange in the place of `DistributedDataParallel`, if it does."""
        method, warmup = self._method, self._warmup_steps
        names = {**vars(hvd_gradcomp), "warmup": warmup, "rate": self._rate}
        momentum = 0.9 if self._recipe.optimizer_name == "sgd" else 0.0
        text = method.compressor.format(momentum=momentum, warmup=warmup)
        compressor = eval(text, names) if text else None
        if method.local:
            how = eval(f"dict({method.local})", names)
            if len(self._inner) > 1:
                self.model = self.plain
                self.optimizers = [
                    ddp.LocalSteps(each, self._named(each), compression=compressor, **how)
                    for each in self._inner
                ]
            else:
                local = ddp.local_steps(self.model, self._inner[0], compression=compressor, **how)
                self.optimizers = [local]
            self._sent = lambda: sum(x.stats().bytes_sent for x in self.optimizers)
        elif text:
            momenta = {"optimizer": self._inner[0]} if momentum and "momentum" in text else {}
            state = ddp.compress(self.model, compressor, **momenta)
            self._sent = lambda: int(state.stats().bytes_sent)
        elif method.peer == "PostLocalSGDOptimizer":
            hook = post_localSGD_hook.PostLocalSGDState(
                None, None, warmup, post_local_gradient_allreduce=False
            )
            self.model.register_comm_hook(hook, post_localSGD_hook.post_localSGD_hook)
            averager = PeriodicModelAverager(period=PERIOD, warmup_steps=warmup)
            self.optimizers = [PostLocalSGDOptimizer(self._inner[0], averager)]
        elif method.peer:
            power = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=HOOK_RANK, start_powerSGD_iter=HOOK_FIRST
            )
            self.model.register_comm_hook(power, powerSGD_hook.powerSGD_hook)

    def _named(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        return [(name, p) for name, p in self.plain.named_parameters() if p in trained]

    def step(self) -> None:
        """Make a step of this rank: a batch, and where the passes are complete an update."""
        method, now = self._method, self.step_made
        for optimizer in self._inner:
            for group in optimizer.param_groups:
                group["lr"] = self._rate * share(now, self.steps, self._warmup_steps)
        ends = (now + 1) % method.passes == 0 or now + 1 == self.steps
        with contextlib.nullcontext() if ends else self.model.no_sync():
            loss = next(self._batches)()
            (loss / method.passes).backward()
        self.losses[now] = loss.detach().cpu()
        self.step_made = now + 1
        if not ends:
            return
        if self._recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self._recipe.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self._inner:
            optimizer.zero_grad()

    @torch.no_grad()
    def finish(self) -> dict[str, Any]:
        """Return the loss on what is held out, of the parameters that all ranks have at the end."""
        if self._method.local:
            for optimizer in self.optimizers:
                optimizer.exchange()
        else:  # of the last round of a peer
            for p in self.parameters:
                dist.all_reduce(p.data)
                p.data /= dist.get_world_size()
        for buffer in self.plain.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= dist.get_world_size()
        sums = self._data.sums(self.plain)
        losses = self.losses.double()
        for tensor in (sums, losses):
            dist.all_reduce(tensor)
        part = max(1, len(losses) // NOTES)
        curve = [round(x.mean().item() / dist.get_world_size(), 4) for x in losses.split(part)]
        right = {"correct": sums[2].item() / sums[1].item()} if len(sums) > 2 else {}
        dtype = precision(self.parameters[0].device.type)
        row = {"loss": sums[0].item() / sums[1].item(), "precision": str(dtype)[6:]}
        return {**row, **right, "curve": curve}

    def bytes_a_step(self) -> float:
        """Return the bytes that this rank has handed to collectives, by step."""
        elements, method = sum(p.numel() for p in self.parameters), self._method
        if self._sent is not None:
            return self._sent() / self.step_made
        if method.peer == "powerSGD_hook":
            late = (self.step_made - HOOK_FIRST) / self.step_made
            return 4.0 * (elements * (1 - late) + sum(map(_low_rank, self.parameters)) * late)
        if method.peer:
            first = min(self._warmup_steps, self.step_made) / self.step_made
            return 4.0 * elements * (first + (1 - first) / PERIOD)
        return 4.0 * elements / method.passes


def _low_rank(p: nn.Parameter) -> int:
    """Return the elements that PyTorch's hook sends of a gradient: two factors, or all of it."""
    factors = HOOK_RANK * (len(p) + p.numel() // len(p))
    return factors if p.dim() > 1 and 2 * factors < p.numel() else p.numel()


def train(training: Training) -> dict[str, Any]:
    """Train to the end of the schedule."""
    begin = time.perf_counter()
    for _ in range(training.steps):
        training.step()
    seconds = time.perf_counter() - begin
    bytes_a_step = training.bytes_a_step()
    return {**training.finish(), "bytes_a_step": bytes_a_step, "seconds": seconds}


def timed(training: Training, method: Method) -> dict[str, Any]:
    """Return the milliseconds of a step, after those in which payloads settle."""
    for _ in range(method.lead + FIRST * method.dense_first):
        training.step()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(method.timed):
        training.step()
    dist.barrier()
    return {"ms": 1e3 * (time.perf_counter() - begin) / method.timed}


def connect() -> None:
    """Make the process group, of the ranks of torchrun or of Horovod."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        import hvd_gradcomp.torch as hvd
        from benchmarks.papers import hook

        hvd.init()
        hook.connect()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    logging.basicConfig(level=logging.ERROR)
    logging.getLogger("hvd_gradcomp").setLevel(logging.ERROR)
    connect()
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = Path(job["data"]) if job["data"] else None
    tasks: dict[tuple[str, int], Task] = {}
    for run in (Run(**run) for run in job["runs"]):
        key = run.recipe, run.batch // size
        if key not in tasks:
            tasks[key] = task(*key, rank, size, folder)
        first = FIRST if job["timed"] else RECIPES[run.recipe].warmup_steps
        training = Training(run, tasks[key], first)
        row = timed(training, METHODS[run.method]) if job["timed"] else train(training)
        row["parameters"] = sum(p.numel() for p in training.parameters)
        if rank == 0:
            print(MARK + json.dumps({**run._asdict(), **row}), flush=True)
    # DDP must not hold the last reference to the group: its end waits for gloo's thread under
    # the GIL, which the thread wants (PyTorch 2.13).
    del training
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
