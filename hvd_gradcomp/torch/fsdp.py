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
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp

from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.core.compressor import Compressor
from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.monitoring.verify import DivergedError
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime import config_check
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.runtime.program_runner import Participants
from hvd_gradcomp.torch import ddp_checkpoint, inspection
from hvd_gradcomp.torch.autograd_callbacks import after_backward, backward_id
from hvd_gradcomp.torch.bucketing import BucketPlanner
from hvd_gradcomp.torch.comm.c10d import VERIFY, C10dBackend, ProcessGroup, out_of_step
from hvd_gradcomp.torch.inspection import compression_stats, describe, retrain
from hvd_gradcomp.torch.momentum import MomentumTransfer, resolve_compressor, take_over_momentum
from hvd_gradcomp.torch.options import ExchangeOptions
from hvd_gradcomp.torch.reducer import Reducer
from hvd_gradcomp.torch.stats_writer import StatsWriter
from hvd_gradcomp.torch.step_sync import OutOfStepError

FSDPModule: Any = getattr(torch.distributed.fsdp, "FSDPModule", None)
if not hasattr(FSDPModule, "set_all_reduce_hook"):
    raise ImportError(
        "hvd_gradcomp.torch.fsdp needs FSDP2 with all-reduce hooks, of PyTorch 2.7 or newer; this "
        f"is {torch.__version__}"
    )

__all__ = [
    "CheckpointError",
    "CompressionStats",
    "DivergedError",
    "MismatchError",
    "NonFiniteGradientError",
    "OutOfStepError",
    "ShardedCompression",
    "StatsWriter",
    "compress",
    "compression_stats",
    "describe",
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
    for group in (group for module in sharded for group in _groups_of(module)):
        found = getattr(getattr(group._all_reduce_hook, "func", None), "__self__", None)
        if isinstance(found, ShardedCompression):
            return found
    raise TypeError(
        f"nothing compresses the gradients of this {type(model).__name__}: call "
        "fsdp.compress(model, ..., mesh=mesh) on what fully_shard(model, ...) returned"
    )


def verify(source: Any) -> None:
    """Compare each shard's parameters and replicated state over its replicas, bit by bit.

    All ranks of the mesh call it at the same place, between steps.

    Args:
        source: the model, or the state that `compress` returned.

    Raises:
        DivergedError: on all ranks. Those with the shard in question name the first tensor that
            differs, and where.
        OutOfStepError: on all ranks, if some of them are in backward.
        TypeError: nothing compresses the model.
    """
    (source if isinstance(source, ShardedCompression) else state_of(source)).verify()


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of a parameter.

    Attributes:
        name: of the parameter in the model.
        held: FSDP's record of the parameter.
        local: the part itself, as a parameter without a mesh.
        padded: elements that it takes in the gradient of its unit.
    """

    name: str
    held: Any
    local: torch.nn.Parameter
    padded: int

    @property
    def trained(self) -> bool:
        """Return True if the parameter is not frozen now."""
        return bool(self.held.sharded_param.requires_grad)

    @property
    def dropped(self) -> bool:
        """Return True if the gradient of earlier passes, if any, was dropped by `zero_grad`."""
        return self.held.sharded_param.grad is None

    def add(self, reduced: torch.Tensor) -> None:
        """Add a reduced gradient to what FSDP has made of zeros."""
        parameter = self.held.sharded_param
        if parameter.grad is not None:
            grad = parameter.grad.to_local()
            grad.add_(reduced.to(grad.device, grad.dtype))
        elif reduced.any():  # nobody has used it in this step, and others have sent what they kept
            reduced = reduced.to(self.local.dtype, copy=True)
            parameter.grad = self.held.to_sharded_dtensor(reduced)


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


class ShardedCompression:
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

    The compressor's state, with a copy from before the last exchange, is of this rank's shard: with
    more shards a rank keeps less.

    Raises:
        TypeError: the model or `compression` is something else.
        ValueError: the mesh does not fit the model; a unit has parameters of several meshes, is
            reduced in float16 or offloaded to the CPU; the compressor cannot take these layers.
        MismatchError: on all ranks, if they do not train the same model in the same way.
    """

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
    ) -> None:
        _require_mesh(mesh)
        self._everybody = ProcessGroup(mesh.get_group(0), sorted(mesh.mesh.flatten().tolist()))
        if self._everybody.size() == dist.get_world_size():
            self._replicas = self._everybody.split([sorted(x) for x in mesh.mesh.t().tolist()])
        else:  # ranks outside of the mesh do not come here, and members alone make the group
            self._replicas = ProcessGroup(mesh.get_group(0))
        self._place = mesh.get_local_rank(0), mesh.get_local_rank(1)
        self._mesh = tuple(mesh.mesh.shape)
        self._transport = C10dBackend(self._replicas, "fsdp")
        self._steps = C10dBackend(self._everybody, "fsdp")
        compressor: Any = compression
        own: tuple[float, bool] | None = None
        refused: Exception | None = None  # by this rank; the others must hear of it
        layers: list[Layer] = []
        try:
            units = _units_of(model, mesh)
            self._units = list(units.values())
            self._shards = [s for unit in self._units for s in unit.shards]
            layers = [_whole_layer(s) for s in self._shards]
            options = ExchangeOptions(
                passes=backward_passes_per_step,
                batch_size=batch_size,
                bucket_bytes=bucket_bytes,
                nonfinite=nonfinite,
                scaler=scaler,
            ).for_hook()
            compressor, own = resolve_compressor(compression, optimizer)
            _check_moments(compressor, backward_passes_per_step)
            self._run = self._make_reducer(compressor, options)
        except (TypeError, ValueError) as error:
            refused = error
        settings = f"{backward_passes_per_step=}, {batch_size=}, {bucket_bytes=}, {nonfinite=}"
        settings = f"{settings}, mesh={self._mesh}"
        description = config_check.describe(
            layers,
            compressor,
            [],
            settings,
            framework=f"torch {torch.__version__.partition('+')[0]}",
            horovod=self._transport.version,
        )
        every = self._everybody.gather_objects(
            {**description, "what is refused": str(refused or "nothing")}, config_check.Description
        )
        config_check.agree(every, self._everybody.ranks)
        if refused:
            raise refused
        if own is not None:
            assert optimizer is not None
            take_over_momentum(optimizer, MomentumTransfer(optimizer, *own), self._run)
        self._given: set[str] = set()  # parameters whose gradient has arrived in this step
        self._backward = -1  # that is running, as autograd counts them
        self._exchanging = False  # in this backward
        self._error: Exception | None = None
        for module, unit in units.items():
            module.set_all_reduce_hook(partial(self.take_in, unit))
        inspection.know(self, self._run)
        inspection.know(model, self._run)

    def _make_reducer(self, compressor: Compressor, options: ExchangeOptions) -> Reducer:
        shards = [s for s in self._shards if s.local.numel()]
        participants = Participants(self._replicas)
        planner = BucketPlanner(
            [(s.name, s.local) for s in shards],
            compressor,
            participants,
            options,
            name=self._transport.name,
            tracking=None,
            owners=[(s.name, s.held.sharded_param) for s in shards],
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

    # -- one step ------------------------------------------------------------------------------

    @torch.no_grad()
    def take_in(self, unit: Unit, flat: torch.Tensor) -> None:
        """Take this rank's part of a unit's gradient; leave zeros, to which the mean is added."""
        now = backward_id()
        try:
            if now != self._backward:
                self._backward = now
                after_backward(self._finish)
                self._forget_interrupted()
            if self._error is None:
                self._add_pass(unit, flat)
            if self._error is None and unit.exchanges:
                self._give(unit, flat)
        except Exception as error:
            self._fail(error)
        flat.zero_()

    def _forget_interrupted(self) -> None:
        """Drop what is left of a backward that has failed, on all ranks."""
        if self._run.started or self._given:
            self._run.abort()
            self._given.clear()
            for unit in self._units:
                unit.earlier = None
        self._exchanging = False

    def _add_pass(self, unit: Unit, flat: torch.Tensor) -> None:
        """Sum up the gradients of a unit since the last exchange, and their squares if needed."""
        sources = self._run.sources
        for shard, gradient in unit.cut(flat):
            self._check(shard)
            if sources.source == "microbatch" and shard.local.numel():
                sources.add_pass(shard.local, gradient, anew=shard.dropped)
        earlier = unit.take_earlier()
        if earlier is not None:
            flat.add_(earlier)
        if not unit.exchanges:
            unit.earlier = flat.clone()

    def _give(self, unit: Unit, flat: torch.Tensor) -> None:
        """Give the sum of a unit's passes to the programs."""
        if not self._exchanging:
            self._begin()
            self._exchanging = True
        for shard, gradient in unit.cut(flat):
            self._given.add(shard.name)
            if shard.local.numel():
                self._run.mark_ready(shard.local, gradient)

    def _check(self, shard: Shard) -> None:
        """Check that a gradient can be taken now.

        Raises:
            ValueError: it cannot.
        """
        if getattr(shard.held.sharded_param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"a hook waits for the gradient of {shard.name}, as for an optimizer's step in "
                "backward: gradients are there only after backward. Step then"
            )
        if shard.name in self._given:
            raise ValueError(
                f"the unit with {shard.name} was reduced twice in one backward: sum its uses up by "
                "model.set_requires_gradient_sync(False) for all but the last"
            )

    def _begin(self) -> None:
        """Begin a step, after a check that all ranks begin the same one.

        Raises:
            OutOfStepError: on all ranks.
            ValueError: passes were summed up before they came here.
        """
        if self._everybody.closed:
            raise RuntimeError(
                "the exchange of an earlier step has failed, and what was kept is lost: start all "
                "ranks again, from a checkpoint"
            )
        run = self._run
        if run.sources.source == "microbatch" and run.steps == 0 and run.sources.passes < 2:
            raise ValueError(
                "moments='microbatch' are of several passes, and only one was seen before this "
                "exchange: for all backwards but the last of a step call "
                "model.set_requires_all_reduce(False), and not set_requires_gradient_sync(False), "
                "which sums passes up before they are reduced"
            )
        run.begin_step()
        frozen = [s.name for s in self._shards if not s.trained]
        words = [run.steps, int(run.undoes), zlib.crc32("\n".join(frozen).encode())]
        said = self._steps.gather_words(words, "the beginning of a step")
        if len({tuple(words[:2]) for words in said.values()}) > 1:
            raise out_of_step(said)
        if len({tuple(words) for words in said.values()}) > 1:
            raise OutOfStepError(
                "the ranks have frozen different parameters: freeze the same ones on all ranks, "
                f"between the same two steps. Here it is {', '.join(frozen) or 'none'}"
            )
        for bucket in run.buckets:
            names = bucket.layout.names
            bucket.mask_frozen({at for at, x in enumerate(names) if x in frozen}, run.steps)
        run.planner.warn_if_unprofitable()

    @torch.no_grad()
    def _finish(self) -> None:
        """Run all programs to their ends, and hand out the gradients, after backward.

        Raises:
            NonFiniteGradientError: on all ranks, also if it was in another shard.
            Exception: what has stopped this rank's exchange.
        """
        try:
            if self._error is None and self._exchanging:
                self._exchange()
        except Exception as found:
            self._fail(found)
        error, self._error, self._backward = self._error, None, -1
        given, run = self._given, self._run
        self._given = set()
        if error is None and not self._exchanging:
            return
        self._exchanging = False
        for shard in self._shards:
            if error is None and shard.local.numel() and shard.trained:
                shard.add(run.reduced_grad(shard.local))
            elif shard.name in given and shard.held.sharded_param.grad is not None:
                shard.held.sharded_param.grad.to_local().fill_(float("nan"))
        run.end_step()
        if error is not None:
            run.scaling.forget()
            raise error

    def _exchange(self) -> None:
        run = self._run
        for unit in self._units:  # those that this backward has not reached
            earlier = unit.take_earlier()
            gradients = {} if earlier is None else dict(unit.cut(earlier))
            for shard in unit.shards:
                if shard.name not in self._given and shard.local.numel() and shard.trained:
                    run.mark_ready(shard.local, gradients.get(shard))
        run.programs.drive()
        found: NonFiniteGradientError | None = None
        try:
            run.end_exchange()
        except NonFiniteGradientError as error:
            ranks = ", ".join(map(str, self._replicas.ranks))
            found = NonFiniteGradientError(
                f"{error}. Its numbers of ranks are places among the replicas of this shard, which "
                f"are ranks {ranks}"
            )
        bad = run.undone or found is not None
        said = self._steps.gather_words([run.steps, int(bad), 0], "the end of a step")
        elsewhere = [str(rank) for rank, (_, bad, _) in said.items() if bad]
        if elsewhere and not bad:
            found = NonFiniteGradientError(
                f"the shard of rank {', '.join(elsewhere)} has a NaN or an infinity in its gradient"
            )
            if run.undoes:
                run.undo(found)
                found = None
        if found is not None:
            raise found

    def _fail(self, error: Exception) -> None:
        """Record an error; close the connections unless all ranks have the same error."""
        self._error = error
        if not isinstance(error, (NonFiniteGradientError, OutOfStepError)):
            self._run.abort()
            self._replicas.hang_up()
            self._everybody.hang_up()

    # -- what it keeps, and what it has done ---------------------------------------------------

    def verify(self) -> None:
        """Compare the replicas of each shard; see `verify`."""
        self._meet_to_verify(False)
        found: DivergedError | None = None
        try:
            inspection.verify(self)
        except DivergedError as error:
            found = error
        elsewhere = self._meet_to_verify(found is not None)
        if found is not None:
            raise found
        if elsewhere:
            raise DivergedError(
                f"the replicas of another shard differ, as ranks {', '.join(elsewhere)} tell"
            )

    def _meet_to_verify(self, diverged: bool) -> list[str]:
        """Return the ranks that have found a difference, after a check that all ranks verify."""
        said = self._steps.gather_words([VERIFY, int(diverged), 0], "verify")
        if any(step != VERIFY for step, *_ in said.values()):
            raise out_of_step(said)
        return [str(rank) for rank, (_, diverged, _) in said.items() if diverged]

    @property
    def steps(self) -> int:
        """Return the number of exchanges so far."""
        return self._run.steps

    def stats(self) -> CompressionStats:
        """Return the measured traffic between replicas, of this rank; see `CompressionStats`.

        What FSDP moves inside a replica, and the checks of each step, 48 bytes, are not counted.
        """
        return self._run.stats()

    def discard_step(self) -> None:
        """Roll back the compressor's state, bit-exactly, to that before the last exchange.

        Skips a step: call it after backward, and `zero_grad()` instead of the optimizer's step, on
        all ranks; otherwise the next exchange is an OutOfStepError on all.

        Raises:
            RuntimeError: nothing was exchanged since the last call.
        """
        run = self._run
        if not run.discard() and not (run.planner.compressor.is_linear and run.steps):
            raise RuntimeError(
                "discard_step() restores the state from before the last exchange: call it once, "
                "after backward()"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the compressor's state of this rank's shard; each rank saves its own."""
        return {**ddp_checkpoint.save(self._run), "mesh": self._mesh, "place": self._place}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state of `state_dict`; on all ranks, between the same two steps.

        From another replica's state of the same shard, only replicated fields are loaded.

        Raises:
            CheckpointError: it is of another format, compressor, model or mesh, or of another
                shard.
        """
        mesh = saved.get("mesh") if isinstance(saved, dict) else None
        if mesh is None or tuple(mesh) != self._mesh:
            raise CheckpointError(
                f"it was saved on a mesh of {mesh} (replicas, shards), here it is {self._mesh}: "
                "what a compressor keeps belongs to its shard, and is not sharded anew. Begin "
                "without it; parameters can be loaded all the same"
            )
        if tuple(saved["place"])[1] != self._place[1]:
            raise CheckpointError(
                f"it is of shard {tuple(saved['place'])[1]}, and this rank has shard "
                f"{self._place[1]}: each rank saves and loads its own, in a file of its own"
            )
        ddp_checkpoint.load(self._run, saved)


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


def _units_of(model: Any, mesh: Any) -> dict[Any, Unit]:
    """Return the parameters of each module that `fully_shard` was called on; frozen ones left out.

    Raises:
        TypeError: the model is not sharded.
        ValueError: it is sharded in a way that cannot be compressed.
    """
    if not isinstance(model, FSDPModule):
        raise TypeError(
            f"what fully_shard(model, ...) returned is compressed, got {type(model).__name__}"
        )
    names = {p: name for name, p in model.named_parameters()}
    inside = dist.get_process_group_ranks(mesh.get_group(1))
    units: dict[Any, Unit] = {}
    for title, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = _groups_of(module)
        where = f"the unit {title or 'at the root'}"
        if len(groups) > 1:
            raise ValueError(
                f"{where} has parameters on several meshes, and FSDP has no all-reduce hook for "
                "these: call fully_shard on each of them with its own mesh"
            )
        for group in groups:
            _check(group, where, inside)
            shards = [_shard(held, names) for held in group.fsdp_params]
            units[module] = Unit(group, [s for s in shards if s.local.requires_grad])
    return units


def _groups_of(module: Any) -> list[Any]:
    """Return FSDP's records of a module's own unit: one, or none without parameters."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before PyTorch 2.10 or so there could be one
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
    found = dist.get_process_group_ranks(info.shard_process_group)
    if sorted(found) != sorted(inside):
        raise ValueError(
            f"{where} is sharded over ranks {found}, and the second dimension of mesh= has "
            f"{inside} here: pass the mesh whose second dimension fully_shard was given"
        )
    policy = group.mp_policy
    for held in group.fsdp_params:
        dtype = policy.reduce_dtype or policy.param_dtype or held.sharded_param.dtype
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"{where} is reduced in {dtype}, whose sums FSDP scales after the hook: use "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
    if getattr(group, "force_sum_reduction_for_comms", False):
        raise ValueError(
            f"{where} divides after the hook: leave set_force_sum_reduction_for_comms out"
        )
    if group.device.type != "cpu" and any(held.offload_to_cpu for held in group.fsdp_params):
        raise ValueError(
            f"{where} is offloaded from {group.device} to the CPU, and the collectives of "
            "compressors are for one device: leave CPUOffloadPolicy out"
        )


def _shard(held: Any, names: dict[Any, str]) -> Shard:
    parameter = held.sharded_param
    local = torch.nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
    return Shard(names[parameter], held, local, held.padded_sharded_param_size.numel())


def _whole_layer(shard: Shard) -> Layer:
    """Return the layer of a whole parameter, which is equal on all ranks."""
    parameter = shard.held.sharded_param
    return shard.name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
