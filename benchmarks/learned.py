"""Measures GradiVeQ, PowerSGD and LGC's networks, in copies of ResNet-50's gradient.

    python -m benchmarks.learned                 # one thread
    python -m benchmarks.learned --device cuda   # needs torch only, no Horovod

GradiVeQ with its defaults, a ratio of 8: encode (cut into slices, project, the local loss) and
decode of all convolutions, in the buckets of the PyTorch frontend; `of GEMM` is their time over
that of the matrix products alone, on slices that lie ready. PowerSGD at rank 4: one rank's step of
all buckets, beside the four products that it takes of each matrix: both factors, what a rank's own
add up to, and what the mean's do. LGC at 0.1 %, the vector of all layers
between the first and the last: one pass of encoder and decoder, and one training step on the
vectors of `--ranks` ranks. Medians over rounds in which all are measured in turn. Bases are
random: they cost the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hvd_gradcomp import GradiVeQCompressor, LGCCompressor, PowerSGDCompressor
from hvd_gradcomp.algorithms.gradiveq import projection
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.core.layout import plan_buckets
from hvd_gradcomp.method.compressor import Context
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning.assignment import plan
from hvd_gradcomp.runtime.program_runner import ProgramRunner
from hvd_gradcomp.tuning.models import resnet50

BUCKET_BYTES = 25 << 20  # as the PyTorch frontend


def gradiveq(ops: TorchOps, layers: Any) -> dict[str, Callable[[], Any]]:
    """Encode, decode, and their matrix products, of all convolutions."""
    compressor = GradiVeQCompressor()
    buckets = []
    for one, layout in plan(compressor, layers, BUCKET_BYTES):
        if isinstance(one, GradiVeQCompressor):
            state = one.rehearsed(ops, layout, one.init(ops, layout), 10_000)
            buckets.append((layout, torch.randn(layout.size, device=ops.device), state))
    pairs = []
    for layout, gradient, state in buckets:
        for cut, _, _, basis, _ in projection.groups_of(compressor.slicing, ops, layout, state):
            pairs.append((cut.cut(ops, gradient).contiguous(), basis.contiguous()))

    def encode() -> list[Any]:
        return [projection.encode(compressor.slicing, ops, *bucket)[0] for bucket in buckets]

    codes = encode()

    def decode() -> None:
        for (layout, gradient, state), code in zip(buckets, codes):
            projection.decode(compressor.slicing, ops, layout, code, state, out=gradient)

    def products() -> None:
        for slices, basis in pairs:
            torch.matmul(torch.matmul(slices, basis), basis.T)

    size = sum(layout.elements for layout, _, _ in buckets)
    print(f"GradiVeQ: {size:,} elements in {len(pairs)} convolutions, {len(buckets)} buckets")
    return {
        "GradiVeQ, encode": encode,
        "GradiVeQ, decode": decode,
        "GradiVeQ, matrix products alone": products,
    }


def powersgd(ops: TorchOps, layers: Any) -> dict[str, Callable[[], Any]]:
    """A step of all buckets, and its matrix products alone."""
    compressor, rank = PowerSGDCompressor(rank=4), 4
    buckets = []
    for layout in plan_buckets(list(reversed(layers)), BUCKET_BYTES, compressor.block):
        buckets.append((layout, torch.randn(layout.size, device=ops.device)))
    states = [compressor.init(ops, layout) for layout, _ in buckets]
    matrices = [
        gradient[m.start : m.start + m.rows * m.columns].view(m.rows, m.columns).clone()
        for layout, gradient in buckets
        for m in compressor.matrices(layout).matrices
    ]
    factors = [[torch.randn(n, rank, device=ops.device) for n in m.shape] for m in matrices]

    def step() -> None:
        for number, (layout, gradient) in enumerate(buckets):
            gradient[:1] = 1.0  # the last result is the next gradient
            program = ProgramRunner(
                compressor.aggregate(ops, Context(layout, 0, 1, 0), gradient, states[number])
            )
            request = program.send(None)
            while request is not None:  # alone in its world, a rank's sum is its own
                request = program.send(request.tensor)
            _, states[number] = program.result

    def products() -> None:
        for m, (p, q) in zip(matrices, factors):
            torch.matmul(m, q), torch.matmul(m.T, p), torch.matmul(p, q.T), torch.matmul(p, q.T)

    print(f"PowerSGD: {len(matrices)} matrices, {len(buckets)} buckets")
    return {"PowerSGD, step": step, "PowerSGD, matrix products alone": products}


def networks(ops: TorchOps, layers: Any, ranks: int) -> dict[str, Callable[[], Any]]:
    """Passes and training of LGC's autoencoder."""
    rows: dict[str, Callable[[], Any]] = {}
    for pattern, title in (("ring_allreduce", "ring"), ("parameter_server", "server")):
        compressor = LGCCompressor(pattern, momentum=0.9)
        planned = plan(compressor, layers, BUCKET_BYTES, ranks=ranks)
        (layout,) = (layout for one, layout in planned if isinstance(one, LGCCompressor))
        selected = compressor.topk.capacity(layout)
        state = compressor.start(ops, layout, ranks)
        vectors = torch.randn(ranks, selected, device=ops.device)
        padded = torch.nn.functional.pad(vectors, (0, -selected % autoencoder.STRIDE))
        code = autoencoder.encode(ops, state.encoder, padded[:1])
        channel = padded * (padded.abs() > 1.6) if compressor.by_server else None
        if title == "ring":
            print(f"LGC: a vector of {selected:,} elements, a code of {code.numel():,}")
            rows["LGC, encoder, one vector"] = lambda e=state.encoder, x=padded[:1]: (
                autoencoder.encode(ops, e, x)
            )
            index = torch.arange(selected, device=ops.device)
            context = Context(layout, 0, ranks, 0)
            loss = compressor.exchange.loss(ops, context, 0, index, vectors)
        else:
            loss = _server_loss(ops, padded, channel)
        rows[f"LGC {title}, decoding, {state.decoder.shape[0]} head(s)"] = (
            lambda d=state.decoder, c=code, j=channel: autoencoder.decode(ops, d, c, j)
        )
        rows[f"LGC {title}, training step, {ranks} ranks"] = lambda c=compressor, s=state, f=loss: (
            c.trainer.step(ops, s, 0, f)
        )
    return rows


def _server_loss(ops: TorchOps, x: Any, innovation: Any) -> Any:
    def loss(encoder: Any, decoder: Any) -> tuple[Any, ...]:
        codes = autoencoder.encode(ops, encoder, x)
        missed = autoencoder.decode(ops, decoder, codes[:1], innovation) - x
        rec = (missed * missed).sum()
        away = codes - codes.mean(0, keepdim=True)
        return rec + (away * away).sum() * x.shape[0], rec, (x * x).sum()

    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ops = TorchOps(options.device)
    layers = [(name, shape, "float32") for name, shape in resnet50()]
    size = sum(torch.Size(shape).numel() for _, shape, _ in layers)
    source, target = torch.randn(2, size, device=ops.device)
    rows: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(source)}
    rows |= gradiveq(ops, layers) | powersgd(ops, layers) | networks(ops, layers, options.ranks)
    times: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(options.rounds + 2):
        for name, body in rows.items():
            _finish(options.device)
            start = time.perf_counter()
            body()
            _finish(options.device)
            if turn > 1:
                times[name].append(time.perf_counter() - start)
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    table = Table(title=f"ResNet-50, {size:,} elements, {options.device}")
    table.add_column("what")
    for head in ("ms", "min", "max", "copies", "of GEMM"):
        table.add_column(head, justify="right")
    for name, seconds in times.items():
        method = name.split(",")[0]
        alone = middle.get(f"{method}, matrix products alone")
        table.add_row(
            name,
            f"{1e3 * middle[name]:.1f}",
            f"{1e3 * min(seconds):.1f}",
            f"{1e3 * max(seconds):.1f}",
            f"{middle[name] / middle['copy']:.1f}",
            f"{middle[name] / alone:.2f}" if alone else "",
        )
    Console(width=100).print(table)
    both = middle["GradiVeQ, encode"] + middle["GradiVeQ, decode"]
    alone = middle["GradiVeQ, matrix products alone"]
    print(
        f"GradiVeQ, encode and decode: {both / middle['copy']:.1f} copies, "
        f"{both / alone:.2f} of the matrix products alone"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(times, indent=1))


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
