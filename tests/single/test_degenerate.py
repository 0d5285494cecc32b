"""Layers that are hardly any: of no dimension, without elements, of one; in all methods."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import GradiVeQCompressor
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning.assignment import plan
from hvd_gradcomp.planning.description import describe
from hvd_gradcomp.testing import World
from tests.methods import BALANCED, EVERY, INT32, LEARNED, OUTSIDE, PRODUCTS, ROBUST, ROUNDED, TODAY

# With phases of a few steps, so that a short run sees them all.
METHODS = [
    *EVERY,
    *OUTSIDE,
    *TODAY,
    *PRODUCTS,
    *ROBUST,
    *BALANCED,
    *ROUNDED,
    *INT32,
    *(
        replace(one, warmup_steps=1, sample_steps=2, compress_steps=3)
        if isinstance(one, GradiVeQCompressor)
        else replace(one, full_steps=2, train_steps=2)
        for one in LEARNED
    ),
]
SHAPES = st.lists(
    st.lists(st.sampled_from([0, 1, 2, 3, 40]), max_size=3).map(tuple), min_size=1, max_size=5
)
FIXED = [((0,),), ((),), ((1,),), ((0,), (5,)), ((5,), (0, 3), ()), ((40, 9), (0,), (1, 1))]


def check(compressor, ops, shapes, ranks, bucket_bytes, draw, steps=7):
    """Trains on gradients of a model of these shapes; what all ranks get is finite and equal."""
    layers = [(f"layer{i}", shape, "float32") for i, shape in enumerate(shapes)]
    try:
        buckets = plan(compressor, layers, bucket_bytes, ranks=ranks)
    except ValueError as error:  # LGC says what it lacks
        assert str(error).startswith("LGCCompressor: ")
        return
    assert sorted(n for _, layout in buckets for n in layout.names) == [n for n, *_ in layers]
    assert describe(compressor, layers, len(buckets), ranks)
    for one, layout in buckets:
        world = World(one, ops, layout, ranks)
        for _ in range(steps):
            gradients = [world.flat([draw(shape) for shape in layout.shapes]) for _ in range(ranks)]
            extra = {"moment": [g * g for g in gradients]} if one.uses_moments else {}
            totals = [np.asarray(total) for total in world.step(gradients, **extra)]
            for total in totals:
                assert total.shape == (layout.size,) and np.isfinite(total).all()
                assert np.array_equal(total, totals[0])
                left = np.ones(layout.size, bool)
                for start, stop in layout.runs:
                    left[start:stop] = False
                assert not total[left].any(), "between the layers"
        sent = one.report(layout, world.states[0], steps).sent
        sizes = dict(zip(layout.names, layout.sizes))
        stats = CompressionStats(steps=steps, layers=dict(zip(layout.names, sent)), sizes=sizes)
        assert all(0 <= density <= 1 for density in stats.density.values())


@pytest.mark.parametrize("compressor", METHODS, ids=repr)
@given(SHAPES, st.integers(1, 3), st.sampled_from([1, 64, 1 << 20]), st.integers(0, 2**32))
@settings(max_examples=5, deadline=None)
def test_any_model(compressor, shapes, ranks, bucket_bytes, seed):
    random = torch.Generator().manual_seed(seed)

    def draw(shape):
        return torch.randn(shape, generator=random)

    check(compressor, TorchOps(), shapes, ranks, bucket_bytes, draw)


@pytest.mark.parametrize("compressor", METHODS, ids=repr)
def test_these_models(compressor):
    for shapes in FIXED:
        for bucket_bytes in (1, 1 << 20):
            check(compressor, TorchOps(), shapes, 2, bucket_bytes, torch.randn)


@pytest.mark.parametrize("compressor", METHODS, ids=repr)
def test_these_models_on_tensorflow(compressor):
    for shapes in FIXED[3:]:
        check(compressor, TensorFlowOps(), shapes, 2, 1 << 20, tf.random.normal, steps=2)
