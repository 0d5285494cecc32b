"""Compressor state in `state_dict()["gradcomp"]`, and checkpoints of all ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import horovod.torch as horovod
import torch

from hvd_gradcomp.checkpoint import files as checkpoint_files
from hvd_gradcomp.checkpoint.files import Ranks, Takeover
from hvd_gradcomp.checkpoint.reducer_state import Collectives
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.torch.comm import horovod as comm_horovod
from hvd_gradcomp.torch.comm.horovod import gather_objects
from hvd_gradcomp.torch.drop_in.grad_synchronizer import synchronizer_of
from hvd_gradcomp.torch.interop import safetensors_file
from hvd_gradcomp.torch.interop.inference import outside_inference
from hvd_gradcomp.torch.local.local_steps import LocalStepsOptimizer
from hvd_gradcomp.torch.local.wrapped_optimizer import WrappedOptimizer
from hvd_gradcomp.torch.reduce import reducer_state
from hvd_gradcomp.torch.reduce.reducer import Reducer
from hvd_gradcomp.torch.reduce.reducer_state import Snapshot


def save(reducer: Reducer, mode: str = "sharded") -> dict[str, Any]:
    """Return the exchange's state: this rank's, or if "consolidated", of all; then all call it."""
    checkpoint_files.check_mode(mode)
    return reducer_state.save(reducer, _COLLECTIVES if mode == "consolidated" else None)


def _total(x: torch.Tensor, name: str, group: Any) -> torch.Tensor:
    wide = x.double() if x.is_floating_point() else x.clone()
    total = comm_horovod.allreduce(wide.reshape(-1), name, group).wait()
    return total.view(x.shape).to(x.dtype)


def _broadcast(x: torch.Tensor, name: str, group: Any, root: int) -> torch.Tensor:
    data = x.contiguous().reshape(-1).view(torch.uint8)
    received = comm_horovod.broadcast(data, root, name, group).wait()
    return received.view(x.dtype).view(x.shape)


_COLLECTIVES = Collectives(_total, gather_objects, _broadcast)


# -- the way back --------------------------------------------------------------------------------


def make_rollback(item: Any) -> Callable[[], None]:
    """Save the state of an object; return a function that restores it bit-exactly.

    Args:
        item: a module, an optimizer, or any other object with a `state_dict`.
    """
    if isinstance(item, torch.optim.Optimizer) and not isinstance(item, WrappedOptimizer):
        return _rollback_of_optimizer(item)
    kept, known = copy.deepcopy(item.state_dict()), set(getattr(item, "__dict__", ()))

    def rollback() -> None:
        item.load_state_dict(kept)
        for name in set(getattr(item, "__dict__", ())) - known:  # of another kind of scheduler, say
            delattr(item, name)

    return rollback


def _rollback_of_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Save by reference: loading makes new tensors, and `load_state_dict` would cast old ones."""
    synchronizer = synchronizer_of(optimizer)
    reducer = None if synchronizer is None else synchronizer.reducer
    snapshot = None if reducer is None else Snapshot.of(reducer)
    state = optimizer.state
    saved = {p: dict(x) if isinstance(x, dict) else x for p, x in state.items()}
    groups, options = optimizer.param_groups, [dict(group) for group in optimizer.param_groups]
    members = list(groups)

    def rollback() -> None:
        if reducer is not None and snapshot is not None:
            snapshot.restore(reducer)
        state.clear()
        state.update(saved)
        for group, values in zip(members, options):
            group.clear()
            group.update(values)
        groups[:] = members
        optimizer.state, optimizer.param_groups = state, groups

    return rollback


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
    per_rank: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    for name, item in objects.items():
        if isinstance(item, LocalStepsOptimizer):  # between exchanges all of it is a rank's own
            state = item.state_dict(mode)
            shared[name] = state if mode == "consolidated" else {}
            if mode == "sharded":
                per_rank[name] = state
            continue
        if synchronizer_of(item) is None and not isinstance(item, WrappedOptimizer):
            shared[name] = item.state_dict() if hasattr(item, "state_dict") else item
            continue
        shared[name] = item.state_dict(mode=mode)
        if mode == "sharded":
            per_rank[name] = shared[name].pop("gradcomp")
    whole = {"mode": mode, "size": ranks.size, "objects": shared}
    checkpoint_files.write(
        folder,
        ranks,
        lambda: safetensors_file.packed(whole),
        (lambda: safetensors_file.packed(per_rank)) if mode == "sharded" else None,
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

    def prepare(whole: dict[str, Any], per_rank: dict[str, Any] | None) -> Takeover:
        saved = dict(whole["objects"])
        missing = [name for name in objects if name not in saved]
        if missing:
            raise CheckpointError(
                f"{', '.join(missing)} is not in it; there are {', '.join(saved)}"
            )
        states = {name: saved.pop(name) for name in objects}
        for name, item in objects.items():
            local = isinstance(item, LocalStepsOptimizer)
            if per_rank is not None and name in per_rank:
                state = per_rank[name]
                states[name] = state if local else {**states[name], "gradcomp": state}
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
        x = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        received = comm_horovod.broadcast(x, root, f"{name}.data", process_set).wait()
        return received.numpy().tobytes()

    return Ranks(process_set.rank(), process_set.size(), gather, broadcast)
