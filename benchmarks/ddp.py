"""Step and memory of a transformer under `DistributedDataParallel`: `ddp.compress` beside its own.

    python -m benchmarks.ddp                       # two ranks on this machine
    python -m benchmarks.ddp --rate 1gbit          # as root: a rank on each of two hosts
    python -m benchmarks.ddp --json ddp.json

Two hosts are network namespaces with real sockets between them (`benchmarks.rig`); ranks share the
cores of this machine, a thread each, over gloo. Ways take turns. `ms` is the median of a step:
forward, backward, and a step of SGD, on noise; `waited` is what of it `ddp.compress` has stood
still for exchanges. Memory is the peak of a process of its own for each way, after the first step,
in which `DistributedDataParallel` has one bucket, less what there was before the model, over the
bytes of all parameters; two ranks of this machine, whatever the rate. What is freed returns to
the system at once (`MALLOC_MMAP_THRESHOLD_`), which it does not on CPUs if nothing is set.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvd_gradcomp
from benchmarks.fsdp import (
    BATCH,
    FIRST,
    LENGTH,
    ROUNDS,
    WIDTH,
    Row,
    Transformer,
    as_rank,
    on_hosts,
)
from hvd_gradcomp.torch import ddp

RANKS = 2
STOCK = "DistributedDataParallel"
WAYS = (
    STOCK,
    "NoneCompressor()",
    "Int8Compressor(exchange='two_shot')",
    "OneBitCompressor(exchange='two_shot')",
    "PowerSGDCompressor(rank=4)",
    "ChunkedTopKCompressor()",
)
LAYERS, BUCKET_MB = 16, 5  # 12.6 million parameters, 11 buckets
STEPS = 4  # before memory is looked at


class Training:
    """A model that is trained in one way.

    Args:
        way: of `WAYS`.
        view: see `DistributedDataParallel`.
        released: see `release_buckets` of `ddp.compress`.
    """

    def __init__(self, method: str, view: bool = True, released: bool = False) -> None:
        torch.manual_seed(1)
        self.model: Any = DistributedDataParallel(
            Transformer(LAYERS), bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=view
        )
        self.state: Any = None
        if method != STOCK:
            compressor = eval(method, vars(hvd_gradcomp))
            how = {"bucket_bytes": BUCKET_MB << 20, "release_buckets": released}
            self.state = ddp.compress(self.model, compressor, rollback=False, **how)
        self._optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    def step(self) -> float:
        """Make a step; return its milliseconds."""
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=self._generator)
        dist.barrier()
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self._optimizer.step()
        return 1e3 * (time.perf_counter() - begin)


def measured() -> list[Row]:
    """Return a row for each way; all ranks call it."""
    torch.set_num_threads(1)
    trainings = {method: Training(method) for method in WAYS}
    times: dict[str, list[float]] = {method: [] for method in WAYS}
    waited: dict[str, list[float]] = {method: [] for method in WAYS}
    for turn in range(FIRST + ROUNDS):
        for method, training in trainings.items():
            before = training.state.stats().seconds_waited if training.state else 0.0
            took = training.step()
            if turn >= FIRST:
                after = training.state.stats().seconds_waited if training.state else 0.0
                times[method].append(took)
                waited[method].append(1e3 * (after - before))
    stock = statistics.median(times[STOCK])
    rows = []
    for method in WAYS:
        ms = statistics.median(times[method])
        row = {"method": method, "ms": ms, "of_stock": ms / stock, "spread": _spread(times[method])}
        rows.append({**row, "waited": statistics.median(waited[method])})
    return rows


def _spread(times: list[float]) -> float:
    """Return the distance of the quartiles, over the median."""
    first, middle, last = statistics.quantiles(times, n=4)
    return (last - first) / middle


def memory(method: str, view: bool, released: bool) -> float:
    """Return this process's peak memory in a training, in parameters; all ranks call it."""
    torch.set_num_threads(1)
    torch.randn(8, 8, requires_grad=True).square().sum().backward()
    dist.barrier()
    before = _resident("VmRSS")
    training = Training(method, view, released)
    training.step()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    for _ in range(STEPS):
        training.step()
    size = sum(p.nbytes for p in training.model.parameters())
    return (_resident("VmHWM") - before) / size


def _resident(which: str) -> int:
    """Return bytes of this process: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(which))
    return int(line.split()[1]) << 10


def spawned(rank: int, folder: str, how: tuple[str, bool, bool] | None) -> None:
    """Measure as one of the processes of this machine; rank 0 writes what it has."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    result: Any = measured() if how is None else memory(*how)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def spawn(how: tuple[str, bool, bool] | None = None) -> Any:
    """Return what the processes of this machine measure: rows, or the memory of one way."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(spawned, (folder, how), RANKS)
        return json.loads(Path(folder, "found.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ddp", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rate", help="of the link between two hosts, such as 1gbit; as root")
    parser.add_argument("--no-memory", action="store_true", help="steps only")
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        as_rank(measured)
        return
    rows = on_hosts(options.rate, "benchmarks.ddp") if options.rate else spawn()
    where = f"two hosts at {options.rate}" if options.rate else "this machine"
    print(f"{RANKS} ranks on {where}, {os.cpu_count()} cores, gloo\n")
    print("| method | ms a step | spread | / stock | waited |\n|---|--:|--:|--:|--:|")
    for row in rows:
        ms, ratio, waited = f"{row['ms']:,.1f}", f"{row['of_stock']:.2f}", f"{row['waited']:,.1f}"
        print(f"| {row['method']} | {ms} | {row['spread']:.0%} | {ratio} | {waited} |")
    kept = []
    if not options.no_memory:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 18)
        print("\nPeak memory, in parameters\n")
        print("| method | DDP | gradient_as_bucket_view | both released |\n|---|--:|--:|--:|")
        for method in WAYS:
            hows = [(False, False), (True, False), (True, True)][: 2 if method == STOCK else 3]
            peaks = [spawn((method, *how)) for how in hows]
            kept.append({"method": method, "peaks": peaks})
            shown = [f"{x:.1f}" for x in peaks] + [""] * (3 - len(peaks))
            print(f"| {method} | {' | '.join(shown)} |")
    if options.json:
        result = {"where": where, "rows": rows, "memory": kept}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
