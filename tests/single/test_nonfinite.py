"""A NaN or an infinity on one rank is an error on all, and stays in no state."""

from __future__ import annotations

import pytest
import torch

from hvd_gradcomp import NonFiniteGradientError
from hvd_gradcomp.aggregator import leaves
from hvd_gradcomp.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.methods import LARGEST, LEADER, QUANTIZED, WORDS


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


def _arrived(compressor, gradient, fields):
    momentum = getattr(compressor, "momentum", 0.0) or 0.0
    return fields[1] * momentum + gradient if momentum else gradient
