"""Gradient bucket: memory, compressor state, and the layers that are frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_gradcomp.core.collectives import Inside
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import (
    Compressor,
    State,
    is_replicated,
    leaves,
    with_leaves,
)
from hvd_gradcomp.method.learned import retrained
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.runtime.program_runner import PendingCollective, ProgramRunner

Named = Sequence[tuple[str, torch.nn.Parameter]]


@dataclass
class Bucket:
    """Whole layers that are exchanged together by one program.

    Attributes:
        name: on Horovod's timeline; equal on all ranks.
        snapshot_state: the state from before the last exchange, for rollback; None after commit.
        views: into `flat`, one for each layer, in the layer's shape.
        absent: layers whose gradient has not arrived in this step.
        copied: layers whose reduced gradient was copied out; the bucket is released after the last.
        runner: runs the program; None while none runs.
        sent: the pending collective of the program.
        outcome: request that shares a leader's result in its host, while it is not submitted yet.
        round: collectives that the running program has requested.
        rounds: collectives of the last program that has ended.
        since: the reducer's step count when the bucket was added.
        frozen_slots: slots of frozen layers.
        frozen_state: their part of the state, by its path, while they are excluded from a step.
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
    snapshot_state: State = None
    views: list[torch.Tensor] = field(init=False)
    moment_views: list[torch.Tensor] = field(init=False)
    absent: set[int] = field(init=False)
    copied: set[int] = field(default_factory=set)
    runner: ProgramRunner | None = None
    sent: PendingCollective | None = None
    outcome: Inside | None = None
    round: int = 0
    rounds: int = 0
    result: torch.Tensor | None = None
    streams: set[Any] = field(default_factory=set)
    since: int = 0
    frozen_slots: set[int] = field(default_factory=set)
    references: float = math.nan
    frozen_state: dict[str, list[torch.Tensor]] = field(default_factory=dict)
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
        if _references(self.flat) <= self.references:
            return
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

    def release(self) -> None:
        """Release the memory of `flat`; its views are valid again after `allocate`."""
        self.copied.clear()
        storage = self.flat.untyped_storage()
        if storage.nbytes() == self.flat.nbytes:
            storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the memory of `flat` if it was released; what lies between layers is zero."""
        storage = self.flat.untyped_storage()
        if storage.nbytes():
            return
        storage.resize_(self.flat.nbytes)
        end = 0
        for start, stop in (*self.layout.runs, (self.layout.size, 0)):
            self.flat[end:start].zero_()
            end = stop

    def wait_for_streams(self) -> None:
        """Let the current stream wait for those on which gradients were copied into the bucket."""
        if self.streams:
            here = torch.cuda.current_stream(self.flat.device)
            for stream in self.streams - {here}:
                here.wait_stream(stream)
            self.streams.clear()

    @property
    def owns_flat(self) -> bool:
        """Return True if nobody else references the memory of `flat`, so that a state may keep it.

        A gradient of the previous step may be a view of it, if it was zeroed and not released.
        """
        return _references(self.flat) <= self.references

    def set_result(self, result: torch.Tensor, state: State) -> None:
        """End the program, with its result and new state.

        If the state has taken over the memory of `flat`, the result becomes the new `flat`; the
        number of views, and so the reference count, is unchanged.
        """
        self.result, self.state = result, state
        self.runner, self.rounds, self.round = None, self.round, 0
        memory = self.flat.data_ptr()
        if self.compressor.keeps_gradient and any(x.data_ptr() == memory for _, x in leaves(state)):
            self.flat, self.views = result, self.cut(result)

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a bucket's vector, one for each layer."""
        return [self.layer(flat, slot) for slot in range(len(self.layout.names))]

    def layer(self, flat: torch.Tensor, slot: int) -> torch.Tensor:
        """Return the view of one layer."""
        start, layout = self.layout.offsets[slot], self.layout
        return flat[start : start + layout.sizes[slot]].view(layout.shapes[slot])

    def result_views(self) -> list[torch.Tensor]:
        """Return views of the result, one for each layer, to copy from and not to keep.

        Raises:
            RuntimeError: there is no result.
        """
        result, flat = self.result, self.flat
        if result is None:
            raise RuntimeError("a gradient without an exchange; this is a bug in hvd_gradcomp")
        same = result.data_ptr() == flat.data_ptr() and result.dtype == flat.dtype
        return self.views if same else self.cut(result)

    def abort(self) -> None:
        """Abort the running program."""
        self.runner = self.outcome = None
        self.round = 0  # keep `sent` alive: Horovod's thread may still use it

    def snapshot(self) -> None:
        """Keep the current state for rollback, unmodified until `commit` or `rollback`."""
        self.snapshot_state = self.state
        self.ops.snapshot(x for _, x in leaves(self.state))

    def commit(self) -> None:
        """Keep the state that the exchange has made; a no-op without a snapshot."""
        self._release_snapshot()

    def rollback(self) -> None:
        """Restore the state of the snapshot, bit-exactly; a no-op without one."""
        if self.snapshot_state is not None:
            self.state = self.snapshot_state
        self._release_snapshot()

    def _release_snapshot(self) -> None:
        snapshot, self.snapshot_state = self.snapshot_state, None
        if snapshot is not None:
            used = [x for _, x in leaves(self.state)]
            self.ops.release_snapshot([x for _, x in leaves(snapshot)], used)

    def joined(self, pieces: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a bucket's vector from its layers by name; the inverse of `cut`."""
        flat = self.ops.zeros((self.layout.size,), self.layout.dtype)
        for view, name in zip(self.cut(flat), self.layout.names):
            view.copy_(pieces[name])
        return flat

    def mask_frozen(self, slots: set[int], step: int) -> None:
        """Exclude frozen layers from a step, before any gradient of the bucket arrives.

        They send zeros, with zeros as their state; a bucket without other layers does not start.
        When a layer returns, the compressor retrains, because it has learned without that layer.
        """
        if self.frozen_slots - slots:
            self.state = retrained(self.compressor, self.ops, self.state, step)
        self.frozen_slots = slots
        if not slots or len(slots) == len(self.parameters):
            return
        self.absent -= slots
        with torch.no_grad():
            for vector in (self.flat, self.moment):
                if vector is not None:
                    for piece in self._frozen_views(vector):
                        piece.zero_()
            for path, vector in self._vectors(self.state):
                pieces = self._frozen_views(vector)
                self.frozen_state[path] = [piece.clone() for piece in pieces]
                for piece in pieces:
                    piece.zero_()

    def restore_frozen(self) -> None:
        """Restore the state of excluded layers, in the current state and its rollback copy."""
        if not self.frozen_state:
            return
        with torch.no_grad():
            for state in (self.state, self.snapshot_state):
                for path, vector in () if state is None else self._vectors(state):
                    for piece, value in zip(self._frozen_views(vector), self.frozen_state[path]):
                        piece.copy_(value)
        self.frozen_state.clear()

    def forget(self, places: Mapping[int, torch.Tensor]) -> None:
        """Set this rank's own state of some elements to zero; counts and shared state stay.

        The tensors that have it now stay as they are: others may refer to them.

        Args:
            places: True for these elements, by slot, of shapes that broadcast to the layers'.
        """
        new = {}
        for path, vector in self._vectors(self.state):
            if vector.is_floating_point() and not is_replicated(self.compressor, path):
                new[path] = vector.clone()
                for slot, chosen in places.items():
                    self.layer(new[path], slot).masked_fill_(chosen, 0.0)
        values = [new.get(path, x) for path, x in leaves(self.state)]
        self.state = with_leaves(self.state, values)

    def _vectors(self, state: State) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors of a state that have one entry for each element of the bucket."""
        shape = (self.layout.size,)
        return [(path, x) for path, x in leaves(state) if tuple(x.shape) == shape]

    def _frozen_views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        cut = self.cut(vector)
        return [cut[slot] for slot in sorted(self.frozen_slots)]


def as_real(x: torch.Tensor) -> torch.Tensor:
    """View a complex tensor as a real one, [..., 2]; return other tensors as they are."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def as_complex(x: torch.Tensor) -> torch.Tensor:
    """View a real tensor of shape [..., 2] as a complex one; the inverse of `as_real`.

    Complex numbers lie at even offsets in memory. Where a bucket of several layers has them at an
    odd one, the result is a copy.
    """
    return torch.view_as_complex(x.clone() if x.storage_offset() % 2 else x)


def _references(x: torch.Tensor) -> float:
    """Return the reference count of a tensor's storage; NaN before PyTorch 2.1."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count(x.untyped_storage()._cdata) if count is not None else math.nan
