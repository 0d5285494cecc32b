"""Checkpoints of all ranks: variables of models, optimizers and tapes, and compressor state.

Files are in the safetensors format: an array for each variable, and one text that describes them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from safetensors import numpy as safetensors

from hvd_gradcomp.checkpoint import files, reducer_state, schema
from hvd_gradcomp.checkpoint.files import Ranks, Takeover
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.method.compressor import is_replicated, leaves
from hvd_gradcomp.tensorflow.checkpoint_barrier import barrier
from hvd_gradcomp.tensorflow.comm.horovod import gather_objects
from hvd_gradcomp.tensorflow.interop.variables import (
    is_apart,
    is_own,
    is_rank_local,
    plain_variable,
)
from hvd_gradcomp.tensorflow.local_steps import LocalSteps
from hvd_gradcomp.tensorflow.reduce.buckets import Bucket
from hvd_gradcomp.tensorflow.reduce.reducer import GraphReducer
from hvd_gradcomp.tensorflow.reduce.registry import distributed_in, optimizer_of, reducer_in

Arrays = dict[str, np.ndarray]
_META = "meta"
_waiting: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()  # by unbuilt optimizer
_ALIKE = ("exchanges", "skipped")  # counters that are equal on all ranks


def save_checkpoint(
    folder: str | os.PathLike[str],
    *,
    mode: str = "sharded",
    process_set: Any = horovod.global_process_set,
    **objects: Any,
) -> None:
    """Save models, optimizers and other objects to a folder; all ranks call it.

    The previous checkpoint there stays valid until all ranks have written theirs, and is then
    replaced; after a crash or a full disk at any moment one of the two is intact.

    Args:
        folder: the same path on all ranks. Hosts that share no file system keep their own ranks'
            files each.
        mode: "sharded" saves each rank's compressor state, and resumes exactly with as many
            ranks: the same bits as without the stop. "consolidated" saves the sum over ranks, in
            one file, and resumes with any number of ranks, each of which takes its share.
        process_set: the ranks that take part.
        objects: by name. A Keras model (with its optimizer, if it has one), an optimizer, the
            result of `tape_state`, a `LocalSteps`, anything else with `variables`, a list of
            variables; numbers, texts, and lists and dicts of them are saved as JSON. Equal on all
            ranks except for compressor state, and what local steps have moved; rank 0's count. So
            the running means of a batch normalization, each rank's own before, are rank 0's on all
            ranks afterwards, as with Horovod's broadcast.

    Raises:
        CheckpointError: on all ranks, naming those that could not write; or the ranks do not save
            the same objects in the same mode, or some are in a step of training.

    >>> hvd.save_checkpoint("last", model=model, epoch=3)  # doctest: +SKIP
    """
    ranks = _ranks(process_set)
    files.agree_on(mode, objects, ranks)
    shared: Arrays = {}
    per_rank: Arrays = {}
    meta: dict[str, Any] = {"objects": {}, "values": {}}
    for name, item in objects.items():
        variables = _variables(item)
        if variables is None:
            meta["values"][name] = item
            continue
        if _waits(item):
            raise CheckpointError(
                f"{name} was loaded and is not built yet, so what it keeps is not here to be "
                "saved: save after its first step, or build it before load_checkpoint"
            )
        entry: dict[str, Any] = {"variables": [_described(v) for v in variables]}
        meta["objects"][name] = entry
        for place, variable in enumerate(variables):
            if mode == "consolidated" and is_own(plain_variable(variable)):
                raise CheckpointError(
                    f"{_described(variable)[0]} of {name} is trained on each rank for itself: save "
                    'with mode="sharded"'
                )
            if mode == "sharded" and (_is_own(variable) or is_apart(plain_variable(variable))):
                per_rank[f"{name}/{place}"] = _array(variable)
            elif not _is_own(variable):
                shared[f"{name}/{place}"] = _array(variable)
        optimizer = distributed_in(_optimizer_of(item))
        if mode == "consolidated" and int(getattr(optimizer, "pass_of_step", 0)):
            raise CheckpointError(
                f"{name} has accumulated part of a step's gradients, which belong to their rank: "
                "save consolidated checkpoints after the last pass of a step"
            )
        if isinstance(item, LocalSteps):
            entry["schedule"] = str(item.schedule)
            if mode == "consolidated" and not item.is_exchanged:
                raise CheckpointError(
                    f"{name} has made steps since the last exchange, which belong to their rank: "
                    f"call {name}.exchange() on all ranks before, or save with mode='sharded'"
                )
        for title, reducer in _exchanges(item).items():
            entry[title] = _exchange(reducer, mode, f"{name}/{title}", shared, per_rank)
    meta |= {"mode": mode, "size": ranks.size}
    files.write(
        folder,
        ranks,
        lambda: _packed(shared, meta),
        (lambda: _packed(per_rank, {})) if mode == "sharded" else None,
    )


def load_checkpoint(
    folder: str | os.PathLike[str],
    *,
    process_set: Any = horovod.global_process_set,
    **objects: Any,
) -> dict[str, Any]:
    """Resume from a folder that `save_checkpoint` wrote; all ranks call it.

    No broadcast is needed after it: all ranks load the same. Only rank 0 has to see the shared
    file. Models have to be built. A `DistributedOptimizer` that has not trained yet, and so is not
    built, takes its state in its first step, which then raises the error if there is one.
    Every byte is checked against the SHA-256 of what was saved. All ranks load, or none: after an
    error all variables are restored on all ranks, from a copy that is kept meanwhile.

    Args:
        folder: as in `save_checkpoint`.
        process_set: the ranks that take part.
        objects: by the names that they were saved under.

    Returns:
        The numbers and texts that were saved, by name.

    Raises:
        CheckpointError: on all ranks: there is no checkpoint, one of its files is missing or
            damaged, or it is of another model, compressor or number of ranks.
    """

    def prepare(whole: dict[str, Any], per_rank: dict[str, Any] | None) -> Takeover:
        saved = whole["objects"]
        plan: list[tuple[Any, Any]] = []
        later: list[tuple[Any, dict[str, Any], Callable[[], None]]] = []
        for name, item in objects.items():
            if name not in saved:
                names = ", ".join((*saved, *whole["values"]))
                raise CheckpointError(f"{name} is not in it; there are {names}")
            arrays = {**whole["arrays"], **(per_rank["arrays"] if per_rank is not None else {})}
            how = (name, item, saved[name], arrays, whole["mode"], whole["size"])
            try:
                if _is_unbuilt(item, saved[name]):
                    later.append((item, saved[name], partial(_take_late, *how)))
                else:
                    plan += _restored(*how)
            except CheckpointError as error:
                raise CheckpointError(f"{name}: {error}") from None
        before: list[tuple[Any, Any]] = []

        def take() -> dict[str, Any]:
            for variable, value in plan:
                before.append((variable, tf.identity(variable)))
                variable.assign(value)
            _commit(objects.values())
            for optimizer, entry, ready in later:
                _waiting[optimizer] = entry
                optimizer.when_built(ready)
            return dict(whole["values"])

        def undo() -> None:
            for variable, value in before:
                variable.assign(value)
            for optimizer, *_ in later:
                _waiting.pop(optimizer, None)

        return Takeover(take, undo)

    return files.read(folder, _ranks(process_set), _unpacked, prepare)


def _ranks(process_set: Any) -> Ranks:
    """Return the ranks that save or load together, once all of them do."""
    barrier(process_set)
    name = "gradcomp.checkpoint"
    root = process_set.ranks[0] if process_set.ranks else 0

    def gather(item: Any, kind: Any) -> list[Any]:
        return gather_objects(item, kind, name, process_set)

    def broadcast(data: bytes) -> bytes:
        array = np.frombuffer(data, np.uint8)
        received = horovod.broadcast(array, root, name=f"{name}.data", process_set=process_set)
        return received.numpy().tobytes()

    return Ranks(process_set.rank(), process_set.size(), gather, broadcast)


# -- saving --------------------------------------------------------------------------------------


def _optimizer_of(item: Any) -> Any:
    """Return the optimizer of a model, or the item itself."""
    return item if getattr(item, "optimizer", None) is None else optimizer_of(item)


def _exchanges(item: Any) -> dict[str, GraphReducer]:
    """Return the reducers of an object, by their titles in a checkpoint."""
    if isinstance(item, LocalSteps):
        several = enumerate((*item.reducers, *item.others))
        return {f"exchange {number}": reducer for number, reducer in several}
    reducer = reducer_in(_optimizer_of(item))
    return {} if reducer is None else {"exchange": reducer}


def _variables(item: Any) -> list[Any] | None:
    """Return the variables of an object, without its exchange's; None if it is a plain value."""
    if isinstance(item, (list, tuple)) and item and all(hasattr(v, "assign") for v in item):
        return list(item)
    if not hasattr(item, "variables"):
        return None
    variables = [*item.variables]
    optimizer = _optimizer_of(item)
    if optimizer is not item:
        variables += optimizer.variables
    exchanged = {id(v) for reducer in _exchanges(item).values() for v in reducer.variables}
    kept = {id(plain_variable(v)): v for v in variables}
    return [v for key, v in kept.items() if key not in exchanged and v.name != "gradcomp_rank"]


def _is_own(variable: Any) -> bool:
    """Return True if a variable belongs to its rank, as the random seed of a Keras layer does."""
    plain = plain_variable(variable)
    return is_rank_local(plain) or is_own(plain) or variable.name == "seed_generator_state"


def _described(variable: Any) -> list[Any]:
    """Return name, shape and dtype. The numbers that Keras adds to names are left out."""
    name = str(getattr(variable, "path", None) or variable.name).partition(":")[0]
    name = "/".join(re.sub(r"_\d+(?=[_/]|$)", "", name).split("/")[-2:])
    return [name, [int(n) for n in variable.shape], tf.as_dtype(variable.dtype).name]


def _array(variable: Any) -> np.ndarray:
    return np.asarray(tf.convert_to_tensor(variable))


def _exchange(
    reducer: GraphReducer, mode: str, name: str, shared: Arrays, per_rank: Arrays
) -> dict[str, Any]:
    """Add the state of an exchange to the arrays, and return its description."""

    def add(title: str, value: np.ndarray, alike: bool) -> None:
        (shared if alike or mode == "consolidated" else per_rank)[f"{name}/{title}"] = value

    hosts = reducer.participants.place is not None
    for number, bucket in enumerate(reducer.buckets):
        for path, value in _state(reducer, bucket, mode).items():
            # With hosts, only the leaders have the replicated state.
            add(f"{number}.{path}", value, not hosts and is_replicated(bucket.compressor, path))
    for title, counter in reducer.counters.local.items():
        if title in _ALIKE or mode == "sharded":
            value = _array(counter)
        else:
            name_of_sum = f"{reducer.name}.{title}.consolidated"
            value = _total(_array(counter), name_of_sum, reducer.process_set)
        add(title, value, title in _ALIKE)
    saved = schema.describe(reducer.compressor, reducer.planner.layouts, int(reducer.steps))
    return {**saved, "hosts": _hosts(reducer)}


def _hosts(reducer: GraphReducer) -> int | None:
    place = reducer.participants.place
    return None if place is None else place.hosts


def _state(reducer: GraphReducer, bucket: Bucket, mode: str) -> Arrays:
    """Return a bucket's tensors by path: this rank's, or those consolidated over all ranks."""
    arrays = {path: _array(variable) for path, variable in bucket.named_variables()}
    if mode == "sharded":
        return arrays
    where = bucket.name, int(reducer.steps), bucket.leader, reducer.participants
    return reducer_state.consolidate(bucket.compressor, arrays, *where, _COLLECTIVES, _zeros)


def _zeros(shape: Sequence[int], dtype: str) -> np.ndarray:
    return np.zeros(shape, tf.as_dtype(dtype).as_numpy_dtype)


def _total(x: np.ndarray, name: str, group: Any) -> np.ndarray:
    value = tf.constant(x)
    wide = tf.cast(value, tf.float64) if value.dtype.is_floating else value
    total = mpi_ops._allreduce(
        tf.reshape(wide, (-1,)),
        op=horovod.Sum,
        name=name,
        ignore_name_scope=True,
        process_set=group,
    )
    return np.asarray(tf.cast(tf.reshape(total, value.shape), value.dtype))


def _broadcast(x: np.ndarray, name: str, group: Any, root: int) -> np.ndarray:
    data = np.frombuffer(x.tobytes(), np.uint8)
    data = horovod.broadcast(data, root, name=name, process_set=group)
    return np.frombuffer(data.numpy().tobytes(), x.dtype).reshape(x.shape)


_COLLECTIVES = reducer_state.Collectives(_total, gather_objects, _broadcast)


# -- loading -------------------------------------------------------------------------------------


def _commit(items: Iterable[Any]) -> None:
    """Commit the last exchanges: no rollback may pass the loaded checkpoint."""
    for item in items:
        for reducer in _exchanges(item).values():
            reducer.counters.commit()


def _waits(item: Any) -> bool:
    """Return True if it is an optimizer that has yet to take what was loaded."""
    return hasattr(item, "when_built") and item in _waiting


def _is_unbuilt(item: Any, saved: dict[str, Any]) -> bool:
    """Return True if it is an optimizer that has yet to create the variables that were saved.

    Raises:
        CheckpointError: it cannot report when it has.
    """
    if getattr(item, "built", True) or not hasattr(item, "apply_gradients"):
        return False
    if hasattr(item, "when_built"):
        return True
    if len(saved["variables"]) > len(item.variables) or "exchange" in saved:
        raise CheckpointError(
            f"{type(item).__name__} is not built: call its build(model.trainable_variables) on all "
            "ranks before load_checkpoint"
        )
    return False


def _take_late(name: str, item: Any, saved: dict[str, Any], *how: Any) -> None:
    """Load the state of an optimizer that has just been built, unless all ranks had to undo it."""
    if _waiting.get(item) is not saved:
        return
    del _waiting[item]
    try:
        plan = _restored(name, item, saved, *how)
    except CheckpointError as error:
        raise CheckpointError(
            f"{name}, which was loaded before it was built, has not been taken: {error}"
        ) from None
    for variable, value in plan:
        variable.assign(value)
    _commit([item])


def _restored(
    name: str, item: Any, saved: dict[str, Any], arrays: Arrays, mode: str, size: int
) -> list[tuple[Any, Any]]:
    """Return (variable, new value) pairs for an object that fits the checkpoint."""
    variables = _variables(item)
    if variables is None:
        raise CheckpointError("it has no variables here")
    schedule = str(item.schedule) if isinstance(item, LocalSteps) else None
    if saved.get("schedule") != schedule:
        raise CheckpointError(f"it was saved with {saved.get('schedule')}, here it is {schedule}")
    described = [_described(v) for v in variables]
    if described != saved["variables"]:
        raise CheckpointError(_difference(saved["variables"], described))
    exchanges = _exchanges(item)
    plan: list[tuple[Any, Any]] = []
    if ("exchange" in saved) != ("exchange" in exchanges):
        kinds = ("a distributed", "plain") if "exchange" in saved else ("a plain", "distributed")
        raise CheckpointError(
            f"the checkpoint was saved with {kinds[0]} optimizer, but this optimizer is {kinds[1]}"
        )
    for title, reducer in exchanges.items():
        if title not in saved:
            raise CheckpointError(f"{title} is not in it: it was saved without buffers=")
        schema.check_exchange(saved[title], reducer.compressor, reducer.planner.layouts)
        plan += _restored_exchange(reducer, saved[title], f"{name}/{title}", arrays, mode, size)
    for place, variable in enumerate(variables):
        key = f"{name}/{place}"
        if key in arrays:
            plan.append((variable, arrays[key]))
    for variable, value in plan:
        if tuple(value.shape) != tuple(variable.shape):
            raise CheckpointError(
                f"{variable.name} is of shape {tuple(variable.shape)}, and there is one of "
                f"{tuple(value.shape)} in it"
            )
    return plan


def _restored_exchange(
    reducer: GraphReducer,
    saved: dict[str, Any],
    name: str,
    arrays: Arrays,
    mode: str,
    size_then: int,
) -> list[tuple[Any, Any]]:
    rank, hosts = reducer.process_set.rank(), saved["hosts"]
    if mode == "sharded":
        schema.check_hosts(hosts, _hosts(reducer))
    size, holders = reducer.participants.rank_and_size[1], hosts or size_then
    # A sharded part is this rank's own: `files.read` gives each rank its part.
    origin = reducer_state.Origin(saved["steps"], mode, rank, holders)
    plan: list[tuple[Any, Any]] = []
    for number, bucket in enumerate(reducer.buckets):
        start = dict(leaves(bucket.template))
        stored = {path: tf.constant(arrays[f"{name}/{number}.{path}"]) for path in start}
        state = reducer_state.restore(
            bucket.compressor, reducer.ops, bucket.template, stored, start, origin, rank, size
        )
        plan += zip(bucket.variables, (x for _, x in leaves(state)))
    for title, variable in reducer.counters.local.items():
        array = arrays[f"{name}/{title}"]
        same = mode == "sharded" or title in _ALIKE
        plan.append(
            (variable, array if same else reducer_state.share(reducer.ops, array, size, size_then))
        )
    return [*plan, (reducer.steps, tf.constant(saved["steps"], reducer.steps.dtype))]


def _difference(saved: Sequence[Any], here: Sequence[Any]) -> str:
    """Describe the first difference between two lists of variables."""
    for place, (a, b) in enumerate(zip(saved, here)):
        if list(a) != list(b):
            return f"variable {place} was {a[0]} {a[1]} {a[2]}, here it is {b[0]} {b[1]} {b[2]}"
    return f"{len(saved)} variables were saved, here are {len(here)}"


# -- files ---------------------------------------------------------------------------------------


def _packed(arrays: Arrays, meta: dict[str, Any]) -> bytes:
    narrow: Arrays = {k: x.view(np.uint16) for k, x in arrays.items() if x.dtype.name == "bfloat16"}
    text = json.dumps({**meta, "bfloat16": list(narrow)})
    described = {_META: np.frombuffer(text.encode(), np.uint8), **arrays, **narrow}
    laid_out = {key: np.asarray(x, order="C") for key, x in described.items()}
    return bytes(safetensors.save(laid_out))


def _unpacked(data: bytes) -> dict[str, Any]:
    arrays = safetensors.load(data)
    meta = json.loads(arrays.pop(_META).tobytes())
    for key in meta["bfloat16"]:
        arrays[key] = arrays[key].view(tf.bfloat16.as_numpy_dtype)
    return {**meta, "arrays": arrays}
