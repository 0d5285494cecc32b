"""Parts that train replicas by `DistributedDataParallel`: each step exchanged, or local steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import hvd_gradcomp
from benchmarks import points
from benchmarks.gpu.models import Task, resnet50, small, transformer
from benchmarks.gpu.part import Part, Row, Setting
from benchmarks.gpu.ranks import alone_or_two, measured, names_of, require_equal, timed
from benchmarks.worth.methods import METHODS
from hvd_gradcomp.torch import ddp

ALONE = "DDP without a hook"
FIRST = (  # by worth; the others follow
    points.DENSE, "QSGD", "Int8", "Chunked top-k", "PowerSGD", "DGC", "EGC", "1-bit", "EF-signSGD",
    "half precision",
)  # fmt: skip
LAST = ("Variance", "Strom", "Hybrid", "ScaleCom", "DeMo")  # slow, or slow to tune
ALIKE = ", int32"  # another code of the same indices
LOCAL = {METHODS[key].title: METHODS[key] for key in ("local-int8-5", "eighth-5")}


def steps_of(setting: Setting) -> int:
    """Return how many steps a method makes: rounds of five, whose later half is timed."""
    return 10 if setting.is_small else 20


def ordered(setting: Setting) -> list[str]:
    """Return the names of the points that stand for their methods, or of those in `only`."""
    middle = (point for point in points.every() if point.middle)
    names = [point.name for point in points.chosen(middle, setting.only)]
    names = [name for name in names if setting.only or ALIKE not in name]

    def place(name: str) -> int:
        if name.startswith(LAST):
            return len(FIRST) + 1 + LAST.index(next(x for x in LAST if name.startswith(x)))
        return next((at for at, first in enumerate(FIRST) if name.startswith(first)), len(FIRST))

    return sorted(names, key=place)


def compressed(
    make: Callable[[Setting], Task],
    places: Callable[[Setting], list[tuple[str, int]]],
    share: float,
) -> Part:
    """Return a part that trains with each method, and without a hook.

    Args:
        make: of the model.
        places: backends, with their ranks.
        share: of the time.
    """

    def names(setting: Setting) -> list[str]:
        first = [] if setting.only else [ALONE]
        return names_of([*first, *ordered(setting)], places(setting))

    def measure(setting: Setting, names: list[str], deadline: float) -> Iterator[Row]:
        return measured(setting, names, deadline, partial(trained, make))

    return Part(share, names, measure)


def local_steps(share: float) -> Part:
    """Return a part that trains with local steps, beside an exchange in each step."""

    def names(setting: Setting) -> list[str]:
        return names_of([ALONE, *LOCAL], alone_or_two(setting))

    def measure(setting: Setting, names: list[str], deadline: float) -> Iterator[Row]:
        return measured(setting, names, deadline, partial(trained, transformer))

    return Part(share, names, measure)


def trained(make: Callable[[Setting], Task], setting: Setting, method: str) -> Row:
    """Return times and bytes of some steps by one method.

    Raises:
        AssertionError: replicas differ.
    """
    torch.manual_seed(1)
    bare, loss, rate = make(setting)
    model, names = DistributedDataParallel(bare), {**vars(hvd_gradcomp)}
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    exchange: Any = None
    if method in LOCAL:
        how = eval(f"dict({LOCAL[method].local})", names)
        compressor = eval(LOCAL[method].compressor, names)
        optimizer = exchange = ddp.local_steps(model, optimizer, compression=compressor, **how)
    elif method != ALONE:
        (point,) = (point for point in points.every() if point.name == method)
        exchange = ddp.compress(model, point.make())

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    def bytes_sent() -> int:
        return 0 if exchange is None else int(exchange.stats().bytes_sent)

    row = timed(step, bytes_sent, steps_of(setting), setting.device)
    require_equal([*model.parameters()])
    return row


def over_nccl(setting: Setting) -> list[tuple[str, int]]:
    """Return NCCL with one rank, or with two where there are two GPUs; gloo on a CPU."""
    return [("gloo", 1)] if setting.is_small else [("nccl", min(2, setting.devices))]


training = partial(compressed, resnet50, over_nccl)
exchange = partial(compressed, small, alone_or_two)
