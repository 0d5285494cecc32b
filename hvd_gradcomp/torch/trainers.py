"""Gradient compression in trainers that wrap or shard the model themselves.

    from hvd_gradcomp import QSGDCompressor
    from hvd_gradcomp.torch import trainers

     trainer = Trainer(model, arguments, train_dataset=dataset)
    +trainers.compress(trainer, QSGDCompressor(bits=4))
     trainer.train()

The trainer is the one of Hugging Face Transformers, Lightning's, or an `Accelerator`. None of these
libraries is imported before it is used.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.monitoring.reports import scalars
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.torch import ddp
from hvd_gradcomp.torch.comm.c10d import ProcessGroup

if TYPE_CHECKING:
    from hvd_gradcomp.torch.fsdp import ShardedCompression  # needs PyTorch 2.8

__all__ = ["CheckpointError", "CompressedTraining", "compress"]

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
      travel to the first one, which needs the memory for them, and are in its checkpoint.

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
            of some ranks alone, or of another number of ranks.
    """
    training = CompressedTraining(compression, options)
    libraries = {base.__module__.partition(".")[0] for base in type(trainer).__mro__}
    if "transformers" in libraries and hasattr(trainer, "callback_handler"):
        _into_transformers(trainer, training)
    elif "accelerate" in libraries and hasattr(trainer, "prepare_model"):
        _into_accelerate(trainer, training)
    elif libraries & {"lightning", "pytorch_lightning"} and hasattr(trainer, "callbacks"):
        # Its two names on PyPI.
        package = "lightning.pytorch" if "lightning" in libraries else "pytorch_lightning"
        _into_lightning(trainer, training, import_module(package).Callback)
    else:
        raise TypeError(
            "trainers.compress takes a transformers.Trainer, a lightning.Trainer or an "
            f"accelerate.Accelerator, got {type(trainer).__name__}. For a loop of your own wrap "
            "the model in DistributedDataParallel, and call ddp.compress"
        )
    return training


class CompressedTraining:
    """Compression of a trainer's model, from its first training on.

    Args:
        compression, options: as in `ddp.CompressionState`, or `fsdp.ShardedCompression`.
    """

    def __init__(self, compression: Any, options: dict[str, Any]) -> None:
        self._compression, self._options = compression, options
        self._model: Any = None
        self._state: ddp.CompressionState | ShardedCompression | None = None
        self._logged = CompressionStats()

    @property
    def state(self) -> ddp.CompressionState | ShardedCompression:
        """Return the state of the exchange, for `stats()` and `verify`.

        Raises:
            RuntimeError: no training has begun.
        """
        if self._state is None:
            raise RuntimeError("the training has not begun: the trainer wraps the model then")
        return self._state

    @property
    def begun(self) -> bool:
        """Return True once a training has begun."""
        return self._state is not None

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
        earlier = None if self._state is None else self._state.state_dict()
        if isinstance(model, DistributedDataParallel):
            self._state = ddp.compress(model, self._compression, **self._options)
        else:
            sharded = _sharded_part(model, mesh)
            fsdp = import_module("hvd_gradcomp.torch.fsdp")
            self._state = fsdp.compress(sharded, self._compression, mesh=mesh, **self._options)
            fsdp.verify(self._state)  # nobody has made the replicas equal, as DDP does
        self._model = model
        if earlier is not None:
            self.state.load_state_dict(earlier)

    def statistics(self) -> dict[str, float]:
        """Return scalars of the steps since the last call."""
        now = self.state.stats()
        values = scalars(now - self._logged)
        self._logged = now
        named = {f"compression/{name}" for name in _LOGGED}
        return {k: v for k, v in values.items() if k in named or k.startswith("compression/loss/")}

    def load(self, saved: dict[str, Any] | None, origin: str) -> None:
        """Load this rank's state, if all ranks have one.

        Args:
            saved: what `state.state_dict()` gave; None if there is none.
            origin: of it, for messages.

        Raises:
            CheckpointError: on all ranks, if some have none.
        """
        self._logged = self.state.stats()
        group = ProcessGroup(getattr(self._model, "process_group", None))
        has_state = group.gather_objects(saved is not None, bool)
        if saved is not None and all(has_state):
            self.state.load_state_dict(saved)
            self._logged = self.state.stats()
        elif any(has_state):
            without = ", ".join(str(r) for r, present in zip(group.ranks, has_state) if not present)
            raise CheckpointError(
                f"{origin} has no compressor state of rank {without}, but of others: restore what "
                "is missing, or remove all of it and lose the compressors' residuals"
            )
        else:
            LOGGER.warning(
                "%s has no compressor state: the training continues with empty residuals", origin
            )


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


def _file_in(folder: str | os.PathLike[str]) -> Path:
    """Return the file of a checkpoint's folder that has this rank's state."""
    return Path(folder, f"compressor-{dist.get_rank()}-of-{dist.get_world_size()}.pt")


def _write_into(folder: str | os.PathLike[str], training: CompressedTraining) -> None:
    """Write this rank's state; it appears in the folder once it is whole."""
    path = _file_in(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(training.state.state_dict(), path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def _read_from(folder: str | os.PathLike[str], training: CompressedTraining) -> None:
    """Load this rank's state, if all ranks have one."""
    path = _file_in(folder)
    saved = torch.load(path, weights_only=True) if path.exists() else None
    training.load(saved, str(folder))


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
    callback: Any = import_module("transformers").TrainerCallback
    _shard_inside_replicas(trainer.accelerator)

    def folder(arguments: Any, progress: Any) -> str:
        return f"{arguments.output_dir}/checkpoint-{progress.global_step}"

    class Compression(callback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del control
            training.begin(trainer.model_wrapped, _mesh_of(trainer.accelerator))
            if state.global_step > 0:
                _read_from(folder(args, state), training)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del control
            _write_into(folder(args, state), training)

        def on_log(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            del args, control
            logs = named.get("logs")
            if state.is_world_process_zero and logs is not None and "loss" in logs:
                statistics = training.statistics()
                logs.update(statistics)
                if state.log_history:
                    state.log_history[-1].update(statistics)

    trainer.add_callback(Compression())
    # Before those that print and write what is logged.
    callbacks = trainer.callback_handler.callbacks
    callbacks.insert(0, callbacks.pop())


def _into_lightning(trainer: Any, training: CompressedTraining, callback: Any) -> None:
    class Compression(callback):
        loaded: list[Any] | None = None
        logged = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            del pl_module
            resumes = not training.begun and trainer.global_step > 0
            training.begin(trainer.strategy.model, getattr(trainer.strategy, "device_mesh", None))
            if resumes or self.loaded is not None:
                training.load(self.of_this_rank(self.loaded or []), "the checkpoint")
            self.loaded = None

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

        def of_this_rank(self, states: list[Any]) -> Any:
            if states and len(states) != dist.get_world_size():
                raise CheckpointError(
                    f"the checkpoint has compressor states of {len(states)} ranks, and here are "
                    f"{dist.get_world_size()}: resume with as many"
                )
            return states[dist.get_rank()] if states else None

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
                dist.gather_object(training.state.state_dict(), to)
                checkpoint[_KEY] = to

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            del trainer, pl_module
            self.loaded = checkpoint.get(_KEY)

    trainer.callbacks.append(Compression())
