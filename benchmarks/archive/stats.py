"""Measures the cost of a stats writer: steps with and without, in turns, in one run.

    horovodrun --gloo -np 2 python -m benchmarks.archive.stats --check
    python -m benchmarks.archive.stats                                     # one rank alone

Gradients of ResNet-50's shapes (25.6 million elements in 161 layers) are given to backward as they
are, exchanged and applied by plain SGD; so a step has no forward pass, and the share is larger than
in a training. Blocks of steps with a `StatsWriter` (JSON lines, and TensorBoard where tensorboardX
is installed), which reads and writes at their end, and without take turns. One thread a rank.

`share` is what readings and writing took, one in `every` steps, of the time of as many steps beside
them: the same machine at the same moment on both sides. `with a writer / without` compares the
blocks themselves, of which each has a reading: that many times `every / block` the share, and the
noise of the machine. With `--check` a share of 1 % or more is exit status 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch

import hvd_gradcomp
import hvd_gradcomp.torch as hvd
from hvd_gradcomp.monitoring.reports import Writer
from hvd_gradcomp.tuning.models import resnet50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="DGCCompressor(density=0.001, momentum=0)")
    parser.add_argument("--every", type=int, default=100, help="steps to a reading, for the share")
    parser.add_argument("--block", type=int, default=20, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=5, help="of each kind")
    parser.add_argument("--check", action="store_true", help="exit status 1 if the bar fails")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in resnet50()]
    parameters = [p for _, p in named]
    compressor = eval(options.method, vars(hvd_gradcomp))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1e-3), named, compression=compressor
    )
    generator = torch.Generator().manual_seed(1 + hvd.rank())
    gradients = [torch.empty(p.shape).normal_(generator=generator) for p in parameters]

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        torch.autograd.backward(parameters, gradients)
        optimizer.step()
        return time.perf_counter() - start

    for _ in range(10):
        step()
    plain: list[float] = []
    watched: list[float] = []
    written: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        writers: list[Writer] = [hvd.JSONLines(Path(folder, "stats.jsonl"))]
        if find_spec("tensorboardX"):
            writers.append(hvd.TensorBoard(folder))
        writer = hvd.StatsWriter(optimizer, options.block, writers)
        for _ in range(options.blocks):
            plain += [step() for _ in range(options.block)]
            started = time.perf_counter()
            for _ in range(options.block):
                watched.append(step())
                writer.step()
            written.append(time.perf_counter() - started - sum(watched[-options.block :]))
        writer.close()
    reading, usual = statistics.median(written), statistics.median(plain)
    share = reading / (options.every * usual)
    if hvd.rank() == 0:
        ratio = (sum(watched) + sum(written)) / sum(plain)
        print(f"a step: {1e3 * usual:.1f} ms (median of {len(plain)})")
        print(f"a reading and its writing: {1e3 * reading:.1f} ms (median of {len(written)})")
        print(f"with a writer / without: {ratio:.4f}, a reading in {options.block} steps")
        bar = "holds" if share < 0.01 else "FAILS"
        print(f"share, a reading in {options.every} steps: {100 * share:.3f} %, {bar}")
    hvd.shutdown()
    return int(options.check and hvd.rank() == 0 and share >= 0.01)


if __name__ == "__main__":
    sys.exit(main())
