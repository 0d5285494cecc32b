"""The C kernel of tiles: near the plain ops, and with the same bits on both frameworks."""

from __future__ import annotations

import pytest
import torch

from hvd_gradcomp.ops.torch import TorchOps
from tests.kernels import NATIVE, threads
from tests.single.test_narrow_kernels import Both, same

SHAPES = (  # rows, columns, height, width
    (1, 1, 1, 1),
    (1, 50, 1, 50),
    (64, 147, 64, 49),
    (100, 128, 50, 64),
    (6, 35, 3, 7),
    (4, 32, 4, 16),
    (130, 90, 65, 90),
)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@NATIVE
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("back", [False, True])
def test_tiles(shape, back):
    ops, (rows, columns, height, width) = TorchOps(), shape
    x, left, right = drawn(rows * columns), drawn(height, height), drawn(width, width)
    arguments = x, (rows, columns), left, right, back
    ours = ops.turn_tiles(*arguments)
    double = [y.double() if isinstance(y, torch.Tensor) else y for y in arguments]
    theirs = TorchOps(static=True).turn_tiles(*double)
    assert torch.allclose(ours.double(), theirs, rtol=1e-4, atol=1e-3)
    with threads(2):
        assert same(ops.turn_tiles(*arguments), ours)
    on_tensorflow = Both("tensorflow")("turn_tiles", *arguments)
    assert same(on_tensorflow, ours)


@NATIVE
def test_what_is_not_finite_stays_in_its_tile():
    ops, x = TorchOps(), drawn(4 * 8)
    x[0], x[5] = float("nan"), float("inf")  # both in the first of four tiles, of 2 by 4 or 8
    out = ops.turn_tiles(x, (4, 8), drawn(2, 2), drawn(8, 8), False)
    assert not torch.isfinite(out[:16]).any()
    assert torch.isfinite(out[16:]).all()


@NATIVE
def test_what_does_not_fit_is_refused():
    ops = TorchOps()
    for size, shape in (
        (30, (4, 8)),
        (32, (3, 8)),
        (32, (0, 8)),
        (32, (-4, -8)),
        (32, (4, 1 << 62)),
    ):
        with pytest.raises(ValueError, match="turn_tiles"):
            ops.turn_tiles(torch.zeros(size), shape, drawn(2, 2), drawn(4, 4), False)
    with pytest.raises(ValueError, match="turn_tiles"):
        ops.turn_tiles(torch.zeros(32), (4, 8), drawn(2, 3), drawn(4, 4), False)
