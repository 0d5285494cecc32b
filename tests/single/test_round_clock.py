"""Rounds of ranks that step at different speeds: who is late contributes what it has."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from hvd_gradcomp import ChunkedTopKCompressor, NoneCompressor
from hvd_gradcomp.algorithms.combined.local_steps import LocalSchedule, OuterSGD
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.runtime.round_clock import RoundClock
from hvd_gradcomp.torch import ddp
from hvd_gradcomp.torch.local.local_steps import LocalStepsOptimizer
from tests.thread_ranks import run

SIZE = 96
AVERAGE = OuterSGD(1.0, 0.0)


def optimizer_of(rank, deadline, every=4, compression=None, warmup=0, **more):
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    optimizer = LocalStepsOptimizer(
        torch.optim.SGD([parameter], 1.0),
        [("w", parameter)],
        rank.connect,
        LocalSchedule(every, warmup, deadline=deadline, **more),
        AVERAGE,
        compression or NoneCompressor(),
        connect_clock=lambda: rank.apart().connect("rounds"),
    )
    return parameter, optimizer


def results_of(size, work):
    results = run(size, work)
    for one in results:
        if isinstance(one, Exception):
            raise one
    return results


def step(parameter, optimizer, gradient):
    parameter.grad = gradient.clone()
    optimizer.step()


def numbers(rank, number):
    seed = 1000 * rank + number
    return torch.from_numpy(np.random.default_rng(seed).normal(size=SIZE).astype(np.float32))


def train(rank, rounds, pause, deadline, **how):
    """Train some rounds; return this rank's steps, the sum of its gradients, and parameters."""
    parameter, optimizer = optimizer_of(rank, deadline, **how)
    total = torch.zeros(SIZE)
    while optimizer.rounds < rounds:
        time.sleep(pause[rank.rank])
        gradient = numbers(rank.rank, optimizer.steps_made)
        total += gradient
        step(parameter, optimizer, gradient)
    optimizer.exchange()
    return optimizer.steps_made, total, parameter.detach().clone(), optimizer.rounds


class Alone:
    """Gather of one rank's numbers, which are there at once."""

    def __init__(self):
        self.slots = []

    def submit(self, progress, slot):
        self.slots.append(slot)
        self.rows = [list(progress)]
        return self

    def ready(self):
        return True

    def wait(self):
        return self.rows


def test_several_steps_at_once_are_a_round_s_or_more():
    gather = Alone()
    clock = RoundClock(gather, 4, 60.0)
    assert [clock.step(3), clock.step(3), clock.step(), clock.step(9)] == [False, True, False, True]
    assert clock.meet()
    assert gather.slots == [1, 0, 1, 0, 1]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_nothing_of_a_slow_rank_is_lost(ranks):
    """With plain SGD and means the parameters are the mean of all gradients ever made."""
    pause = [0.001, 0.02, 0.005][:ranks]
    results = results_of(ranks, lambda rank: train(rank, 5, pause, 0.03))
    steps, totals, parameters, rounds = zip(*results)
    assert len(set(rounds)) == 1
    mean = -sum(totals) / ranks
    for one in parameters:
        torch.testing.assert_close(one, mean, rtol=1e-4, atol=1e-4)
        assert torch.equal(one, parameters[0])
    if ranks > 1:
        assert steps[0] > steps[1], "a quick rank goes on while it waits"


def test_equally_fast_ranks_make_about_as_many_steps_as_a_round_has():
    """A rank may make one more, where the others' numbers come a moment later."""
    results = results_of(2, lambda rank: train(rank, 6, [0.005, 0.005], 5.0))
    for steps, *_ in results:
        assert 6 * 4 <= steps <= 6 * 6


def test_what_a_compressor_keeps_of_a_slow_rank_is_not_lost_either():
    compressor = ChunkedTopKCompressor(chunk=32, k=4, values="float32", decay=1.0)

    def work(rank):
        parameter, optimizer = optimizer_of(rank, 0.02, compression=compressor)
        total = torch.zeros(SIZE)
        while optimizer.rounds < 5:
            time.sleep([0.001, 0.01][rank.rank])
            gradient = numbers(rank.rank, optimizer.steps_made)
            total += gradient
            step(parameter, optimizer, gradient)
        optimizer.exchange()
        (reducer,) = optimizer.all_reducers
        (bucket,) = reducer.buckets
        return (
            total,
            residual_of(bucket.compressor, bucket.state)[:SIZE],
            parameter.detach().clone(),
        )

    totals, residuals, parameters = zip(*results_of(2, work))
    # Residuals are of pseudogradients, and these of an inner rate of 1 are sums of gradients.
    torch.testing.assert_close(
        parameters[0], -(sum(totals) - sum(residuals)) / 2, rtol=1e-4, atol=1e-4
    )
    assert torch.equal(parameters[0], parameters[1])


def test_a_rank_that_stands_still_holds_the_others_no_longer_than_it_must():
    """A rank whose deadline is over stands still too, and goes on once the last one steps."""
    entered = threading.Event()

    def work(rank):
        parameter, optimizer = optimizer_of(rank, 0.05, every=2)
        step(parameter, optimizer, numbers(rank.rank, 0))  # where all meet
        if rank.rank == 1:
            assert entered.wait(10)
        step(parameter, optimizer, numbers(rank.rank, 1))
        began = time.monotonic()
        while optimizer.rounds < 1:
            if rank.rank == 0 and time.monotonic() - began > 0.02:
                entered.set()
            step(parameter, optimizer, numbers(rank.rank, 9))
        optimizer.exchange()
        return optimizer.steps_made, time.monotonic() - began

    results = results_of(2, work)
    assert results[0][0] > 2
    assert all(seconds < 10 for _, seconds in results)


def test_exchange_waits_for_ranks_that_are_still_in_their_steps():
    def work(rank):
        parameter, optimizer = optimizer_of(rank, 5.0, every=3)
        for number in range([1, 8][rank.rank]):
            step(parameter, optimizer, numbers(rank.rank, number))
        optimizer.exchange()
        optimizer.exchange()  # nothing has moved
        return optimizer.rounds, parameter.detach().clone()

    (rounds, ours), (others, theirs) = results_of(2, work)
    assert rounds == others == 1
    total = sum(numbers(0, n) for n in range(1)) + sum(numbers(1, n) for n in range(8))
    torch.testing.assert_close(ours, -total / 2, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("every", "deadline"), [([3, 50], [0.02, 0.02]), ([3, 3], [0.02, 50.0]), ([9, 9], [50.0, 0.02])]
)
def test_another_every_or_deadline_is_an_error_on_all(every, deadline):
    """Each rank would decide by its own when to exchange, and wait for those that do not."""

    def work(rank):
        at = rank.rank
        parameter, optimizer = optimizer_of(rank, deadline[at], every=every[at])
        while optimizer.rounds < 1:
            time.sleep(0.01)
            step(parameter, optimizer, numbers(at, optimizer.steps_made))

    for error in run(2, work):
        assert isinstance(error, MismatchError) and "every=" in str(error)


def test_first_steps_are_averaged_one_by_one_and_rounds_begin_after_them():
    def work(rank):
        parameter, optimizer = optimizer_of(rank, 1.0, every=2, warmup=3)
        for number in range(3):
            step(parameter, optimizer, numbers(rank.rank, number))
        averaged = parameter.detach().clone()
        while optimizer.rounds < 2:
            step(parameter, optimizer, numbers(rank.rank, optimizer.steps_made))
        optimizer.exchange()
        return averaged, parameter.detach().clone()

    (first, ours), (other, theirs) = results_of(2, work)
    assert torch.equal(first, other) and torch.equal(ours, theirs)


def test_a_saved_state_goes_on_from_where_it_was():
    """Rounds begin anew after a load, on all ranks."""

    def work(rank):
        parameter, optimizer = optimizer_of(rank, 1.0, every=3)
        while optimizer.rounds < 2:
            step(parameter, optimizer, numbers(rank.rank, optimizer.steps_made))
        optimizer.exchange()
        kept, before = optimizer.state_dict(), parameter.detach().clone()
        other, again = optimizer_of(rank, 1.0, every=3)
        with torch.no_grad():
            other.copy_(before)
        again.load_state_dict(kept)
        assert (again.rounds, again.steps_made) == (optimizer.rounds, optimizer.steps_made)
        while again.rounds < 4:
            step(other, again, numbers(rank.rank, again.steps_made))
        again.exchange()
        return other.detach().clone()

    ours, theirs = results_of(2, work)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_state_of_mid_round_is_loaded_after_other_steps_on_each_rank(at_once):
    """A rank may be in `exchange()` at once, while the other one steps."""

    def work(rank):
        parameter, optimizer = optimizer_of(rank, 0.1, every=3)
        while optimizer.rounds < 2:
            step(parameter, optimizer, numbers(rank.rank, optimizer.steps_made))
        for number in range(rank.rank):
            step(parameter, optimizer, numbers(rank.rank, number))
        optimizer.load_state_dict(optimizer.state_dict())
        while optimizer.rounds < 4 and not (at_once and rank.rank):
            step(parameter, optimizer, numbers(rank.rank, optimizer.steps_made))
        optimizer.exchange()
        return parameter.detach().clone()

    ours, theirs = results_of(2, work)
    assert torch.equal(ours, theirs)


def test_states_after_other_rounds_are_an_error_on_all():
    def work(rank):
        parameter, optimizer = optimizer_of(rank, 1.0, every=3)
        kept = optimizer.state_dict()
        while optimizer.rounds < 1:
            step(parameter, optimizer, numbers(rank.rank, 0))
        optimizer.exchange()
        optimizer.load_state_dict(kept if rank.rank else optimizer.state_dict())
        step(parameter, optimizer, numbers(rank.rank, 0))

    for error in run(2, work):
        assert isinstance(error, OutOfStepError) and "load the same checkpoint" in str(error)


@pytest.mark.parametrize(
    ("deadline", "more", "message"),
    [
        (0.0, {}, "takes seconds, more than 0"),
        (True, {}, "takes seconds, more than 0"),
        ("1", {}, "takes seconds, more than 0"),
        (float("nan"), {}, "takes seconds, more than 0"),
        (1.0, {"fragments": 2}, "fragments= and delay="),
        (1.0, {"delay": 1}, "fragments= and delay="),
    ],
)
def test_deadlines_that_cannot_be_are_refused(deadline, more, message):
    class Alone:
        rank = 0

        def connect(self, name):
            raise AssertionError("asked too late")

        def apart(self):
            return self

    parameter = torch.nn.Parameter(torch.zeros(4))
    cut = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match=message):
        LocalStepsOptimizer(
            torch.optim.SGD([parameter, cut], 1.0),
            None,
            Alone().connect,
            LocalSchedule(4, deadline=deadline, **more),
            AVERAGE,
            None,
            connect_clock=Alone().connect,
        )


@pytest.mark.usefixtures("one_process")
def test_a_deadline_and_ranks_that_come_and_go_exclude_each_other():
    model = torch.nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), 1.0)
    optimizer = ddp.LocalSteps(sgd, model.named_parameters(), 3, deadline=1.0)
    with pytest.raises(ValueError, match="make LocalSteps without it"):
        ddp.ElasticState(model, optimizer)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", ["group", "lost", "sync", "model_"])
def test_objects_of_ranks_that_come_and_go_hide_nothing(name):
    model = torch.nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), 1.0)
    optimizer = ddp.LocalSteps(sgd, model.named_parameters(), 3)
    if name == "model_":
        assert ddp.ElasticState(model, optimizer, model_=5).model_ == 5
        return
    with pytest.raises(ValueError, match=f"has a '{name}' itself: give yours another name"):
        ddp.ElasticState(model, optimizer, **{name: 5})
