"""Memory that a training needs beyond the model, its gradients and the optimizer, by method.

    python -m benchmarks.memory                                      # two ranks of this machine
    python -m benchmarks.memory --json docs/measured/memory.json
    python -m benchmarks.memory --only SparseGD OneBit
    python -m benchmarks.memory --show                               # the table of docs/limits.md

Two processes over gloo train convolutions and linear layers by each method of `docs.methods`: by
the hook of `DistributedDataParallel`, by that of FSDP2, by local steps and by `MomentumExchange`.
All figures are bytes for each parameter; with FSDP2, for each that this rank has a shard of, which
is here all of them. `stats().memory` names what is kept between steps. It is counted a second time:
the C library maps each allocation of 64 KiB and more by itself and knows the sum of them, whoever
has made them. If what it has after a step, less what it has without the method, is more than what
`stats()` names, by .1 bytes for each parameter, then something is kept that has no name, and this
fails. (Smaller tensors have a name and are not in that sum.) `peak` is what a step
needs on top while it runs, for payloads, replies and temporaries: the process's peak of resident
memory less that after the step, less the same without the method. Scratch and peak belong to
buckets, here of at most 5 MiB, so of a larger model they are a smaller part. Nothing is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from docs.methods import METHODS, Method
from hvd_gradcomp import GradiVeQCompressor, LGCCompressor
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.planning.methods import Local, Momentum
from hvd_gradcomp.torch import ddp, fsdp

MEASURED = Path(__file__).parents[1] / "docs" / "measured" / "memory.json"
RANKS, EVERY, SEED = 2, 2, 1
STEPS = 2 * EVERY  # two rounds; the second is watched
THRESHOLD = 1 << 16  # bytes of an allocation that the C library maps by itself
EXACT = 0.1  # bytes for each parameter: mappings are of whole pages
HOOK, SHARDED = "ddp.compress", "fsdp.compress"
LOCAL, SHARDED_LOCAL = "ddp.LocalSteps", "fsdp.local_steps"
MOMENTUM = "ddp.MomentumExchange"
# FSDP2's hook hands shards to the reducer that the hook of `DistributedDataParallel` hands layers.
ALSO_SHARDED = (
    "NoneCompressor()",
    "OneBitCompressor()",
    "DGCCompressor()",
    "ChunkedTopKCompressor()",
)
PURPOSES_ON_PAGE = ("state", "rollback", "buckets", "global", "outer", "scratch")
PURPOSES = ("state", "rollback", "buckets", "moments", "scratch", "global", "outer", "in flight")

Row = dict[str, Any]


class Case(NamedTuple):
    """A method, and what exchanges by it.

    Attributes:
        host: entry point.
        method: its name in the table of all methods.
        compressor: None for a training without this package.
        settings: further arguments of the entry point.
    """

    host: str
    method: str
    compressor: Compressor | None
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.host}: {self.method}"


def cases() -> list[Case]:
    """Return all cases: a training without a method for each entry point, then its methods."""
    stock = {host: Case(host, "", None, {}) for host in (HOOK, SHARDED, LOCAL, SHARDED_LOCAL)}
    listed: dict[str, list[Case]] = {host: [case] for host, case in stock.items()}
    listed[MOMENTUM] = [Case(MOMENTUM, "", None, {})]
    for method in METHODS:
        if isinstance(method.in_step, Local):
            settings = {"every": EVERY, "outer": method.in_step.outer}
            for host in (LOCAL, SHARDED_LOCAL):
                listed[host].append(Case(host, method.code, method.instance, settings))
        elif isinstance(method.in_step, Momentum):
            settings = {"warmup_steps": 2}
            listed[MOMENTUM].append(Case(MOMENTUM, method.code, method.instance, settings))
        else:
            for host in (HOOK, SHARDED) if method.code in ALSO_SHARDED else (HOOK,):
                listed[host].append(Case(host, method.code, _short(method), {}))
    return [case for some in listed.values() for case in some]


def _short(method: Method) -> Compressor:
    """Return a compressor of which a few steps reach the last phase."""
    if isinstance(method.instance, LGCCompressor):
        return LGCCompressor(full_steps=1, train_steps=2, momentum=0.9)
    if isinstance(method.instance, GradiVeQCompressor):
        return GradiVeQCompressor(ratio=8, warmup_steps=1, sample_steps=2, compress_steps=20)
    return method.instance


def model() -> nn.Sequential:
    """Return a model of 4.1 million parameters, whose activations are small."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.Conv2d(128, 256, 3, padding=1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 1024),
        nn.Linear(1024, 1024),
        nn.Linear(1024, 1024),
        nn.Linear(1024, 512),
    )


# -- one training ----------------------------------------------------------------------------------


class Training:
    """A model that is trained by one case.

    Attributes:
        stats: returns the statistics; None without a method.
    """

    def __init__(self, case: Case, mesh: Any) -> None:
        self.model: Any = model()
        self.stats: Callable[[], Any] | None = None
        if case.host in (SHARDED, SHARDED_LOCAL):
            for layer in self.model:
                if [*layer.parameters()]:
                    fully_shard(layer, mesh=mesh["inside"])
            fully_shard(self.model, mesh=mesh["inside"])
        if case.host == HOOK:
            self.model = DistributedDataParallel(
                self.model, bucket_cap_mb=5, gradient_as_bucket_view=True
            )
        adam = case.host == MOMENTUM
        self._optimizer: Any = (
            torch.optim.Adam(self.model.parameters(), 1e-4)
            if adam
            else torch.optim.SGD(self.model.parameters(), 1e-4)
        )
        self._generator = torch.Generator().manual_seed(dist.get_rank())
        if case.compressor is None:
            return
        how = {"compression": case.compressor, "bucket_bytes": 5 << 20, **case.settings}
        if case.host == HOOK:
            self.stats = ddp.compress(self.model, **how).stats
        elif case.host == SHARDED:
            self.stats = fsdp.compress(self.model, mesh=mesh, **how).stats
        elif case.host == SHARDED_LOCAL:
            self._optimizer = fsdp.local_steps(self.model, self._optimizer, mesh=mesh, **how)
            self.stats = self._optimizer.stats
        else:
            wrap = ddp.LocalSteps if case.host == LOCAL else ddp.MomentumExchange
            self._optimizer = wrap(self._optimizer, self.model.named_parameters(), **how)
            self.stats = self._optimizer.stats

    def step(self) -> None:
        x = torch.randn(1, 3, 4, 4, generator=self._generator)
        self._optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self._optimizer.step()


class _Mallinfo(ctypes.Structure):
    """Struct of the C library's `mallinfo2`; `hblkhd` has the bytes that were mapped."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def mapped() -> int:
    """Return the bytes of all allocations of this process from `THRESHOLD` bytes on."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    for _ in range(3):  # what a finalizer releases may be garbage too
        gc.collect()
        time.sleep(0.1)  # gloo's threads let go of what they have sent
    return int(mallinfo().hblkhd)


def resident(which: str) -> int:
    """Return bytes of this process: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(which))
    return int(line.split()[1]) << 10


def measured(case: Case, mesh: Any) -> Row:
    """Return bytes that are kept, that `stats` names, and that a step needs besides."""
    before = mapped()
    training = Training(case, mesh)
    for _ in range(STEPS + 1):
        training.step()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    for _ in range(EVERY):
        training.step()
    kept = mapped() - before  # local steps: in the middle of a round
    peak = resident("VmHWM") - resident("VmRSS")
    elements = sum(p.numel() for p in training.model.parameters())
    row = {"host": case.host, "method": case.method, "elements": elements}
    row |= {"kept": kept, "peak": peak}
    if training.stats is not None:
        stats = training.stats()
        row["memory"] = stats.memory
        row["payloads"] = (stats.bytes_sent + stats.bytes_received) // (STEPS + 1 + EVERY)
    return row


def checked(rows: Sequence[Row]) -> list[Row]:
    """Return rows in bytes for each parameter, less what the host takes without a method.

    Raises:
        AssertionError: something is kept that `stats()` does not name.
    """
    stock = {row["host"]: row for row in rows if not row["method"]}
    result = []
    for row in rows:
        if not row["method"]:
            continue
        plain, elements = stock[row["host"]], row["elements"]
        kept = (row["kept"] - plain["kept"]) / elements
        memory = {name: size / elements for name, size in row["memory"].items()}
        if kept - sum(memory.values()) > EXACT:
            raise AssertionError(
                f"{row['host']}, {row['method']}: the C library counts {kept:.3f} bytes for each "
                f"parameter that are kept, and stats() names {memory}"
            )
        result.append(
            {
                "host": row["host"],
                "method": row["method"],
                "memory": {name: round(size, 3) for name, size in memory.items()},
                "kept": round(kept, 3),
                "peak": round(max(row["peak"] - plain["peak"], 0) / elements, 3),
                "payloads": round(row["payloads"] / elements, 3),
            }
        )
    return result


def as_rank(rank: int, folder: str, only: Sequence[str]) -> None:
    """Measure as one of the two processes; the first one writes what it has."""
    torch.set_num_threads(1)
    logging.getLogger("hvd_gradcomp").setLevel(logging.ERROR)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("hosts", "inside"))
    chosen = [case for case in cases() if not case.method or is_chosen(case, only)]
    measured(chosen[0], mesh)  # what is made once in a process
    rows = []
    for case in chosen:
        rows.append(measured(case, mesh))
        if rank == 0:
            print(case.name, rows[-1], file=sys.stderr, flush=True)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def is_chosen(case: Case, only: Sequence[str]) -> bool:
    """Return True if a case has one of the words in its name, or there are none."""
    return not only or any(word.lower() in case.name.lower() for word in only)


def spawn(only: Sequence[str] = ()) -> list[Row]:
    """Return what two processes of this machine measure."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(THRESHOLD)
    os.environ["MKL_DISABLE_FAST_MM"] = "1"  # else it keeps its own buffers of LAPACK
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(as_rank, (folder, only), RANKS)
        return checked(json.loads(Path(folder, "rows.json").read_text()))


def merged(before: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Return rows that were measured before, and in their place those of today."""
    known = {(row["host"], row["method"]): row for row in (*before, *rows)}
    names = [(case.host, case.method) for case in cases()]
    return [known[name] for name in names if name in known]


def table(rows: Sequence[Row]) -> str:
    """Return the page's table, as Markdown."""
    heads = ["entry point", "method", *PURPOSES_ON_PAGE, "kept", "peak of a step"]
    lines = [heads, ["---", "---", *["--:"] * (len(heads) - 2)]]
    for row in rows:
        memory = row["memory"]
        numbers = [memory.get(name, 0.0) for name in PURPOSES_ON_PAGE]
        cells = [f"`{row['host']}`", f"`{row['method'].replace('Compressor(', '(')}`"]
        lines.append([*cells, *map(_shown, [*numbers, sum(memory.values()), row["peak"]])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(size: float) -> str:
    """Format bytes for each parameter; nothing for none."""
    return f"{size:.1f}" if size >= EXACT else ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", nargs="+", default=[], help="words of methods or entry points")
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--show", action="store_true", help="print the page's table")
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(MEASURED.read_text())))
        return
    rows = spawn(options.only)
    print(table(rows))
    if options.json:
        before = json.loads(options.json.read_text()) if options.json.exists() else []
        options.json.write_text(json.dumps(merged(before, rows), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
