"""Drives the programs of all buckets over Horovod while backward runs.

A bucket's program starts when the last of its gradients has arrived, so its collective travels
while earlier layers are still differentiated. The generator is then parked on a Horovod handle.
`finish` resumes the programs, round by round, until every bucket has its result.

Everything that travels has a name, see `hvd_gradcomp.timeline`: hooks fire in another order on each
rank, and Horovod pairs by name.
"""

from __future__ import annotations

import glob
import logging
import math
import weakref
from collections.abc import Collection, Generator, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import horovod.torch as horovod
import torch
from horovod import __version__ as horovod_version
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from hvd_gradcomp import assignment, failures, handshake, hierarchy, messages, timeline, worth
from hvd_gradcomp.aggregator import Compressor, Context, Program, State, leaves
from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.algorithms.variance import weight_of_passes
from hvd_gradcomp.collectives import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Collective,
    Gather,
    Inside,
    Switch,
    goes_as_sum,
)
from hvd_gradcomp.layout import Layout
from hvd_gradcomp.names import Names
from hvd_gradcomp.ops import NonFiniteGradientError, PayloadError
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.protocols import carrying
from hvd_gradcomp.protocols.learning import retrained
from hvd_gradcomp.protocols.reporting import Report, report
from hvd_gradcomp.protocols.resizing import start
from hvd_gradcomp.stats import CompressionStats, mean_losses, norm_of
from hvd_gradcomp.torch import lending, moments, parameters
from hvd_gradcomp.torch.parameters import layers_of
from hvd_gradcomp.torch.rounds import Rounds
from hvd_gradcomp.torch.scaling import LossScaling

LOGGER = logging.getLogger("hvd_gradcomp")
BUCKET_BYTES = 25 << 20  # large enough that calls and launches do not count

_ALIKE = (
    "Freeze and thaw the same parameters on all ranks, before the same step, and scale the loss on "
    "all of them or on none"
)
_PRIME = 2**31 - 1
_SENT, _RECEIVED, _SKIPPED = range(3)  # of an engine's counters

_DTYPE_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
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


def _leaving_dense(
    compressor: Compressor, named_parameters: Sequence[tuple[str, torch.nn.Parameter]]
) -> Compressor:
    """The same without the layers that `track_moments(..., others="dense")` has set apart."""
    if not compressor.uses_moments or getattr(compressor, "moments", "") not in ("auto", "sample"):
        return compressor
    apart = [name for name, p in named_parameters if moments.is_sent_dense(p)]
    if not apart:
        return compressor
    rules = [(assignment.Named(glob.escape(name)), NoneCompressor()) for name in apart]
    return assignment.Partition((*rules, (assignment.Named("*"), compressor)))


@dataclass
class Bucket:
    """Whole layers that share a program.

    Attributes:
        name: on Horovod's timeline; equal on all ranks.
        before: the state that a step began with, untouched, where a step may be undone.
        views: into `flat`, one for each layer, in the layer's shape.
        absent: layers whose gradient has not arrived in this step.
        programs: the running program, and the branches that it switched to, innermost last.
        loan: to the collective it waits for.
        since: exchanges of the engine before its first.
        held: layers that are frozen, and what the state holds of them is `waiting`, by its path.
        leader: the place in its host of the rank that compresses; see `hierarchy`.
        references: to the memory of `flat`, from here.
    """

    name: str
    layout: Layout
    compressor: Compressor
    ops: TorchOps
    parameters: list[torch.nn.Parameter]
    flat: torch.Tensor
    moment: torch.Tensor | None
    state: State
    before: State = None
    views: list[torch.Tensor] = field(init=False)
    moment_views: list[torch.Tensor] = field(init=False)
    absent: set[int] = field(init=False)
    programs: list[Program] = field(default_factory=list)
    request: Collective | None = None
    loan: Any = None
    round: int = 0
    result: torch.Tensor | None = None
    streams: set[Any] = field(default_factory=set)
    since: int = 0
    held: set[int] = field(default_factory=set)
    references: float = math.nan
    waiting: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    leader: int = 0

    def __post_init__(self) -> None:
        self._cut_views()
        self.moment_views = [] if self.moment is None else self.cut(self.moment)
        self.absent = set(range(len(self.parameters)))

    def _cut_views(self) -> None:
        self.views = self.cut(self.flat)
        self.references = _references(self.flat)

    def refresh(self) -> None:
        """Takes new memory where somebody still has a gradient of the step before.

        Reduced gradients may lie in `flat`, and a user who has kept one expects it to stay as it
        is, as everywhere in PyTorch. Those that are a parameter's gradient still are to change.
        """
        memory = self.flat.untyped_storage().data_ptr()
        current = sum(
            p.grad is not None
            and not p.grad.is_sparse
            and p.grad.untyped_storage().data_ptr() == memory
            for p in self.parameters
        )
        if not _references(self.flat) <= self.references + current:
            self.flat = torch.zeros_like(self.flat)
            self._cut_views()

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A bucket's vector as its layers."""
        return [self.layer(flat, slot) for slot in range(len(self.layout.names))]

    def layer(self, flat: torch.Tensor, slot: int) -> torch.Tensor:
        """One of them."""
        start, layout = self.layout.offsets[slot], self.layout
        return flat[start : start + layout.sizes[slot]].view(layout.shapes[slot])

    def abandon(self) -> None:
        """Ends its programs where they are; the next gradients begin anew."""
        self.programs.clear()
        self.round = 0  # the loan lives on, Horovod's thread may not be done with it

    def joined(self, pieces: dict[str, torch.Tensor]) -> torch.Tensor:
        """The inverse of `cut`, from vectors by name."""
        flat = self.ops.zeros((self.layout.size,), self.layout.dtype)
        for view, name in zip(self.cut(flat), self.layout.names):
            view.copy_(pieces[name])
        return flat


class Engine:
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
        self.compressor = compressor = _leaving_dense(compressor, named_parameters)
        self.nonfinite, self.scaling = nonfinite, LossScaling(scaler)
        self._policy = nonfinite or "raise"
        self.prescale, self.postscale = prescale, postscale
        self.process_set, self.place = process_set, place
        self._groups: hierarchy.Groups | None = None  # made when all are known to want them
        self.passes = passes
        self.batch_size = batch_size
        self.settings = settings
        self.name = name
        self.steps = 0
        self.undone = False  # whether the last exchange left everything as it was
        self.order: list[str] = []  # in which layers are used, once it is known
        self._arrived: list[str] | None = [] if compressor.needs_order else None
        self._named, self._bucket_bytes = list(named_parameters), bucket_bytes
        self._name_of = {p: name for name, p in named_parameters}
        self.counters = [0, 0, 0]  # bytes sent, bytes received, steps left out
        self.gathered: dict[str, int] = {}  # values of sparse gradients, by the layer's name
        self._agreed = self._judged = False
        self._frozen: set[torch.nn.Parameter] | None = None  # known once a step has begun
        self.layers = layers_of(named_parameters)
        assigned = assignment.assign(compressor, self.layers, self.seat[1])
        self.moments = self._moment_source(
            [pair for pair, one in zip(named_parameters, assigned) if one.uses_moments]
        )
        self._settle_on(list(self._plan(self._named)))
        self._counted: dict[torch.nn.Parameter, int] = {}
        self._made = 0  # passes of this step; a layer contributes nothing to those without it
        self.rounds = Rounds()
        self._open = False  # a program of this step has started
        self._heard: list[torch.Tensor] = []  # of the bits of replies that all ranks have alike
        self.summed = 0  # a digest of those of the exchange before; 0 for none
        self._errors: list[Exception] = []  # that programs of this step have ended with
        self._watch(self.buckets)
        living.add(self)

    # -- set-up ------------------------------------------------------------------------------

    def _settle_on(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self._places = {
            p: (bucket, slot) for bucket in self.buckets for slot, p in enumerate(bucket.parameters)
        }

    @property
    def seat(self) -> tuple[int, int]:
        """(rank, size) as compressors see them: of hosts, where only those exchange."""
        if self.place is not None:
            return self.place.host, self.place.hosts
        return self.process_set.rank(), self.process_set.size()

    def leads(self, bucket: Bucket) -> bool:
        """Whether this rank compresses a bucket, and keeps its state."""
        return self.place is None or self.place.slot == bucket.leader

    @property
    def groups(self) -> hierarchy.Groups:
        """The process sets of this rank among hosts; all ranks ask together the first time."""
        assert self.place is not None
        if self._groups is None:
            self._groups = hierarchy.groups_of(mpi_ops, self.place, self._gather_objects)
        return self._groups

    def among(self, request: Collective | None) -> Any:
        """The process set that a collective is for; of None, those that exchange compressed."""
        if self.place is None:
            return self.process_set
        return self.groups.inside if isinstance(request, Inside) else self.groups.across

    @property
    def parameters(self) -> Set[torch.nn.Parameter]:
        """All that have a place in a bucket."""
        return self._places.keys()

    @property
    def ordered_parameters(self) -> list[torch.nn.Parameter]:
        """All of them, in an order that is the same on all ranks."""
        return [p for _, p in self._named]

    def count(self, sent: torch.Tensor) -> None:
        """Counts a tensor that was added up beside the buckets."""
        self.counters[_SENT] += sent.numel() * sent.element_size()
        self.counters[_RECEIVED] += sent.numel() * sent.element_size()

    def _plan(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        placed: Collection[Bucket] = (),
    ) -> Iterator[Bucket]:
        """Buckets in the order in which backward fills them: last layers first.

        What has a place in buckets that are there already gets no other.
        """
        by_name = dict(named_parameters)
        for name, p in named_parameters:
            if p.dtype not in _DTYPE_NAMES:
                raise ValueError(f"{name} has dtype {p.dtype}; only real floating point is reduced")
            if not lending.takes(p.device):
                raise ValueError(
                    f"{name} is on {p.device}, and this Horovod was built without collectives for "
                    "tensors there. Build it for this PyTorch with HOROVOD_GPU_OPERATIONS=NCCL "
                    "(hvd-gradcomp build-horovod), or train on the CPU"
                )
        devices = [p.device for _, p in named_parameters]
        verbs = {device: TorchOps(device) for device in devices}
        ranks = self.seat[1]
        target = self._bucket_bytes or BUCKET_BYTES
        known = {layer[0]: layer for layer in self.layers}
        new = layers_of([pair for pair in named_parameters if pair[0] not in known])
        known |= {layer[0]: layer for layer in new}
        self.used = [known[name] for name, _ in named_parameters]
        there = {name for bucket in placed for name in bucket.layout.names}
        left_out = [place for place, layer in enumerate(self.used) if layer[0] in there]
        plan = assignment.plan(self.compressor, self.used, target, devices, left_out, ranks)
        for index, (compressor, layout) in enumerate(plan, len(placed)):
            parameters = [by_name[name] for name in layout.names]
            ops = verbs[parameters[0].device]
            moment = None
            if compressor.uses_moments and self.moments in ("sample", "microbatch"):
                moment = ops.zeros((layout.size,))
            flat = ops.zeros((layout.size,), layout.dtype)
            # Layers that change buckets, as their order becomes known, do not change leaders.
            turns = 1 if self.place is None or self.compressor.needs_order else self.place.slots
            if self.place is not None and self.place.slot != index % turns:
                compressor = NoneCompressor()  # what has no state
            state = start(compressor, ops, layout, ranks)
            name = timeline.bucket(self.name, index, layout)
            bucket = Bucket(name, layout, compressor, ops, parameters, flat, moment, state)
            bucket.leader = index % turns
            yield bucket

    def _moment_source(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
    ) -> str:
        """Where second moments come from: "sample", "microbatch", "step", or "" if unused."""
        if not self.compressor.uses_moments:
            return ""
        source = str(getattr(self.compressor, "moments", "auto"))
        tracked = [moments.is_tracked(p) for _, p in named_parameters]
        if source == "auto":
            if tracked and all(tracked):
                return "sample"
            if self.passes > 1:
                return "microbatch"
            if self.process_set.rank() == 0:
                LOGGER.warning(
                    "the compressor takes each step as one sample (moments='step'): nothing better "
                    "is set up. hvd.track_moments(model) before DistributedOptimizer gives "
                    "per-sample moments, backward_passes_per_step > 1 those of micro-batches. It "
                    "is %s",
                    self.compressor,
                )
            return "step"
        if source == "sample" and not all(tracked):
            untracked = [name for (name, _), held in zip(named_parameters, tracked) if not held]
            raise ValueError(
                "moments='sample' needs hvd.track_moments(model) before DistributedOptimizer; "
                f"not tracked: {', '.join(untracked[:8])}"
            )
        if source == "microbatch" and self.passes < 2:
            raise ValueError(
                "moments='microbatch' needs backward_passes_per_step of at least 2, got "
                f"{self.passes}"
            )
        return source

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
        if self.moments == "sample" and untracked:
            raise ValueError(
                "moments='sample' needs hvd.track_moments(model) before its parameters join; not "
                f"tracked: {', '.join(untracked)}"
            )
        if self.moments == "sample":
            self.compressor = _leaving_dense(self.compressor, named_parameters)
        everything = [*self._named, *named_parameters]
        new = list(self._plan(everything, self.buckets))
        for bucket in new:
            bucket.since = self.steps
            bucket.state = retrained(bucket.compressor, bucket.ops, bucket.state, self.steps)
        self._named = everything
        self._name_of.update((p, name) for name, p in named_parameters)
        self.layers += self.used[len(self.used) - len(named_parameters) :]
        self._settle_on([*self.buckets, *new])
        self._watch(new)
        self._agreed = False

    def _watch(self, buckets: Sequence[Bucket]) -> None:
        """Sees the passes of what needs the moments of micro-batches."""
        for bucket in buckets:
            if self.moments == "microbatch" and bucket.moment is not None:
                for parameter in bucket.parameters:
                    parameter.register_hook(self._square_of(parameter))

    def _square_of(self, parameter: torch.nn.Parameter) -> Any:
        """A tensor hook: sees what one pass contributes, before it is accumulated."""

        def hook(contribution: torch.Tensor) -> None:
            bucket, slot = self._places[parameter]
            square = bucket.moment_views[slot]
            dense = contribution.to_dense() if contribution.is_sparse else contribution
            dense = dense.detach().to(square.dtype)
            if self._counted.get(parameter, 0) == 0:
                square.zero_()
            square.addcmul_(dense, dense)
            self._counted[parameter] = self._counted.get(parameter, 0) + 1
            self._made = max(self._made, self._counted[parameter])

        return hook

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
        return list(self.counters), dict(self.gathered)

    @counted.setter
    def counted(self, counted: tuple[list[int], dict[str, int]]) -> None:
        counters, gathered = counted
        self.counters, self.gathered = list(counters), dict(gathered)

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
        used, known = set(order), dict(self._named)
        unused = [name for name, _ in self._named if name not in used]
        middle = len(order) // 2
        names = [*order[:middle], *unused, *order[middle:]]
        ranks = self.seat[1]
        layers = {layer[0]: layer for layer in self.layers}
        before = assignment.assign(self.compressor, self.used, ranks)
        after = assignment.assign(self.compressor, [layers[name] for name in names], ranks)
        if dict(zip((name for name, _, _ in self.used), before)) == dict(zip(names, after)):
            return
        velocities: dict[str, torch.Tensor] = {}
        residuals: dict[str, torch.Tensor] = {}
        for bucket in self.buckets:
            for kept, vector in (
                (velocities, carrying.velocity(bucket.compressor, bucket.state)),
                (residuals, carrying.residual(bucket.compressor, bucket.state)),
            ):
                if vector is not None:
                    kept.update(zip(bucket.layout.names, bucket.cut(vector)))
        self._settle_on(list(self._plan([(name, known[name]) for name in names])))
        for bucket in self.buckets:
            one, ops, state = bucket.compressor, bucket.ops, bucket.state
            if set(bucket.layout.names) <= set(velocities):
                state = carrying.with_velocity(one, state, bucket.joined(velocities))
            kept_before = set(bucket.layout.names) <= set(residuals)
            if kept_before and carrying.residual(one, state) is not None:
                nothing = ops.zeros((bucket.layout.size,))
                state, _ = carrying.inherit(one, ops, state, nothing, bucket.joined(residuals))
            bucket.state = state

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
        self._heard, self.summed = [], 0
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

    # -- one step ----------------------------------------------------------------------------

    def begin(self) -> Set[torch.nn.Parameter]:
        """Begins a step, with its first gradient or without any; what is frozen in it."""
        if self._frozen is None:
            self.agree()
            if self._arrived is not None and self.steps > 0:
                self.reorder(self._gather_objects(self.order, list[str])[0])
            self._judge()
            scaled = self.scaling.begin_step()
            self._policy = self.nonfinite or ("skip" if scaled else "raise")
            self._frozen = {p for p in self.parameters if not p.requires_grad}
            for p in self._frozen:
                self._counted.pop(p, None)
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
        bucket, slot = self._places[parameter]
        with torch.no_grad():
            if gradient is None:
                bucket.views[slot].zero_()
            else:
                self.scaling.unscale(gradient, bucket.views[slot])
            self._give_moment(bucket, slot, parameter)
        if bucket.flat.is_cuda:
            bucket.streams.add(torch.cuda.current_stream(bucket.flat.device))
        bucket.absent.discard(slot)
        if not bucket.absent and not bucket.programs and bucket.result is None:
            self._start(bucket)

    def give_sparse(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Takes note of a sparse gradient, which Horovod gathers by itself."""
        values, indices = gradient._values(), gradient._indices()
        self.counters[_SENT] += _bytes(values) + _bytes(indices)
        name = self._name_of[parameter]
        self.gathered[name] = self.gathered.get(name, 0) + values.numel()
        # In its bucket it is zero; or NaN, which tells the other ranks that it is not finite.
        nothing = (values.sum() * 0).to(parameter.dtype)
        self.give(parameter, None if not nothing.is_cuda and nothing == 0 else nothing)

    def take_sparse(self, gathered: torch.Tensor) -> torch.Tensor:
        """Takes note of what Horovod has gathered."""
        self.counters[_RECEIVED] += _bytes(gathered._values()) + _bytes(gathered._indices())
        return gathered

    def _give_moment(self, bucket: Bucket, slot: int, parameter: torch.nn.Parameter) -> None:
        if not bucket.moment_views:
            return
        view = bucket.moment_views[slot]
        if self.moments == "sample":
            moment = moments.take(parameter, bucket.views[slot])
            if moment is None:
                view.zero_()
            elif isinstance(moment, moments.Step):
                view.copy_(bucket.views[slot]).square_()
            else:
                self.scaling.unscale(moment, view, power=2)
            return
        if self._counted.pop(parameter, 0) == 0:
            view.zero_()
            return
        gradient = bucket.views[slot].to(view.dtype)
        if self._made < 2:  # a step that ends with its first pass is one sample
            torch.square(gradient, out=view)
            return
        weight = weight_of_passes(self._made, self.batch_size)
        self.scaling.unscale(view, view, power=2)
        view.mul_(weight).addcmul_(gradient, gradient, value=1.0 - weight).clamp_(min=0.0)

    def _start(self, bucket: Bucket) -> None:
        self._open = True
        if bucket.streams:
            here = torch.cuda.current_stream(bucket.flat.device)
            for stream in bucket.streams - {here}:
                here.wait_stream(stream)
            bucket.streams.clear()
        context = Context(
            bucket.layout,
            *self.seat,
            self.steps,
            self.prescale,
            self.postscale,
        )
        extra = {} if bucket.moment is None else {"moment": bucket.moment}
        if self._undoes:
            bucket.before = bucket.state
            bucket.ops.keep(x for _, x in leaves(bucket.state))
        how = bucket.ops, context, bucket.flat, bucket.state
        with torch.no_grad():
            if self.place is None:
                program = bucket.compressor.aggregate(*how, **extra)
            else:
                program = hierarchy.aggregate(
                    bucket.compressor, *how, place=self.place, leader=bucket.leader, **extra
                )
            bucket.programs.append(program)
            try:
                self._advance(bucket, None)
            except Exception:
                bucket.abandon()
                raise

    def advance(self) -> bool:
        """Resumes the programs whose reply is there; whether there were any."""
        ready = [bucket for bucket in self.buckets if bucket.programs and bucket.loan.ready()]
        for bucket in ready:
            try:
                with torch.no_grad():
                    self._advance(bucket, self._wait(bucket))
            except Exception as error:
                self._errors.append(error)
                bucket.abandon()
        return bool(ready)

    def finish(self) -> None:
        """Runs every started program to its end.

        Raises:
            PayloadError: and the like, from a program. All other programs are ended first, so
                that no rank waits for one of this rank's.
        """
        lending.complete([self.finishing()])

    def finishing(self) -> Iterator[None]:
        """Does what `finish` does; yields where every program waits for other ranks."""
        while any(bucket.programs for bucket in self.buckets):
            if not self.advance():
                yield
        if not self._open:
            return
        self._open, errors, self._errors = False, self._errors, []
        if self._undoes:
            for ops in {id(bucket.ops): bucket.ops for bucket in self.buckets}.values():
                try:
                    ops.settle()
                except NonFiniteGradientError as error:
                    errors.append(error)
        for bucket in self.buckets:
            bucket.absent = set(range(len(bucket.parameters)))
            self._keep_or_undo(bucket, undo=bool(errors))
        others = [e for e in errors if not isinstance(e, NonFiniteGradientError)]
        self.undone = bool(errors) and not others and self._undoes
        sums, self._heard = self._heard, []
        self.summed = sum(int(x) for x in sums) % _PRIME
        if self.undone:
            self._skip(errors[0])
            return
        self.steps += 1
        if errors:
            for bucket in self.buckets:
                bucket.result = None
            raise (others or errors)[0]

    @property
    def leaves_out(self) -> bool:
        """Whether the optimizer has to leave out the step that was exchanged last."""
        return self.undone and self._policy == "skip"

    @property
    def _undoes(self) -> bool:
        """Whether a step with a gradient that is not finite leaves everything as it was."""
        return self._policy != "raise"

    def _keep_or_undo(self, bucket: Bucket, undo: bool) -> None:
        """Ends what `_start` began; a state that was undone is the one before, to the bit."""
        before, bucket.before = bucket.before, None
        if before is None:
            return
        bucket.state = before if undo else bucket.state
        bucket.ops.let_go([x for _, x in leaves(before)], [x for _, x in leaves(bucket.state)])

    def _skip(self, error: Exception) -> None:
        """Gives out NaN, on all ranks, for a loss scaler or `step` to see."""
        self.counters[_SKIPPED] += 1
        expected = self.scaling.scaler is not None or self.counters[_SKIPPED] > 1
        LOGGER.log(
            logging.DEBUG if expected else logging.WARNING,
            "step left out (%d so far): %s",
            self.counters[_SKIPPED],
            error,
        )
        for bucket in self.buckets:
            bucket.result = bucket.flat.zero_()  # what lies between the layers has to stay 0
            for view in bucket.views:
                view.fill_(float("nan"))

    def take(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The reduced gradient of a parameter, in its shape and dtype, after `finish`."""
        bucket, slot = self._places[parameter]
        self.finish()
        if bucket.result is None:
            raise RuntimeError("take() without an exchange; this is a bug in hvd_gradcomp")
        gradient = bucket.layer(bucket.result, slot)
        return self.scaling.scale(gradient).to(parameter.dtype)

    def forget_passes(self, those: Collection[torch.nn.Parameter] | None = None) -> None:
        """Forgets what passes have contributed, to the moments of all or of these parameters."""
        if those is None:
            self._made = 0
        for p in list(self._counted) if those is None else those:
            self._counted.pop(p, None)

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
        self._frozen, self._made = None, 0
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
        self.forget_passes()
        if self._arrived:
            self._arrived.clear()
        self.scaling.end_step()
        for bucket in self.buckets:
            self._keep_or_undo(bucket, undo=True)
            parameters.release(bucket)
            bucket.abandon()
            bucket.streams.clear()
            bucket.request = bucket.result = None
            bucket.absent = set(range(len(bucket.parameters)))

    def _advance(self, bucket: Bucket, reply: Any) -> None:
        """Resumes the innermost program until it asks for a collective, or all have ended."""
        while bucket.programs:
            try:
                request = bucket.programs[-1].send(reply)
            except StopIteration as stop:
                bucket.programs.pop()
                reply = stop.value
                continue
            if isinstance(request, Switch):
                bucket.programs.append(request.branches[int(request.index)]())
                reply = None
                continue
            with failures.named(HorovodInternalError, self._what(bucket)):
                bucket.request, bucket.loan = request, self._submit(bucket, request)
            bucket.round += 1
            return
        bucket.result, bucket.state = reply
        bucket.round = 0

    def _what(self, bucket: Bucket) -> str:
        return f"the exchange of {bucket.name} in step {self.steps}"

    def _submit(self, bucket: Bucket, request: Collective) -> Any:
        name = timeline.collective(bucket.name, request, bucket.round)
        process_set, counts = self.among(request), not isinstance(request, Inside)
        if isinstance(request, Inside):
            request = request.request
        tensor = request.tensor.contiguous()  # type: ignore[union-attr]
        if counts and (not isinstance(request, Broadcast) or request.root == process_set.rank()):
            self.counters[_SENT] += _bytes(tensor)
        if self._sums(request, process_set):
            return lending.allreduce(tensor.view(torch.int32), name, process_set)
        if isinstance(request, Allgather):
            return lending.allgather(tensor, name, process_set)
        if isinstance(request, Allreduce):
            scales = request.prescale, request.postscale
            return lending.allreduce(tensor, name, process_set, *scales, request.donated)
        if isinstance(request, Alltoall):
            return lending.alltoall(tensor.view(-1), [], name, process_set)
        if isinstance(request, Gather):
            splits = [0] * process_set.size()
            splits[request.root] = tensor.numel()
            return lending.alltoall(tensor, splits, name, process_set)
        if isinstance(request, Broadcast):
            root = process_set.ranks[request.root] if process_set.ranks else request.root
            return lending.broadcast(tensor, root, name, process_set)
        raise TypeError(f"{request!r} is no collective; {self.compressor} has asked for it")

    def _sums(self, request: Collective, process_set: Any) -> bool:
        if not isinstance(request, Allgather):
            return False
        dtype = str(request.tensor.dtype).removeprefix("torch.")
        size, ranks = request.tensor.numel(), process_set.size()
        return goes_as_sum(size, dtype, ranks, horovod.gloo_enabled())

    def _wait(self, bucket: Bucket) -> torch.Tensor:
        with failures.named(HorovodInternalError, self._what(bucket)):
            reply = bucket.loan.wait()
        request, bucket.loan = bucket.request, None
        assert request is not None
        process_set, counts = self.among(request), not isinstance(request, Inside)
        if isinstance(request, Inside):
            request = request.request
        if isinstance(reply, tuple):  # alltoall also hands back how much came from whom
            reply = reply[0]
        if reply.is_cuda:
            # Horovod makes the default stream of its own thread wait, not the one used here.
            here = torch.cuda.current_stream(reply.device)
            if here != torch.cuda.default_stream(reply.device):
                here.wait_stream(torch.cuda.default_stream(reply.device))
        if self._sums(request, process_set):
            both = reply.new_empty((2, *reply.shape))
            own = request.tensor.view(torch.int32)  # type: ignore[union-attr]
            both[process_set.rank()] = own
            torch.sub(reply, own, out=both[1 - process_set.rank()])
            reply = both.view(torch.uint8)
        if counts and (not isinstance(request, Broadcast) or request.root != process_set.rank()):
            self.counters[_RECEIVED] += _bytes(reply)
        if isinstance(request, (Allreduce, Broadcast)) and self.place is None and not reply.is_cuda:
            self._heard.append(_sum_of_bits(reply))
        if isinstance(request, Gather):
            return reply
        world, sent = process_set.size(), request.tensor  # type: ignore[union-attr]
        if isinstance(request, Allgather):
            if reply.numel() != world * sent.numel():
                raise PayloadError(
                    f"the ranks sent payloads of different sizes for {bucket.name}: "
                    f"{reply.numel()} items came from {world} ranks, this one sent "
                    f"{sent.numel()}. Load the same checkpoint on all ranks"
                )
            return reply.view(world, *sent.shape)
        return reply.view(sent.shape)

    # -- what was done -----------------------------------------------------------------------

    @property
    def ordered(self) -> bool:
        """Whether the buckets are planned as the model uses its layers, if that counts."""
        return self._arrived is None

    def settled(self) -> None:
        """Waits for what is still on its way from a GPU to the host."""
        for device in {bucket.flat.device for bucket in self.buckets}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def stats(self) -> CompressionStats:
        """Totals since the start; reads the device."""
        layers: dict[str, int] = {}
        sizes: dict[str, int] = {}
        reports: list[Report] = []
        elements = 0
        for bucket in filter(self.leads, self.buckets):
            steps = self.steps - bucket.since
            elements += bucket.layout.elements * steps
            sizes.update(zip(bucket.layout.names, bucket.layout.sizes))
            said = report(bucket.compressor, bucket.layout, bucket.state, self.steps, bucket.since)
            reports.append(said)
            layers.update(zip(bucket.layout.names, said.sent))
        for name, values in self.gathered.items():
            layers[name] = layers.get(name, 0) + values
        order = [name for name, _, _ in self.layers if name in layers]
        return CompressionStats(
            steps=self.steps,
            elements=elements,
            elements_sent=sum(layers.values()),
            bytes_dense=4 * elements,
            bytes_sent=self.counters[_SENT],
            bytes_received=self.counters[_RECEIVED],
            layers={name: layers[name] for name in order},
            losses=mean_losses(said.losses for said in reports),
            sizes={name: sizes[name] for name in order if name in sizes},
            skipped=self.counters[_SKIPPED],
            rung_changes=sum(said.rung_changes for said in reports),
            residual_norm=norm_of(_norm(r.residual) for r in reports if r.residual is not None),
            gradient_norm=norm_of(_norm(p.grad) for p in self._places if p.grad is not None),
        )

    @property
    def moments_of_layers(self) -> list[str]:
        """How the second moments of each layer in `used` are found, if they are per sample."""
        if self.moments != "sample":
            return []
        known = dict(self._named)
        return [moments.how(known[name]) for name, _, _ in self.used]

    def retrain(self) -> None:
        """Lets the compressors learn anew what they learn, from the next step on."""
        for bucket in self.buckets:
            bucket.state = retrained(bucket.compressor, bucket.ops, bucket.state, self.steps)


def _references(x: torch.Tensor) -> float:
    """How many tensors share the memory of this one; NaN before PyTorch 2.1, nobody knows there."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count(x.untyped_storage()._cdata) if count is not None else math.nan


def _sum_of_bits(x: torch.Tensor) -> torch.Tensor:
    """Any bit that flips changes it."""
    data = x.detach().reshape(-1).view(torch.uint8)
    whole = data.shape[0] // 8 * 8
    return data[:whole].view(torch.int64).sum() + data[whole:].sum()


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def _norm(x: torch.Tensor) -> float:
    values = x.detach().coalesce().values() if x.is_sparse else x.detach()
    dtype = torch.promote_types(values.dtype, torch.float32)  # halves overflow, doubles stay
    return float(torch.linalg.vector_norm(values, dtype=dtype))
