"""Rounds of local steps: what a rank sends and applies when, and what it has left to apply."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hvd_gradcomp.algorithms.local_steps import LocalSchedule
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.round_clock import RoundClock
from hvd_gradcomp.torch.bucket import Named
from hvd_gradcomp.torch.local.averaging import BufferMeans, mean_exchange
from hvd_gradcomp.torch.local.comparison import ExchangeComparison, Refusal
from hvd_gradcomp.torch.local.fragment import Connect, Fragment, common, make_fragments
from hvd_gradcomp.torch.local.outer import OuterOptimizer
from hvd_gradcomp.torch.local.progress import Progress
from hvd_gradcomp.torch.options import ExchangeOptions
from hvd_gradcomp.torch.tensor_exchange import RankSync, TensorExchange
from hvd_gradcomp.torch.warmup import WarmUp
from hvd_gradcomp.torch.wrapped_optimizer import device_of

LOGGER = logging.getLogger("hvd_gradcomp")
WARMUP, _LOADED, _FIRST = -1, -2, -3  # in the place of a fragment


class PendingResult(NamedTuple):
    """Result of an exchange that has ended here, before it is applied.

    Attributes:
        number: of the fragment; `WARMUP` for gradients.
        means: over the ranks; None if it was undone on all of them.
        buffers: their means, if they were exchanged as well.
    """

    number: int
    means: list[torch.Tensor] | None
    buffers: list[torch.Tensor] | None = None


class CommitProtocol(Protocol):
    """Agreement of ranks that may be lost on what they have exchanged; see `ElasticState`."""

    def confirm(self) -> None:
        """Return when all ranks have what was exchanged; raise an error if one is lost."""

    def end_step(self) -> None:
        """End a step; raise an error if other ranks are to take part from now on."""


class Rounds:
    """Rounds of one rank.

    Args:
        schedule: of the exchanges.
        fragments: of the model.
        outer: moves the global parameters.
        comparison: of what the ranks are about to exchange.
        names: of the parameters, for checkpoints.
        warmup: averages gradients; None without a warm-up.
        buffers: averages buffers after the last fragment; None for none.
        clock: says when a round is due, if ranks make different numbers of steps.

    Attributes:
        fragments: as given.
        progress: steps and rounds so far.
        warmup: as given.
        commit_protocol: of exchanges, where ranks come and go; None where they do not.
        uncommitted: what has been exchanged, and may be applied on no rank or on all.
    """

    def __init__(
        self,
        schedule: LocalSchedule,
        fragments: Sequence[Fragment],
        outer: OuterOptimizer,
        comparison: ExchangeComparison,
        names: list[str],
        *,
        warmup: WarmUp | None = None,
        buffers: BufferMeans | None = None,
        clock: RoundClock | None = None,
    ) -> None:
        self._schedule, self.fragments, self._outer = schedule, fragments, outer
        self._comparison, self._names = comparison, names
        self.warmup, self._buffers, self._clock = warmup, buffers, clock
        self.progress = Progress(schedule)
        self._compared = False  # since these ranks take part
        self.commit_protocol: CommitProtocol | None = None
        self.uncommitted: PendingResult | None = None

    # -- one step ------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_step(self, refusal: Refusal) -> None:
        """Take what the user has set since the last step.

        Args:
            refusal: returns the error with which this rank refuses to begin, if it does.
        """
        self._start()
        if not self._compared:
            if self.progress.clock < self._schedule.warmup_steps:
                self._align_tables()
                self._take_copies()  # ranks are equal, and step no copies
            digests = [fragment.digest() for fragment in self.fragments]
            self._comparison.compare_start(_FIRST, digests, self._all_exchanges, refusal)
            self._compared = True
        if self.progress.loaded:
            self.progress.loaded = False
            self._comparison.compare_loaded(_LOADED, self.progress.clock, self._loaded())
        for fragment in self.fragments:
            if not self.progress.warms_up:
                fragment.take_set()
            fragment.resume()

    def _start(self) -> None:
        """Take what was set before the first step as the first global parameters."""
        if not self.progress.started:
            self.progress.started = True
            for fragment in self.fragments:
                fragment.take_set()

    def _take_copies(self) -> None:
        for fragment in self.fragments:
            fragment.take_copies()

    def _align_tables(self) -> None:
        for fragment in self.fragments:
            fragment.align_tables()

    def _loaded(self) -> int:
        """Return what must be equal on ranks that have loaded a state."""
        if self._clock is not None:
            return self.progress.rounds
        return sum(1 << number for number, x in enumerate(self.fragments) if x.sent is not None)

    def warm_step(self, may_skip: bool) -> None:
        """Average the gradients, and step the inner optimizer; on all ranks or on none.

        Raises:
            NonFiniteGradientError: on all ranks, if a gradient of one is not finite; not if that
                may be skipped.
        """
        assert self.warmup is not None
        progress = self.progress
        self._align_tables()
        self._comparison.compare(WARMUP, progress.clock, self.warmup.exchange)
        means = self.warmup.average()
        if means is None and not may_skip:
            raise NonFiniteGradientError(
                f"a gradient of some rank is not finite in step {progress.clock + 1}"
            )
        self._confirm(PendingResult(WARMUP, means))
        self._end_step()

    def end_local_step(self) -> None:
        """Count a step that this rank made alone; exchange what the schedule says."""
        for fragment in self.fragments:
            fragment.moved = True
        progress, schedule = self.progress, self._schedule
        progress.count_step()
        if self._clock is not None:
            if self._clock.step():
                self._exchange()
            return
        for number in schedule.applies(progress.clock):
            if self.fragments[number].sent is not None:  # not where exchange() has come between
                self._apply(number)
        for number in schedule.sends(progress.clock):
            fragment = self.fragments[number]
            self._comparison.compare(number, progress.clock, fragment.exchange, fragment=fragment)
            fragment.send()
            if not schedule.delay:
                self._apply(number)
        self._end_step()

    def _end_step(self) -> None:
        if self.commit_protocol is not None:
            self.commit_protocol.end_step()

    @torch.no_grad()
    def exchange(self, refusal: Refusal) -> None:
        """Exchange all fragments now, at one place on all ranks; see `begin_step`."""
        self.begin_step(refusal)
        if self.progress.clock < self._schedule.warmup_steps:
            self._align_tables()
            return  # ranks are equal
        while self._clock is not None and not self._clock.meet():
            self._exchange()
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for number, fragment in enumerate(self.fragments):
            if fragment.sent is not None:
                self._apply(number)
        clock = self.progress.clock
        clocks = [clock]
        for number, fragment in enumerate(self.fragments):
            states = self._comparison.compare(
                number, clock, fragment.exchange, asked=True, fragment=fragment
            ).values()
            clocks = [state.clock for state in states]
            if any(state.moved for state in states):
                fragment.send()
                self._apply(number)
            fragment.hand_out(0.0)
        self.progress.begin_round(clocks)

    # -- what an exchange gave -----------------------------------------------------------------

    @torch.no_grad()
    def _apply(self, number: int) -> None:
        """End a fragment's exchange, and step the outer optimizer by what it gave."""
        means = self.fragments[number].receive()
        self.uncommitted = PendingResult(number, means)
        if means is not None and self._is_last(number) and self._buffers is not None:
            self.uncommitted = PendingResult(number, means, self._buffers.average())
        self._confirm(self.uncommitted)

    def _is_last(self, number: int) -> bool:
        return number == len(self.fragments) - 1

    def _confirm(self, exchanged: PendingResult) -> None:
        """Apply what was exchanged, once all ranks have it."""
        self.uncommitted = exchanged
        if self.commit_protocol is not None:
            self.commit_protocol.confirm()
        self.resolve(True)

    def resolve(self, applies: bool) -> None:
        """Apply what is uncommitted, or go back to before its exchange; on all ranks alike.

        Args:
            applies: some rank has applied it, or all ranks have it.
        """
        assert self.uncommitted is not None
        (number, means, buffers), self.uncommitted = self.uncommitted, None
        reducer = self._exchange_of(number).reducer
        if not applies:
            reducer.rollback()
            return
        reducer.commit()
        if number == WARMUP:
            self._step_alike(means)
        else:
            self._step_outer(number, means)
        if buffers is not None:
            assert self._buffers is not None
            self._buffers.apply(buffers)

    def _exchange_of(self, number: int) -> TensorExchange:
        if number != WARMUP:
            return self.fragments[number].exchange
        assert self.warmup is not None
        return self.warmup.exchange

    def _step_alike(self, means: list[torch.Tensor] | None) -> None:
        """Step the inner optimizer by gradients that all ranks have; count also without them."""
        if means is not None:
            assert self.warmup is not None
            self.warmup.step(means)
            for fragment in self.fragments:
                fragment.take_tables()
        self.progress.count_step()
        if self.progress.clock == self._schedule.warmup_steps:
            self._take_copies()

    @torch.no_grad()
    def _step_outer(self, number: int, means: list[torch.Tensor] | None) -> None:
        """Step the outer optimizer by a fragment's reduced pseudogradients."""
        fragment, schedule = self.fragments[number], self._schedule
        if means is None:
            LOGGER.warning(
                "parameters of some rank were not finite: all ranks go back to the global ones, "
                "and lose up to %d steps",
                schedule.every,
            )
            fragment.hand_out(0.0)
            return
        self._outer.step(fragment, means)
        assert schedule.blend is not None
        fragment.hand_out(schedule.blend)
        if self._is_last(number):
            self.progress.rounds += 1

    # -- what begins anew ----------------------------------------------------------------------

    @property
    def _all_exchanges(self) -> list[TensorExchange]:
        return [*(fragment.exchange for fragment in self.fragments), *self.other_exchanges]

    @property
    def other_exchanges(self) -> list[TensorExchange]:
        """Return the exchanges of something else than fragments."""
        return [x.exchange for x in (self.warmup, self._buffers) if x is not None]

    def restart(self) -> None:
        """Take this rank's parameters as the global ones; what travels is dropped."""
        for fragment in self.fragments:
            fragment.drop()
        if self._clock is not None:
            self._clock.restart()
        self._take_copies()

    def pause(self) -> None:
        """Take back what travels, before other ranks take part."""
        self._start()
        for fragment in self.fragments:
            fragment.drop()
        for exchange in self.other_exchanges:
            exchange.abort()

    def reconnect(self) -> None:
        """Begin a round among other ranks."""
        self._compared = False
        if self._clock is not None:
            self._clock.reconnect()

    # -- checkpoints ---------------------------------------------------------------------------

    def save(self, mode: str) -> dict[str, Any]:
        """Return the state of the rounds; with mode="consolidated" for any number of ranks."""
        fragments = [fragment.save(mode) for fragment in self.fragments]
        return {
            "schedule": repr(self._schedule),
            "mode": mode,
            "names": self._names,
            **self.progress.save(),
            "outer": self._outer.state_dict(),
            "fragments": fragments,
            "warmup": None if self.warmup is None else self.warmup.exchange.save(mode),
            "buffers": None if self._buffers is None else self._buffers.exchange.save(mode),
        }

    def save_common(self) -> dict[str, Any]:
        """Return the state that all ranks may go on from: with the global parameters."""
        if self.progress.clock < self._schedule.warmup_steps:  # ranks are equal, and step no copies
            self._take_copies()
        saved = self.save("sharded")
        return {**saved, "fragments": [common(each) for each in saved["fragments"]]}

    def check_fits(self, saved: Any) -> None:
        """Check that a state was saved with this schedule, and these parameters.

        Raises:
            CheckpointError: it was not.
        """
        expected = {"schedule": repr(self._schedule), "names": self._names}
        for what, value in expected.items():
            found = saved.get(what) if isinstance(saved, dict) else saved
            if found != value:
                raise CheckpointError(
                    f"the state was saved with another {what}: {found}, and here it is {value}"
                )

    def load_exchanges(self, saved: dict[str, Any]) -> None:
        """Load what the compressors keep.

        Raises:
            CheckpointError: it is of another compressor or number of ranks.
        """
        for fragment, each in zip(self.fragments, saved["fragments"]):
            fragment.exchange.load(each["exchange"])
        for part, name in ((self.warmup, "warmup"), (self._buffers, "buffers")):
            if part is not None and saved[name] is not None:
                part.exchange.load(saved[name])

    def load(self, saved: dict[str, Any]) -> None:
        """Load a state of `save`, but what the compressors keep."""
        self._outer.load_state_dict(saved["outer"])
        for fragment, each in zip(self.fragments, saved["fragments"]):
            fragment.load(each, saved["started"])
        if self._clock is not None:
            self._clock.restart()
        self.progress.load(saved)


def make_rounds(
    inner: torch.optim.Optimizer,
    named: Named,
    connect: Connect,
    schedule: LocalSchedule,
    outer: OuterOptimizer,
    options: ExchangeOptions,
    settings: str,
    buffers: Sequence[tuple[str, torch.Tensor]],
    clock: RoundClock | None,
) -> Rounds:
    """Connect the ranks for all exchanges of a model; all of them call it.

    Args:
        inner: the inner optimizer.
        named: (name, parameter) of all that it trains.
        connect: returns the connection of each exchange.
        schedule: of the exchanges.
        outer: moves the global parameters.
        options: of the exchange of pseudogradients.
        settings: that must be equal on all ranks.
        buffers: (name, buffer) of those that are averaged.
        clock: see `Rounds`.
    """
    sync, parameters = RankSync(connect("sync"), device_of(named)), [p for _, p in named]
    fragments = make_fragments(
        named, outer.copies, schedule.fragments, outer.compressor, connect, options, settings
    )
    warmup = None
    if schedule.warmup_steps:
        warmup = WarmUp(inner, parameters, mean_exchange(named, connect, "warmup"))
    return Rounds(
        schedule,
        fragments,
        outer,
        ExchangeComparison(sync, settings, inner, parameters, counts_steps=clock is None),
        [name for name, _ in named],
        warmup=warmup,
        buffers=BufferMeans(buffers, connect) if buffers else None,
        clock=clock,
    )
