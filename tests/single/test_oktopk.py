"""Ok-Topk: owners of regions, what is left out, bytes by number of ranks, balance."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import NonFiniteGradientError, OkTopKCompressor, SparseGDCompressor
from hvd_gradcomp.codecs.owners import KNOTS, cuts_of
from hvd_gradcomp.codecs.values import VALUES
from hvd_gradcomp.core.collectives import Allreduce, Alltoall
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.oracles import today

SEEDS = st.integers(0, 2**32 - 1)
LAYERS = st.lists(st.integers(1, 400), min_size=1, max_size=3)


def layout_of(sizes: list[int]) -> Layout:
    return Layout(tuple(map(str, range(len(sizes)))), tuple((n,) for n in sizes))


def gradients(world: World, random: np.random.Generator) -> list[torch.Tensor]:
    """Draw one gradient for each rank; layers differ in their scales."""
    layers = enumerate(world.layout.sizes)
    scales = [(layer + 1) * np.ones(size) for layer, size in layers]
    return [
        world.flat([torch.from_numpy(random.standard_normal(len(s)) * s).float() for s in scales])
        for _ in range(world.size)
    ]


def bytes_of(world: World) -> int:
    """Bytes that the last step brings each rank, and as many that it sends, by rings."""
    moved = 0
    for request, *_ in world.traffic:
        assert not isinstance(request, Allreduce)
        part = request.tensor[0] if isinstance(request, Alltoall) else request.tensor
        moved += (world.size - 1) * part.numel()
    return moved


@given(
    seed=SEEDS,
    ranks=st.integers(1, 9),
    sizes=LAYERS,
    density=st.sampled_from([0.001, 0.02, 0.3, 1.0]),
    slack=st.sampled_from([1.0, 1.25, 3]),
)
@settings(max_examples=60)
def test_owners_do_as_in_the_paper(seed, ranks, sizes, density, slack):
    """Results, residuals and regions, to the bit."""
    compressor = OkTopKCompressor(density, exchange="two_shot", slack=slack)
    layout, random = layout_of(sizes), np.random.default_rng(seed)
    world = World(compressor, TorchOps(), layout, ranks)
    k = min(sum(sizes), max(1, int(sum(sizes) * density + 0.5)))
    expected = today.OkTopK(layout.size, layout.sink, ranks, k, slack, KNOTS)
    for _ in range(4):
        drawn = gradients(world, random)
        results = world.step(drawn)
        assert np.array_equal(results[0].numpy(), expected.step([g.numpy() for g in drawn]))
        for state, residual in zip(world.states, expected.residual):
            assert np.array_equal(state.r.numpy(), residual)
            assert state.knots.tolist() == expected.knots


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("exchange", ["two_shot", "allgather", "auto"])
@given(seed=SEEDS, ranks=st.integers(1, 8), sizes=LAYERS)
@settings(max_examples=8)
def test_nothing_is_lost(values, exchange, seed, ranks, sizes):
    """Summed over ranks, `kept + sent = before + gradient`, and all ranks receive the same."""
    compressor = OkTopKCompressor(0.05, values, exchange)
    world = World(compressor, TorchOps(), layout_of(sizes), ranks)
    random = np.random.default_rng(seed)
    for _ in range(4):
        before = sum(state.r.double() for state in world.states)
        drawn = gradients(world, random)
        accumulated = before + sum(g.double() for g in drawn)
        results = world.step(drawn)
        assert all(torch.equal(result, results[0]) for result in results)
        kept = sum(state.r.double() for state in world.states)
        torch.testing.assert_close(
            kept + ranks * results[0].double(), accumulated, rtol=0, atol=2e-5
        )
        first = world.states[0].knots
        assert all(torch.equal(state.knots, first) for state in world.states)
        assert first[0] == 0 and first[-1] == world.layout.sink and (first.diff() >= 0).all()


@pytest.mark.parametrize("values", ["float32", "int8"])
def test_under_6k_elements_whatever_the_number_of_ranks(values):
    """The paper's bound, in words of 4 bytes; an allgather brings k elements of each rank."""
    layout, random = layout_of([150_000, 50_000]), np.random.default_rng(1)
    k, moved = 2000, {}
    for ranks in (2, 3, 4, 8, 16, 32, 64):
        compressor = OkTopKCompressor(0.01, values, exchange="two_shot")
        assert compressor.count(layout) == k
        world = World(compressor, TorchOps(), layout, ranks)
        drawn = gradients(world, random)
        for _ in range(2):
            world.step(drawn)
            moved[ranks] = bytes_of(world)
            assert moved[ranks] < 6 * k * 4
            assert moved[ranks] == 2 * (ranks - 1) * compressor.shard_bytes(layout, ranks)
    gathered = 63 * SparseGDCompressor(density=0.01, values=values).payload_bytes(layout)
    assert moved[64] < gathered / 9


def test_sizes_are_those_of_the_formula():
    """Those of docs/payloads.md; and the paper's bound, where k is above 25 times the ranks."""
    for size in (10, 5000, 30_000, 1_000_000, 50_000_000):
        for density in (0.001, 0.01, 0.1):
            compressor, layout = OkTopKCompressor(density), layout_of([size])
            k, n = compressor.count(layout), layout.size - 1
            for ranks in (1, 2, 3, 8, 64, 1000):
                m = min(k, math.ceil(1.25 * k / ranks))
                low = int(math.log2(n / m))
                bits = 4 * low * math.ceil(m / 32) + 4 * math.ceil((m + n // 2**low) / 32)
                assert compressor.shard_bytes(layout, ranks) == 36 + 4 * m + bits
                if k > 25 * ranks:
                    assert 2 * (ranks - 1) * compressor.shard_bytes(layout, ranks) < 6 * k * 4


@pytest.mark.parametrize(
    ("exchange", "ways"),
    [
        ("auto", {1: "allgather", 2: "allgather", 3: "two_shot", 64: "two_shot"}),
        ("allgather", {1: "allgather", 3: "allgather", 100: "allgather", 200: "dense"}),
        ("two_shot", {1: "two_shot", 2: "two_shot", 64: "two_shot"}),
    ],
)
def test_fewest_bytes_decide_by_themselves(exchange, ways):
    compressor, layout = OkTopKCompressor(exchange=exchange), layout_of([200_000])
    assert {ranks: compressor.exchange_of(layout, ranks).kind for ranks in ways} == ways


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_coarser_code_never_sends_more(ranks):
    """On layers of a GPT; messages of int4 were of twice the bytes on 8 ranks, of 8 times on 64."""
    d = 64
    block = [d, d, 3 * d * d, 3 * d, d * d, d, d, d, 4 * d * d, 4 * d, 4 * d * d, d]
    layout, before = layout_of([100 * d, 96 * d, *(2 * block), d, d]), math.inf
    for values in VALUES:
        exchange = OkTopKCompressor(values=values).exchange_of(layout, ranks)
        assert exchange.received(ranks) <= before
        before = exchange.received(ranks)
    assert OkTopKCompressor(values="int4").message(layout, 5).coding is VALUES["bfloat16"]
    assert OkTopKCompressor(values="int4").message(layout, 5000).coding is VALUES["int4"]
    if ranks < 64:
        world = World(OkTopKCompressor(values="int4"), TorchOps(), layout, ranks)
        results = world.step(gradients(world, np.random.default_rng(4)))
        assert all(torch.equal(result, results[0]) for result in results)
        kind = world.compressor.exchange_of(layout, ranks).kind
        assert bytes_of(world) == world.compressor.exchange_of(layout, ranks).received(ranks), kind


def test_messages_are_planned_once():
    """Also for an equal layout and compressor: tables are looked up by the groups of a message."""
    for values in VALUES:
        first, again = (
            OkTopKCompressor(values=values).message(layout_of([70_000, 300, 1]), 100)
            for _ in range(2)
        )
        assert first is again


@pytest.mark.parametrize("exchange", ["auto", "allgather"])
def test_small_buckets_are_sent_as_they_are(exchange):
    layout, random = layout_of([10]), np.random.default_rng(2)
    world = World(OkTopKCompressor(exchange=exchange), TorchOps(), layout, 4, average=False)
    drawn = gradients(world, random)
    total = world.step(drawn)[0]
    assert isinstance(world.traffic[0][0], Allreduce) and len(world.traffic) == 1
    assert torch.equal(total, drawn[0] + drawn[1] + drawn[2] + drawn[3])
    assert not any(state.r.any() for state in world.states)
    assert world.compressor.report(layout, world.states[0], 1).sent == [10]


def test_regions_follow_the_elements():
    """A small layer has nearly all large elements: soon as many lie in each region, and fit."""
    layout, random, ranks = layout_of([500, 20_000, 4000]), np.random.default_rng(3), 4
    compressor = OkTopKCompressor(0.02, exchange="two_shot")
    world = World(compressor, TorchOps(), layout, ranks)
    oracle = today.OkTopK(layout.size, layout.sink, ranks, compressor.count(layout), 1.25, KNOTS)
    left = []
    for _ in range(12):
        drawn = [
            world.flat([torch.from_numpy(random.standard_normal(n) * s).float() for n, s in layers])
            for layers in [list(zip(layout.sizes, (30, 1, 3)))] * ranks
        ]
        world.step(drawn)
        before = oracle.left
        oracle.step([g.numpy() for g in drawn])
        left.append((oracle.left - before) / (ranks * compressor.count(layout)))
    assert left[0] > 0.5 and max(left[-4:]) < 0.15, left
    cuts = cuts_of(world.ops, world.states[0].knots, ranks).tolist()
    assert cuts == oracle.cuts() and cuts[1] < 500


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_gradient_of_zeros_changes_nothing(ranks):
    world = World(OkTopKCompressor(exchange="two_shot"), TorchOps(), layout_of([300]), ranks)
    before = [[x.clone() for _, x in leaves(state)] for state in world.states]
    for _ in range(2):
        results = world.step([world.flat([torch.zeros(300)]) for _ in range(ranks)])
        assert not any(result.any() for result in results)
    for state, fields in zip(world.states, before):
        same = [torch.equal(x, y) for (name, x), y in zip(leaves(state), fields) if name != "hint"]
        assert all(same)


@pytest.mark.parametrize("ranks", [3, 8])
def test_more_ranks_than_elements(ranks):
    """Elements that all choose find their way, one a step and owner."""
    world = World(OkTopKCompressor(exchange="two_shot"), TorchOps(), layout_of([2, 1]), ranks)
    first = [world.flat([torch.tensor([1.0, 2.0]), torch.tensor([3.0])]) for _ in range(ranks)]
    total = world.step(first)[0]
    for _ in range(2):
        total = total + world.step([torch.zeros_like(first[0]) for _ in range(ranks)])[0]
    torch.testing.assert_close(total, first[0])
    assert not any(state.r.any() for state in world.states)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("exchange", ["two_shot", "allgather"])
def test_all_ranks_refuse_what_is_not_finite_and_keep_their_states(bad, exchange):
    world = World(OkTopKCompressor(0.05, exchange=exchange), TorchOps(), layout_of([300]), 3)
    random = np.random.default_rng(4)
    world.step(gradients(world, random))
    before = [[x.clone() for _, x in leaves(state)] for state in world.states]
    drawn = gradients(world, random)
    drawn[1][7] = bad
    with pytest.raises(NonFiniteGradientError):
        world.step(drawn)
    assert all(isinstance(error, NonFiniteGradientError) for error in world.failures)
    for state, fields in zip(world.states, before):
        assert all(torch.equal(x, y) for (_, x), y in zip(leaves(state), fields))


@pytest.mark.parametrize(
    "wrong", [{"density": 0}, {"slack": 0.5}, {"values": "int3"}, {"exchange": "owners"}]
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=f"OkTopKCompressor: {next(iter(wrong))} must be"):
        OkTopKCompressor(**wrong)
