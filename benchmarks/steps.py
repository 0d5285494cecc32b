"""Whole steps of an optimizer: from the beginning of backward to the end of `step`.

    horovodrun --gloo -np 2 python -m benchmarks.steps
    horovodrun --gloo -np 2 python -m benchmarks.steps --clip        # clips in between

The model has ResNet-50's 161 parameters and a backward that costs next to nothing, so that what is
timed is the exchange and what the optimizer does around it. It uses nothing but what a user does:
any checkout can be timed by it (`PYTHONPATH=OTHER python THIS/benchmarks/steps.py`), one after the
other in the same minutes. The time of a copy of all gradients stands beside, since machines differ.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.tuning.models import load

COMPRESSORS = {
    "none": None,
    "Strom": hvd.StromCompressor(tau=3.0),
    "Variance": hvd.VarianceCompressor(alpha=4.3, moments="step"),
    "Sparse GD": hvd.SparseGDCompressor(density=0.001),
    "QSGD": hvd.QSGDCompressor(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clip", action="store_true")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    shapes = [p.shape for p in load("resnet50", shapes_only=True).module.parameters()]
    generator = torch.Generator().manual_seed(hvd.rank())
    noise = [torch.randn(shape, generator=generator) for shape in shapes]
    flat = torch.cat([x.flatten() for x in noise])
    copies = []
    for _ in range(5):
        start = time.perf_counter()
        flat.clone().copy_(flat)
        copies.append(time.perf_counter() - start)
    if hvd.rank() == 0:
        print(f"copy and clone of all gradients: {1000 * min(copies):.1f} ms")
    for name, compressor in COMPRESSORS.items():
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.0), compression=compressor
        )
        times = []
        for _ in range(options.rounds):
            optimizer.zero_grad()
            loss = torch.stack([(p * x).sum() for p, x in zip(parameters, noise)]).sum()
            hvd.barrier()
            start = time.perf_counter()
            loss.backward()
            if options.clip:
                nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            times.append(time.perf_counter() - start)
        if hvd.rank() == 0:
            median = 1000 * statistics.median(times[3:])
            print(f"{name:10} {median:8.1f} ms, fastest {1000 * min(times):.1f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
