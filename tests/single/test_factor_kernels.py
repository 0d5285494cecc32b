"""The C kernel of thin factors: near the plain ops, and with the same bits on both frameworks."""

from __future__ import annotations

import pytest
import torch

from hvd_gradcomp.ops.torch import TorchOps
from tests.kernels import NATIVE, threads
from tests.single.test_narrow_kernels import Both, same

CASES = (  # size, and matrices: start, rows, columns, rank
    (0, ()),
    (7, ()),
    (12, ((0, 3, 4, 1),)),
    (40, ((5, 4, 7, 3),)),
    (3000, ((1, 2, 513, 2), (1030, 40, 33, 4), (2350, 1, 600, 1))),
    (70_001, ((0, 64, 1024, 4), (65_536, 31, 144, 7))),
)


def arguments_of(size, matrices):
    generator = torch.Generator().manual_seed(size)
    left = sum(rows * rank for _, rows, _, rank in matrices)
    right = sum(columns * rank for _, _, columns, rank in matrices)
    between = size - sum(rows * columns for _, rows, columns, _ in matrices)
    sizes = (size, size, left, right, left, right, between)
    x, out, p, q, other_p, other_q, rest = (torch.randn(n, generator=generator) for n in sizes)
    return x, out, matrices, (p, q), (other_p, other_q), rest


def copies(arguments):
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]


@NATIVE
@pytest.mark.parametrize("case", CASES, ids=str)
def test_factors(case):
    ops, arguments = TorchOps(), arguments_of(*case)
    ours = ops.expand_factors(*copies(arguments))
    double = [
        tuple(y.double() for y in x)
        if isinstance(x, tuple) and x and isinstance(x[0], torch.Tensor)
        else x.double()
        if isinstance(x, torch.Tensor)
        else x
        for x in arguments
    ]
    theirs = TorchOps(static=True).expand_factors(*double)
    for one, other in zip(ours, theirs):
        assert torch.allclose(one.double(), other, rtol=1e-4, atol=1e-4)
    with threads(2):
        assert all(map(same, ops.expand_factors(*copies(arguments)), ours))


@NATIVE
@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_tensorflow_has_the_same_bits(case):
    both, arguments = Both("tensorflow"), arguments_of(*case)
    pairs = [tuple(map(both.of, pair)) for pair in arguments[3:5]]
    x, out, rest = map(both.of, (arguments[0], arguments[1], arguments[5]))
    results = both.ops.expand_factors(x, out, arguments[2], *pairs, rest)
    ours = TorchOps().expand_factors(*copies(arguments))
    assert all(same(both.back(one), other) for one, other in zip(results, ours))


@NATIVE
def test_what_is_between_matrices_is_kept_nowhere():
    x, out, matrices, factors, mean, rest = arguments_of(40, ((5, 4, 7, 3),))
    kept, total = TorchOps().expand_factors(x.clone(), out, matrices, factors, mean, rest)
    assert not kept[:5].any() and not kept[33:].any()
    assert torch.equal(torch.cat((total[:5], total[33:])), rest)
    assert torch.allclose(
        kept[5:33].view(4, 7), x[5:33].view(4, 7) - factors[0].view(4, 3) @ factors[1].view(7, 3).T
    )


@NATIVE
def test_what_does_not_fit_is_refused():
    ops, (x, out, _, factors, mean, rest) = TorchOps(), arguments_of(40, ((5, 4, 7, 3),))
    for matrices in (
        ((13, 4, 7, 3),),
        ((-1, 4, 7, 3),),
        ((5, 4, 7, 0),),
        ((5, 4, 7, 5),),
        ((5, 4, 1 << 62, 3),),
        ((5, 4, 7, 3), (6, 1, 1, 1)),
        ((5, 4, 6, 3),),
        (),
    ):
        with pytest.raises(ValueError, match="expand_factors"):
            ops.expand_factors(x.clone(), out, matrices, factors, mean, rest)
    for wrong in (factors[0][:-1], factors[1]), (factors[0], factors[1][:-1]):
        with pytest.raises(ValueError, match="expand_factors"):
            ops.expand_factors(x.clone(), out, ((5, 4, 7, 3),), wrong, mean, rest)
        with pytest.raises(ValueError, match="expand_factors"):
            ops.expand_factors(x.clone(), out, ((5, 4, 7, 3),), factors, wrong, rest)
    with pytest.raises(ValueError, match="expand_factors"):
        ops.expand_factors(x.clone(), out, ((5, 4, 7, 3),), factors, mean, rest[:-1])
