"""Drives the programs of all buckets over Horovod while backward runs.

A bucket's program starts when the last of its gradients has arrived, so its collective travels
while earlier layers are still differentiated. The generator is then parked on a Horovod handle.
`finish` resumes the programs, round by round, until every bucket has its result.

Everything that travels is named `gradcomp.<engine>.<bucket>.<round>`: hooks fire in another order
on each rank, and Horovod pairs by name.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.torch as horovod
import torch
from horovod import __version__ as horovod_version
from horovod.common.exceptions import HorovodInternalError

from hvd_gradcomp import assignment, failures, handshake
from hvd_gradcomp.aggregator import Compressor, Context, Program, State
from hvd_gradcomp.collectives import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Collective,
    Gather,
    Switch,
)
from hvd_gradcomp.layout import Layout
from hvd_gradcomp.ops import PayloadError
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.stats import CompressionStats, mean_losses
from hvd_gradcomp.torch import moments

LOGGER = logging.getLogger("hvd_gradcomp")
BUCKET_BYTES = 25 << 20  # large enough that calls and launches do not count

_DTYPE_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
living: weakref.WeakSet[Engine] = weakref.WeakSet()
_names = (f"gradcomp.{number}" for number in itertools.count())


def next_name() -> str:
    """The name of the next engine. All ranks take one for each, in the process set or not."""
    return next(_names)


@dataclass
class Bucket:
    """Whole layers that share a program.

    Attributes:
        views: into `flat`, one for each layer, in the layer's shape.
        absent: layers whose gradient has not arrived in this step.
        programs: the running program, and the branches that it switched to, innermost last.
        handle: of the collective it waits for.
    """

    index: int
    layout: Layout
    compressor: Compressor
    ops: TorchOps
    parameters: list[torch.nn.Parameter]
    flat: torch.Tensor
    moment: torch.Tensor | None
    state: State
    views: list[torch.Tensor] = field(init=False)
    moment_views: list[torch.Tensor] = field(init=False)
    absent: set[int] = field(init=False)
    programs: list[Program] = field(default_factory=list)
    request: Collective | None = None
    handle: Any = None
    round: int = 0
    result: torch.Tensor | None = None
    streams: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.views = self.cut(self.flat)
        self.moment_views = [] if self.moment is None else self.cut(self.moment)
        self.absent = set(range(len(self.parameters)))

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A bucket's vector as its layers."""
        layout = self.layout
        return [
            flat[offset : offset + size].view(shape)
            for offset, size, shape in zip(layout.offsets, layout.sizes, layout.shapes)
        ]

    def abandon(self) -> None:
        """Ends its programs where they are; the next gradients begin anew."""
        self.programs.clear()
        self.handle, self.round = None, 0

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
        name: begins the name of everything that travels; see `next_name`.
        prescale, postscale: see `Context`.
        process_set: the ranks that take part.
        passes: backward passes for each exchange.
        batch_size: samples that a rank sees for each exchange, for `moments="microbatch"`.
        bucket_bytes: target size of a bucket; 25 MiB if None.
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
        settings: str = "",
    ) -> None:
        self.compressor = compressor
        self.prescale, self.postscale = prescale, postscale
        self.process_set = process_set
        self.passes = passes
        self.batch_size = batch_size
        self.settings = settings
        self.name = name
        self.steps = 0
        self.order: list[str] = []  # in which layers are used, once it is known
        self._arrived: list[str] | None = [] if compressor.needs_order else None
        self._named, self._bucket_bytes = list(named_parameters), bucket_bytes
        self._name_of = {p: name for name, p in named_parameters}
        self._bytes_sent = self._bytes_received = 0
        self._agreed = False
        self.layers = [
            (name, tuple(p.shape), str(p.dtype).removeprefix("torch."))
            for name, p in named_parameters
        ]
        assigned = assignment.assign(compressor, self.layers, process_set.size())
        self.moments = self._moment_source(
            [pair for pair, one in zip(named_parameters, assigned) if one.uses_moments]
        )
        self._settle_on(list(self._plan(self._named)))
        self._counted: dict[torch.nn.Parameter, int] = {}
        if self.moments == "microbatch":
            for parameter, (bucket, _) in self._places.items():
                if bucket.moment is not None:
                    parameter.register_hook(self._square_of(parameter))
        living.add(self)

    # -- set-up ------------------------------------------------------------------------------

    def _settle_on(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self._places = {
            p: (bucket, slot) for bucket in self.buckets for slot, p in enumerate(bucket.parameters)
        }

    def _plan(self, named_parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> Iterator[Bucket]:
        """Buckets in the order in which backward fills them: last layers first."""
        layers = {layer[0]: layer for layer in self.layers}
        by_name = dict(named_parameters)
        for name, p in named_parameters:
            if p.dtype not in _DTYPE_NAMES:
                raise ValueError(f"{name} has dtype {p.dtype}; only real floating point is reduced")
        devices = [p.device for _, p in named_parameters]
        verbs = {device: TorchOps(device) for device in devices}
        ranks = self.process_set.size()
        target = self._bucket_bytes or BUCKET_BYTES
        self.used = [layers[name] for name, _ in named_parameters]
        plan = assignment.plan(self.compressor, self.used, target, devices, ranks=ranks)
        for index, (compressor, layout) in enumerate(plan):
            parameters = [by_name[name] for name in layout.names]
            ops = verbs[parameters[0].device]
            moment = None
            if compressor.uses_moments and self.moments in ("sample", "microbatch"):
                moment = ops.zeros((layout.size,))
            flat = ops.zeros((layout.size,), layout.dtype)
            state = compressor.start(ops, layout, ranks)
            yield Bucket(index, layout, compressor, ops, parameters, flat, moment, state)

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
                    "%r takes each step as one sample (moments='step'): nothing better is set up. "
                    "hvd.track_moments(model) before DistributedOptimizer gives per-sample "
                    "moments, backward_passes_per_step > 1 those of micro-batches.",
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

        return hook

    def order_is_known(self) -> None:
        """Gradients that come from now on are those of layers that were not used."""
        if self._arrived is not None and self.steps == 0:
            self.order, self._arrived = self._arrived[::-1], []

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
        ranks = self.process_set.size()
        layers = {layer[0]: layer for layer in self.layers}
        before = assignment.assign(self.compressor, self.used, ranks)
        after = assignment.assign(self.compressor, [layers[name] for name in names], ranks)
        if dict(zip((name for name, _, _ in self.used), before)) == dict(zip(names, after)):
            return
        velocities: dict[str, torch.Tensor] = {}
        residuals: dict[str, torch.Tensor] = {}
        for bucket in self.buckets:
            for kept, vector in (
                (velocities, bucket.compressor.velocity(bucket.state)),
                (residuals, bucket.compressor.residual(bucket.state)),
            ):
                if vector is not None:
                    kept.update(zip(bucket.layout.names, bucket.cut(vector)))
        self._settle_on(list(self._plan([(name, known[name]) for name in names])))
        for bucket in self.buckets:
            one, ops, state = bucket.compressor, bucket.ops, bucket.state
            if set(bucket.layout.names) <= set(velocities):
                state = one.with_velocity(state, bucket.joined(velocities))
            if set(bucket.layout.names) <= set(residuals) and one.residual(state) is not None:
                nothing = ops.zeros((bucket.layout.size,))
                state, _ = one.inherit(ops, state, nothing, bucket.joined(residuals))
            bucket.state = state

    def _agree(self) -> None:
        """All ranks compare what they train; once, before anything travels."""
        layouts = [bucket.layout for bucket in self.buckets]
        mine = handshake.describe(
            self.layers,
            self.compressor,
            layouts,
            self.settings,
            framework=f"torch {torch.__version__.partition('+')[0]}",
            horovod=horovod_version,
        )
        handshake.agree(self._gather_objects(mine), self.process_set.ranks)
        self._agreed = True

    def _gather_objects(self, item: Any) -> list[Any]:
        data = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        name = f"{self.name}.handshake"
        length = torch.tensor([data.numel()], dtype=torch.int32)
        with failures.named(HorovodInternalError, "the exchange of what the ranks train"):
            # As `allgather_object` of Horovod for TensorFlow, should another rank run that.
            lengths = horovod.allgather(length, f"{name}.sz", process_set=self.process_set)
            everything = horovod.allgather(data, f"{name}.t", process_set=self.process_set)
        pieces = everything.split(lengths.tolist())
        return [pickle.loads(bytes(piece.tolist())) for piece in pieces]

    # -- one step ----------------------------------------------------------------------------

    def give(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Takes a gradient; starts the program of its bucket when it was the last one.

        Args:
            gradient: dense; None stands for zero.
        """
        if not self._agreed:
            self._agree()
        if self._arrived is not None:
            if self.steps == 0:
                self._arrived.append(self._name_of[parameter])
            else:
                self.reorder(self._gather_objects(self.order)[0])
        bucket, slot = self._places[parameter]
        with torch.no_grad():
            if gradient is None:
                bucket.views[slot].zero_()
            else:
                bucket.views[slot].copy_(gradient)
            self._give_moment(bucket, slot, parameter)
        if bucket.flat.is_cuda:
            bucket.streams.add(torch.cuda.current_stream(bucket.flat.device))
        bucket.absent.discard(slot)
        if not bucket.absent and not bucket.programs and bucket.result is None:
            self._start(bucket)

    def _give_moment(self, bucket: Bucket, slot: int, parameter: torch.nn.Parameter) -> None:
        if not bucket.moment_views:
            return
        view = bucket.moment_views[slot]
        if self.moments == "sample":
            moment = moments.take(parameter)
            if moment is None:
                view.zero_()
            else:
                view.copy_(moment)
            return
        count = self._counted.pop(parameter, 0)
        if count == 0:
            view.zero_()
            return
        # sum_j c_j**2 - g**2 * (1/m - 1/B), where pass j contributes c_j to g.
        share = 1.0 / count - (1.0 / self.batch_size if self.batch_size else 0.0)
        gradient = bucket.views[slot].to(view.dtype)
        view.addcmul_(gradient, gradient, value=-share).clamp_(min=0.0)

    def _start(self, bucket: Bucket) -> None:
        if bucket.streams:
            here = torch.cuda.current_stream(bucket.flat.device)
            for stream in bucket.streams - {here}:
                here.wait_stream(stream)
            bucket.streams.clear()
        context = Context(
            bucket.layout,
            self.process_set.rank(),
            self.process_set.size(),
            self.steps,
            self.prescale,
            self.postscale,
        )
        extra = {} if bucket.moment is None else {"moment": bucket.moment}
        with torch.no_grad():
            program = bucket.compressor.aggregate(
                bucket.ops, context, bucket.flat, bucket.state, **extra
            )
            bucket.programs.append(program)
            try:
                self._advance(bucket, None)
            except Exception:
                bucket.abandon()
                raise

    def finish(self) -> None:
        """Runs every started program to its end.

        Raises:
            PayloadError: and the like, from a program. All other programs are ended first, so
                that no rank waits for one of this rank's.
        """
        failure: Exception | None = None
        running = [bucket for bucket in self.buckets if bucket.programs]
        if not running:
            return
        while running:
            for bucket in running:
                try:
                    with torch.no_grad():
                        self._advance(bucket, self._wait(bucket))
                except Exception as error:
                    failure = failure or error
                    bucket.abandon()
            running = [bucket for bucket in running if bucket.programs]
        self.steps += 1
        for bucket in self.buckets:
            bucket.absent = set(range(len(bucket.parameters)))
        if failure is not None:
            for bucket in self.buckets:
                bucket.result = None
            raise failure

    def take(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The reduced gradient of a parameter, in its shape and dtype, after `finish`."""
        bucket, slot = self._places[parameter]
        self.finish()
        if bucket.result is None:
            raise RuntimeError("take() without an exchange; this is a bug in hvd_gradcomp")
        gradient = bucket.cut(bucket.result)[slot].to(parameter.dtype)
        return gradient

    def clear(self) -> None:
        """Lets go of the results, once all were taken."""
        for bucket in self.buckets:
            bucket.result = None

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
                bucket.request, bucket.handle = request, self._submit(bucket, request)
            bucket.round += 1
            return
        bucket.result, bucket.state = reply
        bucket.round = 0

    def _what(self, bucket: Bucket) -> str:
        return f"the exchange of bucket {bucket.index} in step {self.steps}"

    def _submit(self, bucket: Bucket, request: Collective) -> Any:
        name = f"{self.name}.{bucket.index}.{bucket.round}"
        tensor = request.tensor.contiguous()  # type: ignore[union-attr]
        if not isinstance(request, Broadcast) or request.root == self.process_set.rank():
            self._bytes_sent += tensor.numel() * tensor.element_size()
        if isinstance(request, Allgather):
            return horovod.allgather_async(tensor, name, self.process_set)
        if isinstance(request, Allreduce):
            return horovod.allreduce_async(
                tensor,
                name=name,
                op=horovod.Sum,
                prescale_factor=request.prescale,
                postscale_factor=request.postscale,
                process_set=self.process_set,
            )
        if isinstance(request, Alltoall):
            flat = tensor.reshape(-1)
            return horovod.alltoall_async(flat, None, name, self.process_set)
        if isinstance(request, Gather):
            splits = [0] * self.process_set.size()
            splits[request.root] = tensor.numel()
            there = torch.tensor(splits, dtype=torch.int32)
            return horovod.alltoall_async(tensor, there, name, self.process_set)
        if isinstance(request, Broadcast):
            root = self.process_set.ranks[request.root] if self.process_set.ranks else request.root
            return horovod.broadcast_async(tensor, root, name, self.process_set)
        raise TypeError(f"{self.compressor!r} asked for {request!r}, which is no collective")

    def _wait(self, bucket: Bucket) -> torch.Tensor:
        with failures.named(HorovodInternalError, self._what(bucket)):
            reply = horovod.synchronize(bucket.handle)
        request, bucket.handle = bucket.request, None
        if isinstance(reply, tuple):  # alltoall also hands back how much came from whom
            reply = reply[0]
        if reply.is_cuda:
            # Horovod makes the default stream of its own thread wait, not the one used here.
            here = torch.cuda.current_stream(reply.device)
            if here != torch.cuda.default_stream(reply.device):
                here.wait_stream(torch.cuda.default_stream(reply.device))
        if not isinstance(request, Broadcast) or request.root != self.process_set.rank():
            self._bytes_received += reply.numel() * reply.element_size()
        if isinstance(request, Gather):
            return reply
        world, sent = self.process_set.size(), request.tensor  # type: ignore[union-attr]
        if isinstance(request, Allgather):
            if reply.numel() != world * sent.numel():
                raise PayloadError(
                    f"the ranks sent payloads of different sizes for {self.name}.{bucket.index}: "
                    f"{reply.numel()} items came from {world} ranks, this one sent "
                    f"{sent.numel()}. Load the same checkpoint on all ranks"
                )
            return reply.view(world, *sent.shape)
        return reply.view(sent.shape)

    # -- what was done -----------------------------------------------------------------------

    def count_sparse(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Accounts for a sparse gradient that Horovod gathers by itself."""
        values, indices = gradient._values(), gradient._indices()
        self._bytes_sent += values.numel() * values.element_size()
        self._bytes_sent += indices.numel() * indices.element_size()

    def stats(self) -> CompressionStats:
        """Totals since the start; reads the device."""
        layers: dict[str, int] = {}
        elements = 0
        for bucket in self.buckets:
            elements += bucket.layout.elements
            sent = bucket.compressor.elements_sent(bucket.layout, bucket.state, self.steps)
            layers.update(zip(bucket.layout.names, sent))
        order = [name for name, _, _ in self.layers]
        return CompressionStats(
            steps=self.steps,
            elements=elements * self.steps,
            elements_sent=sum(layers.values()),
            bytes_dense=4 * elements * self.steps,
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
            layers={name: layers[name] for name in order},
            losses=mean_losses(b.compressor.losses(b.state) for b in self.buckets),
        )

    def retrain(self) -> None:
        """Lets the compressors learn anew what they learn, from the next step on."""
        for bucket in self.buckets:
            bucket.state = bucket.compressor.retrained(bucket.ops, bucket.state, self.steps)
