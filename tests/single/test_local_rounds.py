"""The rounds of local steps, without a framework: a fragment is a number, and ranks take turns."""

from __future__ import annotations

import logging

import pytest

from hvd_gradcomp.algorithms.combined.local_steps import LocalSchedule
from hvd_gradcomp.monitoring.verify import DivergedError
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.runtime.local_rounds import (
    WARMUP,
    DenseMeans,
    Exchange,
    Fragment,
    LocalRounds,
    PendingResult,
    RoundCounters,
)


class Count(Exchange):
    def __init__(self, log, name):
        self.log, self.name, self.count = log, name, 0

    @property
    def made(self):
        return self.count

    def commit(self):
        self.log.append(f"commit {self.name}")

    def rollback(self):
        self.log.append(f"rollback {self.name}")


class Number(Fragment):
    """A parameter `x` and a global one; the other rank sends what `others` says."""

    def __init__(self, log, name, others=0.0):
        self.exchange, self.log, self.name = Count(log, name), log, name
        self.x = self.shared = 0.0
        self.others, self.moved, self.sent, self.undone = others, 0, None, False

    @property
    def in_flight(self):
        return self.sent is not None

    def digest(self):
        return int(self.shared)

    def send(self, agree):
        agree()
        self.log.append(f"send {self.name}")
        self.sent = self.shared - self.x

    def receive(self):
        sent, self.sent = self.sent, None
        self.exchange.count += 1
        return None if self.undone else [(sent + self.others) / 2]

    def drop(self):
        self.sent = None

    def forget(self):
        """Keep nothing, as ever: all of a change is sent."""

    def step(self, means):
        self.log.append(f"apply {self.name}")
        self.shared -= means[0]

    def hand_out(self, blend):
        self.x = blend * self.x + (1 - blend) * self.shared
        self.moved = self.moved if blend else 0

    def take_copies(self, keeps_equal):
        self.log.append(f"copies {keeps_equal}")
        self.shared, self.moved = self.x, 0


class Means(DenseMeans):
    def __init__(self, log, name):
        self.exchange, self.log, self.finite = Count(log, name), log, True

    def average(self):
        return [1.0] if self.finite else None

    def apply(self, means):
        self.log.append(f"apply {self.exchange.name}")


class Channel:
    """Channel to another rank, which sends the same row but for what a test changes in it."""

    noun, remedy = "parameters", "Broadcast them"

    def __init__(self):
        self.settings, self.change = 0, {}

    def compare_settings(self, refusal):
        self.settings += 1
        if refusal is not None:
            raise refusal

    def start_gather(self, row):
        other = list(row)
        for place, value in self.change.items():
            other[place] = value
        return lambda: {0: list(row), 1: other}

    def fault(self, number, moved):
        return 0

    def refuse_faults(self, faults):
        assert not any(faults.values())


@pytest.fixture
def log():
    return []


def rounds_of(log, *, fragments=1, others=0.0, warmup=False, buffers=False, **schedule):
    numbers = [Number(log, name, others) for name in "abc"[:fragments]]
    return LocalRounds(
        LocalSchedule(fragments=fragments, **schedule),
        numbers,
        Channel(),
        RoundCounters(),
        warmup=Means(log, "gradients") if warmup else None,
        buffers=Means(log, "buffers") if buffers else None,
    )


def train(rounds, steps):
    for _ in range(steps):
        rounds.begin()
        for fragment in rounds.fragments:
            fragment.x += 1.0
        rounds.end_local_steps()


def test_fragments_are_sent_in_turn_and_applied_after_the_delay(log):
    rounds = rounds_of(log, every=4, fragments=2, delay=1, blend=0.0, buffers=True)
    train(rounds, 5)
    assert log == [
        *["send a", "commit a", "apply a", "send b"],
        *["commit b", "apply b", "apply buffers"],
    ]
    assert (rounds.counters.steps, rounds.counters.clock, rounds.counters.rounds) == (5, 5, 1)


def test_a_round_moves_the_global_parameter_by_the_mean(log):
    rounds = rounds_of(log, every=3, others=-5.0)  # the other rank has moved by 5
    train(rounds, 3)
    (fragment,) = rounds.fragments
    assert fragment.x == fragment.shared == 4.0 and rounds.is_exchanged
    fragment.undone = True
    train(rounds, 3)
    assert fragment.x == fragment.shared == 4.0 and rounds.counters.rounds == 1


def test_what_was_undone_is_said(log, caplog):
    rounds = rounds_of(log, every=1)
    rounds.fragments[0].undone = True
    with caplog.at_level(logging.WARNING):
        train(rounds, 1)
    assert "parameters of some rank were not finite: all ranks go back" in caplog.text


def test_an_exchange_on_request_begins_the_schedule_again(log):
    rounds = rounds_of(log, every=4)
    train(rounds, 2)
    rounds.exchange()
    assert rounds.counters.clock == 4 and rounds.counters.rounds == 1
    del log[:]
    rounds.exchange()  # nothing has moved
    assert not log
    train(rounds, 3)
    assert not log


def test_the_warm_up_is_alike_on_all_ranks(log):
    rounds = rounds_of(log, every=4, warmup_steps=2, warmup=True)
    for step in (1, 2):
        rounds.begin()
        assert rounds.warms_up
        rounds.warm_step(may_skip=False)
        assert rounds.counters.clock == step
    assert not rounds.warms_up
    first = ["copies True"]  # what the ranks compare
    assert log == [*first, *2 * ["commit gradients", "apply gradients"], "copies True"]
    rounds.warmup.finite = False
    rounds.counters.clock = 1
    with pytest.raises(NonFiniteGradientError, match="in step 2"):
        rounds.warm_step(may_skip=False)
    rounds.warm_step(may_skip=True)
    assert rounds.counters.clock == 2


def test_ranks_that_differ_are_an_error(log):
    rounds = rounds_of(log, every=1)
    rounds._ranks.change = {5: 9}  # the digest
    with pytest.raises(DivergedError, match="the global parameters of the ranks differ"):
        rounds.begin()
    rounds._ranks.change = {}
    rounds.restart()
    assert log == ["copies False"]  # what the copies knew beyond the model's precision differed
    rounds.begin()
    assert rounds._ranks.settings == 1
    rounds.restart()
    assert log[-1] == "copies True"
    rounds.begin()
    assert rounds._ranks.settings == 1, "settings are compared once"
    rounds._ranks.change = {3: 7}  # the clock
    with pytest.raises(OutOfStepError, match="rank 1 after 7 steps"):
        rounds.end_local_steps()
    assert rounds._ranks.settings == 2, "they may be the reason"


def test_a_refusal_comes_before_the_first_step(log):
    rounds = rounds_of(log, every=1)
    with pytest.raises(KeyError):
        rounds.begin(lambda: KeyError("sharded"))
    rounds.begin()
    rounds.begin(lambda: KeyError("not asked again"))


class Agreement:
    def __init__(self, loses):
        self.loses, self.ended = loses, 0

    def confirm(self):
        if self.loses:
            raise ConnectionError

    def end_step(self):
        self.ended += 1


@pytest.mark.parametrize("applies", [True, False])
def test_a_result_is_applied_on_all_ranks_or_none(applies, log):
    rounds = rounds_of(log, every=1, buffers=True)
    rounds.commit_protocol = Agreement(loses=True)
    with pytest.raises(ConnectionError):
        train(rounds, 1)
    assert (
        rounds.uncommitted == PendingResult(0, [-0.5], [1.0])
        and rounds.uncommitted.number != WARMUP
    )
    rounds.resolve(applies)
    done = ["commit a", "apply a", "apply buffers"] if applies else ["rollback a"]
    assert log == ["send a", *done] and rounds.uncommitted is None
    rounds.commit_protocol = Agreement(loses=False)
    train(rounds, 1)
    assert rounds.commit_protocol.ended == 1
