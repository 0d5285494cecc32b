"""Hierarchical exchange: dense inside a host, compressed between hosts.

The ranks of a host add up their gradients. One of them, the *leader* of the bucket, exchanges the
host's compressed gradient with the leaders of the other hosts, and the result goes back to the
ranks of its host. So to the compressor a host is one worker with the samples of all its ranks: `H`
hosts behave like `H` ranks that each see a host's batch.

With `hvd.Average` a host's gradient is the mean over its ranks, so that a compressor's threshold or
norm means the same as on one rank. A sample that contributes `c` to its rank's gradient then
contributes `c / ranks` to the host's, and the host's second moment is the sum of the ranks' moments
over `ranks**2`. With `hvd.Sum` both are sums.

Buckets take turns: the leader of bucket `b` is the rank in slot `b % ranks` of its host, so the
ranks share the work of compressing. Only a leader has state.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hvd_gradcomp.core.collectives import Allreduce, Broadcast, Inside
from hvd_gradcomp.method import wire
from hvd_gradcomp.method.compressor import Compressor, Context, Program, State
from hvd_gradcomp.method.patterns import poison
from hvd_gradcomp.ops import NonFiniteGradientError, Ops, PayloadError, Tensor
from hvd_gradcomp.runtime.program_runner import Groups, HostPosition, unswitched

_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"
_NO_SETS = (
    "hierarchical=True needs process sets, and Horovod was initialised without: call "
    f"hvd.init(process_sets='dynamic'), or start all ranks with {_DYNAMIC}=1"
)
_TORCHRUN = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OR_MESH = "or say which ranks a host has, by a mesh of two dimensions: hosts, and ranks of a host"
_FAILED = 1.0  # instead of a verdict: the leader has raised an error
_LEADER_FAILED = "this host's leader could not exchange its gradient; look at what it has written"


def place_of(horovod: Any, process_set: Any, average: bool) -> HostPosition:
    """Return the position of this rank; no communication.

    Args:
        horovod: `mpi_ops` of the frontend.
        process_set: the ranks that take part.
        average: whether a host's gradient is the mean over its ranks, or the sum.

    Raises:
        ValueError: on all ranks, if hosts have different numbers of ranks, not all ranks take part,
            the run is elastic, or Horovod was initialised without process sets.
    """
    if process_set is not horovod.global_process_set:
        raise ValueError("hierarchical=True exchanges over all ranks: leave process_set= out")
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise ValueError(
            "hierarchical=True cannot work in an elastic run: its process sets do not outlive a "
            "reset. Leave hierarchical= out, or start without --min-np and --max-np"
        )
    if not horovod.is_homogeneous():
        raise ValueError(
            "hierarchical=True needs the same number of ranks on all hosts, and they differ: this "
            f"one has {horovod.local_size()} of {horovod.size()}. Change -np or -H of horovodrun"
        )
    hosts, slots = horovod.cross_size(), horovod.local_size()
    allowed = os.environ.get(_DYNAMIC, "") not in ("", "0") or len(_known(horovod)) > 1
    if slots > 1 and not allowed:
        raise ValueError(_NO_SETS)
    share = 1.0 / slots if average else 1.0
    return HostPosition(horovod.cross_rank(), hosts, horovod.local_rank(), slots, share)


def groups_of(horovod: Any, place: HostPosition, gather: Callable[[Any, Any], list[Any]]) -> Groups:
    """Return the process sets of this rank, and create missing ones; all ranks call it.

    Args:
        horovod: `mpi_ops` of the frontend.
        place: of this rank.
        gather: gathers an item of a type from every rank, on all ranks; see `typed_json`.

    Raises:
        ValueError: on all ranks, if ranks are not numbered host by host, or sets cannot be created.
    """
    name = os.environ.get("HOROVOD_HOSTNAME") or platform.node()
    everybody = gather((place.host, place.slot, name), tuple[int, int, str])
    ranks = {(host, slot): rank for rank, (host, slot, _) in enumerate(everybody)}
    names = {(host, name) for host, _, name in everybody}
    inside = [[ranks.get((h, s), -1) for s in range(place.slots)] for h in range(place.hosts)]
    across = [list(row) for row in zip(*inside)]
    if len(names) > place.hosts or any(row != sorted(row) for row in (*inside, *across)):
        raise ValueError(
            "hierarchical=True needs ranks that are counted in the same order on all hosts; start "
            "them with horovodrun, or with mpirun --map-by slot. (host, place, name) by rank: "
            f"{everybody}"
        )
    if place.slots == 1:
        return Groups(None, horovod.global_process_set)
    sets = {tuple(row): _process_set(horovod, row) for row in (*inside, *across)}
    return Groups(sets[tuple(inside[place.host])], sets[tuple(across[place.slot])])


class LaunchedRank(NamedTuple):
    """Location of a rank, as its launcher says; -1 for a number that it does not say.

    Attributes:
        group: number of the launcher that has started it, one on each host.
        local_rank, local_size: among the ranks of that launcher.
        node: name of the machine.
    """

    group: int
    local_rank: int
    local_size: int
    node: str

    @classmethod
    def here(cls) -> LaunchedRank:
        """Return the location of this rank by the variables that torchrun sets."""
        numbers = [os.environ.get(name, "") for name in _TORCHRUN]
        group, rank, size = (int(x) if x.isdecimal() else -1 for x in numbers)
        return cls(group, rank, size, platform.node())


def hosts_of(ranks: Sequence[int], locations: Sequence[LaunchedRank]) -> list[list[int]]:
    """Return the ranks of each host, as torchrun has started them.

    Args:
        ranks: those that take part, in ascending order.
        locations: of these ranks, gathered; so an error is the same on all of them.

    Raises:
        ValueError: they were not started by torchrun; ranks of a host are not neighbours, or are
            counted in another order there; hosts have different numbers of ranks.
    """
    listed = "By rank (GROUP_RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, host): " + ", ".join(
        f"{rank}: ({x.group}, {x.local_rank}, {x.local_size}, {x.node})"
        for rank, x in zip(ranks, locations)
    )
    if any(-1 in location for location in locations):
        raise ValueError(
            f"hierarchical=True finds hosts by {', '.join(_TORCHRUN)}, which torchrun sets: start "
            f"all ranks with torchrun, {_OR_MESH}. {listed}"
        )
    hosts: dict[int, list[int]] = {}
    nodes: dict[int, set[str]] = {}
    order = [(location.group, location.local_rank) for location in locations]
    for rank, location in zip(ranks, locations):
        hosts.setdefault(location.group, []).append(rank)
        nodes.setdefault(location.group, set()).add(location.node)
    wrong = order != sorted(set(order)) or any(len(names) > 1 for names in nodes.values())
    wrong = wrong or any(x.local_rank >= x.local_size for x in locations)
    if wrong:
        raise ValueError(
            "hierarchical=True needs ranks that are counted host by host, in the order of their "
            f"local ranks: start them with torchrun, {_OR_MESH}. {listed}"
        )
    sizes = {(len(hosts[x.group]), x.local_size) for x in locations}
    if len(sizes) > 1:
        raise ValueError(
            "hierarchical=True needs the same number of ranks on all hosts: start as many on each, "
            f"by --nproc-per-node of torchrun. {listed}"
        )
    return list(hosts.values())


def place_among(hosts: Sequence[Sequence[int]], ranks: Sequence[int], rank: int) -> HostPosition:
    """Return the position of a rank, where a host's gradient is the mean over its ranks.

    Args:
        hosts: the ranks of each host, equally many.
        ranks: all that take part.
        rank: the one whose position is returned.

    Raises:
        ValueError: the hosts have other ranks, or are not in the order of ranks.
    """
    everybody = sorted(rank for host in hosts for rank in host)
    if everybody != sorted(ranks):
        raise ValueError(
            f"hierarchical= has ranks {everybody}, and the gradients are those of ranks "
            f"{sorted(ranks)}: take the same ranks for both"
        )
    if any(list(row) != sorted(row) for row in (*hosts, *zip(*hosts))):
        raise ValueError(
            "hierarchical= needs ranks in ascending order, in each host and over the hosts at each "
            f"place in them, got {[list(host) for host in hosts]}"
        )
    slots = len(hosts[0])
    for number, host in enumerate(hosts):
        if rank in host:
            return HostPosition(number, len(hosts), host.index(rank), slots, 1.0 / slots)
    raise ValueError(f"rank {rank} is on none of the hosts {[list(host) for host in hosts]}")


def _known(horovod: Any) -> dict[tuple[int, ...], int]:
    """Return the ids of Horovod's process sets, by their ranks."""
    known = horovod._basics._get_process_set_ids_and_ranks()
    return {tuple(ranks): number for number, ranks in known.items()}


def _process_set(horovod: Any, ranks: Sequence[int]) -> Any:
    """Return the process set of these ranks; Horovod has each only once."""
    if len(ranks) == horovod.size():
        return horovod.global_process_set
    process_set, known = horovod.ProcessSet(ranks), _known(horovod)
    if tuple(ranks) in known:
        process_set.process_set_id = known[tuple(ranks)]
        return process_set
    try:
        return horovod.add_process_set(process_set)
    except ValueError as error:
        raise ValueError(f"{_NO_SETS}. Horovod says: {error}") from error


def aggregate(
    compressor: Compressor,
    ops: Ops,
    context: Context,
    gradient: Tensor,
    state: State,
    *,
    place: HostPosition,
    leader: int,
    shares_errors: bool = True,
    **extra: Tensor,
) -> Program:
    """Run one bucket and step on a rank of a host; see `Compressor.aggregate`.

    An error of the leader reaches the other ranks of its host with the result: they raise too, and
    none deadlocks.

    Args:
        compressor: runs between leaders.
        ops: the tensor ops.
        context: with hosts in place of ranks.
        gradient: of this rank.
        state: of this rank; ignored unless this rank leads.
        place: of this rank.
        leader: the slot of the bucket's leaders.
        shares_errors: False to raise an error of the leader at once, unless all leaders have it:
            for transports on which a rank that fails closes its connections.
        extra: for the compressor, of this rank.
    """
    if place.slots == 1:
        return (yield from compressor.aggregate(ops, context, gradient, state, **extra))
    layout = context.layout
    failure: Exception | None = None
    # The moments travel with the gradients: on a rank that does not lead, TensorFlow would prune
    # a separate allreduce of moments from the graph as unused.
    whole = gradient
    if "moment" in extra:
        whole = ops.concat((gradient, ops.times(extra["moment"], place.share)))
    whole = yield Inside(Allreduce(whole, 1.0, place.share, donated=True), "gradient")
    total = whole[: layout.size]
    if "moment" in extra:
        extra["moment"] = whole[layout.size :]
    verdict = ops.full((1,), _FAILED, layout.dtype)
    if place.slot == leader:
        try:
            program = compressor.aggregate(ops, context, total, state, **extra)
            total, state = yield from unswitched(program)
            verdict = ops.cast(poison(ops, ops.found_finite()), layout.dtype)
        except Exception as error:
            if not shares_errors and not isinstance(error, NonFiniteGradientError):
                raise
            failure = error
            if isinstance(error, NonFiniteGradientError):
                verdict = verdict * float("nan")
    # A rank that does not lead sends nothing, but must not broadcast a constant in a graph:
    # TensorFlow would move the constant out of its branch.
    result = yield Inside(Broadcast(ops.concat((total, verdict)), leader), "result")
    if isinstance(failure, (NonFiniteGradientError, PayloadError)):
        raise type(failure)(f"between hosts, each counted as one rank: {failure}") from failure
    if failure is not None:
        raise failure
    if place.slot != leader:
        verdict = result[-1:]
        ops.require({_LEADER_FAILED: ~(verdict == _FAILED)})
        ops.require({wire.ANY_NOT_FINITE: verdict == 0}, NonFiniteGradientError)
        ops.found_finite()
    return result[:-1], state


def is_result(request: Any) -> bool:
    """Return True if the request is the leader's broadcast to its host at the end of a program.

    A rank that blocks on one while its own programs could go on may deadlock: the leader of that
    bucket waits as well, for a bucket that this rank leads.
    """
    return isinstance(request, Inside) and isinstance(request.request, Broadcast)
