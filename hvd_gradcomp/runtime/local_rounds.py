"""Rounds of local steps, without a framework: when ranks exchange what, and what they do with it.

Each rank steps alone. When the schedule says so, the ranks compare what they are about to exchange,
send the change of a fragment of the model, and step an outer optimizer by the mean; see
`algorithms.combined.local_steps`. From top to bottom: what a framework supplies (an `Exchange` of a
`Fragment` or of `DenseMeans`, a `RankChannel`), agreement where ranks may be lost, and
`LocalRounds`, which uses them.

A framework holds the tensors, so a fragment may be a list of parameters, of variables or of
shards: nothing here knows which. A framework's classes are derived from `Exchange`, `DenseMeans`
and `Fragment`, whose hooks do nothing by default.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Protocol

from hvd_gradcomp.algorithms.combined.local_steps import LocalSchedule
from hvd_gradcomp.algorithms.combined.round_length import FIRST, Round
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.exchange_state import (
    ExchangeState,
    States,
    different_lengths,
    digests_of,
    diverged,
    out_of_step,
)
from hvd_gradcomp.runtime.round_clock import RoundClock

LOGGER = logging.getLogger("hvd_gradcomp")
WARMUP, _LOADED, _FIRST, _ROUND = -1, -2, -3, -4  # in the place of a fragment's number
_FAILED = -1  # in the place of a round's length
Tensors = Sequence[Any]
Refusal = Callable[[], Optional[Exception]]  # returns the error with which a rank refuses to begin
Agreement = Callable[[], object]  # waits for what the ranks compare; raises on all if they differ


# -- what a framework supplies -----------------------------------------------------------------


class Exchange(ABC):
    """One of the exchanges that the ranks make again and again."""

    @property
    @abstractmethod
    def made(self) -> int:
        """Return how often it was made; undone exchanges do not count."""

    def agree(self) -> None:
        """Compare its settings on all ranks, once; for those that `compare_settings` leaves out."""

    def commit(self) -> None:
        """Release the state from before the exchange; where a `CommitProtocol` may be set."""

    def rollback(self) -> None:
        """Return to the state from before the exchange; where a `CommitProtocol` may be set."""

    def abort(self) -> None:
        """Drop an exchange that was started and not finished, if any."""

    def release(self) -> None:
        """Release memory that only an exchange needs; its means are read no more."""


class DenseMeans(ABC):
    """Tensors whose dense mean over ranks is applied: gradients in the warm-up, and buffers.

    Attributes:
        exchange: of these tensors.
    """

    exchange: Exchange

    @abstractmethod
    def average(self) -> Tensors | None:
        """Return the means; None, on all ranks, if a value of some rank is not finite."""

    @abstractmethod
    def apply(self, means: Tensors) -> None:
        """Step by the mean gradients, or set the buffers."""


class Fragment(ABC):
    """Parameters that are exchanged together, and the global ones, which are equal on all ranks.

    Attributes:
        exchange: of the pseudogradients.
        moved: steps of this rank since its parameters were the global ones.
    """

    exchange: Exchange
    moved: int

    @property
    @abstractmethod
    def in_flight(self) -> bool:
        """Return True between `send` and `receive`."""

    @abstractmethod
    def digest(self) -> int:
        """Return a checksum of the global parameters, and of all else that must be equal."""

    @abstractmethod
    def send(self, agree: Agreement) -> None:
        """Start the exchange of the global parameters minus those of this rank.

        Args:
            agree: to be called before anything is sent, and as late as that: it waits for the
                slowest rank. If it raises, which it does on all ranks, nothing is in flight, and
                the compressor's state is as before.
        """

    @abstractmethod
    def receive(self) -> Tensors | None:
        """End the exchange; return the mean pseudogradients, None if it was undone on all ranks."""

    @abstractmethod
    def drop(self) -> None:
        """Drop what is in flight; the compressor's state is as before."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what this rank's compressor has not sent; counts stay."""

    @abstractmethod
    def step(self, means: Tensors) -> None:
        """Step the outer optimizer, which moves the global parameters, by the pseudogradients."""

    @abstractmethod
    def hand_out(self, blend: float) -> None:
        """Set this rank's parameters to the global ones, blended with `blend` of what they are.

        Without a blend the rank has not `moved` any more.
        """

    @abstractmethod
    def take_copies(self, keeps_equal: bool) -> None:
        """Set the global parameters to those of this rank, which has not `moved` then.

        Args:
            keeps_equal: leave elements that this rank has as they were handed out: rounded to the
                precision of the model, they would lose what the global ones know beyond it.
        """

    # Hooks, no-ops unless a framework or a kind of layers needs them.

    def take_set(self) -> None:
        """Take over what was set since this rank's parameters were the global ones, if seen."""

    def resume(self) -> None:
        """Start the exchange that was in flight when the state was saved that was loaded."""

    def before_warm_step(self) -> None:
        """Make parameters equal on all ranks where a forward alone has changed them."""

    def after_warm_step(self) -> None:
        """Keep in the global parameters what `before_warm_step` compares with."""

    def after_idle_round(self) -> None:
        """Undo what a forward alone has changed; no rank has moved, so nothing was exchanged."""


class RankChannel(Protocol):
    """Comparison of the ranks; all of them call a method alike.

    Attributes:
        noun: what the framework calls parameters.
        remedy: how to make them equal on all ranks.
    """

    noun: str
    remedy: str

    def compare_settings(self, refusal: Exception | None) -> None:
        """Compare what the ranks train, and how.

        Args:
            refusal: error with which this rank refuses to go on; None if it does not.

        Raises:
            MismatchError: on all ranks, if they differ, or some ranks alone refuse.
            Exception: the one with which this rank refuses, if all ranks refuse alike.
        """

    def start_gather(self, row: Sequence[int]) -> Callable[[], dict[int, list[int]]]:
        """Start to gather as many numbers from every rank; return what waits for them, by rank.

        Nothing else is exchanged before that is called.
        """

    def fault(self, number: int, moved: int) -> int:
        """Return a number above 0 if this rank has trained otherwise than the others can.

        Args:
            number: of the fragment that is to be exchanged, or negative for something else.
            moved: steps of this rank that go into the exchange.
        """

    def refuse_faults(self, faults: Mapping[int, int]) -> None:
        """Raise an error, on all ranks, if one of them has a fault; by rank."""


class Counters(Protocol):
    """Counts of steps and rounds: numbers, or variables that a graph reads.

    Attributes:
        steps: local steps so far, skipped ones included.
        clock: steps that the schedule counts.
        rounds: exchanges of the whole model that were applied so far.
        round: that the next local step belongs to, or the last one; of length 0 in the warm-up.
    """

    steps: int
    clock: int
    rounds: int
    round: Round


@dataclass
class RoundCounters:
    """Counters that are numbers; see `Counters`."""

    steps: int = 0
    clock: int = 0
    rounds: int = 0
    round: Round = FIRST


# -- where ranks may be lost -------------------------------------------------------------------


class PendingResult(NamedTuple):
    """Result of an exchange that has ended here, before it is applied.

    Attributes:
        number: of the fragment; `WARMUP` for gradients.
        means: over the ranks; None if it was undone on all of them.
        buffers: their means, if they were exchanged as well.
    """

    number: int
    means: Tensors | None
    buffers: Tensors | None = None


class CommitProtocol(Protocol):
    """Agreement of ranks that may be lost on the results of an exchange; see `ElasticState`."""

    def confirm(self) -> None:
        """Return when all ranks have the result; raise an error if one is lost."""

    def end_step(self) -> None:
        """End a step; raise an error if other ranks are to take part from now on."""


# -- the rounds --------------------------------------------------------------------------------


class LocalRounds:
    """Rounds of one rank.

    A frontend calls `begin`, and after its step `end_local_steps`. In the warm-up it calls
    `warm_step` instead, or `count_warm_step` if it has averaged the gradients itself.

    Args:
        schedule: of the exchanges.
        fragments: of the model.
        ranks: compares the ranks.
        counters: of steps and rounds.
        warmup: averages gradients; None without a warm-up, and if the frontend averages them.
        buffers: averages buffers after the last fragment; None for none.
        clock: says when a round is due, if ranks make different numbers of steps.
        rate: returns the inner optimizer's learning rate; for schedules that follow it.
        evaluating: context in which the model has the parameters that are evaluated, for an inner
            optimizer that trains others; these are exchanged. What the user sets is not seen then.
        replicas: the ranks in sets that have the same parameters; () if all of them do.

    Attributes:
        fragments, counters, warmup: as given.
        agreed: the ranks have compared what they train, and how.
        started: the global parameters have their first values.
        loaded: a state was loaded since the last step, so the ranks compare where they go on.
        commit_protocol: of exchanges, where ranks come and go; None where they do not.
        uncommitted: the result of an exchange that may be applied on no rank or on all.
    """

    def __init__(
        self,
        schedule: LocalSchedule,
        fragments: Sequence[Fragment],
        ranks: RankChannel,
        counters: Counters,
        *,
        warmup: DenseMeans | None = None,
        buffers: DenseMeans | None = None,
        clock: RoundClock | None = None,
        rate: Callable[[], float] | None = None,
        evaluating: Callable[[], AbstractContextManager[None]] | None = None,
        replicas: Sequence[Collection[int]] = (),
    ) -> None:
        if schedule.follows_rate and rate is None:
            raise ValueError(f"{schedule} follows the learning rate of an optimizer: pass it")
        self._rate, self._trains_others = rate, evaluating is not None
        self._evaluating = evaluating or nullcontext
        self._failure: Exception | None = None  # of the function that decides lengths
        self._schedule, self.fragments, self._ranks = schedule, list(fragments), ranks
        self.counters, self.warmup, self._buffers, self._clock = counters, warmup, buffers, clock
        self._replicas = replicas
        self.agreed = self.started = self.loaded = False
        self._compared = False  # the global parameters, since they were set
        self._has_diverged = False
        self.commit_protocol: CommitProtocol | None = None
        self.uncommitted: PendingResult | None = None

    @property
    def warms_up(self) -> bool:
        """Return True if the next step averages gradients."""
        return self._schedule.warms_up(self.counters.clock + 1)

    @property
    def is_exchanged(self) -> bool:
        """Return True if parameters are the global ones; also during warm-up."""
        return not any(fragment.moved or fragment.in_flight for fragment in self.fragments)

    @property
    def other_exchanges(self) -> list[Exchange]:
        """Return the exchanges of something else than fragments."""
        return [means.exchange for means in (self.warmup, self._buffers) if means is not None]

    # -- one step ------------------------------------------------------------------------------

    def begin(self, refusal: Refusal = lambda: None) -> None:
        """Begin a step or an exchange: compare the ranks if need be, and take what the user set.

        Args:
            refusal: returns the error with which this rank refuses to begin, if it does.

        Raises:
            MismatchError: on all ranks, in the first step, if they train different models.
            DivergedError: on all ranks, in the first step and after `restart`, if their global
                parameters differ.
            OutOfStepError: on all ranks, if they go on from different places.
            Exception: that of `refusal`.
        """
        self._start()
        if self._begins_rounds:
            self._set_round(self._round_after(self.counters.clock))
        if not (self.agreed and self._compared):
            self._compare_start(refusal)
        if self.loaded:
            self.loaded = False
            self._compare_loaded()
        for fragment in self.fragments:
            if not (self.warms_up or self._trains_others):
                fragment.take_set()
            fragment.resume()

    def _start(self) -> None:
        """Take what was set before the first step as the first global parameters."""
        if not self.started:
            self.started = True
            with self._evaluating():
                for fragment in self.fragments:
                    fragment.take_set()

    def warm_step(self, may_skip: bool) -> None:
        """Average the gradients, and step the inner optimizer; on all ranks or on none.

        Raises:
            NonFiniteGradientError: on all ranks, if a gradient of one is not finite; not if that
                may be skipped.
        """
        assert self.warmup is not None
        for fragment in self.fragments:
            fragment.before_warm_step()
        self._compare(WARMUP, self.warmup.exchange)
        means = self.warmup.average()
        if means is None and not may_skip:
            step = self.counters.clock + 1
            raise NonFiniteGradientError(f"a gradient of some rank is not finite in step {step}")
        self._confirm(PendingResult(WARMUP, means))
        self._end_step()

    def count_warm_step(self) -> None:
        """Count a step that all ranks have made alike."""
        self._count_step()
        if self.counters.clock == self._schedule.warmup_steps:
            self._take_copies()
            self._set_round(self._round_after(self.counters.clock))
            if not self._schedule.is_constant:
                self._gather(self._state(_ROUND, self.counters.round))

    def end_local_steps(self, steps: int = 1) -> None:
        """Count steps that this rank made alone; exchange what the schedule has for them."""
        for _ in range(steps):
            for fragment in self.fragments:
                fragment.moved += 1
            self._count_step()
            if self._clock is None:
                self._exchange_due()
        if self._clock is not None and self._clock.step(steps):
            self._exchange_all()
        self._end_step()

    def _count_step(self) -> None:
        self.counters.clock += 1
        self.counters.steps += 1

    def _end_step(self) -> None:
        if self.commit_protocol is not None:
            self.commit_protocol.end_step()

    def _exchange_due(self) -> None:
        schedule, step, round_ = self._schedule, self.counters.clock, self.counters.round
        for number in schedule.applies(step, round_):
            if self.fragments[number].in_flight:  # not if exchange() has come between
                self._apply(number)
        if step == round_.begun + round_.length:  # before a rank can be lost in the exchange
            self._set_round(self._round_after(step))
        for number in schedule.sends(step, round_):
            agree = self._start_comparison(number, self.fragments[number].exchange)
            with self._evaluating():
                self.fragments[number].send(agree)
                if not schedule.delay:
                    self._apply(number)

    # -- how long a round is -------------------------------------------------------------------

    @property
    def _begins_rounds(self) -> bool:
        """Return True if there is no warm-up, or a state was loaded, and the first round begins."""
        warm = self.counters.clock < self._schedule.warmup_steps
        return not warm and not self.counters.round.length

    def _round_after(self, step: int) -> Round:
        """Return the round that begins after a step; its length is negative if that has failed."""
        last, rate = self.counters.round, self._current_rate()
        self._failure = None
        try:
            length = self._schedule.length(step, rate, last.rate)
        except Exception as error:  # of the user's function, perhaps on this rank alone
            self._failure = ValueError(f"every= fails after {step} steps: {error!r}")
            self._failure.__cause__ = error
            length = _FAILED
        return Round(step, length, last.length, rate)

    def _current_rate(self) -> float:
        """Return the learning rate that the schedule follows; negative if it follows none."""
        return -1.0 if self._rate is None or not self._schedule.follows_rate else self._rate()

    def _upcoming_round(self) -> Round:
        """Return the round that an exchange on request begins: this one if it has no step yet."""
        now = self.counters.round
        if self.counters.clock == now.begun:
            return now
        return self._round_after(now.begun + now.length)

    def _set_round(self, round_: Round) -> None:
        """Begin a round; with a deadline its clock has restarted."""
        self.counters.round = round_
        if self._clock is not None:
            self._clock.every = round_.length

    def exchange(self, refusal: Refusal = lambda: None) -> None:
        """Exchange all fragments now, at one place on all ranks; see `begin`."""
        self.begin(refusal)
        if self.counters.clock < self._schedule.warmup_steps:
            for fragment in self.fragments:
                fragment.before_warm_step()
            return  # ranks are equal
        while self._clock is not None and not self._clock.meet():
            self._exchange_all()
        self._exchange_all()

    def _exchange_all(self) -> None:
        """Exchange all that some rank has moved, without blending; the schedule begins again."""
        for number, fragment in enumerate(self.fragments):
            if fragment.in_flight:
                self._apply(number)
        upcoming = self._upcoming_round()
        for number, fragment in enumerate(self.fragments):
            states = self._compare(number, fragment.exchange, upcoming).values()
            last = max(states, key=lambda state: state.begun)
            if last.begun > self.counters.round.begun:
                before = self.counters.round.length
                self._set_round(Round(last.begun, last.length, before, self._current_rate()))
            self.counters.clock = last.begun
            with self._evaluating():
                if any(state.moved for state in states):
                    fragment.send(lambda: None)  # they have agreed
                    self._apply(number)
                    fragment.hand_out(0.0)
                else:
                    fragment.after_idle_round()

    def discard_steps(self) -> None:
        """Apply what is in flight, and go back to the global parameters without an exchange."""
        for number, fragment in enumerate(self.fragments):
            if fragment.in_flight:
                self._apply(number)
            with self._evaluating():
                fragment.hand_out(0.0)

    # -- the result of an exchange -------------------------------------------------------------

    def _apply(self, number: int) -> None:
        """End a fragment's exchange, and step the outer optimizer by the result."""
        means, buffers = self.fragments[number].receive(), None
        self.uncommitted = PendingResult(number, means)
        if means is not None and self._is_last(number) and self._buffers is not None:
            buffers = self._buffers.average()
        self._confirm(PendingResult(number, means, buffers))

    def _is_last(self, number: int) -> bool:
        return number == len(self.fragments) - 1

    def _confirm(self, result: PendingResult) -> None:
        """Apply a result, once all ranks have it."""
        self.uncommitted = result
        if self.commit_protocol is not None:
            self.commit_protocol.confirm()
        self.resolve(True)

    def resolve(self, applies: bool) -> None:
        """Apply the uncommitted result, or go back to before its exchange; on all ranks alike.

        Args:
            applies: some rank has applied it, or all ranks have it.
        """
        assert self.uncommitted is not None
        (number, means, buffers), self.uncommitted = self.uncommitted, None
        source = self.warmup if number == WARMUP else self.fragments[number]
        assert source is not None
        if not applies:
            source.exchange.rollback()
            source.exchange.release()
            return
        source.exchange.commit()
        if number == WARMUP:
            self._step_inner(means)
        else:
            self._step_outer(number, means)
        if number != WARMUP or not self.warms_up:  # a warm-up exchanges in each step
            source.exchange.release()
        if buffers is not None:
            assert self._buffers is not None
            self._buffers.apply(buffers)
            self._buffers.exchange.release()

    def _step_inner(self, means: Tensors | None) -> None:
        """Step the inner optimizer by gradients that all ranks have; count also without them."""
        if means is not None:
            assert self.warmup is not None
            self.warmup.apply(means)
            for fragment in self.fragments:
                fragment.after_warm_step()
        self.count_warm_step()

    def _step_outer(self, number: int, means: Tensors | None) -> None:
        """Step the outer optimizer by a fragment's reduced pseudogradients."""
        fragment, blend = self.fragments[number], self._schedule.blend
        if means is None:
            LOGGER.warning(
                "%s of some rank were not finite: all ranks go back to the global ones, "
                "and lose up to %d steps",
                self._ranks.noun,
                max(self.counters.round.length, self.counters.round.before),
            )
            with self._evaluating():
                fragment.hand_out(0.0)
            return
        fragment.step(means)
        assert blend is not None
        with self._evaluating():
            fragment.hand_out(blend)
        if self._is_last(number):
            self.counters.rounds += 1

    # -- comparison of the ranks ---------------------------------------------------------------

    def _compare_start(self, refusal: Refusal) -> None:
        """Compare what the ranks train, and from where; before a step, so an error loses nothing.

        What follows a restart is compared alone: other ranks may not have restarted, and would not
        answer if the settings were gathered.
        """
        if self.counters.clock < self._schedule.warmup_steps:
            for fragment in self.fragments:
                fragment.before_warm_step()
            self.refresh_copies()
        fragments = [fragment.exchange for fragment in self.fragments]
        exchanges = [*fragments, *self.other_exchanges]
        if not self.agreed:
            self._ranks.compare_settings(refusal())
            for exchange in exchanges:
                exchange.agree()
            self.agreed = True
        made = sum(exchange.made for exchange in exchanges)
        digest = sum(fragment.digest() for fragment in self.fragments)
        state = self._state(_FIRST, self.counters.round)._replace(exchanges=made, digest=digest)
        self._gather(state, counts_steps=False)
        self._compared, self._has_diverged = True, False

    def _compare_loaded(self) -> None:
        """Compare where the ranks go on after a load."""
        places = sum(1 << n for n, fragment in enumerate(self.fragments) if fragment.in_flight)
        # With a deadline each rank loads a state after as many steps as it had made.
        place = places if self._clock is None else self.counters.rounds
        state = self._state(_LOADED, self.counters.round)._replace(
            exchanges=place, fault=self._ranks.fault(_LOADED, 0)
        )
        self._gather(state, counts_steps=self._clock is None)

    def _state(self, number: int, round_: Round) -> ExchangeState:
        """Return the state of this rank, without exchanges, digest and fault."""
        clock = self.counters.clock
        return ExchangeState(number, 0, 0, clock, 0, 0, 0, round_.begun, round_.length)

    def _compare(self, number: int, exchange: Exchange, upcoming: Round | None = None) -> States:
        """Compare what the ranks are about to exchange; see `_start_comparison`."""
        return self._start_comparison(number, exchange, upcoming)()

    def _start_comparison(
        self, number: int, exchange: Exchange, upcoming: Round | None = None
    ) -> Callable[[], States]:
        """Start to compare what the ranks are about to exchange; return what ends it.

        So ranks never wait for what others do not send. What is returned waits for the slowest
        rank, so what is done before it is called costs the others no time; it returns the state of
        each rank.

        Args:
            number: of the fragment, or `WARMUP`.
            exchange: that all ranks are about to start.
            upcoming: round that begins after `exchange()`, where ranks may have made different
                numbers of steps; None in a step.

        Raises:
            OutOfStepError: on all ranks, if it is something else.
            DivergedError: on all ranks, if their global parameters differ.
            MismatchError: on all ranks, if they train different models, or their rounds have
                different numbers of steps.
            Exception: of `refuse_faults`, or of the function that decides lengths, on all ranks.
        """
        moved = digest = 0
        if number != WARMUP:
            fragment = self.fragments[number]
            moved, digest = fragment.moved, fragment.digest()
        wait = self._ranks.start_gather(
            self._state(number, upcoming or self.counters.round)._replace(
                explicit=int(upcoming is not None),
                exchanges=exchange.made,
                moved=moved,
                digest=digest,
                fault=self._ranks.fault(number, moved),
            )
        )

        def agree() -> States:
            states = self._compared_states(wait())
            exchange.agree()
            return states

        return agree

    def _gather(self, state: ExchangeState, counts_steps: bool = True) -> States:
        return self._compared_states(self._ranks.start_gather([*state])(), counts_steps)

    def _compared_states(
        self, rows: Mapping[int, Sequence[int]], counts_steps: bool = True
    ) -> States:
        """Return the states that ranks have sent, by rank; raise an error if they differ."""
        states = {rank: ExchangeState(*row) for rank, row in rows.items()}
        if any(state.length < 0 for state in states.values()):
            self._ranks.compare_settings(self._failure)  # raises it, or says whose it is
        if error := out_of_step(states, counts_steps) or different_lengths(states):
            self._ranks.compare_settings(None)  # different settings may be the reason
            raise error
        what = self._ranks.noun, self._ranks.remedy
        if different := diverged(digests_of(states), *what, self._replicas):
            self._has_diverged = True
            raise different
        self._ranks.refuse_faults({rank: state.fault for rank, state in states.items()})
        return states

    # -- what begins anew ----------------------------------------------------------------------

    def _take_copies(self) -> None:
        # What ranks know beyond the precision of the model is equal, unless they have diverged.
        with self._evaluating():
            for fragment in self.fragments:
                fragment.take_copies(keeps_equal=not self._has_diverged)

    def refresh_copies(self) -> None:
        """Let the global parameters follow in the warm-up, in which ranks are equal."""
        if self.counters.clock < self._schedule.warmup_steps:
            self._take_copies()

    def restart(self) -> None:
        """Take this rank's parameters as the global ones; what is in flight or kept is dropped."""
        for fragment in self.fragments:
            fragment.drop()
            fragment.forget()
        self.restart_clock()
        self._take_copies()
        self._compared = False

    def restart_clock(self) -> None:
        """Begin a round of ranks that make different numbers of steps."""
        if self._clock is not None:
            self._clock.restart()

    def pause(self) -> None:
        """Take back what is in flight, before other ranks take part."""
        self._start()
        for fragment in self.fragments:
            fragment.drop()
        for exchange in self.other_exchanges:
            exchange.abort()

    def reconnect(self) -> None:
        """Begin a round among other ranks."""
        self.agreed = self._compared = False
        if self._clock is not None:
            self._clock.reconnect()
