"""Methods outside of the package: the op they use, the laws they keep, and the tests of all."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_gradcomp import NoneCompressor, NonFiniteGradientError
from hvd_gradcomp.codecs.linear import LinearCompressor
from hvd_gradcomp.codecs.quantized import QuantizedCompressor
from hvd_gradcomp.codecs.sparse import Residual
from hvd_gradcomp.codecs.topk import TopKCompressor
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Context, leaves
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.methods import OUTSIDE

LAYOUT = (("a.weight", "a.bias", "b.weight"), ((30, 20), (9,), (6, 4, 3, 3)))
every = pytest.mark.parametrize("compressor", OUTSIDE, ids=repr)


def world_of(compressor, ops=None, size=3, **options):
    layout = Layout(*LAYOUT, block=compressor.block)
    return World(compressor, ops or TorchOps(), layout, size, **options)


def draw(world, random):
    return [
        world.flat([torch.randn(s, generator=random) for s in world.layout.shapes])
        for _ in range(world.size)
    ]


# -- orthogonalize ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 3), (4, 4), (1, 1), (3, 5, 2), (600, 8)], ids=str)
def test_orthogonalize_on_both_frameworks(shape):
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    for dtype in ("float32", "float64"):
        results = [
            np.asarray(TorchOps().orthogonalize(torch.tensor(x.astype(dtype)))),
            np.asarray(TensorFlowOps().orthogonalize(tf.constant(x.astype(dtype)))),
            np.asarray(tf.function(TensorFlowOps().orthogonalize)(tf.constant(x.astype(dtype)))),
        ]
        for q in results:
            assert q.dtype == dtype and q.shape == shape
            product = np.swapaxes(q, -1, -2) @ q
            np.testing.assert_allclose(
                product, np.broadcast_to(np.eye(shape[-1]), product.shape), atol=1e-5
            )
            inside = np.swapaxes(q, -1, -2) @ x  # upper triangular, its diagonal not negative
            np.testing.assert_allclose(np.tril(inside, -1), 0.0, atol=1e-4)
            assert (np.diagonal(inside, axis1=-2, axis2=-1) >= 0).all()
            np.testing.assert_allclose(q, results[0], atol=1e-4)


@pytest.mark.parametrize("ops", [TorchOps(), TensorFlowOps()], ids=lambda ops: type(ops).__name__)
def test_orthogonalize_what_has_no_direction(ops):
    for columns in ([[0.0, 0.0]] * 5, [[1.0, 2.0]] * 5, [[0.0, 1.0]] * 5):
        make = torch.tensor if isinstance(ops, TorchOps) else tf.constant
        q = np.asarray(ops.orthogonalize(make(columns)))
        np.testing.assert_allclose(q.T @ q, np.eye(2), atol=1e-6)


# -- laws ------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("average", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_nothing_is_lost(compressor, size, average):
    """What the ranks have received and what they keep is what there was."""
    world = world_of(compressor, size=size, average=average)
    random = torch.Generator().manual_seed(1)
    accumulated = received = 0
    for _ in range(12):
        gradients = draw(world, random)
        copies = [g.clone() for g in gradients]
        totals = world.step(gradients)
        assert all(torch.equal(total, totals[0]) for total in totals), "replicas differ"
        accumulated = accumulated + sum(copies).double()
        received = received + totals[0].double() * (size if average else 1)
    kept = sum(residual_of(compressor, state).double() for state in world.states)
    torch.testing.assert_close(received + kept, accumulated, atol=1e-4, rtol=1e-4)
    sent = compressor.report(world.layout, world.states[0], world.steps).sent
    bytes_ = sum(round(compressor.layer_bytes(shape)) for shape in world.layout.shapes)
    assert 4 * sum(sent) == bytes_ * world.steps
    assert sum(r[0].tensor.numel() for r in world.traffic) * 4 == bytes_ + 4, "and one poison"


@every
def test_weights_before_and_after_the_sum(compressor):
    """`gradient_predivide_factor=f` is the mean as well."""
    worlds = [world_of(compressor, size=4) for _ in range(2)]
    gradients = draw(worlds[0], torch.Generator().manual_seed(1))
    plain = worlds[0].step(gradients)[0]
    divided = worlds[1]
    programs = [
        compressor.aggregate(
            divided.ops,
            Context(divided.layout, rank, 4, 0, 1 / 8, 8 / 4),
            gradients[rank] * 1,
            divided.states[rank],
        )
        for rank in range(4)
    ]
    torch.testing.assert_close(divided._run(programs)[0][0], plain)


@every
def test_both_frameworks_agree(compressor):
    worlds = [world_of(compressor, ops) for ops in (TorchOps(), TorchOps(static=True))]
    other = world_of(compressor, TensorFlowOps())
    random = torch.Generator().manual_seed(1)
    for _ in range(5):
        gradients = draw(worlds[0], random)
        expected = worlds[0].step(gradients)[0]
        assert torch.equal(worlds[1].step(gradients)[0], expected)
        total = other.step([tf.constant(g.numpy()) for g in gradients])[0]
        np.testing.assert_allclose(np.asarray(total), expected, rtol=1e-3, atol=1e-3)


@every
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30], ids=str)
def test_a_poisoned_gradient(compressor, value):
    world = world_of(compressor)
    random = torch.Generator().manual_seed(1)
    world.step(draw(world, random))
    before = [[x.clone() for _, x in leaves(state)] for state in world.states]
    gradients = draw(world, random)
    gradients[1][17] = value
    with pytest.raises(NonFiniteGradientError):
        world.step(gradients)
    assert all(isinstance(error, NonFiniteGradientError) for error in world.failures)
    for state, kept in zip(world.states, before):
        assert all(torch.equal(x, y) for (_, x), y in zip(leaves(state), kept))
    assert world.step(draw(world, random))[0].isfinite().all(), "training goes on"


@every
def test_a_state_lies_in_no_gradient(compressor):
    """Frontends write the next gradient where the last one was."""
    world = world_of(compressor)
    gradients = draw(world, torch.Generator().manual_seed(1))
    totals = world.step(gradients)
    states = [[x.clone() for _, x in leaves(state)] for state in world.states]
    for total in totals:
        total.fill_(7.0)
    for state, kept in zip(world.states, states):
        assert all(torch.equal(x, y) for (_, x), y in zip(leaves(state), kept))


# -- families --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FewOfEach(TopKCompressor):
    def count(self, size):
        return min(size, 5)

    def init_memory(self, ops, layout):
        return Residual(ops.zeros((layout.size,)))

    def collect(self, ops, memory, gradient):
        return Residual(ops.accumulate(memory.r, gradient))

    def commit(self, ops, memory, index):
        return Residual(ops.put(memory.r, index, 0.0))


@dataclass(frozen=True)
class Coarse(QuantizedCompressor):
    bits, side = 4, ("scale",)

    def rows(self, shape):
        return ((1, prod(shape)),)

    def encode(self, ops, row_groups, x, key):
        scale = ops.group_maxima(row_groups, x)
        return {"scale": scale, "codes": ops.encode_levels(row_groups, x, scale, self.bits, key)}

    def add_decoded(self, ops, row_groups, payload, into):
        codes, scale = payload["codes"], payload["scale"]
        return ops.add_levels(
            row_groups, into.base, into.scratch, codes, scale, self.bits, into.weights
        )


@dataclass(frozen=True)
class Halved(LinearCompressor):
    def to_code(self, ops, gradient):
        return ops.scale(gradient, 0.5)

    def from_code(self, ops, layout, code):
        return ops.scale(code, 2.0)


@pytest.mark.parametrize("compressor", [FewOfEach(), Coarse(), Halved()], ids=repr)
@pytest.mark.parametrize("ops", [TorchOps(), TensorFlowOps()], ids=lambda ops: type(ops).__name__)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_method_has_no_more_than_the_holes_of_its_family(compressor, ops, size):
    """Those that docs/extending.md lists."""
    world = world_of(compressor, ops, size)
    for _ in range(3):
        drawn = draw(world_of(compressor, size=size), torch.Generator().manual_seed(1))
        inputs = drawn if isinstance(ops, TorchOps) else [tf.constant(g.numpy()) for g in drawn]
        totals = [np.asarray(total) for total in world.step(inputs)]
        assert all(np.array_equal(total, totals[0]) for total in totals), "replicas differ"
        assert np.isfinite(totals[0]).all() and totals[0].any()


def test_a_hook_that_nobody_would_call_is_an_error():
    """`Handover` and `Learned` are what callers ask for."""
    with pytest.raises(TypeError, match=r"Mine\.residual would never be called: derive Mine from"):
        type("Mine", (NoneCompressor,), {"residual": lambda self, state: None})
