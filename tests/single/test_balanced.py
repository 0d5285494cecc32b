"""Balanced exchange: what sparse methods send goes by owners, and nothing of it is lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import (
    ChunkedTopKCompressor,
    DGCCompressor,
    EGCCompressor,
    GradientDroppingCompressor,
    HybridCompressor,
    NonFiniteGradientError,
    QSGDCompressor,
    SparseGDCompressor,
    StromCompressor,
    VarianceCompressor,
    after,
    balanced,
    partition,
    robust,
)
from hvd_gradcomp.checkpoint.reducer_state import Origin, restore
from hvd_gradcomp.codecs.owners import KNOTS
from hvd_gradcomp.core.collectives import Allreduce, Alltoall
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor, leaves
from hvd_gradcomp.method.handover import correction_of, residual_of, takes_momentum
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning.assignment import assign
from hvd_gradcomp.testing import World
from tests.oracles import today

SEEDS = st.integers(0, 2**32 - 1)
LAYERS = st.lists(st.integers(1, 400), min_size=1, max_size=3)
SPARSE = [
    StromCompressor(tau=0.7),
    StromCompressor(tau=2.0, capacity="latest", index_coding="elias_fano"),
    VarianceCompressor(alpha=2.0, feedback_rounding=True),
    HybridCompressor(tau=0.5, alpha=1.0),
    SparseGDCompressor(density=0.1, values="int8"),
    GradientDroppingCompressor(ratio=0.9),
    EGCCompressor(K=20, momentum=0.0, entropy_interval=3),
]


def layout_of(sizes: list[int]) -> Layout:
    return Layout(tuple(map(str, range(len(sizes)))), tuple((n,) for n in sizes))


def world_of(compressor: Compressor, sizes: list[int], ranks: int) -> World:
    return World(compressor, TorchOps(), layout_of(sizes), ranks)


def gradients(world: World, random: np.random.Generator) -> list[torch.Tensor]:
    """Draw one gradient for each rank."""
    sizes = world.layout.sizes
    return [
        world.flat([torch.from_numpy(random.standard_normal(n)).float() for n in sizes])
        for _ in range(world.size)
    ]


def bytes_of(world: World) -> int:
    """Return the bytes that the last step brought each rank, by rings."""
    moved = 0
    for request, *_ in world.traffic:
        others = world.size - 1
        if isinstance(request, Allreduce):
            moved += 2 * others * 4 * request.tensor.numel() // world.size
        elif isinstance(request, Alltoall):
            moved += others * request.tensor[0].numel()
        else:
            moved += others * request.tensor.numel()
    return moved


@pytest.mark.parametrize("values", ["float32", "bfloat16"])
@pytest.mark.parametrize("inner", SPARSE, ids=str)
@given(seed=SEEDS, ranks=st.integers(1, 8), sizes=LAYERS, slack=st.sampled_from([1.0, 1.25, 3]))
@settings(max_examples=5)
def test_nothing_is_lost(inner, values, seed, ranks, sizes, slack):
    """Summed over ranks, what is kept and what was sent are all gradients; ranks stay equal."""
    world = world_of(balanced(inner, "two_shot", values, slack), sizes, ranks)
    random, given_in, out = np.random.default_rng(seed), 0, 0
    for _ in range(6):
        drawn = gradients(world, random)
        given_in = given_in + sum(g.double() for g in drawn)
        results = world.step(drawn)
        assert all(torch.equal(result, results[0]) for result in results)
        out = out + ranks * results[0].double()
        kept = sum(residual_of(world.compressor, state).double() for state in world.states)
        torch.testing.assert_close(kept + out, given_in, rtol=0, atol=5e-5)
        first = dict(leaves(world.states[0]))
        for state in world.states[1:]:
            for path, x in leaves(state):
                if path == "knots" or path.startswith("capacity."):
                    assert torch.equal(torch.as_tensor(x), torch.as_tensor(first[path]))


@given(seed=SEEDS, ranks=st.integers(1, 9), sizes=LAYERS, slack=st.sampled_from([1.0, 1.25, 3]))
@settings(max_examples=25)
def test_owners_do_as_in_the_paper(seed, ranks, sizes, slack):
    """Results, residuals and regions, to the bit, with as many elements as the level has."""
    inner = SparseGDCompressor(density=0.2)
    world = world_of(balanced(inner, "two_shot", slack=slack), sizes, ranks)
    alone = [world_of(inner, sizes, 1) for _ in range(ranks)]
    random, layout = np.random.default_rng(seed), world.layout
    expected = today.OkTopK(layout.size, layout.sink, ranks, 1, slack, KNOTS)
    capacities = world.compressor.schedule(layout, ranks).capacities
    for _ in range(5):
        drawn = gradients(world, random)
        sent = [one.step([g.clone()])[0].numpy() for one, g in zip(alone, drawn)]
        results = world.step(drawn)
        level = int(world.states[0].capacity.level)
        if level == len(capacities):  # a sum of all moves fewer bytes
            whole = expected.residual + np.array(sent)
            total = sum(torch.from_numpy(x) for x in whole) / ranks
            torch.testing.assert_close(results[0], total)
            expected.residual[:] = 0
            expected.steps += 1
        else:
            expected.k = capacities[level]
            expected.capacity = world.compressor.slots(expected.k, ranks)
            assert np.array_equal(results[0].numpy(), expected.step(sent))
        for state, residual in zip(world.states, expected.residual):
            assert np.array_equal(state.r.numpy(), residual)
            assert state.knots.tolist() == expected.knots


@pytest.mark.parametrize("inner", [StromCompressor(tau=0.5), VarianceCompressor(alpha=1.0)])
def test_the_same_as_by_allgather_where_all_fits(inner):
    """All ranks send the same 40 elements, which lie as densely everywhere."""
    sizes, ranks = [4000, 6000], 4
    worlds = [world_of(one, sizes, ranks) for one in (inner, balanced(inner, slack=4.0))]
    random = np.random.default_rng(1)
    for _ in range(6):
        drawn = []
        for _ in range(ranks):
            parts = [torch.zeros(n) for n in sizes]
            for part in parts:
                places = torch.arange(0, len(part), 250)
                part[places] = torch.from_numpy(random.uniform(1, 2, len(places))).float()
            drawn.append(worlds[0].flat(parts))
        plain, owned = (world.step([g.clone() for g in drawn])[0] for world in worlds)
        assert torch.equal(plain, owned)
    assert plain.any() and not any(state.r.any() for state in worlds[1].states)


@pytest.mark.parametrize("values", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "inner",
    [StromCompressor(tau=2.576), SparseGDCompressor(density=0.01), DGCCompressor(density=0.01)],
    ids=lambda one: type(one).__name__,
)
def test_fewer_bytes_than_by_allgather_from_8_ranks_on(inner, values):
    """About one element in 100 is sent; the bytes hardly grow with the ranks, and are the law's."""
    sizes, moved = [150_000, 50_000], {}
    inner = inner.corrected(0.9, False)
    for ranks in (8, 16, 32):
        random = np.random.default_rng(ranks)
        plain = world_of(inner, sizes, ranks)
        owned = world_of(balanced(inner, values=values), sizes, ranks)
        for _ in range(3):
            drawn = gradients(plain, random)
            plain.step([g.clone() for g in drawn])
            owned.step(drawn)
        level = owned.states[0].capacity.level
        schedule = owned.compressor.schedule(owned.layout, ranks)
        moved[ranks] = bytes_of(owned)
        count = schedule.capacities[int(level)]
        exchange = owned.compressor.two_shot(owned.layout, count, ranks)
        assert moved[ranks] == exchange.received(ranks)
        assert moved[ranks] < bytes_of(plain)
    assert moved[32] < 1.5 * moved[8] and moved[32] < bytes_of(plain) / 2


def test_few_ranks_are_left_to_the_allgather():
    layers = [("a", (500, 20), "float32"), ("b", (30,), "float32")]
    for inner in (StromCompressor(), SparseGDCompressor(), VarianceCompressor()):
        one = balanced(inner)
        ways = {ranks: one.of_layers(layers, ranks)[0] for ranks in (1, 2, 3, 64, 1000)}
        assert ways[1] == ways[2] == inner
        assert ways[64] == ways[1000] == one
        always = replace(one, exchange="two_shot")
        assert always.of_layers(layers, 2) == [always, always]
    assert assign(balanced(StromCompressor()), layers, 64)[0] == balanced(StromCompressor())


def test_where_all_is_sent_a_sum_moves_fewer_bytes():
    world = world_of(balanced(StromCompressor(tau=0.01)), [3000], 4)
    random = np.random.default_rng(2)
    for _ in range(4):
        world.step(gradients(world, random))
    assert isinstance(world.traffic[-1][0], Allreduce)
    assert not any(state.r.any() for state in world.states)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("tau", [0.5, 0.001])
def test_a_failed_exchange_keeps_what_the_method_has_sent(bad, tau):
    """On the rank whose gradient is not finite nothing changes; on the others nothing is lost."""
    world = world_of(balanced(StromCompressor(tau=tau)), [300, 50], 3)
    random = np.random.default_rng(4)
    for _ in range(3):
        world.step(gradients(world, random))
    before = [residual_of(world.compressor, state).clone() for state in world.states]
    drawn = gradients(world, random)
    pending = [kept + g for kept, g in zip(before, drawn)]
    pending[1] = before[1]
    drawn[1][7] = bad
    with pytest.raises(NonFiniteGradientError):
        world.step(drawn)
    assert all(isinstance(error, NonFiniteGradientError) for error in world.failures)
    for state, expected in zip(world.states, pending):
        torch.testing.assert_close(residual_of(world.compressor, state), expected)


def test_a_consolidated_state_is_shared_by_other_ranks():
    """Residuals are shared out; what steers a rank's own work restarts."""
    compressor = balanced(StromCompressor(tau=1.0), "two_shot")
    world, random = world_of(compressor, [300], 3), np.random.default_rng(5)
    for _ in range(4):
        world.step(gradients(world, random))
    saved = dict(leaves(world.states[0]))
    for path in saved:
        parts = [dict(leaves(state))[path] for state in world.states]
        if path in ("r", "inner.memory.r", "inner.sent", "sent"):
            saved[path] = torch.stack(parts).sum(0)
    fresh = world_of(compressor, [300], 2)
    start = {path: x for path, x in leaves(fresh.states[0]) if path in compressor.reset_on_merge}
    assert {"hint", "inner.capacity.level", "inner.capacity.needed"} <= set(start)
    origin = Origin(4, "consolidated", 0, 3)
    for rank in range(2):
        fresh.states[rank] = restore(
            compressor, fresh.ops, fresh.states[rank], saved, start, origin, rank, 2
        )
    kept = sum(residual_of(compressor, state) for state in fresh.states)
    torch.testing.assert_close(kept, sum(residual_of(compressor, state) for state in world.states))
    fresh.step(gradients(fresh, random))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: balanced(QSGDCompressor()), "gathers a few elements"),
        (lambda: balanced(ChunkedTopKCompressor()), "exchange='auto' themselves"),
        (lambda: balanced(None), "gathers a few elements"),
        (lambda: balanced(after(3, None, StromCompressor())), "gathers a few elements"),
        (lambda: balanced(robust(None)), "gathers a few elements"),
        (lambda: balanced(balanced(StromCompressor())), "gathers a few elements"),
        (lambda: balanced(StromCompressor(), "ring"), "exchange"),
        (lambda: balanced(StromCompressor(), values="int8"), "values"),
        (lambda: balanced(StromCompressor(), slack=0.5), "slack"),
    ],
)
def test_what_does_not_fit_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_a_partition_is_refused():
    with pytest.raises(TypeError, match="balanced needs a compressor"):
        balanced(partition([("*", StromCompressor())]))
    with pytest.raises(TypeError, match="balanced needs a compressor"):
        balanced("strom")


def test_phases_and_momentum():
    """A phase may be balanced; momentum that the method corrects is taken over from SGD."""
    one = balanced(DGCCompressor(density=0.1), "two_shot")
    assert takes_momentum(one) and correction_of(one.corrected(0.9, False)) == (0.9, False)
    world = world_of(after(2, None, balanced(StromCompressor(tau=1.0))), [300], 5)
    random, given_in, out = np.random.default_rng(6), 0, 0
    for _ in range(5):
        drawn = gradients(world, random)
        given_in, out = given_in + sum(drawn), out + 5 * world.step(drawn)[0]
    reports = [world.compressor.report(world.layout, state, 5) for state in world.states]
    kept = sum(report.residual for report in reports)
    torch.testing.assert_close(kept + out, given_in, rtol=0, atol=1e-4)
