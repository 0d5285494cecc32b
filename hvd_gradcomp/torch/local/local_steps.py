"""`LocalSteps`: an optimizer that steps alone, and exchanges the change of parameters now and then.

See `algorithms.combined.local_steps` for the method and its sources. The inner optimizer, its
options, schedulers and hooks are the user's own. The global parameters are copies; the outer
optimizer is a plain one over them, whose gradients are the reduced pseudogradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from hvd_gradcomp.algorithms.combined.local_steps import (
    LocalSchedule,
    warn_of_settings,
)
from hvd_gradcomp.algorithms.combined.round_length import Round
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.core import validate
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.runtime.local_rounds import (
    CommitProtocol,
    LocalRounds,
    PendingResult,
    RoundCounters,
)
from hvd_gradcomp.runtime.round_clock import RoundClock
from hvd_gradcomp.torch.interop.dcp import from_checkpoint
from hvd_gradcomp.torch.interop.dynamo import interpreted
from hvd_gradcomp.torch.interop.inference import outside_inference
from hvd_gradcomp.torch.interop.schedule_free import evaluating, has_modes
from hvd_gradcomp.torch.local.averaging import BufferMeans, mean_exchange
from hvd_gradcomp.torch.local.fragment import (
    Connect,
    lengths_of_units,
    make_fragments,
    without_local,
)
from hvd_gradcomp.torch.local.outer import Outer, OuterOptimizer
from hvd_gradcomp.torch.local.ranks import TensorRankChannel
from hvd_gradcomp.torch.local.round_clock import TensorProgressGather
from hvd_gradcomp.torch.local.sharding import Sharding
from hvd_gradcomp.torch.local.tensor_exchange import Connection, RankSync, TensorExchange
from hvd_gradcomp.torch.local.warmup import WarmUp
from hvd_gradcomp.torch.local.wrapped_optimizer import (
    KEPT,
    WrappedOptimizer,
    device_of,
    largest_rate,
    loss_of,
    named_of,
)
from hvd_gradcomp.torch.reduce.memory import count_bytes
from hvd_gradcomp.torch.reduce.options import ExchangeOptions

_OTHERS = "warmup", "buffers"  # of the exchanges in a saved state, beside those of fragments


class LocalStepsOptimizer(WrappedOptimizer):
    """Optimizer that steps alone, and exchanges pseudogradients; `LocalSteps` makes it.

    Args:
        optimizer: the inner one.
        named_parameters: (name, parameter) of all that it trains; by place if None.
        connect: returns the connection of one exchange, by its name; all ranks call it alike.
        schedule: of the exchanges, with their deadline.
        outer: the outer optimizer, or what makes it from a list of the global parameters.
        compression: of the pseudogradients, as in `DistributedOptimizer`.
        stock: Horovod's `Compression`, if there is Horovod.
        named_buffers: buffers whose mean over ranks is taken with the last fragment.
        bucket_bytes, nonfinite: as in `DistributedOptimizer`.
        connect_clock: as `connect`, where nothing else travels; needed with a deadline.
        host: ranks over which `DistributedDataParallel` reduces in each step; none if it does not.
        sharding: of the model, if this rank has shards of it.

    Attributes:
        schedule: of the exchanges.
        named: (name, parameter) of all that is exchanged.
        outer: the outer optimizer, over the global parameters; a scheduler of its own may drive it.
        steps_made: local steps so far, skipped ones included.
        rounds: exchanges of the whole model that were applied so far.
        commit_protocol: of exchanges, where ranks come and go; None where they do not.
        uncommitted: what has been exchanged, and may be applied on no rank or on all.
    """

    _ranks_differ = True

    @outside_inference()
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        connect: Connect,
        schedule: LocalSchedule,
        outer: Outer,
        compression: Any,
        *,
        stock: Any = None,
        named_buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
        bucket_bytes: int | None = None,
        nonfinite: str | None = None,
        connect_clock: Callable[[], Connection] | None = None,
        host: Collection[int] = (),
        sharding: Sharding | None = None,
    ) -> None:
        super().__init__(optimizer, sharding)
        validate.skip_or_raise(nonfinite, "there is no mean of parameters that are not finite")
        if isinstance(optimizer, torch.optim.LBFGS) and schedule.warmup_steps:
            raise ValueError(
                "warmup_steps= averages the gradients of a step once, and LBFGS computes them many "
                "times: use warmup_steps=0"
            )
        self.schedule, self.deadline = schedule, schedule.deadline
        self._skips = nonfinite == "skip"
        named = named_of(optimizer, named_parameters)
        parameters = [p for _, p in named]
        self.named, self._names = list(named), [name for name, _ in named]
        self._outer = OuterOptimizer(outer, parameters, compression, stock)
        self.outer = self._outer.optimizer
        self.settings = f"{schedule}, outer={self._outer}, {nonfinite=}, {bucket_bytes=}"
        clock = None
        if schedule.deadline is not None:
            assert connect_clock is not None
            self.settings = f"{self.settings}, deadline={schedule.deadline}"
            gather = TensorProgressGather(connect_clock(), device_of(named))
            clock = RoundClock(gather, 1, schedule.deadline)  # a round sets its length
        sync = RankSync(connect("sync"), device_of(named))
        self.description = sync.described(named, self._outer.compressor, self.settings)
        options = ExchangeOptions(bucket_bytes=bucket_bytes, nonfinite=nonfinite, scaler=False)
        units = [1] * len(named) if sharding is None else lengths_of_units(self._names, sharding)
        self._fragments = make_fragments(
            named,
            units,
            self._outer,
            schedule.fragments,
            connect,
            options,
            self.settings,
            keeps_sent=schedule.delay > 0,
        )
        reducers = [fragment.exchange.reducer for fragment in self._fragments]
        warn_of_settings(
            self._outer.momentum,
            self._outer.compressor,
            schedule,
            any(
                residual_of(bucket.compressor, bucket.state) is not None
                for reducer in reducers
                for bucket in reducer.buckets
            ),
            reducers[0].participants.rank_and_size[1],
        )
        self._warmup: WarmUp | None = None
        self._buffers: BufferMeans | None = None
        if schedule.warmup_steps:
            self._warmup = WarmUp(optimizer, parameters, mean_exchange(named, connect, "warmup"))
        averaged = [(name, b) for name, b in named_buffers or () if b.is_floating_point()]
        if averaged:
            self._buffers = BufferMeans(averaged, connect)
        self._rounds = LocalRounds(
            schedule,
            self._fragments,
            TensorRankChannel(sync, self.description, optimizer, parameters),
            RoundCounters(),
            warmup=self._warmup,
            buffers=self._buffers,
            clock=clock,
            rate=lambda: largest_rate(optimizer),
            evaluating=(lambda: evaluating(optimizer)) if has_modes(optimizer) else None,
            replicas=sync.replicas,
        )
        self._claim_parameters("LocalSteps", named, host)

    def __repr__(self) -> str:
        return f"LocalSteps({self.schedule}, {self.inner!r})"

    # -- one step ------------------------------------------------------------------------------

    @interpreted
    @outside_inference()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer; exchange where the schedule says so.

        Raises:
            OutOfStepError: on all ranks, if they have made different numbers of steps.
            DivergedError: on all ranks, if their global parameters differ, in the first step too.
            MismatchError: on all ranks, in the first step, if they train different models.
            TypeError, ValueError: in the first step, on all ranks, if the model was sharded since,
                or something else exchanges it.
            NonFiniteGradientError: on all ranks, if the parameters of one of them are not finite;
                with nonfinite="skip" all ranks go back to the global parameters instead.
        """
        self._check_superseded()
        self._rounds.begin(self._refusal)
        found_inf = self.unscale()
        if self._rounds.warms_up:
            loss = loss_of(closure)
            self._rounds.warm_step(may_skip=found_inf or self.scaled or self._skips)
        else:
            loss = None if found_inf else self.inner.step(closure)
            self._rounds.end_local_steps()
        return loss

    @interpreted
    @outside_inference()
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
        self._check_superseded()
        self._rounds.exchange(self._refusal)
        self._reshard()

    @outside_inference()
    def restart(self) -> None:
        """Take this rank's parameters as the global ones, after they were set in mid-training.

        All ranks call it, with equal parameters, before the next forward: the next step compares
        them. What travels is dropped, and so is what the compressor has not sent.

        Not needed for what is set before the first step, or directly after an exchange without
        `blend`. Then parameters are the global ones, in the model's precision, and the next step
        compares the values: those that differ were set, and become global, and what the compressor
        has not sent of them is dropped. What was swapped and put back, for an evaluation of
        averaged weights say, was not set, and global parameters keep what a narrow model cannot
        express. Nor were rows set that an embedding with `max_norm` has shortened in forward, to
        that norm: each rank looks up others, so they count as local steps. In the warm-up all rows
        of such a table are shortened in each step, on all ranks.
        """
        self._rounds.restart()

    def _reshard(self) -> None:
        """Let the next forward read what was set, where an evaluation has gathered parameters."""
        if self.sharding is not None:
            self.sharding.reshard()

    # -- where ranks come and go ---------------------------------------------------------------

    @property
    def commit_protocol(self) -> CommitProtocol | None:
        return self._rounds.commit_protocol

    @commit_protocol.setter
    def commit_protocol(self, protocol: CommitProtocol | None) -> None:
        self._rounds.commit_protocol = protocol

    @property
    def uncommitted(self) -> PendingResult | None:
        return self._rounds.uncommitted

    @outside_inference()
    def resolve(self, applies: bool) -> None:
        """Apply what is uncommitted, or undo its exchange; see `LocalRounds.resolve`."""
        self._rounds.resolve(applies)

    @outside_inference()
    def pause(self) -> None:
        """Take back what travels, before other ranks take part: it is sent with the next exchange.

        Nothing of the local steps is lost.
        """
        self._rounds.pause()

    @outside_inference()
    def take_over(self, state_dict: dict[str, Any]) -> None:
        """Go on from the `common_state_dict` of a rank, among others that need not load it.

        Raises:
            CheckpointError: it is of another model or schedule.
        """
        self._check_fits(state_dict[KEPT])
        self.load_inner(state_dict)
        self.load_rounds(state_dict)
        self._rounds.loaded = False

    def compare_again(self) -> None:
        super().compare_again()
        self._rounds.reconnect()

    # -- what it keeps, and what it has done ---------------------------------------------------

    @property
    def exchanges(self) -> tuple[list[TensorExchange], list[TensorExchange]]:
        others = [means.exchange for means in (self._warmup, self._buffers) if means is not None]
        return [fragment.exchange for fragment in self._fragments], others

    @property
    def exchange_schedule(self) -> LocalSchedule:
        return self.schedule

    @property
    def is_exchanged(self) -> bool:
        return self._rounds.is_exchanged

    @property
    def steps_made(self) -> int:
        return self._rounds.counters.steps

    @steps_made.setter
    def steps_made(self, steps: int) -> None:
        self._rounds.counters.steps = steps

    @property
    def steps_taken(self) -> int:
        return self.steps_made

    @property
    def _memory(self) -> dict[str, int]:
        return {
            "global": count_bytes(self._outer.copies),
            "outer": count_bytes(self._outer.state_tensors()),
            "in flight": count_bytes(x for each in self._fragments for x in each.sent or ()),
        }

    @property
    def rounds(self) -> int:
        return self._rounds.counters.rounds

    @outside_inference()
    def state_dict(self, mode: str = "sharded") -> dict[str, Any]:
        """Return the inner optimizer's state, and under "gradcomp" all that belongs to the rounds.

        Each rank saves its own: inner state and local parameters differ between exchanges.
        `hvd.save_checkpoint` does so; it calls this with mode="consolidated" for a checkpoint that
        any number of ranks loads, which begin with the global parameters.

        Raises:
            RuntimeError: `torch.distributed.checkpoint` calls it, which would mix the shards of
                several hosts.
        """
        if self.sharding is not None and from_checkpoint():
            raise RuntimeError(
                "torch.distributed.checkpoint would mix the shards of hosts, which train apart "
                "between rounds: save and load fsdp.Checkpoint(model, optimizer), which has the "
                "model's parameters too"
            )
        return self.saved_state(mode)

    @outside_inference()
    def saved_state(self, mode: str = "sharded") -> dict[str, Any]:
        """Return what `state_dict` does, whoever calls it."""
        if mode == "consolidated":
            self._rounds.refresh_copies()  # no step of the warm-up moves them
        counters, warmup, buffers = self._rounds.counters, self._warmup, self._buffers
        saved = {
            "schedule": repr(self.schedule),
            "mode": mode,
            "names": self._names,
            "shard": self._shard,
            "started": self._rounds.started,
            "steps": counters.steps,
            "clock": counters.clock,
            "rounds": counters.rounds,
            "round": list(counters.round),
            "outer": self._outer.state_dict(),
            "fragments": [fragment.save(mode) for fragment in self._fragments],
            "warmup": None if warmup is None else warmup.exchange.save(mode),
            "buffers": None if buffers is None else buffers.exchange.save(mode),
        }
        return {**self.inner.state_dict(), KEPT: saved}

    @outside_inference()
    def common_state_dict(self) -> dict[str, Any]:
        """Return the state that all ranks may go on from: with the global parameters."""
        self._rounds.refresh_copies()  # no step of the warm-up moves them
        state = self.saved_state()
        fragments = [without_local(saved) for saved in state[KEPT]["fragments"]]
        return {**state, KEPT: {**state[KEPT], "fragments": fragments}}

    @outside_inference()
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `state_dict`, or that of a plain optimizer; after the model's.

        A rank that loads its own state goes on to the bit, with its own parameters. One that loads
        another rank's, or a consolidated one, goes on from the global parameters.

        Raises:
            CheckpointError: it is of another model, schedule, compressor or number of ranks.
        """
        saved = state_dict.get(KEPT)
        if saved is None:
            self.load_inner(state_dict)
            self.restart()
            return
        self._check_fits(saved)
        self.load_inner(state_dict)
        exchanges = self._exchanges_in(saved)
        if self.library_exchanges and exchanges[0][1]["size"] != self._ranks:
            self.load_rounds({**state_dict, KEPT: self._without_local(saved)})
            return  # the library loads the first rank's; `trainers` sums up what all have kept
        for exchange, state in exchanges:
            exchange.load(state)
        self.load_rounds(state_dict)

    def _exchanges_in(self, saved: dict[str, Any]) -> list[tuple[TensorExchange, dict[str, Any]]]:
        others = [
            (means.exchange, saved[name])
            for means, name in zip((self._warmup, self._buffers), _OTHERS)
            if means is not None and saved[name] is not None
        ]
        pairs = zip(self._fragments, saved["fragments"])
        return [*((fragment.exchange, state["exchange"]) for fragment, state in pairs), *others]

    @property
    def _ranks(self) -> int:
        """Return the number of ranks."""
        return self.all_reducers[0].participants.process_set.size()

    def _without_local(self, saved: dict[str, Any]) -> dict[str, Any]:
        fragments = saved["fragments"]
        if saved["clock"] < self.schedule.warmup_steps:  # ranks are equal; no step moves the copies
            fragments = [{**each, "global": each["local"]} for each in fragments]
        return {**saved, "fragments": [without_local(each) for each in fragments]}

    @outside_inference()
    @torch.no_grad()
    def load_rounds(self, state_dict: dict[str, Any]) -> None:
        saved, rounds = state_dict[KEPT], self._rounds
        self._reshard()
        self._outer.load_state_dict(saved["outer"])
        loaded = list(zip(self._fragments, saved["fragments"]))
        # Global parameters are those to evaluate; a rank's own are what they were, in its mode.
        is_other = has_modes(self.inner) and not all(f.owns(state) for f, state in loaded)
        with evaluating(self.inner) if is_other else nullcontext():
            for fragment, state in loaded:
                fragment.load(state, saved["started"])
        rounds.restart_clock()
        rounds.started, rounds.loaded = saved["started"], True
        for name in ("steps", "clock", "rounds"):
            setattr(rounds.counters, name, saved[name])
        rounds.counters.round = Round(*saved["round"])

    def _check_fits(self, saved: Any) -> None:
        """Check that a state was saved with this schedule, and these parameters.

        Raises:
            CheckpointError: it was not.
        """
        expected = {
            "schedule": repr(self.schedule),
            "names": self._names,
            "shard": self._shard,
        }
        for name, value in expected.items():
            saved_value = saved.get(name) if isinstance(saved, dict) else saved
            if saved_value != value:
                raise CheckpointError(
                    f"the state was saved with another {name}: {saved_value}, and here it is "
                    f"{value}"
                )
