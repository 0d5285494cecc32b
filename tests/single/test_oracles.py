"""The real code against the paper's pseudo-code, over many steps and ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_gradcomp import HybridCompressor, StromCompressor, VarianceCompressor
from hvd_gradcomp.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.oracles.variance import Hybrid, Strom, Variance, encode

SIZES = (70, 9, 33)
RANKS = 3

CASES = {
    "variance": (VarianceCompressor(alpha=0.8), lambda n: Variance(n, 0.8, 0.999)),
    "variance-feedback": (
        VarianceCompressor(alpha=1.7, zeta=0.9, feedback_rounding=True),
        lambda n: Variance(n, 1.7, 0.9, True),
    ),
    "hybrid": (HybridCompressor(tau=0.3, alpha=1.2), lambda n: Hybrid.of(n, 0.3, 1.2, 0.999)),
    "strom": (StromCompressor(tau=0.4), lambda n: Strom(n, 0.4)),
}


@pytest.mark.parametrize("static", [False, True], ids=["indexed", "masked"])
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_paper(case, static):
    compressor, oracle = CASES[case]
    layout = Layout(("a", "b", "c"), tuple((n,) for n in SIZES))
    world = World(compressor, TorchOps(static=static), layout, RANKS)
    oracles = [[oracle(n) for n in SIZES] for _ in range(RANKS)]
    random = np.random.default_rng(7)
    waiting = 0
    for _ in range(60):
        scale = np.float32(2.0 ** random.integers(-3, 4))
        gradients = [
            [(random.standard_normal(n) * scale).astype(np.float32) for n in SIZES]
            for _ in range(RANKS)
        ]
        moments = [
            [(g * g * np.float32(0.3) + np.float32(1e-3)) for g in rank] for rank in gradients
        ]
        extra = {}
        if compressor.uses_moments:
            extra["moment"] = [world.flat([torch.from_numpy(m) for m in r]) for r in moments]
        totals = world.step(
            [world.flat([torch.from_numpy(g) for g in r]) for r in gradients], **extra
        )
        wanted = [int(x) for x in _header(world, 5)]
        room = [int(x) for x in _header(world, 4)]
        if wanted != room:  # cut by the capacity: the paper has none, start both anew
            waiting += 1
            world = World(compressor, TorchOps(static=static), layout, RANKS)
            world.states = [
                s._replace(ladder=s.ladder._replace(needed=torch.tensor(200))) for s in world.states
            ]
            oracles = [[oracle(n) for n in SIZES] for _ in range(RANKS)]
            continue
        expected = np.zeros(layout.size, np.float32)
        for rank in range(RANKS):
            for layer, start in enumerate(layout.offsets):
                sent = oracles[rank][layer].step(gradients[rank][layer], moments[rank][layer])
                for i, value in sent.items():
                    expected[start + i] += np.float32(value * np.float32(1 / RANKS))
                memory = world.states[rank].memory
                piece = slice(start, start + SIZES[layer])
                np.testing.assert_array_equal(memory[0][piece], oracles[rank][layer].r)
                if len(memory) > 1:
                    np.testing.assert_array_equal(memory.v[piece], oracles[rank][layer].v)
        np.testing.assert_array_equal(totals[0], expected)
    assert waiting <= 2, "the comparison has to run over many steps"


def _header(world, word):
    buffers = [r.tensor for r in world.traffic[0]]
    return [b[4 * word : 4 * word + 4].view(torch.int32) for b in buffers]


def test_appendix_b():
    """004, appendix B: 0.04 is not sent, the others are -32, 16, -8, 0.25 with e = 5."""
    values = (0.04, 0.31, -6.25, 22.25, -35.75)
    expected = {1: 0.25, 2: -8.0, 3: 16.0, 4: -32.0}
    assert encode(dict(enumerate(map(np.float32, values)))) == expected
    for static in (False, True):
        ops, layout = TorchOps(static=static), Layout(("matrix",), ((5,),))
        world = World(VarianceCompressor(alpha=1.0), ops, layout, 1)
        gradient = world.flat([torch.tensor(values)])
        total = world.step([gradient], moment=[torch.zeros(layout.size)])[0]
        assert total[:5].tolist() == [expected.get(i, 0.0) for i in range(5)]
        exponent = world.traffic[0][0].tensor[32].view(torch.int8)
        assert int(exponent) == 5
        words = world.traffic[0][0].tensor[36:52].view(torch.int32).tolist()
        codes = {w & 0xFFFFFFF: (w >> 28) & 15 for w in words}
        assert codes == {1: 7, 2: 8 + 2, 3: 1, 4: 8 + 0}
        assert world.states[0].memory.r[0] == np.float32(0.04), "what is not sent stays"
