"""Tensors of a reducer's state: packed for a checkpoint, and restored, for all frontends.

A "sharded" checkpoint has each rank's own tensors. A "consolidated" one has their sums over ranks,
of which any number of ranks takes shares; a framework hands in the collectives that add them up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from hvd_gradcomp.method.compressor import Compressor, State, is_replicated, leaves, with_leaves
from hvd_gradcomp.method.learned import owner_of
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.runtime.program_runner import Participants

LOGGER = logging.getLogger("hvd_gradcomp")


# -- saving ----------------------------------------------------------------------------------------


class Collectives(NamedTuple):
    """Collectives of a framework, by which ranks consolidate tensors, or arrays on the host.

    Attributes:
        total: (x, name, group) -> the sum over ranks, accumulated in double precision.
        gather_objects: (item, type, name, group) -> the item of every rank.
        broadcast: (x, name, group, root) -> the bytes of x that the rank `root` has.
    """

    total: Callable[[Tensor, str, Any], Tensor]
    gather_objects: Callable[[Any, Any, str, Any], list[Any]]
    broadcast: Callable[[Tensor, str, Any, int], Tensor]


def consolidate(
    compressor: Compressor,
    tensors: Mapping[str, Tensor],
    name: str,
    steps: int,
    leader: int,
    participants: Participants,
    collectives: Collectives,
    zeros: Callable[[Sequence[int], str], Tensor],
) -> dict[str, Tensor]:
    """Return the tensors of a bucket, consolidated over all ranks, which all call it.

    Args:
        compressor: that of the bucket.
        tensors: those of this rank, by path.
        name: that of the bucket.
        steps: exchanges so far.
        leader: the local rank that compresses the bucket on its host.
        participants: the ranks.
        collectives: those of the framework.
        zeros: makes a tensor of a shape and dtype.
    """
    state = dict(tensors)
    among = participants.among(None)
    for path, x in tensors.items():
        if not is_replicated(compressor, path):
            if owner_of(compressor, path, steps) not in (None, participants.rank_and_size[0]):
                x = zeros(*_kind(x))
            state[path] = collectives.total(x, f"{name}.{path}.consolidated", among)
    place = participants.place
    if place is None or place.slots == 1:
        return state
    # Other ranks of the host have no state of this bucket, and rank 0 may be one of them.
    inside, title = participants.groups.inside, f"{name}.consolidated"
    kinds = {path: _kind(x) for path, x in state.items()}
    gathered = collectives.gather_objects(kinds, dict[str, tuple[list[int], str]], title, inside)
    root = (inside.ranks or range(inside.size()))[leader]
    leads = participants.leads(leader)
    return {
        path: collectives.broadcast(
            state[path] if leads else zeros(shape, dtype), f"{title}.{path}", inside, root
        )
        for path, (shape, dtype) in gathered[leader].items()
    }


def _kind(x: Tensor) -> tuple[list[int], str]:
    """Return shape and dtype, as texts and numbers."""
    return list(x.shape), str(x.dtype).rpartition(".")[2]


# -- loading ---------------------------------------------------------------------------------------


class Source(Enum):
    """Source of a state's tensor when a checkpoint is loaded."""

    SAVED = auto()
    SHARE = auto()  # a share of the saved sum
    START = auto()  # the initial value
    HERE = auto()  # the current value


class Origin(NamedTuple):
    """Origin of a saved state.

    Attributes:
        steps: number of steps when it was saved.
        mode: of the checkpoint.
        saver: the rank that saved it.
        holders: number of ranks, or hosts, that held a state.
    """

    steps: int
    mode: str
    saver: int
    holders: int


def source_of(compressor: Compressor, path: str, origin: Origin, rank: int) -> Source:
    """Return the source of a state's tensor, by its path, on the rank that loads it."""
    owner = owner_of(compressor, path, origin.steps)
    if is_replicated(compressor, path):
        return Source.SAVED
    if origin.mode == "sharded":
        return Source.SAVED if origin.saver in (rank, owner) else Source.HERE
    if owner is not None:
        return Source.SAVED
    return Source.START if path in compressor.reset_on_merge else Source.SHARE


def restore(
    compressor: Compressor,
    ops: Ops,
    current: State,
    saved: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    origin: Origin,
    rank: int,
    size: int,
) -> State:
    """Return a bucket's state from a saved one.

    Args:
        compressor: of the bucket.
        ops: the tensor operations.
        current: the state that is here.
        saved: tensors by path; none where the rank that saved them does not lead its host.
        start: initial tensors by path, of those in `reset_on_merge`.
        origin: of the saved state.
        rank, size: this rank among those that exchange, and their number.
    """
    tensors = []
    for path, here in leaves(current):
        source = source_of(compressor, path, origin, rank) if path in saved else Source.HERE
        if source is Source.SHARE:
            tensors.append(share(ops, saved[path], size, origin.holders))
        else:
            stored = {Source.SAVED: saved, Source.START: start}.get(source, {path: here})
            tensors.append(stored[path])
    state = with_leaves(current, tensors)
    if all(tuple(x.shape) == tuple(y.shape) for x, (_, y) in zip(tensors, leaves(current))):
        return state
    # A parameter server's decoder has a head for each rank.
    LOGGER.warning("%s learns anew: %d ranks exchange now", compressor, size)
    return compressor.resized(ops, state, origin.steps, size)


def share(ops: Ops, total: Tensor, size: int, holders: int) -> Tensor:
    """Return one rank's share of a summed residual, or the mean of a summed counter."""
    dtype = str(getattr(total.dtype, "name", total.dtype)).rpartition(".")[2]
    if "float" in dtype:
        return ops.cast(ops.cast(total, "float64") / size, dtype)
    return total // holders
