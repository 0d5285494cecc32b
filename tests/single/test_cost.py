"""The cost model: the paper's formulas where nothing else costs, bounds where something does."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_gradcomp.core.cost_model import (
    KINDS,
    Bucket,
    Dense,
    Link,
    Way,
    break_even,
    dense_seconds,
    step_seconds,
    volume,
)

seconds = st.floats(0, 10)
ranks = st.integers(2, 1024)


def ideal() -> Link:
    """A byte a second, and nothing to start."""
    return Link(2, dict.fromkeys(KINDS, ((0.0, 0.0), (1.0, 1.0))), latency=0.0)


@given(ranks, st.floats(1, 1e4))
def test_without_work_and_latency_it_is_the_papers_model(p, c):
    """Tsuzuku et al., section 5: T_r = 2(p-1)Ns*beta/p, and allgather T_v = (p-1)*Ns/c*beta."""
    N = 1e6
    dense = Dense("dense", [(0.0, N)]).seconds(ideal(), p)
    costs = Way("way", {p: [[[Bucket(0.0, (0.0, 0.0), (("allgather", N / c),))]]]})
    assert dense == pytest.approx(2 * (p - 1) * N / p)
    assert dense / costs.seconds(ideal(), p) == pytest.approx(2 * c / p)


stages = st.tuples(seconds, seconds, st.floats(0, 100), seconds)


@given(st.lists(stages, min_size=1, max_size=6), seconds)
def test_a_step_is_no_shorter_than_its_parts_and_no_longer_than_their_sum(drawn, rest):
    buckets = [Bucket(r, (e, d), (("alltoall", size),)) for r, e, size, d in drawn]
    backward = max(r for r, *_ in drawn) + rest
    link = ideal()
    work = backward + sum(e + d for _, e, _, d in drawn)
    travel = sum(link.seconds("alltoall", size) for _, _, size, _ in drawn)
    took = step_seconds([buckets], link, 2, backward)
    assert max(work, travel) - 1e-6 <= took <= work + travel + 1e-6


@given(st.lists(st.tuples(seconds, st.floats(1, 100)), min_size=1, max_size=8), seconds)
def test_dense_layers_fuse_while_the_link_is_busy(layers, rest):
    """Fusion changes how many collectives there are, not how many bytes."""
    backward = max(ready for ready, _ in layers) + rest
    travel = sum(volume("allreduce", size, 2) for _, size in layers)
    took = dense_seconds(layers, ideal(), 2, backward)
    last = max(layers)
    assert took >= max(backward, travel, last[0] + volume("allreduce", last[1], 2)) - 1e-6
    assert took <= max(backward, max(ready for ready, _ in layers) + travel) + 1e-6


def test_a_collective_waits_for_the_last_rank():
    def rank(*work: float) -> list[Bucket]:
        return [Bucket(0.0, (w, 0.0), (("broadcast", 8.0),)) for w in work]

    assert step_seconds([rank(1, 2), rank(2, 1)], ideal()) == 2 + 8 + 8
    assert step_seconds([rank(1, 20), rank(2, 1)], ideal()) == 21 + 8


def test_a_second_round_waits_for_the_first():
    link = ideal()
    one = Bucket(0.0, (1.0, 2.0, 4.0), (("broadcast", 8.0), ("alltoall", 16.0)))
    assert step_seconds([[one]], link) == 1 + 8 + 2 + 8 + 4


@given(st.sampled_from(KINDS), st.integers(0, 4))
def test_a_measured_point_is_what_was_measured(kind, place):
    curve = tuple((float(v), t) for v, t in ((10, 1.0), (20, 1.5), (40, 2.0), (80, 7.0), (90, 8.0)))
    link = Link(2, dict.fromkeys(KINDS, curve))
    size = curve[place][0] / volume(kind, 1.0, 2)
    assert link.seconds(kind, size) == pytest.approx(curve[place][1])
    assert link.seconds(kind, 100 / volume(kind, 1.0, 2)) == pytest.approx(9.0)  # on the last line


@given(st.sampled_from(KINDS), st.floats(0, 1e6), ranks)
def test_more_ranks_take_no_less_time(kind, size, p):
    link = Link.of(1e9)
    assert link.seconds(kind, size, p) <= link.seconds(kind, size, 2 * p) + 1e-12
    assert link.seconds(kind, size, 1) == 0


@given(st.integers(3, 2000))
def test_work_grows_on_a_line_and_shards_shrink(p):
    def cost(ranks: int) -> Bucket:
        asks = (("alltoall", 64.0), ("allgather", 64.0 / ranks))
        return Bucket(0.0, (1.0, 0.0, 0.5 * ranks), asks)

    link = ideal()
    costs = Way("two shots", {n: [[[cost(n)]]] for n in (2, 4, 16)})
    assert costs.seconds(link, p) == pytest.approx(step_seconds([[cost(p)]], link, p))


@given(st.integers(2, 2000), st.floats(1, 5000))
def test_no_allgather_takes_longer_than_an_allreduce_of_everything(p, size):
    """Among more ranks than were measured, what was gathered is summed."""

    def cost(ranks: int) -> Bucket:
        return Bucket(0.0, (1.0, 0.5 * ranks), (("allgather", size),), 4000.0)

    link, turn = ideal(), 8000.0 / size
    costs = Way("words", {n: [[[cost(n)]]] for n in (2, 4)})
    if p in (2, 4) or size * p <= 8000.0:
        assert costs.seconds(link, p) == pytest.approx(step_seconds([[cost(p)]], link, p))
    else:
        expected = 1 + volume("allreduce", 4000.0, p) + 0.5 * turn
        assert costs.seconds(link, p) == pytest.approx(expected)


@pytest.mark.parametrize(("ranks", "summed"), [(6, False), (12, True), (16, True), (99, True)])
def test_what_was_measured_both_ways_is_what_it_is_on_its_side(ranks, summed):
    few = Bucket(0.0, (1.0, 2.0), (("allgather", 1000.0),), 4000.0)
    many = Bucket(0.0, (1.0, 0.0, 3.0), (("allgather", 32.0), ("allreduce", 4000.0)), 4000.0)
    costs = Way("words", {4: [[[few]]], 16: [[[many]]]})
    expected = step_seconds([[many if summed else few]], ideal(), ranks)
    assert costs.seconds(ideal(), ranks) == pytest.approx(expected)


def test_the_slowest_rank_of_the_median_round_counts():
    def rank(*work: float) -> list[list[Bucket]]:
        return [[Bucket(0.0, (w, 0.0), (("broadcast", 0.0),))] for w in work]

    assert Way("way", {2: [rank(1, 2, 9), rank(5, 3, 1)]}).seconds(ideal(), 2) == 5


@given(st.floats(1e6, 1e12))
def test_break_even_is_where_gain_ends(bandwidth):
    assert break_even(lambda b: 1 / b - 1 / bandwidth) == pytest.approx(bandwidth, rel=1e-3)


def test_break_even_may_be_nowhere():
    assert break_even(lambda b: -1.0) == 0
    assert math.isinf(break_even(lambda b: 1.0))


@given(st.floats(1e6, 1e11))
def test_bandwidth_is_that_of_a_large_allreduce(bandwidth):
    assert Link.of(bandwidth).bandwidth == pytest.approx(bandwidth, rel=1e-6)


def test_another_bandwidth_leaves_what_is_no_bandwidth():
    """What adding up halves takes more, and what starting takes."""
    curves = dict.fromkeys(KINDS, ((0.0, 1.0), (10.0, 11.0)))
    halves = ((0.0, 1.0), (10.0, 31.0))  # two seconds a byte of work
    faster = Link(2, {**curves, "allreduce16": halves}).with_bandwidth(80.0)
    assert faster.seconds("allreduce", 10.0) == pytest.approx(1 + 1)
    assert faster.seconds("allgather", 10.0) == pytest.approx(1 + 1)
    assert faster.seconds("allreduce16", 10.0) == pytest.approx(1 + 1 + 20)
