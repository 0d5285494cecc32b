"""GradiVeQ: the projection is linear, loses nothing with feedback, and survives odd layers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import projection as measurement
from hvd_gradcomp import (
    DGCCompressor,
    FP16Compressor,
    GradiVeQCompressor,
    NoneCompressor,
    NonFiniteGradientError,
    OneBitCompressor,
    QSGDCompressor,
    TernGradCompressor,
    after,
    partition,
)
from hvd_gradcomp.algorithms.gradiveq import basis, projection
from hvd_gradcomp.cli.options import usual
from hvd_gradcomp.core.layers import Weight, convolves
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning import worth
from hvd_gradcomp.planning.assignment import assign, plan
from hvd_gradcomp.testing import World
from tests.oracles.gradiveq import GradiVeQ
from tests.single.older import compiles_whole, normalizes_weights

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ((8, 4, 3, 3), (16, 8, 3), (5, 3, 1, 1))
RANKS = 3
SHORT = {"warmup_steps": 2, "sample_steps": 6, "compress_steps": 7}


def layout_of(compressor, shapes=SHAPES, filters_last=False):
    names = tuple(f"layer{i}" for i in range(len(shapes)))
    return Layout(names, shapes, block=compressor.block, filters_last=filters_last)


def gradients(step, shapes=SHAPES, ranks=RANKS, noise=0.05):
    """Few directions that change slowly, and noise: [rank][layer]."""
    fixed = np.random.default_rng(1)
    directions = [fixed.standard_normal((3, int(np.prod(shape)))) for shape in shapes]
    drawn = []
    for rank in range(ranks):
        random = np.random.default_rng((step, rank))
        mixed = [random.standard_normal(3) @ d + 0.5 for d in directions]
        drawn.append(
            [
                (x + noise * random.standard_normal(x.shape)).astype(np.float32).reshape(shape)
                for x, shape in zip(mixed, shapes)
            ]
        )
    return drawn


def run(compressor, ops, tensor, steps, shapes=SHAPES, ranks=RANKS, filters_last=False):
    world = World(compressor, ops, layout_of(compressor, shapes, filters_last), ranks)
    results, traffic = [], []
    for step in range(steps):
        flat = [world.flat([tensor(x) for x in rank]) for rank in gradients(step, shapes, ranks)]
        totals = [np.asarray(total) for total in world.step(flat)]
        assert all(np.array_equal(total, totals[0]) for total in totals), "replicas differ"
        results.append(totals[0])
        traffic.append([[r.tensor for r in requests] for requests in world.traffic])
    return np.stack(results), world, traffic


CASES = {
    "ratio": {"ratio": 4},
    "threshold": {"loss_threshold": 0.05},
    "feedback": {"ratio": 4, "feedback": True},
    "reuse": {"ratio": 3, "reuse": 2, "slice_size": 20},
    "drift": {"ratio": 8, "resample_loss": 0.5},
    "parts of blocks": {"ratio": 4, "max_slice": 64},
    "parts of filters": {"ratio": 4, "max_slice": 20},
}


@pytest.mark.parametrize("filters_last", [False, True], ids=["filters first", "filters last"])
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_plain_loops(case, filters_last):
    options = {**SHORT, **CASES[case]}
    compressor = GradiVeQCompressor(**options)
    layout = layout_of(compressor, filters_last=filters_last)
    world = World(compressor, TorchOps(), layout, RANKS)
    oracle = GradiVeQ(SHAPES, filters_last, RANKS, **options)
    phases = set()
    for step in range(30):
        drawn = gradients(step)
        total = world.step([world.flat([torch.from_numpy(x) for x in rank]) for rank in drawn])[0]
        expected = oracle.step(drawn)
        phases.add(oracle.phase)
        for start, size, mean in zip(layout.offsets, layout.sizes, expected):
            layer_total = total[start : start + size].numpy()
            np.testing.assert_allclose(layer_total, mean.reshape(-1), rtol=1e-3, atol=2e-4)
        if oracle.loss is not None:
            assert float(world.states[0].loss) == pytest.approx(oracle.loss, abs=1e-4)
        if compressor.feedback:
            for rank in range(RANKS):
                kept = np.concatenate([r.reshape(-1) for r in oracle.residuals[rank]])
                r = world.states[rank].r.numpy()[: len(kept)]
                np.testing.assert_allclose(r, kept, rtol=1e-3, atol=2e-4)
    assert {"warmup", "sampling", "compressed"} <= phases


@given(seed=st.integers(0, 2**32 - 1), data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_projection_is_linear(seed, data):
    compressor = GradiVeQCompressor(
        ratio=data.draw(st.sampled_from([1, 2, 4.5, 8])),
        reuse=data.draw(st.sampled_from([None, 1, 3])),
        slice_size=data.draw(st.sampled_from([None, 7, 32])),
        **SHORT,
    )
    _, world, _ = run(compressor, TorchOps(), torch.from_numpy, 9, ranks=1)
    random = np.random.default_rng(seed)
    a, b = (
        torch.from_numpy(random.standard_normal(world.layout.size).astype(np.float32))
        for _ in range(2)
    )
    codes = [
        projection.encode(compressor.slicing, world.ops, world.layout, x, world.states[0])[0]
        for x in (a, b, a + b)
    ]
    torch.testing.assert_close(codes[0] + codes[1], codes[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("average", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize(
    "sampling",
    [
        "none",
        "qsgd",
        QSGDCompressor(exchange="two_shot"),
        TernGradCompressor(exchange="allgather"),
        OneBitCompressor(),
    ],
    ids=str,
)
def test_with_feedback_the_sum_over_ranks_loses_nothing(sampling, average):
    """In no step, whatever carries the samples."""
    compressor = GradiVeQCompressor(ratio=6, feedback=True, sampling=sampling, **SHORT)
    world = World(compressor, TorchOps(), layout_of(compressor), RANKS, average=average)
    share = RANKS if average else 1

    def kept():
        inner = compressor.between
        both = [[state.r, residual_of(inner, state.sampling)] for state in world.states]
        return sum(x.double() for some in both for x in some if x is not None)

    for step in range(40):
        flat = [world.flat([torch.from_numpy(x) for x in rank]) for rank in gradients(step)]
        before = kept()
        total = world.step(flat)[0]
        accumulated = before + sum(g.double() for g in flat)
        torch.testing.assert_close(
            kept() + share * total.double(), accumulated, rtol=1e-4, atol=1e-3
        )


@pytest.mark.parametrize("ops", [TorchOps(), TensorFlowOps()], ids=["torch", "tensorflow"])
def test_with_feedback_what_half_precision_rounds_off_is_kept(ops):
    """One rank at a time has a gradient, so the sum of halves is exact."""
    compressor = GradiVeQCompressor(
        ratio=6, feedback=True, sampling=FP16Compressor(), **{**SHORT, "warmup_steps": 5}
    )
    world = World(compressor, ops, layout_of(compressor), RANKS, average=False)
    make = torch.from_numpy if isinstance(ops, TorchOps) else tf.constant
    for step in range(9):
        drawn = gradients(step)
        flat = [world.flat([make(x * (r == step % RANKS)) for x in g]) for r, g in enumerate(drawn)]
        before, accumulated = (
            sum(np.asarray(x, np.float64) for x in some)
            for some in ([s.r for s in world.states], flat)
        )
        total = np.asarray(world.step(flat)[0], np.float64)
        kept = sum(np.asarray(s.r, np.float64) for s in world.states)
        np.testing.assert_allclose(kept + total, before + accumulated, rtol=0, atol=1e-6)
    assert np.abs(kept).max() > 1e-4


def test_bytes_of_a_cycle_equal_the_formula():
    for options in (
        {"ratio": 4},
        {"ratio": 9, "reuse": 2, "slice_size": 16},
        {"loss_threshold": 0.1},
    ):
        compressor = GradiVeQCompressor(**SHORT, **options)
        _, world, traffic = run(compressor, TorchOps(), torch.from_numpy, 2 + 2 * 13)
        layout = world.layout
        cycle = traffic[2 + 13 :]
        for step, requests in enumerate(cycle):
            sizes = [tensors[0].nbytes for tensors in requests]
            if step < 5:
                assert sizes == [4 * layout.size]
            elif step == 5:
                assert sizes == [4 * layout.size, 8], "and a checksum of the bases"
            else:
                d = world.states[0].dimensions.tolist()
                assert sizes == [compressor.slicing.coefficient_bytes(layout, d)]
        whole = 6 * 4 * layout.size + 8
        whole += 7 * compressor.slicing.coefficient_bytes(layout, d)
        assert sum(t[0].nbytes for requests in cycle for t in requests) == whole


def test_ranks_that_compute_other_bases_take_those_of_one(monkeypatch, caplog):
    """Other bits in one rank's bases would make replicas differ."""
    computed, calls = basis._bases, []

    def rounded_otherwise(*arguments):
        calls.append(computed(*arguments))
        return calls[-1] * (1 + 1e-6 * (len(calls) == 2))

    monkeypatch.setattr(basis, "_bases", rounded_otherwise)
    compressor = GradiVeQCompressor(ratio=4, **SHORT)
    _, world, traffic = run(compressor, TorchOps(), torch.from_numpy, 10)
    assert len(calls) == RANKS
    for state in world.states[1:]:
        assert torch.equal(state.basis, world.states[0].basis)
        assert torch.equal(state.offset, world.states[0].offset)
    sizes = [tensors[0].nbytes for tensors in traffic[2 + 5]]
    assert sizes == [4 * world.layout.size, 8, compressor.slicing.basis_bytes(world.layout)]
    warnings = [record.message for record in caplog.records if "last bits" in record.message]
    assert len(warnings) == RANKS and "number of threads" in warnings[0]


def test_frameworks_agree_but_for_rounding():
    compressor = GradiVeQCompressor(loss_threshold=0.05, feedback=True, **SHORT)
    reference, _, _ = run(compressor, TorchOps(), torch.from_numpy, 20)
    static, _, _ = run(compressor, TorchOps(static=True), torch.from_numpy, 20)
    np.testing.assert_allclose(static, reference, atol=1e-4)
    other, _, _ = run(compressor, TensorFlowOps(), tf.constant, 20)
    np.testing.assert_allclose(other, reference, atol=1e-4)


@pytest.mark.parametrize("how", ["graph", "xla"])
def test_tensorflow_traces_it_whole(how):
    compressor = GradiVeQCompressor(loss_threshold=0.05, **SHORT)
    _, world, _ = run(compressor, TensorFlowOps(), tf.constant, 10, ranks=1)
    state, ops = world.states[0], TensorFlowOps(static=how == "xla")
    gradient = world.flat([tf.constant(x) for x in gradients(11)[0]])

    def back(gradient):
        code, _, lost = projection.encode(compressor.slicing, ops, world.layout, gradient, state)
        return projection.decode(compressor.slicing, ops, world.layout, code, state), lost

    traced = tf.function(back, jit_compile=how == "xla", autograph=False)(gradient)
    for ours, theirs in zip(traced, back(gradient)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@compiles_whole
def test_torch_compiles_it_whole():
    torch._dynamo.reset()
    compressor = GradiVeQCompressor(ratio=4, **SHORT)
    _, world, _ = run(compressor, TorchOps(static=True), torch.from_numpy, 10, ranks=1)
    state, ops, layout = world.states[0], world.ops, world.layout
    slicing = compressor.slicing
    slicing.slices(layout)  # what is cached is cached before
    gradient = world.flat([torch.from_numpy(x) for x in gradients(11)[0]])

    def back(gradient):
        return projection.decode(
            slicing,
            ops,
            layout,
            projection.encode(slicing, ops, layout, gradient, state)[0],
            state,
        )

    compiled = torch.compile(back, fullgraph=True, backend="eager")
    assert torch.equal(compiled(gradient), back(gradient))


def test_filters_last_is_the_same_layer_stored_otherwise():
    compressor = GradiVeQCompressor(ratio=4, **SHORT)
    first, _world, one = run(compressor, TorchOps(), torch.from_numpy, 10, ((8, 4, 3, 3),))
    ops = TorchOps()
    other = World(compressor, ops, layout_of(compressor, ((3, 3, 4, 8),), True), RANKS)
    for step in range(10):
        drawn = gradients(step, ((8, 4, 3, 3),))
        flat = [
            torch.from_numpy(rank[0].transpose(2, 3, 1, 0).reshape(-1).copy()) for rank in drawn
        ]
        total = other.step(flat)[0].numpy().reshape(3, 3, 4, 8).transpose(3, 2, 0, 1)
        np.testing.assert_array_equal(total.reshape(-1), first[step][: total.size])
    assert torch.equal(other.traffic[0][0].tensor, one[-1][0][0])


def test_the_same_seeds_give_the_same_run_twice():
    compressor = GradiVeQCompressor(ratio=4, sampling="qsgd", **SHORT)
    runs = [run(compressor, TorchOps(), torch.from_numpy, 20)[0] for _ in range(2)]
    assert np.array_equal(*runs)


@pytest.mark.parametrize(
    "shapes",
    [((1, 1, 1),), ((3, 1, 1, 1), (2, 2, 1)), ((4, 300, 3),), ((7,), (5, 9), (2, 3, 2, 2, 2))],
    ids=str,
)
@pytest.mark.parametrize("options", [{"ratio": 8}, {"loss_threshold": 0.01}], ids=str)
def test_small_odd_and_flat_layers(shapes, options):
    compressor = GradiVeQCompressor(**SHORT, **options)
    results, world, _ = run(compressor, TorchOps(), torch.from_numpy, 20, shapes)
    assert np.isfinite(results).all()
    if "ratio" not in options and world.layout.sizes[0] == 1:  # one dimension: nothing is left out
        mean = np.mean([r[0].reshape(-1) for r in gradients(19, shapes)], 0)
        np.testing.assert_allclose(results[19][:1], mean, rtol=1e-5)


def test_zero_and_constant_gradients():
    compressor = GradiVeQCompressor(ratio=4, **SHORT)
    for value in (0.0, 2.5):
        world = World(compressor, TorchOps(), layout_of(compressor), 2)
        for _ in range(20):
            flats = [world.flat([torch.full(s, value) for s in SHAPES]) for _ in range(2)]
            total = world.step(flats)[0]
        torch.testing.assert_close(total, flats[0], msg="the mean of the samples is kept")
        assert float(world.states[0].loss) == pytest.approx(0.0, abs=1e-6)


def test_drift_and_users_begin_a_new_cycle():
    compressor = GradiVeQCompressor(
        ratio=4, reuse=1, resample_loss=0.3, warmup_steps=1, sample_steps=4
    )
    layout = layout_of(compressor, ((8, 4, 3, 3),))
    world = World(compressor, TorchOps(), layout, 2)
    random = np.random.default_rng(5)
    fixed, other = random.standard_normal((2, 2, layout.size)).astype(np.float32)

    def step(directions):
        return world.step(
            [
                torch.from_numpy(random.standard_normal(2).astype(np.float32) @ directions)
                for _ in range(2)
            ]
        )

    def compressed():
        return world.traffic[0][0].tensor.numel() < layout.size

    for _ in range(9):
        step(fixed)
    assert compressed() and float(world.states[0].loss) < 0.3
    step(other)  # directions that the basis does not know
    assert compressed() and float(world.states[0].loss) > 0.3
    for _ in range(4):
        step(other)
        assert not compressed(), "the cycle begins anew, on all ranks"
    step(other)
    assert compressed() and float(world.states[0].loss) < 0.3
    world.states = [compressor.retrained(world.ops, s, world.steps) for s in world.states]
    step(other)
    assert not compressed()


def test_a_poisoned_gradient_is_an_error_on_all_ranks():
    for feedback in (False, True):
        compressor = GradiVeQCompressor(ratio=4, feedback=feedback, **SHORT)
        _, world, _ = run(compressor, TorchOps(), torch.from_numpy, 10)
        before = [[x.clone() for _, x in leaves(state)] for state in world.states]
        flats = [world.flat([torch.from_numpy(x) for x in rank]) for rank in gradients(10)]
        flats[1][7] = float("nan")
        with pytest.raises(NonFiniteGradientError):
            world.step(flats)
        for state, old in zip(world.states, before):
            assert all(map(torch.equal, (x for _, x in leaves(state)), old))


def test_layers_that_are_no_convolution_go_to_another():
    layers = [("conv.weight", (8, 4, 3, 3), "float32"), ("conv.bias", (8,), "float32")]
    layers += [("fc.weight", (10, 400), "float32"), ("conv1d.weight", (6, 5, 3), "float32")]
    chosen = assign(GradiVeQCompressor(ratio=4, other=QSGDCompressor()), layers)
    assert [type(c).__name__[:4] for c in chosen] == ["Grad", "QSGD", "QSGD", "Grad"]
    buckets = plan(GradiVeQCompressor(ratio=4), layers, 1 << 20, filters_last=True)
    assert {type(c) for c, _ in buckets} == {GradiVeQCompressor, NoneCompressor}
    assert all(layout.filters_last for _, layout in buckets)
    later = assign(after(5, None, GradiVeQCompressor(ratio=4)), layers)
    assert later[0] == after(5, None, GradiVeQCompressor(ratio=4))
    assert later[2] == NoneCompressor()
    some = partition({"conv.*": GradiVeQCompressor(ratio=4, other=QSGDCompressor()), "*": None})
    chosen = [type(c).__name__[:4] for c in assign(some, layers)]
    assert chosen == ["Grad", "QSGD", "None", "None"]
    compressor = GradiVeQCompressor()
    assert assign(compressor, layers[1:3]) == [NoneCompressor()] * 2
    (line,) = worth.warnings(compressor, plan(compressor, layers[1:3], 1 << 20), 2)
    assert "none of 2 layers is a convolution" in line and "fc.weight" in line


def test_bad_input():
    for name, value in (
        ("slice_size", 0),
        ("max_slice", 0),
        ("reuse", 0),
        ("warmup_steps", -1),
        ("sample_steps", 0),
        ("compress_steps", 0),
    ):
        with pytest.raises(ValueError, match=f"GradiVeQCompressor: {name} must be a whole number"):
            GradiVeQCompressor(**{name: value})
    with pytest.raises(ValueError, match="ratio must be a number"):
        GradiVeQCompressor(ratio=0.5)
    with pytest.raises(ValueError, match="loss_threshold must be a number"):
        GradiVeQCompressor(loss_threshold=1.0)
    with pytest.raises(ValueError, match="give one"):
        GradiVeQCompressor(loss_threshold=0.1, ratio=4)
    with pytest.raises(ValueError, match="resample_loss must be a number"):
        GradiVeQCompressor(resample_loss=2)
    with pytest.raises(ValueError, match="sampling must be one of 'none', 'qsgd'"):
        GradiVeQCompressor(sampling="4bit")
    with pytest.raises(TypeError, match="sampling needs a compressor or None"):
        GradiVeQCompressor(sampling=4)
    with pytest.raises(TypeError, match="takes over momentum"):
        GradiVeQCompressor(other=DGCCompressor())


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_inside_stock_horovod_once_a_basis_is_set(framework):
    tensor = torch.from_numpy if framework == "torch" else tf.constant
    compressor = GradiVeQCompressor(loss_threshold=0.01, reuse=1)
    seen = [np.stack([gradients(s, ranks=1, noise=0)[0][i] for s in range(8)]) for i in range(3)]
    with pytest.raises(TypeError, match="has no basis yet"):
        compressor.compress(tensor(seen[0][0]))
    with pytest.raises(ValueError, match="at least 2 of each layer"):
        compressor.fit([tensor(seen[0][:1])])
    fitted = compressor.fit([tensor(x) for x in seen])
    new = [gradients(20 + r, ranks=1, noise=0)[0] for r in range(2)]
    for layer in range(3):
        codes = [fitted.compress(tensor(rank[layer])) for rank in new]
        assert codes[0][0].shape[0] <= new[0][layer].size
        mean = fitted.decompress((codes[0][0] + codes[1][0]) * 0.5, codes[0][1])
        expected = (new[0][layer] + new[1][layer]) / 2
        np.testing.assert_allclose(np.asarray(mean), expected, atol=0.2)  # 1 % of the energy
    other = tensor(np.ones((4, 4), np.float32))
    code, context = fitted.compress(other)
    assert np.array_equal(np.asarray(fitted.decompress(code, context)), np.asarray(other))


@pytest.mark.parametrize("ratio", [2, 4, 8, 16])
def test_the_ratio_that_was_asked_for_is_done(ratio):
    """By default, whatever the layer; where it cannot be, a warning says why."""
    shapes = [(16, 3, 3, 3), (64, 32, 3, 3), (256, 128, 3, 3), (512, 512, 1, 1), (96, 1, 7, 7)]
    shapes += [(64, 16, 1, 1), (512, 2048, 1, 1), (128, 64, 5)]
    layers = [(f"conv{i}.weight", shape, "float32") for i, shape in enumerate(shapes)]
    compressor = GradiVeQCompressor(ratio=ratio)
    planned = plan(compressor, layers, 1 << 30)
    for one, layout in planned:
        for cut in one.slicing.slices(layout):
            assert cut.max_dimensions == max(1, int(cut.length / ratio)), cut
            if cut.length % ratio == 0:
                assert cut.slices * cut.max_dimensions <= 1.05 * cut.size / ratio, (
                    "few zeros are projected"
                )
            filters = cut.shape[0]
            assert cut.length % filters == 0, "gradients of one input stay together"
    assert not worth.warnings(compressor, planned, 2)
    short = GradiVeQCompressor(ratio=ratio, slice_size=1024, sample_steps=2, reuse=1)
    ((one, layout),) = plan(short, layers[2:3], 1 << 30)
    if ratio < 512:
        (line,) = [x for x in worth.warnings(short, [(one, layout)], 2) if "ratio" in x[:80]]
        assert f"1 layers by more than ratio={ratio}: conv2.weight 1.02e+03" in line
        steps = 1024 // ratio + 1
        assert f"ask for sample_steps={steps}, a smaller slice_size=" in line
        enough = GradiVeQCompressor(ratio=ratio, slice_size=1024, sample_steps=steps, reuse=1)
        assert enough.slicing.slices(layout)[0].max_dimensions == 1024 // ratio


EXTENTS = st.integers(1, 40) | st.sampled_from([64, 96, 128, 256, 509, 512])


@given(
    shape=st.tuples(EXTENTS, EXTENTS, st.integers(1, 7), st.integers(1, 7)),
    max_slice=st.sampled_from([1, 100, 1024, 2048, 4096]),
    chosen=st.sampled_from([{"ratio": 1}, {"ratio": 8}, {"ratio": 32}, {"loss_threshold": 0.1}]),
    reuse=st.sampled_from([None, 1, 4]),
    sample_steps=st.sampled_from([2, 25, 100]),
)
@settings(deadline=None)
def test_slices_end_with_blocks_of_filters_by_depth(shape, max_slice, chosen, reuse, sample_steps):
    """Whole blocks, or equal parts of one: slices never straddle the end of a block."""
    compressor = GradiVeQCompressor(
        max_slice=max_slice, reuse=reuse, sample_steps=sample_steps, **chosen
    )
    cut = compressor.slicing.slices_of(shape, filters_last=False)
    filters, depth, height, width = shape
    block, places = filters * depth, height * width
    assert cut.length <= (max_slice if block <= max_slice else max(1, max_slice // 4))
    assert cut.slices * cut.length == cut.size, "no zeros are projected"
    if cut.length >= block:
        assert cut.length % block == 0 and places % (cut.length // block) == 0
    elif cut.length >= filters:
        assert cut.length % filters == 0 and block % cut.length == 0
    else:
        assert filters % cut.length == 0
    enough = sample_steps * min(reuse or places, places) > block // chosen.get("ratio", 8)
    if block <= max_slice and enough:
        assert cut.length >= block
    if "ratio" in chosen:
        assert cut.max_dimensions == max(1, cut.length // chosen["ratio"])
    if reuse is None and cut.groups > 1:
        assert cut.length < block and places > 1 and cut.slices % cut.groups == 0
        assert cut.groups <= 16
        dimension = cut.length / chosen.get("ratio", 4)
        assert 4 * cut.groups * cut.length * int(dimension) <= max_slice**2 / 4


def test_samples_come_from_all_slices():
    """Energy in directions that the first slice has nothing of is not left out."""
    compressor = GradiVeQCompressor(ratio=8, warmup_steps=0, sample_steps=8, compress_steps=4)
    layout = layout_of(compressor, ((16, 4, 3, 3),))
    world = World(compressor, TorchOps(), layout, 1)
    (cut,) = compressor.slicing.slices(layout)
    assert (cut.length, cut.slices) == (64, 9), "F*D, as in the paper"
    random = np.random.default_rng(1)
    directions = random.standard_normal((2, 64))
    for _ in range(12):
        slices = np.zeros((9, 64))
        slices[5:] = random.standard_normal((4, 2)) @ directions
        kernel = slices.reshape(3, 3, 4, 16).transpose(3, 2, 0, 1)
        flat = torch.from_numpy(np.ascontiguousarray(kernel.reshape(-1), "f4"))
        total = world.step([flat])[0]
        torch.testing.assert_close(total, flat, rtol=1e-3, atol=1e-3)
    assert float(world.states[0].loss) < 1e-4


def test_each_sample_counts_alike_whatever_its_energy():
    """One step with a gradient 1,000 times as large does not take all of the basis."""
    compressor = GradiVeQCompressor(
        ratio=32, max_slice=64, warmup_steps=0, sample_steps=10, compress_steps=4
    )
    layout = layout_of(compressor, ((16, 4, 3, 3),))
    random = np.random.default_rng(1)
    usual, other = random.standard_normal((2, 2, 64))
    world = World(compressor, TorchOps(), layout, 1)
    for step in range(11):
        rows = random.standard_normal((9, 2)) @ (1000 * other if step == 3 else usual)
        kernel = rows.reshape(3, 3, 4, 16).transpose(3, 2, 0, 1)
        world.step([torch.from_numpy(np.ascontiguousarray(kernel.reshape(-1), "f4"))])
    assert float(world.states[0].loss) < 0.1


def test_the_threshold_holds_for_gradients_that_the_basis_has_not_seen():
    """White gradients have no few directions: fitted samples hide it, held-out ones show it."""
    compressor = GradiVeQCompressor(
        loss_threshold=0.3, slice_size=32, warmup_steps=0, sample_steps=12, compress_steps=8
    )
    layout = layout_of(compressor, ((3, 3, 4, 8),), filters_last=True)  # slices lie in order
    world = World(compressor, TorchOps(), layout, 1)
    random = np.random.default_rng(1)
    (cut,) = compressor.slicing.slices(layout)
    for _ in range(20):
        world.step([torch.from_numpy(random.standard_normal(layout.size).astype("f4"))])
    assert cut.max_dimensions < 32
    # 0.3 cannot be met with these samples: all that there is room for is used, and no less.
    assert world.states[0].dimensions.tolist() == [cut.max_dimensions]
    few = np.linalg.qr(random.standard_normal((32, 4)))[0]
    world = World(compressor, TorchOps(), layout, 1)
    for _ in range(20):
        rows = random.standard_normal((9, 4)) @ few.T + 0.1 * random.standard_normal((9, 32))
        world.step([torch.from_numpy(rows.reshape(-1).astype("f4"))])
    assert float(world.states[0].loss) <= 0.3 and world.states[0].dimensions.tolist()[0] <= 5


def test_a_layer_is_a_convolution_by_what_it_belongs_to():
    named = {
        "conv.weight": ((8, 4, 3, 3), True),
        "features/conv1d/kernel": ((3, 4, 8), True),
        "variable": ((3, 3, 4, 8), True),
        "attention/query/kernel": ((64, 8, 8), False),
        "multi_head_attention/attention_output/kernel": ((8, 8, 64), False),
        "pos_embed": ((1, 197, 768), False),
        "cls_token": ((1, 1, 768), False),
        "experts.up": ((8, 64, 256), False),
        "fc.weight": ((10, 20), False),
        "six": ((2, 2, 2, 2, 2, 2), False),
    }
    for name, (shape, expected) in named.items():
        assert convolves((name, shape, "float32")) is expected, name
    known = Weight("attention.weight", (8, 4, 3), "float32", convolves=True)
    assert convolves(known) and known == ("attention.weight", (8, 4, 3), "float32")
    assert convolves(pickle.loads(pickle.dumps(known)))


@normalizes_weights
def test_pytorch_knows_what_its_modules_are():
    from hvd_gradcomp.torch.reduce.bucketing import layers_of

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.filters = torch.nn.Parameter(torch.ones(4, 3, 3, 3))
            self.pos_embed = torch.nn.Parameter(torch.ones(1, 9, 4))

    class Own(torch.nn.Conv2d):
        pass

    class Mixed(torch.nn.Bilinear):
        pass

    model = torch.nn.Sequential(
        torch.nn.Conv1d(4, 8, 3),
        torch.nn.ConvTranspose2d(3, 5, 2),
        torch.nn.Bilinear(4, 5, 6),
        Own(3, 4, 3),
        Odd(),
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv2d(2, 3, 3)),
        Mixed(4, 5, 6),
    )
    kernels = {layer[0]: convolves(layer) for layer in layers_of(list(model.named_parameters()))}
    weight = "5.parametrizations.weight.original1"
    assert {name for name, kernel in kernels.items() if kernel} >= {
        *("0.weight", "1.weight", "3.weight", "4.filters", weight),
    }
    assert not any(
        kernels[name] for name in ("2.weight", "4.pos_embed", "0.bias", "2.bias", "6.weight")
    )


def test_keras_knows_what_its_layers_are():
    keras = pytest.importorskip("keras", minversion="3")
    from hvd_gradcomp.tensorflow.interop.layers import named_layers

    class Folded(keras.layers.EinsumDense):
        pass

    class Own(keras.layers.Conv1D):
        pass

    inputs = keras.Input((6, 8))
    x = keras.layers.Conv1D(16, 3, name="features")(inputs)
    x = keras.layers.MultiHeadAttention(2, 8, name="mixed")(x, x)
    x = Folded("abc,cde->abde", (None, 2, 5), name="projected")(x)
    outputs = keras.layers.TimeDistributed(Own(4, 2, padding="same"))(x)
    model = keras.Model(inputs, outputs)
    layers = named_layers(model.trainable_variables)
    kernels = [name for name, *_ in filter(convolves, layers)]
    assert len([shape for _, shape, _ in layers if len(shape) > 2]) == 7
    assert len(kernels) == 2 and kernels[0] == "features/kernel", kernels


def test_the_page_has_the_tables_of_the_measurement():
    page = (ROOT / measurement.PAGE).read_text()
    result = json.loads((ROOT / "docs/measured/projection.json").read_text())
    assert measurement.with_tables(page, result) == page


def test_what_is_recommended_is_what_was_measured():
    """The defaults, at the ratio that `which.md` and the page name, and of the papers' rows."""
    advised = "GradiVeQCompressor(ratio=8)"
    assert measurement.SETTINGS[measurement.DEFAULT] == {} and measurement.RATIO == 8
    assert usual()["gradiveq"] == GradiVeQCompressor(ratio=8)
    for page in ("docs/which.md", "docs/algorithms/gradiveq.md"):
        assert f"`{advised}`" in (ROOT / page).read_text()
