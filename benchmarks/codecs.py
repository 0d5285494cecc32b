"""Encode and decode of one step, in units of copying the same gradient once.

    python -m benchmarks.codecs                  # ResNet-50's 161 shapes, one thread
    python -m benchmarks.codecs --device cuda    # needs torch only, no Horovod
    python -m benchmarks.codecs --undo           # what `nonfinite="skip"` costs, with a scaler too

Each row is the median over steps, after the capacity has settled, of one rank's encode (all
buckets) and of decoding the payloads of `--ranks` ranks. `copies` is their sum over one
`out.copy_(g)` of the whole gradient, measured in turn with them. Thresholds are set so that the
element ratio is at least `--ratio`. `pack` is laying the gradients of 161 layers into the buckets,
which Horovod's own fusion buffer does as well; it is not part of `copies`. `extra` is the largest
memory beyond state, gradient and result, in buckets; `calls` are framework operator calls per step
(on a GPU: the kernels and copies that were launched).
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

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_gradcomp import (
    Compressor,
    DGCCompressor,
    EGCCompressor,
    FP16Compressor,
    GradientDroppingCompressor,
    HybridCompressor,
    NoneCompressor,
    OneBitCompressor,
    QSGDCompressor,
    ScaleComCompressor,
    SparseGDCompressor,
    StromCompressor,
    TernGradCompressor,
    VarianceCompressor,
)
from hvd_gradcomp.aggregator import Context, leaves
from hvd_gradcomp.collectives import Allgather, Switch
from hvd_gradcomp.description import brief
from hvd_gradcomp.layout import plan_buckets
from hvd_gradcomp.models import resnet50
from hvd_gradcomp.ops.torch import TorchOps

BUCKET_BYTES = 25 << 20  # as the PyTorch frontend


class _Calls(TorchDispatchMode):
    """Counts the operators that reach the framework."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _operators(body: Callable[[], Any]) -> tuple[int, Any]:
    """How many operators `body` calls, and its result."""
    with _Calls() as counted:
        result = body()
    return counted.count, result


def _launches(body: Callable[[], Any]) -> tuple[int, Any]:
    """How many kernels and copies `body` has a GPU do, and its result."""
    with torch.profiler.profile() as profile:
        result = body()
        torch.cuda.synchronize()
    events = profile.events() or ()
    return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in events), result


def _peak_bytes(body: Callable[[], Any], device: str) -> tuple[int, Any]:
    """The most memory that `body` held beyond what was there before, and its result."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = body()
        return torch.cuda.max_memory_allocated() - before, result
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = body()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak, result


class Step:
    """One rank's buckets of a model, with gradients that a threshold can pick few of."""

    def __init__(
        self,
        compressor: Compressor,
        device: str,
        ranks: int,
        seed: int,
        bucket_bytes: int,
        undoes: bool,
    ) -> None:
        self.compressor, self.ranks, self.undoes = compressor, ranks, undoes
        self.ops = TorchOps(device)
        layers = [(name, shape, "float32") for name, shape in reversed(resnet50())]
        if compressor.whole_model:
            bucket_bytes = 1 << 40
        self.layouts = plan_buckets(layers, bucket_bytes, compressor.block)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.layers = [
            [torch.empty(s, device=device) for s in layout.shapes] for layout in self.layouts
        ]
        self.gradients = [self.ops.zeros((layout.size,)) for layout in self.layouts]
        self.moments = [self.ops.zeros((layout.size,)) for layout in self.layouts]
        self.draw()
        self.states = [compressor.init(self.ops, layout) for layout in self.layouts]
        self.step = 0
        self.before: list[Any] = [None] * len(self.states)
        self.requests: list[Any] = []
        self.programs: list[Any] = []
        self.sent = self.collectives = 0  # bytes, and how many, of this rank so far
        self.total: Any = None

    def draw(self) -> None:
        """New gradients: noise, so that few elements become large or unambiguous at a time."""
        for tensors in self.layers:
            for x in tensors:
                x.normal_(generator=self.generator)
        self.pack()
        if self.compressor.uses_moments:
            for moment, g in zip(self.moments, self.gradients):
                torch.mul(g, g, out=moment)

    def pack(self) -> None:
        for layout, flat, tensors in zip(self.layouts, self.gradients, self.layers):
            for offset, size, x in zip(layout.offsets, layout.sizes, tensors):
                flat[offset : offset + size].view(x.shape).copy_(x)

    def encode(self, bucket: int) -> None:
        """Runs a bucket's program up to its first collective."""
        # In turn every rank leads, where one leads.
        rank = self.step % self.ranks
        context = Context(self.layouts[bucket], rank, self.ranks, self.step, 1.0, 1.0 / self.ranks)
        extra = {"moment": self.moments[bucket]} if self.compressor.uses_moments else {}
        if self.undoes:  # as the PyTorch engine does it
            self.before[bucket] = [x for _, x in leaves(self.states[bucket])]
            self.ops.keep(self.before[bucket])
        program = self.compressor.aggregate(
            self.ops, context, self.gradients[bucket], self.states[bucket], **extra
        )
        self.programs.append([program])
        self.requests.append(self._advance(bucket, None))

    def _advance(self, bucket: int, reply: Any) -> Any:
        """The next collective of a bucket, or None at its end."""
        programs = self.programs[bucket]
        while programs:
            try:
                request = programs[-1].send(reply)
            except StopIteration as stop:
                programs.pop()
                reply = stop.value
                continue
            if not isinstance(request, Switch):
                self.sent += request.tensor.numel() * request.tensor.element_size()
                self.collectives += 1
                return request
            programs.append(request.branches[int(request.index)]())
            reply = None
        self.total, self.states[bucket] = reply
        if self.undoes:
            self.ops.let_go(self.before[bucket], [x for _, x in leaves(self.states[bucket])])
        return None

    def reply(self, bucket: int) -> Any:
        request = self.requests[bucket]
        if isinstance(request, Allgather):
            return torch.stack([request.tensor] * self.ranks)
        return request.tensor.clone()

    def decode(self, bucket: int, reply: Any) -> Any:
        """Runs a bucket's program to its end; further collectives give back what they are given."""
        request = self._advance(bucket, reply)
        while request is not None:
            self.requests[bucket] = request
            request = self._advance(bucket, self.reply(bucket))
        return self.total


def _clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(
    compressor: Compressor,
    device: str,
    steps: int,
    ranks: int,
    bucket_bytes: int,
    undoes: bool = False,
) -> dict[str, Any]:
    """One row."""
    step = Step(compressor, device, ranks, 1, bucket_bytes, undoes)
    flats = step.gradients
    targets = [torch.empty_like(g) for g in flats]
    rows: dict[str, list[float]] = {"copy": [], "pack": [], "encode": [], "decode": []}
    sent_before = payload = collectives = 0
    warmup = 64  # the ladder rests, and the elements' histories have drifted apart
    for turn in range(warmup + steps):
        step.draw()
        marks = [_clock(device)]
        for target, g in zip(targets, flats):
            target.copy_(g)
        marks.append(_clock(device))
        step.pack()
        marks.append(_clock(device))
        step.requests, step.programs = [], []
        encode = decode = 0.0
        results = []
        for bucket in range(len(step.layouts)):
            start = _clock(device)
            step.encode(bucket)
            encode += _clock(device) - start
            reply = step.reply(bucket)
            start = _clock(device)
            results.append(step.decode(bucket, reply))
            decode += _clock(device) - start
        step.step += 1
        if turn == warmup - 1:
            sent_before, payload, collectives = _sent(step), step.sent, step.collectives
        if turn >= warmup:
            rows["copy"].append(marks[1] - marks[0])
            rows["pack"].append(marks[2] - marks[1])
            rows["encode"].append(encode)
            rows["decode"].append(decode)
    sent, payload = _sent(step) - sent_before, step.sent - payload
    collectives = step.collectives - collectives
    calls, extra = _count(step, device)
    copy = statistics.median(rows["copy"])
    elements = sum(layout.elements for layout in step.layouts)
    both = [e + d for e, d in zip(rows["encode"], rows["decode"])]
    return {
        "method": repr(compressor),
        "copy_ms": 1e3 * copy,
        "pack": statistics.median(rows["pack"]) / copy,
        "encode": statistics.median(rows["encode"]) / copy,
        "decode": statistics.median(rows["decode"]) / copy,
        "copies": statistics.median(both) / copy,
        "spread": [min(both) / copy, max(both) / copy],
        "bytes": payload // steps,
        "element_ratio": elements * steps / sent if sent else float(elements > 0),
        "collectives_per_bucket": collectives / steps / len(step.layouts),
        "buckets": len(step.layouts),
        "calls": calls,
        "extra_buckets": extra,
    }


def _sent(step: Step) -> int:
    return sum(int(s.sent.sum()) if hasattr(s, "sent") else 0 for s in step.states)


def _count(step: Step, device: str) -> tuple[int, float]:
    """Calls (on a GPU launches) of a step; the most extra memory of a bucket in its own sizes."""
    calls, extra = 0, 0.0
    step.requests, step.programs = [], []
    count = _launches if device == "cuda" else _operators
    for bucket in range(len(step.layouts)):
        encoding, _ = count(lambda bucket=bucket: step.encode(bucket))
        reply = step.reply(bucket)
        decoding, _ = count(lambda bucket=bucket, reply=reply: step.decode(bucket, reply))
        calls += encoding + decoding
    step.step += 1
    step.requests, step.programs = [], []
    for bucket, layout in enumerate(step.layouts):
        encoding, _ = _peak_bytes(lambda bucket=bucket: step.encode(bucket), device)
        reply = step.reply(bucket)
        decoding, _ = _peak_bytes(
            lambda bucket=bucket, reply=reply: step.decode(bucket, reply), device
        )
        extra = max(extra, encoding / (4 * layout.size), decoding / (4 * layout.size))
    step.step += 1
    return calls, extra


def thresholds(ratio: float) -> list[tuple[str, Callable[[float], Compressor]]]:
    """Methods by a threshold; a bench needs the one that gives the ratio."""
    return [
        ("Strom", lambda t: StromCompressor(tau=t)),
        ("Variance", lambda t: VarianceCompressor(alpha=t)),
        ("Hybrid", lambda t: HybridCompressor(tau=0.1, alpha=t)),
    ]


def tuned(make: Callable[[float], Compressor], ratio: float) -> Compressor:
    """The threshold at which noise is sent once in `ratio` elements."""
    low, high = 1e-3, 1e9
    for _ in range(24):
        middle = (low * high) ** 0.5
        if _ratio(make(middle)) < ratio:
            low = middle
        else:
            high = middle
    return make(high)


def _ratio(compressor: Compressor) -> float:
    from hvd_gradcomp.layout import Layout

    ops, layout = TorchOps(), Layout(("w",), ((50_000,),))
    generator = torch.Generator().manual_seed(2)
    state = compressor.init(ops, layout)
    steps, settle, before = 64 + 15, 64, 0
    for step in range(steps):
        gradient = torch.zeros(layout.size)
        gradient[:50_000].normal_(generator=generator)
        extra = {"moment": gradient * gradient} if compressor.uses_moments else {}
        program = compressor.aggregate(ops, Context(layout, 0, 1, step), gradient, state, **extra)
        try:
            program.send(next(program).tensor[None])
        except StopIteration as stop:
            state = stop.value[1]
        if step == settle - 1:
            before = int(state.sent.sum())
    sent = int(state.sent.sum()) - before
    return 50_000 * (steps - settle) / max(sent, 1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ratio", type=float, default=500.0, help="least element ratio")
    parser.add_argument("--bucket-bytes", type=int, default=None)
    parser.add_argument("--undo", action="store_true", help="steps that could be undone")
    parser.add_argument("--only", default="", help="methods whose name has this in it")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    bucket_bytes = options.bucket_bytes or BUCKET_BYTES
    methods: list[Compressor] = [NoneCompressor(), FP16Compressor()]
    methods += [tuned(make, 1.1 * options.ratio) for _, make in thresholds(options.ratio)]
    methods += [
        SparseGDCompressor(density=0.001),
        DGCCompressor(density=0.001, momentum=0.9),
        EGCCompressor(K=1024, momentum=0.9),
        GradientDroppingCompressor(ratio=0.999),
        GradientDroppingCompressor(ratio=0.99),
        ScaleComCompressor(density=0.001),
        QSGDCompressor(bits=4, exchange="allgather"),
        QSGDCompressor(bits=4, exchange="two_shot"),
        TernGradCompressor(),
        OneBitCompressor(),
    ]
    if options.only:
        methods = [m for m in methods if options.only in repr(m)]
    rows = []
    print(f"ResNet-50, 161 shapes, {options.ranks} ranks, {options.device}, one thread")
    head = ("pack", "encode", "decode", "copies", "min", "max", "MB", "ratio", "colls", "calls")
    print(f"{'method':<34}" + "".join(f"{h:>9}" for h in head) + f"{'extra':>7}")
    for compressor in methods:
        steps, undoes = options.steps, options.undo
        row = measure(compressor, options.device, steps, options.ranks, bucket_bytes, undoes)
        rows.append(row)
        name = brief(compressor)
        print(
            f"{name:<34}{row['pack']:>9.2f}{row['encode']:>9.2f}{row['decode']:>9.2f}"
            f"{row['copies']:>9.2f}{row['spread'][0]:>9.2f}{row['spread'][1]:>9.2f}"
            f"{row['bytes'] / 1e6:>9.3f}{row['element_ratio']:>9.0f}"
            f"{row['collectives_per_bucket']:>9.0f}{row['calls']:>9}{row['extra_buckets']:>7.2f}"
        )
        sys.stdout.flush()
    print(f"{rows[0]['buckets']} buckets; one copy takes {rows[0]['copy_ms']:.1f} ms here")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
