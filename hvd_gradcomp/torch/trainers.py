"""Gradient compression, and local steps, in trainers that wrap or shard the model themselves.

    from hvd_gradcomp import QSGDCompressor
    from hvd_gradcomp.torch import trainers

     trainer = Trainer(model, arguments, train_dataset=dataset)
    +trainers.compress(trainer, QSGDCompressor(bits=4))
     trainer.train()

    +trainers.local_steps(trainer)  # instead: exchange every 5 steps

The trainer is the one of Hugging Face Transformers, Lightning's, or an `Accelerator`. None of these
libraries is imported before it is used.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp.algorithms.combined.local_steps import AVERAGING, EIGHTH
from hvd_gradcomp.algorithms.combined.round_length import Every
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.monitoring.reports import scalars
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.torch import ddp
from hvd_gradcomp.torch.comm.c10d import ProcessGroup
from hvd_gradcomp.torch.local.local_steps import LocalStepsOptimizer
from hvd_gradcomp.torch.local.outer import Outer

if TYPE_CHECKING:
    from hvd_gradcomp.torch.fsdp import ShardedCompression  # needs PyTorch 2.8

__all__ = ["CheckpointError", "CompressedTraining", "LocalTraining", "compress", "local_steps"]

LOGGER = logging.getLogger("hvd_gradcomp")
_KEY = "hvd_gradcomp"  # of the state in Lightning's checkpoints
_FSDPModule: Any = getattr(torch.distributed.fsdp, "FSDPModule", ())
_FSDP1 = "the trainer shards by FSDP1, whose gradients cannot be compressed: take fsdp_version=2"
_SIZES = "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"  # what launchers set
_LOGGED = ("ratio", "bytes_sent", "residual_ratio", "ms_waited")


def compress(trainer: Any, compression: Any = None, **options: Any) -> CompressedTraining:
    """Compress the gradient exchange of a trainer's next trainings; all ranks call it.

    The ranks are those that `torchrun`, or Lightning's own launcher, has started. What it adds:

    - *Compression* of the model that the trainer has wrapped or sharded, before the first step. An
      `Accelerator` compresses the model that its next `prepare` returns.
    - *Statistics* in what the trainer logs, on its first rank, by the trainer's own interval:
      `compression/ratio`, `compression/bytes_sent`, `compression/residual_ratio`,
      `compression/ms_waited`, and `compression/loss/...` of methods that learn. They cover the
      steps since the last entry. With an `Accelerator` log `training.statistics()`.
    - *Checkpoints.* With Transformers and Accelerate each rank writes
      `compressor-<rank>-of-<size>.pt` into the checkpoint's folder. A training that resumes from a
      folder of `output_dir`, and `load_state`, read it. With Lightning the states of all ranks
      travel to the first one, which needs the memory for them, and are in its checkpoint. On
      another number of ranks each takes an equal share of the sum of all residuals.

    Args:
        trainer: a `transformers.Trainer` or an `accelerate.Accelerator`, whose model is wrapped in
            `DistributedDataParallel` or sharded by FSDP2 inside of several replicas; or a
            `lightning.Trainer` with such a strategy.
        compression, options: as in `ddp.CompressionState`; as in `fsdp.ShardedCompression`, if the
            model is sharded.

    Returns:
        The `CompressedTraining`, whose `state` is there once the training has begun.

    Raises:
        TypeError: the trainer is something else. From the training: the model is neither wrapped in
            `DistributedDataParallel` nor sharded by FSDP2, so there is a single rank, or another
            strategy.
        ValueError: the model is sharded, and there are no replicas of it; or an `Accelerator` has
            prepared its model already.
        CheckpointError: from the training, on all ranks: a checkpoint has the compressor's states
            of some ranks alone, or of another number of shards.
    """
    training = CompressedTraining(compression, options)
    library, package = _library_of(trainer, "compress")
    if library == "transformers":
        _into_transformers(trainer, training)
    elif library == "accelerate":
        _into_accelerate(trainer, training)
    else:
        _into_lightning(trainer, training, import_module(package).Callback)
    return training


def local_steps(
    trainer: Any,
    every: Every = 5,
    outer: Outer = AVERAGING,
    compression: Any = EIGHTH,
    **options: Any,
) -> LocalTraining:
    """Let the ranks of a trainer step alone, and exchange every so many steps; all ranks call it.

    `ddp.local_steps` of the model and the optimizer that the trainer prepares, from its next
    training on. What it adds:

    - *Evaluation* of the global parameters. Ranks exchange before the trainer evaluates, predicts
      or saves, and at the ends of epochs and trainings, if any of them has stepped since the last
      round. So `load_best_model_at_end`, early stopping and saved models mean the same as ever.
      In a loop with an `Accelerator` call `training.exchange()` before you evaluate or save.
    - *Statistics* and *checkpoints* as `compress` has them. Each rank's file,
      `local-steps-<rank>-of-<size>.pt`, has its optimizer's state and what its compressor keeps.
      Another number of ranks goes on from the first rank's optimizer, each with an equal share of
      what all compressors kept. Without such files a training goes on from the first rank's state,
      with a warning.

    A scheduler of the trainer's drives the inner optimizer, and gradients are the rank's own: they
    are clipped by each rank's own norm, and accumulated as ever.

    Default: `every=5` and `compression=ChunkedTopKCompressor(k=512, values="int4", decay=1)`, with
    the mean of changes as the outer step. It sends one element in 8, in 4 bits, and reached a loss
    soonest in docs/worth.md. With an outer momentum, or a delay, give `compression=None`, which
    sends all elements, or `Int8Compressor()`.

    Args:
        trainer: as in `compress`, with `DistributedDataParallel`, and one optimizer.
        every, outer, compression, options: as in `ddp.local_steps`.

    Returns:
        The `LocalTraining`, whose `optimizer` is there once the training has begun.

    Raises:
        TypeError: the trainer is something else. From the training: the model is not wrapped in
            `DistributedDataParallel`, so there is a single rank, or another strategy.
        ValueError: `deadline=`; an `Accelerator` has prepared its model already; from the training,
            on all ranks: there are several models or optimizers, and as in `ddp.local_steps`.
        CheckpointError: from the training, on all ranks: a checkpoint has the states of some ranks
            alone.
    """
    if options.get("deadline") is not None:
        raise ValueError(
            "deadline= lets ranks make different numbers of steps, and a trainer logs, evaluates "
            "and saves after as many on all: leave deadline= out, or train in a loop of your own"
        )
    training = LocalTraining(
        {"every": every, "outer": outer, "compression": compression, **options}
    )
    library, package = _library_of(trainer, "local_steps")
    if library == "transformers":
        _locally_in_transformers(trainer, training)
    elif library == "accelerate":
        _locally_in_accelerate(trainer, training)
    else:
        precision = import_module(f"{package}.plugins").Precision
        _locally_in_lightning(trainer, training, import_module(package).Callback, precision)
    return training


def _library_of(trainer: Any, function: str) -> tuple[str, str]:
    """Return the library that a trainer is of, and the package that has its callbacks.

    Args:
        trainer: of any type.
        function: of this module, for messages.

    Raises:
        TypeError: it is none of those that are known.
    """
    libraries = {base.__module__.partition(".")[0] for base in type(trainer).__mro__}
    if "transformers" in libraries and hasattr(trainer, "callback_handler"):
        return "transformers", "transformers"
    if "accelerate" in libraries and hasattr(trainer, "prepare_model"):
        return "accelerate", "accelerate"
    if libraries & {"lightning", "pytorch_lightning"} and hasattr(trainer, "callbacks"):
        # Its two names on PyPI.
        package = "lightning.pytorch" if "lightning" in libraries else "pytorch_lightning"
        return "lightning", package
    raise TypeError(
        f"trainers.{function} takes a transformers.Trainer, a lightning.Trainer or an "
        f"accelerate.Accelerator, got {type(trainer).__name__}. For a loop of your own wrap "
        f"the model in DistributedDataParallel, and call ddp.{function}"
    )


class SavedStates(NamedTuple):
    """States of all ranks in a checkpoint, as one rank sees them.

    Attributes:
        size: number of ranks that saved; 0 if no state is there.
        missing: ranks whose states this rank needs, and which are not there.
        read: returns the state of a rank.
    """

    size: int
    missing: list[int]
    read: Callable[[int], dict[str, Any]]


class _Training(ABC):
    """Exchange of a trainer's model, and its state in the trainer's checkpoints and logs.

    Attributes:
        file: beginning of the name of each rank's file in a checkpoint's folder.
        noun: what such a file has, for messages.
        remedy: what is lost without it, for messages.
        carried_over: what another number of ranks goes on with, for messages.
    """

    file: str
    noun: str
    remedy: str
    carried_over: str

    def __init__(self) -> None:
        self._exchange: Any = None
        self._logged = CompressionStats()

    @property
    def exchange_state(self) -> Any:
        """Return what counts the traffic, and saves and loads what this rank keeps.

        It has `stats`, `state_dict` and `load_state_dict`.

        Raises:
            RuntimeError: no training has begun.
        """
        if self._exchange is None:
            raise RuntimeError("the training has not begun: the trainer wraps the model then")
        return self._exchange

    @property
    @abstractmethod
    def process_group(self) -> Any:
        """Return the ranks of the training; None for all."""

    @property
    def begun(self) -> bool:
        """Return True once a training has begun."""
        return self._exchange is not None

    def statistics(self) -> dict[str, float]:
        """Return scalars of the steps since the last call."""
        now = self.exchange_state.stats()
        values = scalars(now - self._logged)
        self._logged = now
        named = {f"compression/{name}" for name in _LOGGED}
        return {k: v for k, v in values.items() if k in named or k.startswith("compression/loss/")}

    def load(self, saved: SavedStates, origin: str) -> None:
        """Load what the ranks of a checkpoint saved, of any number, if nothing of it is missing.

        Args:
            saved: as this rank sees them.
            origin: of them, for messages.

        Raises:
            CheckpointError: on all ranks, if some states are missing, or do not fit.
        """
        self._logged = self.exchange_state.stats()
        group = ProcessGroup(self.process_group)
        size, rank = dist.get_world_size(), dist.get_rank()
        sizes = group.gather_objects(saved.size, int)
        lacking = saved.missing or [rank] * (saved.size != max(sizes))
        missing = sorted({*itertools.chain(*group.gather_objects(lacking, list[int]))})
        if missing:
            ranks = ", ".join(map(str, missing))
            files = ", ".join(self.file_of(number, max(sizes)) for number in missing)
            raise CheckpointError(
                f"{origin} has no {self.noun} of rank {ranks}, but of others: restore {files}, or "
                f"remove all of it and lose {self.remedy}"
            )
        if not saved.size:
            LOGGER.warning(
                "%s has no %s: the training continues without %s", origin, self.noun, self.remedy
            )
            return
        if saved.size != size and rank == 0:
            LOGGER.warning(
                "%s was saved by %d ranks, and here are %d: %s",
                *(origin, saved.size, size, self.carried_over),
            )
        # A rank of as many needs its own alone.
        numbers = sorted(range(saved.size), key=lambda number: number != rank)
        self.exchange_state.load_states(map(saved.read, numbers))
        self._logged = self.exchange_state.stats()

    def file_of(self, rank: int | str, size: int | str) -> str:
        """Return the name of a rank's file in a checkpoint's folder."""
        return f"{self.file}-{rank}-of-{size}.pt"


class CompressedTraining(_Training):
    """Compression of a trainer's model, from its first training on.

    Args:
        compression, options: as in `ddp.CompressionState`, or `fsdp.ShardedCompression`.
    """

    file, noun, remedy = "compressor", "compressor state", "the compressors' residuals"
    carried_over = "each takes an equal share of the sum of their residuals"

    def __init__(self, compression: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self._compression, self._options = compression, options
        self._model: Any = None

    @property
    def process_group(self) -> Any:
        return getattr(self._model, "process_group", None)

    @property
    def state(self) -> ddp.CompressionState | ShardedCompression:
        """Return the state of the exchange, for `stats()` and `verify`.

        Raises:
            RuntimeError: no training has begun.
        """
        state: ddp.CompressionState | ShardedCompression = self.exchange_state
        return state

    def begin(self, model: Any, mesh: Any = None) -> None:
        """Compress the model that a trainer has wrapped; go on with what earlier trainings kept.

        Args:
            model: a `DistributedDataParallel`, or one that `fully_shard` was called on.
            mesh: a `DeviceMesh` of replicas and shards; None if the trainer has none.

        Raises:
            TypeError: the model is something else.
            ValueError: a sharded model has no replicas, or parameters outside of it are trained.
            DivergedError: on all ranks, if replicas of a sharded model differ.
        """
        model = getattr(model, "_orig_mod", model)  # of one that was compiled once it was wrapped
        if model is self._model:
            return
        earlier = self.state.state_dict() if self.begun else None
        if isinstance(model, DistributedDataParallel):
            self._exchange = ddp.compress(model, self._compression, **self._options)
        else:
            sharded = _sharded_part(model, mesh)
            fsdp = import_module("hvd_gradcomp.torch.fsdp")
            self._exchange = fsdp.compress(sharded, self._compression, mesh=mesh, **self._options)
            fsdp.verify(self._exchange)  # nobody has made the replicas equal, as DDP does
        self._model = model
        if earlier is not None:
            self.state.load_state_dict(earlier)


class LocalTraining(_Training):
    """Local steps of a trainer's model, from its first training on.

    Args:
        options: of `ddp.local_steps`.
    """

    file, noun, remedy = "local-steps", "state of local steps", "each rank's optimizer state"
    carried_over = (
        "all go on from the optimizer's state of the first rank, each with an equal share of the "
        "sum of their residuals"
    )

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self._options = options

    @property
    def process_group(self) -> Any:
        return self._options.get("process_group")

    @property
    def optimizer(self) -> LocalStepsOptimizer:
        """Return the optimizer that steps locally, for `rounds`, `stats()` and `verify`.

        Raises:
            RuntimeError: no training has begun.
        """
        optimizer: LocalStepsOptimizer = self.exchange_state
        return optimizer

    def exchange(self) -> None:
        """Exchange now, if this rank has stepped since the last round; all ranks call it.

        Afterwards their parameters are the global ones. A trainer's evaluations and checkpoints
        begin with it.
        """
        if self.begun and not self.optimizer.is_exchanged:
            self.optimizer.exchange()

    def begin(self, model: Any, optimizer: torch.optim.Optimizer) -> LocalStepsOptimizer:
        """Return the optimizer that steps locally in the place of the trainer's.

        Args:
            model: a `DistributedDataParallel`.
            optimizer: that the user or the trainer has made.

        Raises:
            TypeError: the model is something else.
            ValueError, MismatchError: as in `ddp.local_steps`.
        """
        model = getattr(model, "_orig_mod", model)  # of one that was compiled once it was wrapped
        if not isinstance(model, DistributedDataParallel):
            sharded = _FSDPModule, FullyShardedDataParallel
            kind = f"its type is {type(model).__name__}. {_how_to_wrap()}"
            if any(isinstance(module, sharded) for module in model.modules()):
                kind = "it is sharded, which trainers.local_steps does not take"
            raise TypeError(
                f"the trainer has not wrapped the model in DistributedDataParallel: {kind}"
            )
        local = ddp.local_steps(model, optimizer, **self._options)
        local.library_exchanges = True
        self._exchange, self._logged = local, CompressionStats()
        return local


def _sharded_part(model: Any, mesh: Any) -> Any:
    """Return the outermost module that `fully_shard` was called on.

    Raises:
        TypeError: there is none.
        ValueError: there are several, it has no replicas, or parameters outside of it are trained.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, _FSDPModule)]
    tops = [n for n in names if not any(n != o and (not o or n.startswith(f"{o}.")) for o in names)]
    if not tops:
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise TypeError(f"{_FSDP1}, Lightning's ModelParallelStrategy, or fully_shard")
        raise TypeError(
            "the trainer has not wrapped the model in DistributedDataParallel, nor sharded it by "
            f"fully_shard: its type is {type(model).__name__}. {_how_to_wrap()}"
        )
    if mesh is None:
        raise ValueError(
            "the model is sharded by fully_shard, and the trainer has no mesh of replicas and "
            "shards: only traffic between replicas is compressed. Take Accelerate's "
            "ParallelismConfig(dp_replicate_size=..., dp_shard_size=...), or Lightning's "
            "ModelParallelStrategy; for a loop of your own call fsdp.compress"
        )
    if mesh.size(0) < 2:
        raise ValueError(
            f"the model is sharded over all {mesh.size()} ranks, so it has a single replica, and "
            "nothing travels that could be compressed: take two replicas or more, in Lightning "
            "ModelParallelStrategy(data_parallel_size=replicas, tensor_parallel_size=shards)"
        )
    root = model.get_submodule(tops[0])
    inside = set(root.parameters())
    outside = [name for name, p in model.named_parameters() if p.requires_grad and p not in inside]
    if len(tops) > 1 or outside:
        raise ValueError(
            f"{', '.join(tops)} and {', '.join(outside) or 'nothing else'} are trained apart: call "
            "fully_shard once more, on a module that has all of them"
        )
    return root


def _how_to_wrap() -> str:
    """Return what lets a trainer wrap its model, for messages."""
    started = max(int(os.environ.get(name) or 1) for name in _SIZES)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks > 1:
        return (
            f"There are {ranks} ranks, which the trainer does not train by one of these: take such "
            'a strategy, in Lightning "ddp" or ModelParallelStrategy'
        )
    if started > 1:
        return (
            f"{started} ranks were started, and each trains alone, as Accelerate does without a "
            "GPU until it is told to use CPUs: pass Accelerator(cpu=True), or "
            "TrainingArguments(use_cpu=True)"
        )
    return "Start several ranks, with torchrun, and take a strategy that does"


def _write_into(folder: str | os.PathLike[str], training: _Training) -> None:
    """Write this rank's state; it appears in the folder once it is whole."""
    size = dist.get_world_size()
    path = Path(folder, training.file_of(dist.get_rank(), size))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(training.exchange_state.state_dict(), path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)
    for file, _, ranks in _files_in(folder, training):
        if ranks != size:  # of an earlier training that has saved into this folder
            file.unlink(missing_ok=True)


def _read_from(folder: str | os.PathLike[str], training: _Training) -> None:
    """Load this rank's state, or its share of those of another number of ranks."""
    training.load(_states_in(folder, training), str(folder))


def _states_in(folder: str | os.PathLike[str], training: _Training) -> SavedStates:
    """Return the states in a checkpoint's folder: those of as many ranks, if there are any."""
    rank, here = dist.get_rank(), dist.get_world_size()
    by_size: dict[int, set[int]] = {}
    for _, number, ranks in _files_in(folder, training):
        by_size.setdefault(ranks, set()).add(number)
    size = here if here in by_size else max(by_size, default=0)
    needed = {rank} if size == here else {*range(size)}
    missing = sorted(needed - by_size.get(size, set()))

    def read(number: int) -> dict[str, Any]:
        path = Path(folder, training.file_of(number, size))
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return saved

    return SavedStates(size, missing, read)


def _files_in(
    folder: str | os.PathLike[str], training: _Training
) -> Iterator[tuple[Path, int, int]]:
    """Yield each rank's file in a checkpoint's folder, with the rank and the number of ranks."""
    for path in Path(folder).glob(training.file_of("*", "*")):
        numbers = re.fullmatch(training.file_of(r"(\d+)", r"(\d+)"), path.name)
        if numbers:
            yield path, int(numbers[1]), int(numbers[2])


def _into_accelerate(accelerator: Any, training: CompressedTraining) -> None:
    if getattr(accelerator, "_models", None):
        raise ValueError(
            "the Accelerator has prepared a model already: call trainers.compress before "
            "accelerator.prepare, or ddp.compress on the model that it has returned"
        )

    begun: list[Any] = []

    def begin(model: Any) -> None:
        if begun and begun[0] is not model:
            raise ValueError(
                "the Accelerator prepares a second model, and trainers.compress is for one: call "
                "ddp.compress on each that accelerator.prepare returns instead"
            )
        training.begin(model, _mesh_of(accelerator))
        begun[:] = [model]

    prepare_model = accelerator.prepare_model  # which `prepare` calls, unless it shards

    @functools.wraps(prepare_model)
    def prepare_and_compress(
        model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        prepared = prepare_model(model, device_placement, evaluation_mode)
        if not evaluation_mode:
            begin(prepared)
        return prepared

    accelerator.prepare_model = prepare_and_compress
    _shard_inside_replicas(accelerator, begin)

    def save(models: Any, weights: Any, folder: str) -> None:
        del models, weights
        if training.begun:
            _write_into(folder, training)

    def load(models: Any, folder: str) -> None:
        del models
        _read_from(folder, training)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _shard_inside_replicas(accelerator: Any, begin: Callable[[Any], None] | None = None) -> None:
    """Let an Accelerator's FSDP2 shard inside of each replica, and exchange nothing between them.

    `prepare` passes `fully_shard` the dimensions that its `ParallelismConfig` names: from now on
    that of the shards alone.

    Args:
        accelerator: of any kind; if it does not shard, it is left as it is.
        begin: called with the model that `prepare` has sharded.

    Raises:
        TypeError: it shards by FSDP1.
        ValueError: its mesh has no replicas, or other dimensions.
    """
    if accelerator.distributed_type != "FSDP":
        return
    if not accelerator.is_fsdp2:
        raise TypeError(f"{_FSDP1}, and replicas")
    config = accelerator.parallelism_config
    if config is None or not config.dp_replicate_enabled:
        raise ValueError(
            "the trainer shards the model over all ranks, so it has a single replica, and nothing "
            "travels that could be compressed: pass it parallelism_config=ParallelismConfig("
            "dp_replicate_size=hosts, dp_shard_size=ranks_of_a_host)"
        )
    if config.non_dp_dim_names:
        raise ValueError(
            f"the trainer's mesh has {', '.join(config.non_dp_dim_names)} beside replicas and "
            "shards, which was not tried: leave it at 1"
        )
    inside = copy.copy(config)
    inside.__class__ = type(
        "InsideReplicas", (type(config),), {"fsdp_dim_names": property(lambda _: ["dp_shard"])}
    )
    prepare = accelerator.prepare

    @functools.wraps(prepare)
    def prepare_inside(*arguments: Any, **named: Any) -> Any:
        accelerator.state.parallelism_config = inside
        try:
            prepared = prepare(*arguments, **named)
        finally:
            accelerator.state.parallelism_config = config
        for each in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
            if begin is not None and isinstance(each, _FSDPModule):
                begin(each)
        return prepared

    accelerator.prepare = prepare_inside


def _mesh_of(accelerator: Any) -> Any:
    """Return the mesh of replicas and shards; None if the model is not sharded among replicas."""
    config = accelerator.parallelism_config
    if accelerator.distributed_type != "FSDP" or config is None:
        return None
    return accelerator.torch_device_mesh["dp_replicate", "dp_shard"]


def _into_transformers(trainer: Any, training: CompressedTraining) -> None:
    _shard_inside_replicas(trainer.accelerator)

    def begin() -> None:
        training.begin(trainer.model_wrapped, _mesh_of(trainer.accelerator))

    _add_callback(trainer, training, begin)


def _add_callback(trainer: Any, training: _Training, begin: Callable[[], None]) -> None:
    """Let a Trainer of Transformers save, load and log what belongs to the exchange.

    Args:
        trainer: the Trainer.
        training: which it is about to begin.
        begin: called when a training begins, before anything is loaded.
    """
    callback: Any = import_module("transformers").TrainerCallback

    def folder(arguments: Any, progress: Any) -> str:
        return f"{arguments.output_dir}/checkpoint-{progress.global_step}"

    class Exchange(callback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del control
            begin()
            if state.global_step > 0:
                _read_from(folder(args, state), training)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del control
            if not args.save_only_model:
                _write_into(folder(args, state), training)

        def on_log(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            del args, control
            logs = named.get("logs")
            if state.is_world_process_zero and logs is not None and "loss" in logs:
                statistics = training.statistics()
                logs.update(statistics)
                if state.log_history:
                    state.log_history[-1].update(statistics)

    trainer.add_callback(Exchange())
    # Before those that print and write what is logged.
    callbacks = trainer.callback_handler.callbacks
    callbacks.insert(0, callbacks.pop())


def _locally_in_transformers(trainer: Any, training: LocalTraining) -> None:
    callback: Any = import_module("transformers").TrainerCallback
    _wrap_optimizer(trainer.accelerator, training)
    for name in ("evaluate", "predict", "save_model"):
        _exchange_before(trainer, name, training)

    def begin() -> None:
        if not training.begun:
            raise TypeError(
                "the Trainer has prepared no model and optimizer by its Accelerator, as it does "
                "for DistributedDataParallel"
            )
        # Ranks would wait for each other's counts in each step.
        counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        if counts and trainer.args.average_tokens_across_devices:
            trainer.args.average_tokens_across_devices = False
            LOGGER.warning(
                "average_tokens_across_devices=False: each rank divides its loss by its own number "
                "of tokens, since ranks that step alone do not wait for each other's"
            )

    class Ends(callback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Exchange before the best model is loaded, which is not trained on."""
            del args, state, control
            training.exchange()

    _add_callback(trainer, training, begin)
    trainer.add_callback(Ends())


def _exchange_before(library: Any, name: str, training: LocalTraining) -> None:
    """Let a method of a library's object begin with an exchange; all ranks call it."""
    method = getattr(library, name)

    @functools.wraps(method)
    def exchanged(*arguments: Any, **named: Any) -> Any:
        training.exchange()
        return method(*arguments, **named)

    setattr(library, name, exchanged)


def _wrap_optimizer(accelerator: Any, training: LocalTraining) -> None:
    """Let local steps begin with the model and the optimizer that an Accelerator prepares.

    Its optimizer stays around ours: it knows which pass of several is a step, and the scaler. After
    `free_memory`, which libraries call between two trainings, another model begins another one.
    """
    models: list[Any] = []
    optimizers: list[Any] = []
    begun_with: Any = None
    prepare, free_memory = accelerator.prepare, accelerator.free_memory

    @functools.wraps(prepare)
    def prepare_locally(*arguments: Any, **named: Any) -> Any:
        nonlocal begun_with
        prepared = prepare(*arguments, **named)
        for each in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
            known = models if isinstance(each, torch.nn.Module) else optimizers
            if _trains(each) and not any(each is other for other in known):
                known.append(each)
        if len(models) > 1 or len(optimizers) > 1:
            raise ValueError(
                f"the Accelerator prepares {len(models)} models and {len(optimizers)} optimizers, "
                "and trainers.local_steps is for one of each: call accelerator.free_memory() "
                "between two trainings, or ddp.local_steps in a loop of your own"
            )
        if models and optimizers and models[0] is not begun_with:
            (begun_with,), (optimizer,) = models, optimizers
            plain = optimizer.optimizer
            if isinstance(plain, LocalStepsOptimizer):  # its model was wrapped anew
                plain = plain.inner
            optimizer.__setstate__({"optimizer": training.begin(begun_with, plain)})
        return prepared

    @functools.wraps(free_memory)
    def forget(*objects: Any) -> Any:
        models.clear()
        optimizers.clear()
        return free_memory(*objects)

    accelerator.prepare, accelerator.free_memory = prepare_locally, forget


def _trains(prepared: Any) -> bool:
    """Return True for an optimizer, and for a model with parameters that are trained."""
    if isinstance(prepared, torch.nn.Module):
        return any(p.requires_grad for p in prepared.parameters())
    return isinstance(prepared, torch.optim.Optimizer)


def _locally_in_accelerate(accelerator: Any, training: LocalTraining) -> None:
    if getattr(accelerator, "_models", None):
        raise ValueError(
            "the Accelerator has prepared a model already: call trainers.local_steps before "
            "accelerator.prepare"
        )
    _wrap_optimizer(accelerator, training)
    for name in ("save_state", "save_model"):
        _exchange_before(accelerator, name, training)
    folders: list[str] = []
    load_state = accelerator.load_state

    @functools.wraps(load_state)
    def load_own_state(*arguments: Any, **named: Any) -> Any:
        """Load this rank's state after that of the first rank, which the library loads."""
        loaded = load_state(*arguments, **named)
        _read_from(folders.pop(), training)
        return loaded

    def save(models: Any, weights: Any, folder: str) -> None:
        del models, weights
        if training.begun:
            _write_into(folder, training)

    def load(models: Any, folder: str) -> None:
        del models
        folders[:] = [folder]

    accelerator.load_state = load_own_state
    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _callback_of(library_callback: Any, training: _Training) -> Any:
    """Return a class of Lightning's callbacks that save, load and log what belongs to an exchange.

    Args:
        library_callback: Lightning's base class.
        training: of the trainer; `begin` of the class begins it.
    """

    class Exchange(library_callback):
        loaded: list[Any] | None = None
        logged = 0

        def begin(self, trainer: Any, pl_module: Any) -> None:
            """Begin the training with what the strategy has prepared."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            resumes = not training.begun and trainer.global_step > 0
            self.begin(trainer, pl_module)
            if resumes or self.loaded is not None:
                states = self.loaded or []
                saved = SavedStates(len(states), [], states.__getitem__)
                training.load(saved, "the checkpoint")
            self.loaded = None

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            step = trainer.global_step
            if step == self.logged or step % trainer.log_every_n_steps:
                return
            self.logged = step
            if trainer.is_global_zero:
                pl_module.log_dict(training.statistics(), rank_zero_only=True)

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            del pl_module
            if training.begun:
                states: list[Any] = [None] * dist.get_world_size()
                to = states if trainer.is_global_zero else None
                dist.gather_object(training.exchange_state.state_dict(), to)
                checkpoint[_KEY] = to

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            del trainer, pl_module
            self.loaded = checkpoint.get(_KEY)

    return Exchange


def _into_lightning(trainer: Any, training: CompressedTraining, callback: Any) -> None:
    class Compression(_callback_of(callback, training)):  # type: ignore[misc]
        def begin(self, trainer: Any, pl_module: Any) -> None:
            del pl_module
            training.begin(trainer.strategy.model, getattr(trainer.strategy, "device_mesh", None))

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            """Exchange accumulated gradients of a sharded model once, which Lightning does not."""
            del batch
            passes = trainer.accumulate_grad_batches
            if passes > 1 and pl_module.automatic_optimization:
                last = (batch_idx + 1) % passes == 0 or trainer.is_last_batch
                for module in pl_module.modules():
                    if isinstance(module, _FSDPModule):
                        module.set_requires_all_reduce(last, recurse=False)

    trainer.callbacks.append(Compression())


def _scaler_of(trainer: Any) -> Any:
    """Return the GradScaler of a Lightning trainer; None if it does not scale."""
    return getattr(trainer.precision_plugin, "scaler", None)


def _locally_in_lightning(
    trainer: Any, training: LocalTraining, callback: Any, precision: Any
) -> None:
    """Let a Lightning trainer step locally.

    Args:
        trainer, training: as in `local_steps`.
        callback, precision: Lightning's base classes of callbacks, and of plugins for precision.
    """

    class Locally(_callback_of(callback, training)):  # type: ignore[misc]
        begun_with: Any = None  # the model of the strategy, which each `fit` wraps anew

        def begin(self, trainer: Any, pl_module: Any) -> None:
            del pl_module
            strategy = trainer.strategy
            if self.begun_with is strategy.model:
                return
            if len(strategy.optimizers) != 1:
                raise ValueError(
                    f"configure_optimizers returns {len(strategy.optimizers)} optimizers, and "
                    "trainers.local_steps is for one: call ddp.local_steps in a loop of your own"
                )
            strategy.optimizers = [training.begin(strategy.model, strategy.optimizers[0])]
            self.begun_with = strategy.model

        def on_before_optimizer_step(
            self, trainer: Any, pl_module: Any, optimizer: torch.optim.Optimizer
        ) -> None:
            """Unscale gradients before they are clipped, as the library does for a plain one."""
            del pl_module
            if (scaler := _scaler_of(trainer)) is not None:
                scaler.unscale_(optimizer)

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            del trainer, pl_module
            training.exchange()

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            del trainer, pl_module
            training.exchange()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            del trainer, pl_module
            training.exchange()

    if _scaler_of(trainer) is not None:
        # Its own refuses to clip for an optimizer whose step takes scaled gradients.
        plugin = trainer.precision_plugin
        plugin.clip_gradients = functools.partial(precision.clip_gradients, plugin)
    _exchange_before(trainer, "save_checkpoint", training)
    trainer.callbacks.insert(0, Locally())  # before those that save and evaluate
