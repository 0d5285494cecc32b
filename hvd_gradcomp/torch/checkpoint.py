"""Compressor state in `state_dict()["gradcomp"]`, and checkpoints of all ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import horovod.torch as horovod
import torch

from hvd_gradcomp.checkpoint import files as checkpoint_files
from hvd_gradcomp.checkpoint import schema
from hvd_gradcomp.checkpoint.files import Ranks, Takeover
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.core.compressor import State, is_replicated, leaves
from hvd_gradcomp.core.learned import owner_of
from hvd_gradcomp.torch import safetensors_file
from hvd_gradcomp.torch.bucket import Bucket
from hvd_gradcomp.torch.bucketing import Plan
from hvd_gradcomp.torch.comm import horovod as comm_horovod
from hvd_gradcomp.torch.comm.horovod import gather_objects
from hvd_gradcomp.torch.grad_synchronizer import synchronizer_of
from hvd_gradcomp.torch.inference import outside_inference
from hvd_gradcomp.torch.local_steps import LocalStepsOptimizer
from hvd_gradcomp.torch.reducer import LOGGER, Reducer, wait_for_copies
from hvd_gradcomp.torch.wrapped_optimizer import WrappedOptimizer


def save(reducer: Reducer, mode: str = "sharded") -> dict[str, Any]:
    """Return the exchange's state: this rank's, or if "consolidated", of all; then all call it."""
    checkpoint_files.check_mode(mode)
    wait_for_copies(reducer.buckets)
    planner, participants, traffic = reducer.planner, reducer.participants, reducer.traffic
    process_set = participants.process_set
    names = list(traffic.gathered)
    if mode == "consolidated":
        names = [name for name, _, _ in planner.layers]  # of as many on all ranks
    gathered = [traffic.gathered.get(name, 0) for name in names]
    counters = torch.tensor([*gathered, *traffic.counters], device="cpu")
    if mode == "consolidated":
        counters = _summed(f"{planner.name}.counters", counters, process_set)
    saved = schema.describe(planner.compressor, [x.layout for x in reducer.buckets], reducer.steps)
    for entry, bucket in zip(saved["buckets"], reducer.buckets):
        entry["state"] = _state(reducer, bucket, mode)
    return {
        **saved,
        "mode": mode,
        "rank": process_set.rank(),
        "size": process_set.size(),
        "hosts": participants.place and participants.place.hosts,
        "order": list(planner.order),
        "ordered": planner.ordered,
        "counters": counters[len(names) :].tolist(),
        "gathered": dict(zip(names, counters.tolist())),
    }


def _state(reducer: Reducer, bucket: Bucket, mode: str) -> dict[str, torch.Tensor]:
    """Return a bucket's tensors by path: this rank's, or consolidated over all ranks."""
    state, one = {}, bucket.compressor
    for path, x in leaves(bucket.state):
        if mode == "sharded" or is_replicated(one, path):
            state[path] = x.detach().clone()
            continue
        owner = owner_of(one, path, reducer.steps)
        if owner not in (None, reducer.participants.rank_and_size[0]):
            x = torch.zeros_like(x)
        state[path] = _summed(f"{bucket.name}.{path}", x, reducer.participants.among(None))
    place = reducer.participants.place
    if mode == "consolidated" and place is not None and place.slots > 1:
        state = _of_leader(reducer, bucket, state)
    return state


def _of_leader(
    reducer: Reducer, bucket: Bucket, state: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Broadcast a bucket's state from its leader to all ranks of the host."""
    name, inside = f"{bucket.name}.consolidated", reducer.participants.groups.inside
    mine = {path: (list(x.shape), str(x.dtype).partition(".")[2]) for path, x in state.items()}
    kinds = gather_objects(mine, dict[str, tuple[list[int], str]], name, inside)[bucket.leader]
    given = {}
    for path, (shape, dtype) in kinds.items():
        x = torch.zeros(shape, dtype=getattr(torch, dtype), device=bucket.flat.device)
        if reducer.leads(bucket):
            x = state[path].contiguous()
        root = (inside.ranks or range(inside.size()))[bucket.leader]
        data = x.reshape(-1).view(torch.uint8)
        data = comm_horovod.broadcast(data, root, f"{name}.{path}", inside).wait()
        given[path] = data.view(x.dtype).view(shape)
    return given


def _summed(name: str, x: torch.Tensor, process_set: Any) -> torch.Tensor:
    """Return the sum over ranks, accumulated in double precision."""
    wide = x.double() if x.is_floating_point() else x.clone()
    total = comm_horovod.allreduce(wide.reshape(-1), f"{name}.consolidated", process_set).wait()
    return total.view(x.shape).to(x.dtype)


def load(reducer: Reducer, saved: dict[str, Any]) -> None:
    """Load a saved state.

    From a sharded state of another rank (rank 0's, broadcast to all) only the replicated fields are
    loaded: a broadcast residual would be applied once per rank. This rank keeps its own. Of a
    consolidated state each rank takes its share.

    Raises:
        CheckpointError: the state is of another format, compressor, model or number of ranks.
    """
    planner, participants = reducer.planner, reducer.participants
    process_set, place = participants.process_set, participants.place
    if isinstance(saved, dict) and saved.get("ordered") and saved["order"]:
        planner.reorder(saved["order"])
    layouts = [bucket.layout for bucket in reducer.buckets]
    schema.check_exchange(saved, planner.compressor, layouts)
    rank, size = process_set.rank(), process_set.size()
    sharded, hosts = saved["mode"] == "sharded", saved["hosts"]
    if sharded:
        schema.check_hosts(hosts, place and place.hosts)
        if saved["size"] != size:
            raise CheckpointError(schema.other_size(saved["size"], size))
    if sharded and saved["rank"] != rank:
        LOGGER.warning(
            "the optimizer's state was saved by rank %d: what it had kept back is not taken on "
            "rank %d. hvd.save_checkpoint saves what belongs to each rank",
            saved["rank"],
            rank,
        )
    else:
        shares = 1 if sharded else saved["size"]  # each rank goes on from the mean
        reducer.traffic.totals = (
            [count // shares for count in saved["counters"]],
            {name: count // shares for name, count in saved["gathered"].items()},
        )
    size = participants.rank_and_size[1]
    # An owner is a rank among those that exchange: with hosts, another's state has none.
    saver = saved["rank"] if saved["rank"] == rank or not hosts else -1
    origin = schema.Origin(saved["steps"], saved["mode"], saver, hosts or saved["size"])
    for bucket, entry in zip(reducer.buckets, saved["buckets"]):
        compressor, start = bucket.compressor, {}
        if compressor.reset_on_merge:
            start = dict(leaves(compressor.start(bucket.ops, bucket.layout, size)))
        stored = {
            path: entry["state"][path].to(x.device, copy=True)
            for path, x in leaves(bucket.state)
            if path in entry["state"]
        }
        bucket.state = schema.restore(
            compressor, bucket.ops, bucket.state, stored, start, origin, rank, size
        )
    reducer.steps = saved["steps"]
    if not planner.ordered:
        planner.order = list(saved["order"])


# -- the way back --------------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """Whole state of a reducer on one rank, by reference; copy `states` to keep it for long."""

    steps: int
    totals: tuple[list[int], dict[str, int]]
    plan: Plan
    states: list[State]


def snapshot(reducer: Reducer) -> Snapshot:
    """Return the reducer's state for `restore`."""
    states = [bucket.state for bucket in reducer.buckets]
    return Snapshot(reducer.steps, reducer.traffic.totals, reducer.planner.plan, states)


def restore(reducer: Reducer, kept: Snapshot) -> None:
    """Restore a reducer from a snapshot; no exchange may be in flight."""
    reducer.steps, reducer.traffic.totals = kept.steps, kept.totals
    reducer.planner.plan = kept.plan
    for bucket, state in zip(reducer.buckets, kept.states):
        bucket.state = state


def make_rollback(item: Any) -> Callable[[], None]:
    """Save the state of an object; return a function that restores it bit-exactly.

    Args:
        item: a module, an optimizer, or any other object with a `state_dict`.
    """
    if isinstance(item, torch.optim.Optimizer) and not isinstance(item, WrappedOptimizer):
        return _rollback_of_optimizer(item)
    kept, known = copy.deepcopy(item.state_dict()), set(getattr(item, "__dict__", ()))

    def undo() -> None:
        item.load_state_dict(kept)
        for name in set(getattr(item, "__dict__", ())) - known:  # of another kind of scheduler, say
            delattr(item, name)

    return undo


def _rollback_of_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Save by reference: loading makes new tensors, and `load_state_dict` would cast old ones."""
    synchronizer = synchronizer_of(optimizer)
    reducer = None if synchronizer is None else synchronizer.reducer
    kept = None if reducer is None else snapshot(reducer)
    state = optimizer.state
    held = {p: dict(x) if isinstance(x, dict) else x for p, x in state.items()}
    groups, options = optimizer.param_groups, [dict(group) for group in optimizer.param_groups]
    members = list(groups)

    def undo() -> None:
        if reducer is not None and kept is not None:
            restore(reducer, kept)
        state.clear()
        state.update(held)
        for group, values in zip(members, options):
            group.clear()
            group.update(values)
        groups[:] = members
        optimizer.state, optimizer.param_groups = state, groups

    return undo


# -- checkpoints of all ranks ----------------------------------------------------------------------


@outside_inference()
def save_checkpoint(
    folder: str | os.PathLike[str],
    *,
    mode: str = "sharded",
    process_set: Any = horovod.global_process_set,
    **objects: Any,
) -> None:
    """Save models, optimizers and other objects to a folder; all ranks call it.

    The previous checkpoint stays valid until all ranks have written theirs, and is then replaced.
    After a crash or a full disk, either the old or the new one is there.

    Args:
        folder: the same path on all ranks. Without a shared file system each host keeps its ranks'
            files.
        mode: "sharded" saves each rank's compressor state, and resumes bit-exactly with the same
            number of ranks. "consolidated" saves the sum over ranks, in one file, and resumes with
            any number of ranks, each of which takes its share. With `LocalSteps` these begin with
            the global parameters: call its `exchange()` before, or the steps since are lost.
        process_set: the ranks that take part.
        objects: by name. An object with a `state_dict` (model, optimizer, scheduler, scaler) is
            saved by it; numbers, strings, tensors, and lists and dicts of them as they are. Must be
            equal on all ranks, except for compressor state; rank 0's are saved. So the running
            means of a batch normalization, each rank's own before, are rank 0's on all ranks
            afterwards, as with Horovod's broadcast. Objects that need pickling are refused.

    Raises:
        CheckpointError: on all ranks, naming those that could not write; or the ranks do not save
            the same objects in the same mode.

    >>> hvd.save_checkpoint("last", model=model, optimizer=optimizer, epoch=3)  # doctest: +SKIP
    """
    ranks = _ranks(process_set)
    checkpoint_files.agree_on(mode, objects, ranks)
    own: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    for name, item in objects.items():
        if isinstance(item, LocalStepsOptimizer):  # between exchanges all of it is a rank's own
            state = item.state_dict(mode)
            shared[name] = state if mode == "consolidated" else {}
            if mode == "sharded":
                own[name] = state
            continue
        if synchronizer_of(item) is None and not isinstance(item, WrappedOptimizer):
            shared[name] = item.state_dict() if hasattr(item, "state_dict") else item
            continue
        shared[name] = item.state_dict(mode=mode)
        if mode == "sharded":
            own[name] = shared[name].pop("gradcomp")
    whole = {"mode": mode, "size": ranks.size, "objects": shared}
    checkpoint_files.write(
        folder,
        ranks,
        lambda: safetensors_file.packed(whole),
        (lambda: safetensors_file.packed(own)) if mode == "sharded" else None,
    )


@outside_inference()
def load_checkpoint(
    folder: str | os.PathLike[str],
    *,
    process_set: Any = horovod.global_process_set,
    **objects: Any,
) -> dict[str, Any]:
    """Load a checkpoint that `save_checkpoint` wrote; all ranks call it.

    No broadcast is needed after it: all ranks load the same. Only rank 0 needs access to the shared
    file. Every byte is checked against its SHA-256. All ranks load, or none: after an error all
    objects are rolled back on all ranks, so a copy of their state is kept meanwhile.

    Args:
        folder: as in `save_checkpoint`.
        process_set: the ranks that take part.
        objects: by the names that they were saved under; each is loaded by its `load_state_dict`.

    Returns:
        All other saved objects, by name.

    Raises:
        CheckpointError: on all ranks: there is no checkpoint, a file of it is missing or damaged,
            or it is of another model, compressor or number of ranks.
    """

    def prepare(whole: dict[str, Any], own: dict[str, Any] | None) -> Takeover:
        saved = dict(whole["objects"])
        missing = [name for name in objects if name not in saved]
        if missing:
            raise CheckpointError(
                f"{', '.join(missing)} is not in it; there are {', '.join(saved)}"
            )
        states = {name: saved.pop(name) for name in objects}
        for name, item in objects.items():
            local = isinstance(item, LocalStepsOptimizer)
            if own is not None and name in own:
                states[name] = own[name] if local else {**states[name], "gradcomp": own[name]}
            synchronizer = synchronizer_of(item)
            if synchronizer is not None:
                # As loading does; a rollback leaves out what joins here.
                synchronizer.join_parameters()
        undos: list[Callable[[], None]] = []

        def take() -> dict[str, Any]:
            # Local steps last: they set a rank's own parameters, the model's are rank 0's.
            last = sorted(objects, key=lambda name: isinstance(objects[name], LocalStepsOptimizer))
            for name in last:
                item = objects[name]
                undos.append(make_rollback(item))
                try:
                    item.load_state_dict(states[name])
                except (ValueError, RuntimeError, KeyError) as error:
                    raise CheckpointError(f"{name}: {error}") from error
            return saved

        def undo() -> None:
            while undos:
                undos.pop()()

        return Takeover(take, undo)

    return checkpoint_files.read(folder, _ranks(process_set), safetensors_file.unpacked, prepare)


def _ranks(process_set: Any) -> Ranks:
    name = "gradcomp.checkpoint"
    root = process_set.ranks[0] if process_set.ranks else 0

    def gather(item: Any, kind: Any) -> list[Any]:
        return gather_objects(item, kind, name, process_set)

    def broadcast(data: bytes) -> bytes:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        given = comm_horovod.broadcast(mine, root, f"{name}.data", process_set).wait()
        return given.numpy().tobytes()

    return Ranks(process_set.rank(), process_set.size(), gather, broadcast)
