"""Gradient compression in trainers that wrap the model in `DistributedDataParallel` themselves.

    from hvd_gradcomp import QSGDCompressor
    from hvd_gradcomp.torch import trainers

     trainer = Trainer(model, arguments, train_dataset=dataset)
    +trainers.compress(trainer, QSGDCompressor(bits=4))
     trainer.train()

The trainer is the one of Hugging Face Transformers, or Lightning's. Neither library is imported
before it is used.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.monitoring.reports import scalars
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.torch import ddp
from hvd_gradcomp.torch.comm.c10d import ProcessGroup

__all__ = ["CheckpointError", "CompressedTraining", "compress"]

LOGGER = logging.getLogger("hvd_gradcomp")
_KEY = "hvd_gradcomp"  # of the state in Lightning's checkpoints
_LOGGED = ("ratio", "bytes_sent", "residual_ratio", "ms_waited")


def compress(trainer: Any, compression: Any = None, **options: Any) -> CompressedTraining:
    """Compress the gradient exchange of a trainer's next trainings; all ranks call it.

    The ranks are those that `torchrun`, or Lightning's own launcher, has started. What it adds:

    - *Compression* of the model that the trainer has wrapped, before the first step.
    - *Statistics* in what the trainer logs, on its first rank, by the trainer's own interval:
      `compression/ratio`, `compression/bytes_sent`, `compression/residual_ratio`,
      `compression/ms_waited`, and `compression/loss/...` of methods that learn. They cover the
      steps since the last entry.
    - *Checkpoints.* With Transformers each rank writes `compressor-<rank>-of-<size>.pt` into the
      checkpoint's folder, and a training that resumes from a folder of `output_dir` reads it. With
      Lightning the states of all ranks travel to the first one, which needs the memory for them,
      and are in its checkpoint.

    Args:
        trainer: a `transformers.Trainer`, or a `lightning.Trainer` with a strategy that wraps the
            model in `DistributedDataParallel`.
        compression, options: as in `ddp.CompressionState`.

    Returns:
        The `CompressedTraining`, whose `state` is there once the training has begun.

    Raises:
        TypeError: the trainer is something else. From the training: the model is not wrapped in
            `DistributedDataParallel`, so there is a single rank, or another strategy.
        CheckpointError: from the training, on all ranks: a checkpoint has the compressor's states
            of some ranks alone, or of another number of ranks.
    """
    training = CompressedTraining(compression, options)
    libraries = {base.__module__.partition(".")[0] for base in type(trainer).__mro__}
    if "transformers" in libraries:
        _into_transformers(trainer, training)
    elif libraries & {"lightning", "pytorch_lightning"}:  # its two names on PyPI
        package = "lightning.pytorch" if "lightning" in libraries else "pytorch_lightning"
        _into_lightning(trainer, training, import_module(package).Callback)
    else:
        raise TypeError(
            "trainers.compress takes a transformers.Trainer or a lightning.Trainer, got "
            f"{type(trainer).__name__}. For a loop of your own wrap the model in "
            "DistributedDataParallel, and call ddp.compress"
        )
    return training


class CompressedTraining:
    """Compression of a trainer's model, from its first training on.

    Args:
        compression, options: as in `ddp.CompressionState`.
    """

    def __init__(self, compression: Any, options: dict[str, Any]) -> None:
        self._compression, self._options = compression, options
        self._model: Any = None
        self._state: ddp.CompressionState | None = None
        self._logged = CompressionStats()

    @property
    def state(self) -> ddp.CompressionState:
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

    def begin(self, model: Any) -> None:
        """Compress the model that a trainer has wrapped; go on with what earlier trainings kept."""
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                "the trainer has not wrapped the model in DistributedDataParallel: its type is "
                f"{type(model).__name__}. Start several ranks, with torchrun, and take a strategy "
                "that does; sharded models are compressed by fsdp.compress"
            )
        if model is self._model:
            return
        earlier = None if self._state is None else self._state.state_dict()
        self._state = ddp.compress(model, self._compression, **self._options)
        self._model = model
        if earlier is not None:
            self._state.load_state_dict(earlier)

    def statistics(self) -> dict[str, float]:
        """Return scalars of the steps since the last call."""
        now = self.state.stats()
        found = scalars(now - self._logged)
        self._logged = now
        named = {f"compression/{name}" for name in _LOGGED}
        return {k: v for k, v in found.items() if k in named or k.startswith("compression/loss/")}

    def load(self, saved: dict[str, Any] | None, origin: str) -> None:
        """Load this rank's state, if all ranks have one.

        Args:
            saved: what `state.state_dict()` gave; None if there is none.
            origin: of it, for messages.

        Raises:
            CheckpointError: on all ranks, if some have none.
        """
        group = ProcessGroup(self._model.process_group)
        found = group.gather_objects(saved is not None, bool)
        self._logged = self.state.stats()
        if saved is not None and all(found):
            self.state.load_state_dict(saved)
            self._logged = self.state.stats()
        elif any(found):
            without = ", ".join(str(r) for r, there in zip(group.ranks, found) if not there)
            raise CheckpointError(
                f"{origin} has no compressor state of rank {without}, but of others: restore what "
                "is missing, or remove all of it and lose what the compressors had kept"
            )
        else:
            LOGGER.warning(
                "%s has no compressor state: the training goes on without what was kept", origin
            )


def _into_transformers(trainer: Any, training: CompressedTraining) -> None:
    callback: Any = import_module("transformers").TrainerCallback

    def place(arguments: Any, progress: Any) -> Path:
        name = f"compressor-{dist.get_rank()}-of-{dist.get_world_size()}.pt"
        return Path(arguments.output_dir, f"checkpoint-{progress.global_step}", name)

    class Compression(callback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del control
            training.begin(trainer.model_wrapped)
            if state.global_step > 0:
                path = place(args, state)
                saved = torch.load(path, weights_only=True) if path.exists() else None
                training.load(saved, str(path.parent))

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del control
            path = place(args, state)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(training.state.state_dict(), path.with_suffix(".part"))
            os.replace(path.with_suffix(".part"), path)

        def on_log(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            del args, control
            logs = named.get("logs")
            if state.is_world_process_zero and logs is not None and "loss" in logs:
                found = training.statistics()
                logs.update(found)
                if state.log_history:
                    state.log_history[-1].update(found)

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
            training.begin(trainer.strategy.model)
            if resumes or self.loaded is not None:
                training.load(self.mine(self.loaded or []), "the checkpoint")
            self.loaded = None

        def mine(self, states: list[Any]) -> Any:
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
