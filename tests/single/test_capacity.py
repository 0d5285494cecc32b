"""Capacities: up at once, down after patience, and equal on all ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import HybridCompressor, StromCompressor, VarianceCompressor
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.capacity import PATIENCE, POLICIES, CapacitySchedule
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World


def walk(schedule, needs, start=None):
    ops = TorchOps()
    state = schedule.init(ops, start)
    levels = []
    for need in needs:
        state = state._replace(needed=torch.tensor(need))
        level, state = schedule.next_level(ops, state)
        levels.append(level)
    return levels


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=80),
    st.integers(17, 4000),
    st.sampled_from(list(POLICIES.values())),
)
@settings(deadline=None)
def test_there_is_always_room_for_what_was_needed(needs, top, policy):
    schedule = CapacitySchedule.up_to(top, policy=policy)
    for need, level in zip(needs, walk(schedule, needs)):
        assert level.dense or level.capacity >= policy.room_for(need)
        assert level.dense == (level.index == schedule.top)


def test_it_leaves_a_level_slowly():
    schedule = CapacitySchedule.up_to(10_000)
    levels = walk(schedule, [5000] + [100] * (PATIENCE + 1))
    assert len({r.index for r in levels[:PATIENCE]}) == 1
    assert levels[-1].capacity >= 100 and levels[-1].capacity < 200


@given(st.integers(0, 20), st.integers(0, 5000))
def test_a_level_to_start_on_is_that_of_one_step(start, need):
    schedule = CapacitySchedule.up_to(10_000)
    first, second = walk(schedule, [0, need], start)
    assert first.index == start
    assert second.capacity >= need
    assert second.index == 0 or schedule.capacities[second.index - 1] < need


@given(st.lists(st.integers(16, 9000), min_size=2, max_size=40))
@settings(deadline=None)
def test_three_quarters_of_the_latest_need_and_little_more(needs):
    """Once two steps have gone by, which begin at the middle level."""
    schedule = CapacitySchedule.up_to(10_000, policy=POLICIES["latest"])
    levels = walk(schedule, [0, 0, *needs])
    assert levels[0].capacity > 100
    for need, level in zip(needs, levels[2:]):
        assert max(3 / 4 * need, 16) <= level.capacity <= max(13 / 16 * need + 1, 16)


@pytest.mark.parametrize(
    "make",
    [
        lambda policy: VarianceCompressor(alpha=8.0, moments="step", capacity=policy),
        lambda policy: HybridCompressor(tau=1.5, moments="step", capacity=policy),
        lambda policy: StromCompressor(tau=2.0, capacity=policy),
    ],
    ids=["Variance", "Hybrid", "Strom"],
)
def test_fewer_bytes_for_as_many_elements(make):
    """A burst every tenth step: with "latest" its size lasts for one step."""
    sent, payloads = {}, {}
    for policy in POLICIES:
        world, random = small_world(make(policy)), np.random.default_rng(1)
        payloads[policy] = []
        for step in range(40):
            scale = 1.0 if step % 10 else 3.0
            gradients = [random.normal(0, 0.2 * scale, 20_000) for _ in range(2)]
            world.step([world.flat([torch.tensor(g, dtype=torch.float32)]) for g in gradients])
            payloads[policy].append(world.traffic[0][0].tensor.nbytes)
        sent[policy] = int(world.states[0].sent.sum())
    assert sum(payloads["latest"][10:]) < 0.6 * sum(payloads["largest"][10:])
    assert abs(sent["latest"] / sent["largest"] - 1) < 0.05
    assert len(set(payloads["largest"][20:])) <= 2


def small_world(compressor):
    layout = Layout(("only",), ((20_000,),), block=compressor.block)
    return World(compressor, TorchOps(), layout, 2)


def test_it_is_refused_by_name():
    with pytest.raises(ValueError, match=r"capacity.*'largest', 'latest'"):
        StromCompressor(capacity="exact")


def test_it_goes_down_to_what_was_needed_meanwhile():
    schedule = CapacitySchedule.up_to(10_000)
    needs = [5000] + [100] * (PATIENCE // 2) + [900] + [100] * (PATIENCE // 2)
    assert walk(schedule, needs)[-1].capacity >= 900


def test_noise_does_not_change_the_size_each_step():
    schedule = CapacitySchedule.up_to(10_000)
    needs = [1000 + 37 * (i * i % 11) for i in range(200)]
    indices = [r.index for r in walk(schedule, needs)][PATIENCE:]
    assert sum(a != b for a, b in zip(indices, indices[1:])) <= 2


def test_a_tiny_bucket_has_only_the_dense_level():
    assert CapacitySchedule.up_to(5).capacities == ()
    (level,) = walk(CapacitySchedule.up_to(5), [3])
    assert level.dense
