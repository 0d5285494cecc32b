"""The same training with stock Horovod and with the drop-in, for exact comparison."""

from __future__ import annotations

import sys

import horovod.torch as stock
import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from tests.parallel.workers.results import digest, write


def train(module, dtype, scale=1.0, **options) -> str:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 5)).to(dtype)
    optimizer = module.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        **options,
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(20):
        x = torch.randn(8, 30, generator=generator).to(dtype)
        optimizer.zero_grad()
        for _ in range(options.get("backward_passes_per_step", 1)):
            (scale * model(x).square().sum(1).mean()).backward()
        optimizer.step()
    return digest(p.detach().double().numpy() for p in model.parameters())


def train_convolution(compression) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 5))
    optimizer = stock.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), compression
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(10):
        x = torch.randn(8, 1, 8, 8, generator=generator)
        optimizer.zero_grad()
        model(x).square().sum(1).mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def projected() -> list:
    """GradiVeQ inside stock Horovod, with a basis that leaves nothing out."""
    generator = torch.Generator().manual_seed(5)  # the same samples, so the same basis, everywhere
    samples = torch.randn(80, 4, 1, 3, 3, generator=generator)
    fitted = hvd.GradiVeQCompressor(ratio=1, reuse=1).fit([samples])
    weights, plain = train_convolution(fitted), train_convolution(stock.Compression.none)
    away = max(float((a - b).abs().max()) for a, b in zip(weights, plain))
    return [digest(p.numpy() for p in weights), away]


def main(folder: str) -> None:
    hvd.init()
    torch.set_num_threads(1)
    cases = {
        "float32": (torch.float32, {}),
        "float64": (torch.float64, {}),
        "float16": (torch.float16, {}),
        "sum": (torch.float32, {"op": hvd.Sum}),
        "predivide": (torch.float32, {"gradient_predivide_factor": 3.0}),
        "passes": (torch.float32, {"backward_passes_per_step": 3}),
    }
    result = {}
    for name, (dtype, options) in cases.items():
        ours = train(hvd, dtype, compression=hvd.NoneCompressor(), **options)
        result[name] = [ours, train(stock, dtype, **options)]
    half = train(hvd, torch.float32, compression=hvd.FP16Compressor())
    result["fp16"] = [half, train(stock, torch.float32, compression=stock.Compression.fp16)]
    linear = train(stock, torch.float32, compression=hvd.NoneCompressor())
    result["ours inside stock"] = [linear, result["float32"][1]]
    try:
        train(stock, torch.float32, compression=hvd.VarianceCompressor())
        message = ""
    except TypeError as error:
        message = str(error)
    write(
        folder,
        hvd.rank(),
        {"pairs": result, "message": message, "projected": projected()},
    )


if __name__ == "__main__":
    main(sys.argv[1])
