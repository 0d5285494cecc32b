"""Bytes that texts promise: of layers that are left dense, and of quantizers by number of ranks."""

from __future__ import annotations

import pytest
import torch

from benchmarks import ratios
from benchmarks.papers.counting import Ledger
from hvd_gradcomp import (
    HybridCompressor,
    NoneCompressor,
    OneBitCompressor,
    QSGDCompressor,
    SparseGDCompressor,
    StromCompressor,
    TernGradCompressor,
    VarianceCompressor,
)
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning.assignment import assign
from hvd_gradcomp.testing import World

BIG = (64, 64)


def sent_by(compressor, shapes, ranks, steps=1, gradient=torch.randn):
    """Bytes that rank 0 counts in the last step."""
    names = tuple(f"layer{place}" for place in range(len(shapes)))
    layout = Layout(names, shapes, block=compressor.block)
    world = World(compressor, TorchOps(), layout, ranks)
    for _ in range(steps):
        ledgers = [Ledger() for _ in range(ranks)]
        for dispatch, ledger in zip(world._runners, ledgers):
            dispatch.traffic = ledger
        world.step([world.flat([gradient(shape) for shape in shapes]) for _ in range(ranks)])
    return ledgers[0].bytes_sent


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("compressor", "ratio"),
    [(QSGDCompressor(), 7.8), (TernGradCompressor(), 15.9), (OneBitCompressor(), 29.0)],
)
def test_quantizers_save_as_much_on_any_number_of_ranks(compressor, ratio, ranks):
    """The part of an alltoall that a rank keeps is not sent: 6.3 and 12.8 were counted of four."""
    shapes = ((256, 1024),)
    assert 4 * 256 * 1024 / sent_by(compressor, shapes, ranks) >= ratio


@pytest.mark.parametrize(
    ("compressor", "dense"),
    [
        (QSGDCompressor(), 5),
        (TernGradCompressor(), 3),
        (OneBitCompressor(), 3),
        (SparseGDCompressor(density=0.01), 1),
    ],
)
def test_a_layer_is_left_dense_where_the_method_takes_no_fewer_bytes(compressor, dense):
    assert ratios.dense_up_to(compressor) == dense
    for size in (*range(1, 9), 32, 128):
        layers = [("weight", BIG, "float32"), ("bias", (size,), "float32")]
        left = isinstance(assign(compressor, layers, 2)[1], NoneCompressor)
        few, many = (sent_by(compressor, (BIG, *[(size,)] * n), 2) for n in (1, 17))
        more = (many - few) / 16  # one layer's; the first may lie in what pads the bucket
        assert left == (size <= dense)
        assert (more >= 4 * size) if left else (more < 4 * size), (size, more)


@pytest.mark.parametrize(
    "compressor",
    [
        VarianceCompressor(alpha=2.0, moments="step"),
        HybridCompressor(1.0),
        StromCompressor(1.0, index_coding="int32"),
    ],
)
def test_words_take_nothing_of_a_layer_that_sends_nothing(compressor):
    """So none is too small for them: what a layer takes is 4 bytes for an element that is sent."""
    layers = [("weight", BIG, "float32"), ("bias", (2,), "float32"), ("b", (128,), "float32")]
    assert assign(compressor, layers, 2) == [compressor] * 3
    if compressor.uses_moments:
        return  # as many bytes as words, and an exponent of a byte: `test_laws`
    alone = sent_by(compressor, (BIG,), 2, 40, torch.zeros)
    assert sent_by(compressor, (BIG, (2,), (128,)), 2, 40, torch.zeros) == alone
