"""Capacities: up at once, down after patience, and equal on all ranks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp.core.capacity import PATIENCE, CapacitySchedule
from hvd_gradcomp.ops.torch import TorchOps


def walk(ladder, needs, start=None):
    ops = TorchOps()
    state = ladder.init(ops, start)
    rungs = []
    for need in needs:
        state = state._replace(needed=torch.tensor(need))
        rung, state = ladder.climb(ops, state)
        rungs.append(rung)
    return rungs


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=80), st.integers(17, 4000))
@settings(deadline=None)
def test_there_is_always_room_for_what_was_needed(needs, top):
    ladder = CapacitySchedule.up_to(top)
    for need, rung in zip(needs, walk(ladder, needs)):
        assert rung.dense or rung.capacity >= need
        assert rung.dense == (rung.index == ladder.top)


def test_it_leaves_a_rung_slowly():
    ladder = CapacitySchedule.up_to(10_000)
    rungs = walk(ladder, [5000] + [100] * (PATIENCE + 1))
    assert len({r.index for r in rungs[:PATIENCE]}) == 1
    assert rungs[-1].capacity >= 100 and rungs[-1].capacity < 200


@given(st.integers(0, 20), st.integers(0, 5000))
def test_a_rung_to_start_on_is_that_of_one_step(start, need):
    ladder = CapacitySchedule.up_to(10_000)
    first, second = walk(ladder, [0, need], start)
    assert first.index == start
    assert second.capacity >= need
    assert second.index == 0 or ladder.capacities[second.index - 1] < need


def test_it_goes_down_to_what_was_needed_meanwhile():
    ladder = CapacitySchedule.up_to(10_000)
    needs = [5000] + [100] * (PATIENCE // 2) + [900] + [100] * (PATIENCE // 2)
    assert walk(ladder, needs)[-1].capacity >= 900


def test_noise_does_not_change_the_size_each_step():
    ladder = CapacitySchedule.up_to(10_000)
    needs = [1000 + 37 * (i * i % 11) for i in range(200)]
    indices = [r.index for r in walk(ladder, needs)][PATIENCE:]
    assert sum(a != b for a, b in zip(indices, indices[1:])) <= 2


def test_a_tiny_bucket_has_only_the_dense_rung():
    assert CapacitySchedule.up_to(5).capacities == ()
    (rung,) = walk(CapacitySchedule.up_to(5), [3])
    assert rung.dense
