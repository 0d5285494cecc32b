"""Process groups over a `DeviceMesh` whose last dimension has the shards of a model."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hvd_gradcomp.runtime import config_check, hierarchy
from hvd_gradcomp.runtime.program_runner import Groups, Participants
from hvd_gradcomp.torch.comm.c10d import ProcessGroup


class MeshGroups:
    """Process groups of our own over a mesh; all of its ranks make them.

    Args:
        mesh: a `DeviceMesh` of two dimensions, hosts and ranks of a host, or of three: sites, hosts
            of a site, and ranks of a host.
        offloads: what travels is on CPUs, whatever the device of the mesh.

    Raises:
        MismatchError: on all ranks, if they have passed different meshes.

    Attributes:
        everybody: all ranks of the mesh.
        across: those at this rank's place in other hosts; with three dimensions in other sites.
        participants: the ranks with the same shard. With three dimensions those of a site are one
            to a compressor, and each of its hosts sends the buckets that it leads.
        participants_of_all: all ranks of the mesh, each by itself.
        replicas: the ranks that have the same shard, in sets.
        shards: ranks of this rank's host, in the order of their shards.
        site: all ranks between which nothing is exchanged here, as a nested list.
        shard: place of this rank's shard among them.
    """

    def __init__(self, mesh: Any, offloads: bool = False) -> None:
        ranks, self._like = mesh.mesh, mesh.get_group(0)
        self._backend = "gloo" if offloads and dist.get_backend(self._like) == "nccl" else None
        everybody = sorted(ranks.flatten().tolist())
        self.everybody = ProcessGroup(self._like, everybody, self._backend)
        self._groups = [self.everybody]
        description = {"mesh": str(ranks.tolist())}
        config_check.compare(description, self.everybody.gather_objects, self.everybody.ranks, None)
        *_, self.shard = place = mesh.get_coordinate()
        self.site: list[Any] = ranks[place[0]].tolist()
        self.shards: list[int] = ranks[tuple(place[:-1])].tolist()
        sites, shards = ranks.shape[0], ranks.shape[-1]
        of_hosts = ranks.reshape(sites, -1, shards)  # [sites, hosts, shards]
        self.replicas: list[list[int]] = ranks.reshape(-1, shards).t().tolist()
        self.across = self._part(ranks.reshape(sites, -1).t().tolist())
        self.participants = Participants(self.across)
        self.participants_of_all = Participants(self.everybody)
        if of_hosts.shape[1] > 1:
            every = self._part(self.replicas)
            inside = self._part(of_hosts.transpose(1, 2).reshape(-1, of_hosts.shape[1]).tolist())
            hosts = of_hosts[:, :, self.shard].tolist()
            groups = Groups(inside, self.across)
            where = hierarchy.place_among(hosts, every.ranks, dist.get_rank())
            self.participants = Participants(every, where, lambda _: groups)

    def _part(self, parts: list[list[int]]) -> ProcessGroup:
        """Make a group of each part, of ranks in order; return the one of this rank."""
        parts = [sorted(part) for part in parts]
        if self.everybody.size() == dist.get_world_size():
            return self.everybody.split(parts)  # closes with it
        (ranks,) = (part for part in parts if dist.get_rank() in part)
        self._groups.append(ProcessGroup(self._like, ranks, self._backend))
        return self._groups[-1]  # ranks outside of the mesh do not come here

    def hang_up(self) -> None:
        """Close all connections: ranks that wait for this one fail."""
        for group in self._groups:
            group.hang_up()
