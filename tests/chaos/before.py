"""What single mistakes of the list came to, in the code of any checkout of this repository.

    git worktree add ../before febe006 && cp -r tests/chaos ../before/tests/
    cd ../before && horovodrun --gloo -np 2 python -m tests.chaos.before FOLDER

Numbers are those of the list: 1 a bit of a checkpoint, 2 a rank's truncated shard, 7 the learning
rate of a group that names none, 8 a layer without elements, 9 a sum that overflows. It uses nothing
that the code of then had not; the rest of the list is in `tests.chaos`, which does.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from hvd_gradcomp import (
    DGCCompressor,
    EGCCompressor,
    FP16Compressor,
    GradientDroppingCompressor,
    NoneCompressor,
    OneBitCompressor,
    QSGDCompressor,
    SparseGDCompressor,
    StromCompressor,
    TernGradCompressor,
)
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World

STROM = StromCompressor(tau=0.01)
LARGEST = (
    DGCCompressor(momentum=0.0),
    EGCCompressor(momentum=0.0),
    SparseGDCompressor(),
    GradientDroppingCompressor(),
)
QUANTIZERS = (QSGDCompressor(), TernGradCompressor(), OneBitCompressor())
FLIPS = 60  # of each mode
RATE = 0.1


class Training:
    """A small model, with a residual and momentum."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
        inner = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
        named = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(inner, named, compression=STROM)
        self.train()

    def train(self) -> None:
        for _ in range(3):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 64)).square().mean().backward()
            self.optimizer.step()

    def save(self, folder: Path, mode: str = "sharded") -> None:
        hvd.save_checkpoint(folder, model=self.model, optimizer=self.optimizer, mode=mode)

    def load(self, folder: Path) -> str:
        """The name of the error, if there was one."""
        try:
            hvd.load_checkpoint(folder, model=self.model, optimizer=self.optimizer)
        except Exception as error:
            return type(error).__name__
        return ""


def written(path: Path, data: bytes) -> None:
    """By rank 0, while no rank reads."""
    hvd.allgather_object(None)
    if hvd.rank() == 0:
        path.write_bytes(data)
    hvd.allgather_object(None)


def flipped(folder: Path) -> str:
    """Every rank reads all files, so one of them damages what both then load."""
    training, dice, red = Training(), random.Random(1), 0
    for mode in ("sharded", "consolidated"):
        saved_in = folder / mode
        training.save(saved_in, mode)
        for _ in range(FLIPS):
            files = sorted(p for p in saved_in.rglob("*") if p.is_file() and p.stat().st_size)
            (path,) = dice.choices(files, [p.stat().st_size for p in files])
            was = path.read_bytes()
            damaged, bit = bytearray(was), dice.randrange(8 * len(was))
            damaged[bit // 8] ^= 1 << bit % 8
            written(path, damaged)
            red += set(hvd.allgather_object(training.load(saved_in))) != {"CheckpointError"}
            written(path, was)
    return f"{red} of {2 * FLIPS} flipped bits of a checkpoint were no CheckpointError on all ranks"


def truncated(folder: Path) -> str:
    training = Training()
    training.save(folder)
    training.train()
    if hvd.rank() == 1:
        for path in (p for p in folder.rglob("*") if "1-of-2" in str(p) and p.is_file()):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    hvd.allgather_object(None)
    before = [p.detach().clone() for p in training.model.parameters()]
    training.load(folder)
    changed = any(not torch.equal(*pair) for pair in zip(before, training.model.parameters()))
    ranks = [rank for rank, one in enumerate(hvd.allgather_object(changed)) if one]
    return f"ranks whose model a load has changed that failed for a truncated shard: {ranks}"


def group(folder: Path) -> str:
    optimizer = Training().optimizer
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    return f"a group without lr takes {optimizer.param_groups[-1]['lr']}, the others have {RATE}"


def empty(folder: Path) -> str:
    red = []
    for one in (*LARGEST, *QUANTIZERS, STROM):
        layers = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(300))
        try:
            inner = torch.optim.SGD(layers, lr=RATE)
            optimizer = hvd.DistributedOptimizer(inner, compression=one)
            torch.cat(layers).sum().backward()
            optimizer.step()
        except Exception as error:
            red.append(f"{type(one).__name__} ({type(error).__name__})")
    return f"a layer without elements: {', '.join(red) or 'no error'}"


def overflowing(folder: Path) -> str:
    red = []
    for one in (NoneCompressor(), FP16Compressor(), *QUANTIZERS, STROM, *LARGEST):
        layout = Layout(("weight",), ((600,),), block=one.block)
        world = World(one, TorchOps(), layout, 4, average=False)
        try:
            results = world.step([torch.full((layout.size,), 3e38) for _ in range(4)])
        except ArithmeticError:
            continue
        if not all(bool(x.isfinite().all()) for x in results):
            red.append(type(one).__name__)
    return f"infinite sums without a word: {', '.join(red) or 'none'}"


ITEMS: dict[int, Callable[[Path], str]] = {
    1: flipped,
    2: truncated,
    7: group,
    8: empty,
    9: overflowing,
}


def main() -> None:
    logging.disable(logging.CRITICAL)
    hvd.init()
    for number, item in ITEMS.items():
        outcome = item(Path(sys.argv[1], str(number)))
        if hvd.rank() == 0:
            print(f"{number}: {outcome}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
