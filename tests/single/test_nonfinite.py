"""A NaN or an infinity on one rank is an error on all, and stays in no state."""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_gradcomp import DGCCompressor, NonFiniteGradientError, VarianceCompressor
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.methods import (
    BALANCED,
    EVERY,
    LARGEST,
    LEADER,
    LEARNED,
    LINEAR,
    ONE_OF_EACH,
    ONE_OF_TODAY,
    OUTSIDE,
    PRODUCTS,
    QUANTIZED,
    ROBUST,
    ROUNDED,
    TODAY,
    WORDS,
)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("compressor", WORDS + LARGEST + LEADER + QUANTIZED, ids=repr)
def test_a_poisoned_gradient(compressor, value):
    layout = Layout(("a", "b"), ((30, 20), (9,)), block=compressor.block)
    world = World(compressor, TorchOps(), layout, 3)
    generator = torch.Generator().manual_seed(1)

    def draw():
        return world.flat([torch.randn(s, generator=generator) for s in layout.shapes])

    for _ in range(8):
        world.step([draw() for _ in range(3)])
    before = [[x.clone() for _, x in leaves(state)] for state in world.states]
    gradients = [draw() for _ in range(3)]
    gradients[1][17] = value
    with pytest.raises(NonFiniteGradientError, match="NaN or an infinity in its gradient"):
        world.step(gradients)
    for rank, state in enumerate(world.states):
        now = [x for _, x in leaves(state)]
        assert all(x.isfinite().all() for x in now if x.dtype == torch.float32 and x.dim())
        if rank == 1 or compressor in LEADER + QUANTIZED:
            assert all(map(torch.equal, now, before[rank])), "the state is as it was"
        elif getattr(compressor, "clip_norm", None) is None:
            # What was sent is back, and the gradient of the step is kept, not lost.
            r = before[rank][0] + _arrived(compressor, gradients[rank], before[rank])
            torch.testing.assert_close(now[0], r, rtol=1e-5, atol=1e-5)
    for total in world.step([draw() for _ in range(3)]):
        assert total.isfinite().all(), "training goes on"


@pytest.mark.parametrize("backend", ["dynamic", "static", "tensorflow"])
@pytest.mark.parametrize("of_samples", [False, True], ids=["step", "sample"])
def test_squares_that_overflow(backend, of_samples):
    """With an infinite second moment an element would never be sent again."""
    tensorflow = backend == "tensorflow"
    ops = TensorFlowOps() if tensorflow else TorchOps(static=backend == "static")
    compressor = VarianceCompressor(alpha=1.0, moments="sample" if of_samples else "step")
    world = World(compressor, ops, Layout(("a",), ((30, 20),)), 2)
    make = tf.constant if tensorflow else torch.tensor
    gradients = [np.ones(world.layout.size, "f4") * 0.01 for _ in range(2)]
    gradients[1][17] = 1e20
    if of_samples:
        gradients[1][17] = 0.01
        squares = [g * g for g in gradients]
        squares[1][17] = np.inf
    flats = [make(g) for g in gradients]
    moments = {"moment": [make(q) for q in squares]} if of_samples else {}
    with pytest.raises(NonFiniteGradientError, match="NaN or an infinity in its gradient"):
        world.step(flats, **moments)
        ops.found_finite()
    for state in world.states:
        assert all(np.isfinite(np.asarray(x)).all() for _, x in leaves(state))


def _arrived(compressor, gradient, fields):
    momentum = getattr(compressor, "momentum", 0.0) or 0.0
    return fields[1] * momentum + gradient if momentum else gradient


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize(
    "compressor",
    EVERY + LEARNED + OUTSIDE + TODAY + PRODUCTS + ROBUST + BALANCED + ROUNDED[::3],
    ids=repr,
)
def test_a_step_that_was_undone_leaves_no_trace(compressor, static):
    """Do as the PyTorch reducer does for `nonfinite="skip"`, by plain ops."""
    layout = Layout(("a", "b"), ((30, 20), (9,)), block=compressor.block)
    ops = TorchOps(static=static)
    disturbed, calm = (World(compressor, ops, layout, 2) for _ in range(2))
    generator = torch.Generator().manual_seed(1)

    for step in range(24):
        gradients = [
            calm.flat([torch.randn(s, generator=generator) for s in layout.shapes])
            for _ in range(2)
        ]
        if step % 3 == 1:
            kept = [x for state in disturbed.states for _, x in leaves(state)]
            before = [x.clone() for x in kept]
            poisoned = [g.clone() for g in gradients]
            poisoned[step % 2][5 + step] = float("inf")
            ops.snapshot(kept)
            with pytest.raises(NonFiniteGradientError):
                disturbed.step(poisoned)
            ops.release_snapshot(kept, kept)
            assert all(map(_same, kept, before))
        results = [world.step([g.clone() for g in gradients]) for world in (disturbed, calm)]
        assert all(map(_same, *results)), step
    states = [[x for s in world.states for _, x in leaves(s)] for world in (disturbed, calm)]
    assert all(map(_same, *states))


def _same(x, y):
    return torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


def test_a_step_that_is_kept_uses_the_same_memory_again():
    layout = Layout(("a",), ((4000,),))
    ops = TorchOps()
    world = World(DGCCompressor(momentum=0.9), ops, layout, 1)
    seen = set()
    for _ in range(8):
        kept = [x for _, x in leaves(world.states[0])]
        ops.snapshot(kept)
        world.step([torch.randn(layout.size)])
        now = [x for _, x in leaves(world.states[0])]
        assert not {x.data_ptr() for x in kept if x.numel() > 999} & {x.data_ptr() for x in now}
        ops.release_snapshot(kept, now)
        seen |= {x.data_ptr() for x in now if x.numel() > 999}
    assert len(seen) == 4, "two vectors, and room for as many"


def _in_use():
    """Bytes of all tensors that are alive, but for those without memory that tracing leaves."""
    gc.collect()
    storages = {}
    for x in gc.get_objects():
        if type(x) is torch.Tensor and x.device.type == "cpu":
            with contextlib.suppress(RuntimeError):
                storage = x.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    "compressor", ONE_OF_EACH + ONE_OF_TODAY + LEARNED[::2] + PRODUCTS + ROBUST + BALANCED, ids=repr
)
def test_memory_for_steps_that_may_be_undone_does_not_grow(compressor):
    """Let methods learn too: new parameters take the place of the old."""
    layout = Layout(("a", "b"), ((30, 20), (9,)), block=compressor.block)
    ops = TorchOps()
    world = World(compressor, ops, layout, 2)
    generator = torch.Generator().manual_seed(1)
    used = []
    for step in range(75):
        kept = [x for state in world.states for _, x in leaves(state)]
        ops.snapshot(kept)
        world.step([torch.randn(layout.size, generator=generator) for _ in range(2)])
        ops.release_snapshot(kept, [x for state in world.states for _, x in leaves(state)])
        del kept
        if step in (54, 74):
            world.traffic = []
            used.append(_in_use())
    assert used[1] <= used[0] + 4096, used


@pytest.mark.parametrize("compressor", WORDS + LARGEST, ids=repr)
def test_what_is_kept_is_whole_and_steps_are_the_same(compressor):
    """In a bucket so large that kernels write past the caches; layers begin on no line of them."""
    layout = Layout(("a", "b", "c"), ((40_003,), (101,), (300_001,)), block=compressor.block)
    keeping = TorchOps()
    world, plain = World(compressor, keeping, layout, 2), World(compressor, TorchOps(), layout, 2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        kept = [x for state in world.states for _, x in leaves(state)]
        before = [x.clone() for x in kept]
        drawn = [[torch.randn(s, generator=generator) for s in layout.shapes] for _ in range(2)]
        gradients = [world.flat(tensors) for tensors in drawn]
        keeping.snapshot(kept)
        totals = world.step([g.clone() for g in gradients])
        assert all(map(torch.equal, totals, plain.step(gradients)))
        assert all(map(torch.equal, kept, before))
        keeping.release_snapshot(kept, [x for state in world.states for _, x in leaves(state)])
    for one, other in zip(world.states, plain.states):
        assert all(torch.equal(x, y) for (_, x), (_, y) in zip(leaves(one), leaves(other)))


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 2.0**59], ids=str)
@pytest.mark.parametrize("compressor", WORDS + LARGEST, ids=repr)
def test_a_poisoned_gradient_changes_no_kept_state(compressor, value):
    """Kernels check it while they write the next state beside the kept one; 2**59 is too large.

    Steps that succeed are those of a world that has never seen the poison.
    """
    if np.isfinite(value) and getattr(compressor, "clip_norm", None) is not None:
        pytest.skip("what is large is clipped")
    layout = Layout(("a", "b", "c"), ((40_003,), (101,), (300_001,)), block=compressor.block)
    keeping = TorchOps()
    world, plain = World(compressor, keeping, layout, 2), World(compressor, TorchOps(), layout, 2)
    generator = torch.Generator().manual_seed(1)
    for step, place in enumerate([None, 17, 40_040, 40_200, 340_000, None]):
        kept = [x for state in world.states for _, x in leaves(state)]
        before = [x.clone() for x in kept]
        drawn = [[torch.randn(s, generator=generator) for s in layout.shapes] for _ in range(2)]
        gradients = [world.flat(tensors) for tensors in drawn]
        keeping.snapshot(kept)
        if place is None:
            totals = world.step([g.clone() for g in gradients])
            assert all(map(torch.equal, totals, plain.step(gradients)))
        else:
            gradients[step % 2][place] = value
            with pytest.raises(NonFiniteGradientError, match="its gradient"):
                world.step(gradients)
        assert all(map(torch.equal, kept, before))
        keeping.release_snapshot(kept, [x for state in world.states for _, x in leaves(state)])
    for one, other in zip(world.states, plain.states):
        assert all(torch.equal(x, y) for (_, x), (_, y) in zip(leaves(one), leaves(other)))


SINGLE_SUMS = LINEAR + QUANTIZED + [c for c in WORDS if isinstance(c, VarianceCompressor)]


@pytest.mark.parametrize("backend", ["dynamic", "static", "tensorflow"])
@pytest.mark.parametrize("compressor", SINGLE_SUMS + LARGEST + LEADER, ids=repr)
def test_a_sum_that_overflows(compressor, backend):
    """Each rank's gradient is finite, and what they add up to is not: like any overflow."""
    ops = TensorFlowOps() if backend == "tensorflow" else TorchOps(static=backend == "static")
    layout = Layout(("a", "b"), ((30, 20), (9,)), block=compressor.block)
    world, calm = (World(compressor, ops, layout, 3, average=False) for _ in range(2))
    generator = torch.Generator().manual_seed(1)

    def draw(scale):
        def tensor(shape):
            x = torch.rand(shape, generator=generator) * scale
            return tf.constant(x.numpy()) if backend == "tensorflow" else x

        return world.flat([tensor(shape) for shape in layout.shapes])

    def step(world, gradients):
        extra = {"moment": [g * 0.0 + 1.0 for g in gradients]} if compressor.uses_moments else {}
        return world.step(gradients, **extra)

    for number in range(4):
        gradients = [draw(1.0) for _ in range(3)]
        if number == 2:
            kept = [x for state in world.states for _, x in leaves(state)]
            if backend != "tensorflow":
                ops.snapshot(kept)
            with pytest.raises(NonFiniteGradientError, match="NaN or an infinity in its gradient"):
                step(world, [draw(3.4e38) for _ in range(3)])
                if backend == "static":
                    ops.raise_found()
            if backend != "tensorflow":
                ops.release_snapshot(kept, kept)
        for a, b in zip(step(world, gradients), step(calm, gradients)):
            assert np.array_equal(np.asarray(a), np.asarray(b)), number
