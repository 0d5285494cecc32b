"""The C kernels of thin factors: near the plain ops, and with the same bits on both frameworks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_gradcomp import ACPSGDCompressor, PowerSGDCompressor
from hvd_gradcomp.core.factored import FactoredMatrices, Matrix, ThinMatrices
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
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
    # Of one shape: side by side, at equal distances, and not.
    (200, ((0, 5, 8, 2), (40, 5, 8, 2), (80, 5, 8, 2), (125, 5, 8, 2), (170, 5, 3, 3))),
    (150, ((3, 5, 8, 2), (53, 5, 8, 2), (103, 5, 8, 2))),
)


def arguments_of(size, matrices):
    generator = torch.Generator().manual_seed(size)
    left = sum(rows * rank for _, rows, _, rank in matrices)
    right = sum(columns * rank for _, _, columns, rank in matrices)
    between = size - sum(rows * columns for _, rows, columns, _ in matrices)
    sizes = (size, size, left, right, left, right, between)
    x, out, p, q, other_p, other_q, rest = (torch.randn(n, generator=generator) for n in sizes)
    return x, out, factored(matrices), (p, q), (other_p, other_q), rest


def factored(matrices):
    return FactoredMatrices(tuple(Matrix(*numbers) for numbers in matrices))


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


def float64(x):
    return np.asarray(x, np.float64)


def by_numpy(x, matrices, factors, transposed):
    """The products, in double precision."""
    products, at = [np.zeros(0)], 0
    for start, rows, columns, rank in matrices.matrices:
        m = float64(x[start : start + rows * columns]).reshape(rows, columns)
        m = m.T if transposed else m
        factor = float64(factors[at : at + m.shape[1] * rank]).reshape(-1, rank)
        products.append((m @ factor).ravel())
        at += factor.size
    return np.concatenate(products)


OPS = [
    pytest.param(TorchOps, False, marks=NATIVE, id="torch"),
    pytest.param(lambda: TorchOps(static=True), False, id="torch, plain"),
    pytest.param(TensorFlowOps, True, marks=NATIVE, id="tensorflow"),
    pytest.param(lambda: TensorFlowOps(static=True), True, id="tensorflow, plain"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("make", "converts"), OPS)
def test_products(case, transposed, make, converts):
    x, _, matrices, (p, q), _, _ = arguments_of(*case)
    of = tf.constant if converts else torch.clone
    factors = p if transposed else q
    product = make().multiply_factors(of(x), matrices, of(factors), transposed)
    expected = by_numpy(x, matrices, factors, transposed)
    assert np.allclose(np.asarray(product), expected, rtol=1e-4, atol=1e-4)


@NATIVE
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", CASES[2:], ids=str)
def test_products_have_the_same_bits_in_any_number_of_threads(case, transposed):
    ops, (x, _, matrices, (p, q), _, _) = TorchOps(), arguments_of(*case)
    factors, both = p if transposed else q, Both("tensorflow")
    ours = ops.multiply_factors(x, matrices, factors, transposed)
    theirs = both.ops.multiply_factors(both.of(x), matrices, both.of(factors), transposed)
    assert same(both.back(theirs), ours)
    for count in (2, 3, 7):
        with threads(count):
            assert same(ops.multiply_factors(x, matrices, factors, transposed), ours)


THIN = ThinMatrices(((7, 3), (600, 3), (4, 4), (1, 1), (7, 3), (33, 4)))


def hard(shape, generator):
    """Columns of very unlike sizes, some that are 0, and some that depend on those before them."""
    x = torch.randn(shape, generator=generator) * 1e-25
    if shape[1] > 1:
        x[:, 1] = x[:, 0] * 3e20
    if shape[1] > 3:
        x[:, 3] = 0.0
    return x


@pytest.mark.parametrize("kind", ["normal", "hard", "zero", "one row", "one"])
@pytest.mark.parametrize(("make", "converts"), OPS)
def test_orthonormal_columns(kind, make, converts):
    generator, pieces = torch.Generator().manual_seed(2), []
    for shape in THIN.shapes:
        x = torch.randn(shape, generator=generator)
        if kind == "hard":
            x = hard(shape, generator)
        elif kind == "zero":
            x = torch.zeros(shape)
        elif kind == "one row":
            x[:1], x[2:] = 0.0, 0.0
        elif kind == "one":
            x = torch.ones(shape)
        pieces.append(x)
    flat = torch.cat([x.reshape(-1) for x in pieces])
    result = make().orthogonalize_factors(tf.constant(flat) if converts else flat, THIN)
    result = float64(result)
    for start, shape, x in zip(THIN.starts, THIN.shapes, pieces):
        q, k = result[start : start + shape[0] * shape[1]].reshape(shape), shape[1]
        assert np.allclose(q.T @ q, np.eye(k), atol=1e-5), (shape, q.T @ q)
        largest = float64(x).__abs__().max(0)
        inside = q.T @ (float64(x) / np.where(largest > 0, largest, 1.0))
        assert np.allclose(np.tril(inside, -1), 0.0, atol=1e-4), "each spans what those before do"
        assert (np.diagonal(inside) >= -1e-6).all()
        if kind == "normal":
            assert np.allclose(q, TorchOps().orthogonalize(x), atol=1e-4)


@NATIVE
def test_orthonormal_columns_have_the_same_bits_in_any_number_of_threads():
    x, ops, both = torch.randn(THIN.size), TorchOps(), Both("tensorflow")
    ours = ops.orthogonalize_factors(x, THIN)
    assert same(both.back(both.ops.orthogonalize_factors(both.of(x), THIN)), ours)
    for count in (2, 3, 7):
        with threads(count):
            assert same(ops.orthogonalize_factors(x, THIN), ours)


@NATIVE
def test_thin_matrices_that_do_not_fit_are_refused():
    ops, x = TorchOps(), torch.randn(10)
    for shapes in (((5, 1),), ((5, 3),), ((2, 5),), ((5, 0), (5, 2)), ((-5, 2),), ((1 << 62, 4),)):
        with pytest.raises(ValueError, match="orthogonalize_factors"):
            ops.native("orthogonalize_factors", (numbers(shapes), x), (x.clone(),))
    with pytest.raises(ValueError, match="orthogonalize_factors"):
        ops.native("orthogonalize_factors", (ops.numbers((5, 2, 1)), x), (x.clone(),))


def numbers(rows):
    return TorchOps().numbers([number for row in rows for number in row])


@NATIVE
def test_products_that_do_not_fit_are_refused():
    ops, (x, _, matrices, (p, q), _, _) = TorchOps(), arguments_of(40, ((5, 4, 7, 3),))
    for wrong, transposed in ((p, False), (q, True), (q[:-1], False)):
        with pytest.raises(ValueError, match="multiply_factors"):
            ops.multiply_factors(x, matrices, wrong, transposed)
    with pytest.raises(ValueError, match="multiply_factors"):
        ops.multiply_factors(x[:30], matrices, q, False)


def launches(compressor, shapes):
    """Count what a step launches on a GPU for layers of some shapes."""
    traffic = pytest.importorskip("benchmarks.traffic")
    layout = Layout(tuple(map(str, range(len(shapes)))), tuple(shapes), block=1)
    return traffic.plain_step(compressor, layout).launches


@pytest.mark.parametrize("kind", [PowerSGDCompressor, ACPSGDCompressor])
def test_layers_of_one_shape_cost_no_more_launches(kind):
    few, many = (launches(kind(), [(40, 50), (40,)] * count) for count in (3, 30))
    assert many == few, "at equal distances, as the blocks of a network lie"
    few, many = (
        launches(kind(), [shape for n in range(1, count) for shape in ((40, 50), (n,))])
        for count in (4, 31)
    )
    assert many == few, "at other distances, which takes a copy"


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
            ops.expand_factors(x.clone(), out, factored(matrices), factors, mean, rest)
    matrices = factored(((5, 4, 7, 3),))
    for wrong in (factors[0][:-1], factors[1]), (factors[0], factors[1][:-1]):
        with pytest.raises(ValueError, match="expand_factors"):
            ops.expand_factors(x.clone(), out, matrices, wrong, mean, rest)
        with pytest.raises(ValueError, match="expand_factors"):
            ops.expand_factors(x.clone(), out, matrices, factors, wrong, rest)
    with pytest.raises(ValueError, match="expand_factors"):
        ops.expand_factors(x.clone(), out, matrices, factors, mean, rest[:-1])
