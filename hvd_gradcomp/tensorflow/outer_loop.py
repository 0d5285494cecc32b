"""Outer loop of local steps: global variables, and the outer optimizer that moves them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.algorithms.local_steps import LocalSchedule, OuterSGD
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.exchange_state import States
from hvd_gradcomp.tensorflow.averaging import BufferAverage
from hvd_gradcomp.tensorflow.exchange_check import ExchangeCheck
from hvd_gradcomp.tensorflow.fragments import Fragment, RoundCounters
from hvd_gradcomp.tensorflow.reducer import LOGGER

_NOTHING, _MEANS, _NOT_FINITE = range(3)  # what is on its way, of a fragment


class OuterLoop:
    """Exchanges of pseudogradients, and the outer steps by what they give.

    All ranks call the same; before an exchange they compare that they are about to.

    Args:
        fragments: of the model.
        buffers: averaged after the last fragment; None for none.
        outer: settings of the outer optimizer.
        rate: its learning rate, a variable.
        counters: of the rounds.
        schedule: of the exchanges.
        check: of what the ranks are about to exchange.

    Attributes:
        fragments, buffers: as given.
        seconds_waited: in exchanges, compressing included.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        buffers: BufferAverage | None,
        outer: OuterSGD,
        rate: tf.Variable,
        counters: RoundCounters,
        schedule: LocalSchedule,
        check: ExchangeCheck,
    ) -> None:
        self.fragments, self.buffers = list(fragments), buffers
        self._outer, self._rate = outer, rate
        self._counters, self._schedule, self._check = counters, schedule, check
        self.seconds_waited = 0.0

    @property
    def is_handed_out(self) -> bool:
        """Return True if this rank's variables are the global ones."""
        return all(fragment.is_handed_out() for fragment in self.fragments)

    def take_copies(self, keeps_equal: bool = False) -> None:
        """Set the global variables to those of this rank; see `Fragment.take_copies`."""
        for fragment in self.fragments:
            fragment.take_copies(keeps_equal)
        self._counters.moved.assign(tf.zeros_like(self._counters.moved))

    def restart(self) -> None:
        """Drop what is on its way, and take over what was set of this rank's variables."""
        self._counters.sent.assign(tf.zeros_like(self._counters.sent))
        # What ranks know beyond the precision of the model is equal, unless they have diverged.
        self.take_copies(keeps_equal=not self._check.has_diverged)
        self._check.compare_anew()

    def begin_anew(self) -> None:
        """Apply what is on its way, and set this rank's variables to the global ones."""
        for number in range(len(self.fragments)):
            self._apply_sent(number)
            self._hand_out(number)

    def begin(self, warms_up: bool = False) -> None:
        """Compare with the other ranks before the first step; see `ExchangeCheck.begin`."""
        self._check.begin(self.fragments, warms_up)

    def were_set(self) -> bool:
        """Return True if variables of some rank were set between two steps; all ranks ask."""
        done = self._counters.is_exchanged
        return self._check.were_set(done and not self.is_handed_out, done)

    def exchange_due(self, step: int) -> None:
        """Exchange and apply what the schedule has for a step."""
        for number in self._schedule.applies(step) if self._schedule.delay else ():
            self._apply_sent(number)
        for number in self._schedule.sends(step):
            self._compare(number, asked=False)
            means = self._reduce(number)
            if self._schedule.delay:
                self._mark_sent(number, _NOT_FINITE if means is None else _MEANS)
                self.fragments[number].keep_means(means or ())
            else:
                self._apply(number, means)

    def exchange_all(self) -> None:
        """Exchange all that some rank has moved, without blending; the schedule begins again."""
        numbers, most = range(len(self.fragments)), 0
        for number in numbers:
            self._apply_sent(number)
        for number in numbers:
            states = self._compare(number, asked=True).values()
            most = max(state.clock for state in states)
            if any(state.moved for state in states):
                self._apply(number, self._reduce(number))
                self._hand_out(number)
        every, warm = self._schedule.every, self._schedule.warmup_steps
        if most > warm:
            self._counters.clock.assign(warm + -(-(most - warm) // every) * every)

    def _compare(self, number: int, asked: bool) -> States:
        self.begin()
        return self._check.compare(number, self.fragments[number], asked)

    def _hand_out(self, number: int, blend: float = 0.0) -> None:
        """Set this rank's variables to the global ones of a fragment, blended with its own."""
        self.fragments[number].hand_out(blend)
        if not blend:
            self._counters.moved.scatter_nd_update([[number]], [0])

    def _apply_sent(self, number: int) -> None:
        """Apply what is on its way, if there is something."""
        sent = int(self._counters.sent[number])
        if sent != _NOTHING:
            self._mark_sent(number, _NOTHING)
            means = [m.read_value() for m in self.fragments[number].means]
            self._apply(number, means if sent == _MEANS else None)

    def _mark_sent(self, number: int, what: int) -> None:
        self._counters.sent.scatter_nd_update([[number]], [what])

    def _reduce(self, number: int) -> list[Any] | None:
        """Reduce a fragment's pseudogradients; None if those of some rank are not finite."""
        fragment = self.fragments[number]
        begin = time.perf_counter()
        try:
            means = fragment.reducer.reduce(fragment.pseudogradients())
        except NonFiniteGradientError as error:
            made = int(self._counters.steps)
            raise NonFiniteGradientError(
                f"variables of some rank are not finite at the exchange after {made} local steps. "
                "Look for what made them so; with nonfinite='skip' all ranks go back to the global "
                "variables"
            ) from error
        finally:
            self.seconds_waited += time.perf_counter() - begin
        return means if bool(fragment.reducer.finite) else None

    def _apply(self, number: int, means: Sequence[Any] | None) -> None:
        """Step the outer optimizer by a fragment's reduced pseudogradients."""
        if means is None:
            LOGGER.warning(
                "variables of some rank were not finite: all ranks go back to the global ones, "
                "and lose up to %d steps",
                self._schedule.every,
            )
            self._hand_out(number)
            return
        self.fragments[number].step(means, self._outer, self._rate)
        blend = self._schedule.blend
        assert blend is not None
        self._hand_out(number, blend)
        if number == len(self.fragments) - 1:
            self._counters.rounds.assign_add(1)
            if self.buffers is not None:
                self.buffers.average()
