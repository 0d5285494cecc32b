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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.core.compressor import Compressor, leaves
from hvd_gradcomp.monitoring.reports import JSONLines, TensorBoard
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.monitoring.verify import DivergedError
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.runtime.program_runner import Participants
from hvd_gradcomp.runtime.step_header import Kind, StepHeader, compare, values
from hvd_gradcomp.torch import ddp_checkpoint, inspection, setup_check
from hvd_gradcomp.torch.autograd_callbacks import after_backward, backward_id
from hvd_gradcomp.torch.bucket import Named, as_real
from hvd_gradcomp.torch.bucketing import BucketPlanner, layers_of
from hvd_gradcomp.torch.claims import Claim
from hvd_gradcomp.torch.comm.c10d import C10dBackend, ProcessGroup, sparse_allreduce
from hvd_gradcomp.torch.comm.hosts import participants_among, setting_of
from hvd_gradcomp.torch.ddp_elastic import Elastic, ElasticState
from hvd_gradcomp.torch.ddp_reduction import comm_hook_of, models_of, reduced_parameters
from hvd_gradcomp.torch.inference import outside_inference
from hvd_gradcomp.torch.inspection import compression_stats, describe, retrain, verify
from hvd_gradcomp.torch.moments.dynamo import interpreted
from hvd_gradcomp.torch.moments.tracker import track_moments
from hvd_gradcomp.torch.momentum import MomentumTransfer, resolve_compressor, take_over_momentum
from hvd_gradcomp.torch.options import ExchangeOptions
from hvd_gradcomp.torch.probing import Probe
from hvd_gradcomp.torch.reducer import Reducer
from hvd_gradcomp.torch.rendezvous import RendezvousError
from hvd_gradcomp.torch.sparse_grads import SparseGradients
from hvd_gradcomp.torch.stats_writer import StatsWriter
from hvd_gradcomp.torch.wrapped_c10d import LocalSteps, MomentumExchange

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
        state = _made_for(state, parameter)
    return state.take_in(bucket)


def state_of(model: DistributedDataParallel) -> CompressionState:
    """Return the state that compresses the gradients of a model.

    Raises:
        TypeError: nothing compresses them, as in a copy of a model.
    """
    found = _states.get(model) if isinstance(model, DistributedDataParallel) else None
    if found is None:
        raise TypeError(
            f"nothing compresses the gradients of this {type(model).__name__}: call "
            "ddp.compress(model, ...) on what DistributedDataParallel(...) returns. A copy of a "
            "model has no hook. A compressor that was given as the state of ddp.hook begins with "
            "the first backward, if DistributedDataParallel was given the hook at all"
        )
    return found


def _made_for(given: Any, parameter: torch.nn.Parameter) -> CompressionState:
    """Return the state of the parameter's model; make it if the hook was given a compressor."""
    model = _models.get(parameter, lambda: None)()
    if model is None:
        models = models_of([parameter])
        if len(models) != 1:
            raise ValueError(
                f"{len(models)} models of DistributedDataParallel have the parameter whose "
                f"gradient came, so it cannot be told which one {given} is for: call "
                "ddp.compress(model, compressor) instead of giving ddp.hook a compressor"
            )
        (model,) = models
        CompressionState(model, _Given(given))._belongs_to(model)
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


class CompressionState:
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

    Raises:
        TypeError: the model or `compression` is something else, or the model is sharded.
        ValueError: the compressor cannot take these layers; it corrects momentum, but has neither
            an optimizer nor `momentum=`; moments are not set up; an optimizer exchanges the same
            parameters; on all ranks, if hosts are not as `hierarchical` needs them.
        MismatchError: on all ranks, if they do not train the same model in the same way.
    """

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
        self._transport = C10dBackend(self._group, "ddp")
        as_dense = sparse_as_dense is not False
        tables = set() if as_dense else _tables(model)
        reduced = reduced_parameters(model)
        named = [(name, p) for name, p in reduced if p not in tables]
        beside = [(name, p) for name, p in reduced if p in tables]
        self._claim = Claim("ddp.compress", [p for _, p in reduced], self._group, by_hook=True)
        compressor: Any = compression
        own: tuple[float, bool] | None = None
        refused: Exception | None = None  # by this rank; the others must hear of it
        try:
            participants = participants_among(self._group, hierarchical)  # all ranks meet in it
            _require_buckets(model)
            if not isinstance(compression, _Given):  # that comes with a hook
                _require_no_hook(model)
            options = ExchangeOptions(
                backward_passes_per_step, batch_size, bucket_bytes, nonfinite, rollback, scaler
            ).for_hook()
            if isinstance(compression, _Given):
                compression = compression.compressor()
            compressor, own = resolve_compressor(compression, optimizer)
            self._run = self._make_reducer(
                named, beside, compressor, participants, options, release_buckets
            )
            self._claim.take()
        except (TypeError, ValueError) as error:
            refused = error
        settings = (
            f"{backward_passes_per_step=}, {bucket_bytes=}, {nonfinite=}, {rollback=}, "
            f"hierarchical={setting_of(hierarchical)}, {sparse_as_dense=}"
        )
        layouts = [] if refused else [bucket.layout for bucket in self._run.buckets]
        how = layers_of(named), compressor, layouts, settings
        setup_check.agree(self._group, self._transport, *how, refused, self._claim)
        if own is not None:
            assert optimizer is not None
            take_over_momentum(optimizer, MomentumTransfer(optimizer, *own), self._run)
        self._exchange = HookExchange(
            self._run,
            model,
            self._group,
            self._transport,
            SparseGradients(
                self._run,
                sparse_allreduce,
                average=True,
                as_dense=as_dense,
                by_default=sparse_as_dense is None,
            ),
            {p: name for name, p in (*named, *beside)},
            releases=release_buckets,
        )
        self._said_unsaved = False
        inspection.know(self, self._run)
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
        inspection.know(model, self._run)

    def __deepcopy__(self, known: dict[int, Any]) -> Any:
        """Return a placeholder: a copied model has no hook that would use a state."""
        del known
        return _NoState()

    def __reduce__(self) -> Any:
        """Pickle as a placeholder, alone or with a model; warn once."""
        if not self._said_unsaved and any(True for b in self._run.buckets for _ in leaves(b.state)):
            self._said_unsaved = True
            LOGGER.warning(
                "what a compressor keeps is not saved with its model, or with its state as an "
                "object: save state.state_dict(), each rank its own, to go on from there. It is %s",
                self._run.planner.compressor,
            )
        return _NoState, ()

    # -- what it keeps, and what it has done ---------------------------------------------------

    def take_in(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take the gradients of one DDP bucket; see `HookExchange.take_in`."""
        return self._exchange.take_in(bucket)

    @property
    def steps(self) -> int:
        """Return the number of exchanges so far."""
        return self._run.steps

    def stats(self) -> CompressionStats:
        """Return the measured traffic of this rank's exchanges so far; see `CompressionStats`.

        The check at the beginning of each step, 16 bytes, is not counted.
        """
        return self._run.stats()

    @outside_inference()
    def discard_step(self) -> None:
        """Roll back the compressor's state, bit-exactly, to that before the last exchange.

        Skips a step: call it after backward, and `zero_grad()` instead of the optimizer's step, on
        all ranks; otherwise the next exchange is an OutOfStepError on all. So a bad batch leaves
        nothing in the residual. The exchange is counted in `stats().skipped`.

        Raises:
            RuntimeError: nothing was exchanged since the last call, or rollback is False.
        """
        run = self._run
        if not run.rollback() and not (run.planner.compressor.is_linear and run.steps):
            raise RuntimeError(
                "discard_step() restores the state from before the last exchange: call it once, "
                "after backward(), and make ddp.compress without rollback=False"
            )

    @outside_inference()
    def retrain(self) -> None:
        """Retrain the compressor, from the next step on; all ranks call it."""
        self._run.retrain()

    @outside_inference()
    def state_dict(self) -> dict[str, Any]:
        """Return the compressor's state of this rank; each rank saves its own."""
        return ddp_checkpoint.save(self._run)

    @outside_inference()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state of `state_dict`; on all ranks, between the same two steps.

        From another rank's state, only replicated fields are loaded.

        Raises:
            CheckpointError: it is of another format, compressor, model or number of ranks.
        """
        ddp_checkpoint.load(self._run, saved)


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
    found: dict[torch.nn.Parameter, bool] = {}
    for module in model.module.modules():
        table = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
        for p in module.parameters(recurse=False):
            found.setdefault(p, table)  # DDP looks at the first module that has it
    return {p for p, is_table in found.items() if is_table}


class _Given:
    """Value that a hook got in place of a state; known only after the first backward has begun."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def __repr__(self) -> str:
        return repr(self._given)

    def compressor(self) -> Any:
        """Return the compressor, if a state can be made of it now.

        Raises:
            TypeError: it is no compressor.
            ValueError: the compressor has to see the backward from its beginning.
        """
        given = self._given
        makes = isinstance(given, type) and issubclass(given, Compressor)
        if not makes and not isinstance(given, Compressor):
            raise TypeError(
                "ddp.hook takes as its state a compressor of hvd_gradcomp, such as "
                f"QSGDCompressor(), or a CompressionState, got {given!r}"
            )
        compressor = given() if makes else given
        if compressor.needs_execution_order:
            raise ValueError(
                "the compressor needs the order in which backward comes by the layers, and the "
                "first backward has begun: call ddp.compress(model, compressor) before it, instead "
                f"of giving ddp.hook a compressor. It is {compressor}"
            )
        return compressor


# Parameter, its reduced gradient, its `grad` before the end of backward, and the version of that.
BeforeDelivery = tuple[torch.nn.Parameter, torch.Tensor, Optional[torch.Tensor], int]


class DDPBucket(NamedTuple):
    """Bucket that a hook was called with.

    Attributes:
        future: gets the reduced bucket.
        buffer: the gradients, flat; or a sparse one.
        pairs: each parameter with its gradient, a view of the buffer.
    """

    future: Any
    buffer: torch.Tensor
    pairs: list[tuple[torch.nn.Parameter, torch.Tensor]]

    @classmethod
    def of(cls, bucket: dist.GradBucket) -> DDPBucket:
        """Return the bucket of a hook's call."""
        buffer = bucket.buffer()
        future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        return cls(future, buffer, _gradients(bucket))

    def before(self) -> list[BeforeDelivery]:
        """Return each dense gradient with what its parameter has before the end of backward."""
        dense = [(p, gradient) for p, gradient in self.pairs if not gradient.is_sparse]
        return [(p, gradient, p.grad, _version(p.grad)) for p, gradient in dense]

    def release(self) -> None:
        """Release the memory until `allocate`, and every `p.grad` that lies in it."""
        if self.buffer.is_sparse:
            return
        buffer, storage = self.buffer, self.buffer.untyped_storage()
        if storage.nbytes() != buffer.nbytes:
            return
        if buffer.is_cuda:
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        for p, _ in self.pairs:
            if p.grad is not None and p.grad.untyped_storage().data_ptr() == storage.data_ptr():
                p.grad = None  # DDP sets it when it has the reduced gradient
        storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the memory if it was released."""
        if not self.buffer.is_sparse and not self.buffer.untyped_storage().nbytes():
            self.buffer.untyped_storage().resize_(self.buffer.nbytes)

    def fill(self, value: float) -> None:
        """Set all gradients to a value."""
        (self.buffer._values() if self.buffer.is_sparse else self.buffer).fill_(value)


def _gradients(bucket: dist.GradBucket) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Return each parameter of a DDP bucket with its gradient, a view of the bucket.

    The bucket has complex gradients as real ones of shape [..., 2]; `gradients()` ignores that.
    """
    buffer, parameters = bucket.buffer(), bucket.parameters()
    if buffer.is_sparse:  # of one parameter, and `gradients()` has none
        return [(parameters[0], buffer)]
    if not any(p.is_complex() for p in parameters):
        return list(zip(parameters, bucket.gradients()))
    pairs, start = [], buffer.storage_offset()
    for p in parameters:
        real = as_real(p.detach())
        view = buffer.as_strided(real.shape, real.stride(), start)
        pairs.append((p, torch.view_as_complex(view) if p.is_complex() else view))
        start += real.numel()
    return pairs


@torch.no_grad()
def deliver(before: Sequence[BeforeDelivery]) -> None:
    """Set the reduced gradients of layers that no rank has used, which DDP does not.

    So residuals of such layers are applied. Without one, such a layer has no gradient, as in DDP.

    Args:
        before: of each bucket.
    """
    for p, reduced, gradient, version in before:
        if p.grad is not gradient or _version(p.grad) != version or not reduced.any():
            continue
        if gradient is None:
            p.grad = reduced.clone(memory_format=torch.preserve_format)
        else:
            gradient.copy_(reduced)


def _version(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None else gradient._version


class GatheredRows:
    """Rows of sparse gradients that have no bucket, in one step.

    Args:
        sparse: gathers them.
    """

    def __init__(self, sparse: SparseGradients) -> None:
        self._sparse = sparse
        self._pending: dict[torch.nn.Parameter, Callable[[], torch.Tensor]] = {}
        self._rows: dict[torch.nn.Parameter, torch.Tensor] = {}

    def gather(self, p: torch.nn.Parameter, name: str, rows: torch.Tensor) -> None:
        """Start to gather the rows of a parameter."""
        self._pending[p] = self._sparse.gather(name, rows)

    def wait(self) -> list[torch.nn.Parameter]:
        """Wait for the rows of all ranks; return the parameters for which they are not finite."""
        self._rows = {p: wait().coalesce() for p, wait in self._pending.items()}
        self._pending.clear()
        return [p for p, rows in self._rows.items() if not rows.values().isfinite().all()]

    def reduced(self, p: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the rows of a parameter, if they were gathered."""
        return self._rows.get(p)

    def clear(self) -> None:
        """Forget the step."""
        self._pending.clear()
        self._rows.clear()


class HookExchange:
    """Exchange of one model's gradients, step by step.

    Args:
        run: reduces the buckets.
        model: whose gradients these are; it is not kept alive.
        group: the ranks.
        transport: of the reducer.
        sparse: gathers rows.
        names: of the parameters.
        releases: release a bucket of DDP while ours has its gradients.
    """

    def __init__(
        self,
        run: Reducer,
        model: DistributedDataParallel,
        group: ProcessGroup,
        transport: C10dBackend,
        sparse: SparseGradients,
        names: Mapping[torch.nn.Parameter, str],
        *,
        releases: bool,
    ) -> None:
        self._run, self._model, self._group = run, weakref.ref(model), group
        self._transport, self._sparse, self._names = transport, sparse, names
        self._releases, self._order_hooks = releases, _watch_order(run.planner)
        self._rows = GatheredRows(sparse)
        self._waiting: list[DDPBucket] = []  # in this step
        self._error: Exception | None = None
        self._joined, self._taking_part = False, group.size()

    @torch.no_grad()
    def take_in(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take the gradients of one DDP bucket; end the exchange with the last one."""
        waiting = DDPBucket.of(bucket)
        first = not self._waiting
        if first:
            self._joined = backward_id() == -1  # `model.join()` calls the hook where no backward is
        self._waiting.append(waiting)
        try:
            if first:
                self._begin()
            if self._error is None:
                self._give(waiting.pairs)
                if self._releases:
                    waiting.release()
            if bucket.is_last() and self._error is None:
                self._finish()
        except Exception as error:
            self._fail(error)
        if bucket.is_last():
            self._hand_out()
        return waiting.future

    def _begin(self) -> None:
        """Begin a step, after a check that all ranks begin the same one.

        Raises:
            OutOfStepError: on all ranks.
        """
        if self._group.closed:
            raise RuntimeError(
                "the exchange of an earlier step has failed, and what was kept is lost: start all "
                "ranks again, from a checkpoint"
            )
        run, planner = self._run, self._run.planner
        run.begin_step()
        # A rank that has joined has no loss that a GradScaler could have scaled.
        kind = Kind.JOINED if self._joined else Kind.STEP
        header = StepHeader(kind, run.steps, policy=int(run.rolls_back_nonfinite))
        headers = self._transport.gather_headers(header, "the beginning of a step")
        if error := compare(headers):
            raise error
        if self._joined:
            run.adopt_policy(bool(values(headers, "policy")))
        self._taking_part = sum(each.takes_part for each in headers.values())
        if planner.arrived is not None and run.steps > 0:
            for handle in self._order_hooks:
                handle.remove()
            orders = self._group.gather_objects(planner.order, list[str])
            planner.reorder(next(filter(None, orders), []))  # who had joined has seen none
        if not planner.judged:
            planner.warn_if_unprofitable()

    def _give(self, pairs: Sequence[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        run = self._run
        run.programs.resume_led()
        earlier = run.programs.running
        for p, gradient in pairs:
            name = self._names.get(p)
            if gradient.is_sparse and name is not None:
                if p not in run.planner.places:
                    self._rows.gather(p, name, gradient.coalesce())
                    continue
                gradient = self._sparse.as_dense(name, gradient)
            if p not in run.planner.places:
                raise ValueError(_fixed_by_ddp(f"one of shape {tuple(p.shape)}"))
            run.mark_ready(p, gradient)
        run.programs.resume_earlier(earlier)

    def _finish(self) -> None:
        """Run all programs to their ends, in the same order on all ranks.

        Raises:
            NonFiniteGradientError: on all ranks.
            Exception: an error of one of this rank's programs.
        """
        run, planner = self._run, self._run.planner
        absent = [b.layout.names[slot] for b in run.buckets for slot in sorted(b.absent)]
        if absent:
            raise ValueError(_fixed_by_ddp(", ".join(absent)))
        if planner.arrived is not None and run.steps == 0:
            planner.fix_order()
        run.programs.wait_all()
        bad = [self._names[p] for p in self._rows.wait()]
        if bad:  # on all ranks, as all have the same rows
            what = f"a rank has a NaN or an infinity in the sparse gradient of {', '.join(bad)}"
            run.programs.errors.append(NonFiniteGradientError(what))
        run.finish_exchange()

    def _hand_out(self) -> None:
        """Return the reduced gradients to DDP; raise an error only after its backward has ended.

        So the model is not left in the middle of a step.
        """
        waiting, self._waiting = self._waiting, []
        error, self._error = self._error, None
        model = self._model()
        factor = 1.0
        if not getattr(model, "_divide_by_initial_world_size", True):  # the user's, of `join`
            factor = self._group.size() / max(self._taking_part, 1)
        for bucket in waiting:
            bucket.allocate()
            for p, gradient in bucket.pairs if error is None else ():
                gradient.copy_(self._reduced_like(gradient, p))
                if factor != 1.0:
                    gradient.mul_(factor)
                self._run.mark_copied(p)
            if error is not None:
                bucket.fill(float("nan"))
            bucket.future.set_result(bucket.buffer)
        if error is not None:
            self._run.finish_step()
            self._rows.clear()
            self._run.sources.clear()
            self._run.scaling.reset()
            if self._joined:
                raise error
            after_backward(lambda: _raise(error))
            return
        self._run.finish_step()
        self._rows.clear()
        if self._joined or self._run.rolled_back or model is None:
            return
        if model.find_unused_parameters or model.static_graph:
            before = [pair for bucket in waiting for pair in bucket.before()]
            after_backward(lambda: deliver(before))

    def _reduced_like(self, gradient: torch.Tensor, p: torch.nn.Parameter) -> torch.Tensor:
        """Return the reduced gradient of a parameter, sparse if DDP's is sparse."""
        rows = self._rows.reduced(p)
        if rows is not None:
            rows = rows.to(gradient.dtype)
            if self._run.rolled_back:
                rows.values().fill_(float("nan"))
            return rows
        reduced = self._run.reduced_grad(p)
        return reduced.to(gradient.dtype).to_sparse(1) if gradient.is_sparse else reduced

    def _fail(self, error: Exception) -> None:
        """Record an error; close the connections unless all ranks have the same error."""
        self._error = error
        if not isinstance(error, (NonFiniteGradientError, OutOfStepError)):
            self._group.hang_up()


def _fixed_by_ddp(which: str) -> str:
    return (
        "DistributedDataParallel and ddp.compress saw other parameters that require a gradient: "
        f"{which}. Freeze and thaw layers before DistributedDataParallel(model), and build both "
        "anew to change them"
    )


def _watch_order(planner: BucketPlanner) -> list[Any]:
    """Register hooks that record the order of the layers in the first backward."""
    named = [] if planner.ordered else planner.named_parameters
    return [p.register_hook(partial(_note, weakref.ref(planner), name)) for name, p in named]


@interpreted
def _note(alive: weakref.ref[BucketPlanner], name: str, _: torch.Tensor) -> None:
    planner = alive()
    if planner is not None and planner.arrived is not None:
        planner.arrived.append(name)


def _raise(error: Exception) -> None:
    raise error
