"""`fsdp.local_steps` and `fsdp.MomentumExchange`: hosts that shard a model by `fully_shard`.

With local steps nothing travels between hosts until a round. Then each rank exchanges the change of
its shards with the ranks that have the same ones. What concerns the model as a whole is decided by
all ranks: a shard that is not finite, a rank in another step, settings that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed.fsdp

from hvd_gradcomp.algorithms.combined.local_steps import AVERAGING, EIGHTH, LocalSchedule
from hvd_gradcomp.algorithms.combined.round_length import Every
from hvd_gradcomp.runtime.step_header import Kind, StepHeader, compare, values
from hvd_gradcomp.torch.comm.c10d import C10dBackend
from hvd_gradcomp.torch.comm.mesh import MeshGroups
from hvd_gradcomp.torch.interop.shards import is_sharded
from hvd_gradcomp.torch.local.local_steps import LocalStepsOptimizer
from hvd_gradcomp.torch.local.momentum_exchange import MomentumExchangeOptimizer
from hvd_gradcomp.torch.local.outer import Outer
from hvd_gradcomp.torch.local.sharding import Sharding
from hvd_gradcomp.torch.local.tensor_exchange import Connection
from hvd_gradcomp.torch.local.wrapped_c10d import make_on_all, save_own
from hvd_gradcomp.torch.local.wrapped_optimizer import refuse_exchanging
from hvd_gradcomp.torch.reduce import reducer_state
from hvd_gradcomp.torch.reduce.backend import MakeBackend
from hvd_gradcomp.torch.reduce.bucket import Named
from hvd_gradcomp.torch.reduce.claims import is_exchanged_between
from hvd_gradcomp.torch.reduce.reducer_state import OF_HOOKS

_FSDPModule: Any = getattr(torch.distributed.fsdp, "FSDPModule", ())


def local_steps(
    model: Any,
    optimizer: torch.optim.Optimizer,
    *,
    mesh: Any,
    every: Every = 5,
    outer: Outer = AVERAGING,
    compression: Any = EIGHTH,
    warmup_steps: int = 0,
    fragments: int = 1,
    delay: int = 0,
    blend: float | None = None,
    named_buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
    bucket_bytes: int | None = None,
    nonfinite: str | None = None,
    backend: MakeBackend = C10dBackend,
) -> LocalStepsOptimizer:
    """Wrap an optimizer so that each host steps alone, and hosts exchange every so many steps.

        names = "hosts", "inside"
        mesh = init_device_mesh("cuda", (hosts, ranks_of_a_host), mesh_dim_names=names)
        fully_shard(model, mesh=mesh["inside"])
        adam = torch.optim.AdamW(model.parameters())
        optimizer = fsdp.local_steps(model, adam, mesh=mesh)

    As `ddp.LocalSteps`, for what `fully_shard` has sharded inside of each host. All ranks of the
    mesh call it, with parameters that have data and are equal on all hosts. A rank exchanges its
    shards, and keeps its shards of the global parameters. To a compressor a shard is a layer.

    With a mesh of three dimensions there are three levels: sites, hosts of a site, ranks of a host.
    Then sites step alone. Between the hosts of a site gradients are exchanged in every step, dense
    by `fully_shard(model, mesh=mesh["hosts", "inside"])`, or compressed by `fully_shard(model,
    mesh=mesh["inside"])` and `fsdp.compress(model, ..., mesh=mesh["hosts", "inside"])`. Each host
    of a site sends a part of its buckets to other sites.

    Default: `every=5` and `compression=ChunkedTopKCompressor(k=512, values="int4", decay=1)`, with
    the mean of changes as the outer step. It sends one element in 8, in 4 bits, and reached a loss
    soonest in docs/worth.md. With an outer momentum, or a delay, give `compression=None`, which
    sends all elements, or `Int8Compressor()`.

    Args:
        model: what `fully_shard` returned.
        optimizer: over the model's parameters, the inner one.
        mesh: a `DeviceMesh` of two dimensions, hosts and ranks of a host, or of three.
        every, outer, compression, warmup_steps, delay, blend: as in `ddp.LocalSteps`. The outer
            optimizer sees this rank's shards: it has to treat each element by itself.
        fragments: parts of the model that are exchanged in turn, each of whole units: modules
            that `fully_shard` was called on.
        named_buffers: usually `model.named_buffers()`: averaged over all ranks of the mesh.
        bucket_bytes, nonfinite, backend: as in `ddp.LocalSteps`.

    Returns:
        A `torch.optim.Optimizer`. Each rank saves its own `state_dict()`.

    Raises:
        TypeError: `fully_shard` was not called on the model; `mesh` is none; as `ddp.LocalSteps`.
        ValueError: a parameter is not sharded, or over other ranks than the mesh has in its last
            dimension; `torch.distributed` is not initialized; as `ddp.LocalSteps`.
        MismatchError: on all ranks, if they have passed different things.
        OutOfStepError, DivergedError, NonFiniteGradientError: in `step`, on all ranks; see
            `LocalStepsOptimizer.step`.
    """
    _require_mesh(mesh, "fsdp.local_steps")
    groups = MeshGroups(mesh, _offloads(optimizer))

    def make() -> LocalStepsOptimizer:
        refuse_exchanging(optimizer)
        schedule = LocalSchedule(every, warmup_steps, fragments, delay, blend)
        named, sharding = _sharded(model, optimizer, groups, "fsdp.local_steps")
        _check_fragments(fragments, {sharding.units[name] for name, _ in named})
        return LocalStepsOptimizer(
            optimizer,
            named,
            _connections(groups, backend),
            schedule,
            outer,
            compression,
            named_buffers=named_buffers,
            bucket_bytes=bucket_bytes,
            nonfinite=nonfinite,
            sharding=sharding,
        )

    return make_on_all(groups.everybody, make)


def MomentumExchange(  # noqa: N802 - as over Horovod
    model: Any,
    optimizer: torch.optim.Optimizer,
    compression: Any = None,
    warmup_steps: int = 100,
    *,
    mesh: Any,
    bucket_bytes: int | None = None,
    nonfinite: str | None = None,
    backend: MakeBackend = C10dBackend,
) -> MomentumExchangeOptimizer:
    """Wrap Adam or AdamW so that hosts exchange its momentum compressed, instead of gradients.

    As `ddp.MomentumExchange`, for what `fully_shard` has sharded inside of each host: gradients are
    reduced there, and the momentum of a shard goes to the ranks that have the same one.

    Default: `warmup_steps=100`, which was not measured: docs/papers.md has trainings with 240 dense
    steps of 1,200, a fifth.

    Args:
        model: what `fully_shard` returned.
        optimizer: `torch.optim.Adam` or `AdamW` over the model's parameters.
        compression, warmup_steps: as in `ddp.MomentumExchange`.
        mesh: as in `fsdp.local_steps`.
        bucket_bytes, nonfinite, backend: as in `ddp.MomentumExchange`.

    Returns:
        A `torch.optim.Optimizer`; each rank saves its own `state_dict()`.

    Raises:
        TypeError, ValueError, MismatchError: as `fsdp.local_steps`, and as `ddp.MomentumExchange`.
        OutOfStepError, DivergedError, NonFiniteGradientError: in `step`, on all ranks.
    """
    function = "fsdp.MomentumExchange"
    _require_mesh(mesh, function)
    groups = MeshGroups(mesh, _offloads(optimizer))

    def make() -> MomentumExchangeOptimizer:
        refuse_exchanging(optimizer)
        named, sharding = _sharded(model, optimizer, groups, function)
        return MomentumExchangeOptimizer(
            optimizer,
            named,
            _connections(groups, backend),
            compression,
            warmup_steps,
            bucket_bytes=bucket_bytes,
            nonfinite=nonfinite,
            sharding=sharding,
        )

    return make_on_all(groups.everybody, make)


def _require_mesh(mesh: Any, function: str) -> None:
    """Check that a mesh has replicas and shards.

    Raises:
        TypeError: it is no mesh.
        ValueError: it has other dimensions, or this rank is not in it.
    """
    if not hasattr(mesh, "get_group"):
        raise TypeError(f"mesh= takes a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim not in (2, 3):
        raise ValueError(
            "mesh= takes a DeviceMesh of two dimensions, hosts and ranks of a host, or of three, "
            f"sites, hosts and ranks of a host, got {mesh.ndim}: "
            'init_device_mesh("cuda", (hosts, ranks_of_a_host))'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"this rank is not in mesh=: call {function} on its ranks alone")


def _offloads(optimizer: Any) -> bool:
    """Return True if an optimizer's parameters are on CPUs, as by `CPUOffloadPolicy`."""
    groups = getattr(optimizer, "param_groups", ())
    return any(p.device.type == "cpu" for group in groups for p in group["params"])


def _connections(groups: MeshGroups, backend: MakeBackend) -> Callable[[str], Connection]:
    """Return what connects the ranks of a mesh: those with the same shard, or all of them."""
    load = partial(reducer_state.load, remedies=OF_HOOKS)
    ends = backend(groups.everybody, "ends")

    def nonfinite_ranks(here: bool) -> list[int]:
        header = StepHeader(Kind.EXCHANGE, fault=int(here))
        headers = ends.gather_headers(header, "the end of an exchange")
        if error := compare(headers):
            raise error
        return [*values(headers, "fault")]

    def connect(part: str) -> Connection:
        if part in ("sync", "buffers"):  # buffers are another one's on each rank of a host
            participants, agree = groups.participants_of_all, None
        else:
            participants, agree = groups.participants, nonfinite_ranks
        transport = backend(participants.process_set, part)
        return Connection(
            transport,
            participants,
            save_own,
            load,
            groups.hang_up,
            replicas=groups.replicas,
            nonfinite_ranks=agree,
        )

    return connect


# -- the model ---------------------------------------------------------------------------------


def _sharded(
    model: Any, optimizer: torch.optim.Optimizer, groups: MeshGroups, function: str
) -> tuple[Named, Sharding]:
    """Return (name, parameter) of all that an optimizer trains, unit by unit, and its sharding.

    Raises:
        TypeError: the model is not sharded.
        ValueError: a parameter is sharded in another way than over the mesh.
    """
    if not isinstance(model, _FSDPModule):
        compiled = hasattr(model, "_orig_mod")
        raise TypeError(
            f"{function} takes what fully_shard(model, ...) returned, got {type(model).__name__}: "
            + (
                f"call {function} before torch.compile"
                if compiled
                else "call fully_shard on it, and on its blocks, before. Models that are whole on "
                "each rank have ddp.LocalSteps and ddp.MomentumExchange"
            )
        )
    modules = [(title, m) for title, m in model.named_modules() if isinstance(m, _FSDPModule)]
    titles = [title for title, _ in modules]
    units = {name: _unit_of(name, titles) for name, _ in model.named_parameters()}
    places = {unit: place for place, unit in enumerate(dict.fromkeys(units.values()))}
    named = sorted(model.named_parameters(), key=lambda pair: places[units[pair[0]]])
    trained = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    named = [(name, p) for name, p in named if p in trained]
    for name, p in named:
        _check(name, p, groups, function)
    between = [rank for rank in _flat(groups.site) if rank in groups.participants.process_set.ranks]

    def refusal() -> Exception | None:
        unreduced = [name for name, p in named if p.device_mesh.ndim == 1]
        parameters = [p for name, p in named if name in unreduced]
        if len(between) < 2 or is_exchanged_between(parameters, between):
            return None
        return ValueError(
            f"nothing exchanges the gradients of {unreduced[0]} between the hosts of a site, ranks "
            f'{between}: call fsdp.compress(model, ..., mesh=mesh["hosts", "inside"]) before the '
            'first step, or fully_shard with mesh=mesh["hosts", "inside"] instead'
        )

    def reshard() -> None:
        for _, module in modules:
            module.reshard()

    place = f"{groups.shard} of {len(groups.shards)}"
    return named, Sharding(
        function,
        C10dBackend(groups.everybody, "verify"),
        groups.everybody.rank() == 0,
        groups.across,
        place,
        units,
        refusal,
        reshard,
    )


def _unit_of(name: str, titles: Iterable[str]) -> str:
    """Return the title of the innermost unit that a parameter is in."""
    return max((x for x in titles if not x or name.startswith(f"{x}.")), key=len)


def _check(name: str, p: torch.nn.Parameter, groups: MeshGroups, function: str) -> None:
    """Check that a parameter is sharded inside of a host, and over nothing else.

    Raises:
        ValueError: it is not.
    """
    if not is_sharded(p):
        raise ValueError(
            f"{name} is not sharded, so each rank of a host would train its own: {function} takes "
            "models all of whose trained parameters are in fully_shard. Freeze it, or leave it out "
            "of ignored_params="
        )
    parameter: Any = p
    over, placements = parameter.device_mesh.mesh.tolist(), parameter.placements
    hybrid = len(placements) == 2 and placements[0].is_replicate()
    if not hybrid and len(placements) > 1:
        raise ValueError(
            f"{name} is sharded over {len(placements)} dimensions, {placements}, as with tensor "
            f"parallelism, which {function} does not take: shard by fully_shard alone"
        )
    if over == groups.shards or (hybrid and over == groups.site):
        return
    ranks = sorted(_flat(over))
    if set(ranks) - set(_flat(groups.site)):
        raise ValueError(
            f"{name} is sharded over ranks {ranks}, so FSDP exchanges gradients between hosts in "
            "every step: call fully_shard with the ranks of a host alone, "
            'mesh=mesh["inside"]'
        )
    raise ValueError(
        f"{name} is sharded over ranks {ranks}, and the last dimension of mesh= has "
        f"{groups.shards} here: pass the mesh whose last dimension fully_shard was given"
    )


def _check_fragments(fragments: int, units: Iterable[str]) -> None:
    """Check that fragments can be made of whole units.

    Raises:
        ValueError: there are fewer units.
    """
    count = len([*units])
    if fragments > max(count, 1):
        raise ValueError(
            f"fragments={fragments} are made of whole units, modules that fully_shard was called "
            f"on, and {count} of these have parameters that train: shard more blocks by "
            "themselves, or ask for fewer fragments"
        )


def _flat(ranks: Any) -> list[int]:
    """Return the ranks of a nested list."""
    return [rank for x in ranks for rank in _flat(x)] if isinstance(ranks, list) else [ranks]
