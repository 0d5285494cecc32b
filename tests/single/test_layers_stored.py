"""Weights that PyTorch stores [outputs, inputs, ...] and TensorFlow [..., inputs, outputs].

The same training sends the same on both: each method that looks at a layer, and not only at its
elements, is run on TorchOps over PyTorch's shapes and on TensorFlowOps over TensorFlow's.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_gradcomp import (
    DGCCompressor,
    EGCCompressor,
    GradiVeQCompressor,
    HybridCompressor,
    LGCCompressor,
    OneBitCompressor,
    QSGDCompressor,
    SparseGDCompressor,
    StromCompressor,
    VarianceCompressor,
)
from hvd_gradcomp.algorithms.combined.wrappers import MomentumAfter, after
from hvd_gradcomp.core.layout import Layout, outputs_first
from hvd_gradcomp.method import wire
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning.assignment import assign, plan
from hvd_gradcomp.testing import World

NAMES = ("conv/kernel", "conv/bias", "table/embeddings", "dense/kernel", "last/kernel")
# As TensorFlow has them; a table of embeddings is stored alike.
LAST = ((3, 2, 8, 16), (16,), (20, 6), (48, 30), (30, 10))
FIRST = ((16, 8, 3, 2), (16,), (20, 6), (30, 48), (10, 30))
RANKS = 2
# What is sent must fit: what does not is left where the bucket ends, in either order.
BY_LAYER = [
    VarianceCompressor(alpha=4.0),
    HybridCompressor(tau=7.0),
    StromCompressor(tau=7.0),
    SparseGDCompressor(density=0.05),
    DGCCompressor(density=0.05, momentum=0.9),
    EGCCompressor(K=20, momentum=0.9),
    LGCCompressor(alpha=0.05, full_steps=3, train_steps=8, momentum=0.9),
    OneBitCompressor(),
    OneBitCompressor(exchange="two_shot"),
    GradiVeQCompressor(ratio=4, warmup_steps=1, sample_steps=5, compress_steps=6),
]


def as_stored_last(first, last):
    """The same weights, as TensorFlow has them."""
    if first.shape == last:
        return first
    return np.ascontiguousarray(first.transpose(*range(2, first.ndim), 1, 0))


def worlds(compressor, names=NAMES, first=FIRST, last=LAST):
    block = compressor.block
    layout = Layout(names, last, block=block, filters_last=True)
    layout = layout.with_outputs_first() if compressor.outputs_first else layout
    return (
        World(compressor, TorchOps(), Layout(names, first, block=block), RANKS),
        World(compressor, TensorFlowOps(), layout, RANKS),
    )


def step(both, seed):
    """Both worlds by one step; the totals of all layers, each as TensorFlow stores it."""
    random = np.random.default_rng(seed)
    layout, ops = both[1].layout, both[1].ops
    shapes = both[0].layout.shapes, layout.stored
    drawn = [[random.standard_normal(s).astype("f4") for s in shapes[0]] for _ in range(RANKS)]
    one = both[0].step([both[0].flat([torch.from_numpy(x) for x in rank]) for rank in drawn])[0]
    turned = [[as_stored_last(x, s) for x, s in zip(rank, shapes[1])] for rank in drawn]
    two = both[1].step([ops.flatten(layout, rank, "float32") for rank in turned])[0]
    totals = []
    for start, size, here, other in zip(
        layout.offsets, layout.sizes, shapes[0], ops.cut(layout, two)
    ):
        piece = one.numpy()[start : start + size].reshape(here)
        totals.append((as_stored_last(piece, other.shape), other.numpy()))
    return totals


def bodies(world):
    """What travels behind the headers, [round][rank]."""
    return [
        [np.asarray(request.tensor)[..., wire.HEADER_BYTES :] for request in requests]
        for requests in world.traffic
    ]


@pytest.mark.parametrize("compressor", BY_LAYER, ids=repr)
def test_the_same_training_sends_the_same_elements(compressor):
    count = 1 if isinstance(compressor, GradiVeQCompressor) else len(NAMES)  # convolutions only
    both = worlds(compressor, NAMES[:count], FIRST[:count], LAST[:count])
    for seed in range(10):
        for one, other in step(both, seed):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)
    counts = [w.compressor.report(w.layout, w.states[0], w.steps).sent for w in both]
    assert list(map(int, counts[0])) == list(map(int, counts[1]))
    residuals = [residual_of(w.compressor, w.states[0]) for w in both]
    if residuals[0] is not None:
        layout, ops = both[1].layout, both[1].ops
        for start, size, here, theirs in zip(
            layout.offsets, layout.sizes, FIRST, ops.cut(layout, residuals[1])
        ):
            residual = np.asarray(residuals[0])[start : start + size].reshape(here)
            residual = as_stored_last(residual, theirs.shape)
            np.testing.assert_allclose(residual, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("exchange", ["allgather", "two_shot"])
def test_one_bit_sends_the_same_bytes(exchange):
    both = worlds(OneBitCompressor(exchange))
    assert [c.groups for c in (both[0].compressor.row_groups(w.layout) for w in both)] == [77, 77]
    for seed in range(5):
        step(both, seed)
        for one, other in zip(bodies(both[0]), bodies(both[1])):
            for rank in range(RANKS):
                assert one[rank].shape == other[rank].shape
                assert one[rank].tobytes() == other[rank].tobytes()


def test_gradiveq_sends_the_same_coefficients():
    compressor = GradiVeQCompressor(ratio=4, warmup_steps=1, sample_steps=5, compress_steps=6)
    both = worlds(compressor, NAMES[:1], FIRST[:1], LAST[:1])
    for seed in range(9):
        step(both, seed)
    (one,), (other,) = (w.traffic for w in both)
    assert one[0].tensor.shape[0] < both[0].layout.size
    # A component's sign is the eigensolver's; what travels is equal but for it, and for rounding.
    one, other = (np.abs(np.asarray(requests[0].tensor)) for requests in (one, other))
    np.testing.assert_allclose(one[:-2], other[:-2], rtol=1e-3, atol=1e-3)


def test_a_layer_is_judged_by_its_columns_wherever_they_are():
    """One column of 1,000 pays in one bit; 1,000 columns of one element do not."""
    assert [outputs_first(*pair) for pair in zip(NAMES, LAST)] == list(FIRST)
    for shapes, filters_last in (((1, 1000), False), ((1000, 1), True)):
        (one,) = assign(OneBitCompressor(), [("w/kernel", shapes, "float32")], 1, filters_last)
        assert one == OneBitCompressor()
        layers = [("w/kernel", shapes, "float32")]
        ((planned, layout),) = plan(OneBitCompressor(), layers, 1 << 20, filters_last=filters_last)
        assert planned == OneBitCompressor() and planned.row_groups(layout).groups == 1
    kernel = (3, 3, 64, 128)
    layout = Layout(("conv/kernel",), (kernel,), block=OneBitCompressor.block, filters_last=True)
    assert OneBitCompressor().row_groups(layout).runs == ((0, 128, 576),)


def test_of_a_square_layer_a_column_is_an_output_too():
    """Its shape does not say in which order it is stored."""
    both = worlds(OneBitCompressor(), ("w/kernel",), ((24, 24),), ((24, 24),))
    layers = np.random.default_rng(1).standard_normal((RANKS, 24, 24)).astype("f4")
    both[0].step([both[0].flat([torch.from_numpy(x)]) for x in layers])
    both[1].step([both[1].ops.flatten(both[1].layout, [x.T], "float32") for x in layers])
    (one,), (other,) = (bodies(world) for world in both)
    assert [x.tobytes() for x in one] == [x.tobytes() for x in other]


@pytest.mark.parametrize(
    ("compressor", "turned"),
    [
        (OneBitCompressor(), True),
        (after(3, None, OneBitCompressor()), True),
        (after(3, OneBitCompressor(), QSGDCompressor()), True),
        (MomentumAfter(OneBitCompressor(), 0.9), True),
        (QSGDCompressor(), False),
        (after(3, None, QSGDCompressor()), False),
    ],
    ids=repr,
)
def test_who_looks_at_outputs_gets_buckets_as_pytorch_has_them(compressor, turned):
    def planned(shapes, filters_last):
        layers = [(name, shape, "float32") for name, shape in zip(NAMES, shapes)]
        planned_ = plan(compressor, layers, 1 << 12, filters_last=filters_last)
        return [layout for one, layout in planned_ if one == compressor]

    here, last = planned(FIRST, False), planned(LAST, True)
    assert {layout.turned for layout in last} == {turned}
    assert not any(layout.turned for layout in here)
    for one, other in zip(here, last):
        assert other.filters_last != turned
        assert (one.names, one.offsets, one.size) == (other.names, other.offsets, other.size)
        assert (one.shapes == other.shapes) or not turned
        assert other.stored == tuple(LAST[NAMES.index(name)] for name in other.names)
        unturned = Layout(other.names, other.shapes, block=other.block)
        assert (other.digest == unturned.digest) != turned, "a state of another order is refused"
