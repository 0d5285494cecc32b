"""C kernels of powers of two give the bits of the plain ops, on both frameworks."""

from __future__ import annotations

import pytest
import torch

from hvd_gradcomp.ops.torch import TorchOps
from tests.kernels import NATIVE, threads
from tests.single.test_narrow_kernels import SIZES, Both, frameworks, noise, plain, same


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", [*SIZES, 300_001])
def test_powers_of_two(framework, count, size):
    """Numbers of the random key wrap round; the last payload is longer than the sum."""
    both, ops, key = Both(framework), TorchOps(static=True), torch.tensor([4_294_967_000, 12345])
    with threads(count):
        rows = []
        for seed in (1, 2, 3):
            x = noise(size, seed)
            x[4::19] = float("inf") if seed == 1 else -float("inf")
            rows.append(both("encode_powers", x, key))
            assert same(rows[-1], plain("encode_powers")(ops, x, key))
        longer = [torch.cat([row, torch.full((36,), 255, dtype=torch.uint8)]) for row in rows]
        weights = torch.tensor([0.5, -0.25, 0.0])
        for packed in (torch.stack(rows), torch.stack(longer)):
            for base in (None, noise(size, 4)):
                ours = both("add_powers", base, torch.full_like(x, 7.0), packed, weights)
                out = torch.full_like(x, 7.0)
                theirs = plain("add_powers")(ops, base, out, packed, weights)
                assert same(*(torch.nan_to_num(one, nan=9.0) for one in (ours, theirs)))


@NATIVE
def test_what_does_not_fit():
    ops = TorchOps()
    with pytest.raises(ValueError, match="whole words"):
        ops.encode_powers(torch.ones(63), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="a code for each of 64"):
        short = torch.zeros(2, 36, dtype=torch.uint8)
        ops.add_powers(None, torch.zeros(64), short, torch.ones(2))
