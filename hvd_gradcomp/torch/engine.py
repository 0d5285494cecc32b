"""The exchange of one optimizer over Horovod; `exchange` runs it, here is what ranks agree on.

Everything that travels has a name, see `hvd_gradcomp.timeline`: hooks fire in another order on each
rank, and Horovod pairs by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Generator, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from horovod import __version__ as horovod_version
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from hvd_gradcomp import assignment, failures, handshake, hierarchy, messages, timeline, worth
from hvd_gradcomp.aggregator import Compressor
from hvd_gradcomp.names import Names
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.stats import CompressionStats
from hvd_gradcomp.torch import exchange, lending, moments, parameters
from hvd_gradcomp.torch.buckets import (
    BUCKET_BYTES,
    Bucket,
    Named,
    as_used,
    carry_over,
    leaving_dense,
    planned,
)
from hvd_gradcomp.torch.exchange import LOGGER, Exchange
from hvd_gradcomp.torch.parameters import layers_of
from hvd_gradcomp.torch.rounds import Rounds
from hvd_gradcomp.torch.sources import Sources, source_of

_ALIKE = (
    "Freeze and thaw the same parameters on all ranks, before the same step, and scale the loss on "
    "all of them or on none"
)
living: weakref.WeakSet[Engine] = weakref.WeakSet()
TITLES = Names("gradcomp")


def gather_objects(item: Any, kind: Any, name: str, process_set: Any) -> list[Any]:
    """Everybody's item of a kind, on all ranks; see `messages`."""

    def allgather(mine: bytes) -> Iterator[bytes]:
        data = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int32, device="cpu")
        # Named as on TensorFlow, should another rank run that.
        lengths = lending.allgather(length, f"{name}.sz", process_set).wait()
        everything = lending.allgather(data, f"{name}.t", process_set).wait()
        return (piece.numpy().tobytes() for piece in everything.split(lengths.tolist()))

    return messages.gathered(item, kind, allgather, process_set.ranks)


class Engine(Exchange):
    """The exchange of one optimizer.

    Args:
        named_parameters: (name, parameter) of everything that is reduced; the order is the same
            on all ranks.
        compressor: what runs.
        name: begins the name of everything that travels; see `Names`.
        prescale, postscale: see `Context`.
        process_set: the ranks that take part.
        passes: backward passes for each exchange.
        batch_size: samples that a rank sees for each exchange, for `moments="microbatch"`.
        bucket_bytes: target size of a bucket; 25 MiB if None.
        nonfinite: what becomes of a step with a gradient that is not finite; see
            `DistributedOptimizer`.
        scaler: of the loss; None looks for one.
        place: of this rank among hosts, where only their sums are compressed; see `hierarchy`.
        settings: what else must be equal on all ranks, for the handshake.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        compressor: Compressor,
        *,
        name: str,
        prescale: float,
        postscale: float,
        process_set: Any,
        passes: int = 1,
        batch_size: int | None = None,
        bucket_bytes: int | None = None,
        nonfinite: str | None = None,
        scaler: Any = None,
        place: hierarchy.Place | None = None,
        settings: str = "",
    ) -> None:
        super().__init__(
            lending.Lending(),
            process_set=process_set,
            place=place,
            prescale=prescale,
            postscale=postscale,
            nonfinite=nonfinite,
            scaler=scaler,
        )
        self.compressor = compressor = leaving_dense(compressor, named_parameters)
        self.settings, self.name = settings, name
        self.order: list[str] = []  # in which layers are used, once it is known
        self._arrived: list[str] | None = [] if compressor.needs_order else None
        self._named, self._bucket_bytes = list(named_parameters), bucket_bytes
        self._name_of = {p: name for name, p in named_parameters}
        self.gathered: dict[str, int] = {}  # values of sparse gradients, by the layer's name
        self._agreed = self._judged = False
        self._frozen: set[torch.nn.Parameter] | None = None  # known once a step has begun
        self.layers = layers_of(named_parameters)
        assigned = assignment.assign(compressor, self.layers, self.seat[1])
        used = [pair for pair, one in zip(named_parameters, assigned) if one.uses_moments]
        how = "hvd.track_moments(model) before DistributedOptimizer"
        source = source_of(compressor, used, passes, process_set.rank() == 0, how)
        self.sources = Sources(source, batch_size, self.scaling, lambda p: self._places[p])
        self._settle_on(list(self._plan(self._named)))
        self.rounds = Rounds()
        self.sources.watch(self.buckets)
        living.add(self)

    def _explained(self, what: str) -> AbstractContextManager[None]:
        return failures.named(HorovodInternalError, what)

    def _make_groups(self, place: hierarchy.Place) -> hierarchy.Groups:
        return hierarchy.groups_of(mpi_ops, place, self._gather_objects)

    @property
    def ordered_parameters(self) -> list[torch.nn.Parameter]:
        """All of them, in an order that is the same on all ranks."""
        return [p for _, p in self._named]

    def count(self, sent: torch.Tensor) -> None:
        """Counts a tensor that was added up beside the buckets."""
        self.ledger.sent(sent)
        self.ledger.received(sent)

    def _plan(self, named_parameters: Named, placed: Collection[Bucket] = ()) -> Iterator[Bucket]:
        """Buckets for these; what has a place in buckets that are there already gets no other."""
        for name, p in named_parameters:
            if not lending.takes(p.device):
                raise ValueError(
                    f"{name} is on {p.device}, and this Horovod was built without collectives for "
                    "tensors there. Build it for this PyTorch with HOROVOD_GPU_OPERATIONS=NCCL "
                    "(docker/build-horovod.sh), or train on the CPU"
                )
        known = {layer[0]: layer for layer in self.layers}
        new = layers_of([pair for pair in named_parameters if pair[0] not in known])
        known |= {layer[0]: layer for layer in new}
        self.used = [known[name] for name, _ in named_parameters]
        return planned(
            named_parameters,
            self.used,
            self.compressor,
            name=self.name,
            ranks=self.seat[1],
            place=self.place,
            bucket_bytes=self._bucket_bytes,
            with_moments=self.sources.kept,
            placed=placed,
        )

    def add(self, named_parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Plans buckets for parameters that join, on all ranks before the same step.

        The ranks compare what they train once more. Methods that learn do so for the new layers
        from this step on.

        Raises:
            ValueError: the compressor orders the layers of the whole model (LGC, or a partition
                with it); second moments of the parameters are not tracked; a dtype is none that is
                reduced.
        """
        names = ", ".join(name for name, _ in named_parameters)
        if self.compressor.needs_order:
            raise ValueError(
                f"the compressor plans the whole model at once: {names} cannot join. Build a new "
                "DistributedOptimizer once all that will be trained requires gradients. It is "
                f"{self.compressor}"
            )
        untracked = [
            name
            for name, p in named_parameters
            if not moments.is_tracked(p) and not moments.is_sent_dense(p)
        ]
        if self.sources.source == "sample" and untracked:
            raise ValueError(
                "moments='sample' needs hvd.track_moments(model) before its parameters join; not "
                f"tracked: {', '.join(untracked)}"
            )
        if self.sources.source == "sample":
            self.compressor = leaving_dense(self.compressor, named_parameters)
        everything = [*self._named, *named_parameters]
        new = list(self._plan(everything, self.buckets))
        for bucket in new:
            bucket.since = self.steps
            bucket.state = bucket.compressor.retrained(bucket.ops, bucket.state, self.steps)
        self._named = everything
        self._name_of.update((p, name) for name, p in named_parameters)
        self.layers += self.used[len(self.used) - len(named_parameters) :]
        self._settle_on([*self.buckets, *new])
        self.sources.watch(new)
        self._agreed = False

    @property
    def known(self) -> tuple[list[Any], dict[Any, str], list[Any]]:
        """What is known of the parameters, those that have joined included; to be put back."""
        return list(self._named), dict(self._name_of), list(self.layers)

    @known.setter
    def known(self, known: tuple[list[Any], dict[Any, str], list[Any]]) -> None:
        named, names, layers = known
        self._named, self._name_of, self.layers = list(named), dict(names), list(layers)

    @property
    def counted(self) -> tuple[list[int], dict[str, int]]:
        """What this rank has counted outside of its buckets; to be put back."""
        return list(self.ledger.counters), dict(self.gathered)

    @counted.setter
    def counted(self, counted: tuple[list[int], dict[str, int]]) -> None:
        counters, gathered = counted
        self.ledger.counters, self.gathered = list(counters), dict(gathered)

    def order_is_known(self) -> None:
        """Gradients that come from now on are those of layers that were not used."""
        if self._arrived is not None and self.steps == 0:
            self.order, self._arrived = self._arrived[::-1], []

    def unorder(self) -> None:
        """Plans the buckets as the model lists its layers, until a step has used them anew."""
        self._arrived, self.order = [], []
        self._settle_on(list(self._plan(self._named)))

    def reorder(self, order: Sequence[str]) -> None:
        """Plans the buckets for layers that are used in this order, on all ranks alike.

        Velocities go over to the new buckets, and residuals where another compressor of a partition
        has some already.
        """
        self._arrived, self.order = None, list(order)
        known, ranks, names = dict(self._named), self.seat[1], as_used(self.layers, order)
        layers = {layer[0]: layer for layer in self.layers}
        before = assignment.assign(self.compressor, self.used, ranks)
        after = assignment.assign(self.compressor, [layers[name] for name in names], ranks)
        if dict(zip((name for name, _, _ in self.used), before)) == dict(zip(names, after)):
            return
        left = self.buckets
        self._settle_on(list(self._plan([(name, known[name]) for name in names])))
        carry_over(left, self.buckets)

    def rename(self, name: str) -> None:
        """Begins the names of what travels anew."""
        self.name = name
        for place, bucket in enumerate(self.buckets):
            bucket.name = timeline.bucket(name, place, bucket.layout)

    def description(self) -> handshake.Description:
        """What has to be equal on all ranks."""
        return handshake.describe(
            self.layers,
            self.compressor,
            [bucket.layout for bucket in self.buckets],
            self.settings,
            framework=f"torch {torch.__version__.partition('+')[0]}",
            horovod=horovod_version,
        )

    def compare_again(self) -> None:
        """Lets the ranks compare what they train once more, before the next step."""
        self._agreed = False
        self.ledger.digest()
        self.summed = 0
        self.rounds.forget()

    def agree(self) -> None:
        """All ranks compare what they train; once, before anything travels."""
        if self._agreed:
            return
        mine = self.description()
        if not self.compressor.adds_up:  # sums are the same in every step
            mine = {**mine, handshake.STEP: str(self.steps)}
        every = self._gather_objects(mine, handshake.Description)
        handshake.agree(every, self.process_set.ranks)
        if self.place is not None:
            _ = self.groups  # all ranks are here together
        self._agreed = True

    @property
    def in_step(self) -> dict[str, str]:
        """What has to be equal on all ranks in this step; nothing before its first gradient."""
        if self._frozen is None:
            return {}
        frozen = [name for name, p in self._named if p in self._frozen]
        return {
            "parameters that are frozen": ", ".join(frozen) or "none",
            "a gradient that is not finite (nonfinite=, or a loss scaler)": self._policy,
        }

    def compare_step(self) -> None:
        """Names what differs between the ranks in this step; all of them call it.

        Raises:
            MismatchError: on all ranks.
        """
        every = self._gather_objects(self.in_step, dict[str, str])
        ranks = self.process_set.ranks or range(len(every))
        begun = {rank: one for rank, one in zip(ranks, every) if one}
        handshake.agree(list(begun.values()), list(begun), _ALIKE)

    def tell(self, numbers: Sequence[int], what: str) -> Generator[None, None, list[list[int]]]:
        """All ranks' numbers, below 2**31 and equally many; yields while it waits for them.

        Added up, each rank's in a place of its own, since that is what works with `hvd.join()`.
        """
        size = self.process_set.size()
        if size == 1:
            return [list(numbers)]
        everybody = torch.zeros(size, len(numbers), dtype=torch.int32, device="cpu")
        everybody[self.process_set.rank()] = torch.tensor(numbers, device="cpu")
        try:
            with failures.named(HorovodInternalError, f"the end of step {self.steps}'s exchange"):
                loan = lending.allreduce(everybody, f"{self.name}.{what}", self.process_set)
                while not loan.ready():
                    if not self.advance():
                        yield
                return loan.wait().tolist()
        except HorovodInternalError:
            self.advance()
            if self._errors:  # which name what was on its way
                raise self._errors[0] from None
            raise

    def _judge(self) -> None:
        """Warns on one rank, once, of a compressor that does not pay on this model."""
        if self._judged or self._arrived is not None:
            return
        self._judged = True
        if self.process_set.rank() == 0:
            target, ranks = self._bucket_bytes or BUCKET_BYTES, self.seat[1]
            plan = assignment.plan(self.compressor, self.used, target, ranks=ranks)
            for line in worth.warnings(self.compressor, plan, ranks):
                LOGGER.warning("%s", line)

    def _gather_objects(self, item: Any, kind: Any) -> list[Any]:
        with failures.named(HorovodInternalError, "the exchange of what the ranks train"):
            return gather_objects(item, kind, f"{self.name}.handshake", self.process_set)

    def begin(self) -> Set[torch.nn.Parameter]:
        """Begins a step, with its first gradient or without any; what is frozen in it."""
        if self._frozen is None:
            self.agree()
            if self._arrived is not None and self.steps > 0:
                self.reorder(self._gather_objects(self.order, list[str])[0])
            self._judge()
            self._begin_step()
            self._frozen = {p for p in self.parameters if not p.requires_grad}
            self.sources.forget(self._frozen)
            for bucket in self.buckets:
                held = {slot for slot, p in enumerate(bucket.parameters) if p in self._frozen}
                bucket.refresh()
                parameters.hold(bucket, held, self.steps)
        return self._frozen

    def give(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Takes a gradient; starts the program of its bucket when it was the last one.

        Args:
            gradient: dense, of the parameter's shape or one number; None stands for zero.
        """
        if parameter in self.begin():
            return  # frozen between forward and backward
        self.agree()  # once more if some have joined since the step began
        if self._arrived is not None:
            self._arrived.append(self._name_of[parameter])
        self._lay(parameter, gradient)

    def give_sparse(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Takes note of a sparse gradient, which Horovod gathers by itself."""
        values, indices = gradient._values(), gradient._indices()
        for part in (values, indices):
            self.ledger.sent(part)
        name = self._name_of[parameter]
        self.gathered[name] = self.gathered.get(name, 0) + values.numel()
        # In its bucket it is zero; or NaN, which tells the other ranks that it is not finite.
        nothing = (values.sum() * 0).to(parameter.dtype)
        self.give(parameter, None if not nothing.is_cuda and nothing == 0 else nothing)

    def take_sparse(self, gathered: torch.Tensor) -> torch.Tensor:
        """Takes note of what Horovod has gathered."""
        for part in (gathered._values(), gathered._indices()):
            self.ledger.received(part)
        return gathered

    def finish(self) -> None:
        """Runs every started program to its end.

        Raises:
            PayloadError: and the like, from a program. All other programs are ended first, so
                that no rank waits for one of this rank's.
        """
        lending.complete([self.finishing()])

    @property
    def leaves_out(self) -> bool:
        """Whether the optimizer has to leave out the step that was exchanged last."""
        return self.undone and self._policy == "skip"

    def take(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The reduced gradient of a parameter, in its shape and dtype, after `finish`."""
        self.finish()
        return self._taken(parameter)

    def poisoned(self, what: str) -> None:
        """A gradient that was added up beside the buckets is not finite, on all ranks.

        Raises:
            NonFiniteGradientError: if that is the policy; else the step is undone as far as it can.
        """
        if not self._undoes:
            raise NonFiniteGradientError(what)
        self.undone = True

    def give_up(self) -> None:
        """Ends a step that has failed."""
        self.scaling.forget()
        if self._open:
            self.abandon()
        else:
            self.clear()

    def clear(self) -> None:
        """Ends a step, once all results were taken: lets go of them, and of what was frozen."""
        self._frozen = None
        self.sources.end_step()
        self.scaling.end_step()
        if self._arrived:  # in a step that was left out, of layers that it had not used
            self._arrived.clear()
        for bucket in self.buckets:
            bucket.result = None
            parameters.release(bucket)

    def abandon(self) -> None:
        """Lets go of an exchange that another rank's end has broken; the ranks compare again."""
        self._frozen = None
        self.compare_again()
        self._open, self._errors = False, []
        self.sources.forget()
        if self._arrived:
            self._arrived.clear()
        self.scaling.end_step()
        for bucket in self.buckets:
            bucket.end(undo=True)
            parameters.release(bucket)
            bucket.abandon()
            bucket.streams.clear()
            bucket.result = None
            bucket.absent = set(range(len(bucket.parameters)))

    @property
    def ordered(self) -> bool:
        """Whether the buckets are planned as the model uses its layers, if that counts."""
        return self._arrived is None

    def stats(self) -> CompressionStats:
        """Totals since the start; reads the device."""
        return exchange.stats_of(self, [name for name, _, _ in self.layers], self.gathered)

    @property
    def moments_of_layers(self) -> list[str]:
        """How the second moments of each layer in `used` are found, if they are per sample."""
        if self.sources.source != "sample":
            return []
        known = dict(self._named)
        return [moments.how(known[name]) for name, _, _ in self.used]
