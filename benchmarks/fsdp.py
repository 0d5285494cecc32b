"""Step of a sharded transformer: `fsdp.compress` and `fsdp.local_steps` beside hybrid sharding.

    python -m benchmarks.fsdp                       # two replicas of two shards, on this machine
    python -m benchmarks.fsdp --rate 1gbit          # as root: a replica on each of two hosts
    python -m benchmarks.fsdp --rate 1gbit --json docs/measured/fsdp.json
    python -m benchmarks.fsdp --show docs/measured/fsdp.json

`--json` replaces what was measured in the same place, and keeps the rest; `--show` prints the table
of docs/tutorial/sharded.md.

Two hosts are network namespaces with real sockets between them (`benchmarks.rig`); four ranks share
the cores of this machine, a thread each, over gloo. Ways take turns. `ms` is the median of a step:
forward, backward, and a step of SGD, on noise; of local steps the mean over a whole round, with its
exchange. `/ stock` divides it by that of hybrid sharding, FSDP2's own. Bytes are those that a rank
sends to the other replica in a step, in the mean; a dense ring allreduce between two sends as many
as a shard has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hvd_gradcomp
from hvd_gradcomp.planning.methods import Local
from hvd_gradcomp.torch import fsdp
from hvd_gradcomp.torch.local.local_steps import LocalStepsOptimizer

HOSTS, INSIDE, MARK = 2, 2, "ROWS "
STOCK = "hybrid sharding"
WAYS = (
    STOCK,
    "NoneCompressor()",
    "BF16Compressor()",
    "QSGDCompressor(bits=4)",
    "DGCCompressor(density=0.01, momentum=0.0)",
    "ChunkedTopKCompressor()",
    "PowerSGDCompressor(rank=4)",
    "local(NoneCompressor(), every=15)",
    "local(Int8Compressor(), every=15)",
)
WIDTH, LAYERS, LENGTH, BATCH = 256, 4, 32, 4
ROUNDS, FIRST = 15, 5  # steps that are measured, whole rounds of local steps, after so many

Row = dict[str, Any]


class Transformer(nn.Module):
    """Transformer over noise; 3.2 million parameters in four layers."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Training:
    """A model that is trained in one way.

    Args:
        method: `STOCK`, or an expression of hvd_gradcomp's names, such as those of `WAYS`.
        mesh: replicas and shards, on whose device the model is.
        width, layers: of the model.
    """

    def __init__(self, method: str, mesh: Any, width: int = WIDTH, layers: int = LAYERS) -> None:
        torch.manual_seed(1)
        device = mesh.device_type
        self.model: Any = Transformer(layers, width).to(device)
        self._generator = torch.Generator(device).manual_seed(dist.get_rank())
        self._shape = BATCH, LENGTH, width
        inside = mesh if method == STOCK else mesh["inside"]
        for layer in self.model.layers:
            fully_shard(layer, mesh=inside)
        fully_shard(self.model, mesh=inside)
        self._optimizer: Any = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.bytes_sent: Callable[[], int] = lambda: 0
        self.average: Callable[[list[float]], float] = statistics.median
        if method == STOCK:
            return
        chosen = eval(method, {**vars(hvd_gradcomp), "local": Local})
        if isinstance(chosen, Local):
            self._optimizer = fsdp.local_steps(
                self.model,
                self._optimizer,
                mesh=mesh,
                compression=chosen.compressor,
                every=chosen.every,
            )
            self.bytes_sent = lambda: self._optimizer.stats().bytes_sent
            self.average = statistics.mean
        else:
            state = fsdp.compress(self.model, chosen, mesh=mesh)
            self.bytes_sent = lambda: state.stats().bytes_sent

    def warmed_up(self) -> None:
        """Make a first exchange of local steps; the next round begins with the next step."""
        if isinstance(self._optimizer, LocalStepsOptimizer):
            self._optimizer.exchange()

    def step(self) -> float:
        """Make a step; return its milliseconds."""
        generator = self._generator
        x = torch.randn(self._shape, generator=generator, device=generator.device)
        dist.barrier()
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self._optimizer.step()
        return 1e3 * (time.perf_counter() - begin)


def measured() -> list[Row]:
    """Return a row for each way; all ranks call it."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (HOSTS, INSIDE), mesh_dim_names=("hosts", "inside"))
    trainings = {method: Training(method, mesh) for method in WAYS}
    times: dict[str, list[float]] = {method: [] for method in WAYS}
    sent = dict.fromkeys(WAYS, 0)
    for turn in range(FIRST + ROUNDS):
        for method, training in trainings.items():
            if turn == FIRST:
                training.warmed_up()
                sent[method] = training.bytes_sent()
            took = training.step()
            if turn >= FIRST:
                times[method].append(took)
    stock = statistics.median(times[STOCK])
    shard = sum(p.to_local().numel() for p in trainings[STOCK].model.parameters())
    rows = []
    for method, training in trainings.items():
        ms, bytes_sent = training.average(times[method]), training.bytes_sent() - sent[method]
        each = bytes_sent / ROUNDS if method != STOCK else 4 * shard
        rows.append({"method": method, "ms": ms, "of_stock": ms / stock, "bytes_a_step": each})
    return rows


def spawned(rank: int, folder: str) -> None:
    """Measure as one of the processes of this machine; rank 0 writes the rows."""
    world = HOSTS * INSIDE
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    rows = measured()
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def on_hosts(rate: str, module: str, inside: int = 1) -> list[Row]:
    """Measure with so many ranks on each of two hosts; `module` is the benchmark.

    Raises:
        HostsError: hosts cannot be made here.
        JobError: the ranks have failed.
    """
    from benchmarks.rig import Hosts

    with Hosts(HOSTS, rate) as hosts:
        command = ["python", "-m", module, "--rank"]
        output = hosts.horovodrun(command, ranks_per_host=inside)
    (line,) = (line for line in output.splitlines() if MARK in line)
    rows: list[Row] = json.loads(line.partition(MARK)[2])
    return rows


def as_rank(measured: Callable[[], list[Row]]) -> None:
    """Measure as one of Horovod's ranks; rank 0 prints the rows."""
    import hvd_gradcomp.torch as hvd
    from benchmarks.papers.hook import connect

    hvd.init()
    connect()
    rows = measured()
    if hvd.rank() == 0:
        print(MARK + json.dumps(rows), flush=True)
    hvd.barrier()
    hvd.shutdown()


def table(places: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table of what was measured in several places."""
    wheres = [place["where"].replace("this machine", "one machine") for place in places]
    yield f"| method | bytes a step | {' | '.join(wheres)} |"
    yield "|---|--:" + len(places) * "|--:" + "|"
    by_method = [{row["method"]: row for row in place["rows"]} for place in places]
    for method, first in by_method[0].items():
        cells = [f"{first['bytes_a_step']:,.0f}"]
        for row in (rows.get(method) for rows in by_method):
            if row is None:  # measured before there was this method
                cells.append("")
                continue
            ratio = "" if method == STOCK else f" ({row['of_stock']:.2f})"
            cells.append(f"{row['ms']:,.0f}{ratio}")
        name = method if method == STOCK else f"`{method}`"
        yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fsdp", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rate", help="of the link between two hosts, such as 1gbit; as root")
    parser.add_argument("--json", type=Path, help="where the rows go, beside those of other places")
    parser.add_argument("--show", type=Path, metavar="JSON", help="print what was measured before")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.show:
        print("\n".join(table(json.loads(options.show.read_text()))))
        return
    if options.rank:
        as_rank(measured)
        return
    if options.rate:
        rows = on_hosts(options.rate, "benchmarks.fsdp", INSIDE)
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(spawned, (folder,), HOSTS * INSIDE)
            rows = json.loads(Path(folder, "rows.json").read_text())
    where = f"two hosts at {options.rate}" if options.rate else "this machine"
    print(f"{HOSTS} replicas of {INSIDE} shards on {where}, {os.cpu_count()} cores, gloo\n")
    print("| method | ms a step | / stock | bytes a step |\n|---|--:|--:|--:|")
    for row in rows:
        ms, ratio = f"{row['ms']:,.1f}", f"{row['of_stock']:.2f}"
        print(f"| {row['method']} | {ms} | {ratio} | {row['bytes_a_step']:,.0f} |")
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else []
        places = {place["where"]: place for place in [*known, {"where": where, "rows": rows}]}
        options.json.write_text(json.dumps([*places.values()], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
