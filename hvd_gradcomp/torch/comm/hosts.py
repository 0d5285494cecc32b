"""Hosts of ranks that `torch.distributed` connects: by torchrun's variables, a mesh, or groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hvd_gradcomp.runtime import hierarchy
from hvd_gradcomp.runtime.hierarchy import LaunchedRank
from hvd_gradcomp.runtime.program_runner import Groups, Participants
from hvd_gradcomp.torch.comm.c10d import ProcessGroup


def setting_of(hierarchical: Any) -> str:
    """Return the setting as text, which is equal on all ranks if they mean the same hosts."""
    if hasattr(hierarchical, "get_group"):
        return str(hierarchical.mesh.tolist())
    return repr(hierarchical)


def participants_among(group: ProcessGroup, hierarchical: Any) -> Participants:
    """Return the ranks of a group, with this rank's place among hosts; all of them call it.

    Where ranks say different things they are without hosts, until they compare their settings.

    Args:
        group: the ranks.
        hierarchical: False for no hosts; True for those of torchrun; or a `DeviceMesh` of two
            dimensions, hosts and ranks of a host.

    Raises:
        TypeError: it is something else.
        ValueError: on all ranks, if hosts are not as they have to be.
    """
    setting = setting_of(hierarchical)
    gathered = group.gather_objects((setting, LaunchedRank.here()), tuple[str, LaunchedRank])
    mesh = _mesh_of(hierarchical)
    if hierarchical is False or {text for text, _ in gathered} != {setting}:
        return Participants(group)
    if group.size() != dist.get_world_size():
        raise ValueError(
            "hierarchical= exchanges over all ranks: leave process_group= out, for the model too"
        )
    hosts = mesh
    if hosts is None:
        hosts = hierarchy.hosts_of(group.ranks, [where for _, where in gathered])
    return _in_hosts(group, hosts)


def participants_by_reduction(group: ProcessGroup, reduced: Sequence[int]) -> Participants:
    """Return the ranks of a group; those that reduce a model in each step are a host.

    All ranks call it. Without hosts, where each of them reduces over all of the group or over
    itself alone, and where one of them has no model, which the caller refuses.

    Args:
        group: the ranks.
        reduced: the ranks over which this rank's model is reduced; none if it has no model.

    Raises:
        ValueError: on all ranks, if they are not in hosts of equally many.
    """
    parts = group.gather_objects(list(reduced), list[int])
    hosts = sorted({tuple(part) for part in parts})
    if () in hosts or hosts == [tuple(group.ranks)] or all(len(host) == 1 for host in hosts):
        return Participants(group)
    everybody = sorted(rank for host in hosts for rank in host)
    is_even = len({len(host) for host in hosts}) == 1 and everybody == sorted(group.ranks)
    ordered = is_even and all(list(row) == sorted(row) for row in (*hosts, *zip(*hosts)))
    if not ordered:
        raise ValueError(
            f"DistributedDataParallel reduces over {', '.join(str(list(host)) for host in hosts)} "
            f"of ranks {sorted(group.ranks)}: give it one process group for each host, of equally "
            "many ranks and in the order of the others, or one of all ranks"
        )
    if group.size() != dist.get_world_size():
        raise ValueError(
            "DistributedDataParallel reduces over ranks of a host, and what is between hosts takes "
            "all ranks: leave process_group= out"
        )
    return _in_hosts(group, hosts)


def _in_hosts(group: ProcessGroup, hosts: Sequence[Sequence[int]]) -> Participants:
    """Return the ranks of a group with this rank's place among hosts; all of the job call it."""
    place = hierarchy.place_among(hosts, group.ranks, dist.get_rank())
    groups = Groups(None, group)  # one rank a host
    if place.slots > 1:
        inside, across = [list(host) for host in hosts], [list(row) for row in zip(*hosts)]
        groups = Groups(group.split(inside), group.split(across))
    return Participants(group, place, lambda _: groups)


def _mesh_of(hierarchical: Any) -> list[list[int]] | None:
    """Return the ranks of each host by a mesh; None without one.

    Raises:
        TypeError: it is neither a mesh nor a bool.
        ValueError: it has other dimensions.
    """
    if isinstance(hierarchical, bool):
        return None
    if not hasattr(hierarchical, "get_group"):
        raise TypeError(
            "hierarchical= takes True, False, or a DeviceMesh of two dimensions, hosts and ranks "
            f"of a host, got {type(hierarchical).__name__}"
        )
    if hierarchical.mesh.dim() != 2:
        raise ValueError(
            "hierarchical= takes a DeviceMesh of two dimensions, hosts and ranks of a host, got "
            f'{hierarchical.mesh.dim()}: init_device_mesh("cuda", (hosts, ranks_of_a_host))'
        )
    ranks: list[list[int]] = hierarchical.mesh.tolist()
    return ranks
