"""Points of the curve: methods by the share of elements that they send, and their gradients.

Gradients are noise of Student's t with 3 degrees of freedom in ResNet-50's 161 shapes. In a layer
of two million elements the largest is a hundred times the usual one: what 4 bits of an exponent
cannot express is kept back and grows, and there is no gap for top-k to cut at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch

from hvd_gradcomp import (
    BF16Compressor,
    ChunkedTopKCompressor,
    Compressor,
    DeMoCompressor,
    DGCCompressor,
    EFSignSGDCompressor,
    EGCCompressor,
    FP8Compressor,
    FP16Compressor,
    GradientDroppingCompressor,
    HybridCompressor,
    Int8Compressor,
    NaturalCompressor,
    NoneCompressor,
    OneBitCompressor,
    PowerSGDCompressor,
    QSGDCompressor,
    RandomKCompressor,
    ScaleComCompressor,
    SignumCompressor,
    SparseGDCompressor,
    StromCompressor,
    TernGradCompressor,
    VarianceCompressor,
)
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World

SETTLE = 40  # steps until payloads have their size; a threshold's ratio is that of the next ones
WINDOW = 15
NEAR = 1.05  # times the ratio that was asked for
_DEGREES, _SHIFTS, _SAMPLE = 3, 1 << 20, 200_000

PYTORCH, TAPE, KERAS = FRAMEWORKS = ("PyTorch", "tape", "Keras")
DENSE = "dense"


def _variance(threshold: float, index_coding: str = "elias_fano") -> Compressor:
    # A step that is its own sample sends all at first with alpha below 1: zeta goes further.
    alpha, zeta = max(threshold, 1.0), 0.999 * min(threshold, 1.0)
    return VarianceCompressor(alpha, zeta, moments="step", index_coding=index_coding)


WORDS: dict[str, Callable[[float], Compressor]] = {
    "Variance": _variance,
    "Variance, int32": partial(_variance, index_coding="int32"),
    "Hybrid": lambda t: HybridCompressor(tau=0.1, alpha=t, moments="step"),
    "Strom": lambda t: StromCompressor(tau=t),
}
LARGEST: dict[str, Callable[[float], Compressor]] = {
    "Sparse GD": lambda d: SparseGDCompressor(density=d),
    "Sparse GD, int32": lambda d: SparseGDCompressor(density=d, index_coding="int32"),
    "DGC": lambda d: DGCCompressor(density=d, momentum=0.9),
    "EGC": lambda d: EGCCompressor(K=1 / d, momentum=0.9),
    "Gradient Dropping": lambda d: GradientDroppingCompressor(ratio=1 - d),
    "ScaleCom": lambda d: ScaleComCompressor(density=d),
}
ONE_SHOT: dict[str, Compressor] = {
    "QSGD": QSGDCompressor(bits=4, exchange="allgather"),
    "TernGrad": TernGradCompressor(exchange="allgather"),
    "1-bit": OneBitCompressor(exchange="allgather"),
}
TWO_SHOTS: dict[str, Compressor] = {
    "QSGD, two shots": QSGDCompressor(bits=4, exchange="two_shot"),
    "TernGrad, two shots": TernGradCompressor(exchange="two_shot"),
    "1-bit, two shots": OneBitCompressor(exchange="two_shot"),
}
NARROW: dict[str, Callable[[str], Compressor]] = {
    "BF16": lambda exchange: BF16Compressor(exchange=exchange),
    "BF16 stochastic": lambda exchange: BF16Compressor(rounding="stochastic", exchange=exchange),
    "FP8": lambda exchange: FP8Compressor(exchange=exchange),
    "Int8": lambda exchange: Int8Compressor(exchange=exchange),
}
TODAY: dict[str, tuple[Compressor, float | None]] = {  # and the bar
    "Chunked top-k": (ChunkedTopKCompressor(), 4.0),
    "PowerSGD, rank 4": (PowerSGDCompressor(rank=4), None),
    "DeMo": (DeMoCompressor(), None),
    "Signum": (SignumCompressor(), 7.0),
    "EF-signSGD": (EFSignSGDCompressor(exchange="allgather"), 8.0),
    "Natural": (NaturalCompressor(), 8.0),
    "Random-k": (RandomKCompressor(), 5.0),
}
NARROW_COPIES = 6.0
# The most copies of the gradient that a step of two ranks may take in one thread.
RATIOS = {500.0: 5.0, 100.0: 6.0, 16.0: 8.0, 4.0: 10.0}
DENSITIES = {0.001: 5.0, 0.01: 6.5, 0.1: 12.0}


class Point(NamedTuple):
    """A method at a density.

    Attributes:
        method: its name.
        asked: what the density is to be: an element ratio, or a share of the elements; "" where
            there is nothing to choose.
        make: the compressor; of a threshold one that reaches the ratio, which takes a while.
        copies: its bar, None without one.
        middle: whether it stands for its method.
    """

    method: str
    density: str
    make: Callable[[], Compressor]
    copies: float | None = None
    middle: bool = True

    @property
    def name(self) -> str:
        return f"{self.method} {self.density}".strip()


def every() -> list[Point]:
    """All points, dense first."""
    points = [Point(DENSE, "", NoneCompressor), Point("half precision", "", FP16Compressor)]
    for method, by_threshold in WORDS.items():
        for ratio, bar in RATIOS.items():
            make = partial(tuned, by_threshold, ratio)
            points.append(Point(method, f"{ratio:g}", make, bar, ratio == 16))
    for method, by_density in LARGEST.items():
        for density, bar in DENSITIES.items():
            make = partial(by_density, density)
            points.append(Point(method, f"{100 * density:g} %", make, bar, density == 0.01))
    for quantizers, bar in ((ONE_SHOT, 7.0), (TWO_SHOTS, 10.0)):
        points += [Point(name, "", lambda c=c: c, bar) for name, c in quantizers.items()]
    for name, by_exchange in NARROW.items():
        make = partial(by_exchange, "two_shot")
        points.append(Point(f"{name}, two shots", "", make, NARROW_COPIES))
    points += [Point(name, "", lambda c=c: c, bar) for name, (c, bar) in TODAY.items()]
    return points


def chosen(points: Iterable[Point], only: Sequence[str]) -> list[Point]:
    """Those whose name is, or begins with, words like these; all if there are none."""

    def words(name: str) -> list[str]:
        return name.lower().replace(",", "").split()

    def is_named(point: Point) -> bool:
        named = words(point.name)
        return any(named[: len(name)] == name for name in map(words, only))

    return [point for point in points if not only or is_named(point)]


class Noise:
    """Heavy-tailed noise, drawn once and read from another place each step: drawing takes long."""

    def __init__(self, elements: int, seed: int, device: str = "cpu") -> None:
        generator = torch.Generator(device).manual_seed(seed)
        size = elements + _SHIFTS

        def normal() -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device)

        self._values, squares = normal(), torch.zeros(size, device=device)
        for _ in range(_DEGREES):
            squares += normal().square_()
        self._values *= squares.div_(_DEGREES).rsqrt_()
        self._place = torch.Generator().manual_seed(seed)

    def fill(self, tensors: Iterable[torch.Tensor]) -> None:
        """The gradients of the next step."""
        at = int(torch.randint(_SHIFTS, (), generator=self._place))
        for tensor in tensors:
            tensor.copy_(self._values[at : at + tensor.numel()].view_as(tensor))
            at += tensor.numel()


@cache
def tuned(make: Callable[[float], Compressor], ratio: float) -> Compressor:
    """With the least threshold found at which noise is sent once in `ratio` elements, or less."""
    low, high = 1e-3, 1e3
    while high > NEAR ** (1 / 8) * low:
        middle = (low * high) ** 0.5
        reached_ = reached(make(middle))
        if reached_ < ratio:
            low = middle
        else:
            high = middle
            if reached_ < NEAR * ratio:
                break
    return make(high)


def reached(compressor: Compressor) -> float:
    """The element ratio of a small layer once it has settled."""
    ops, layout = TorchOps(), Layout(("sample",), ((_SAMPLE,),))
    world, noise = World(compressor, ops, layout, 1), Noise(_SAMPLE, 2)
    gradient = ops.zeros((layout.size,))
    for step in range(SETTLE + WINDOW):
        if step == SETTLE:
            before = int(world.states[0].sent.sum())
        noise.fill([gradient[:_SAMPLE]])
        world.step([gradient])
    return _SAMPLE * WINDOW / max(int(world.states[0].sent.sum()) - before, 1)
