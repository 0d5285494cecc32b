"""The real code against the paper's pseudo-code, over many steps and ranks."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

from hvd_gradcomp import (
    DGCCompressor,
    EGCCompressor,
    GradientDroppingCompressor,
    HybridCompressor,
    OneBitCompressor,
    QSGDCompressor,
    ScaleComCompressor,
    SparseGDCompressor,
    StromCompressor,
    TernGradCompressor,
    VarianceCompressor,
)
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.oracles import quantizers, topk
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
        capacity = [int(x) for x in _header(world, 4)]
        if wanted != capacity:  # cut by the capacity: the paper has none, start both anew
            waiting += 1
            world = World(compressor, TorchOps(static=static), layout, RANKS)
            world.states = [
                s._replace(capacity=s.capacity._replace(needed=torch.tensor(200)))
                for s in world.states
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
        if len(world.traffic) == 1:
            np.testing.assert_array_equal(totals[0], expected)
        else:  # added up on the way, and divided at the end
            np.testing.assert_allclose(totals[0], expected, rtol=1e-6, atol=1e-6)
    assert waiting <= 2, "the comparison has to run over many steps"


def _header(world, word):
    buffers = [r.tensor for r in world.traffic[0]]
    return [b[4 * word : 4 * word + 4].view(torch.int32) for b in buffers]


def test_appendix_b():
    """Tsuzuku et al., appendix B: 0.04 is not sent, the others are -32, 16, -8, 0.25 with e = 5."""
    values = (0.04, 0.31, -6.25, 22.25, -35.75)
    expected = {1: 0.25, 2: -8.0, 3: 16.0, 4: -32.0}
    assert encode(dict(enumerate(map(np.float32, values)))) == expected
    for static in (False, True):
        ops, layout = TorchOps(static=static), Layout(("matrix",), ((5,),))
        compressor = VarianceCompressor(alpha=1.0, index_coding="int32")  # as in the paper
        world = World(compressor, ops, layout, 1)
        gradient = world.flat([torch.tensor(values)])
        total = world.step([gradient], moment=[torch.zeros(layout.size)])[0]
        assert total[:5].tolist() == [expected.get(i, 0.0) for i in range(5)]
        exponent = world.traffic[0][0].tensor[32].view(torch.int8)
        assert int(exponent) == 5
        words = world.traffic[0][0].tensor[36:52].view(torch.int32).tolist()
        codes = {w & 0xFFFFFFF: (w >> 28) & 15 for w in words}
        assert codes == {1: 7, 2: 8 + 2, 3: 1, 4: 8 + 0}
        assert world.states[0].memory.r[0] == np.float32(0.04), "what is not sent stays"


TOPK = {
    "sparse gd": (
        SparseGDCompressor(density=0.06),
        lambda: topk.TopK(SIZES, RANKS, 0.06),
    ),
    "gradient dropping": (
        GradientDroppingCompressor(ratio=0.9),
        lambda: topk.GradientDropping(SIZES, RANKS, 0.9),
    ),
    "dgc": (
        DGCCompressor(density=0.05, momentum=0.9),
        lambda: topk.DGC(SIZES, RANKS, 0.05, 0.9),
    ),
    "dgc nesterov clipped": (
        DGCCompressor(density=0.05, momentum=0.7, nesterov=True, clip_norm=6.0),
        lambda: topk.DGC(SIZES, RANKS, 0.05, 0.7, True, 6.0),
    ),
    "egc": (
        EGCCompressor(K=20, bins=2, entropy_interval=4, momentum=0.9),
        lambda: topk.EGC(SIZES, RANKS, 20, 2, 4, 0.9),
    ),
    "egc many bins": (
        EGCCompressor(K=40, bins=9, entropy_interval=1, momentum=0.5),
        lambda: topk.EGC(SIZES, RANKS, 40, 9, 1, 0.5),
    ),
    "scalecom": (
        ScaleComCompressor(density=0.05),
        lambda: topk.ScaleCom(SIZES, RANKS, 0.05, 1.0),
    ),
    "scalecom filtered": (
        ScaleComCompressor(density=0.05, beta=0.3),
        lambda: topk.ScaleCom(SIZES, RANKS, 0.05, 0.3),
    ),
}


@pytest.mark.parametrize("static", [False, True], ids=["indexed", "masked"])
@pytest.mark.parametrize("case", TOPK)
def test_top_k_agrees_with_the_paper(case, static):
    compressor, make = TOPK[case]
    layout = Layout(("a", "b", "c"), tuple((n,) for n in SIZES))
    world, oracle = World(compressor, TorchOps(static=static), layout, RANKS), make()
    random = np.random.default_rng(7)
    exact = "clipped" not in case and "scalecom" not in case
    for _ in range(50):
        scale = np.float32(2.0 ** random.integers(-3, 4))
        gradients = [
            [(random.standard_normal(n) * scale).astype(np.float32) for n in SIZES]
            for _ in range(RANKS)
        ]
        total = world.step([world.flat([torch.from_numpy(g) for g in r]) for r in gradients])[0]
        means = oracle.step(gradients)
        for layer, start in enumerate(layout.offsets):
            piece = slice(start, start + SIZES[layer])
            pairs = [(total[piece], means[layer])]
            pairs += [
                (world.states[rank].memory.r[piece], oracle.r[rank][layer]) for rank in range(RANKS)
            ]
            for ours, theirs in pairs:
                if exact:
                    np.testing.assert_array_equal(ours.numpy(), theirs)
                else:
                    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "compressor",
    [QSGDCompressor(bits=4, bucket_size=32), QSGDCompressor(bits=3, bucket_size=50, norm="l2")],
    ids=repr,
)
def test_qsgd_agrees_with_the_paper(compressor):
    sizes = (70, 33)
    layout = Layout(("a", "b"), tuple((n,) for n in sizes), block=32)
    ops = TorchOps()
    world = World(compressor, ops, layout, 1)
    random = np.random.default_rng(3)
    for step in range(10):
        gradients = [random.standard_normal(n).astype("f4") for n in sizes]
        total = world.step([world.flat([torch.from_numpy(g) for g in gradients])])[0].numpy()
        salt = zlib.crc32(f"{compressor.seed} 0 0 {layout.digest}".encode())
        first, second = ops.key(step, salt).tolist()
        for g, start in zip(gradients, layout.offsets):
            for at in range(0, len(g), compressor.bucket_size):
                group = g[at : at + compressor.bucket_size]
                chances = [
                    quantizers.noise(first, second, start + at + i) for i in range(len(group))
                ]
                expected = quantizers.qsgd(group, compressor.bits, compressor.norm, chances)
                sent = total[start + at : start + at + len(group)]
                np.testing.assert_allclose(sent, expected, rtol=1e-6)


def test_terngrad_agrees_with_the_paper():
    layout, ops = Layout(("a", "b"), ((70,), (40,)), block=32), TorchOps()
    compressor = TernGradCompressor(clip=1.5, seed=9)
    world = World(compressor, ops, layout, 1)
    random = np.random.default_rng(3)
    for step in range(10):
        gradients = [random.standard_normal(n).astype("f4") for n in (70, 40)]
        total = world.step([world.flat([torch.from_numpy(g) for g in gradients])])[0].numpy()
        first, second = ops.key(step, zlib.crc32(f"9 0 0 {layout.digest}".encode())).tolist()
        for g, start in zip(gradients, layout.offsets):
            chances = [quantizers.noise(first, second, start + i) for i in range(len(g))]
            expected = quantizers.terngrad(g, 1.5, chances)
            np.testing.assert_allclose(total[start : start + len(g)], expected, rtol=1e-6)


def test_one_bit_agrees_with_the_paper():
    layout = Layout(("a",), ((8, 12),), block=32)
    world, oracle = World(OneBitCompressor(), TorchOps(), layout, 1), quantizers.OneBit(8, 12)
    random = np.random.default_rng(3)
    for _ in range(20):
        g = random.standard_normal((8, 12)).astype("f4")
        total = world.step([world.flat([torch.from_numpy(g)])])[0].numpy()
        np.testing.assert_allclose(total[:96].reshape(8, 12), oracle.step(g), rtol=1e-4, atol=1e-5)
