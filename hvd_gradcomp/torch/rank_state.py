"""State that a rank of a reducer has alone, or in common with others, where ranks come and go."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hvd_gradcomp.core.compressor import State, is_replicated, leaves, with_leaves
from hvd_gradcomp.core.handover import residual_of
from hvd_gradcomp.core.learned import owner_of
from hvd_gradcomp.torch.bucket import Bucket
from hvd_gradcomp.torch.reducer import Reducer

LOGGER = logging.getLogger("hvd_gradcomp")


def cloned(state: State) -> State:
    """Return a copy of a compressor's state."""
    return with_leaves(state, [x.detach().clone() for _, x in leaves(state)])


def squares(reducer: Reducer) -> float:
    """Return the sum of squares of this rank's residuals."""
    total = 0.0
    for bucket in reducer.buckets:
        residual = residual_of(bucket.compressor, bucket.state)
        if residual is not None:
            total += float(residual.double().square().sum())
    return total


def forget(reducer: Reducer) -> None:
    """Reset this rank's own state, but not replicated fields, to that before the first step."""
    ranks = reducer.participants.process_set.size()
    for bucket in reducer.buckets:
        fresh = leaves(bucket.compressor.start(bucket.ops, bucket.layout, ranks))
        values = [
            x if is_replicated(bucket.compressor, path) else new
            for (path, x), (_, new) in zip(leaves(bucket.state), fresh)
        ]
        bucket.state = with_leaves(bucket.state, values)


def restart(reducer: Reducer) -> None:
    """Reset all state to that before the first step, for the ranks that there are now."""
    ranks = reducer.participants.process_set.size()
    reducer.steps = 0
    for bucket in reducer.buckets:
        bucket.state = bucket.compressor.start(bucket.ops, bucket.layout, ranks)


def resize(reducer: Reducer, prescale: float, postscale: float, speaks: bool) -> None:
    """Adapt scales and compressor state to the number of ranks.

    Args:
        reducer: of this rank.
        prescale, postscale: from now on.
        speaks: log which compressors learn anew.
    """
    reducer.prescale, reducer.postscale = prescale, postscale
    ranks, anew = reducer.participants.process_set.size(), set()
    for bucket in reducer.buckets:
        one = bucket.compressor
        resized = one.resized(bucket.ops, bucket.state, reducer.steps, ranks)
        if resized is not bucket.state:
            anew.add(one)
        bucket.state = resized
    for one in anew if speaks else ():
        LOGGER.warning("%s learns anew: other ranks exchange now, %d of them", one, ranks)


def in_common(reducer: Reducer) -> dict[str, Any]:
    """Return what ranks have in common, for a rank that joins: see `take_common`."""
    return {
        "steps": reducer.steps,
        "buckets": [
            {path: x for path, x in leaves(b.state) if is_replicated(b.compressor, path)}
            for b in reducer.buckets
        ],
    }


def take_common(reducer: Reducer, given: dict[str, Any]) -> None:
    """Take what the ranks have in common; this rank's own state stays."""
    reducer.steps = given["steps"]
    for bucket, fields in zip(reducer.buckets, given["buckets"]):
        values = [
            fields[path].to(x.device) if path in fields else x for path, x in leaves(bucket.state)
        ]
        bucket.state = with_leaves(bucket.state, values)


def own_sums(bucket: Bucket, step: int) -> dict[str, torch.Tensor]:
    """Return what another rank may add to its own when this one leaves: residuals and momenta."""
    one = bucket.compressor
    return {
        path: x
        for path, x in leaves(bucket.state)
        if not is_replicated(one, path)
        and path not in one.reset_on_merge
        and owner_of(one, path, step) is None
        and x.is_floating_point()
    }


def add_sums(bucket: Bucket, given: dict[str, torch.Tensor]) -> None:
    """Add what a rank that leaves has handed over."""
    values = [x + given[path] if path in given else x for path, x in leaves(bucket.state)]
    bucket.state = with_leaves(bucket.state, values)
