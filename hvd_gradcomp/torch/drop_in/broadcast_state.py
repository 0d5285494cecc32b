"""`broadcast_optimizer_state`: all ranks continue from one rank's state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Optional

import horovod.torch as horovod
import torch

from hvd_gradcomp.method.compressor import Compressor, is_replicated, leaves, with_leaves
from hvd_gradcomp.method.learned import owner_of, retrained
from hvd_gradcomp.runtime import config_check
from hvd_gradcomp.torch.comm import broadcast_objects
from hvd_gradcomp.torch.comm.broadcast_objects import RankInfo
from hvd_gradcomp.torch.drop_in.grad_synchronizer import GradSynchronizer, synchronizer_of
from hvd_gradcomp.torch.drop_in.optimizer_mixin import distributed
from hvd_gradcomp.torch.interop.inference import outside_inference
from hvd_gradcomp.torch.local.wrapped_optimizer import WrappedOptimizer
from hvd_gradcomp.torch.reduce.bucket import Bucket
from hvd_gradcomp.torch.reduce.reducer import LOGGER, Reducer, wait_for_copies


@outside_inference()
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    *,
    process_set: Any = horovod.global_process_set,
) -> None:
    """Broadcast as Horovod's own function does, with compressor state; to start or to resume.

    All ranks take the root's state and options, whatever theirs are: the root may be the only rank
    that has loaded a checkpoint. For an optimizer of this package they also take the step count,
    the compressor's replicated state, and the totals of `compression_stats`. A rank's own state
    (residuals, momenta) stays if the rank has made as many steps as the root. Otherwise it begins
    empty, and the root logs a warning: the `state_dict` of one rank has only its own.
    `save_checkpoint` saves that of all ranks. With `LocalSteps` all ranks go on from the root's
    global parameters, which the model gets, and from its inner optimizer's state.

    Args:
        optimizer: any. For compressor state, the one that `DistributedOptimizer` has returned.
        root_rank: the rank whose state all ranks get.
        model: as in Horovod: if no rank has state yet, gradients become zeros, except those of the
            model's sparse embeddings, which stay None.
        process_set: the ranks that call it.

    Raises:
        MismatchError: on all ranks, if they do not train the same model in the same way, or one
            has an exchange in flight.
        ValueError: there is no such root.
    """
    if isinstance(optimizer, WrappedOptimizer):
        hand_out_rounds(optimizer, root_rank, process_set)
    else:
        hand_out(optimizer, root_rank, process_set)
    if not optimizer.state:
        _zero_gradients(optimizer, model)


def hand_out(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    process_set: Any = horovod.global_process_set,
    elastic: bool = False,
) -> None:
    """Broadcast the state as `broadcast_optimizer_state` does, but set no gradients.

    Args:
        optimizer, root_rank, process_set: as there.
        elastic: after an elastic reset: an exchange in flight is aborted, and no warning is logged
            for joining ranks, which begin empty.
    """
    synchronizer = synchronizer_of(optimizer)

    def describe() -> RankInfo:
        if synchronizer is not None:
            if synchronizer.exchanging and not elastic:
                raise RuntimeError(
                    "gradients are on their way: call it before backward or after step"
                )
            # Those that were unfrozen since it was made, as in the run that saved.
            synchronizer.join_parameters()
        groups = [len(group["params"]) for group in optimizer.param_groups]
        description = {
            f"parameter group {place}": f"{n} parameters" for place, n in enumerate(groups)
        }
        return RankInfo(description, synchronizer and _exchange_of(synchronizer))

    everybody = broadcast_objects.agreed(
        "broadcast_optimizer_state", describe, Optional[_Exchange], root_rank, process_set
    )
    steps = _steps_of_peers({rank: info.more for rank, info in everybody.items()}, root_rank)
    others = [rank for rank, made in steps.items() if made != steps[root_rank]]
    here = horovod.rank()
    nest = None
    if here == root_rank:
        exchange = synchronizer and _shared_state(synchronizer.reducer)
        nest = {"plain": plain_state(optimizer), "exchange": exchange}
    nest = broadcast_objects.from_root(nest, root_rank, process_set)
    if here != root_rank:
        _put(optimizer, nest["plain"])
    wrapping = distributed(optimizer)
    if synchronizer is None or wrapping is None or here not in steps:
        return
    reducer = synchronizer.reducer
    alone = any(_keeps_alone(bucket, reducer.steps) for bucket in reducer.buckets)
    anew = _take(reducer, nest["exchange"], keeps=here not in others, all_keep=not others)
    synchronizer.compare_again()
    wrapping.retake_momentum()
    if here == root_rank:
        _report(reducer, root_rank, others if alone and not elastic else [], anew)


def hand_out_rounds(
    optimizer: WrappedOptimizer,
    root_rank: int,
    process_set: Any = horovod.global_process_set,
) -> None:
    """Broadcast the state of an optimizer that exchanges in its `step`; see `hand_out`.

    Residuals stay with their rank. With local steps all ranks go on from the root's global
    parameters.
    """
    names = [name for reducer in optimizer.reducers for name, _, _ in reducer.planner.layers]
    info = RankInfo({"optimizer": type(optimizer).__name__, "parameters": ", ".join(names)})
    broadcast_objects.agreed(
        "broadcast_optimizer_state", lambda: info, Optional[int], root_rank, process_set
    )
    state = optimizer.common_state_dict() if horovod.rank() == root_rank else None
    optimizer.load_state_dict(broadcast_objects.from_root(state, root_rank, process_set))


def hand_out_plain(optimizer: torch.optim.Optimizer, root_rank: int, process_set: Any) -> None:
    """Broadcast the state of the wrapped optimizer, without that of its exchange."""
    here = horovod.rank() == root_rank
    state = broadcast_objects.from_root(
        plain_state(optimizer) if here else None, root_rank, process_set
    )
    if not here:
        _put(optimizer, state)
    wrapping = distributed(optimizer)
    if wrapping is not None:
        wrapping.retake_momentum()


class _Exchange(NamedTuple):
    """A rank's description of an optimizer's exchange."""

    description: config_check.Description  # has to be equal on all its ranks
    ranks: tuple[int, ...]
    steps: int


def _steps_of_peers(exchanges: dict[int, _Exchange | None], root_rank: int) -> dict[int, int]:
    """Return the step count of each rank that exchanges with the root.

    Ranks of another process set are left out: their exchange stays as it is.

    Raises:
        MismatchError: they do not exchange in the same way.
    """
    root = exchanges[root_rank]
    if root is None:
        return {}
    peers = {rank: one for rank, one in exchanges.items() if one and one.ranks == root.ranks}
    config_check.agree([one.description for one in peers.values()], [*peers])
    return {rank: one.steps for rank, one in peers.items()}


def _report(
    reducer: Reducer, root_rank: int, emptied: list[int], anew: Iterable[Compressor]
) -> None:
    """Log lost state, if any; called on the root."""
    for one in anew:
        LOGGER.warning("%s learns anew: no remaining rank has its learned state", one)
    if emptied:
        LOGGER.warning(
            "each rank goes on from step %d of rank %d. What the compressor keeps on a rank alone "
            "begins empty where other steps were made (%d of the ranks): no state_dict of rank %d "
            "has it. hvd.save_checkpoint saves it, of all ranks",
            reducer.steps,
            root_rank,
            len(emptied),
            root_rank,
        )


# -- the state of any optimizer --------------------------------------------------------------------


def plain_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer, or of the one that it wraps."""
    wrapping = distributed(optimizer)
    return optimizer.state_dict() if wrapping is None else wrapping.plain_state_dict()


def _put(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Replace the optimizer's state and options, in place.

    `load_state_dict` would cast to the parameter's dtype and make new groups, unknown to a
    scheduler of the wrapped optimizer.
    """
    number: dict[Any, Any] = {}
    for group, theirs in zip(optimizer.param_groups, saved["param_groups"]):
        number.update(zip(theirs["params"], group["params"]))
        for key, value in theirs.items():
            if key == "params":
                continue
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)  # a graph that was captured reads it there
            else:
                group[key] = value
    optimizer.state.clear()
    for key, values in saved["state"].items():
        p = number.get(key, key)
        if isinstance(values, dict) and isinstance(p, torch.Tensor):
            values = {name: _beside(p, x) for name, x in values.items()}
        optimizer.state[p] = values


def _beside(p: torch.Tensor, x: Any) -> Any:
    """Move a GPU tensor to the GPU of its parameter; return everything else as it is."""
    return x.to(p.device) if isinstance(x, torch.Tensor) and x.is_cuda and p.is_cuda else x


def _zero_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Set gradients to zeros, as Horovod does after it has made an optimizer's first state."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return
    tables = [m for m in (model.modules() if model else ()) if getattr(m, "sparse", False)]
    sparse = {p for table in tables for p in table.parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and p.grad is None and p not in sparse:
                p.grad = torch.zeros_like(p)


# -- the state of an exchange ----------------------------------------------------------------------


def _exchange_of(synchronizer: GradSynchronizer) -> _Exchange:
    description, reducer = synchronizer.check.description(), synchronizer.reducer
    if reducer.planner.compressor.needs_execution_order:
        del description["buckets"]  # they follow from the order of use, which is handed out
    process_set = reducer.participants.process_set
    ranks = tuple(process_set.ranks or range(process_set.size()))
    return _Exchange(description, ranks, reducer.steps)


def _shared_state(reducer: Reducer) -> dict[str, Any]:
    """Return the exchange state that this rank can broadcast."""
    wait_for_copies(reducer.buckets)
    planner, (seat, _) = reducer.planner, reducer.participants.rank_and_size
    return {
        "steps": reducer.steps,
        "order": list(planner.order),
        "ordered": planner.ordered,
        "counted": reducer.traffic.totals,
        "seat": seat,
        "buckets": [
            {
                path: x
                for path, x in leaves(bucket.state)
                if _common(bucket.compressor, path, reducer.steps, seat)
                or _counts(bucket.compressor, path, x)
            }
            if reducer.leads(bucket)
            else None
            for bucket in reducer.buckets
        ],
    }


def _common(compressor: Compressor, path: str, steps: int, seat: int) -> bool:
    """Return True if this rank's value of the tensor is valid on all ranks."""
    return is_replicated(compressor, path) or owner_of(compressor, path, steps) == seat


def _counts(compressor: Compressor, path: str, x: torch.Tensor) -> bool:
    """Return True if the tensor is a counter of this rank."""
    return not x.is_floating_point() and path not in compressor.reset_on_merge


def _keeps_alone(bucket: Bucket, steps: int) -> bool:
    """Return True if this rank has nonzero state that no other rank has, such as a residual."""
    one = bucket.compressor
    return any(
        not is_replicated(one, path) and owner_of(one, path, steps) is None and bool(x.any())
        for path, x in leaves(bucket.state)
        if tuple(x.shape) == (bucket.layout.size,)
    )


def _take(reducer: Reducer, saved: dict[str, Any], keeps: bool, all_keep: bool) -> list[Compressor]:
    """Load the root's exchange state.

    Args:
        reducer: this rank may be the root.
        saved: the root's state.
        keeps: this rank keeps its own state.
        all_keep: all ranks keep theirs.

    Returns:
        Compressors that retrain, because the rank that had learned for all loses its state.
    """
    planner, ranks = reducer.planner, reducer.participants.rank_and_size[1]
    if saved["ordered"]:
        planner.reorder(saved["order"])
    elif planner.compressor.needs_execution_order:
        if planner.ordered:
            planner.unorder()
        planner.order = list(saved["order"])
    reducer.steps = saved["steps"]
    if not keeps:
        reducer.traffic.totals = saved["counted"]
    anew: dict[Compressor, None] = {}
    for bucket, fields in zip(reducer.buckets, saved["buckets"]):
        one, steps, seat = bucket.compressor, reducer.steps, saved["seat"]
        # With hosts the root does not lead all buckets: those who do have it in common, or begin.
        stays = keeps and (fields is not None or all_keep)
        _fill(reducer, bucket, fields or {}, seat, stays)
        alone = [path for path, _ in leaves(bucket.state) if not is_replicated(one, path)]
        before = bucket.state
        if all_keep:
            continue
        if any(owner_of(one, path, steps) not in (None, seat) for path in alone):
            bucket.state = one.resized(bucket.ops, bucket.state, steps, ranks)
        elif fields is None:
            bucket.state = retrained(one, bucket.ops, bucket.state, steps)
        if bucket.state is not before:
            anew[one] = None
    return [*anew]


def _fill(
    reducer: Reducer, bucket: Bucket, fields: dict[str, torch.Tensor], seat: int, stays: bool
) -> None:
    """Set a bucket's state to the root's; the rest stays if `stays`, else it is reset."""
    one, state = bucket.compressor, bucket.state
    if not stays:
        ranks = reducer.participants.rank_and_size[1]
        state = one.start(bucket.ops, bucket.layout, ranks)
    values = [
        fields[path].to(x.device)
        if path in fields and (not stays or _common(one, path, reducer.steps, seat))
        else x
        for path, x in leaves(state)
    ]
    bucket.state = with_leaves(state, values)
