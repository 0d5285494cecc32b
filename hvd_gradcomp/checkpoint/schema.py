"""Schema of the compressor state in a checkpoint, the same for all frontends.

A saved exchange is described by `describe`, and holds each bucket's tensors by their path, from
`leaves`. "sharded" states hold those of one rank; "consolidated" ones the sums over ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from hvd_gradcomp.core.compressor import Compressor, State, is_replicated, leaves, with_leaves
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.learned import owner_of
from hvd_gradcomp.ops import Ops, Tensor

FORMAT = 4  # of a saved state; changes when its tensors, or their meaning, change
LOGGER = logging.getLogger("hvd_gradcomp")


class CheckpointError(RuntimeError):
    """Checkpoint could not be written, or cannot be resumed from here."""


def describe(compressor: Compressor, layouts: Sequence[Layout], steps: int) -> dict[str, Any]:
    """Return the description of an exchange, which `check_exchange` checks."""
    return {
        "format": FORMAT,
        "compressor": repr(compressor),
        "shown": str(compressor),
        "steps": steps,
        "buckets": [{"digest": x.digest, "names": x.names} for x in layouts],
    }


def check_exchange(saved: Any, compressor: Compressor, layouts: Sequence[Layout]) -> None:
    """Check that a saved exchange belongs to this compressor and these buckets.

    Raises:
        CheckpointError: naming the difference.
    """
    if not isinstance(saved, dict) or "format" not in saved:
        raise CheckpointError("what was saved under 'gradcomp' is no state of hvd_gradcomp")
    if saved["format"] != FORMAT:
        raise CheckpointError(
            f"the compressor's state has format {saved['format']!r}, this version reads {FORMAT}: "
            "resume with the version of hvd_gradcomp that saved it"
        )
    if saved["compressor"] != repr(compressor):
        raise CheckpointError(
            "it is of another compressor. Use the same compression= to resume: it was made with "
            f"{saved['shown']}, here is {compressor}"
        )
    if [b["digest"] for b in saved["buckets"]] != [layout.digest for layout in layouts]:
        old = {name for b in saved["buckets"] for name in b["names"]}
        new = {name for layout in layouts for name in layout.names}
        differing = sorted(old ^ new) or ["shapes, dtypes, bucket_bytes or the order of parameters"]
        raise CheckpointError(f"it is of another model; different: {', '.join(differing[:8])}")


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


def source_of(
    compressor: Compressor, path: str, steps: int, mode: str, saver: int, rank: int
) -> Source:
    """Return the source of a state's tensor, by its path, on the rank that loads it."""
    owner = owner_of(compressor, path, steps)
    if is_replicated(compressor, path):
        return Source.SAVED
    if mode == "sharded":
        return Source.SAVED if saver in (rank, owner) else Source.HERE
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
        source = Source.HERE
        if path in saved:
            source = source_of(compressor, path, *origin[:3], rank)
        if source is Source.SHARE:
            tensors.append(share(ops, saved[path], size, origin.holders))
        else:
            sources = {Source.SAVED: saved, Source.START: start}
            tensors.append(sources.get(source, {path: here})[path])
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


CONSOLIDATED = 'Save with mode="consolidated" to change that'


def check_hosts(then: int | None, now: int | None, remedy: str = CONSOLIDATED) -> None:
    """Check that the same ranks held a sharded state.

    Args:
        then, now: number of hosts that exchange with `hierarchical=True`; None without.
        remedy: for the message.

    Raises:
        CheckpointError: other ranks held it, so some residuals would be lost.
    """
    if then != now:
        saved, here = ("hierarchical=False" if n is None else f"{n} hosts" for n in (then, now))
        raise CheckpointError(
            f"it was saved sharded with {saved}, here it is {here}, and other ranks compress: "
            f"what they had kept back would be lost. {remedy}"
        )


def other_size(then: int, now: int, remedy: str = CONSOLIDATED) -> str:
    """Explain why another number of ranks cannot load a sharded state, and what to do."""
    return (
        f"it was saved sharded by {then} ranks, and {now} are here: what each of them had kept "
        f"back would be lost. {remedy}"
    )
