"""Bytes that a released format must go on producing.

python -m tests.golden.bytes_of      writes those that are missing; never overwrites one
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.testing import World

FOLDER = Path(__file__).parent
SHAPES = ((3, 20), (5,))
STEPS = 8


def path_of(compressor: Compressor) -> Path:
    name = "".join(c if c.isalnum() else "_" for c in repr(compressor)).strip("_")
    if len(name) > 100:
        name = f"{name[:60]}_{zlib.crc32(name.encode()):08x}"
    return FOLDER / f"{name}.json"


def gradient(step: int, rank: int) -> list[list[float]]:
    """Exact in float32 and without a generator: small multiples of powers of two."""
    values = [
        [
            ((37 * i + 11 * step + 5 * rank) % 23 - 11) * 2.0 ** ((i + step) % 7 - 4)
            for i in range(n)
        ]
        for n in (60, 5)
    ]
    return values


def run(compressor: Compressor, ops: Any, tensor: Any, nbytes: Any) -> list[list[str]]:
    """What two ranks send, as hexadecimal, [round][rank], step after step."""
    layout = Layout(("weight", "bias"), SHAPES, block=compressor.block)
    world = World(compressor, ops, layout, 2)
    sent = []
    for step in range(STEPS):
        world.step([world.flat([tensor(x) for x in gradient(step, r)]) for r in range(2)])
        for requests in world.traffic:
            sent.append([nbytes(request.tensor).hex() for request in requests])
    return sent


def main() -> None:
    import torch

    from hvd_gradcomp.ops.torch import TorchOps
    from tests.methods import EVERY, TODAY

    for compressor in EVERY + TODAY:
        path = path_of(compressor)
        if not path.exists():
            sent = run(compressor, TorchOps(), torch.tensor, lambda x: x.numpy().tobytes())
            path.write_text(json.dumps(sent, indent=1) + "\n")
            print("wrote", path.name)


if __name__ == "__main__":
    main()
