"""C on other processors than this one: the same bits with smaller vectors, and with none."""

from __future__ import annotations

import platform
import subprocess
from unittest import mock

import pytest

from hvd_gradcomp import (
    DGCCompressor,
    GradientDroppingCompressor,
    HybridCompressor,
    OneBitCompressor,
    QSGDCompressor,
    SparseGDCompressor,
    StromCompressor,
    TernGradCompressor,
    VarianceCompressor,
)
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.ops import building, native
from hvd_gradcomp.testing import World
from tests.kernels import NATIVE, TorchOps, assert_alike, layout_of, threads, torch
from tests.methods import ONE_OF_TODAY, PRODUCTS

pytestmark = [
    NATIVE,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="has vectors of one size alone"),
]
# What `__builtin_cpu_supports` says of a name such as "avx2" or "avx512f".
PROCESSORS = {"AVX2": "((name)[3] == 50)", "none": "0"}
METHODS = [
    VarianceCompressor(alpha=0.5),
    HybridCompressor(tau=0.5),
    StromCompressor(tau=0.7),
    SparseGDCompressor(density=0.01),
    DGCCompressor(density=0.05, momentum=0.9),
    GradientDroppingCompressor(ratio=0.9),
    QSGDCompressor(),
    TernGradCompressor(),
    OneBitCompressor(),
    *ONE_OF_TODAY,
    *PRODUCTS,
]


@pytest.fixture(scope="module", params=PROCESSORS)
def library(request, tmp_path_factory):
    """The C library as such a processor runs it, but for what the compiler itself chooses among."""
    target = tmp_path_factory.mktemp("native") / "library.so"
    answer = f"-D__builtin_cpu_supports(name)={PROCESSORS[request.param]}"
    sources = [building.HERE / name for name in building.NATIVE]
    flags = [flag for flag in building.FLAGS if flag != "-O3"]
    command = ["gcc", "-O1", *flags, *building.THREADS, answer, "-shared", "-fPIC", *sources]
    subprocess.run([*command, "-o", target], check=True)
    return native.load(target)


@pytest.mark.parametrize("compressor", METHODS, ids=repr)
def test_same_bits_on_every_processor(library, compressor):
    """Steps of few elements and of many, on the dense level too; layers end anywhere."""
    layout = layout_of(20_011, 100, 9_000, 1)
    ops = TorchOps()
    with mock.patch("hvd_gradcomp.ops.torch.base.library", lambda: library):
        other = TorchOps()
    assert ops.native.library is not library is other.native.library
    here, other_world = (World(compressor, o, layout, 2) for o in (ops, other))
    with threads(2):
        for step, share in enumerate([0.001, 0.001, 0.05, 1.0, 1.0, 0.01]):
            generator = torch.Generator().manual_seed(step)
            drawn = []
            for _ in range(2):
                layers = [torch.randn(n, generator=generator) for n in layout.sizes]
                few = [torch.rand(n, generator=generator) < share for n in layout.sizes]
                drawn.append(here.flat([x * (k + 1e-3) for x, k in zip(layers, few)]))
            extra = {}
            if compressor.uses_moments and step % 2:
                extra["moment"] = [g * g / 2 for g in drawn]
            assert all(
                map(torch.equal, here.step(drawn, **extra), other_world.step(drawn, **extra))
            )
            assert_alike(here, other_world)


KEPT = [
    VarianceCompressor(alpha=2.0),
    StromCompressor(tau=2.5),
    SparseGDCompressor(density=0.01),
    DGCCompressor(density=0.05, momentum=0.9),
    DGCCompressor(density=0.01, momentum=0.9, nesterov=True, masking=False),
]


@pytest.mark.parametrize("compressor", KEPT, ids=repr)
def test_same_bits_past_the_caches(library, compressor):
    """States that are kept, and so much of them that the next is written past the caches."""
    layout = layout_of(40_003, 101, 300_001)
    ops = TorchOps()
    with mock.patch("hvd_gradcomp.ops.torch.base.library", lambda: library):
        other = TorchOps()
    here, other_world = (World(compressor, o, layout, 2) for o in (ops, other))
    generator = torch.Generator().manual_seed(1)
    with threads(2):
        for _ in range(3):
            layers = [[torch.randn(n, generator=generator) for n in layout.sizes] for _ in range(2)]
            drawn = [here.flat(tensors) for tensors in layers]
            kept = [x for state in other_world.states for _, x in leaves(state)]
            before = [x.clone() for x in kept]
            other.snapshot(kept)
            assert all(map(torch.equal, here.step(drawn), other_world.step(drawn)))
            assert all(map(torch.equal, kept, before))
            now = [x for state in other_world.states for _, x in leaves(state)]
            other.release_snapshot(kept, now)
            assert_alike(here, other_world)
