"""Local steps over `torch.distributed` while ranks leave and come: no restart, no Horovod.

    elastic = ddp.Elastic("rendezvous-host:29400", min_ranks=2)
    optimizer = ddp.LocalSteps(inner, model.named_parameters())
    state = ddp.ElasticState(model, optimizer)

    @elastic.run
    def train(state):
        while optimizer.steps_made < 10_000: ...

    train(state)

Until `run` each process is a group by itself. Then processes meet (`rendezvous`), and reconnect
each time that one is lost or waits to join; `train` is called again. The exchange that failed is
repeated among the survivors: a lost rank loses its own local steps, and no one else's.

An exchange may succeed on some ranks and fail on others. So ranks confirm to each other that they
have a result before any of them applies it. If a rank is lost meanwhile: if any survivor applied
the result, all apply it; otherwise all roll back, bit-exactly.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp.runtime import config_check
from hvd_gradcomp.runtime.elastic import Lost
from hvd_gradcomp.runtime.local_rounds import WARMUP
from hvd_gradcomp.torch.comm.c10d import ProcessGroup
from hvd_gradcomp.torch.interop.inference import outside_inference
from hvd_gradcomp.torch.local.local_steps import LocalStepsOptimizer
from hvd_gradcomp.torch.local.wrapped_optimizer import KEPT
from hvd_gradcomp.torch.membership.rendezvous import (
    Generation,
    LeaveNotice,
    Rendezvous,
    RendezvousError,
)
from hvd_gradcomp.torch.reduce import reducer_state
from hvd_gradcomp.torch.reduce.reducer import Reducer

LOGGER = logging.getLogger("hvd_gradcomp")
_OF_GLOO = re.compile(r"gloo/\S+\.(cc|h):\d+")  # gloo says where in its source it has failed
_FAILURES = 8  # meetings in a row that may fail as a rank is lost in them
_CONNECTING = 10.0  # seconds, at least, that ranks wait for each other's addresses


class RanksChanged(RuntimeError):  # noqa: N818 - nothing is wrong
    """Signal, on all ranks behind a step: others join, or one leaves; `Elastic.run` takes it."""


class MemberState(NamedTuple):
    """State of one process when ranks meet.

    Attributes:
        process: its name.
        joined: it has trained with others.
        steps: local ones, so far.
        applied: exchanges, of each kind.
        described: what must be equal on all ranks.
    """

    process: str
    joined: bool
    steps: int
    applied: list[int]
    described: dict[str, str]


class ExchangeReport(NamedTuple):
    """Message of a rank in each exchange: its residual's sum of squares, and what it wants."""

    squares: float
    leaves: bool
    called: bool  # another process waits


class Departure(NamedTuple):
    """Part of a rank when others join or leave: whether it leaves, and another has its residual."""

    leaves: bool
    handed_over: bool


class ElasticState:
    """State that a process brings along where ranks meet, and that a process that joins is given.

    A process that joins gets the parameters, buffers, the states of both optimizers, and the
    objects; its residual is zero. Objects, learning rates and `optimizer.steps_made` are afterwards
    equal on all ranks: those of the rank that has made the most steps. Ranks that were there keep
    their residuals, and their inner optimizer's moments.

    Args:
        model: plain, without `DistributedDataParallel`.
        optimizer: of `ddp.LocalSteps`, over all ranks.
        objects: become attributes: numbers and the like, and what has a `state_dict()`, such as
            schedulers. They are pickled.

    Raises:
        TypeError: the optimizer is another one, or the model is wrapped.
        ValueError: it has a deadline; or an object has the name of what is here already.

    Attributes:
        lost: (rank, norm) of the residual of each rank that has left since this process joined.
        group: of the ranks.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: LocalStepsOptimizer, **objects: Any
    ) -> None:
        if not isinstance(optimizer, LocalStepsOptimizer):
            raise TypeError(
                f"optimizer= takes that of ddp.LocalSteps, got {type(optimizer).__name__}: where "
                "ranks exchange in every step, use Horovod's elastic, or torchrun and checkpoints"
            )
        if isinstance(model, DistributedDataParallel):
            raise TypeError(
                "model= takes a plain module: DistributedDataParallel does not outlive the process "
                "group of its ranks, which ddp.Elastic makes anew when ranks change"
            )
        group = optimizer.all_reducers[0].participants.process_set
        if not isinstance(group, ProcessGroup):
            raise TypeError("optimizer= is over Horovod: use hvd.elastic with it")
        if optimizer.deadline is not None:
            raise ValueError(
                "optimizer= has a deadline=, by which ranks exchange after different steps, and "
                "ranks that come and go count them: make LocalSteps without it"
            )
        self.model, self.optimizer, self.group = model, optimizer, group
        self._objects = list(objects)
        self._lost: dict[str, Lost] = {}
        self._known: dict[str, Lost] = {}  # what would be lost with each rank
        self._processes: list[str] = []
        self._joined = False
        self._changes: list[ExchangeReport] | None = None
        self._called: Callable[[], bool] = lambda: False
        self._leaves: Callable[[], bool] = lambda: False
        taken = [name for name in objects if name in dir(self)]
        if taken:
            raise ValueError(f"an ElasticState has a {taken[0]!r} itself: give yours another name")
        self.__dict__.update(objects)
        optimizer.commit_protocol = self
        for reducer in self._reducers:
            reducer.keeps_snapshots = True

    @property
    def lost(self) -> list[Lost]:
        return list(self._lost.values())

    @property
    def _reducers(self) -> list[Reducer]:
        return self.optimizer.all_reducers

    @property
    def applied(self) -> list[int]:
        """Return how many exchanges of each kind are applied here, without an uncommitted one."""
        uncommitted = self.optimizer.uncommitted
        counts = [reducer.steps for reducer in self._reducers]
        if uncommitted is not None and uncommitted.means is not None:
            counts[self._place(uncommitted.number)] -= 1
        return counts

    def _place(self, number: int) -> int:
        """Return the place of a fragment's reducer, or of that of the warm-up, among all."""
        return len(self.optimizer.exchanges[0]) if number == WARMUP else number

    def _squares(self) -> float:
        return sum(reducer_state.squares(reducer) for reducer in self.optimizer.reducers)

    # -- with each exchange --------------------------------------------------------------------

    def confirm(self) -> None:
        """Return when all ranks have the result of an exchange; see `CommitProtocol`."""
        every = self._gather_reports()
        self._record_norms(every)
        if any(report.leaves or report.called for report in every):
            self._changes = every

    def end_step(self) -> None:
        """Raise RanksChanged, on all ranks, if one joins or leaves; see `CommitProtocol`."""
        if self._changes is not None:
            raise RanksChanged(
                "ranks join or leave: train in a function that Elastic.run has wrapped"
            )

    def _gather_reports(self) -> list[ExchangeReport]:
        called = self.group.rank() == 0 and self._called()
        report = ExchangeReport(self._squares(), self._leaves(), called)
        every: list[ExchangeReport] = self.group.gather_objects(report, ExchangeReport)
        return every

    def _record_norms(self, every: list[ExchangeReport]) -> None:
        self._known = {
            process: Lost(rank, math.sqrt(report.squares))
            for rank, (process, report) in enumerate(zip(self._processes, every))
        }

    # -- when ranks meet -----------------------------------------------------------------------

    @outside_inference()
    def sync(
        self, rendezvous: Rendezvous, generation: Generation, leaves: Callable[[], bool]
    ) -> None:
        """Go on with the ranks of a generation; all of them call it, after they have connected.

        Args:
            rendezvous: where they have met.
            generation: of the ranks.
            leaves: returns True if this rank is to leave with the next exchange.

        Raises:
            MismatchError: on a rank that joins, if it trains another model, or in another way.
            RanksChanged: on the others then.
        """
        optimizer, group, here = self.optimizer, self.group, self.group.rank()
        self._called, self._leaves = (lambda: rendezvous.called), leaves
        optimizer.pause()
        own_state = MemberState(
            rendezvous.process, self._joined, optimizer.steps_made, self.applied, self._described()
        )
        members: list[MemberState] = group.gather_objects(own_state, MemberState)
        valid = [r for r, s in enumerate(members) if s.joined and s.process in generation.before]
        target = self._newest([members[r] for r in valid], rendezvous, generation)
        uncommitted = optimizer.uncommitted
        if uncommitted is not None:
            place = self._place(uncommitted.number)
            optimizer.resolve(here in valid and self.applied[place] < target[place])
        candidates = valid or [r for r, s in enumerate(members) if s.joined] or range(len(members))
        root = max(candidates, key=lambda rank: (members[rank].steps, -rank))
        self._refuse(members, root, valid)
        receives = root != here if not valid else here not in valid
        speaks = here == root
        if generation.before and not valid and speaks:
            LOGGER.warning(
                "no rank is left of those that trained: what they had is lost, and training goes "
                "on from what rank %d has",
                root,
            )
        self._account(rendezvous, members, speaks)
        for reducer in self._reducers:
            if not self._joined and (receives or not reducer.steps):
                reducer_state.reset(reducer)
            reducer_state.resize(reducer, 1.0, 1.0 / group.size(), speaks)
        self._hand_out(root, receives, full=len(valid) < len(members))
        self._joined = True
        self._processes = generation.processes
        optimizer.compare_again()
        self._exchange_rest()
        self._record_norms(self._gather_reports())
        self._changes = None

    def _newest(
        self, members: list[MemberState], rendezvous: Rendezvous, generation: Generation
    ) -> list[int]:
        """Return how many exchanges of each kind some rank has applied."""
        counts = [member.applied for member in members]
        present = {member.process for member in members}
        for process in generation.before:
            notice = None if process in present else rendezvous.leave_notice(process)
            if notice is not None:
                counts.append(notice.exchanges)
        return [max(column) for column in zip(*counts)]

    def _described(self) -> dict[str, str]:
        """Describe what must be equal on all ranks."""
        optimizer = self.optimizer
        layers = [layer for reducer in optimizer.reducers for layer in reducer.planner.layers]
        digest = zlib.crc32(repr(layers).encode())
        return {
            "parameters": f"{len(layers)} of them, checksum {digest}",
            "compression": str(optimizer.reducers[0].planner.compressor),
            "schedule": str(optimizer.schedule),
            "settings": optimizer.settings,
        }

    def _refuse(self, members: list[MemberState], root: int, valid: list[int]) -> None:
        """Refuse ranks that join and train otherwise.

        Raises:
            MismatchError: on such a rank; on all, if none was there before.
            RanksChanged: on the others.
        """
        expected = members[root].described
        others = [r for r, s in enumerate(members) if s.described != expected]
        if not others:
            return
        here = self.group.rank()
        for rank in others if here in others or not valid else ():
            config_check.agree([expected, members[rank].described], [root, rank])
        LOGGER.warning("rank %s trains another model, or in another way: refused", others)
        raise RanksChanged("a rank that trains otherwise is refused")

    def _account(self, rendezvous: Rendezvous, members: list[MemberState], speaks: bool) -> None:
        """Report what is lost with the ranks that left."""
        present = {member.process for member in members}
        for process in present & set(self._lost):
            del self._lost[process]  # it was silent, and has come back with its residual
        total = math.sqrt(sum(lost.norm**2 for lost in self._known.values()))
        for process, lost in self._known.items():
            if process in present or process in self._lost:
                continue
            notice = rendezvous.leave_notice(process)
            if notice is not None and notice.handed_over:
                continue
            self._lost[process] = lost
            if speaks:
                LOGGER.warning(
                    "rank %d (%s) %s: its steps since the last exchange, and a residual of norm "
                    "%.4g (of %.4g in all), are lost",
                    lost.rank,
                    process,
                    "has died, or gives no sign of life" if notice is None else "left",
                    lost.norm,
                    total,
                )

    def _hand_out(self, root: int, receives: bool, full: bool) -> None:
        """Broadcast the root's state: what joining ranks need, and what all take."""
        optimizer, here = self.optimizer, self.group.rank()
        inner, outer = optimizer.param_groups, optimizer.outer.param_groups
        root_state: dict[str, Any] = {}
        if here == root:
            root_state = {
                "steps": optimizer.steps_made,
                "exchanges": [reducer.steps for reducer in self._reducers],
                "options": [_options(inner), _options(outer)],
                "objects": {name: _saved(getattr(self, name)) for name in self._objects},
            }
            if full:
                root_state["optimizer"] = _without_exchanges(optimizer.common_state_dict())
                root_state["common"] = [
                    reducer_state.replicated(reducer) for reducer in self._reducers
                ]
                root_state["rest"] = self._rest_of_model()
        box = [root_state]
        with self.group.watched():
            dist.broadcast_object_list(box, root, group=self.group.handle, device=self.group.device)
        root_state = box[0]
        if receives:
            if not self._joined:
                self._lost = {}
            self.model.load_state_dict(root_state["rest"], strict=False)
            optimizer.take_over(root_state["optimizer"])
            for reducer, fields in zip(self._reducers, root_state["common"]):
                reducer_state.load_replicated(reducer, fields)
        if here == root:
            return
        optimizer.steps_made = root_state["steps"]
        for reducer, steps in zip(self._reducers, root_state["exchanges"]):
            reducer.steps = steps
        for groups, options in zip((inner, outer), root_state["options"]):
            for group, values in zip(groups, options):
                group.update(values)
        for name, value in root_state["objects"].items():
            target = getattr(self, name)
            if _has_state(target):
                target.load_state_dict(value)
            else:
                setattr(self, name, value)

    def _rest_of_model(self) -> dict[str, Any]:
        """Return what the optimizer does not hand out: buffers, and parameters that do not train.

        The inner optimizer may have these too; they are not among the global parameters.
        """
        groups = self.optimizer.param_groups
        trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        everything = self.model.state_dict(keep_vars=True)
        return {
            name: x.detach() if isinstance(x, torch.Tensor) else x
            for name, x in everything.items()
            if id(x) not in trained
        }

    def _exchange_rest(self) -> None:
        """Exchange what ranks have done alone so far; the mean is over those that have done any."""
        has = not self.optimizer.is_exchanged or self._squares() > 0
        giving = sum(self.group.gather_objects(has, bool))
        for reducer in self.optimizer.reducers:
            reducer.postscale = 1.0 / max(1, giving)
        self.optimizer.exchange()
        for reducer in self.optimizer.reducers:
            reducer.postscale = 1.0 / self.group.size()

    # -- when a rank leaves --------------------------------------------------------------------

    def part(self) -> Departure:
        """Hand over the residuals of ranks that leave; all call it after `RanksChanged`."""
        changes, self._changes = self._changes or [], None
        leavers = [rank for rank, report in enumerate(changes) if report.leaves]
        heirs = [rank for rank, report in enumerate(changes) if not report.leaves]
        here, group = self.group.rank(), self.group
        if not leavers or not heirs:
            return Departure(here in leavers, False)
        self.optimizer.exchange()  # fragments that had their turn in other steps
        self._changes = None
        for leaver in leavers:
            with group.watched():
                if here == leaver:
                    sums = self._own_sums()
                    dist.send_object_list([sums], heirs[0], group.handle, device=group.device)
                    dist.recv(torch.zeros(1, device=group.device), heirs[0], group.handle)
                elif here == heirs[0]:
                    box: list[Any] = [None]
                    dist.recv_object_list(box, leaver, group.handle, device=group.device)
                    buckets = [b for r in self.optimizer.reducers for b in r.buckets]
                    for bucket, leaver_sums in zip(buckets, box[0]):
                        reducer_state.inherit(bucket, leaver_sums)
                    dist.send(torch.ones(1, device=group.device), leaver, group.handle)
        return Departure(here in leavers, here in leavers)

    def _own_sums(self) -> list[dict[str, torch.Tensor]]:
        return [
            reducer_state.inheritance(bucket, reducer.steps)
            for reducer in self.optimizer.reducers
            for bucket in reducer.buckets
        ]


class Elastic:
    """Group of ranks that may lose members, and take others in, in mid-training.

    Args:
        rendezvous: "host:port" where `hvd-gradcomp rendezvous` runs, on a machine that stays.
        min_ranks: fewer do not train; the others wait for more.
        max_ranks: more wait until there is room; None for no limit.
        name: of the training, if several use one rendezvous. A training that has ended keeps its
            name.
        backend: of `torch.distributed`; tried with gloo alone.
        patience: seconds without a sign of life after which a process is taken for dead. A thread
            gives them; what holds Python's lock for that long makes the process look dead.
        timeout: seconds that ranks wait for one that lives and does not come to an exchange, and
            for enough ranks.

    Raises:
        ValueError: `torch.distributed` is initialized already: this does it; or a number is not
            possible.
        RendezvousError: no rendezvous answers there.
    """

    def __init__(
        self,
        rendezvous: str,
        min_ranks: int = 1,
        max_ranks: int | None = None,
        *,
        name: str = "training",
        backend: str = "gloo",
        patience: float = 3.0,
        timeout: float = 600.0,
    ) -> None:
        if dist.is_initialized():
            raise ValueError(
                "ddp.Elastic initializes torch.distributed itself, anew when ranks change: leave "
                "out init_process_group()"
            )
        how = min_ranks, max_ranks, patience, timeout
        self._rendezvous = Rendezvous(rendezvous, name, *how)
        self._backend, self._timeout = backend, timeout
        self._connecting = max(_CONNECTING, 3 * patience)
        self._leaves = self._connected = self._ended = False
        self._be_alone()

    def _be_alone(self) -> None:
        dist.init_process_group(self._backend, store=dist.HashStore(), rank=0, world_size=1)

    def leave(self) -> None:
        """Leave after the next exchange, with nothing lost; `train` then returns None.

        A signal handler may call it: `signal.signal(signal.SIGTERM, lambda *_: elastic.leave())`.
        """
        self._leaves = True

    def run(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of an `ElasticState` so that it is called again when ranks change.

        It begins where `optimizer.steps_made` says. A rank that returns from it has finished: it
        exchanges no more, but `torch.distributed` is as it was.

        Raises:
            RuntimeError: a function has ended in this process before.
            RendezvousError: too few ranks were left, or the rendezvous is gone.
            MismatchError: this process joins with another model, or another exchange.
            Exception: of the function; the other ranks go on without this one.
        """

        @functools.wraps(train)
        def wrapped(state: ElasticState, *args: Any, **options: Any) -> Any:
            return self._run(state, lambda: train(state, *args, **options))

        return wrapped

    def _run(self, state: ElasticState, train: Callable[[], Any]) -> Any:
        if self._ended:
            raise RuntimeError(
                "what Elastic.run has wrapped has ended in this process, and the other ranks do "
                "not wait for it any more: train to the end in one call"
            )
        finished, departure = False, Departure(False, False)
        broken, failures = math.inf, 0
        meets = True
        try:
            while True:
                try:
                    if meets:
                        self._meet(state)
                        meets, broken, failures = False, math.inf, 0
                    result = train()
                    finished = True
                    return result
                except RanksChanged:
                    meets = True
                    departure = self._part(state)
                    if departure.leaves:
                        return None
                except RuntimeError as error:
                    if not self._has_lost_a_rank(state, error):
                        raise
                    meets, broken, failures = True, min(broken, time.monotonic()), failures + 1
                    late = time.monotonic() > broken + self._timeout
                    if late and failures > _FAILURES:  # one rank may die after another
                        raise RendezvousError(
                            "the ranks meet, and cannot connect: open the ports between their "
                            "hosts, and set GLOO_SOCKET_IFNAME where a host has several networks"
                        ) from error
                    LOGGER.warning("a rank is lost, the others meet: %s", _first_line(error))
        finally:
            self._ended = True
            self._rendezvous.leave(LeaveNotice(finished, departure.handed_over, state.applied))
            if finished:  # who has not notices, however long this process lives
                state.group.hang_up()
            else:
                self._disconnect(state)

    def _part(self, state: ElasticState) -> Departure:
        """Hand over the residuals of ranks that leave; if one is lost meanwhile, all stay."""
        try:
            return state.part()
        except RuntimeError as error:
            if not self._has_lost_a_rank(state, error):
                raise
            return Departure(False, False)

    def _has_lost_a_rank(self, state: ElasticState, error: RuntimeError) -> bool:
        """Return True if an error is that of a connection to another rank."""
        if isinstance(error, RendezvousError):
            return False
        ours = state.group.failed or not self._connected
        return ours or isinstance(error, dist.DistError) or _OF_GLOO.search(str(error)) is not None

    def _meet(self, state: ElasticState) -> None:
        """Connect the ranks of the next generation, and bring them to one state."""
        begin = time.monotonic()
        self._disconnect(state)
        generation = self._rendezvous.meet()
        met = time.monotonic()
        rank, size = generation.processes.index(self._rendezvous.process), len(generation.processes)
        dist.init_process_group(
            self._backend,
            store=self._rendezvous.store_of(generation),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=self._connecting),
        )
        state.group.reopen()
        for group in (dist.group.WORLD, state.group.handle):
            _set_pg_timeout(timedelta(seconds=self._timeout), group)
        self._connected = True
        connected = time.monotonic()
        state.sync(self._rendezvous, generation, lambda: self._leaves)
        if rank == 0:
            LOGGER.info(
                "generation %d: %d ranks; met in %.2f s, connected in %.2f, in step in %.2f",
                generation.number,
                size,
                met - begin,
                connected - met,
                time.monotonic() - connected,
            )

    def _disconnect(self, state: ElasticState) -> None:
        self._connected = False
        state.group.hang_up()
        if not dist.is_initialized():
            # Connecting has failed. PyTorch names a group by how many there were, and forgets them
            # with the one that is destroyed here: ranks with other names would wait for each other.
            self._be_alone()
        with suppress(RuntimeError):  # of connections that are closed
            dist.destroy_process_group()


def _options(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of parameter groups, such as learning rates."""
    return [{k: v for k, v in group.items() if k != "params"} for group in groups]


def _has_state(item: Any) -> bool:
    return hasattr(item, "state_dict") and hasattr(item, "load_state_dict")


def _saved(item: Any) -> Any:
    return item.state_dict() if _has_state(item) else item


def _without_exchanges(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without what the compressors keep."""
    kept = state[KEPT]
    fragments = [{**fragment, "exchange": None} for fragment in kept["fragments"]]
    kept = {**kept, "fragments": fragments, "warmup": None, "buffers": None}
    return {**state, KEPT: kept}


def _first_line(error: Exception) -> str:
    """Return what an error says; of an explained one its cause, without advice on what to use."""
    return str(error.__cause__ or error).partition("\n")[0][:300]
