"""Methods by pairs: two phases, layers that are shared out, codes of values and of indices.

Hosts of several ranks are in `test_hierarchy`, two methods that round in `test_values`.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from hvd_gradcomp import DGCCompressor, EGCCompressor, SparseGDCompressor, after, partition
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.handover import correction_of
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning.assignment import plan
from hvd_gradcomp.testing import World
from tests.methods import INT32, ONE_OF_EACH, PRODUCTS, ROUNDED, STROM_LATEST, TODAY

SHAPES = ((40, 9), (7,), (300,))
LATER = [*TODAY, *INT32, *PRODUCTS]


def with_momentum(compressor):
    """With the momentum that an optimizer would hand over."""
    return compressor.corrected(0.9, False) if correction_of(compressor) else compressor


def world_of(compressor, size=3, shapes=SHAPES):
    names = tuple(f"layer{i}" for i in range(len(shapes)))
    return World(compressor, TorchOps(), Layout(names, shapes, block=compressor.block), size)


def drawn(world, random):
    return [
        world.flat([torch.tensor(random.normal(0, 1, s), dtype=torch.float32) for s in shapes])
        for shapes in [world.layout.shapes] * world.size
    ]


def steps(world, random, count):
    """Return the results of some steps, equal on all ranks and finite."""
    results = []
    for _ in range(count):
        gradients, extra = drawn(world, random), {}
        if world.compressor.uses_moments:
            extra["moment"] = [g * g * 0.1 for g in gradients]
        totals = world.step(gradients, **extra)
        assert all(torch.equal(total, totals[0]) for total in totals)
        assert totals[0].isfinite().all()
        results.append(totals[0])
    return results


@pytest.mark.parametrize("then", LATER, ids=repr)
def test_after_another_method(then):
    """From each family; in its own phase the first does what it does alone."""
    for first in (None, STROM_LATEST, SparseGDCompressor(0.1), ROUNDED[0]):
        world = world_of(after(3, first, with_momentum(then)))
        before = steps(world, np.random.default_rng(1), 7)[:3]
        if first is not None:
            same = steps(world_of(first), np.random.default_rng(1), 3)
            assert all(map(torch.equal, before, same))


@pytest.mark.parametrize("then", ONE_OF_EACH, ids=repr)
def test_before_another_method(then):
    for first in LATER:
        if not (correction_of(first) and correction_of(then)):  # each would want the momentum
            steps(
                world_of(after(2, with_momentum(first), with_momentum(then))),
                np.random.default_rng(2),
                4,
            )


@pytest.mark.parametrize("compressor", LATER, ids=repr)
def test_beside_another_method(compressor):
    """Each bucket of a plan goes its way."""
    layers = [("a.weight", (40, 9), "float32"), ("b.weight", (300,), "float32")]
    layers += [("a.bias", (1,), "float32")]
    other = SparseGDCompressor(density=0.1, values="int8")
    compressor = with_momentum(compressor)
    buckets = plan(partition({"a.*": compressor, "b.*": other}), layers, 1 << 20)
    chosen = {name: method for method, layout in buckets for name in layout.names}
    assert chosen["b.weight"].working == other
    assert isinstance(chosen["a.weight"].working, type(compressor))
    for method, layout in buckets:
        assert steps(World(method, TorchOps(), layout, 3), np.random.default_rng(3), 3)[-1].any()


VALUES = ("float32", "bfloat16", "int8", "int4", "int2", "sign")


@pytest.mark.parametrize("index_coding", ["elias_fano", "int32"])
@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
@pytest.mark.parametrize("method", [DGCCompressor, EGCCompressor], ids=lambda m: m.__name__)
def test_momentum_with_each_code(method, nesterov, index_coding):
    """In the first step each code sends the same elements; int2 makes some of them zero."""
    rate = {"density": 0.1} if method is DGCCompressor else {"K": 10.0, "entropy_interval": 2}
    first = {}
    for values, masking in product(VALUES, (True, False)):
        how = {"nesterov": nesterov, "masking": masking, "index_coding": index_coding}
        compressor = method(**rate, momentum=0.9, values=values, **how)
        first[values, masking] = steps(world_of(compressor), np.random.default_rng(4), 4)[0]
    sent = {key: total != 0 for key, total in first.items() if key[0] != "int2"}
    assert all(torch.equal(totals, sent["float32", True]) for totals in sent.values())
