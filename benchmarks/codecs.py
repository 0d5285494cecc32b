"""Encode and decode of one step, in units of copying the same gradient once.

    python -m benchmarks.codecs                  # ResNet-50's 161 shapes, one thread
    python -m benchmarks.codecs --only Variance "DGC 1"
    python -m benchmarks.codecs --device cuda    # needs torch only, no Horovod
    python -m benchmarks.codecs --undo           # what `nonfinite="skip"` costs, with a scaler too

A row is one rank's encode (all buckets) and decoding the payloads of `--ranks` ranks, at a point
of `benchmarks.points`; handing payloads over is not part of it, in no round. `copies` is their sum
over one `out.copy_(g)` of the whole gradient, which takes turns with them: the median over steps
after the payloads have their size, and beside it the `worst` of the first 30 steps (each step's
median over three beginnings). `speedup` is how much faster encode is with `--threads` threads,
which take turns with one; no walk over memory gains more than a copy does, which is said below the
table. `pack` is laying the gradients of 161 layers into the buckets, which Horovod's own fusion
buffer does as well; it is not part of `copies`. `extra` is the largest memory beyond state,
gradient and result, in buckets; `calls` are framework operator calls per step (on a GPU: the
kernels and copies that were launched).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import points
from hvd_gradcomp import Compressor
from hvd_gradcomp.core.collectives import Allgather
from hvd_gradcomp.core.layout import plan_buckets
from hvd_gradcomp.method.compressor import Context, leaves
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.runtime.program_runner import ProgramRunner
from hvd_gradcomp.tuning.models import resnet50

BUCKET_BYTES = 25 << 20  # as the PyTorch frontend
FIRST, BEGINNINGS = 30, 3  # steps that are looked at one by one, and how often
_noise = cache(points.Noise)


class _Calls(TorchDispatchMode):
    """Counts the operators that reach the framework."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _operators(body: Callable[[], Any]) -> tuple[int, Any]:
    """Return the number of operators that `body` calls, and its result."""
    with _Calls() as counted:
        result = body()
    return counted.count, result


def _launches(body: Callable[[], Any]) -> tuple[int, Any]:
    """Return the number of kernels and copies that `body` runs on a GPU, and its result."""
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
    """One rank's buckets of a model, with gradients of heavy-tailed noise."""

    def __init__(
        self,
        compressor: Compressor,
        device: str = "cpu",
        ranks: int = 2,
        bucket_bytes: int = BUCKET_BYTES,
        undoes: bool = False,
        model: list[tuple[str, tuple[int, ...]]] | None = None,
    ) -> None:
        self.compressor, self.device, self.ranks, self.undoes = compressor, device, ranks, undoes
        self.ops = TorchOps(device)
        layers = [(name, shape, "float32") for name, shape in reversed(model or resnet50())]
        if compressor.whole_model:
            bucket_bytes = 1 << 40
        self.layouts = plan_buckets(layers, bucket_bytes, compressor.block)
        self.elements = sum(layout.elements for layout in self.layouts)
        self.noise = _noise(self.elements, 1, device)
        self.layers = [
            [torch.empty(s, device=device) for s in layout.shapes] for layout in self.layouts
        ]
        self.gradients = [self.ops.zeros((layout.size,)) for layout in self.layouts]
        self.targets = [torch.empty_like(g) for g in self.gradients]
        self.moments = [self.ops.zeros((layout.size,)) for layout in self.layouts]
        self.states = [compressor.init(self.ops, layout) for layout in self.layouts]
        self.step = 0
        self.before: list[Any] = [None] * len(self.states)
        self.requests: list[Any] = []
        self.programs: list[Any] = []
        self.bytes = self.collectives = 0  # that this rank handed over so far, and how many
        self.total: Any = None
        self.replying = 0.0  # seconds within `decode` that the place of a transport took

    @property
    def sent(self) -> int:
        """Elements so far."""
        return sum(int(s.sent.sum()) if hasattr(s, "sent") else 0 for s in self.states)

    def draw(self) -> None:
        """New gradients."""
        self.noise.fill(x for tensors in self.layers for x in tensors)
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
        scales = 1.0, 1.0 / self.ranks
        owns = self.compressor.keeps_gradient  # as the PyTorch reducer does it
        context = Context(self.layouts[bucket], rank, self.ranks, self.step, *scales, owns)
        extra = {"moment": self.moments[bucket]} if self.compressor.uses_moments else {}
        if self.undoes:  # as the PyTorch engine does it
            self.before[bucket] = [x for _, x in leaves(self.states[bucket])]
            self.ops.snapshot(self.before[bucket])
        program = self.compressor.aggregate(
            self.ops, context, self.gradients[bucket], self.states[bucket], **extra
        )
        self.programs.append(ProgramRunner(program))
        self.requests.append(self._advance(bucket, None))

    def _advance(self, bucket: int, reply: Any) -> Any:
        """The next collective of a bucket, or None at its end."""
        request = self.programs[bucket].send(reply)
        if request is not None:
            self.bytes += request.tensor.numel() * request.tensor.element_size()
            self.collectives += 1
            return request
        self.total, self.states[bucket] = self.programs[bucket].result
        memory = self.gradients[bucket].data_ptr()
        if any(x.data_ptr() == memory for _, x in leaves(self.states[bucket])):
            self.gradients[bucket] = self.total
        if self.undoes:
            self.ops.release_snapshot(
                self.before[bucket], [x for _, x in leaves(self.states[bucket])]
            )
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
            start = _clock(self.device)
            reply = self.reply(bucket)
            self.replying += _clock(self.device) - start
            request = self._advance(bucket, reply)
        return self.total


def _clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Turn(NamedTuple):
    """Seconds of a step's parts."""

    copy: float
    pack: float
    encode: float
    decode: float

    @property
    def work(self) -> float:
        return self.encode + self.decode


def take(step: Step, threads: int = 1) -> Turn:
    """The next step; on so many threads."""
    device = step.device
    step.draw()
    torch.set_num_threads(threads)
    marks = [_clock(device)]
    for target, g in zip(step.targets, step.gradients):
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
        step.replying = 0.0
        results.append(step.decode(bucket, reply))
        decode += _clock(device) - start - step.replying
    torch.set_num_threads(1)
    step.step += 1
    return Turn(marks[1] - marks[0], marks[2] - marks[1], encode, decode)


def measure(
    begin: Callable[[], Step], steps: int, threads: int = 1, beginnings: int = BEGINNINGS
) -> tuple[Step, dict[str, Any]]:
    """A row, and the step that it ends at; `threads` take turns with one if there are more."""
    begun = []
    for _ in range(beginnings):
        step = begin()
        begun.append([take(step).work for _ in range(FIRST)])
    for _ in range(FIRST, points.SETTLE):
        take(step)
    sent, volume, collectives = step.sent, step.bytes, step.collectives
    turns, faster = [], []
    for _ in range(steps):
        turns.append(take(step))
        if threads > 1:
            faster.append(take(step, threads))
    made = steps * (2 if faster else 1)
    sent = step.sent - sent
    copy, pack, encode, decode = map(statistics.median, zip(*turns))
    works = [turn.work / copy for turn in turns]
    return step, {
        "compressor": repr(step.compressor),
        "copy_ms": 1e3 * copy,
        "pack": pack / copy,
        "encode": encode / copy,
        "decode": decode / copy,
        "copies": statistics.median(works),
        "spread": [min(works), max(works)],
        "worst": max(map(statistics.median, zip(*begun))) / copy,
        "speedup": encode / statistics.median(t.encode for t in faster) if faster else None,
        "copy_speedup": copy / statistics.median(t.copy for t in faster) if faster else None,
        "bytes": (step.bytes - volume) // made,
        "element_ratio": step.elements * made / sent if sent else 1.0,
        "collectives_per_bucket": (step.collectives - collectives) / made / len(step.layouts),
        "buckets": len(step.layouts),
    }


def costs(step: Step) -> dict[str, Any]:
    """Calls (on a GPU launches) of a step; the most extra memory of a bucket in its own sizes."""
    extra = 0.0
    step.requests, step.programs = [], []
    count = _launches if step.device == "cuda" else _operators
    buckets = range(len(step.layouts))
    encoding, _ = count(lambda: [step.encode(bucket) for bucket in buckets])
    replies = [step.reply(bucket) for bucket in buckets]
    decoding, _ = count(lambda: [*map(step.decode, buckets, replies)])
    calls = encoding + decoding
    step.step += 1
    step.requests, step.programs = [], []
    for bucket, layout in enumerate(step.layouts):
        encoding, _ = _peak_bytes(lambda bucket=bucket: step.encode(bucket), step.device)
        reply = step.reply(bucket)
        decoding, _ = _peak_bytes(
            lambda bucket=bucket, reply=reply: step.decode(bucket, reply), step.device
        )
        extra = max(extra, encoding / (4 * layout.size), decoding / (4 * layout.size))
    step.step += 1
    return {"calls": calls, "extra_buckets": extra}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="that take turns with one")
    parser.add_argument("--bucket-bytes", type=int, default=BUCKET_BYTES)
    parser.add_argument("--undo", action="store_true", help="steps that could be undone")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="POINT", help='such as Strom "DGC 1"'
    )
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    print(f"ResNet-50, 161 shapes, {options.ranks} ranks, {options.device}, one thread")
    head = ("pack", "encode", "decode", "copies", "min", "max", "worst", "speedup", "MB", "ratio")
    print(f"{'point':<24}" + "".join(f"{h:>8}" for h in (*head, "colls", "calls", "extra")))
    for point in points.chosen(points.every(), options.only):
        compressor = point.make()

        def begin(compressor: Compressor = compressor) -> Step:
            return Step(
                compressor, options.device, options.ranks, options.bucket_bytes, options.undo
            )

        step, row = measure(begin, options.steps, options.threads)
        row |= {"point": point.name, **costs(step)}
        rows.append(row)
        times = [row[key] for key in head[:4]] + row["spread"] + [row["worst"]]
        speedup = f"{row['speedup']:.2f}" if row["speedup"] else ""
        print(
            f"{point.name:<24}"
            + "".join(f"{x:>8.2f}" for x in times)
            + f"{speedup:>8}{row['bytes'] / 1e6:>8.3f}{row['element_ratio']:>8.1f}"
            f"{row['collectives_per_bucket']:>8.0f}{row['calls']:>8}{row['extra_buckets']:>8.2f}",
            flush=True,
        )
    if rows:
        print(f"{rows[0]['buckets']} buckets; one copy takes {rows[0]['copy_ms']:.1f} ms here")
        gains = [row["copy_speedup"] for row in rows if row["copy_speedup"]]
        if gains:
            gain = statistics.median(gains)
            print(f"a copy is {gain:.2f} times faster with {options.threads} threads")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
