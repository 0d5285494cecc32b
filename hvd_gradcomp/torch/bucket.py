"""Whole layers that share a program: their memory, their state, and how a model's are planned."""

from __future__ import annotations

import glob
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.codecs.linear import LinearCompressor
from hvd_gradcomp.core.compressor import Compressor, State, leaves
from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.protocols import carrying
from hvd_gradcomp.core.protocols.resizing import start
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning import assignment
from hvd_gradcomp.runtime import naming
from hvd_gradcomp.runtime.collectives import PendingCollective
from hvd_gradcomp.runtime.hierarchy import HostPosition
from hvd_gradcomp.runtime.program_runner import ProgramRunner
from hvd_gradcomp.torch.moments import tracker

BUCKET_BYTES = 25 << 20  # large enough that calls and launches do not count

_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
Named = Sequence[tuple[str, torch.nn.Parameter]]


@dataclass
class Bucket:
    """Whole layers that share a program.

    Attributes:
        name: on Horovod's timeline; equal on all ranks.
        before: the state that the last step began with, untouched, while it may be undone.
        views: into `flat`, one for each layer, in the layer's shape.
        absent: layers whose gradient has not arrived in this step.
        stack: steps the program; None while none runs.
        sent: the collective that it waits for.
        since: exchanges of the engine before its first.
        held: layers that are frozen, and what the state holds of them is `waiting`, by its path.
        leader: the place in its host of the rank that compresses; see `hierarchy`.
        references: to the memory of `flat`, from here.
        scaled: whether gradients stay in the units of a loss scaler: those that are added up in
            half precision, where small ones would vanish without it.
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
    stack: ProgramRunner | None = None
    sent: PendingCollective | None = None
    round: int = 0
    result: torch.Tensor | None = None
    streams: set[Any] = field(default_factory=set)
    since: int = 0
    held: set[int] = field(default_factory=set)
    references: float = math.nan
    waiting: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    leader: int = 0
    scaled: bool = False

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
        """Ends its program where it is; the next gradients begin anew."""
        self.stack = None
        self.round = 0  # what was sent lives on, another thread may not be done with it

    def keep_before(self) -> None:
        """From here on the state that a step began with stays as it is, until `end`."""
        self.before = self.state
        self.ops.keep(x for _, x in leaves(self.state))

    def end(self, undo: bool) -> None:
        """Ends what `keep_before` began; a state that was undone is the one before, to the bit."""
        before, self.before = self.before, None
        if before is None:
            return
        self.state = before if undo else self.state
        self.ops.let_go([x for _, x in leaves(before)], [x for _, x in leaves(self.state)])

    def joined(self, pieces: dict[str, torch.Tensor]) -> torch.Tensor:
        """The inverse of `cut`, from vectors by name."""
        flat = self.ops.zeros((self.layout.size,), self.layout.dtype)
        for view, name in zip(self.cut(flat), self.layout.names):
            view.copy_(pieces[name])
        return flat


def leaving_dense(compressor: Compressor, named_parameters: Named) -> Compressor:
    """The same without the layers that `track_moments(..., others="dense")` has set apart."""
    if not compressor.uses_moments or getattr(compressor, "moments", "") not in ("auto", "sample"):
        return compressor
    apart = [name for name, p in named_parameters if tracker.is_sent_dense(p)]
    if not apart:
        return compressor
    rules = [(assignment.Named(glob.escape(name)), NoneCompressor()) for name in apart]
    return assignment.Partition((*rules, (assignment.Named("*"), compressor)))


def planned(
    named_parameters: Named,
    layers: Sequence[Layer],
    compressor: Compressor,
    *,
    name: str,
    ranks: int,
    place: HostPosition | None = None,
    bucket_bytes: int | None = None,
    with_moments: bool = False,
    placed: Collection[Bucket] = (),
) -> Iterator[Bucket]:
    """Buckets in the order in which backward fills them: last layers first.

    Args:
        named_parameters: (name, parameter) of all that is reduced.
        layers: what they are in the model, in the same order.
        compressor: what runs.
        name: begins the buckets' names.
        ranks: how many exchange.
        place: of this rank among hosts.
        bucket_bytes: target size of a bucket.
        with_moments: whether there is room for moments where a compressor uses them.
        placed: buckets that are there already; what has a place in them gets no other.

    Raises:
        ValueError: a parameter is of a dtype that is not reduced; a compressor cannot take it.
    """
    for title, p in named_parameters:
        if p.dtype not in _DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise ValueError(f"{title} has dtype {p.dtype}; what is reduced is {known}")
    by_name = dict(named_parameters)
    devices = [p.device for _, p in named_parameters]
    verbs = {device: TorchOps(device) for device in devices}
    there = {title for bucket in placed for title in bucket.layout.names}
    left_out = [at for at, layer in enumerate(layers) if layer[0] in there]
    target = bucket_bytes or BUCKET_BYTES
    plan = assignment.plan(compressor, layers, target, devices, left_out, ranks)
    # Layers that change buckets, as their order becomes known, do not change leaders.
    turns = 1 if place is None or compressor.needs_execution_order else place.slots
    for index, (one, layout) in enumerate(plan, len(placed)):
        parameters = [by_name[title] for title in layout.names]
        ops = verbs[parameters[0].device]
        moment = ops.zeros((layout.size,)) if one.uses_moments and with_moments else None
        flat = ops.zeros((layout.size,), layout.dtype)
        scaled = isinstance(one, LinearCompressor) and one.in_halves(layout)
        if place is not None and place.slot != index % turns:
            one = NoneCompressor()  # what has no state
        state = start(one, ops, layout, ranks)
        title = naming.bucket(name, index, layout)
        bucket = Bucket(title, layout, one, ops, parameters, flat, moment, state)
        bucket.leader, bucket.scaled = index % turns, scaled
        yield bucket


def carry_over(before: Sequence[Bucket], after: Sequence[Bucket]) -> None:
    """Takes velocities over to other buckets, and residuals where a method has some already."""
    velocities: dict[str, torch.Tensor] = {}
    residuals: dict[str, torch.Tensor] = {}
    for bucket in before:
        for kept, vector in (
            (velocities, carrying.velocity(bucket.compressor, bucket.state)),
            (residuals, carrying.residual(bucket.compressor, bucket.state)),
        ):
            if vector is not None:
                kept.update(zip(bucket.layout.names, bucket.cut(vector)))
    for bucket in after:
        one, ops, state = bucket.compressor, bucket.ops, bucket.state
        if set(bucket.layout.names) <= set(velocities):
            state = carrying.with_velocity(one, state, bucket.joined(velocities))
        kept_before = set(bucket.layout.names) <= set(residuals)
        if kept_before and carrying.residual(one, state) is not None:
            nothing = ops.zeros((bucket.layout.size,))
            state, _ = carrying.inherit(one, ops, state, nothing, bucket.joined(residuals))
        bucket.state = state


def as_used(layers: Sequence[Layer], order: Sequence[str]) -> list[str]:
    """The names of a model's layers as it uses them; in the middle those that it does not use."""
    used = set(order)
    unused = [name for name, _, _ in layers if name not in used]
    middle = len(order) // 2
    return [*order[:middle], *unused, *order[middle:]]


def _references(x: torch.Tensor) -> float:
    """How many tensors share the memory of this one; NaN before PyTorch 2.1, nobody knows there."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count(x.untyped_storage()._cdata) if count is not None else math.nan
