"""The top-k family: exactly the k largest, nothing lost, bytes by the formula, fair when cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import (
    DGCCompressor,
    EGCCompressor,
    GradientDroppingCompressor,
    ScaleComCompressor,
    SparseGDCompressor,
)
from hvd_gradcomp.algorithms.sparse.egc import entropy_of_layers
from hvd_gradcomp.codecs.indices import CODINGS, Words
from hvd_gradcomp.codecs.sparse import Payloads
from hvd_gradcomp.codecs.topk import count_of
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.wire import pack_body
from hvd_gradcomp.ops.kernel_params import CapacityLevel
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.kernels import reference_ops
from tests.methods import LARGEST, decode_step

FAST = settings(max_examples=25, deadline=None)


def inputs(kind: str, n: int, random: np.random.Generator) -> np.ndarray:
    if kind == "heavy":
        x = random.standard_cauchy(n)
    elif kind == "constant":
        x = np.full(n, -0.25)
    elif kind == "sparse":
        x = np.where(random.random(n) < 0.004, random.standard_normal(n), 0.0)
    elif kind == "clustered":
        x = np.zeros(n)
        x[n // 3 : n // 3 + max(1, n // 50)] = random.standard_normal(max(1, n // 50))
    elif kind == "zero":
        x = np.zeros(n)
    else:
        x = random.standard_normal(n)
    return x.astype(np.float32)


def chosen(r: np.ndarray, k: int, step: int) -> np.ndarray:
    """Where the k largest |r| are: the definition, by sorting all."""
    n = len(r)
    turn = (np.arange(n) - step * k % n) % n
    order = np.lexsort((turn, -np.abs(r)))[:k]
    return np.sort(order[r[order] != 0])


def sent_by(world: World, rank: int) -> torch.Tensor:
    compressor, ops, layout = world.compressor, world.ops, world.layout
    buffer = world.traffic[0][rank].tensor
    if len(world.traffic) > 1:  # it was summed
        pieces = world.traffic[1][rank].tensor.split(list(layout.sizes))
        return world.flat([piece.view(s) for piece, s in zip(pieces, layout.shapes)])
    body, weight, out = buffer[None, 32:], torch.ones(1), torch.empty(layout.size)
    return decode_step(compressor, ops, layout, Payloads(level_of(world), body, weight), out)


def level_of(world: World) -> CapacityLevel:
    """That of the last step, which was gathered."""
    capacities = world.compressor.capacities(world.layout)
    number = min(int(world.states[0].capacity.level), len(capacities) - 1)
    return CapacityLevel(number, capacities[number], False)


KINDS = ("heavy", "normal", "constant", "sparse", "clustered", "zero")


@pytest.mark.parametrize("static", [False, True], ids=["indexed", "masked"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(5,), (300, 7, 70_000), (20_000, 1, 9_000)], ids=str)
def test_sends_exactly_the_largest(kind, sizes, static):
    density = 0.003
    compressor = SparseGDCompressor(density=density)
    layout = Layout(tuple(map(str, range(len(sizes)))), tuple((n,) for n in sizes))
    world = World(compressor, TorchOps(static=static), layout, 1)
    random = np.random.default_rng(len(kind))
    r = [np.zeros(n, np.float32) for n in sizes]
    for step in range(6):
        scale = np.float32(10.0 ** random.uniform(-2, 2))  # what the hint does not expect
        g = [inputs(kind, n, random) * scale for n in sizes]
        total = world.step([world.flat([torch.from_numpy(x) for x in g])])[0].numpy()
        for layer, start in enumerate(layout.offsets):
            r[layer] += g[layer]
            where = chosen(r[layer], count_of(sizes[layer], density), step)
            piece = total[start : start + sizes[layer]]
            np.testing.assert_array_equal(np.nonzero(piece)[0], where)
            np.testing.assert_array_equal(piece[where], r[layer][where])
            r[layer][where] = 0
            kept = world.states[0].memory.r[start : start + sizes[layer]].numpy()
            np.testing.assert_array_equal(kept, r[layer])


@pytest.mark.parametrize("static", [False, True], ids=["indexed", "masked"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_threshold_over_the_whole_model(kind, static):
    sizes, ratio = (300, 7, 30_000), 0.995
    compressor = GradientDroppingCompressor(ratio=ratio)
    layout = Layout(("a", "b", "c"), tuple((n,) for n in sizes))
    world = World(compressor, TorchOps(static=static), layout, 1)
    random = np.random.default_rng(3)
    r = np.zeros(sum(sizes), np.float32)
    k = count_of(len(r), 1 - ratio)
    for step in range(5):
        g = [inputs(kind, n, random) * np.float32(10.0**i) for i, n in enumerate(sizes)]
        total = world.step([world.flat([torch.from_numpy(x) for x in g])])[0].numpy()
        r += np.concatenate(g)
        where = chosen(r, k, step)
        flat = np.concatenate([total[o : o + n] for o, n in zip(layout.offsets, sizes)])
        np.testing.assert_array_equal(np.nonzero(flat)[0], where)
        r[where] = 0


@pytest.mark.parametrize(
    "compressor", [c for c in LARGEST if getattr(c, "clip_norm", None) is None], ids=repr
)
@given(
    shapes=st.lists(
        st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
    ),
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 5),
)
@FAST
def test_nothing_is_lost(compressor, shapes, seed, size):
    layout = Layout(tuple(map(str, range(len(shapes)))), tuple(shapes))
    world = World(compressor, TorchOps(), layout, size)
    random = np.random.default_rng(seed)
    before = [0 * s.memory.r for s in world.states]
    for _ in range(5):
        gradients = [
            world.flat(
                [
                    torch.from_numpy(np.round(random.standard_normal(s), 1).astype("f4"))
                    for s in shapes
                ]
            )
            for _ in range(size)
        ]
        velocities = [getattr(s.memory, "u", 0 * s.memory.r).clone() for s in world.states]
        totals = world.step(gradients)
        for rank, state in enumerate(world.states):
            sent = sent_by(world, rank)
            pending = before[rank] + arrived(compressor, gradients[rank], velocities[rank])
            untouched = sent == 0
            torch.testing.assert_close(
                state.memory.r[untouched], pending[untouched], rtol=1e-6, atol=1e-6
            )
            torch.testing.assert_close(sent[~untouched], pending[~untouched], rtol=1e-6, atol=1e-6)
            assert not state.memory.r[~untouched].any()
            before[rank] = state.memory.r.clone()
        assert all(torch.equal(total, totals[0]) for total in totals)


def arrived(compressor, gradient, velocity):
    """What a step adds to r."""
    momentum = getattr(compressor, "momentum", 0.0) or 0.0
    u = velocity * momentum + gradient
    return u * momentum + gradient if getattr(compressor, "nesterov", False) else u


@pytest.mark.parametrize("compressor", LARGEST, ids=repr)
def test_bytes_equal_the_formula(compressor):
    sizes = (3000, 40, 500)
    layout = Layout(("a", "b", "c"), tuple((n,) for n in sizes))
    k = sum(compressor.limits(layout))
    low = int(math.log2((layout.size - 1) / k))
    indices = {
        "elias_fano": 4 * low * -(-k // 32) + 4 * -(-(k + ((layout.size - 1) >> low)) // 32),
        "int32": 4 * k,
    }[compressor.index_coding]
    assert compressor.payload_bytes(layout) == 32 + 4 * k + indices
    world = World(compressor, TorchOps(), layout, 2)
    for _ in range(9):
        world.step([torch.randn(layout.size) for _ in range(2)])
        if world.steps > 6:  # after the warm-up, which sends more
            for request in world.traffic[0]:
                assert request.tensor.numel() == compressor.payload_bytes(layout, level_of(world))


def test_payloads_follow_the_entropy_from_the_second_step_on():
    layout = Layout(("low",), ((20_000,),))
    compressor = EGCCompressor(K=10, momentum=0.0)
    world = World(compressor, TorchOps(), layout, 2)
    gradient = torch.zeros(layout.size)
    gradient[:200] = 1.0  # one element in a hundred is in the upper bin: 0.08 bits
    sizes = []
    for _ in range(3):
        world.step([gradient.clone() for _ in range(2)])
        sizes.append(world.traffic[0][0].tensor.numel())
    assert sizes[0] == compressor.payload_bytes(layout)
    assert sizes[1] == sizes[2] < sizes[0] / 8


@pytest.mark.parametrize("static", [False, True], ids=["indexed", "masked"])
def test_equal_magnitudes_take_turns(static):
    layout = Layout(("a",), ((900,),))
    world = World(SparseGDCompressor(density=0.05), TorchOps(static=static), layout, 1)
    sent = torch.zeros(900)
    for _ in range(40):
        world.states = [world.compressor.init(world.ops, layout)]  # all equal, each time
        g = world.flat([torch.full((900,), 0.5)])
        sent += world.step([g])[0][:900] != 0
    assert sent.sum() == 40 * 45
    assert sent.max() - sent.min() <= 1


@pytest.mark.parametrize("static", [False, True], ids=["indexed", "masked"])
def test_a_layer_that_lacks_does_not_make_room_for_another(static):
    layout = Layout(("equal", "empty"), ((1000,), (1000,)))
    world = World(SparseGDCompressor(density=0.01), TorchOps(static=static), layout, 1)
    equal = torch.full((1000,), 0.1)
    equal[:12] = 2.0  # two more than there are to be sent
    few = torch.zeros(1000)
    few[:8] = 1.0  # two less
    for _ in range(3):
        world.step([world.flat([equal, few])])
        world.states = [
            world.states[0]._replace(memory=world.compressor.init_memory(world.ops, layout))
        ]
    assert world.states[0].sent.tolist() == [30, 24]


@given(
    size=st.integers(600, 100_000),
    share=st.floats(0.0005, 0.5),
    seed=st.integers(0, 2**32 - 1),
    coding=st.sampled_from(sorted(CODINGS)),
)
@FAST
def test_indices_come_back(size, share, seed, coding):
    ops, layout = TorchOps(), Layout(("a",), ((size,),))
    random = np.random.default_rng(seed)
    count = max(1, int(size * share))
    used = int(random.integers(0, count + 1))
    index = np.sort(random.choice(size, used, replace=False))
    index = torch.from_numpy(np.concatenate([index, np.full(count - used, layout.sink)]))
    code = CODINGS[coding]
    parts = code.parts(layout, count)
    payload = code.encode(ops, layout, index)
    assert {name: len(x) for name, x in payload.items()} == {n: p.count for n, p in parts.items()}
    assert torch.equal(code.decode(ops, layout, payload, count), index)
    words = Words(0, count, (count,), layout.sink)
    body = code.encode_body(ops, words, ops.to_bytes(index, "uint32"))
    assert torch.equal(body, pack_body(ops, parts, payload))
    back, ascends = code.decode_bodies(ops, words, body[None])
    assert torch.equal(ops.from_bytes(back[0], "uint32"), index)
    assert ascends is None or ascends.all()


@pytest.mark.parametrize("k", [1 << 10, 1 << 14, 1 << 17])
def test_bits_of_an_index_are_near_the_entropy_bound(k):
    n = 1 << 20
    bits, bound = CODINGS["elias_fano"].bits(n, k), math.log2(n / k) + 1.44
    assert bound < bits < bound + 0.6


def test_entropy_says_how_much_is_sent():
    compressor = EGCCompressor(K=10, bins=2, momentum=0.0, entropy_interval=1)
    layout = Layout(("even", "skewed", "constant"), ((1000,), (1000,), (1000,)))
    world = World(compressor, TorchOps(), layout, 1)
    even = torch.linspace(-1, 1, 1000)
    skewed = torch.cat([torch.full((990,), 0.1), torch.full((10,), 1.0)])
    world.step([world.flat([even, skewed, torch.full((1000,), 2.0)])])
    share = 0.01
    entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    assert world.states[0].sent.tolist() == [100, round(100 * entropy), 1]


@FAST
@given(
    st.lists(st.sampled_from([1, 2, 255, 256, 257, 511, 512, 700]), min_size=1, max_size=4),
    st.integers(2, 9),
    st.sampled_from([-3.0, 0.0, 3.0]),
    st.integers(0, 99),
)
def test_entropy_is_that_of_the_elements_without_padding(sizes, bins, shift, seed):
    layout = Layout(tuple(map(str, range(len(sizes)))), tuple((size,) for size in sizes))
    random, gradient, bits = np.random.default_rng(seed), torch.zeros(layout.size), []
    for offset, size in zip(layout.offsets, sizes):
        x = (random.standard_normal(size) + shift).astype(np.float32)
        gradient[offset : offset + size] = torch.from_numpy(x)
        width = (x.max() - x.min()) / np.float32(bins)
        edges = x.min() + width * np.arange(1, bins, dtype=np.float32)
        share = np.bincount((x[:, None] >= edges).sum(1)) / size
        bits.append(-sum(p * math.log2(p) for p in share if p))
    ops, plain = TorchOps(), TorchOps()
    plain.native = None
    entropy = entropy_of_layers(ops, layout, gradient, bins)
    assert entropy.tolist() == pytest.approx(bits, abs=1e-9)
    counts = ops.layer_histograms(layout, gradient, bins)
    assert torch.equal(counts, plain.layer_histograms(layout, gradient, bins))
    assert counts.sum(0).tolist() == sizes


def test_a_warm_up_sends_less_and_less():
    compressor = DGCCompressor(density=0.001, momentum=0.0, warmup_epochs=4, steps_per_epoch=2)
    assert [end for end, _ in compressor.phases] == [2, 4, 6, 8]
    layout = Layout(("a",), ((10_000,),))
    world = World(compressor, TorchOps(), layout, 1)
    sent = []
    for _ in range(10):
        world.step([torch.cat([torch.randn(10_000), torch.zeros(layout.size - 10_000)])])
        sent.append(int(world.states[0].sent))
    steps = np.diff([0, *sent]).tolist()
    assert steps == [2500, 2500, 625, 625, 156, 156, 40, 40, 10, 10]


def test_a_leader_chooses_for_all():
    layout = Layout(("a",), ((1000,),))
    world = World(ScaleComCompressor(density=0.01), TorchOps(), layout, 3)
    random = np.random.default_rng(2)
    r = np.zeros((3, 1000), np.float32)
    for step in range(9):
        g = random.standard_normal((3, 1000)).astype("f4")
        r += g
        where = chosen(r[step % 3], 10, step)
        total = world.step([world.flat([torch.from_numpy(x)]) for x in g])[0].numpy()[:1000]
        np.testing.assert_array_equal(np.nonzero(total)[0], where)
        np.testing.assert_allclose(total[where], r[:, where].mean(0), rtol=1e-5, atol=1e-6)
        r[:, where] = 0
        for rank in range(3):
            np.testing.assert_array_equal(world.states[rank].memory.r[:1000], r[rank])


@pytest.mark.parametrize("compressor", LARGEST, ids=repr)
@pytest.mark.parametrize("sizes", [(300, 0), (0, 300)])
@pytest.mark.parametrize("static", [False, True])
def test_an_empty_layer_sends_nothing_by_verbs_too(compressor, sizes, static):
    """Magnitudes are equal, so that a turn is taken."""
    ops = TorchOps("cpu", static=True) if static else reference_ops()
    layout = Layout(("a", "b"), tuple((n,) for n in sizes))
    world = World(compressor, ops, layout, 2)
    total = world.step([world.flat([torch.ones(n) for n in sizes])] * 2)[0]
    assert 0 < total.count_nonzero() < 300
