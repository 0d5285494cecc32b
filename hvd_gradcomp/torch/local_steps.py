"""`LocalSteps`: an optimizer that steps alone, and exchanges the change of parameters now and then.

See `algorithms.local_steps` for the method and its sources. The inner optimizer, its options,
schedulers and hooks are the user's own. The global parameters are copies; the outer optimizer is a
plain one over them, whose gradients are the reduced pseudogradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.algorithms.local_steps import LocalSchedule, OuterSGD, check_deadline, cut
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.exchange_state import ExchangeState, States, diverged, out_of_step
from hvd_gradcomp.runtime.round_clock import RoundClock
from hvd_gradcomp.torch.momentum import MomentumTransfer, resolve_compressor
from hvd_gradcomp.torch.options import ExchangeOptions
from hvd_gradcomp.torch.reducer import sum_of_bits
from hvd_gradcomp.torch.round_clock import TensorProgressGather
from hvd_gradcomp.torch.tensor_exchange import Connection, RankSync, TensorExchange
from hvd_gradcomp.torch.wrapped_optimizer import (
    KEPT,
    WrappedOptimizer,
    dense_gradient,
    device_of,
    named_of,
    refuse_thawed,
)

LOGGER = logging.getLogger("hvd_gradcomp")
_PRIME = 2**31 - 1
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # dtypes of global copies

Outer = Any  # OuterSGD, or a function that makes an optimizer from a list of parameters


@dataclass
class Fragment:
    """Parameters that are exchanged together.

    Attributes:
        parameters: of the model.
        copies: the global parameters, in float32 if the model's are narrower.
        exchange: of the pseudogradients.
        sent: pseudogradients that travel; None if none do.
        versions: of the model's parameters since the global ones were applied; None after a step.
        moved: this rank's parameters are not the global ones.
    """

    parameters: list[torch.nn.Parameter]
    copies: list[torch.nn.Parameter]
    exchange: TensorExchange
    sent: list[torch.Tensor] | None = None
    versions: list[int] | None = None
    moved: bool = False

    def pseudogradients(self) -> list[torch.Tensor]:
        """Return the global parameters minus those of this rank; zeros where nothing trains.

        In the model's precision, with which the ranks began: what only the copies can express is
        not taken back.
        """
        return [
            c.detach().to(p.dtype).to(c.dtype) - p.detach()
            if p.requires_grad
            else torch.zeros_like(c)
            for c, p in zip(self.copies, self.parameters)
        ]

    def take_copies(self) -> None:
        """Set the global parameters to those of this rank."""
        for c, p in zip(self.copies, self.parameters):
            c.copy_(p)

    def hand_out(self, blend: float) -> None:
        """Set this rank's parameters to the global ones, blended with its own."""
        for c, p in zip(self.copies, self.parameters):
            if blend:
                p.copy_(blend * p + (1.0 - blend) * c)
            else:
                p.copy_(c)
        self.moved = bool(blend)
        self.versions = None if blend else [p._version for p in self.parameters]

    def follow_changes(self) -> None:
        """Take parameters that were set since the global ones were applied, by a load say."""
        if self.versions is not None and self.versions != [p._version for p in self.parameters]:
            self.take_copies()
        self.versions = None

    def digest(self) -> int:
        """Return a checksum of the global parameters."""
        return int(sum(sum_of_bits(c) % _PRIME for c in self.copies)) % _PRIME


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


class LocalStepsOptimizer(WrappedOptimizer):
    """Optimizer that steps alone, and exchanges pseudogradients; `LocalSteps` makes it.

    Args:
        optimizer: the inner one.
        named_parameters: (name, parameter) of all that it trains; by place if None.
        connect: returns the connection of one exchange, by its name; all ranks call it alike.
        schedule: of the exchanges.
        outer: the outer optimizer, or what makes it from a list of the global parameters.
        compression: of the pseudogradients, as in `DistributedOptimizer`.
        stock: Horovod's `Compression`, if there is Horovod.
        named_buffers: buffers whose mean over ranks is taken with the last fragment.
        bucket_bytes, nonfinite: as in `DistributedOptimizer`.
        deadline: seconds that ranks go on for those that have made fewer steps; None to exchange
            after as many steps on all of them.
        connect_clock: as `connect`, where nothing else travels; needed with a deadline.

    Attributes:
        schedule: of the exchanges.
        outer: the outer optimizer, over the global parameters; a scheduler of its own may drive it.
        steps_made: local steps so far, skipped ones included.
        rounds: exchanges of the whole model that were applied so far.
        commit_protocol: of exchanges, where ranks come and go; None where they do not.
        uncommitted: what has been exchanged, and may be applied on no rank or on all.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        connect: Callable[[str], Connection],
        schedule: LocalSchedule,
        outer: Outer,
        compression: Any,
        *,
        stock: Any = None,
        named_buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
        bucket_bytes: int | None = None,
        nonfinite: str | None = None,
        deadline: float | None = None,
        connect_clock: Callable[[], Connection] | None = None,
    ) -> None:
        super().__init__(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS) and schedule.warmup_steps:
            raise ValueError(
                "warmup_steps= averages the gradients of a step once, and LBFGS computes them many "
                "times: use warmup_steps=0"
            )
        if nonfinite not in (None, "raise", "skip"):
            raise ValueError(
                f"nonfinite must be 'raise', 'skip' or None, got {nonfinite!r}: there is no "
                "mean of parameters that are not finite"
            )
        check_deadline(deadline, schedule)
        self.schedule, self.deadline = schedule, deadline
        named = named_of(optimizer, named_parameters)
        self._skips = nonfinite == "skip"
        options = ExchangeOptions(bucket_bytes=bucket_bytes, nonfinite=nonfinite, scaler=False)
        copies = [torch.nn.Parameter(_wide(p)) for _, p in named]
        self.outer = _outer_of(outer, copies)
        compressor, own = resolve_compressor(compression, self.outer, stock)
        self._transfer = None if own is None else MomentumTransfer(self.outer, *own)
        self._settings = settings = (
            f"{schedule}, outer={_described(self.outer)}, {nonfinite=}, {bucket_bytes=}"
        )
        if deadline is not None:
            self._settings = settings = f"{settings}, {deadline=}"
        self._sync = RankSync(connect("sync"), device_of(named))
        self._fragments: list[Fragment] = []
        for number, places in enumerate(cut([p.numel() for _, p in named], schedule.fragments)):
            own_named = [named[place] for place in places]
            held = [copies[place] for place in places]
            exchange = TensorExchange(
                [(name, c) for (name, _), c in zip(own_named, held)],
                own_named,
                compressor,
                connect(f"local{number}"),
                options,
                settings,
            )
            self._fragments.append(Fragment([p for _, p in own_named], held, exchange))
        self._warmup = self._averaging(named, connect, "warmup") if schedule.warmup_steps else None
        buffers = [(n, b) for n, b in named_buffers or () if b.is_floating_point()]
        self._buffers = [b for _, b in buffers]
        self._averager = self._averaging(buffers, connect, "buffers") if buffers else None
        self._round_clock = None
        if deadline is not None:
            assert connect_clock is not None
            gather = TensorProgressGather(connect_clock(), device_of(named))
            self._round_clock = RoundClock(gather, schedule.every, deadline)
        self._names = [name for name, _ in named]
        self.steps_made = self.rounds = self._clock = 0
        self._started = self._loaded = False
        self.commit_protocol: CommitProtocol | None = None
        self.uncommitted: PendingResult | None = None

    @staticmethod
    def _averaging(named: Any, connect: Callable[[str], Connection], name: str) -> TensorExchange:
        """Return an exchange of dense means; what is not finite counts as skipped."""
        shapes = [(n, torch.nn.Parameter(_wide(x))) for n, x in named]
        options = ExchangeOptions(nonfinite="skip", scaler=False)
        return TensorExchange(shapes, shapes, NoneCompressor(), connect(name), options, name)

    def __repr__(self) -> str:
        return f"LocalSteps({self.schedule}, {self.inner!r})"

    # -- one step ------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer; exchange where the schedule says so.

        Raises:
            OutOfStepError: on all ranks, if they have made different numbers of steps.
            DivergedError: on all ranks, if their global parameters differ.
            MismatchError: on all ranks, in the first exchange, if they train different models.
            NonFiniteGradientError: on all ranks, if the parameters of one of them are not finite;
                with nonfinite="skip" all ranks go back to the global parameters instead.
        """
        self._begin()
        step = self._clock + 1
        found_inf = self.unscale()
        if self._warmup is not None and self.schedule.warms_up(step):
            loss = self._warm_step(self._warmup, closure, found_inf)
            self._end_step()
            return loss
        loss = None if found_inf else self.inner.step(closure)
        for fragment in self._fragments:
            fragment.moved = True
        self._clock, self.steps_made = step, self.steps_made + 1
        if self._round_clock is not None:
            if self._round_clock.step():
                self._exchange()
            return loss
        for number in self.schedule.applies(step):
            if self._fragments[number].sent is not None:  # not where exchange() has come between
                self._apply(number)
        for number in self.schedule.sends(step):
            fragment = self._fragments[number]
            self._compare(fragment.exchange, number, False, fragment)
            self._send(fragment)
            if not self.schedule.delay:
                self._apply(number)
        self._end_step()
        return loss

    def _end_step(self) -> None:
        if self.commit_protocol is not None:
            self.commit_protocol.end_step()

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange now, whatever the schedule says: at the end of a training, or of an epoch.

        All ranks call it at the same place, also if they have made different numbers of steps
        since the last exchange. What travels is applied first. Afterwards all ranks have the
        global parameters, and the schedule begins again. Without a step since the last exchange on
        any rank nothing is sent: the outer momentum would go on alone.

        Raises:
            OutOfStepError: on all ranks, if others are in the exchange of a step; with a deadline
                it waits for them instead.
        """
        self._begin()
        if self._clock < self.schedule.warmup_steps:
            return  # ranks are equal
        while self._round_clock is not None and not self._round_clock.meet():
            self._exchange()
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange all fragments, at one place on all ranks."""
        for number, fragment in enumerate(self._fragments):
            if fragment.sent is not None:
                self._apply(number)
        clocks = [self._clock]
        for number, fragment in enumerate(self._fragments):
            states = self._compare(fragment.exchange, number, True, fragment).values()
            clocks = [state.clock for state in states]
            if any(state.moved for state in states):
                self._send(fragment)
                self._apply(number)
            fragment.hand_out(0.0)
        every, warm = self.schedule.every, self.schedule.warmup_steps
        self._clock = warm + (max(clocks) - warm + every - 1) // every * every

    @torch.no_grad()
    def restart(self) -> None:
        """Take this rank's parameters as the global ones, after they were set in mid-training.

        All ranks call it, with equal parameters: the next exchange compares them. What travels is
        dropped. Not needed before the first step, nor directly after an exchange without `blend`.
        """
        for fragment in self._fragments:
            fragment.exchange.abort()
            fragment.sent = None
        if self._round_clock is not None:
            self._round_clock.restart()
        self._take_copies()

    def pause(self) -> None:
        """Take back what travels, before other ranks take part: it is sent with the next exchange.

        Nothing of the local steps is lost.
        """
        if not self._started:
            self._started = True
            self._take_copies()
        for fragment in self._fragments:
            fragment.sent = None
        for some in self.exchanges:
            for exchange in some:
                exchange.abort()

    def take_over(self, state_dict: dict[str, Any]) -> None:
        """Go on from the `common_state_dict` of a rank, among others that need not load it.

        Raises:
            CheckpointError: it is of another model or schedule.
        """
        self._check_fits(state_dict[KEPT])
        self.load_inner(state_dict)
        self.load_rounds(state_dict)
        self._loaded = False

    @torch.no_grad()
    def _take_copies(self) -> None:
        for fragment in self._fragments:
            fragment.take_copies()
            fragment.versions = None

    @torch.no_grad()
    def _begin(self) -> None:
        """Take what the user has set since the last step."""
        if not self._started:
            self._started = True
            self._take_copies()
        if self._loaded:
            self._loaded = False
            self._compare(None, _LOADED, False)
        for fragment in self._fragments:
            fragment.follow_changes()
            if fragment.sent is not None and not fragment.exchange.started:  # it was loaded
                fragment.exchange.start(fragment.sent)

    def _warm_step(
        self, warmup: TensorExchange, closure: Callable[[], Any] | None, found_inf: bool
    ) -> Any:
        """Average the gradients, then step the inner optimizer; on all ranks or on none."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [p for fragment in self._fragments for p in fragment.parameters]
        self._compare(warmup, WARMUP, False)
        with torch.no_grad():
            warmup.start([dense_gradient(p) for p in parameters])
            means = warmup.finish()
        if means is None and not (found_inf or self.scaled or self._skips):
            raise NonFiniteGradientError(
                f"a gradient of some rank is not finite in step {self._clock + 1}"
            )
        self._confirm(PendingResult(WARMUP, means))
        return loss

    def _step_alike(self, means: list[torch.Tensor] | None) -> None:
        """Step the inner optimizer by gradients that all ranks have; count also without them."""
        parameters = [p for fragment in self._fragments for p in fragment.parameters]
        if means is not None:
            for p, mean in zip(parameters, means):
                if p.requires_grad:
                    p.grad = mean.to(p.dtype, copy=True)
            self.inner.step()
        self._clock, self.steps_made = self._clock + 1, self.steps_made + 1
        if self._clock == self.schedule.warmup_steps:
            self._take_copies()

    @torch.no_grad()
    def _send(self, fragment: Fragment) -> None:
        """Send a fragment's pseudogradients."""
        fragment.sent = fragment.pseudogradients()
        fragment.exchange.start(fragment.sent)

    @torch.no_grad()
    def _apply(self, number: int) -> None:
        """End a fragment's exchange, and step the outer optimizer by what it gave."""
        fragment = self._fragments[number]
        fragment.sent = None
        means = fragment.exchange.finish()
        self.uncommitted = PendingResult(number, means)
        if means is not None and number == len(self._fragments) - 1 and self._averager is not None:
            self._averager.start(self._buffers)
            self.uncommitted = PendingResult(number, means, self._averager.finish())
        self._confirm(self.uncommitted)

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
        exchange = self._warmup if number == WARMUP else self._fragments[number].exchange
        assert exchange is not None
        if not applies:
            exchange.reducer.discard()
            return
        exchange.reducer.commit()
        if number == WARMUP:
            self._step_alike(means)
        else:
            self._step_outer(number, means)
        for buffer, mean in zip(self._buffers, buffers or ()):
            buffer.detach().copy_(mean)

    @torch.no_grad()
    def _step_outer(self, number: int, means: list[torch.Tensor] | None) -> None:
        """Step the outer optimizer by a fragment's reduced pseudogradients."""
        fragment = self._fragments[number]
        if means is None:
            LOGGER.warning(
                "parameters of some rank were not finite: all ranks go back to the global ones, "
                "and lose up to %d steps",
                self.schedule.every,
            )
            fragment.hand_out(0.0)
            return
        for c, p, mean in zip(fragment.copies, fragment.parameters, means):
            c.grad = mean if p.requires_grad else None
        if self._transfer is not None:
            self._transfer.check()
            self._transfer.decay()
        with torch.enable_grad():
            self.outer.step()
        for c in fragment.copies:
            c.grad = None
        blend = self.schedule.blend
        assert blend is not None
        fragment.hand_out(blend)
        if number == len(self._fragments) - 1:
            self.rounds += 1

    def _compare(
        self,
        exchange: TensorExchange | None,
        what: int,
        asked: bool,
        fragment: Fragment | None = None,
    ) -> States:
        """Compare what the ranks are about to exchange; return the state of each.

        Raises:
            OutOfStepError: on all ranks, if it is something else.
            DivergedError: on all ranks, if their global parameters differ.
        """
        travels = sum(1 << n for n, each in enumerate(self._fragments) if each.sent is not None)
        loaded = travels if self._round_clock is None else self.rounds
        own = ExchangeState(
            what,
            asked,
            loaded if exchange is None else exchange.reducer.steps,
            self._clock,
            0 if fragment is None else int(fragment.moved),
            0 if fragment is None else fragment.digest(),
            fault=self.thawed({p for each in self._fragments for p in each.parameters}),
        )
        words = self._sync.gather([*map(int, own)])
        every = {rank: ExchangeState(*said) for rank, said in words.items()}
        # With a deadline each rank loads a state after as many steps as it had made.
        counted = exchange is not None or self._round_clock is None
        if error := out_of_step(every, counted):
            self._sync.compare_settings(self._settings)
            raise error
        remedy = "Give all ranks the same parameters at first, by broadcast_parameters or a seed"
        if different := diverged(every, "parameters", remedy):
            raise different
        refuse_thawed({rank: state.fault for rank, state in every.items()})
        if exchange is not None:
            exchange.agree()
        return every

    # -- what it keeps, and what it has done ---------------------------------------------------

    def compare_again(self) -> None:
        super().compare_again()
        if self._round_clock is not None:
            self._round_clock.reconnect()

    @property
    def settings(self) -> str:
        """Return what must be equal on all ranks, besides the layers and the compressor."""
        return self._settings

    @property
    def exchanges(self) -> tuple[list[TensorExchange], list[TensorExchange]]:
        others = [each for each in (self._warmup, self._averager) if each is not None]
        return [fragment.exchange for fragment in self._fragments], others

    @property
    def is_exchanged(self) -> bool:
        """Return True if parameters are the global ones; also during warm-up."""
        return not any(fragment.moved or fragment.sent is not None for fragment in self._fragments)

    @property
    def steps_taken(self) -> int:
        return self.steps_made

    def state_dict(self, mode: str = "sharded") -> dict[str, Any]:
        """Return the inner optimizer's state, and under "gradcomp" all that belongs to the rounds.

        Each rank saves its own: inner state and local parameters differ between exchanges.
        `hvd.save_checkpoint` does so; it calls this with mode="consolidated" for a checkpoint that
        any number of ranks loads, which begin with the global parameters.
        """
        fragments = [
            {
                "global": [c.detach().clone() for c in fragment.copies],
                "local": [p.detach().clone() for p in fragment.parameters],
                "moved": fragment.moved,
                "sent": None if fragment.sent is None else [x.clone() for x in fragment.sent],
                "exchange": fragment.exchange.save(mode),
            }
            for fragment in self._fragments
        ]
        outer = self.outer.state_dict()
        kept = {
            "schedule": repr(self.schedule),
            "mode": mode,
            "names": self._names,
            "started": self._started,
            "steps": self.steps_made,
            "clock": self._clock,
            "rounds": self.rounds,
            "outer": outer if self._transfer is None else self._transfer.restored(outer),
            "fragments": fragments,
            "warmup": None if self._warmup is None else self._warmup.save(mode),
            "buffers": None if self._averager is None else self._averager.save(mode),
        }
        if mode == "consolidated":
            kept["fragments"] = [_common(each) for each in fragments]
        return {**self.inner.state_dict(), KEPT: kept}

    def common_state_dict(self) -> dict[str, Any]:
        """Return the state that all ranks may go on from: with the global parameters."""
        if self._clock < self.schedule.warmup_steps:  # ranks are equal, and step no copies
            self._take_copies()
        state = self.state_dict()
        fragments = [_common(each) for each in state[KEPT]["fragments"]]
        return {**state, KEPT: {**state[KEPT], "fragments": fragments}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `state_dict`, or that of a plain optimizer; after the model's.

        A rank that loads its own state goes on to the bit, with its own parameters. One that loads
        another rank's, or a consolidated one, goes on from the global parameters.

        Raises:
            CheckpointError: it is of another model, schedule, compressor or number of ranks.
        """
        kept = state_dict.get(KEPT)
        if kept is None:
            self.load_inner(state_dict)
            self.restart()
            return
        self._check_fits(kept)
        self.load_inner(state_dict)
        for fragment, saved in zip(self._fragments, kept["fragments"]):
            fragment.exchange.load(saved["exchange"])
        for exchange, name in ((self._warmup, "warmup"), (self._averager, "buffers")):
            if exchange is not None and kept[name] is not None:
                exchange.load(kept[name])
        self.load_rounds(state_dict)

    @torch.no_grad()
    def load_rounds(self, state_dict: dict[str, Any]) -> None:
        """Load what `load_state_dict` does but the inner optimizer and what compressors keep."""
        kept = state_dict[KEPT]
        self.outer.load_state_dict(kept["outer"])
        if self._transfer is not None:
            self._transfer.take()
        for fragment, saved in zip(self._fragments, kept["fragments"]):
            fragment.exchange.abort()
            for c, value in zip(fragment.copies, saved["global"]):
                c.copy_(value)
            own, fragment.sent, fragment.versions = _is_own(fragment, saved), None, None
            fragment.moved = own and saved["moved"]
            if own and saved["sent"] is not None:
                fragment.sent = [x.to(c.device) for x, c in zip(saved["sent"], fragment.copies)]
            if kept["started"]:
                local = saved["local"] if own else saved["global"]
                for p, value in zip(fragment.parameters, local):
                    p.copy_(value)
        self._started, self._loaded = kept["started"], True
        if self._round_clock is not None:
            self._round_clock.restart()
        self._clock = kept["clock"]
        self.steps_made, self.rounds = kept["steps"], kept["rounds"]

    def _check_fits(self, kept: Any) -> None:
        mine = {"schedule": repr(self.schedule), "names": self._names}
        for what, value in mine.items():
            found = kept.get(what) if isinstance(kept, dict) else kept
            if found != value:
                raise CheckpointError(
                    f"the state was saved with another {what}: {found}, and here it is {value}"
                )


WARMUP, _LOADED = -1, -2  # said in the place of a fragment


def _wide(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, dtype=_WIDE.get(x.dtype, x.dtype), requires_grad=False)


def _outer_of(outer: Any, copies: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the outer optimizer over the global parameters.

    Raises:
        TypeError: it is neither settings nor something that makes an optimizer.
    """
    if isinstance(outer, OuterSGD):
        nesterov = bool(outer.nesterov)
        return torch.optim.SGD(copies, outer.lr, outer.momentum, nesterov=nesterov)
    made = outer(copies) if callable(outer) else None
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "outer= takes OuterSGD(lr=..., momentum=...), or a function that makes a "
            f"torch.optim.Optimizer from a list of parameters, got {outer!r}"
        )
    return made


def _described(optimizer: torch.optim.Optimizer) -> str:
    """Describe the options of an optimizer, which must be equal on all ranks."""
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return f"{type(optimizer).__name__}({options})"


def _is_own(fragment: Fragment, saved: Any) -> bool:
    """Return True if a fragment's state was saved by this rank, with its own parameters."""
    process_set = fragment.exchange.reducer.participants.process_set
    return saved["local"] is not None and saved["exchange"]["rank"] == process_set.rank()


def _common(fragment: dict[str, Any]) -> dict[str, Any]:
    """Return a fragment's state without what belongs to one rank between two exchanges."""
    return {**fragment, "local": None, "sent": None}
