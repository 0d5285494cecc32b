"""Optional hooks: their defaults, a compressor that overrides some, and composites."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import pytest
import torch

from hvd_gradcomp import Compressor, NoneCompressor, after
from hvd_gradcomp.algorithms.combined.wrappers import MomentumAfter
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns
from hvd_gradcomp.method.compressor import Report
from hvd_gradcomp.method.handover import Handover, correction_of, inherited, residual_of
from hvd_gradcomp.method.learned import owner_of, retrained
from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning.assignment import assign
from hvd_gradcomp.testing import World
from tests.methods import GRADIVEQ, LGC, LGC_SERVER

LAYERS = [("a", (30, 2), "float32"), ("b", (7,), "float32")]
LAYOUT = Layout(("a", "b"), ((30, 2), (7,)))


@dataclass(frozen=True)
class Whole(Compressor):
    """Sends all there is."""

    def init(self, ops, layout):
        return ()

    def aggregate(self, ops, context, gradient, state, **extra):
        return (yield from patterns.allreduce_bucket(ops, context, gradient)), state


class Debt(NamedTuple):
    r: Tensor


@dataclass(frozen=True)
class HalvesEverything(Handover, Whole):
    """Sends half of what it has."""

    def init(self, ops, layout):
        return Debt(ops.zeros((layout.size,)))

    def aggregate(self, ops, context, gradient, state, **extra):
        half = (state.r + gradient) * 0.5
        kept = Debt(half * 1)
        return (yield from patterns.allreduce_bucket(ops, context, half)), kept

    def residual(self, state):
        return state.r

    def layer_bytes(self, shape):
        return 1.0

    def of_layers(self, layers, ranks):
        return [self, *[NoneCompressor()] * (len(layers) - 1)]


def gradients(world, ranks=2):
    return [world.flat([torch.ones(30, 2), torch.ones(7)]) for _ in range(ranks)]


def test_two_methods_are_enough():
    one, ops = Whole(), TorchOps()
    world = World(one, ops, LAYOUT, 2)
    assert torch.equal(*world.step(gradients(world)))
    (state, _), ones = world.states, torch.ones(LAYOUT.size)
    assert one.report(LAYOUT, state, 3, since=1) == Report([120, 14])
    assert residual_of(one, state) is None and correction_of(one) is None
    kept, gradient = inherited(one, ops, state, ones, ones)
    assert kept is state and float(gradient.sum()) == 2 * LAYOUT.size
    assert retrained(one, ops, state, 1) is state and owner_of(one, "x", 1) is None
    assert one.resized(ops, state, 1, 3) is state
    assert one.of_layers(LAYERS, 2) == [one, one]
    assert one.layer_bytes((3,)) is None
    assert assign(one, LAYERS) == [one, one]


def test_a_method_overrides_hooks():
    one = HalvesEverything()
    world = World(one, TorchOps(), LAYOUT, 2)
    world.step(gradients(world))
    report = one.report(LAYOUT, world.states[0], 1)
    assert report.sent == [60, 7] and float(report.residual.sum()) == 67 / 2
    assert assign(one, LAYERS) == [one, NoneCompressor()]


def test_a_composite_delegates_to_its_children():
    phases = after(2, HalvesEverything(), Whole())
    world = World(phases, TorchOps(), LAYOUT, 2)
    results = [world.step(gradients(world))[0][0] for _ in range(4)]
    assert [float(x) for x in results] == [0.5, 0.75, 1.75, 1.0]  # what was kept came at the change
    first, second = phases.of_layers(LAYERS, 2)
    assert first == phases and second == after(2, NoneCompressor(), Whole())
    wrapped = MomentumAfter(HalvesEverything(), 0.9)
    state = wrapped.init(TorchOps(), LAYOUT)
    assert wrapped.replicated == {"velocity"} and wrapped.layer_bytes((3,)) == 1.0
    assert wrapped.residual(state) is state.inner.r
    assert wrapped.resized(TorchOps(), state, 1, 3) is state


@pytest.mark.parametrize("ops", [TorchOps(), TensorFlowOps()], ids=["torch", "tensorflow"])
@pytest.mark.parametrize("one", [GRADIVEQ, LGC, LGC_SERVER], ids=["gradiveq", "lgc", "lgc-server"])
def test_what_learns_rehearses_its_compressed_phase(one, ops):
    """In which alone it sends less than everything."""
    layout = Layout(("a", "b", "c"), ((32, 16, 3, 3),) * 3, block=one.block)
    world = World(one, ops, layout, 2)
    flat = ops.uniform(ops.key(0, 1), layout.size)
    sizes = []

    def item(x):
        return 1 if "8" in str(x.dtype) else 4

    for step in (0, 10_000):
        world.steps = step
        if step:
            world.states = [one.rehearsed(ops, layout, state, step) for state in world.states]
        world.step([ops.times(flat, 1.0) for _ in range(2)])
        requests = [request for request, *_ in world.traffic]  # rank 0's; a tensor has a shape
        sizes.append(sum(prod(one.tensor.shape) * item(one.tensor) for one in requests))
    assert sizes[1] < sizes[0] / 2
