"""Capacities: up at once, down after patience, and equal on all ranks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp.core.capacity import PATIENCE, CapacitySchedule
from hvd_gradcomp.ops.torch import TorchOps


def walk(schedule, needs, start=None):
    ops = TorchOps()
    state = schedule.init(ops, start)
    levels = []
    for need in needs:
        state = state._replace(needed=torch.tensor(need))
        level, state = schedule.next_level(ops, state)
        levels.append(level)
    return levels


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=80), st.integers(17, 4000))
@settings(deadline=None)
def test_there_is_always_room_for_what_was_needed(needs, top):
    schedule = CapacitySchedule.up_to(top)
    for need, level in zip(needs, walk(schedule, needs)):
        assert level.dense or level.capacity >= need
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
