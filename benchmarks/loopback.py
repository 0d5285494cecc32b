"""A whole exchange between ranks on one machine: ResNet-50's gradients, several ways, in one run.

    make bench-loopback                                          # or, with any number of ranks:
    horovodrun --gloo -np 2 python -m benchmarks.loopback
    horovodrun --gloo -np 2 python -m benchmarks.loopback --methods "StromCompressor(tau=0.1)"

Each round times in turn, after a barrier, and counts the slowest rank: stock Horovod's dense
allreduce (one named asynchronous call a layer, so that its fusion works); the plain way to send the
largest elements (`torch.topk` a layer, then an allgather of float32 values and one of int64 indices
for each); and, for each compressor, all of encode, collectives and decode as the PyTorch frontend
drives them; of GradiVeQ and LGC the compressed phase, with bases and networks that have learned
nothing, which cost the same. Gradients are noise of another scale each layer, drawn anew outside
of what is timed. One thread a rank.

`ms` is the median over rounds, `min` and `max` their spread. `of dense` and `of plain top-k` are
`ms` over that of these two ways in the same run. `MB a step` is what a rank hands to collectives,
headers and room included, in the last step. Below the table stands for the methods that have to
hold them whether two bars hold: less time than dense, and less than half of plain top-k. With
`--check` a bar that does not hold is exit status 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as horovod
import torch
from rich.console import Console
from rich.table import Table

import hvd_gradcomp
from benchmarks.learned import STEP, learned
from benchmarks.models import resnet50
from hvd_gradcomp.description import brief
from hvd_gradcomp.torch.engine import Engine, next_name

METHODS = (
    "FP16Compressor()",
    "StromCompressor(tau=1)",
    "SparseGDCompressor(density=0.001)",
    "DGCCompressor(density=0.001, momentum=0.9)",
    "EGCCompressor(K=1024, momentum=0.9)",
    "GradientDroppingCompressor(ratio=0.99)",
    "ScaleComCompressor(density=0.001)",
    "QSGDCompressor(bits=4)",
    "TernGradCompressor()",
    "OneBitCompressor()",
    "GradiVeQCompressor(ratio=8, sample_steps=200)",
    'LGCCompressor("ring_allreduce", momentum=0.9)',
    'LGCCompressor("parameter_server", momentum=0.9)',
)
DENSE, PLAIN = "dense allreduce (stock Horovod)", "torch.topk 0.1 %, int64 indices"
BARRED = ("SparseGDCompressor(density=0.001)", "DGCCompressor(density=0.001, momentum=0.9)")

Exchange = Callable[[list[torch.Tensor]], None]


def dense(gradients: list[torch.Tensor]) -> None:
    """As stock Horovod's optimizer: last layers first, fused by Horovod."""
    handles = [
        horovod.allreduce_async_(g, name=f"dense.{place}")
        for place, g in reversed(list(enumerate(gradients)))
    ]
    for handle in handles:
        horovod.synchronize(handle)


def plain_topk(gradients: list[torch.Tensor]) -> None:
    """What one writes first."""
    handles = []
    for place, g in reversed(list(enumerate(gradients))):
        flat = g.view(-1)
        _, index = flat.abs().topk(max(1, round(0.001 * flat.numel())))
        values = horovod.allgather_async(flat[index], name=f"topk.values.{place}")
        indices = horovod.allgather_async(index, name=f"topk.indices.{place}")
        handles.append((flat, values, indices))
    for flat, values, indices in handles:
        total = torch.zeros_like(flat)
        total.index_add_(0, horovod.synchronize(indices), horovod.synchronize(values))
        flat.copy_(total.div_(horovod.size()))


def engine_of(compressor: Any, layers: list[tuple[str, tuple[int, ...]]]) -> tuple[Engine, Any]:
    """The exchange of a compressor, and the parameters that it knows."""
    named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in layers]
    engine = Engine(
        named,
        compressor,
        name=next_name(),
        prescale=1.0,
        postscale=1.0 / horovod.size(),
        process_set=horovod.global_process_set,
    )
    if isinstance(compressor, (hvd_gradcomp.GradiVeQCompressor, hvd_gradcomp.LGCCompressor)):
        engine.steps = STEP  # what is measured is the compressed phase
        for bucket in engine.buckets:
            if isinstance(bucket.compressor, type(compressor)):
                bucket.state = learned(bucket.compressor, bucket.ops, bucket.layout, bucket.state)
    return engine, [p for _, p in named]


def exchange_of(engine: Engine, parameters: list[Any]) -> Exchange:
    def exchange(gradients: list[torch.Tensor]) -> None:
        for p, g in zip(reversed(parameters), reversed(gradients)):
            engine.give(p, g)
        for p in parameters:
            engine.take(p)
        engine.clear()

    return exchange


def slowest(seconds: float) -> float:
    """The time of the slowest rank."""
    every = horovod.allgather(torch.tensor([seconds], dtype=torch.float64), name="seconds")
    return float(every.max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="as in hvd_gradcomp")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--settle", type=int, default=20, help="rounds before")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a bar does not hold")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    horovod.init()
    torch.set_num_threads(1)
    layers = [(name, tuple(shape)) for name, shape in resnet50()]
    generator = torch.Generator().manual_seed(1 + horovod.rank())
    scales = [10.0 ** (place % 5 - 4) for place in range(len(layers))]
    gradients = [torch.empty(shape) for _, shape in layers]

    ways: dict[str, Exchange] = {DENSE: dense, PLAIN: plain_topk}
    titles = {DENSE: DENSE, PLAIN: PLAIN}
    engines = {}
    for text in options.methods:
        compressor = eval(text, vars(hvd_gradcomp))
        engines[text], parameters = engine_of(compressor, layers)
        ways[text], titles[text] = exchange_of(engines[text], parameters), brief(compressor)
    times: dict[str, list[float]] = {name: [] for name in ways}
    sent = {}
    for turn in range(options.settle + options.rounds):
        for name, exchange in ways.items():
            if turn < options.settle and name in (DENSE, PLAIN) and turn > 1:
                continue
            for g, scale in zip(gradients, scales):
                g.normal_(generator=generator).mul_(scale)
            before = engines[name].stats().bytes_sent if name in engines else 0
            horovod.barrier()
            start = time.perf_counter()
            exchange(gradients)
            took = slowest(time.perf_counter() - start)
            if turn >= options.settle:
                times[name].append(took)
            if name in engines:
                sent[name] = engines[name].stats().bytes_sent - before
    elements = sum(g.numel() for g in gradients)
    sent[DENSE] = 4 * elements
    sent[PLAIN] = sum(12 * max(1, round(0.001 * g.numel())) for g in gradients)
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    bars = {  # equal on all ranks, as the times are
        name: {
            "dense": middle[name] / middle[DENSE],
            "half of plain top-k": 2 * middle[name] / middle[PLAIN],
        }
        for name in BARRED
        if name in middle
    }
    if horovod.rank() == 0:
        table = Table(title=f"ResNet-50's gradients, {horovod.size()} ranks over loopback")
        table.add_column("way")
        for head in ("ms", "min", "max", "of dense", "of plain top-k", "MB a step"):
            table.add_column(head, justify="right")
        for name, seconds in times.items():
            table.add_row(
                titles[name],
                f"{1e3 * middle[name]:.1f}",
                f"{1e3 * min(seconds):.1f}",
                f"{1e3 * max(seconds):.1f}",
                f"{middle[name] / middle[DENSE]:.2f}",
                f"{middle[name] / middle[PLAIN]:.2f}",
                f"{sent[name] / 1e6:.3f}",
            )
        Console(width=120).print(table)
        for name, shares in bars.items():
            for bar, share in shares.items():
                print(f"{titles[name]}: {share:.2f} of {bar}, {'holds' if share < 1 else 'FAILS'}")
        if options.json is not None:
            rows = [{"way": n, "seconds": times[n], "bytes": sent[n]} for n in times]
            options.json.write_text(json.dumps(rows, indent=1))
    horovod.shutdown()
    held = all(share < 1 for shares in bars.values() for share in shares.values())
    return int(options.check and not held)


if __name__ == "__main__":
    sys.exit(main())
