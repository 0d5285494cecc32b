"""Time of a step on a link that costs nothing, by method, and where the hosts spend it.

    python -m benchmarks.host_time                        # two ranks of this machine
    python -m benchmarks.host_time --before OTHER         # beside another checkout, in turns
    python -m benchmarks.host_time --width 704 --steps 5  # a GPT of 24 million parameters
    python -m benchmarks.host_time --parts                # by part of an exchange

Ranks train a GPT (`benchmarks.moments.GPT`, 0.8 million parameters) with AdamW on random tokens, a
thread each, over gloo. Methods take turns, and with `--before` the two checkouts do in each of
them; who has no turn waits, and takes no time of cores. `ms` is the median over turns of the mean
of 15 steps, the mean over ranks; `/ alone` divides by a step without an exchange, turn by turn. `of
cores` is the processor time of a rank, gloo's threads included. Barriers are what ranks lose
by waiting for each other, whatever they exchange.

With `--counts` there are, of one step, in the mean over 15: `collectives` that `torch.distributed`
gets, `wake-ups` of a thread of the rank that had waited, `copies` by PyTorch's operations, in
gradients, and the number of these operations.

With `--parts` functions of an exchange are wrapped, as in `benchmarks.rounds`: milliseconds a step
of the rank's own thread, and what collectives took beyond, which is waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import hvd_gradcomp
from benchmarks import rounds
from benchmarks.moments import GPT
from hvd_gradcomp.torch import ddp
from hvd_gradcomp.torch.comm.c10d import C10dBackend
from hvd_gradcomp.torch.hooks.ddp_hook import DDPExchange
from hvd_gradcomp.torch.hooks.hook_exchange import HookExchange
from hvd_gradcomp.torch.reduce.reducer import BucketPrograms, Reducer

RANKS, LENGTH, BATCH, WORDS = 2, 64, 4, 128
ALONE, BARRIER = "no exchange", "a barrier every "
STOCK, STOCK_HOOK = "DistributedDataParallel", "powerSGD_hook, rank 4"
METHODS = (
    ALONE,
    f"{BARRIER}1",
    f"{BARRIER}5",
    STOCK,
    "NoneCompressor()",
    "QSGDCompressor()",
    "PowerSGDCompressor(rank=4)",
    STOCK_HOOK,
    "every 5, NoneCompressor()",
    "every 5, Int8Compressor()",
    "every 15, Int8Compressor()",
    "every 1000, Int8Compressor()",
)
PARTS = {
    "the hook": [(DDPExchange, "reduce")],
    "begin": [(DDPExchange, "_begin"), (HookExchange, "_begin_step"), (Reducer, "begin_step")],
    "comparison": [
        *((C10dBackend, name) for name in ("gather_headers", "start_headers")),
        (HookExchange, "_agree"),
    ],
    "copy in": [(DDPExchange, "_fill_buckets"), (Reducer, "mark_ready")],
    "codec": [(BucketPrograms, "launch"), (BucketPrograms, "resume"), (BucketPrograms, "wait_all")],
    "posting and receiving": [
        *((C10dBackend, name) for name in ("allgather", "allreduce", "alltoall", "gather", "wait")),
    ],
    "commit": [(DDPExchange, "_finish_programs"), (Reducer, "commit_or_roll_back")],
    "copy out": [(DDPExchange, "_copy_out"), (Reducer, "reduced_grad"), (Reducer, "finish_step")],
}
Row = dict[str, Any]


class Training:
    """Model of one rank, trained by one method.

    Args:
        method: of `METHODS`, or a compressor as Python has it.
        width: of the model.
    """

    def __init__(self, method: str, width: int) -> None:
        torch.manual_seed(1)
        model: Any = GPT(width, WORDS, LENGTH)
        self.size = sum(p.numel() for p in model.parameters())
        self._optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3)
        schedule, _, text = method.partition(", ")  # of local steps
        self._made, self._meets = 0, 0
        if method == STOCK_HOOK:
            # One bucket: with two, the hook's callbacks took all of gloo's threads.
            model = DistributedDataParallel(model, bucket_cap_mb=1024)
            state = powerSGD_hook.PowerSGDState(None, 4, 10)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif method.startswith("every "):
            self._optimizer = ddp.LocalSteps(
                self._optimizer,
                model.named_parameters(),
                every=int(schedule.removeprefix("every ")),
                compression=eval(text, vars(hvd_gradcomp)),
            )
        elif method.startswith(BARRIER):
            self._meets = int(method.removeprefix(BARRIER))
        elif method != ALONE:
            model = DistributedDataParallel(model)
            if method != STOCK:
                ddp.compress(model, eval(method, vars(hvd_gradcomp)))
        self._model = model
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    def step(self) -> None:
        """Make a step."""
        x = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=self._generator)
        self._optimizer.zero_grad()
        scores = self._model(x[:, :-1]).flatten(0, 1)
        functional.cross_entropy(scores, x[:, 1:].flatten()).backward()
        self._made += 1
        if self._meets and self._made % self._meets == 0:
            dist.barrier()
        self._optimizer.step()


def turn(training: Training, steps: int) -> list[float]:
    """Make some steps; return the seconds of one, by the clock and of cores."""
    dist.barrier()
    begin = time.perf_counter(), time.process_time()
    for _ in range(steps):
        training.step()
    dist.barrier()
    end = time.perf_counter(), time.process_time()
    return [(b - a) / steps for a, b in zip(begin, end)]


def counts_of(training: Training, steps: int) -> dict[str, float]:
    """Return the counts of a step, in the mean over some."""
    starts: list[str] = []
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    with rounds.counting(starts):
        for _ in range(steps):
            training.step()
    woken = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
    dist.barrier()
    with OperationCounter() as counter:
        for _ in range(steps):
            training.step()
    copies = counter.copied / training.size
    totals = {"collectives": len(starts), "wake-ups": woken, "copies": copies}
    return {name: x / steps for name, x in {**totals, "operations": counter.calls}.items()}


class OperationCounter(TorchDispatchMode):
    """Counter of PyTorch's operations in this thread, those of backward included.

    Attributes:
        calls: of operations.
        copied: elements that were copied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.copied = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self.calls += 1
        name = func.overloadpacket.__name__
        if name in ("copy_", "clone", "_foreach_copy_"):
            copied = args[0] if name == "_foreach_copy_" else args[:1]
            self.copied += sum(x.numel() for x in copied)
        return func(*args, **(kwargs or {}))


def parts_of(training: Training, steps: int) -> list[dict[str, float]]:
    """Return the seconds of the parts of some steps."""
    every = []
    for _ in range(steps):
        parts = rounds.Parts()
        with parts.watching(PARTS):
            training.step()
        every.append(dict(parts.seconds))
    return every


def copy_seconds(size: int) -> float:
    """Return the seconds that copying a gradient takes."""
    source, target = torch.randn(size), torch.empty(size)
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measured(options: Row) -> Row:
    """Return what this rank has measured; all ranks call it, and take their turns as told."""
    torch.set_num_threads(1)
    steps = options["steps"]
    trainings = {method: Training(method, options["width"]) for method in options["methods"]}
    for training in trainings.values():  # powerSGD_hook begins after ten steps
        turn(training, 15)
    seconds: dict[str, list[list[float]]] = {method: [] for method in trainings}
    orders, done = (Path(options["folder"], f"{dist.get_rank()}.{end}") for end in ("in", "out"))
    with orders.open() as lines, done.open("w", buffering=1) as replies:
        for line in lines:
            seconds[line.rstrip()].append(turn(trainings[line.rstrip()], steps))
            replies.write("done\n")
    result: Row = {"seconds": seconds, "counts": {}, "parts": {}}
    for method, training in trainings.items() if options["counts"] else ():
        result["counts"][method] = counts_of(training, steps)
    for method, training in trainings.items() if options["parts"] else ():
        result["parts"][method] = parts_of(training, steps)
    size = next(iter(trainings.values())).size
    return {**result, "size": size, "copy": copy_seconds(size)}


def spawned(rank: int, options: Row) -> None:
    """Measure as one of the processes of this machine; each writes what it has."""
    folder = options["folder"]
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    Path(folder, f"{rank}.json").write_text(json.dumps(measured(options)))
    dist.barrier()
    dist.destroy_process_group()


class Checkout:
    """Ranks with the package of a checkout, and the benchmarks beside this file.

    Args:
        folder: of the checkout.
        options: of `measured`.
    """

    def __init__(self, folder: Path, options: Row) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self._folder = Path(self._scratch.name)
        (self._folder / "hvd_gradcomp").symlink_to(folder.resolve() / "hvd_gradcomp")
        ends = [self._folder / f"{rank}.{end}" for end in ("in", "out") for rank in range(RANKS)]
        for end in ends:
            os.mkfifo(end)
        options = {**options, "folder": self._scratch.name}
        paths = os.pathsep.join([self._scratch.name, str(Path(__file__).parent.parent)])
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--once", json.dumps(options)],
            env={**os.environ, "PYTHONPATH": paths},
        )
        self._orders = [end.open("w", buffering=1) for end in ends[:RANKS]]
        self._replies = [end.open() for end in ends[RANKS:]]

    def turn(self, method: str) -> None:
        """Let the ranks take a turn.

        Raises:
            EOFError: they have failed.
        """
        for orders in self._orders:
            orders.write(f"{method}\n")
        for replies in self._replies:
            if not replies.readline():
                raise EOFError(f"the ranks have failed in a turn of {method}")

    def result(self) -> list[Row]:
        """End the turns; return what each rank has measured."""
        for end in (*self._orders, *self._replies):
            end.close()
        self._process.wait()
        with self._scratch:
            paths = [self._folder / f"{rank}.json" for rank in range(RANKS)]
            return [json.loads(path.read_text()) for path in paths]


def _over_ranks(runs: list[list[Row]], value: Callable[[list[Row]], float]) -> float:
    """Return the mean over ranks of a value of what a rank has measured in all runs."""
    return statistics.mean(value([run[rank] for run in runs]) for rank in range(RANKS))


def summary(runs: list[list[Row]], method: str) -> Row:
    """Return the figures of a method."""

    def turns(rank_runs: list[Row], of: str, which: int) -> list[float]:
        return [each[which] for run in rank_runs for each in run["seconds"][of]]

    def relative(rank_runs: list[Row]) -> float:
        pairs = zip(turns(rank_runs, method, 0), turns(rank_runs, ALONE, 0))
        return statistics.median(ours / alone for ours, alone in pairs)

    def median(which: int) -> float:
        return 1e3 * _over_ranks(runs, lambda x: statistics.median(turns(x, method, which)))

    first, _, last = statistics.quantiles(turns([run[0] for run in runs], method, 0), n=4)
    row = {"ms": median(0), "spread": 1e3 * (last - first), "of cores": median(1)}
    if ALONE in runs[0][0]["seconds"]:
        row["/ alone"] = _over_ranks(runs, relative)
    row.update(runs[0][0]["counts"].get(method, {}))

    def part_of(rank_runs: list[Row], part: str) -> float:
        every = [each for run in rank_runs for each in run["parts"][method]]
        return statistics.mean(each.get(part, 0.0) for each in every)

    for part in (*PARTS, rounds.WAITING) if runs[0][0]["parts"] else ():
        row[part] = 1e3 * _over_ranks(runs, partial(part_of, part=part))
    return row


def table(results: dict[str, list[list[Row]]], methods: Sequence[str]) -> str:
    """Return the table of all methods, of each checkout."""
    rows = {
        (method, name): summary(results[name], method) for method in methods for name in results
    }
    heads = [*next(iter(rows.values()))]
    lines = [f"| method | {' | '.join(heads)} |", f"|---|{'--:|' * len(heads)}"]
    for (method, name), row in rows.items():
        of = f", {name}" if len(results) > 1 else ""
        cells = [f"{row[head]:.2f}" for head in heads]
        lines.append(f"| {method}{of} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--before", type=Path, help="another checkout, with its kernels built")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="or some compressors")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--steps", type=int, default=15, help="of a turn, whole rounds")
    parser.add_argument("--turns", type=int, default=10, help="of each method")
    parser.add_argument("--repeats", type=int, default=1, help="of all, in new processes")
    parser.add_argument("--parts", action="store_true", help="by part of the exchange")
    parser.add_argument("--counts", action="store_true", help="collectives, wake-ups, operations")
    parser.add_argument("--once", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        torch.multiprocessing.spawn(spawned, (options.once,), RANKS)
        return
    kept = ("methods", "width", "steps", "parts", "counts")
    how = {name: getattr(options, name) for name in kept}
    checkouts = {"after": Path(__file__).parent.parent}
    if options.before:
        checkouts = {"before": options.before, **checkouts}
    results: dict[str, list[list[Row]]] = {name: [] for name in checkouts}
    for _ in range(options.repeats):
        running = {name: Checkout(folder, how) for name, folder in checkouts.items()}
        for method in options.methods * options.turns:
            for checkout in running.values():
                checkout.turn(method)
        for name, checkout in running.items():
            results[name].append(checkout.result())
    first = next(iter(results.values()))[0][0]
    print(
        f"{RANKS} ranks, {first['size']:,} parameters, {os.cpu_count()} cores, "
        f"a copy takes {1e3 * first['copy']:.2f} ms\n"
    )
    print(table(results, options.methods))


if __name__ == "__main__":
    main()
