"""Memory traffic and launches of a step on a GPU, counted without one.

    python -m benchmarks.traffic                          # prints the table
    python -m benchmarks.traffic --folder docs/measured   # writes traffic.json and traffic.txt
    python -m benchmarks.traffic --only Strom QSGD
    python -m benchmarks.traffic --only Strom --launches  # each of the bucket that has most
    python -m benchmarks.traffic --plain                  # methods of matrix products, no kernels

A step of one of two ranks on ResNet-50's 161 shapes, in the buckets of the PyTorch frontend, with
tensors that have a shape and no data: what is counted depends on nothing else. Words and top-k send
one element in 500. `copies` is the bytes that are read and written in units of copying the gradient
once, for encode and decode; `launches` is of the bucket that has most.

Of ops each operator is one launch that reads its arguments and writes its results once; of what
gathers and scatters the items that it touches count, 32 bytes each as a GPU moves them. Sorting and
top-k count as one walk, so these figures are low. Of kernels each launch counts the tensors that it
is given, or what its caller says it touches of them. Copies between host and device are launches.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_gradcomp import (
    ACPSGDCompressor,
    Compressor,
    DGCCompressor,
    EGCCompressor,
    GradientDroppingCompressor,
    HybridCompressor,
    OneBitCompressor,
    PowerSGDCompressor,
    QSGDCompressor,
    SparseGDCompressor,
    StromCompressor,
    TernGradCompressor,
    VarianceCompressor,
)
from hvd_gradcomp.core.collectives import Allgather
from hvd_gradcomp.core.layout import Layout, plan_buckets
from hvd_gradcomp.method.compressor import Context
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.runtime.program_runner import ProgramRunner
from hvd_gradcomp.tuning.models import resnet50

BUCKET_BYTES = 25 << 20  # as the PyTorch frontend
RATIO = 500
SECTOR = 32  # bytes that a GPU moves at least
RANKS = 2
# (compressor, its bar: copies of encode and decode together, or of each)
METHODS: dict[str, tuple[Compressor, float, bool]] = {
    "Variance, moments": (VarianceCompressor(), 5.0, False),
    "Variance, steps": (VarianceCompressor(moments="step"), 5.0, False),
    "Hybrid, moments": (HybridCompressor(), 5.0, False),
    "Hybrid, steps": (HybridCompressor(moments="step"), 5.0, False),
    "Strom": (StromCompressor(), 5.0, False),
    "Sparse GD": (SparseGDCompressor(density=1 / RATIO), 5.0, False),
    "DGC": (DGCCompressor(density=1 / RATIO, momentum=0.9), 5.0, False),
    "EGC": (EGCCompressor(K=RATIO, momentum=0.9), 5.0, False),
    "Gradient Dropping": (GradientDroppingCompressor(ratio=1 - 1 / RATIO), 5.0, False),
    "QSGD": (QSGDCompressor(bits=4, exchange="allgather"), 4.0, True),
    "TernGrad": (TernGradCompressor(exchange="allgather"), 4.0, True),
    "1-bit": (OneBitCompressor(exchange="allgather"), 4.0, True),
}
# They multiply matrices, and have no kernels.
PLAIN: dict[str, Compressor] = {
    "PowerSGD, rank 4": PowerSGDCompressor(rank=4),
    "ACP-SGD, rank 4": ACPSGDCompressor(rank=4),
}
LAUNCHES = 12  # a bucket, at most
# More for Elias-Fano's code: two to encode, three to decode, and three for the check that indices
# ascend.
RECODING = 8


def most_launches(compressor: Compressor) -> int:
    """Return the most launches that a bucket may take."""
    recodes = getattr(compressor, "index_coding", None) == "elias_fano"
    return LAUNCHES + RECODING * recodes


class Count(NamedTuple):
    """Bytes that were moved, and number of launches."""

    moved: int
    launches: int


class Counter(TorchDispatchMode):
    """Counts operators of PyTorch, and launches of kernels as they are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = self.launches = 0
        self.listed: list[tuple[str, int]] = []
        self.kernels: list[Any] = []

    def add(self, moved: int, name: str) -> None:
        self.moved += moved
        self.launches += 1
        self.listed.append((name, moved))

    def see(self, launch: Any) -> None:
        self.kernels.append(launch)
        self.add(launch.moved, launch.kernel.__name__)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        read = [x for name, x in kwargs.items() if name != "out"]
        inputs = [x for x in _tensors([*args, *read]) if x.device.type == "meta"]
        made = [x for x in _tensors([out]) if x.device.type == "meta"]
        if not made or func.is_view or name in _FREE:
            return out
        if name in _SCATTERED:
            index, values = _index_and_values(args)
            touched = index.numel() * SECTOR
            moved = _size(index) + (0 if values is None else _size(values)) + 2 * touched
        elif name in ("index_select", "gather", "index"):
            index = [x for x in inputs if not x.is_floating_point()][-1]
            items = sum(x.numel() for x in made)
            moved = _size(index) + min(items * SECTOR, _size(inputs[0])) + sum(map(_size, made))
        elif name in _WRITING:
            others = inputs[1:] if name == "copy_" else []
            moved = sum(map(_size, others)) + sum(map(_size, made))
        else:
            moved = sum(map(_size, inputs)) + sum(map(_size, made))
        self.add(moved, name)
        return out


_FREE = {"empty", "empty_like", "empty_strided", "_unsafe_view", "detach", "alias", "lift_fresh"}
_SCATTERED = {"index_put_", "index_fill_", "index_add_", "scatter_reduce_", "index_put"}
_WRITING = {"zeros", "zero_", "fill_", "full", "arange", "copy_", "zeros_like", "scalar_tensor"}


def _tensors(items: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for x in items:
        if isinstance(x, torch.Tensor):
            tensors.append(x)
        elif isinstance(x, (list, tuple)):
            tensors += _tensors(x)
    return tensors


def _size(x: torch.Tensor) -> int:
    """Bytes; what is expanded lies there once."""
    extents = [n for n, stride in zip(x.shape, x.stride()) if stride]
    count = 1
    for n in extents:
        count *= n
    return (count if x.numel() else 0) * x.element_size()


def _index_and_values(args: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    tensors = _tensors(args)
    index = next(x for x in tensors[1:] if not x.is_floating_point())
    values = [x for x in tensors[1:] if x is not index]
    return index, values[0] if values else None


class WithoutData(TorchOps):
    """The plain ops as on a GPU, with tensors that have a shape and nothing else."""

    counter: Counter | None = None

    def __init__(self, kernels: bool) -> None:
        super().__init__("meta", kernels=kernels)

    def from_host(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(len(values), dtype=dtype, device=self.device)
        if self.counter is not None:
            self.counter.add(_size(out), "from the host")
        return out

    def stage(self, x: torch.Tensor) -> torch.Tensor:
        if self.counter is not None:
            self.counter.add(_size(x), "to the host")
        return torch.ones(x.shape, dtype=x.dtype)


@contextmanager
def counted(ops: WithoutData) -> Iterator[Counter]:
    """Counts what happens within."""
    from hvd_gradcomp.ops.triton.common import Launcher

    with Counter() as counter:
        ops.counter = counter
        Launcher.seen = counter.see
        try:
            yield counter
        finally:
            ops.counter = Launcher.seen = None


class Step:
    """A step of one bucket."""

    def __init__(self, compressor: Compressor, layout: Layout, kernels: bool) -> None:
        self.compressor, self.layout = compressor, layout
        self.ops = WithoutData(kernels)
        self.take()  # makes tables

    def take(self, dense: bool = False, number: int = 1) -> tuple[Count, Count]:
        """Encode, and decode; on the dense level, if there is one and it is asked for.

        `number` is that of the step.
        """
        ops, layout = self.ops, self.layout
        state = self._state(dense)
        gradient = ops.zeros((layout.size,))
        extra = {}
        if self.compressor.uses_moments and getattr(self.compressor, "moments", "") != "step":
            extra["moment"] = ops.zeros((layout.size,))
        context = Context(layout, 0, RANKS, number, 1.0, 1.0 / RANKS)
        with counted(ops) as encoding:
            stack = ProgramRunner(self.compressor.aggregate(ops, context, gradient, state, **extra))
            request = stack.send(None)
        if not isinstance(request, Allgather):
            raise AssertionError(f"{self.compressor!r} asks for {type(request).__name__}")
        reply: Any = torch.stack([request.tensor] * RANKS)
        with counted(ops) as decoding:
            if stack.send(reply) is not None:
                raise AssertionError("more than one collective")
        self.listed = encoding.listed, decoding.listed
        self.kernels = encoding.kernels + decoding.kernels
        return tuple(Count(c.moved, c.launches) for c in (encoding, decoding))

    def _state(self, dense: bool) -> Any:
        """At the level with room for one element in 500, or on the last."""
        state = self.compressor.start(self.ops, self.layout, RANKS)
        if not hasattr(state, "capacity"):
            return state
        schedule, wanted = (
            self.compressor.capacity_schedule(self.layout, RANKS),
            self.layout.size // RATIO,
        )
        level, needed = (
            self.ops.bisect(schedule.capacities, wanted),
            min(wanted, schedule.capacities[-1]),
        )
        if dense:
            level, needed = schedule.top, schedule.capacities[-1] + 1
        numbers = {"level": self.ops.host(level), "needed": self.ops.host(needed)}
        return state._replace(capacity=state.capacity._replace(**numbers))


def plain_step(compressor: Compressor, layout: Layout) -> Count:
    """Count a step of one bucket by plain ops, in all of its rounds."""
    ops = WithoutData(kernels=False)
    gradient, state = ops.zeros((layout.size,)), compressor.init(ops, layout)
    context = Context(layout, 0, RANKS, 1, 1.0, 1.0 / RANKS)
    moved = launches = 0
    reply = None
    stack = ProgramRunner(compressor.aggregate(ops, context, gradient, state))
    while True:
        with Counter() as counter:
            ops.counter = counter
            request = stack.send(reply)
        moved, launches = moved + counter.moved, launches + counter.launches
        if request is None:
            return Count(moved, launches)
        reply = request.tensor.clone()


def plain_table() -> str:
    """Count methods that have no kernels, as Markdown."""
    lines = ["| method | copies | launches a bucket | launches a step |", "|---|--:|--:|--:|"]
    for name, compressor in PLAIN.items():
        layouts = buckets(compressor)
        steps = [plain_step(compressor, layout) for layout in layouts]
        copies = sum(step.moved for step in steps) / (8 * sum(one.elements for one in layouts))
        largest, total = max(s.launches for s in steps), sum(s.launches for s in steps)
        lines.append(f"| {name} | {copies:.1f} | {largest} | {total} |")
    return "\n".join(lines) + "\n"


def launches_of(compressor: Compressor, layout: Layout, dense: bool) -> list[Any]:
    """The kernels of a step, as they are launched."""
    step = Step(compressor, layout, kernels=True)
    step.take(dense)
    return step.kernels


def buckets(compressor: Compressor) -> list[Layout]:
    """ResNet-50's, as the frontend cuts them."""
    layers = [(name, shape, "float32") for name, shape in reversed(resnet50())]
    size = 1 << 40 if compressor.whole_model else BUCKET_BYTES
    return plan_buckets(layers, size, compressor.block)


def measure(compressor: Compressor, kernels: bool) -> dict[str, Any]:
    """A step of all buckets."""
    layouts = buckets(compressor)
    parts = [Step(compressor, layout, kernels).take() for layout in layouts]
    one = 8 * sum(layout.elements for layout in layouts)
    encode, decode = (sum(p[i].moved for p in parts) / one for i in (0, 1))
    return {
        "encode": round(encode, 2),
        "decode": round(decode, 2),
        "copies": round(encode + decode, 2),
        "launches": max(e.launches + d.launches for e, d in parts),
        "launches_of_a_step": sum(e.launches + d.launches for e, d in parts),
        "buckets": len(layouts),
    }


def chosen(only: Sequence[str]) -> dict[str, tuple[Compressor, float, bool]]:
    """The methods whose names begin so; all if nothing is asked for."""
    words = tuple(word.lower() for word in only) or ("",)
    return {name: how for name, how in METHODS.items() if name.lower().startswith(words)}


def rows(only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A row a method: plain ops, kernels, and whether the bars hold."""
    table_rows = []
    for name, (compressor, bar, each) in chosen(only).items():
        verbs, kernels = (measure(compressor, k) for k in (False, True))
        copies = max(kernels["encode"], kernels["decode"]) if each else kernels["copies"]
        table_rows.append(
            {
                "method": name,
                "compressor": repr(compressor),
                "verbs": verbs,
                "kernels": kernels,
                "bar": bar,
                "bar_is_for_each": each,
                "copies_hold": copies <= bar,
                "launches_bar": most_launches(compressor),
                "launches_hold": kernels["launches"] <= most_launches(compressor),
            }
        )
    return table_rows


def launches(compressor: Compressor) -> str:
    """Return the launches for the bucket that has most: encode, then decode."""
    steps = [Step(compressor, layout, kernels=True) for layout in buckets(compressor)]
    for step in steps:
        step.take()
    step = max(steps, key=lambda one: sum(map(len, one.listed)))
    one = 8 * step.layout.elements
    lines = [f"{step.layout.elements} elements"]
    for title, listed in zip(("encode", "decode"), step.listed):
        lines += [f"{title} {moved / one:9.5f}  {name}" for name, moved in listed]
    return "\n".join(lines) + "\n"


def table(rows_: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = [
        "| method | plain ops: copies | launches a bucket | kernels: encode | decode | copies "
        "| bar | launches a bucket | bar |",
        "|---|--:|--:|--:|--:|--:|---|--:|---|",
    ]
    for row in rows_:
        verbs, kernels = row["verbs"], row["kernels"]
        each = " each" if row["bar_is_for_each"] else ""
        bars = (
            f"{row['bar']:g}{each}: {'holds' if row['copies_hold'] else '**no**'}",
            f"{row.get('launches_bar', LAUNCHES)}: {'holds' if row['launches_hold'] else '**no**'}",
        )
        lines.append(
            f"| {row['method']} | {verbs['copies']:.1f} | {verbs['launches']} | "
            f"{kernels['encode']:.2f} | {kernels['decode']:.2f} | {kernels['copies']:.2f} | "
            f"{bars[0]} | {kernels['launches']} | {bars[1]} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="METHOD")
    parser.add_argument("--folder", type=Path, default=None, help="where to write both files")
    parser.add_argument("--launches", action="store_true", help="list each launch instead")
    parser.add_argument("--plain", action="store_true", help="count methods without kernels")
    options = parser.parse_args(arguments)
    if options.plain:
        print(plain_table())
        return 0
    if options.launches:
        for name, (compressor, *_) in chosen(options.only).items():
            print(f"{name}: {launches(compressor)}")
        return 0
    table_rows = rows(options.only)
    print(table(table_rows))
    if options.folder:
        (options.folder / "traffic.json").write_text(json.dumps(table_rows, indent=1) + "\n")
        (options.folder / "traffic.txt").write_text(table(table_rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
