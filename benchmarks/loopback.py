"""Whole exchanges of ResNet-50's gradients beside the plain way to send the largest elements.

    make bench-loopback                                          # or, with any number of ranks:
    horovodrun --gloo -np 2 python -m benchmarks.loopback
    horovodrun --gloo -np 2 python -m benchmarks.loopback --rounds 15 --check

What `hvd-gradcomp bench` measures, for top-k methods, and in the same run what one writes first:
`torch.topk` a layer, then an allgather of float32 values and one of int64 indices for each. Below
the table stands whether two bars hold: less time than dense, and less than half of plain top-k.
With `--check` a bar that does not hold is exit status 1.
"""

from __future__ import annotations

import argparse
import sys
import time

import horovod.torch as horovod
import torch

from hvd_gradcomp import DGCCompressor, SparseGDCompressor
from hvd_gradcomp.cli import bench
from hvd_gradcomp.planning.description import brief
from hvd_gradcomp.tuning.measure import (
    CompressedExchange,
    DenseExchange,
    Exchange,
    Gradients,
    measure,
)
from hvd_gradcomp.tuning.models import load
from hvd_gradcomp.tuning.over_horovod import HorovodJob

DENSITY = 0.001
PLAIN = "torch.topk 0.1 %, int64 indices"
BARRED = (SparseGDCompressor(density=DENSITY), DGCCompressor(density=DENSITY, momentum=0.9))


def largest(gradient: torch.Tensor) -> int:
    return max(1, round(DENSITY * gradient.numel()))


class PlainTopK(Exchange):
    def perform(self, gradients: list[torch.Tensor]) -> tuple[float, float]:
        handles = []
        for place, gradient in reversed(list(enumerate(gradients))):
            flat = gradient.view(-1)
            _, index = flat.abs().topk(largest(flat))
            values = horovod.allgather_async(flat[index], name=f"topk.values.{place}")
            indices = horovod.allgather_async(index, name=f"topk.indices.{place}")
            handles.append((flat, values, indices))
        submitted, waited = time.perf_counter(), 0.0
        for flat, values, indices in handles:
            start = time.perf_counter()
            places, what = horovod.synchronize(indices), horovod.synchronize(values)
            waited += time.perf_counter() - start
            flat.zero_().index_add_(0, places, what).div_(horovod.size())
        return submitted, waited


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--check", action="store_true", help="exit status 1 if a bar does not hold")
    options = parser.parse_args()
    job = HorovodJob()
    torch.set_num_threads(1)
    gradients = Gradients(job, load("resnet50", shapes_only=True))
    ways = {bench.DENSE: DenseExchange(job), PLAIN: PlainTopK(job)}
    for compressor in BARRED:
        ways[brief(compressor)] = CompressedExchange(job, compressor, gradients.layers)
    rows = {
        name: measure(exchange, gradients, options.rounds, 2) for name, exchange in ways.items()
    }
    rows[PLAIN].bytes_sent = sum(12.0 * largest(g) for g in gradients.tensors)
    bars = {  # equal on all ranks, as the times are
        f"{name}: of {bar}": rows[name].median() / limit
        for name in map(brief, BARRED)
        for bar, limit in (
            ("dense", rows[bench.DENSE].median()),
            ("half of plain top-k", rows[PLAIN].median() / 2),
        )
    }
    if horovod.rank() == 0:
        print(bench.table([bench.figures_of(*row, rows[bench.DENSE]) for row in rows.items()]))
        for bar, share in bars.items():
            print(f"{bar} {share:.2f}, {'holds' if share < 1 else 'FAILS'}")
    horovod.shutdown()
    return int(options.check and any(share >= 1 for share in bars.values()))


if __name__ == "__main__":
    sys.exit(main())
