"""Units of a model that `fully_shard` was called on, and this rank's shards of their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp.core.layers import Layer

FSDPModule: Any = getattr(torch.distributed.fsdp, "FSDPModule", None)
if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
    raise ImportError(
        "hvd_gradcomp.torch.fsdp needs FSDP2 with all-reduce hooks and factors that gradients are "
        f"divided by, of PyTorch 2.8 or newer; this is {torch.__version__}"
    )
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as _fsdp  # noqa: E402


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of a parameter.

    Attributes:
        name: of the parameter in the model.
        record: FSDP's own of the parameter.
        local: the part itself, as a parameter without a mesh.
        padded: elements that it takes in the gradient of its unit.
    """

    name: str
    record: Any
    local: torch.nn.Parameter
    padded: int

    @property
    def whole_layer(self) -> Layer:
        """Return the layer of the whole parameter, which is equal on all ranks."""
        parameter = self.record.sharded_param
        dtype = str(parameter.dtype).removeprefix("torch.")
        return self.name, tuple(parameter.shape), dtype

    @property
    def trained(self) -> bool:
        """Return True if the parameter is not frozen now."""
        return bool(self.record.sharded_param.requires_grad)

    @property
    def dropped(self) -> bool:
        """Return True if the gradient of earlier passes, if any, was dropped by `zero_grad`."""
        return self.record.sharded_param.grad is None

    def add(self, reduced: torch.Tensor) -> None:
        """Add a reduced gradient to what FSDP has made of zeros."""
        parameter = self.record.sharded_param
        if parameter.grad is not None:
            grad = parameter.grad.to_local()
            grad.add_(reduced.to(grad.device, grad.dtype))
        elif reduced.any():  # nobody has used it in this step, and others have sent what they kept
            reduced = reduced.to(self.local.dtype, copy=True)
            parameter.grad = self.record.to_sharded_dtensor(reduced)


@dataclass(eq=False)
class Unit:
    """Parameters that FSDP gathers and reduces together.

    Attributes:
        group: FSDP's record of them.
        shards: in FSDP's order; also those that are empty on this rank.
        earlier: the flat sum of passes that were not exchanged yet; None if there are none.
    """

    group: Any
    shards: list[Shard]
    earlier: torch.Tensor | None = None

    @property
    def exchanges(self) -> bool:
        """Return False under `model.set_requires_all_reduce(False)`."""
        return bool(self.group.all_reduce_grads)

    def weight(self, reduced: torch.Tensor, replicas: int) -> float:
        """Return by how much a gradient counts in the mean over the replicas.

        With it that mean is what FSDP gives for hybrid sharding. There a factor of the user's
        (`set_gradient_divide_factor`) is the only division, and replicas are summed up. And where
        FSDP divides after its collectives, it divides the zeros that the hook has left.

        Args:
            reduced: what FSDP has handed to the hook.
            replicas: how many there are.
        """
        group = self.group
        factor = group.gradient_divide_factor
        _, later, *_ = _fsdp._get_gradient_divide_factors(
            group._reduce_scatter_process_group,
            None,
            reduced.dtype,
            group.device.type,
            factor,
            group.force_sum_reduction_for_comms,
        )
        return (1.0 if factor is None else float(replicas)) / (later or 1.0)

    def take_earlier(self) -> torch.Tensor | None:
        """Return the sum of earlier passes, without what was dropped, and forget it."""
        earlier, self.earlier = self.earlier, None
        if earlier is not None:
            for shard, gradient in self.cut(earlier):
                if shard.dropped:
                    gradient.zero_()
        return earlier

    def cut(self, flat: torch.Tensor) -> Iterator[tuple[Shard, torch.Tensor]]:
        """Yield the parts of a flat gradient.

        Raises:
            ValueError: it is of other parameters.
        """
        trained = [s for s in self.shards if s.trained]
        if sum(s.padded for s in trained) != flat.numel():
            names = ", ".join(s.name for s in self.shards)
            raise ValueError(
                f"the gradient of the unit with {names} has {flat.numel():,} elements, and its "
                f"parameters have {sum(s.padded for s in trained):,} on this rank: some had no "
                "gradient in this step, or were thawed since fsdp.compress. Call "
                "model.set_reduce_scatter_unused_params(True); thaw layers before fsdp.compress"
            )
        start = 0
        for shard in trained:
            size = shard.local.numel()
            yield shard, flat[start : start + size].view(shard.local.shape)
            start += shard.padded


def units_of(model: Any, mesh: Any) -> dict[Any, Unit]:
    """Return the parameters of each module that `fully_shard` was called on; frozen ones left out.

    Raises:
        TypeError: the model is not sharded.
        ValueError: it is sharded in a way that cannot be compressed.
    """
    if not isinstance(model, FSDPModule):
        raise TypeError(
            f"what fully_shard(model, ...) returned is compressed, got {type(model).__name__}"
            f"{_instead(model)}"
        )
    names = {p: name for name, p in model.named_parameters()}
    inside = dist.get_process_group_ranks(mesh.get_group(1))
    units: dict[Any, Unit] = {}
    for title, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = groups_of(module)
        where = f"the unit {title or 'at the root'}"
        if len(groups) > 1:
            raise ValueError(
                f"{where} has parameters on several meshes, and FSDP has no all-reduce hook for "
                "these: call fully_shard on each of them with its own mesh"
            )
        for group in groups:
            _check(group, where, inside)
            shards = [_shard(record, names) for record in group.fsdp_params]
            units[module] = Unit(group, [s for s in shards if s.local.requires_grad])
    return units


def _instead(model: Any) -> str:
    """Return what to do with a model that `fully_shard` was not called on, for messages."""
    modules = dict(model.named_modules()) if isinstance(model, torch.nn.Module) else {}
    if isinstance(model, DistributedDataParallel):
        return ": for it call ddp.compress"
    if any(isinstance(module, FullyShardedDataParallel) for module in modules.values()):
        return ", of FSDP1, which has no hook for it: take fully_shard"
    sharded = [name for name, module in modules.items() if isinstance(module, FSDPModule)]
    if "_orig_mod" in sharded:
        return ": call fsdp.compress before torch.compile"
    if sharded:
        return (
            f", whose parts were sharded ({', '.join(sharded[:3])}): call fully_shard on the model "
            "too, or fsdp.compress on the part that has all the others"
        )
    return ": call fully_shard on it, and on its blocks, before fsdp.compress"


def left_out(model: Any, units: Iterable[Unit]) -> list[str]:
    """Return the trained units of FSDP's root that are not in the model; once forward has run."""
    inside = {id(unit.group) for unit in units}
    return [
        group._module_fqn or "that at the root"
        for state in model._get_fsdp_state()._state_ctx.all_states
        for group in _groups(state)
        if id(group) not in inside and any(p.sharded_param.requires_grad for p in group.fsdp_params)
    ]


def groups_of(module: Any) -> list[Any]:
    """Return FSDP's records of a module's own unit: one, or none without parameters."""
    return _groups(module._get_fsdp_state())


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one at most, before PyTorch's pull request 173509
        groups = [g for g in (state._fsdp_param_group,) if g is not None]
    return list(groups)


def _check(group: Any, where: str, inside: list[int]) -> None:
    """Check that a unit's gradient can be exchanged by a hook.

    Raises:
        ValueError: it cannot.
    """
    info = group.mesh_info
    if getattr(info, "replicate_mesh_size", 1) > 1:
        raise ValueError(
            f"{where} is sharded over a mesh of two dimensions, so FSDP exchanges its gradients "
            "between replicas itself, dense: call fully_shard with the second dimension alone, "
            'mesh=mesh["inside"]'
        )
    sharded_over = dist.get_process_group_ranks(info.shard_process_group)
    if set(inside) < set(sharded_over):
        raise ValueError(
            f"{where} is sharded over {len(sharded_over)} ranks, {sharded_over}, which are several "
            f"replicas of mesh=: its second dimension has {inside} here. Without a mesh, "
            'fully_shard takes all ranks: call it with the second dimension, mesh=mesh["inside"]'
        )
    if sorted(sharded_over) != sorted(inside):
        raise ValueError(
            f"{where} is sharded over ranks {sharded_over}, and the second dimension of mesh= has "
            f"{inside} here: pass the mesh whose second dimension fully_shard was given"
        )
    if any(record.sharded_param.is_meta for record in group.fsdp_params):
        raise ValueError(
            f"{where} has parameters without data, on the meta device: call model.to_empty(...), "
            "and set or load them, before fsdp.compress"
        )
    if group.device.type != "cpu" and any(record.offload_to_cpu for record in group.fsdp_params):
        raise ValueError(
            f"{where} is offloaded from {group.device} to the CPU, and the collectives of "
            "compressors are for one device: leave CPUOffloadPolicy out"
        )


def _shard(record: Any, names: dict[Any, str]) -> Shard:
    parameter = record.sharded_param
    local = torch.nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
    return Shard(names[parameter], record, local, record.padded_sharded_param_size.numel())
