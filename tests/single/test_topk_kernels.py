"""Kernels of the top-k family against its plain ops, to the bit; see test_threshold_kernels.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import (
    DGCCompressor,
    EGCCompressor,
    GradientDroppingCompressor,
    ScaleComCompressor,
    SparseGDCompressor,
)
from hvd_gradcomp.codecs.sparse import Payloads
from hvd_gradcomp.core.collectives import Allgather, Broadcast
from hvd_gradcomp.method.wire import HEADER_BYTES
from hvd_gradcomp.ops import NonFiniteGradientError, PayloadError
from hvd_gradcomp.testing import World
from tests.kernels import NATIVE, TorchOps, assert_alike, layout_of, reference_ops, threads, torch
from tests.methods import LARGEST, LEADER

pytestmark = NATIVE
METHODS = [
    *LARGEST,
    *LEADER,
    ScaleComCompressor(density=0.03, beta=0.3, index_coding="int32"),
    SparseGDCompressor(density=0.001),
    SparseGDCompressor(density=1.0),
    DGCCompressor(density=0.01, momentum=0.9, masking=False),
    GradientDroppingCompressor(ratio=0.99, index_coding="int32"),
]
ONE_EACH = [
    SparseGDCompressor(density=0.01),
    SparseGDCompressor(density=0.1, index_coding="int32"),
    DGCCompressor(density=0.05, momentum=0.9),
    EGCCompressor(K=20, momentum=0.9, entropy_interval=3),
    GradientDroppingCompressor(ratio=0.9),
    ScaleComCompressor(density=0.05, beta=0.7),
]


def gradients(generator, layout, world, kind, scale):
    """Of all ranks; the scale differs by layer, and from step to step."""
    flats = []
    for _ in range(world.size):
        layers = []
        for i, n in enumerate(layout.sizes):
            x = torch.randn(n, generator=generator)
            if kind == "ties":
                x = torch.round(x)
            elif kind == "equal":
                x = torch.full((n,), -0.5)
            elif kind == "few":
                x = x * (torch.rand(n, generator=generator) < 0.004)
            elif kind == "heavy":
                x = x / torch.rand(n, generator=generator).clamp(min=1e-6)
            layers.append(scale * 2.0**i * x)
        flats.append(world.flat(layers))
    return flats


@pytest.mark.parametrize("compressor", METHODS, ids=repr)
@given(
    sizes=st.lists(st.sampled_from([1, 3, 255, 256, 700, 5000, 20_000]), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
    ranks=st.integers(1, 5),
    kinds=st.lists(
        st.sampled_from(["noise", "ties", "equal", "few", "heavy"]), min_size=4, max_size=4
    ),
    scales=st.lists(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e6]), min_size=4, max_size=4),
    first=st.sampled_from([0, 1, 1000]),
    count=st.integers(1, 4),
)
@settings(deadline=None, max_examples=15)
def test_kernels_match_reference_ops(compressor, sizes, seed, ranks, kinds, scales, first, count):
    """Hints that are too high and too low, groups with too few elements, ties, other turns."""
    layout = layout_of(*sizes)
    fused, reference = (World(compressor, o, layout, ranks) for o in (TorchOps(), reference_ops()))
    fused.steps = reference.steps = first
    with threads(count):
        for step, (kind, scale) in enumerate(zip(kinds, scales)):
            generator = torch.Generator().manual_seed(1000 * seed + step)
            flats = gradients(generator, layout, fused, kind, scale)
            ours, theirs = fused.step(flats), reference.step(flats)
            assert all(map(torch.equal, ours, theirs))
            assert_alike(fused, reference)


def assert_threads_agree(compressor, layout, kinds, counts):
    worlds = [World(compressor, TorchOps(), layout, 2) for _ in counts]
    for step, kind in enumerate(kinds):
        totals = []
        for count, world in zip(counts, worlds):
            generator = torch.Generator().manual_seed(step)
            with threads(count):
                totals.append(world.step(gradients(generator, layout, world, kind, 1.0)))
        for world, total in zip(worlds[1:], totals[1:]):
            assert all(map(torch.equal, totals[0], total))
            assert_alike(worlds[0], world)


@pytest.mark.parametrize("compressor", ONE_EACH, ids=repr)
def test_threads_cut_a_large_bucket_alike(compressor):
    kinds = ["noise", "ties", "heavy", "few", "equal", "noise"]
    assert_threads_agree(compressor, layout_of(40_000, 100, 70_001), kinds, (1, 3, 4))


@pytest.mark.parametrize(
    "compressor",
    [SparseGDCompressor(density=0.5), GradientDroppingCompressor(ratio=0.4)],
    ids=repr,
)
def test_threads_share_the_candidates_of_a_large_group(compressor):
    kinds = ["noise", "ties", "equal", "noise"]
    assert_threads_agree(compressor, layout_of(700_001, 5), kinds, (1, 2, 3, 4))


@pytest.mark.parametrize("compressor", ONE_EACH, ids=repr)
@pytest.mark.parametrize("what", ["payload", "index", "nan"])
def test_an_exchange_that_fails_commits_nothing(compressor, what):
    """The memory holds the gradient of the step that failed, and a later step sends it."""
    layout, fails = layout_of(600, 5000), []

    def tamper(rank, request):
        if rank == 1 and fails and isinstance(request, (Allgather, Broadcast)):
            damaged = request.tensor.clone()
            damaged[HEADER_BYTES - 4 if what == "payload" else HEADER_BYTES + 4] += 1
            return request._replace(tensor=damaged)
        return request

    ends = []
    for ops in (TorchOps(), reference_ops()):
        world = World(compressor, ops, layout, 2, tamper=tamper)
        generator = torch.Generator().manual_seed(1)
        steps = [gradients(generator, layout, world, "noise", 1.0) for _ in range(4)]
        world.step(steps[0])
        if what == "nan":
            steps[1][0][5] = float("nan")
        before = [x.clone() for x in world.states[0].memory]
        fails[:] = [True] * (what != "nan")
        with pytest.raises((PayloadError, NonFiniteGradientError)):
            world.step(steps[1])
        fails.clear()
        if what == "nan":
            assert all(map(torch.equal, before, world.states[0].memory))
        totals = [world.step(g) for g in steps[2:]]
        ends.append((world, totals))
    (fused, totals), (reference, others) = ends
    for ours, theirs in zip(totals, others):
        assert all(map(torch.equal, ours, theirs))
    assert_alike(fused, reference)


def no_index(random, layout, shape, kind):
    """Indices that nobody wrote, within the bucket unless they are of any bits; uint32."""
    if kind == "bits":
        return random.integers(0, 1 << 32, shape).astype("<u4")
    index = random.integers(0, layout.size, shape).astype("<u4")
    return np.sort(index, axis=-1) if kind == "ascending" else index


UNTRUSTED = given(
    sizes=st.sampled_from([(300, 200), (700,), (256, 1, 3000)]),
    ranks=st.integers(1, 3),
    count=st.integers(1, 3),
    kind=st.sampled_from(["bits", "mixed", "ascending"]),
    seed=st.integers(0, 2**32 - 1),
)


@UNTRUSTED
@settings(deadline=None, max_examples=120)
def test_no_index_is_trusted(sizes, ranks, count, kind, seed):
    """Bodies that nobody wrote: the sum of the plain ops if indices ascend, else an error."""
    compressor = SparseGDCompressor(density=0.1, index_coding="int32")
    random, layout = np.random.default_rng(seed), layout_of(*sizes)
    shape = ranks, compressor.capacity(layout)
    index, values = no_index(random, layout, shape, kind), random.standard_normal(shape)
    parts = values.astype("<f4").view("u1"), index.view("u1")
    bodies = torch.from_numpy(np.concatenate(parts, axis=1))
    weights, ascends = torch.full((ranks,), 0.5), bool((np.diff(index.astype("i8")) >= 0).all())

    def total(ops):
        scratch = torch.full((layout.size,), 7.0)
        return compressor.decode_sum(ops, layout, Payloads(None, bodies, weights), scratch)

    with threads(count):
        if ascends and index.max() < layout.size:
            assert torch.equal(total(TorchOps()), total(reference_ops()))
        else:
            with pytest.raises(PayloadError, match="does not ascend"):
                total(TorchOps())


@UNTRUSTED
@settings(deadline=None, max_examples=80)
def test_no_leader_is_trusted(sizes, ranks, count, kind, seed):
    """A choice that nobody has made stays within the bucket, or is an error; nothing is lost."""
    del ranks
    compressor, layout = ScaleComCompressor(density=0.1), layout_of(*sizes)
    random, ops = np.random.default_rng(seed), TorchOps()
    form, capacity = compressor.choice_form(ops, layout), compressor.topk.capacity(layout)
    body = torch.from_numpy(no_index(random, layout, capacity, kind).view("u1"))
    generator = torch.Generator().manual_seed(seed)
    r, g = torch.randn(2, layout.size, generator=generator)
    r[layout.sink] = g[layout.sink] = 0.0
    whole, fused = r + g, ops.topk_kernels
    with threads(count):
        try:
            total = fused.values(layout, form, body, r, g)
            mean, after, _ = fused.replace(layout, form, body, total, 1.0, r, g)
        except PayloadError:
            assert kind != "ascending"
            return
    assert torch.equal(mean + after, whole)


@dataclass(frozen=True)
class Halving(SparseGDCompressor):
    """A user's own: what is not sent fades."""

    def collect(self, ops, memory, gradient):
        return memory._replace(r=ops.accumulate(ops.scale(memory.r, 0.5), gradient))


def test_a_method_of_verbs_goes_on_as_it_is():
    class Late(DGCCompressor):
        def commit(self, ops, memory, index):
            return super().commit(ops, memory, index)

    class Mixed(Halving, SparseGDCompressor):
        """Neither is a rule inherited past another `collect`."""

    assert DGCCompressor(momentum=0.9).rule is not None
    assert Halving().rule is Late().rule is Mixed().rule is None
    layout = layout_of(700, 5000)
    worlds = [World(Halving(density=0.05), o, layout, 2) for o in (TorchOps(), reference_ops())]
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        flats = gradients(generator, layout, worlds[0], "noise", 1.0)
        ours, theirs = (world.step(flats) for world in worlds)
        assert all(map(torch.equal, ours, theirs))
        assert_alike(*worlds)


@pytest.mark.parametrize("compressor", ONE_EACH[:5], ids=repr)
def test_bodies_of_another_size_are_an_error(compressor):
    """C would read beyond their end."""
    layout, ops = layout_of(700, 5000), TorchOps()
    size = 8 * compressor.capacity(layout)
    weights, out = torch.full((2,), 0.5), torch.zeros(layout.size)
    with pytest.raises(PayloadError, match=f"where {size} are due"):
        bodies = torch.zeros(2, size - 4, dtype=torch.uint8)
        compressor.decode_sum(ops, layout, Payloads(None, bodies, weights), out)
