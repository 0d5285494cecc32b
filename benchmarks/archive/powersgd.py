"""PyTorch's own PowerSGD hook beside this package's compressors, on two ranks of DDP over gloo.

    python -m benchmarks.archive.powersgd        # two minutes on two cores; starts its ranks itself
    python -m benchmarks.archive.powersgd --steps 1000 --seeds 5
    python -m benchmarks.archive.powersgd --time  # a minute: what a step takes, beside the hook

Handwritten digits (scikit-learn's, a fifth held out) on a perceptron of 64-256-256-10, 85,002
parameters: as many steps of 32 images a rank with each method. Accuracy and loss are medians over
seeds, and from least to most; the loss is that of the images trained on, at the end. Bytes are what
a rank hands to collectives in the steps that are compressed: of PyTorch's hooks counted at
`torch.distributed.all_reduce`, of ours by `stats`. On two ranks both bring a rank as many.

`--time` lets DDP without a hook, its hook and ours of rank 4 take turns: a perceptron of 12 layers
of 1,024 x 1,024, and the GPT of `make worth`, 0.8 million parameters in small matrices; one sample
a rank, so that a step is little else than its exchange. Ranks share the memory of one machine, and
nothing slows their link: what is left is what compressing costs.

Not measured here: GPUs, slow links (`make worth` does), more ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from tabulate import tabulate
from torch import multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.moments import GPT
from hvd_gradcomp import (
    ACPSGDCompressor,
    Compressor,
    NoneCompressor,
    OneBitCompressor,
    PowerSGDCompressor,
    QSGDCompressor,
    SparseGDCompressor,
    TernGradCompressor,
    VarianceCompressor,
    after,
)
from hvd_gradcomp.torch import ddp

RANKS, BATCH = 2, 32
WARM_UP = 10  # steps that PowerSGD does uncompressed; left out of all counts of bytes
RANK, WIDTH, DEPTH, TURNS = 4, 1024, 12, 40  # of what is timed
OURS: tuple[Compressor, ...] = (
    *(after(WARM_UP, None, PowerSGDCompressor(rank=rank)) for rank in (1, 2, 4)),
    after(WARM_UP, None, ACPSGDCompressor(rank=4)),
    QSGDCompressor(),
    TernGradCompressor(),
    OneBitCompressor(),
    VarianceCompressor(alpha=2.0, moments="sample"),
    SparseGDCompressor(density=0.01),
)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD, momentum 0.9": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.002),
}


class Trained(NamedTuple):
    """Result of a training: percent of the held-out images, loss, bytes a step and rank."""

    accuracy: float
    loss: float
    bytes: float


class Counter:
    """Bytes that this rank has handed to `torch.distributed.all_reduce`."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts until it ends."""
        plain = dist.all_reduce

        def all_reduce(tensor: torch.Tensor, *args: Any, **how: Any) -> Any:
            self.bytes += tensor.numel() * tensor.element_size()
            return plain(tensor, *args, **how)

        dist.all_reduce = all_reduce
        try:
            yield
        finally:
            dist.all_reduce = plain


def methods() -> dict[str, Compressor | int | str]:
    """By name: one of ours, a rank of PowerSGD, or another hook of PyTorch's."""
    theirs: dict[str, Compressor | int | str] = {
        "none": "allreduce_hook",
        "DDP's fp16_compress_hook": "fp16_compress_hook",
        **{f"DDP's powerSGD_hook, rank {rank}": rank for rank in (1, 2, 4)},
    }
    return theirs | {str(one): one for one in OURS}


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, labels, and which are held out."""
    images, labels = load_digits(return_X_y=True)
    held_out = torch.arange(len(labels)) % 5 == 0
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels), held_out


def train(method: Any, optimizer: str, steps: int, seed: int) -> Trained:
    """One training; all ranks call it."""
    images, labels, held_out = digits()
    seen, names = images[~held_out], labels[~held_out]
    torch.manual_seed(seed)
    plain = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    if isinstance(method, VarianceCompressor):
        ddp.track_moments(plain)
    model = DistributedDataParallel(plain)
    counter, state = Counter(), None
    if isinstance(method, Compressor):
        state = ddp.compress(model, method)
    elif isinstance(method, int):
        hook_state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=method, start_powerSGD_iter=WARM_UP
        )
        model.register_comm_hook(hook_state, powerSGD_hook.powerSGD_hook)
    else:
        model.register_comm_hook(None, getattr(default_hooks, method))
    update = OPTIMIZERS[optimizer](model.parameters())
    order = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    before = 0
    with counter.counting():
        for step in range(steps):
            if step == WARM_UP:
                before = counter.bytes if state is None else state.stats().bytes_sent
            batch = torch.randint(len(names), (BATCH,), generator=order)
            update.zero_grad()
            nn.functional.cross_entropy(model(seen[batch]), names[batch]).backward()
            update.step()
    moved = (counter.bytes if state is None else state.stats().bytes_sent) - before
    with torch.no_grad():
        right = (plain(images[held_out]).argmax(1) == labels[held_out]).float().mean()
        loss = nn.functional.cross_entropy(plain(seen), names)
    return Trained(100 * float(right), float(loss), moved / (steps - WARM_UP))


def worker(rank: int, port: int, folder: str, steps: int, seeds: int) -> None:
    """Trains everything, and leaves what rank 0 has found in a file."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    results: dict[str, dict[str, list[Trained]]] = {}
    for optimizer in OPTIMIZERS:
        for name, method in methods().items():
            runs = [train(method, optimizer, steps, seed) for seed in range(seeds)]
            results.setdefault(name, {})[optimizer] = runs
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    """Return a model of large matrices, and a sample."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]
    return nn.Sequential(*layers), torch.randn(1, WIDTH) * (1 + dist.get_rank())


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Return a model of small matrices, and a sample."""
    return GPT(words=128, length=32), torch.randint(128, (1, 32))


MODELS = {"12 layers of 1,024 x 1,024": perceptron, "GPT, 0.8 million parameters": transformer}


class Timed:
    """A model of DDP whose steps are timed, and how its gradients travel.

    Args:
        make: of `MODELS`.
        method: one of ours, a rank of PowerSGD's hook, or None for DDP alone.
    """

    def __init__(self, make: Callable[[], Any], method: Compressor | int | None) -> None:
        torch.manual_seed(1)
        plain, self.sample = make()
        # The hook never returns with two buckets over gloo.
        self.model = DistributedDataParallel(plain, bucket_cap_mb=1024)
        if isinstance(method, Compressor):
            ddp.compress(self.model, method)
        elif method is not None:
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=method, start_powerSGD_iter=2
            )
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def step(self) -> float:
        """Return the seconds of forward and backward, and of the exchange in it."""
        self.model.zero_grad()
        dist.barrier()
        begin = time.perf_counter()
        self.model(self.sample).square().sum().backward()
        return time.perf_counter() - begin


def time_steps(rank: int, port: int, folder: str) -> None:
    """Time all ways in turn, and leave what rank 0 has found in a file."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    ways: dict[str, Compressor | int | None] = {
        "DDP, uncompressed": None,
        f"DDP's powerSGD_hook, rank {RANK}": RANK,
        **{str(one): one for one in (PowerSGDCompressor(rank=RANK), ACPSGDCompressor(rank=RANK))},
        "NoneCompressor()": NoneCompressor(),
    }
    times = {}
    for title, make in MODELS.items():
        models = [Timed(make, method) for method in ways.values()]
        turns = [[model.step() for model in models] for _ in range(WARM_UP + TURNS)]
        times[title] = dict(zip(ways, zip(*turns[WARM_UP:])))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def table_of_times(times: dict[str, list[float]]) -> str:
    """Return a line for each way."""
    theirs = statistics.median(times[f"DDP's powerSGD_hook, rank {RANK}"])
    rows = []
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        spread = f"{1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}"
        rows.append([name, f"{1e3 * middle:.1f}", spread, f"{middle / theirs:.2f}"])
    head = ["method", "ms a step, median", "least to most", "of the hook's"]
    return tabulate(rows, head, tablefmt="github", disable_numparse=True)


def table(results: dict[str, dict[str, list[list[float]]]]) -> str:
    """A line for each method."""
    head = ["method", "bytes a step", "times fewer"]
    head += [f"{what}, {name}" for name in OPTIMIZERS for what in ("accuracy, %", "loss")]
    rows = []
    dense = statistics.median(run[2] for run in results["none"]["Adam"])
    for name, by_optimizer in results.items():
        moved = [statistics.median(run[2] for run in runs) for runs in by_optimizer.values()]
        low, high = min(moved), max(moved)
        row = [name, _between(f"{low:,.0f}", f"{high:,.0f}")]
        row.append(_between(f"{dense / high:.1f}", f"{dense / low:.1f}"))
        for runs in by_optimizer.values():
            right, loss = ([run[column] for run in runs] for column in (0, 1))
            row.append(f"{statistics.median(right):.1f} ({min(right):.1f} to {max(right):.1f})")
            row.append(f"{statistics.median(loss):.4f}")
        rows.append(row)
    return tabulate(rows, head, tablefmt="github", disable_numparse=True)


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def free_port() -> int:
    """A port that nobody listens on."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    return int(store.port)


def main() -> None:
    """Starts two ranks, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help=f"of each training, over {WARM_UP}")
    parser.add_argument("--seeds", type=int, default=3, help="trainings with each method")
    parser.add_argument("--time", action="store_true", help="of a step, beside the hook's")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps has to exceed the {WARM_UP} that PowerSGD does uncompressed")
    with tempfile.TemporaryDirectory() as folder:
        if options.time:
            multiprocessing.spawn(time_steps, (free_port(), folder), nprocs=RANKS)
            for title, times in json.loads(Path(folder, "found.json").read_text()).items():
                print(f"{title}\n\n{table_of_times(times)}\n")
            return
        arguments = (free_port(), folder, options.steps, options.seeds)
        multiprocessing.spawn(worker, arguments, nprocs=RANKS)
        print(table(json.loads(Path(folder, "found.json").read_text())))


if __name__ == "__main__":
    main()
