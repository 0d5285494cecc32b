"""C kernels of the majority vote give the bits of the plain ops, on both frameworks."""

from __future__ import annotations

import pytest
import torch

from hvd_gradcomp import SignumCompressor
from hvd_gradcomp.core.row_groups import RowGroup, RowGroups
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.kernels import NATIVE, assert_alike, layout_of, threads
from tests.single.test_narrow_kernels import SIZES, Both, frameworks, noise, plain, same


def with_gaps(size: int) -> RowGroups:
    """Layers with a gap in front, between them and behind, where there is room for that."""
    cuts = (5, size // 3), (size // 3 + 40, size - 3)
    runs = [RowGroup(a, 1, b - a) for a, b in cuts if b > a]
    return RowGroups(tuple(runs or [RowGroup(0, 1, size)]))


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", [*SIZES, 300_001])
def test_signs_of_a_momentum(framework, count, size):
    both, ops, groups = Both(framework), TorchOps(static=True), with_gaps(size)
    m, gradient = noise(size, 1), noise(size, 2)
    m[4::19] = gradient[4::19] = 0.0
    for at, value in ((0, float("nan")), (-9, float("inf")), (-10, -float("inf"))):
        gradient[at] = value
    with threads(count):
        for negative in (0, 1):
            for momentum in (0.9, 0.0):
                arguments = groups, m, gradient, momentum, negative
                theirs = plain("momentum_signs")(ops, groups, m, gradient.clone(), *arguments[3:])
                assert all(map(same, both("momentum_signs", *arguments), theirs))


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", [1, 33, 4097, 300_001])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 33])
def test_majority(framework, count, size, ranks):
    both, ops, groups = Both(framework), TorchOps(static=True), with_gaps(size)
    generator = torch.Generator().manual_seed(ranks)
    m = noise(size)
    packed = torch.randint(256, (ranks, m.shape[0] // 8), generator=generator).to(torch.uint8)
    weights = torch.ones(ranks)
    with threads(count):
        for left_out in (ranks, 1, ranks // 2, 0):  # the last time all are
            weights[left_out:] = 0.0
            for unit in (0.3, float("inf")):
                theirs = plain("majority")(ops, groups, packed, weights, unit, m.clone(), m.clone())
                out = torch.full_like(m, 7.0)
                ours = both("majority", groups, packed, weights, unit, m, out)
                assert torch.equal(torch.isnan(ours[0]), torch.isnan(theirs[0]))
                assert same(*(torch.nan_to_num(x, nan=9.0) for x in (ours[0], theirs[0])))
                assert same(ours[1], m)


@NATIVE
def test_of_a_payload_that_is_too_short():
    ops, groups = TorchOps(), RowGroups((RowGroup(0, 1, 64),))
    m = torch.zeros(64)
    with pytest.raises(ValueError, match="a sign for each"):
        short = torch.zeros(2, 4, dtype=torch.uint8)
        ops.majority(groups, short, torch.ones(2), 1.0, m, m.clone())
    with pytest.raises(ValueError, match="at least"):
        beyond = RowGroups((RowGroup(32, 1, 64),))
        ops.majority(beyond, torch.zeros(2, 8, dtype=torch.uint8), torch.ones(2), 1.0, m, m.clone())


@NATIVE
@pytest.mark.parametrize("ranks", [2, 3])
def test_whole_steps(ranks):
    """Layers of odd sizes, an empty one, zeros; with a state that may be rolled back, too."""
    layout = layout_of(5, 0, 1000, 33, 4097)
    plainly = TorchOps()
    plainly.native = None
    ours, theirs = (World(SignumCompressor(), ops, layout, ranks) for ops in (TorchOps(), plainly))
    for step in range(3):
        gradients = []
        for rank in range(ranks):
            generator = torch.Generator().manual_seed(10 * step + rank)
            layers = [torch.randn(s, generator=generator) for s in layout.shapes]
            layers[2][::3] = 0.0
            gradients.append(layers)
        results = [
            w.step([w.flat([x.clone() for x in g]) for g in gradients]) for w in (ours, theirs)
        ]
        assert all(map(torch.equal, *results))
        assert_alike(ours, theirs)
