"""Gradient buckets: memory, compressor state, and planning of a model's buckets."""

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

BUCKET_BYTES = 25 << 20  # large enough to make call and launch overhead negligible

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
    """Whole layers that are exchanged together by one program.

    Attributes:
        name: on Horovod's timeline; equal on all ranks.
        before: the state before the last step, for rollback.
        views: into `flat`, one for each layer, in the layer's shape.
        absent: layers whose gradient has not arrived in this step.
        stack: runs the program; None while none runs.
        sent: the pending collective of the program.
        since: the reducer's step count when the bucket was added.
        held: slots of frozen layers; `waiting` has their part of the state, by its path.
        leader: the local rank, on its host, that compresses; see `runtime.hierarchy`.
        references: our own reference count of the memory of `flat`.
        scaled: gradients stay in the units of the loss scaler: they are summed in half precision,
            where small unscaled values would underflow.
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
        """Reallocate `flat` if the user still references a gradient of the previous step.

        Reduced gradients may be views of `flat`, and a user who keeps one expects it to stay
        unchanged, as everywhere in PyTorch. Views that are still some `p.grad` do not count.
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
        """Return views of a bucket's vector, one for each layer."""
        return [self.layer(flat, slot) for slot in range(len(self.layout.names))]

    def layer(self, flat: torch.Tensor, slot: int) -> torch.Tensor:
        """Return the view of one layer."""
        start, layout = self.layout.offsets[slot], self.layout
        return flat[start : start + layout.sizes[slot]].view(layout.shapes[slot])

    def abandon(self) -> None:
        """Abort the running program."""
        self.stack = None
        self.round = 0  # keep `sent` alive: Horovod's thread may still use it

    def keep_before(self) -> None:
        """Keep the current state for rollback, unmodified until `end`."""
        self.before = self.state
        self.ops.keep(x for _, x in leaves(self.state))

    def end(self, undo: bool) -> None:
        """Commit or roll back the state since `keep_before`; a rollback is bit-exact."""
        before, self.before = self.before, None
        if before is None:
            return
        self.state = before if undo else self.state
        self.ops.let_go([x for _, x in leaves(before)], [x for _, x in leaves(self.state)])

    def joined(self, pieces: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a bucket's vector from its layers by name; the inverse of `cut`."""
        flat = self.ops.zeros((self.layout.size,), self.layout.dtype)
        for view, name in zip(self.cut(flat), self.layout.names):
            view.copy_(pieces[name])
        return flat


def leaving_dense(compressor: Compressor, named_parameters: Named) -> Compressor:
    """Return the compressor without the layers that `track_moments(..., others="dense")` excludes.

    They are exchanged dense.
    """
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
    """Yield buckets in the order in which backward fills them: last layers first.

    Args:
        named_parameters: (name, parameter) of all that is reduced.
        layers: their `Layer` descriptions, in the same order.
        compressor: assigned to the layers.
        name: prefix of the buckets' names.
        ranks: number of ranks that exchange.
        place: position of this rank among hosts.
        bucket_bytes: target size of a bucket.
        with_moments: allocate memory for moments if a compressor uses them.
        placed: existing buckets; their layers are left out.

    Raises:
        ValueError: a parameter's dtype is not supported; a compressor cannot take it.
    """
    for title, p in named_parameters:
        if p.dtype not in _DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise ValueError(f"{title} has dtype {p.dtype}; what is reduced is {known}")
    by_name = dict(named_parameters)
    devices = [p.device for _, p in named_parameters]
    ops_of = {device: TorchOps(device) for device in devices}
    there = {title for bucket in placed for title in bucket.layout.names}
    left_out = [at for at, layer in enumerate(layers) if layer[0] in there]
    target = bucket_bytes or BUCKET_BYTES
    plan = assignment.plan(compressor, layers, target, devices, left_out, ranks)
    # If layers may change buckets, once their order is known, slot 0 leads all of them.
    turns = 1 if place is None or compressor.needs_execution_order else place.slots
    for index, (one, layout) in enumerate(plan, len(placed)):
        parameters = [by_name[title] for title in layout.names]
        ops = ops_of[parameters[0].device]
        moment = ops.zeros((layout.size,)) if one.uses_moments and with_moments else None
        flat = ops.zeros((layout.size,), layout.dtype)
        scaled = isinstance(one, LinearCompressor) and one.in_halves(layout)
        if place is not None and place.slot != index % turns:
            one = NoneCompressor()  # only the leader has state
        state = start(one, ops, layout, ranks)
        title = naming.bucket(name, index, layout)
        bucket = Bucket(title, layout, one, ops, parameters, flat, moment, state)
        bucket.leader, bucket.scaled = index % turns, scaled
        yield bucket


def carry_over(before: Sequence[Bucket], after: Sequence[Bucket]) -> None:
    """Copy velocities to the new buckets, and residuals where the new compressor has them."""
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
    """Return layer names in the order of use, with unused layers in the middle."""
    used = set(order)
    unused = [name for name, _, _ in layers if name not in used]
    middle = len(order) // 2
    return [*order[:middle], *unused, *order[middle:]]


def _references(x: torch.Tensor) -> float:
    """Return the reference count of a tensor's storage; NaN before PyTorch 2.1."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count(x.untyped_storage()._cdata) if count is not None else math.nan
