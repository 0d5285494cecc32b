"""Checkpoints of compressor state on a rank, for `DistributedDataParallel`."""

from __future__ import annotations

import logging
from typing import Any

from hvd_gradcomp.checkpoint import schema
from hvd_gradcomp.checkpoint.schema import CheckpointError, Source
from hvd_gradcomp.core.compressor import leaves, with_leaves
from hvd_gradcomp.torch.reducer import Reducer, wait_for_copies

LOGGER = logging.getLogger("hvd_gradcomp")
_AS_IT_WAS = "Resume with as many ranks, or load the parameters alone"


def save(run: Reducer) -> dict[str, Any]:
    """Return this rank's compressor state."""
    wait_for_copies(run.buckets)
    planner, process_set, place = run.planner, run.participants.process_set, run.participants.place
    saved = schema.describe(planner.compressor, [x.layout for x in run.buckets], run.steps)
    for entry, bucket in zip(saved["buckets"], run.buckets):
        entry["state"] = {path: x.detach().clone() for path, x in leaves(bucket.state)}
    return {
        **saved,
        "rank": process_set.rank(),
        "size": process_set.size(),
        "hosts": place and place.hosts,
        "order": list(planner.order),
        "ordered": planner.ordered,
        "counters": list(run.traffic.counters),
        "gathered": dict(run.traffic.gathered),
    }


def load(run: Reducer, saved: dict[str, Any]) -> None:
    """Load the state that `save` returned; from another rank's state, only replicated fields.

    Raises:
        CheckpointError: it is of another format, compressor, model or number of ranks or hosts.
    """
    planner, process_set, place = run.planner, run.participants.process_set, run.participants.place
    if isinstance(saved, dict) and saved.get("ordered") and saved["order"]:
        planner.reorder(saved["order"])
    schema.check_exchange(saved, planner.compressor, [bucket.layout for bucket in run.buckets])
    rank, size = process_set.rank(), process_set.size()
    if saved["size"] != size:
        raise CheckpointError(schema.other_size(saved["size"], size, _AS_IT_WAS))
    schema.check_hosts(
        saved["hosts"],
        place and place.hosts,
        "Resume with the same hierarchical=, or load parameters alone",
    )
    # An owner is a rank among those that exchange: with hosts, another's state has none.
    saver = saved["rank"] if place is None or saved["rank"] == rank else -1
    states, left = [], set()
    for bucket, entry in zip(run.buckets, saved["buckets"]):
        how = saved["steps"], "sharded", saver, rank
        led_there = place is None or saver == rank or bool(entry["state"])
        values = []
        for path, current in leaves(bucket.state):
            source = schema.source_of(bucket.compressor, path, *how)
            if source is not Source.SAVED or not led_there:
                values.append(current)
                left.add(path)
                continue
            kept = entry["state"].get(path)
            if kept is None or (kept.shape, kept.dtype) != (current.shape, current.dtype):
                raise CheckpointError(
                    f"{path} of {bucket.name} is missing, or no {current.dtype} of shape "
                    f"{tuple(current.shape)}: load what state_dict() gave, as it is"
                )
            values.append(kept.to(current.device, copy=True))
        states.append(with_leaves(bucket.state, values))
    if left and saved["rank"] != rank:
        LOGGER.warning(
            "rank %d was given what rank %d has saved: %s stay as they are here. Each rank saves "
            "and loads its own, in a file of its own; with torch.distributed.checkpoint under a "
            "name with the rank in it, such as f'compressor/{rank}'",
            rank,
            saved["rank"],
            ", ".join(sorted(left)),
        )
    for bucket, state in zip(run.buckets, states):
        bucket.state = state
    run.steps = saved["steps"]
    if saved["rank"] == rank:
        run.traffic.totals = saved["counters"], saved["gathered"]
    if not planner.ordered:
        planner.order = list(saved["order"])
