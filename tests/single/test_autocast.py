"""Autocast around a step: a user may run backward, or exchange, inside of it."""

from __future__ import annotations

import pytest
import torch

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.methods import LEARNED, ONE_OF_EACH, ONE_OF_TODAY, PRODUCTS


@pytest.mark.parametrize("compressor", [*ONE_OF_EACH, *ONE_OF_TODAY, *PRODUCTS, *LEARNED], ids=repr)
def test_it_changes_nothing(compressor):
    """Matrix products would be rounded to bfloat16, which no transport adds up."""
    layout = Layout(("a", "b"), ((30, 20), (9,)), block=compressor.block)
    worlds = [World(compressor, TorchOps(), layout, 2) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(24):
        gradients = [
            worlds[0].flat([torch.randn(s, generator=generator) for s in layout.shapes])
            for _ in range(2)
        ]
        plain = worlds[0].step([g.clone() for g in gradients])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = worlds[1].step(gradients)
        assert all(map(torch.equal, plain, inside))
    states = [[x for state in world.states for _, x in leaves(state)] for world in worlds]
    assert all(map(_same, *states))


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
