"""State of a reducer: saved and loaded, kept for the way back, and adapted to other ranks.

Horovod's optimizer, `DistributedDataParallel`, `fully_shard` and local steps save the same things
in the same way: see `checkpoint.reducer_state` for the tensors.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hvd_gradcomp.checkpoint import reducer_state, schema
from hvd_gradcomp.checkpoint.reducer_state import Collectives, Origin, Source
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.method.compressor import State, is_replicated, leaves, with_leaves
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.method.learned import owner_of
from hvd_gradcomp.torch.reduce.bucket import Bucket
from hvd_gradcomp.torch.reduce.bucketing import Plan
from hvd_gradcomp.torch.reduce.reducer import Reducer, wait_for_copies

NO_STATES = "there is no state: load_states takes those of all ranks that saved"
LOGGER = logging.getLogger("hvd_gradcomp")


class Remedies(NamedTuple):
    """Advice on a state that belongs to other ranks, for messages.

    Attributes:
        size: another number of ranks has saved it.
        hosts: other hosts have saved it.
        rank: another rank has saved it.
    """

    size: str
    hosts: str
    rank: str


OF_HOOKS = Remedies(
    "Hand load_states() what all of them have saved: each rank takes its share of the sum",
    "Resume with the same hierarchical=, or hand load_states() what all ranks have saved",
    "Each rank saves and loads its own, in a file of its own; with torch.distributed.checkpoint "
    "under a name with the rank in it, such as f'compressor/{rank}'",
)
OF_OPTIMIZERS = Remedies(
    schema.CONSOLIDATED,
    schema.CONSOLIDATED,
    "hvd.save_checkpoint saves what belongs to each rank",
)


# -- checkpoints -----------------------------------------------------------------------------------


def save(reducer: Reducer, collectives: Collectives | None = None) -> dict[str, Any]:
    """Return the state of this rank, or that of all ranks.

    Args:
        reducer: of this rank.
        collectives: to consolidate the state over all ranks, which all call it; None for this
            rank's own.
    """
    wait_for_copies(reducer.buckets)
    planner, participants, traffic = reducer.planner, reducer.participants, reducer.traffic
    counters, gathered = traffic.totals
    names = list(gathered)
    if collectives is not None:  # as many numbers on all ranks
        names = [name for name, _, _ in planner.layers]
    counts = [gathered.get(name, 0) for name in names]
    if collectives is not None:
        title = f"{planner.name}.counters.consolidated"
        numbers = torch.tensor([*counters.values(), *counts], device="cpu")
        sums = collectives.total(numbers, title, participants.process_set).tolist()
        counters, counts = dict(zip(counters, sums)), sums[len(counters) :]
    layouts = [bucket.layout for bucket in reducer.buckets]
    saved = schema.describe(planner.compressor, layouts, reducer.steps)
    for entry, bucket in zip(saved["buckets"], reducer.buckets):
        entry["state"] = _packed(reducer, bucket, collectives)
    return {
        **saved,
        "mode": "sharded" if collectives is None else "consolidated",
        "rank": participants.process_set.rank(),
        "size": participants.process_set.size(),
        "hosts": participants.place and participants.place.hosts,
        "order": list(planner.order),
        "ordered": planner.ordered,
        "counters": counters,
        "gathered": dict(zip(names, counts)),
    }


def _packed(
    reducer: Reducer, bucket: Bucket, collectives: Collectives | None
) -> dict[str, torch.Tensor]:
    tensors = {path: x.detach().clone() for path, x in leaves(bucket.state)}
    if collectives is None:
        return tensors

    def zeros(shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=bucket.flat.device)

    where = bucket.name, reducer.steps, bucket.leader, reducer.participants
    return reducer_state.consolidate(bucket.compressor, tensors, *where, collectives, zeros)


def load(reducer: Reducer, saved: dict[str, Any], remedies: Remedies) -> None:
    """Load a state of `save`; if an error is raised, nothing has changed but the order of layers.

    From a sharded state of another rank (rank 0's, broadcast to all) only the replicated fields are
    loaded: a broadcast residual would be applied once per rank. This rank keeps its own. Of a
    consolidated state each rank takes its share.

    Raises:
        CheckpointError: it is of another format, compressor, model or number of ranks or hosts.
    """
    planner, participants = reducer.planner, reducer.participants
    process_set, place = participants.process_set, participants.place
    _check_exchange(reducer, saved)
    rank, size = process_set.rank(), process_set.size()
    sharded, hosts = saved["mode"] == "sharded", saved["hosts"]
    if sharded:
        schema.check_hosts(hosts, place and place.hosts, remedies.hosts)
        if saved["size"] != size:
            raise CheckpointError(schema.other_size(saved["size"], size, remedies.size))
    is_own = not sharded or saved["rank"] == rank
    # An owner is a rank among those that exchange: with hosts, another's state has none.
    saver = saved["rank"] if is_own or not hosts else -1
    origin = Origin(saved["steps"], saved["mode"], saver, hosts or saved["size"])
    states: list[State] = []
    not_loaded: set[str] = set()
    for bucket, entry in zip(reducer.buckets, saved["buckets"]):
        tensors = entry["state"]
        if is_own or not hosts or tensors:  # another rank of the host may not lead the bucket
            _require_all(bucket, tensors, same_shapes=sharded)
        states.append(_restored(bucket, tensors, origin, rank, participants.rank_and_size[1]))
        not_loaded |= {
            path
            for path, _ in leaves(bucket.state)
            if path not in tensors
            or reducer_state.source_of(bucket.compressor, path, origin, rank) is Source.HERE
        }
    if not_loaded and not is_own:
        LOGGER.warning(
            "rank %d was given what rank %d has saved: %s stay as they are here. %s",
            rank,
            saved["rank"],
            ", ".join(sorted(not_loaded)),
            remedies.rank,
        )
    for bucket, state in zip(reducer.buckets, states):
        bucket.state = state
    reducer.steps = saved["steps"]
    if is_own:
        shares = 1 if sharded else saved["size"]  # each rank goes on from the mean
        reducer.traffic.totals = (
            {name: count // shares for name, count in saved["counters"].items()},
            {name: count // shares for name, count in saved["gathered"].items()},
        )
    if not planner.ordered:
        planner.order = list(saved["order"])


def load_states(reducer: Reducer, states: Iterable[dict[str, Any]], remedies: Remedies) -> None:
    """Load the sharded states of all ranks that saved, on any number of ranks.

    Each of as many ranks loads its own, to the bit. Each of another number takes its share of their
    sum.

    Args:
        reducer: of this rank.
        states: one of each rank that saved, in any order.
        remedies: for messages.

    Raises:
        CheckpointError: as from `load`; or some are missing, or of another checkpoint.
    """
    total = Consolidation(reducer)
    for saved in states:
        if is_own(reducer, saved):
            load(reducer, saved, remedies)
            return
        total.add(saved)
    load(reducer, total.state(), remedies)


def is_own(reducer: Reducer, saved: Any) -> bool:
    """Return True if a sharded state was saved by this rank, among as many ranks and hosts."""
    process_set, place = reducer.participants.process_set, reducer.participants.place
    here = process_set.rank(), process_set.size(), place and place.hosts
    return isinstance(saved, dict) and here == tuple(map(saved.get, ("rank", "size", "hosts")))


class Consolidation:
    """Sum of the states that all ranks saved, each its own, for any number of ranks.

    Args:
        reducer: of this rank, with the model and the compressor of those that saved.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._first: dict[str, Any] = {}
        self._ranks: set[int] = set()
        self._counters: Counter[str] = Counter()
        self._gathered: Counter[str] = Counter()
        # Of each bucket, by path; what a single rank has learned also by that rank.
        self._sums: list[dict[str, torch.Tensor]] = []
        self._dtypes: list[dict[str, torch.dtype]] = []
        self._learned: list[dict[str, dict[int, torch.Tensor]]] = []

    def add(self, saved: dict[str, Any]) -> None:
        """Add the state of a rank, on the CPU and in double precision.

        Raises:
            CheckpointError: it is of another checkpoint than the others, or of a rank that was
                added already; or of another format, compressor or model.
        """
        _check_exchange(self._reducer, saved)
        if saved["mode"] != "sharded":
            raise CheckpointError("it is the sum of all ranks' states: load it by load_state_dict")
        if not self._first:
            self._first = saved
            for parts in (self._sums, self._dtypes, self._learned):
                parts.extend({} for _ in saved["buckets"])
        for name in ("steps", "size", "hosts"):
            one, other = self._first[name], saved[name]
            if one != other:
                raise CheckpointError(
                    f"the states are of several checkpoints: one has {name}={one}, another {other}"
                )
        rank = saved["rank"]
        if rank in self._ranks:
            raise CheckpointError(f"the state of rank {rank} is there twice")
        self._ranks.add(rank)
        self._counters.update(saved["counters"])
        self._gathered.update(saved["gathered"])
        for number, entry in enumerate(saved["buckets"]):
            for path, x in entry["state"].items():
                self._add_tensor(number, path, x.detach().cpu(), rank)

    def _add_tensor(self, number: int, path: str, x: torch.Tensor, rank: int) -> None:
        """Add a tensor of a bucket's state."""
        compressor, sums = self._reducer.buckets[number].compressor, self._sums[number]
        self._dtypes[number][path] = x.dtype
        if is_replicated(compressor, path):
            sums.setdefault(path, x)
        elif owner_of(compressor, path, self._first["steps"]) is not None:
            self._learned[number].setdefault(path, {})[rank] = x
        else:
            wide = x.double() if x.is_floating_point() else x
            sums[path] = sums[path] + wide if path in sums else wide

    def state(self) -> dict[str, Any]:
        """Return the consolidated state.

        Raises:
            CheckpointError: the state of some rank was not added.
        """
        first = self._first
        if not first:
            raise CheckpointError(NO_STATES)
        missing = sorted({*range(first["size"])} - self._ranks)
        if missing:
            raise CheckpointError(
                f"{first['size']} ranks have saved, and the states of ranks "
                f"{', '.join(map(str, missing))} are missing: load_states takes those of all"
            )
        buckets = []
        for number, entry in enumerate(first["buckets"]):
            compressor, dtypes = self._reducer.buckets[number].compressor, self._dtypes[number]
            tensors = {path: x.to(dtypes[path]) for path, x in self._sums[number].items()}
            for path, by_rank in self._learned[number].items():
                owner = owner_of(compressor, path, first["steps"])
                assert owner is not None
                tensors[path] = by_rank[sorted(by_rank)[owner]]  # one rank of each host has it
            buckets.append({**entry, "state": tensors})
        return {
            **first,
            "mode": "consolidated",
            "rank": 0,
            "buckets": buckets,
            "counters": dict(self._counters),
            "gathered": dict(self._gathered),
        }


def _check_exchange(reducer: Reducer, saved: Any) -> None:
    """Check that a saved state is of this model and compressor; take over its order of layers.

    Raises:
        CheckpointError: it is not.
    """
    planner = reducer.planner
    if isinstance(saved, dict) and saved.get("ordered") and saved["order"]:
        planner.reorder(saved["order"])
    schema.check_exchange(saved, planner.compressor, [b.layout for b in reducer.buckets])


def _require_all(bucket: Bucket, saved: Mapping[str, torch.Tensor], same_shapes: bool) -> None:
    """Check that every tensor of a bucket's state was saved.

    Raises:
        CheckpointError: one is missing, or another one.
    """
    for path, current in leaves(bucket.state):
        x = saved.get(path)
        if x is None or x.dtype != current.dtype or (same_shapes and x.shape != current.shape):
            raise CheckpointError(
                f"{path} of {bucket.name} is missing, or no {current.dtype} of shape "
                f"{tuple(current.shape)}: load what state_dict() gave, as it is"
            )


def _restored(
    bucket: Bucket, saved: Mapping[str, torch.Tensor], origin: Origin, rank: int, size: int
) -> State:
    compressor, start = bucket.compressor, {}
    if compressor.reset_on_merge:
        start = dict(leaves(compressor.start(bucket.ops, bucket.layout, size)))
    stored = {
        path: saved[path].to(x.device, copy=True)
        for path, x in leaves(bucket.state)
        if path in saved
    }
    return reducer_state.restore(
        compressor, bucket.ops, bucket.state, stored, start, origin, rank, size
    )


# -- the way back ----------------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """Whole state of a reducer on one rank, by reference; copy it to keep it for long."""

    steps: int
    totals: tuple[dict[str, int], dict[str, int]]
    plan: Plan
    states: list[State]

    @classmethod
    def of(cls, reducer: Reducer) -> Snapshot:
        """Return the state that a reducer has now."""
        states = [bucket.state for bucket in reducer.buckets]
        return cls(reducer.steps, reducer.traffic.totals, reducer.planner.plan, states)

    def copy(self) -> Snapshot:
        """Return a copy that later exchanges do not change."""
        return self._replace(
            states=[
                with_leaves(state, [x.detach().clone() for _, x in leaves(state)])
                for state in self.states
            ]
        )

    def restore(self, reducer: Reducer) -> None:
        """Restore the reducer; no exchange may be in flight."""
        reducer.steps, reducer.traffic.totals = self.steps, self.totals
        reducer.planner.plan = self.plan
        for bucket, state in zip(reducer.buckets, self.states):
            bucket.state = state


# -- ranks that come and go ------------------------------------------------------------------------


def squares(reducer: Reducer) -> float:
    """Return the sum of squares of this rank's residuals."""
    residuals = [residual_of(bucket.compressor, bucket.state) for bucket in reducer.buckets]
    return sum(float(x.double().square().sum()) for x in residuals if x is not None)


def reset_local(reducer: Reducer, counts: bool = True) -> None:
    """Reset this rank's own state, but not replicated fields, to that before the first step.

    Args:
        reducer: whose buckets have the state.
        counts: reset whole numbers too, such as those of elements that were sent.
    """
    ranks = reducer.participants.process_set.size()
    for bucket in reducer.buckets:
        start = leaves(bucket.compressor.start(bucket.ops, bucket.layout, ranks))
        values = [
            x
            if is_replicated(bucket.compressor, path) or not (counts or x.is_floating_point())
            else initial
            for (path, x), (_, initial) in zip(leaves(bucket.state), start)
        ]
        bucket.state = with_leaves(bucket.state, values)


def reset(reducer: Reducer) -> None:
    """Reset all state to that before the first step, for the ranks that there are now."""
    ranks = reducer.participants.process_set.size()
    reducer.steps = 0
    for bucket in reducer.buckets:
        bucket.state = bucket.compressor.start(bucket.ops, bucket.layout, ranks)


def resize(reducer: Reducer, prescale: float, postscale: float, logs: bool) -> None:
    """Adapt scales and compressor state to the number of ranks.

    Args:
        reducer: of this rank.
        prescale, postscale: from now on.
        logs: log which compressors learn anew.
    """
    reducer.prescale, reducer.postscale = prescale, postscale
    ranks, anew = reducer.participants.process_set.size(), set()
    for bucket in reducer.buckets:
        compressor = bucket.compressor
        resized = compressor.resized(bucket.ops, bucket.state, reducer.steps, ranks)
        if resized is not bucket.state:
            anew.add(compressor)
        bucket.state = resized
    for compressor in anew if logs else ():
        LOGGER.warning("%s learns anew: other ranks exchange now, %d of them", compressor, ranks)


def replicated(reducer: Reducer) -> dict[str, Any]:
    """Return what is equal on all ranks, for a rank that joins: see `load_replicated`."""
    return {
        "steps": reducer.steps,
        "buckets": [
            {path: x for path, x in leaves(b.state) if is_replicated(b.compressor, path)}
            for b in reducer.buckets
        ],
    }


def load_replicated(reducer: Reducer, saved: dict[str, Any]) -> None:
    """Load what `replicated` returned on another rank; this rank's own state stays."""
    reducer.steps = saved["steps"]
    for bucket, fields in zip(reducer.buckets, saved["buckets"]):
        values = [
            fields[path].to(x.device) if path in fields else x for path, x in leaves(bucket.state)
        ]
        bucket.state = with_leaves(bucket.state, values)


def inheritance(bucket: Bucket, step: int) -> dict[str, torch.Tensor]:
    """Return what another rank may add to its own when this one leaves: residuals and momenta."""
    compressor = bucket.compressor
    return {
        path: x
        for path, x in leaves(bucket.state)
        if not is_replicated(compressor, path)
        and path not in compressor.reset_on_merge
        and owner_of(compressor, path, step) is None
        and x.is_floating_point()
    }


def inherit(bucket: Bucket, sums: dict[str, torch.Tensor]) -> None:
    """Add the `inheritance` of a rank that leaves."""
    values = [x + sums[path] if path in sums else x for path, x in leaves(bucket.state)]
    bucket.state = with_leaves(bucket.state, values)
