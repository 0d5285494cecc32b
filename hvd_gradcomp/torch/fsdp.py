"""Gradient compression for PyTorch's `fully_shard` (FSDP2): between the replicas of each shard.

    mesh = init_device_mesh("cuda", (hosts, ranks_of_a_host), mesh_dim_names=("hosts", "inside"))
    fully_shard(model, mesh=mesh["inside"])
    state = fsdp.compress(model, VarianceCompressor(alpha=2.0), mesh=mesh)

How. `fully_shard` reduces and scatters each unit's gradient inside a host, where links are fast.
Its all-reduce hook then has this rank's shard of the unit, flat. Our hook copies it into buckets,
leaves zeros behind, and starts a bucket's program when its last gradient has arrived. The first
collectives of the programs overlap with the backward of other units. After backward all programs
run to their ends, in the same order on all ranks, and their results are added to the gradients. So
the result is also right where a gradient was accumulated before, or has another dtype.

A backward under `model.set_requires_all_reduce(False)` exchanges nothing: our hook sums up its
gradients, as FSDP does for hybrid sharding, and the next backward without it exchanges the sum.

`local_steps` and `MomentumExchange` are for optimizers that exchange in their step.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed.fsdp

from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.monitoring.verify import DivergedError
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.runtime.program_runner import Participants
from hvd_gradcomp.runtime.step_header import Kind, StepHeader, compare, values
from hvd_gradcomp.torch.comm.c10d import C10dBackend
from hvd_gradcomp.torch.comm.mesh import MeshGroups
from hvd_gradcomp.torch.hooks.fsdp_exchange import ShardExchange
from hvd_gradcomp.torch.hooks.fsdp_units import FSDPModule, Shard, Unit, groups_of, units_of
from hvd_gradcomp.torch.hooks.hook_compression import HookCompression, SetUp
from hvd_gradcomp.torch.interop.dynamo import interpreted
from hvd_gradcomp.torch.interop.inference import outside_inference
from hvd_gradcomp.torch.local.sharded_checkpoint import Checkpoint
from hvd_gradcomp.torch.local.wrapped_fsdp import MomentumExchange, local_steps
from hvd_gradcomp.torch.local.wrapped_optimizer import WrappedOptimizer
from hvd_gradcomp.torch.monitoring import inspection
from hvd_gradcomp.torch.monitoring.inspection import compression_stats, describe, retrain
from hvd_gradcomp.torch.monitoring.stats_writer import StatsWriter
from hvd_gradcomp.torch.reduce.backend import GroupBackend, MakeBackend
from hvd_gradcomp.torch.reduce.bucketing import BucketPlanner
from hvd_gradcomp.torch.reduce.claims import Claim
from hvd_gradcomp.torch.reduce.options import ExchangeOptions
from hvd_gradcomp.torch.reduce.reducer import Reducer

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CompressionStats",
    "DivergedError",
    "MismatchError",
    "MomentumExchange",
    "NonFiniteGradientError",
    "OutOfStepError",
    "ShardedCompression",
    "StatsWriter",
    "compress",
    "compression_stats",
    "describe",
    "local_steps",
    "retrain",
    "state_of",
    "verify",
]


def compress(model: Any, compression: Any = None, *, mesh: Any, **options: Any) -> Any:
    """Compress the exchange between the replicas of a sharded model; all ranks of the mesh call it.

    Call it once `fully_shard` was called on the model and its parts, the parameters have data and
    are equal on the replicas of each shard, and before the first forward.

    Args:
        model: what `fully_shard` returned, over the second dimension of the mesh.
        compression: a compressor of this package; None for none.
        mesh: a `DeviceMesh` of two dimensions: replicas, and shards. The ranks of a replica are
            best on one host, or wherever links are fast.
        options: as in `ShardedCompression`.

    Returns:
        The `ShardedCompression`: keep it for checkpoints and for `stats()`.
    """
    return ShardedCompression(model, compression, mesh, **options)


def state_of(model: Any) -> ShardedCompression:
    """Return the state that compresses the gradients of a model.

    Raises:
        TypeError: nothing compresses them.
    """
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    for group in (group for module in sharded for group in groups_of(module)):
        state = getattr(getattr(group._all_reduce_hook, "func", None), "__self__", None)
        if isinstance(state, ShardedCompression):
            return state
    raise TypeError(
        f"nothing compresses the gradients of this {type(model).__name__}: call "
        "fsdp.compress(model, ..., mesh=mesh) on what fully_shard(model, ...) returned"
    )


def verify(source: Any) -> None:
    """Compare each shard's parameters and replicated state over its replicas, bit by bit.

    All ranks of the mesh call it at the same place, between steps.

    Args:
        source: the model, or the state that `compress` returned; or the optimizer of `local_steps`
            or `MomentumExchange`, of which the global parameters are compared.

    Raises:
        DivergedError: on all ranks. Those with the shard in question name the first tensor that
            differs, and where.
        OutOfStepError: on all ranks, if some of them are in backward.
        TypeError: nothing compresses the model.
    """
    if isinstance(source, WrappedOptimizer) and source.sharding is not None:
        _verify(source, source.sharding.everybody)
        return
    (source if isinstance(source, ShardedCompression) else state_of(source)).verify()


def _verify(source: Any, everybody: GroupBackend) -> None:
    """Compare the replicas of each shard; see `verify`.

    Args:
        source: exchanges them.
        everybody: compares all ranks.
    """
    _ranks_with_difference(everybody, None)
    difference: DivergedError | None = None
    try:
        inspection.verify(source)
    except DivergedError as error:
        difference = error
    elsewhere = _ranks_with_difference(everybody, difference)
    if difference is not None:
        raise difference
    if elsewhere:
        raise DivergedError(
            f"the replicas of another shard differ, as ranks {', '.join(elsewhere)} tell"
        )


def _ranks_with_difference(everybody: GroupBackend, difference: DivergedError | None) -> list[str]:
    """Return the ranks whose replicas differ; an error unless all ranks verify."""
    header = StepHeader(Kind.VERIFY, fault=int(difference is not None))
    headers = everybody.gather_headers(header, "verify")
    if error := compare(headers):
        raise error
    return [str(rank) for rank in values(headers, "fault")]


class ShardedCompression(HookCompression):
    """Compression of the exchange between the replicas of a sharded model, step by step.

    Args:
        model: what `fully_shard` returned.
        compression: a compressor of this package; None for none. It sees each parameter's shard
            as a layer.
        mesh: a `DeviceMesh` of two dimensions: replicas, and shards.
        optimizer: the SGD whose momentum a compressor with momentum correction takes over (DGC,
            EGC, LGC). Without it, set `momentum=` of the compressor, and none of the optimizer.
        backward_passes_per_step: backwards for each exchange, all but the last under
            `model.set_requires_all_reduce(False)`; more than one gives the moments of
            micro-batches, each of which is a replica's batch of one backward.
        batch_size: samples that a replica sees for each exchange, for `moments="microbatch"`.
        bucket_bytes: target size of our buckets; 25 MiB if None.
        nonfinite: policy for a step with a non-finite gradient on any rank, the same on all ranks.
            "raise": a NonFiniteGradientError from backward. "propagate": gradients are NaN, and the
            compressor's state is rolled back. None: "propagate" with a GradScaler, which then skips
            the step; else "raise".
        scaler: the `GradScaler` that scales the loss; None finds it, False for none.
        backend: makes the transport of what is compressed from a group and a name, on all ranks;
            see docs/extending-transport.md. `torch.distributed` by default.

    The compressor's state, with a copy from before the last exchange, is of this rank's shard: with
    more shards a rank keeps less.

    Raises:
        TypeError: the model or `compression` is something else.
        ValueError: the mesh does not fit the model; a unit has parameters of several meshes,
            or is offloaded to the CPU; the compressor cannot take these layers.
        ValueError: something else exchanges the model, such as `DistributedDataParallel`.
        MismatchError: on all ranks, if they do not train the same model in the same way.
    """

    @outside_inference()
    def __init__(
        self,
        model: Any,
        compression: Any = None,
        mesh: Any = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        backward_passes_per_step: int = 1,
        batch_size: int | None = None,
        bucket_bytes: int | None = None,
        nonfinite: str | None = None,
        scaler: Any = None,
        backend: MakeBackend = C10dBackend,
    ) -> None:
        _require_mesh(mesh)
        groups = MeshGroups(mesh)
        self._everybody, self._replicas = groups.everybody, groups.across
        self._place = mesh.get_local_rank(0), mesh.get_local_rank(1)
        self._mesh = tuple(mesh.mesh.shape)
        self._transport = backend(self._replicas, "fsdp")
        self._steps = backend(self._everybody, "fsdp")
        units: dict[Any, Unit] = {}

        def make_reducer(set_up: SetUp) -> Reducer:
            units.update(units_of(model, mesh))
            shards = [s for unit in units.values() for s in unit.shards]
            set_up.layers = [s.whole_layer for s in shards]
            options = ExchangeOptions(
                passes=backward_passes_per_step,
                batch_size=batch_size,
                bucket_bytes=bucket_bytes,
                nonfinite=nonfinite,
                scaler=scaler,
            ).for_hook()
            compressor = set_up.resolve(compression, optimizer)
            _check_moments(compressor, backward_passes_per_step)
            reducer = self._make_reducer(shards, compressor, options)
            parameters = [s.record.sharded_param for s in shards]
            set_up.claim = Claim("fsdp.compress", parameters, self._replicas, sharded=True)
            return reducer

        settings = f"{backward_passes_per_step=}, {batch_size=}, {bucket_bytes=}, {nonfinite=}"
        settings = f"{settings}, mesh={self._mesh}"
        set_up = SetUp(compression)
        self._set_up(set_up, make_reducer, optimizer, self._everybody, self._transport, settings)
        self._exchange = ShardExchange(
            self.reducer, model, [*units.values()], self._replicas, self._everybody, self._steps
        )
        for module, unit in units.items():
            module.set_all_reduce_hook(partial(self.reduce, unit))
        inspection.know(model, self.reducer)

    @interpreted
    def reduce(self, unit: Unit, flat: torch.Tensor) -> None:
        """Exchange this rank's part of a unit's gradient; see `ShardExchange.reduce`."""
        self._exchange.reduce(unit, flat)

    def _make_reducer(
        self, every: list[Shard], compressor: Compressor, options: ExchangeOptions
    ) -> Reducer:
        shards = [s for s in every if s.local.numel()]
        participants = Participants(self._replicas)
        planner = BucketPlanner(
            [(s.name, s.local) for s in shards],
            compressor,
            participants,
            options,
            name=self._transport.name,
            tracking=None,
            owners=[(s.name, s.record.sharded_param) for s in shards],
        )
        if not planner.ordered:
            planner.reorder([s.name for s in shards])
        return Reducer(
            planner,
            self._transport,
            participants,
            options,
            prescale=1.0,
            postscale=1.0 / self._replicas.size(),
            in_order=True,  # replicas may use other units, or use them in another order
        )

    def __deepcopy__(self, known: dict[int, Any]) -> Any:
        del known
        raise TypeError("a sharded model and what compresses it cannot be copied")

    # -- what it keeps, and what it has done ---------------------------------------------------

    def verify(self) -> None:
        """Compare the replicas of each shard; see `verify`."""
        _verify(self, self._steps)

    @outside_inference()
    def state_dict(self) -> dict[str, Any]:
        """Return the compressor's state of this rank's shard; each rank saves its own."""
        return {**super().state_dict(), "mesh": self._mesh, "place": self._place}

    @outside_inference()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state of `state_dict`; on all ranks, between the same two steps.

        From another replica's state of the same shard, only replicated fields are loaded.

        Raises:
            CheckpointError: it is of another format, compressor, model or mesh, or of another
                shard.
        """
        mesh = self._mesh_of(saved)
        if mesh != self._mesh:
            raise CheckpointError(
                f"it was saved on a mesh of {mesh} (replicas, shards), here it is {self._mesh}: "
                "what a compressor keeps belongs to its shard, and is not sharded anew. With as "
                "many shards hand load_states() what all ranks have saved; with others begin "
                "without it, parameters can be loaded all the same"
            )
        if tuple(saved["place"])[1] != self._place[1]:
            raise CheckpointError(
                f"it is of shard {tuple(saved['place'])[1]}, and this rank has shard "
                f"{self._place[1]}: each rank saves and loads its own, in a file of its own"
            )
        super().load_state_dict(saved)

    @outside_inference()
    def load_states(self, states: Iterable[dict[str, Any]]) -> None:
        """Load what all ranks saved, with any number of replicas; all ranks call it.

        On the same mesh each rank loads its own, to the bit. With other replicas of as many shards
        the residuals of each shard are summed up, and each replica takes an equal share.

        Args:
            states: those of all ranks that saved, in any order.

        Raises:
            CheckpointError: as from `load_state_dict`, with another number of shards; or the state
                of a rank is missing, or they are of several checkpoints.
        """
        super().load_states(filter(self._is_of_this_shard, states))

    def _is_of_this_shard(self, saved: Any) -> bool:
        """Return True if a state is of this rank's shard.

        Raises:
            CheckpointError: its model was cut into another number of shards.
        """
        mesh = self._mesh_of(saved)
        if mesh is None or mesh[1] != self._mesh[1]:
            raise CheckpointError(
                f"it was saved on a mesh of {mesh} (replicas, shards), here it is {self._mesh}: "
                "what a compressor keeps belongs to its shard, and is not sharded anew. Begin "
                "without it; parameters can be loaded all the same"
            )
        return bool(tuple(saved["place"])[1] == self._place[1])

    @staticmethod
    def _mesh_of(saved: Any) -> tuple[int, ...] | None:
        """Return the mesh that a state was saved on; None if it has none."""
        mesh = saved.get("mesh") if isinstance(saved, dict) else None
        return None if mesh is None else tuple(mesh)


def _require_mesh(mesh: Any) -> None:
    """Check that a mesh has replicas and shards.

    Raises:
        TypeError: it is no mesh.
        ValueError: it has other dimensions, or this rank is not in it.
    """
    if not hasattr(mesh, "get_group"):
        raise TypeError(f"mesh= takes a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 2:
        raise ValueError(
            f"mesh= takes a DeviceMesh of two dimensions, replicas and shards, got {mesh.ndim}: "
            'init_device_mesh("cuda", (hosts, ranks_of_a_host))'
        )
    if mesh.get_coordinate() is None:
        raise ValueError("this rank is not in mesh=: call fsdp.compress on its ranks alone")


def _check_moments(compressor: Compressor, passes: int) -> None:
    """Check that the moments that a compressor needs are known.

    Raises:
        ValueError: they are not.
    """
    source = getattr(compressor, "moments", "") if compressor.uses_moments else ""
    if source == "sample":
        raise ValueError(
            "FSDP hands out the sum over a replica's samples, so moments of samples are not known: "
            f"pass moments='microbatch' or 'step'. It is {compressor}"
        )
    if source == "microbatch" and passes < 2:
        raise ValueError(
            "moments='microbatch' are of several backwards for each exchange: pass "
            "backward_passes_per_step of at least 2, and call model.set_requires_all_reduce(False) "
            f"for all but the last. It is {compressor}"
        )
