"""Gradient compression for PyTorch's own `DistributedDataParallel`: no Horovod.

    from hvd_gradcomp import VarianceCompressor
    from hvd_gradcomp.torch import ddp

     model = DistributedDataParallel(model)
    +state = ddp.compress(model, VarianceCompressor(alpha=2.0))

How. A communication hook copies the gradients of each DDP bucket into buckets of our own
(`DistributedDataParallel` rebuilds its buckets after the first step; compressor state must not
move), and starts a bucket's program when its last gradient arrives. The program's first collective
overlaps with the backward of earlier layers. Collectives are matched by order, so later ones are
requested at the same places on all ranks: of programs that are known to have more rounds, when the
next DDP bucket has arrived; of all, at DDP's last bucket, bucket by bucket, in the same order
on all ranks.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.method.compressor import Compressor, leaves
from hvd_gradcomp.monitoring.reports import JSONLines, TensorBoard
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.monitoring.verify import DivergedError
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.runtime.program_runner import Participants
from hvd_gradcomp.torch.comm.c10d import C10dBackend, ProcessGroup, sparse_allreduce
from hvd_gradcomp.torch.comm.hosts import participants_among, setting_of
from hvd_gradcomp.torch.hooks.ddp_hook import DDPExchange
from hvd_gradcomp.torch.hooks.hook_compression import HookCompression, SetUp
from hvd_gradcomp.torch.interop.ddp_reduction import comm_hook_of, models_of, reduced_parameters
from hvd_gradcomp.torch.interop.dynamo import interpreted
from hvd_gradcomp.torch.interop.inference import outside_inference
from hvd_gradcomp.torch.local.wrapped_c10d import LocalSteps, MomentumExchange, local_steps
from hvd_gradcomp.torch.membership.ddp_elastic import Elastic, ElasticState
from hvd_gradcomp.torch.membership.rendezvous import RendezvousError
from hvd_gradcomp.torch.moments.tracker import track_moments
from hvd_gradcomp.torch.monitoring import inspection
from hvd_gradcomp.torch.monitoring.inspection import compression_stats, describe, retrain, verify
from hvd_gradcomp.torch.monitoring.probing import Probe
from hvd_gradcomp.torch.monitoring.stats_writer import StatsWriter
from hvd_gradcomp.torch.reduce.backend import MakeBackend
from hvd_gradcomp.torch.reduce.bucket import Named
from hvd_gradcomp.torch.reduce.bucketing import BucketPlanner, layers_of
from hvd_gradcomp.torch.reduce.claims import Claim
from hvd_gradcomp.torch.reduce.options import ExchangeOptions
from hvd_gradcomp.torch.reduce.reducer import Reducer
from hvd_gradcomp.torch.reduce.sparse_grads import SparseGradients

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "CheckpointError",
    "CompressionState",
    "CompressionStats",
    "DivergedError",
    "Elastic",
    "ElasticState",
    "JSONLines",
    "LocalSteps",
    "MismatchError",
    "MomentumExchange",
    "NonFiniteGradientError",
    "OutOfStepError",
    "Probe",
    "RendezvousError",
    "StatsWriter",
    "TensorBoard",
    "compress",
    "compression_stats",
    "describe",
    "hook",
    "local_steps",
    "retrain",
    "state_of",
    "track_moments",
    "verify",
]

LOGGER = logging.getLogger("hvd_gradcomp")
# By model, and by parameters of models whose hook was given a compressor. Weak: no model lives on.
_states: weakref.WeakKeyDictionary[Any, CompressionState] = weakref.WeakKeyDictionary()
_models: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def compress(model: DistributedDataParallel, compression: Any = None, **options: Any) -> Any:
    """Compress the gradient exchange of a model; all ranks call it, before the first forward.

    A copy of the model (`copy.deepcopy`, `torch.load`, `AveragedModel`) exchanges its gradients
    uncompressed: `DistributedDataParallel` copies no hook. To compress a copy, call this on it.

    Args:
        model: a `DistributedDataParallel`.
        compression, options: as in `CompressionState`.

    Returns:
        The `CompressionState`: keep it for checkpoints and for `stats()`.
    """
    state = CompressionState(model, compression, **options)
    model.register_comm_hook(state, hook)
    state._belongs_to(model)
    return state


@interpreted
def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket; a hook for `model.register_comm_hook(state, ddp.hook)` and for libraries.

    Args:
        state: a `CompressionState`; or a compressor, if a library makes the model. Then the state
            is made with the first gradient, on all ranks: `state_of(model)` returns it.
        bucket: of `DistributedDataParallel`.

    Raises:
        TypeError: on all ranks, if the state is something else.
        ValueError: the compressor needs more than a hook has: an optimizer whose momentum it takes
            over, or the execution order of the model's layers (LGC). Call `ddp.compress`.
    """
    if not isinstance(state, CompressionState):
        # DDP's Python reducer hands out a gradient and its parameter; the state refuses its model.
        parameter = bucket[1] if isinstance(bucket, tuple) else bucket.parameters()[0]
        state = _state_for(state, parameter)
    return state.reduce(bucket)


def state_of(model: DistributedDataParallel) -> CompressionState:
    """Return the state that compresses the gradients of a model.

    Raises:
        TypeError: nothing compresses them, as in a copy of a model.
    """
    state = _states.get(model) if isinstance(model, DistributedDataParallel) else None
    if state is None:
        raise TypeError(
            f"nothing compresses the gradients of this {type(model).__name__}: call "
            "ddp.compress(model, ...) on what DistributedDataParallel(...) returns. A copy of a "
            "model has no hook. A compressor that was given as the state of ddp.hook begins with "
            "the first backward, if DistributedDataParallel was given the hook at all"
        )
    return state


def _state_for(compression: Any, parameter: torch.nn.Parameter) -> CompressionState:
    """Return the state of the parameter's model; make it if the hook was given a compressor."""
    model = _models.get(parameter, lambda: None)()
    if model is None:
        models = models_of([parameter])
        if len(models) != 1:
            raise ValueError(
                f"{len(models)} models of DistributedDataParallel have the parameter whose "
                f"gradient came, so it cannot be told which one {compression} is for: call "
                "ddp.compress(model, compressor) instead of giving ddp.hook a compressor"
            )
        (model,) = models
        CompressionState(model, _DeferredCompressor(compression))._belongs_to(model)
        for p in model.parameters():
            _models[p] = weakref.ref(model)
    return _states[model]


# DDP compares these with its classes, and takes no texts.
hook.__annotations__.update(
    bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]}
)


class _NoState:
    """Placeholder of a `CompressionState` in a copy of a model, which has no hook."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"this is the copy of a CompressionState, without {name}: copies of a model (deepcopy, "
            "torch.load, AveragedModel) exchange their gradients as they are. Call "
            "ddp.compress(copy, ...) to compress them too; save and load what is kept by "
            "state_dict() and load_state_dict()"
        )


class CompressionState(HookCompression):
    """Compression of one model's gradients, and its state from step to step.

    All ranks of the process group make it, before the first forward. Layers that do not require a
    gradient are left out, as in `DistributedDataParallel`.

    Args:
        model: a `DistributedDataParallel`.
        compression: a compressor of this package; None for none.
        process_group: the ranks that take part; the model's if None.
        optimizer: the SGD whose momentum a compressor with momentum correction takes over (DGC,
            EGC, LGC). Without it, set `momentum=` of the compressor, and none of the optimizer.
        backward_passes_per_step: backwards for each exchange, all but the last under
            `model.no_sync()`; more than one gives the moments of micro-batches.
        batch_size: samples that a rank sees for each exchange, for `moments="microbatch"`.
        bucket_bytes: target size of our buckets; 25 MiB if None.
        nonfinite: policy for a step with a non-finite gradient on any rank, the same on all ranks.
            "raise": a NonFiniteGradientError from backward. "propagate": gradients are NaN, and the
            compressor's state is rolled back. None: "propagate" with a GradScaler, which then skips
            the step; else "raise".
        rollback: keep the compressor's state from before an exchange until the next one, for
            `discard_step`. Doubles the memory of the compressor's state.
        scaler: the `GradScaler` that scales the loss; None finds it, False for none.
        hierarchical: True to reduce inside each host as dense tensors, and exchange compressed
            between hosts; to the compressor a host is one rank, with the samples of all its ranks.
            Hosts are those of torchrun, and have the same number of ranks. Or a `DeviceMesh` of two
            dimensions, hosts and ranks of a host, where something else has started the ranks.
        sparse_as_dense: False to gather the rows of sparse gradients (`Embedding(sparse=True)`)
            from all ranks, uncompressed, and to give these layers no bucket. None, like True,
            compresses them as dense ones, and logs that once; in `p.grad` they are sparse again. A
            table of which a batch needs few rows moves fewer bytes with False.
        release_buckets: True to hold gradients once: a bucket of `DistributedDataParallel` is
            released while ours has its gradients, and ours between steps. Saves 4 bytes for each
            parameter, and allocates both anew in each step. With `gradient_as_bucket_view=True`
            `p.grad` is None from the time its bucket is released until backward ends.
        backend: makes the transport of what is compressed from a group and a name, on all ranks;
            see docs/extending-transport.md. `torch.distributed` by default.

    Raises:
        TypeError: the model or `compression` is something else, or the model is sharded.
        ValueError: the compressor cannot take these layers; it corrects momentum, but has neither
            an optimizer nor `momentum=`; moments are not set up; an optimizer exchanges the same
            parameters; on all ranks, if hosts are not as `hierarchical` needs them.
        MismatchError: on all ranks, if they do not train the same model in the same way.
    """

    _no_snapshot = "call it once, after backward(), and make ddp.compress without rollback=False"

    @outside_inference()
    def __init__(
        self,
        model: DistributedDataParallel,
        compression: Any = None,
        process_group: Any = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        backward_passes_per_step: int = 1,
        batch_size: int | None = None,
        bucket_bytes: int | None = None,
        nonfinite: str | None = None,
        rollback: bool = True,
        scaler: Any = None,
        hierarchical: bool | DeviceMesh = False,
        sparse_as_dense: bool | None = None,
        release_buckets: bool = False,
        backend: MakeBackend = C10dBackend,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            sharded = isinstance(model, getattr(torch.distributed.fsdp, "FSDPModule", ()))
            raise TypeError(
                f"a DistributedDataParallel is compressed, got {type(model).__name__}. "
                + (
                    "It was sharded by fully_shard: call fsdp.compress(model, ..., mesh=mesh)"
                    if sharded
                    else "Call ddp.compress on what DistributedDataParallel(...) returns, before "
                    "torch.compile"
                )
            )
        self._group = ProcessGroup(process_group or model.process_group)
        self._transport = backend(self._group, "ddp")
        as_dense = sparse_as_dense is not False
        tables = set() if as_dense else _tables(model)
        reduced = reduced_parameters(model)
        named = [(name, p) for name, p in reduced if p not in tables]
        beside = [(name, p) for name, p in reduced if p in tables]
        claim = Claim("ddp.compress", [p for _, p in reduced], self._group, by_hook=True)

        def make_reducer(set_up: SetUp) -> Reducer:
            participants = participants_among(self._group, hierarchical)  # all ranks meet in it
            _require_buckets(model)
            deferred = isinstance(compression, _DeferredCompressor)
            if not deferred:  # otherwise the hook has made this state
                _require_no_hook(model)
            options = ExchangeOptions(
                backward_passes_per_step, batch_size, bucket_bytes, nonfinite, rollback, scaler
            ).for_hook()
            compressor = set_up.resolve(
                compression.compressor() if deferred else compression, optimizer
            )
            reducer = self._make_reducer(
                named, beside, compressor, participants, options, release_buckets
            )
            set_up.layouts = [bucket.layout for bucket in reducer.buckets]
            return reducer

        settings = (
            f"{backward_passes_per_step=}, {bucket_bytes=}, {nonfinite=}, {rollback=}, "
            f"hierarchical={setting_of(hierarchical)}, {sparse_as_dense=}"
        )
        set_up = SetUp(compression, claim, layers_of(named))
        self._set_up(set_up, make_reducer, optimizer, self._group, self._transport, settings)
        self._exchange = DDPExchange(
            self.reducer,
            model,
            self._group,
            self._transport,
            SparseGradients(
                self.reducer,
                sparse_allreduce,
                average=True,
                as_dense=as_dense,
                by_default=sparse_as_dense is None,
            ),
            {p: name for name, p in (*named, *beside)},
            releases=release_buckets,
        )
        self._warned_unsaved = False
        if model not in _states:
            self._belongs_to(model)

    def _make_reducer(
        self,
        named: Named,
        beside: Named,
        compressor: Compressor,
        participants: Participants,
        options: ExchangeOptions,
        releases: bool,
    ) -> Reducer:
        planner = BucketPlanner(
            named,
            compressor,
            participants,
            options,
            name=self._transport.name,
            tracking="ddp.track_moments(module) before DistributedDataParallel",
        )
        mean = 1.0 / participants.rank_and_size[1]
        return Reducer(
            planner,
            self._transport,
            participants,
            options,
            prescale=1.0,
            postscale=mean,
            beside=beside,
            releases=releases,
        )

    def _belongs_to(self, model: DistributedDataParallel) -> None:
        """Register this state as that of the model."""
        _states[model] = self
        inspection.know(model, self.reducer)

    def __deepcopy__(self, known: dict[int, Any]) -> Any:
        """Return a placeholder: a copied model has no hook that would use a state."""
        del known
        return _NoState()

    def __reduce__(self) -> Any:
        """Pickle as a placeholder, alone or with a model; warn once."""
        if not self._warned_unsaved and any(
            True for b in self.reducer.buckets for _ in leaves(b.state)
        ):
            self._warned_unsaved = True
            LOGGER.warning(
                "what a compressor keeps is not saved with its model, or with its state as an "
                "object: save state.state_dict(), each rank its own, to go on from there. It is %s",
                self.reducer.planner.compressor,
            )
        return _NoState, ()

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Exchange the gradients of one DDP bucket; see `DDPExchange.reduce`."""
        return self._exchange.reduce(bucket)


def _require_no_hook(model: DistributedDataParallel) -> None:
    """Check that a model has no communication hook yet: it can have one only.

    Raises:
        ValueError: it has one.
    """
    registered = comm_hook_of(model)
    if registered is not None:
        raise ValueError(
            f"the model has a communication hook of DistributedDataParallel already, {registered}: "
            "call ddp.compress once, without register_comm_hook, or wrap the module in "
            "DistributedDataParallel anew"
        )


def _require_buckets(model: DistributedDataParallel) -> None:
    """Check that a model has buckets that a hook is called with.

    Raises:
        ValueError: it has none.
    """
    if getattr(model, "_use_python_reducer", False):
        raise ValueError(
            'with torch._dynamo.config.optimize_ddp = "python_reducer" DistributedDataParallel '
            "reduces each gradient by itself, and has no buckets whose exchange could be "
            'compressed: set it to True ("ddp_optimizer") or False ("no_optimization") before '
            "DistributedDataParallel(model), and compile no backward by compiled autograd, which "
            "goes with nothing else"
        )


def _tables(model: DistributedDataParallel) -> set[torch.nn.Parameter]:
    """Return the parameters whose gradients DDP expects to be sparse."""
    tables: dict[torch.nn.Parameter, bool] = {}
    for module in model.module.modules():
        table = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
        for p in module.parameters(recurse=False):
            tables.setdefault(p, table)  # DDP looks at the first module that has it
    return {p for p, is_table in tables.items() if is_table}


class _DeferredCompressor:
    """Value that a hook got in place of a state; known only after the first backward has begun."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        return repr(self._value)

    def compressor(self) -> Any:
        """Return the compressor, if a state can be made of it now.

        Raises:
            TypeError: it is no compressor.
            ValueError: the compressor has to see the backward from its beginning.
        """
        value = self._value
        makes = isinstance(value, type) and issubclass(value, Compressor)
        if not makes and not isinstance(value, Compressor):
            raise TypeError(
                "ddp.hook takes as its state a compressor of hvd_gradcomp, such as "
                f"QSGDCompressor(), or a CompressionState, got {value!r}"
            )
        compressor = value() if makes else value
        if compressor.needs_execution_order:
            raise ValueError(
                "the compressor needs the order in which backward comes by the layers, and the "
                "first backward has begun: call ddp.compress(model, compressor) before it, instead "
                f"of giving ddp.hook a compressor. It is {compressor}"
            )
        return compressor
