"""PyTorch's own PowerSGD hook beside this package's compressors, on two ranks of DDP over gloo.

    python -m benchmarks.archive.powersgd        # two minutes on two cores; starts its ranks itself
    python -m benchmarks.archive.powersgd --steps 1000 --seeds 5
    python -m benchmarks.archive.powersgd --time  # two minutes: what a step takes, beside the hook
    python -m benchmarks.archive.powersgd --time --only "11 layers" ResNet
    python -m benchmarks.archive.powersgd --alone # seconds: encode and decode of one rank

Handwritten digits (scikit-learn's, a fifth held out) on a perceptron of 64-256-256-10, 85,002
parameters: as many steps of 32 images a rank with each method. Accuracy and loss are medians over
seeds, and from least to most; the loss is that of the images trained on, at the end. Bytes are what
a rank hands to collectives in the steps that are compressed: of PyTorch's hooks counted at
`torch.distributed.all_reduce`, of ours by `stats`. On two ranks both bring a rank as many.

`--time` lets DDP without a hook, its hook and ours of rank 4 take turns: a perceptron of 12 layers
of 1,024 x 1,024, and the GPT of `make worth`, 0.8 million parameters in small matrices, with one
sample a rank, so that a step is little else than its exchange; then noise for gradients, so that it
is nothing else: of 11 layers (6 matrices, 5 vectors, 0.8 million parameters) and of ResNet-50's
shapes. "By shape" is the hook with `batch_tensors_with_same_shape=True`. Ranks share the memory of
one machine, and nothing slows their link: what is left is what compressing costs. The processor's
time is that of rank 0 with all of its threads; other work on the machine changes it little.

`--alone` takes steps of one process, one thread, without collectives and without DDP: each sum is a
copy of what was sent, which is not timed. Medians of 12 steps after 5.

Not measured here: GPUs, slow links (`make worth` does), more ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

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
from hvd_gradcomp.core.layout import plan_buckets
from hvd_gradcomp.method.compressor import Context
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.runtime.program_runner import ProgramRunner
from hvd_gradcomp.torch import ddp
from hvd_gradcomp.tuning.models import resnet50

RANKS, BATCH = 2, 32
WARM_UP = 10  # steps that PowerSGD does uncompressed; left out of all counts of bytes
RANK, WIDTH, DEPTH, TURNS = 4, 1024, 12, 40  # of what is timed
ALONE = 5  # first steps that `--alone` leaves out
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


class _Noise(torch.autograd.Function):
    """Zero, whose gradients by the parameters are noise."""

    @staticmethod
    def forward(ctx: Any, noise: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.noise = noise
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        del gradients
        return None, *ctx.noise


class Shapes(nn.Module):
    """Model of layers of some shapes, which computes nothing; its gradients are noise."""

    def __init__(self, shapes: Iterable[tuple[int, ...]]) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self.noise = [torch.randn(p.shape, generator=generator) for p in self.layers]

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        """Return zero."""
        del sample
        return cast(torch.Tensor, _Noise.apply(self.noise, *self.layers))


def eleven() -> list[tuple[int, ...]]:
    """Return the shapes of 6 matrices and 5 vectors."""
    widths = (64, *[448] * 5, 10)
    return [shape for a, b in zip(widths, widths[1:]) for shape in ((b, a), (b,))][:-1]


def few_layers() -> tuple[nn.Module, torch.Tensor]:
    """Return a model of 11 layers, and a sample."""
    return Shapes(eleven()), torch.zeros(1)


def many_layers() -> tuple[nn.Module, torch.Tensor]:
    """Return a model of ResNet-50's shapes, and a sample."""
    return Shapes(shape for _, shape in resnet50()), torch.zeros(1)


MODELS = {
    "12 layers of 1,024 x 1,024": perceptron,
    "GPT, 0.8 million parameters": transformer,
    "11 layers, 0.8 million parameters": few_layers,
    "ResNet-50's 161 layers": many_layers,
}


class Timed:
    """A model of DDP whose steps are timed, and how its gradients travel.

    Args:
        make: of `MODELS`.
        method: one of ours, a rank of PowerSGD's hook (negative: batched by shape), or None for
            DDP alone.
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
                None,
                matrix_approximation_rank=abs(method),
                start_powerSGD_iter=2,
                batch_tensors_with_same_shape=method < 0,
            )
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def step(self) -> tuple[float, float]:
        """Return the seconds of forward and backward with the exchange, and the processor's."""
        self.model.zero_grad()
        dist.barrier()
        begin = time.perf_counter(), time.process_time()
        self.model(self.sample).square().sum().backward()
        return time.perf_counter() - begin[0], time.process_time() - begin[1]


def time_steps(rank: int, port: int, folder: str, only: list[str], count: int) -> None:
    """Time all ways in turn, and leave what rank 0 has found in a file."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    ways: dict[str, Compressor | int | None] = {
        "DDP, uncompressed": None,
        f"DDP's powerSGD_hook, rank {RANK}": RANK,
        "likewise, by shape": -RANK,
        **{str(one): one for one in (PowerSGDCompressor(rank=RANK), ACPSGDCompressor(rank=RANK))},
        "NoneCompressor()": NoneCompressor(),
    }
    times = {}
    for title, make in MODELS.items():
        if only and not any(title.startswith(begin) for begin in only):
            continue
        models = [Timed(make, method) for method in ways.values()]
        turns = [[model.step() for model in models] for _ in range(WARM_UP + count)]
        times[title] = dict(zip(ways, zip(*turns[WARM_UP:])))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def table_of_times(times: dict[str, list[tuple[float, float]]]) -> str:
    """Return a line for each way."""
    hook = times[f"DDP's powerSGD_hook, rank {RANK}"]
    theirs = [statistics.median(clock) for clock in zip(*hook)]
    rows = []
    for name, steps in times.items():
        seconds, work = zip(*steps)
        middle, processor = statistics.median(seconds), statistics.median(work)
        spread = f"{1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}"
        rows.append([name, f"{1e3 * middle:.1f}", spread, f"{middle / theirs[0]:.2f}"])
        rows[-1] += [f"{1e3 * processor:.1f}", f"{processor / theirs[1]:.2f}"]
    head = ["method", "ms a step, median", "least to most", "of the hook's"]
    head += ["processor, ms", "of the hook's"]
    return tabulate(rows, head, tablefmt="github", disable_numparse=True)


def work(compressor: Compressor, shapes: list[tuple[int, ...]], bucket_bytes: int) -> list[str]:
    """Return the ms of encode and decode of one rank, and of copying the gradient once."""
    layers = [(str(number), shape, "float32") for number, shape in enumerate(shapes)]
    layouts = plan_buckets(layers, bucket_bytes, compressor.block)
    ops = TorchOps()
    gradients = [torch.randn(layout.size) for layout in layouts]
    outs = [torch.empty_like(gradient) for gradient in gradients]
    states = [compressor.init(ops, layout) for layout in layouts]
    steps, copies = [], []
    for step in range(ALONE + 12):
        begin = time.perf_counter()
        for gradient, out in zip(gradients, outs):
            out.copy_(gradient)
        copies.append(time.perf_counter() - begin)
        fresh, seconds = [gradient.clone() for gradient in gradients], 0.0
        for bucket, layout in enumerate(layouts):
            context = Context(layout, 0, RANKS, step, 1.0, 1.0 / RANKS)
            program = compressor.aggregate(ops, context, fresh[bucket], states[bucket])
            runner, reply = ProgramRunner(program), None
            while True:
                begin = time.perf_counter()
                request = runner.send(reply)
                seconds += time.perf_counter() - begin
                if request is None:
                    break
                reply = request.tensor.clone()
            _, states[bucket] = runner.result
        steps.append(seconds)
    return [f"{1e3 * statistics.median(clock[ALONE:]):.1f}" for clock in (steps, copies)]


def table_of_work() -> str:
    """Return a line for each model and method."""
    whole, large = 1 << 40, [shape for _, shape in reversed(resnet50())]
    models = {
        "11 layers, 0.8 million parameters": (eleven(), whole),
        "ResNet-50's 161 layers, one bucket": (large, whole),
        "ResNet-50's 161 layers, buckets of 25 MB": (large, 25 << 20),
    }
    rows = [
        [title, str(compressor), *work(compressor, shapes, size)]
        for title, (shapes, size) in models.items()
        for compressor in (PowerSGDCompressor(rank=RANK), ACPSGDCompressor(rank=RANK))
    ]
    head = ["model", "method", "encode and decode, ms", "copy of the gradient, ms"]
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
    parser.add_argument("--turns", type=int, default=TURNS, help="of each way, with --time")
    parser.add_argument("--only", nargs="+", default=[], help="how the names of models begin")
    parser.add_argument("--alone", action="store_true", help="encode and decode of one rank")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps has to exceed the {WARM_UP} that PowerSGD does uncompressed")
    if options.alone:
        torch.set_num_threads(1)
        print(table_of_work())
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.time:
            multiprocessing.spawn(
                time_steps, (free_port(), folder, options.only, options.turns), nprocs=RANKS
            )
            for title, times in json.loads(Path(folder, "found.json").read_text()).items():
                print(f"{title}\n\n{table_of_times(times)}\n")
            return
        trainings = free_port(), folder, options.steps, options.seeds
        multiprocessing.spawn(worker, trainings, nprocs=RANKS)
        print(table(json.loads(Path(folder, "found.json").read_text())))


if __name__ == "__main__":
    main()
