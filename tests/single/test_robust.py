"""Robust aggregation: the rules by their definition, and training beside a rank that lies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.archive.robust import trained
from hvd_gradcomp import (
    BF16Compressor,
    ChunkedTopKCompressor,
    DGCCompressor,
    EFSignSGDCompressor,
    FP8Compressor,
    FP16Compressor,
    Int8Compressor,
    NaturalCompressor,
    NoneCompressor,
    NonFiniteGradientError,
    PowerSGDCompressor,
    QSGDCompressor,
    RandomKCompressor,
    TernGradCompressor,
    VarianceCompressor,
    partition,
    robust,
)
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning.assignment import assign
from hvd_gradcomp.planning.description import describe
from hvd_gradcomp.testing import World

SHAPES = ((20, 10), (7,))
LIES = ["noise", "times -30", "times -1"]
GATHERED = [
    None,
    FP16Compressor(),
    BF16Compressor(),
    FP8Compressor(),
    Int8Compressor(feedback=True),
    NaturalCompressor(),
    QSGDCompressor(bits=4),
    TernGradCompressor(),
    EFSignSGDCompressor(),
    ChunkedTopKCompressor(chunk=32, k=8),
]

RANDOM = (NaturalCompressor, QSGDCompressor, TernGradCompressor)


def world_of(compressor, size, **options):
    layout = Layout(("a", "b"), SHAPES, block=compressor.block)
    return World(compressor, TorchOps(), layout, size, **options)


def vectors(size, seed=0, scale=1.0):
    random = np.random.default_rng(seed)
    return [(random.standard_normal(207) * scale).astype(np.float32) for _ in range(size)]


def flat(world, vector):
    cut = np.split(vector, [200])
    return world.flat([torch.from_numpy(x.reshape(s)) for x, s in zip(cut, SHAPES)])


def layers(world, vector):
    sizes = zip(world.layout.offsets, world.layout.sizes)
    return np.concatenate([vector[start : start + size].numpy() for start, size in sizes])


def by_definition(rule, rows, trim=1):
    """Yin et al. 2018, options I and II; norms clipped to their lower median."""
    rows = np.asarray(rows, np.float64)
    if rule == "median":
        return np.median(rows, axis=0)
    if rule == "trimmed":
        return np.sort(rows, axis=0)[trim : len(rows) - trim].mean(0)
    norms = np.linalg.norm(rows, axis=1)
    limit = np.sort(norms)[(len(rows) - 1) // 2]
    return (rows * np.minimum(1, limit / np.maximum(norms, 1e-300))[:, None]).mean(0)


@pytest.mark.parametrize("rule", ["clip", "median", "trimmed"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_the_rules_by_their_definition(rule, size):
    trim = max(1, (size - 1) // 2)
    if rule == "trimmed" and size == 2:
        pytest.skip("nothing is left of two ranks")
    world = world_of(robust(None, rule, trim), size)
    rows = vectors(size)
    rows[0] *= 50
    results = world.step([flat(world, x) for x in rows])
    assert all(torch.equal(x, results[0]) for x in results)
    trim = 0 if size == 1 else trim
    np.testing.assert_allclose(
        layers(world, results[0]), by_definition(rule, rows, trim), 1e-5, 1e-5
    )
    summed = world_of(robust(None, rule, max(trim, 1)), size, average=False)
    total = summed.step([flat(summed, x) for x in rows])[0]
    torch.testing.assert_close(total, size * results[0])


@pytest.mark.parametrize("compressor", GATHERED, ids=repr)
@pytest.mark.parametrize("rule", ["clip", "median"])
def test_each_payload_is_what_its_rank_alone_would_have_exchanged(compressor, rule):
    """Over steps, so feedback included; with moderate gradients."""
    size, steps = 5, 4
    world = world_of(robust(compressor, rule), size)
    alone = [world_of(compressor or NoneCompressor(), 1) for _ in range(size)]
    for step in range(steps):
        rows = vectors(size, seed=step)
        results = world.step([flat(world, x) for x in rows])
        assert all(torch.equal(x, results[0]) for x in results) and len(world.traffic) == 1
        sent = []
        for rank, of_rank in enumerate(alone):
            if isinstance(compressor, RANDOM):
                continue  # their random numbers depend on the rank
            sent.append(layers(of_rank, of_rank.step([flat(of_rank, rows[rank])])[0]))
        if sent:
            wanted = by_definition(rule, sent)
            np.testing.assert_allclose(layers(world, results[0]), wanted, rtol=1e-4, atol=1e-5)
    if compressor is not None:
        for rank, of_rank in enumerate(alone if sent else ()):
            kept = residual_of(of_rank.compressor, of_rank.states[0])
            residual = residual_of(world.compressor, world.states[rank])
            assert (kept is None) == (residual is None)
            assert kept is None or torch.equal(kept, residual)


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(3, 8),
    lie=st.sampled_from([0.0, -1.0, 1e4, -1e4, 1e30]),
    rule=st.sampled_from(["median", "trimmed"]),
)
def test_one_rank_moves_no_coordinate_out_of_what_the_others_have(seed, size, lie, rule):
    world = world_of(robust(None, rule), size)
    rows = vectors(size, seed)
    rows[seed % size] = rows[seed % size] * np.float32(lie)
    honest = np.delete(np.asarray(rows), seed % size, axis=0)
    result = layers(world, world.step([flat(world, x) for x in rows])[0])
    low, high = honest.min(0), honest.max(0)
    slack = 1e-6 * (high - low)
    assert ((result >= low - slack) & (result <= high + slack)).all()


@given(
    seed=st.integers(0, 2**32 - 1), size=st.integers(3, 8), lie=st.sampled_from([-50, 1e4, 1e30])
)
def test_one_rank_brings_no_more_than_a_median_norm(seed, size, lie):
    world = world_of(robust(None, "clip"), size)
    rows = vectors(size, seed)
    honest = np.asarray(rows)
    rows[0] = rows[0] * np.float32(lie)
    result = layers(world, world.step([flat(world, x) for x in rows])[0])
    limit = np.linalg.norm(honest, axis=1).max() / size
    assert (
        np.linalg.norm(result - honest[1:].sum(0) / size) <= 2 * limit * (size - 1) / size + limit
    )


@pytest.mark.parametrize(
    ("inner", "lies"),
    [(None, LIES), (ChunkedTopKCompressor(chunk=64, k=16), ["times -30"])],
    ids=["None", "chunked top-k"],
)
def test_a_rank_of_eight_that_lies_costs_a_tenth_of_the_loss(inner, lies):
    honest = trained(inner or NoneCompressor(), "none", 400)
    for lie in lies:
        assert trained(robust(inner, "clip"), lie, 400) <= 1.1 * honest, lie


@pytest.mark.parametrize(
    ("inner", "rule", "lies"),
    [
        (None, "median", LIES),
        (None, "trimmed", LIES),
        (QSGDCompressor(bits=4), "median", ["times -1"]),
    ],
    ids=["median", "trimmed", "median of QSGD"],
)
def test_so_with_the_other_rules_beside_what_they_cost_by_themselves(inner, rule, lies):
    honest = trained(robust(inner, rule), "none", 400)
    for lie in lies:
        assert trained(robust(inner, rule), lie, 400) <= 1.1 * honest, lie


def test_without_a_rule_it_costs_more():
    honest = trained(NoneCompressor(), "none", 400)
    assert not trained(NoneCompressor(), "noise", 400) <= 2 * honest
    with pytest.raises(NonFiniteGradientError):
        trained(NoneCompressor(), "times -30", 400)


@pytest.mark.parametrize(
    "compressor",
    [VarianceCompressor(alpha=2), DGCCompressor(density=0.01, momentum=0.9), PowerSGDCompressor()],
    ids=repr,
)
def test_methods_that_agree_on_what_is_sent_are_refused(compressor):
    with pytest.raises(ValueError, match=r"ranks agree on what is sent.*ChunkedTopKCompressor"):
        robust(compressor)


@pytest.mark.parametrize(
    "compressor",
    [
        RandomKCompressor(density=0.25),
        Int8Compressor(exchange="two_shot"),
        ChunkedTopKCompressor(exchange="two_shot"),
    ],
    ids=repr,
)
def test_methods_with_more_than_payloads_are_refused_when_training_begins(compressor):
    with pytest.raises(ValueError, match="ranks exchange more than payloads"):
        world_of(robust(compressor), 4)
    with pytest.raises(ValueError, match="ranks exchange more than payloads"):
        describe(robust(compressor), [("w", (5000,), "float32")], 1, 4)


def test_what_is_no_rule_and_what_is_left_of_few_ranks():
    with pytest.raises(ValueError, match="rule must be one of"):
        robust(None, "mode")
    with pytest.raises(ValueError, match="trim"):
        robust(None, "trimmed", trim=0)
    with pytest.raises(ValueError, match="leaves nothing of 4 ranks"):
        world_of(robust(None, "trimmed", trim=2), 4)
    world = world_of(robust(None, "trimmed", trim=2), 5)
    for ranks in (1, 5, 8):
        assert world.compressor.resized(world.ops, world.states[0], 1, ranks) is world.states[0]
    with pytest.raises(ValueError, match="leaves nothing of 4 ranks"):
        world.compressor.resized(world.ops, world.states[0], 1, 4)
    with pytest.raises(ValueError, match=r"around a compressor once, got robust\("):
        robust(robust(None, "median"), "clip")
    with pytest.raises(TypeError, match="robust needs a compressor or None"):
        robust(partition([("*", None)]))


def test_no_layer_is_left_to_an_exchange_that_a_rank_can_steer():
    layers = [("w", (64, 64), "float32"), ("b", (3,), "float32"), ("one", (1,), "float32")]
    assigned = assign(robust(ChunkedTopKCompressor()), layers, 4)
    assert {repr(one) for one in assigned} == {repr(robust(ChunkedTopKCompressor()))}
