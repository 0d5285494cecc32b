"""Rounds whose length a function or the learning rate decides: laws, and ranks as threads."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import QuadraticRule
from hvd_gradcomp.algorithms.combined.local_steps import AVERAGING, LocalSchedule
from hvd_gradcomp.algorithms.combined.round_length import Round, called
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.runtime.config_check import MismatchError
from tests.single.test_local_steps import (
    Net,
    globals_of,
    gradient,
    over,
    train,
    trained,
    whole,
)
from tests.thread_ranks import run

RATES = st.floats(1e-6, 10.0)


@given(RATES, st.integers(1, 50), st.lists(RATES, min_size=2, max_size=20))
def test_rounds_grow_with_the_square_of_the_rate(alpha, base, rates):
    rule = QuadraticRule(alpha, base, longest=5000)
    rates = sorted(rates, reverse=True)
    lengths = [rule.length(rate, last) for last, rate in zip(rates, rates[1:])]
    assert lengths == sorted(lengths)
    for rate, length in zip(rates[1:], lengths):
        expected = min(5000.0, max(float(base), (alpha / rate) ** 2))
        assert base <= length <= 5000 and abs(length - expected) < 1.001


@given(RATES, st.integers(1, 50), RATES, RATES)
def test_rounds_are_short_while_the_rate_rises(alpha, base, one, other):
    low, high = sorted((one, other))
    rule = QuadraticRule(alpha, base)
    assert rule.length(low, -1.0) == base
    assert low == high or rule.length(high, low) == base


def test_half_the_rate_gives_four_times_the_steps():
    for base in range(1, 60):
        rule = QuadraticRule(0.3 * base**0.5, base)
        assert [rule.length(rate, 0.3) for rate in (0.3, 0.15, 0.1)] == [base, 4 * base, 9 * base]
    assert rule.length(0.0, 0.3) == 1000


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(0, 5), st.data())
@settings(max_examples=100, deadline=None)
def test_each_fragment_travels_once_a_round_of_any_length(lengths, warmup, data):
    shortest = min(lengths)
    fragments = data.draw(st.integers(1, shortest))
    delay = data.draw(st.integers(0, shortest - 1))
    schedule = LocalSchedule(lambda step: shortest, warmup, fragments, delay)
    round_, flying = Round(), {}
    for length in lengths:
        round_ = Round(round_.begun + round_.length or warmup, length, round_.length)
        sent = []
        for step in range(round_.begun + 1, round_.begun + length + 1):
            for fragment in schedule.applies(step, round_) if delay else ():
                assert step - flying.pop(fragment) == delay
            for fragment in schedule.sends(step, round_):
                assert fragment not in flying, "it was applied before it is sent again"
                sent.append(fragment)
                flying.update({fragment: step} if delay else {})
        assert sent == list(range(fragments))
        assert step == round_.begun + length and sent[-1] == fragments - 1
    assert not schedule.sends(warmup, Round()) and not schedule.applies(warmup, Round())


@pytest.mark.parametrize("rest", [{}, {"warmup_steps": 3}, {"fragments": 2, "delay": 1}])
def test_a_function_that_returns_a_number_is_that_number(rest):
    fixed = trained(2, 14, LocalSchedule(4, **rest), AVERAGING)
    called_with = []

    def four(step):
        called_with.append(step)
        return np.int64(4)

    for left, right in zip(fixed, trained(2, 14, LocalSchedule(four, **rest), AVERAGING)):
        for x, y in zip(left, right):
            np.testing.assert_array_equal(x, y)
    begun = range(rest.get("warmup_steps", 0), 15, 4)
    assert sorted(called_with) == sorted([*begun, *begun])


def test_rounds_follow_the_rate():
    """As a plain averaging whose rounds were computed by hand."""
    rates = [0.01, 0.02, 0.04, *[0.04 * 0.9**n for n in range(40)]]

    def work(rank):
        net, ends = Net(), []
        optimizer = over(rank, net, LocalSchedule(QuadraticRule(0.08, 3, 12)), AVERAGING)
        for step, rate in enumerate(rates, start=1):
            optimizer.param_groups[0]["lr"] = rate
            rounds = optimizer.rounds
            train(rank, net, optimizer, 1, step)
            if optimizer.rounds > rounds:
                ends.append(step)
        return ends

    expected, at, length = [], 0, 3
    while at + length <= len(rates):
        at, last = at + length, rates[at - 1] if at else 0.0
        rate = rates[at - 1]
        expected.append(at)
        length = 3 if rate > last else min(12, max(3, int((0.08 / rate) ** 2 + 1e-6)))
    first, second = run(2, work)
    assert first == second == expected and len(expected) < len(rates) // 4
    assert expected[-1] - expected[-2] == 12


def grows(step):
    return 3 + step // 5


def test_an_exchange_in_between_begins_the_next_round():
    def work(rank):
        net, calls = Net(), []

        def every(step):
            calls.append(step)
            return 6 if step < 6 else 8

        optimizer = over(rank, net, LocalSchedule(every, fragments=2, delay=1), AVERAGING)
        train(rank, net, optimizer, 1 + rank.rank)  # in different places
        optimizer.exchange()
        shared = globals_of(optimizer)
        np.testing.assert_array_equal(net.flat(), shared)
        optimizer.exchange()  # nothing has moved: no other round
        train(rank, net, optimizer, 9, 3)
        return calls, optimizer._rounds.counters.round, globals_of(optimizer)

    first, second = whole(run(2, work))
    assert first[0] == second[0] == [0, 6, 14]
    assert first[1] == second[1] == Round(14, 8, 8)
    np.testing.assert_array_equal(first[2], second[2])


@pytest.mark.parametrize("cut_at", [2, 4, 7, 8, 11, 13])
@pytest.mark.parametrize(
    "schedule",
    [
        LocalSchedule(grows),
        LocalSchedule(grows, 2, 2, 2),
        LocalSchedule(QuadraticRule(0.05, 3)),
    ],
    ids=str,
)
def test_resumes_in_the_middle_of_a_round(schedule, cut_at):
    def steps(rank, net, optimizer, first, last):
        for step in range(first, last + 1):
            optimizer.param_groups[0]["lr"] = 0.04 * 0.95**step
            train(rank, net, optimizer, 1, step)

    def straight(rank):
        net = Net()
        optimizer = over(rank, net, schedule, AVERAGING)
        steps(rank, net, optimizer, 1, 20)
        return net.flat(), globals_of(optimizer)

    def resumed(rank):
        net = Net()
        optimizer = over(rank, net, schedule, AVERAGING)
        steps(rank, net, optimizer, 1, cut_at)
        saved = optimizer.state_dict()
        for fragment in optimizer._rounds.fragments:
            fragment.exchange.abort()
        again = Net()
        optimizer = over(rank, again, schedule, AVERAGING)
        optimizer.load_state_dict(saved)
        steps(rank, again, optimizer, cut_at + 1, 20)
        return again.flat(), globals_of(optimizer)

    for left, right in zip(whole(run(2, straight)), whole(run(2, resumed))):
        for x, y in zip(left, right):
            np.testing.assert_array_equal(x, y)


def test_another_rule_does_not_fit_what_was_saved():
    def work(rank):
        saved = over(rank, Net(), LocalSchedule(grows)).state_dict()
        over(rank, Net(), LocalSchedule(QuadraticRule(0.1))).load_state_dict(saved)

    (error,) = run(1, work)
    assert isinstance(error, CheckpointError) and "<grows>" in str(error)


def after(steps, other):
    """Return a function that returns 3, and from a step on something else."""
    return lambda step: 3 if step < steps else other()


def fails():
    raise KeyError("no such step")


@pytest.mark.parametrize("steps", [0, 2, 5])
@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize(
    ("others", "error", "text"),
    [
        ((lambda: 3, lambda: 5), MismatchError, "{0: 3, 1: 5}"),
        ((lambda: 3, fails), MismatchError, "KeyError('no such step')"),
        ((fails, fails), ValueError, "every= fails after"),
        ((lambda: 3, lambda: 2.5), MismatchError, "returns 2.5"),
        ((lambda: 0, lambda: 0), ValueError, "returns 0"),
    ],
)
def test_ranks_that_decide_otherwise_are_an_error_on_all(steps, warmup, others, error, text):
    def work(rank):
        net = Net()
        schedule = LocalSchedule(after(steps + warmup, others[rank.rank]), warmup)
        train(rank, net, over(rank, net, schedule, AVERAGING), 12)

    for result in run(2, work):
        assert isinstance(result, error) and text in str(result), result


def test_rates_that_differ_are_an_error_on_all():
    def work(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(QuadraticRule(0.1, 2)), AVERAGING)
        for step in range(1, 9):
            optimizer.param_groups[0]["lr"] = 0.05 * (0.8 - 0.1 * rank.rank) ** step
            train(rank, net, optimizer, 1, step)

    for result in run(2, work):
        assert isinstance(result, MismatchError), result
        assert "number of steps for the round after step" in str(result)


def test_a_deadline_takes_a_function():
    """Slow ranks make fewer steps; all have the same rounds, and the function sees their ends."""

    def work(rank):
        net, calls = Net(), []

        def every(step):
            calls.append(step)
            return 2 if step < 4 else 5

        optimizer = over(
            rank,
            net,
            LocalSchedule(every, deadline=30.0),
            AVERAGING,
            connect_clock=lambda: rank.apart().connect("rounds"),
        )
        while optimizer.rounds < 4:
            train(rank, net, optimizer, 1, optimizer.steps_made + 1)
        optimizer.exchange()
        return calls[:5], globals_of(optimizer)

    first, second = whole(run(2, work))
    assert first[0] == second[0] == [0, 2, 4, 9, 14]
    np.testing.assert_array_equal(first[1], second[1])


def test_what_does_not_go_together_is_said():
    with pytest.raises(ValueError, match="follows the rate"):
        LocalSchedule(QuadraticRule(0.1), deadline=1.0)
    for bad in ({"fragments": 5}, {"delay": 4}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            LocalSchedule(QuadraticRule(0.1, base=4), **bad)
    for bad in (QuadraticRule, "often", 2.5, True, None):
        with pytest.raises(ValueError, match="every must"):
            LocalSchedule(bad)
    for alpha, base, longest in ((0.0, 4, 9), (0.1, 0, 9), (0.1, 4, 3)):
        with pytest.raises(ValueError, match="QuadraticRule: "):
            QuadraticRule(alpha, base, longest)


def test_names_are_the_same_in_all_processes():
    class Of:
        def __call__(self, step):
            return 3

    for every, name in (
        (grows, "<grows>"),
        (lambda step: 3, "<lambda>"),
        (Of(), "<Of>"),
        (functools.partial(grows), "<partial>"),
    ):
        assert called(every) == name
        assert repr(LocalSchedule(every)).startswith(f"LocalSchedule(every={name}, warmup")


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_ranks_are_equal_after_each_round(lengths, ranks):
    ends = np.cumsum(lengths)

    def work(rank):
        net, seen = Net(), []
        schedule = LocalSchedule(lambda step: lengths[min(sum(ends <= step), len(lengths) - 1)])
        optimizer = over(rank, net, schedule, AVERAGING)
        for step in range(1, ends[-1] + 1):
            train(rank, net, optimizer, 1, step)
            seen.append(net.flat())
        return seen

    first, *others = whole(run(ranks, work))
    for other in others:
        equal = [np.array_equal(x, y) for x, y in zip(first, other)]
        assert equal == [step in ends for step in range(1, ends[-1] + 1)]
    assert gradient(0, 1, first[-1]).shape == first[-1].shape
