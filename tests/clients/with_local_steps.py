"""The Trainer, Lightning and Accelerate under torchrun, whose ranks step alone between rounds.

Each trains as a loop of our own that exchanges where the library evaluates and saves; evaluations
are of the global parameters; what was saved halfway goes on to the bit, also after an error. One
process trains several models, beside each other and one after another. No Horovod.

torchrun --standalone --nproc-per-node 2 -m tests.clients.with_local_steps FOLDER [LIBRARY ...]
"""

from __future__ import annotations

import csv
import json
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvd_gradcomp import SparseGDCompressor
from hvd_gradcomp.torch import ddp, trainers
from tests.clients.with_ddp import BATCH, CLIPPED, PASSES, SAMPLES, digest, network, points, vector

EVERY, EPOCHS = 2, 2
STEPS = SAMPLES // (2 * BATCH * PASSES)  # of an epoch, on two ranks
HOW: dict[str, dict[str, Any]] = {
    "averaged": {"compression": None},
    "compressed": {"compression": SparseGDCompressor(density=0.1)},
    "streamed": {"compression": None, "fragments": 2, "delay": 1, "warmup_steps": 2},
}
RESUMED = HOW["compressed"]
OVERFLOWS = 37  # a sample of rank 1 in each library, from which no step is made with a scaler


def scaler_on_cpus() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)


def samples(scaled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = points()
    if scaled:
        x[OVERFLOWS] = torch.inf
    return x, y


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    adam = torch.optim.AdamW(model.parameters(), 0.01)
    return adam, torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.1, 8)


def by_hand(
    how: dict[str, Any], places: Any, exchanges: Collection[int], rates: int, scaled: bool = False
) -> nn.Module:
    """Return a model that was trained in a loop.

    Args:
        how: options of local steps.
        places: of this rank's samples, [passes of an epoch, batch].
        exchanges: steps after which the library evaluates or saves.
        rates: steps of the scheduler for each of the optimizer.
        scaled: train with a scaler, and a sample from which it makes no step.
    """
    model, (x, y) = network(), samples(scaled)
    adam, scheduler = optimizer_of(model)
    scaler = scaler_on_cpus() if scaled else torch.amp.GradScaler("cpu", enabled=False)
    local = ddp.LocalSteps(adam, model.named_parameters(), EVERY, **how)
    for step in range(EPOCHS * STEPS):
        for place in range(PASSES):
            batch = places[PASSES * (step % STEPS) + place]
            scaler.scale(model(x[batch], y[batch])["loss"] / PASSES).backward()
        scaler.unscale_(local)
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
        scaler.step(local)
        scaler.update()
        local.zero_grad()
        for _ in range(rates):
            scheduler.step()
        if step + 1 in exchanges and not local.is_exchanged:
            local.exchange()
    return model


def let_scale(accelerator: Any) -> None:
    """Let an Accelerator scale losses as with float16, which it takes on GPUs alone."""
    accelerator.scaler = scaler = scaler_on_cpus()

    def unscale_gradients() -> None:
        for optimizer in accelerator._optimizers:
            scaler.unscale_(optimizer.optimizer)

    accelerator.unscale_gradients = unscale_gradients


class InterruptedTrainingError(Exception):
    """A user, or an error, that ends a training."""


@contextmanager
def interrupted(after: int) -> Iterator[None]:
    """Interrupt a training after so many steps of AdamW, before they are counted."""
    made = 0

    def interrupt(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal made
        made += isinstance(optimizer, torch.optim.AdamW)
        if made == after:
            raise InterruptedTrainingError

    handle = register_optimizer_step_post_hook(interrupt)
    try:
        yield
        raise AssertionError("the training was not interrupted")
    except InterruptedTrainingError:
        pass
    finally:
        handle.remove()


def by_trainer(
    how: dict[str, Any], folder: str, resume: bool = False, scaled: bool = False, **more: Any
) -> tuple[nn.Module, Any, list[Any], list[dict[str, float]]]:
    """Return the model, the training, digests of what was evaluated, and what was logged."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, (inputs, labels) = network(), samples(scaled)
    evaluated: list[Any] = []

    class Seen(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            evaluated.append([state.global_step, digest(model)])

    rows = [{"x": x, "labels": y} for x, y in zip(inputs, labels)]
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=3,
        save_steps=3,
        report_to="none",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=PASSES,
        max_grad_norm=CLIPPED,
        train_sampling_strategy="sequential",
        disable_tqdm=True,
        logging_steps=1,
        **more,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:16],
        optimizers=optimizer_of(model),
        callbacks=[Seen],
    )
    if scaled:
        let_scale(trainer.accelerator)
    training = trainers.local_steps(trainer, EVERY, **how)
    trainer.train(f"{folder}/checkpoint-6" if resume else None)
    return model, training, evaluated, trainer.state.log_history


def by_lightning(
    how: dict[str, Any], folder: str, resume: bool = False, scaled: bool = False
) -> tuple[nn.Module, Any, list[Any], list[dict[str, float]]]:
    """Return the model, the training, digests of what was evaluated, and what was logged."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    evaluated: list[Any] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, batch: Any) -> torch.Tensor:
            x, y = batch
            return self.model(x, y)["loss"]

        def validation_step(self, batch: Any, place: int) -> None:
            if place == 0 and not self.trainer.sanity_checking:
                evaluated.append([self.trainer.global_step, digest(self.model)])

        def configure_optimizers(self) -> Any:
            adam, scheduler = optimizer_of(self)
            return [adam], [{"scheduler": scheduler, "interval": "step"}]

    module = Module()
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    logger = CSVLogger(folder, version=int(resume))

    class Scaled(MixedPrecision):
        def autocast_context_manager(self) -> Any:
            return nullcontext()

    plugins = [Scaled("16-mixed", "cpu", scaler_on_cpus())] if scaled else None
    trainer = lightning.Trainer(
        accelerator="cpu",
        plugins=plugins,
        devices=dist.get_world_size() if dist.is_initialized() else 2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=EPOCHS,
        accumulate_grad_batches=PASSES,
        gradient_clip_val=CLIPPED,
        use_distributed_sampler=False,
        callbacks=[saving],
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    training = trainers.local_steps(trainer, EVERY, **how)
    data = TensorDataset(*samples(scaled))
    sampler = DistributedSampler(data, trainer.world_size, trainer.global_rank, shuffle=False)
    loaders = DataLoader(data, BATCH, sampler=sampler), DataLoader(data, 16)
    trainer.fit(module, *loaders, ckpt_path=f"{folder}/epoch=0.ckpt" if resume else None)
    logged = []
    if trainer.global_rank == 0:
        with Path(logger.log_dir, "metrics.csv").open() as stream:
            logged = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(stream)]
    return module.model, training, evaluated, logged


def by_accelerate(
    how: dict[str, Any], folder: str, resume: bool = False, scaled: bool = False
) -> tuple[nn.Module, Any, list[Any], list[dict[str, float]]]:
    """Return the model, the training, digests of what was evaluated, and what was logged."""
    from accelerate import Accelerator

    evaluated: list[Any] = []
    rows: list[dict[str, float]] = []
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PASSES)
    if scaled:
        let_scale(accelerator)
    training = trainers.local_steps(accelerator, EVERY, **how)
    model = network()
    loader = DataLoader(TensorDataset(*samples(scaled)), BATCH)
    adam, scheduler = optimizer_of(model)
    # In two calls, the optimizer first.
    optimizer, loader, scheduler = accelerator.prepare(adam, loader, scheduler)
    wrapped = accelerator.prepare(model)
    if resume:
        accelerator.load_state(folder)
    for epoch in range(int(resume), EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(x, y)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), CLIPPED)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                rows.append(training.statistics())
        if epoch == 0:
            accelerator.save_state(folder)
        training.exchange()
        evaluated.append([epoch, digest(model)])
    return model, training, evaluated, rows


LIBRARIES: dict[str, Callable[..., Any]] = {
    "trainer": by_trainer,
    "lightning": by_lightning,
    "accelerate": by_accelerate,
}
CHECKPOINTS = {"trainer": "checkpoint-6", "accelerate": ""}


def places_of(library: str) -> torch.Tensor:
    """Return the places of this rank's samples, in batches."""
    rank, every = dist.get_rank(), torch.arange(SAMPLES)
    if library == "lightning":
        return every[rank::2].view(-1, BATCH)
    return every.view(-1, BATCH)[rank::2]


def checkpoints(library: str, train: Callable[..., Any], folder: str) -> dict[str, Any]:
    """Resume from the middle; then without the file of one rank, where there is one for each."""
    straight, *_ = train(RESUMED, folder)
    again, *_ = train(RESUMED, folder, resume=True)
    cut_off = f"{folder}/interrupted"
    with interrupted(after=EPOCHS * STEPS - 1):
        train(RESUMED, cut_off)
    broken, *_ = train(RESUMED, cut_off, resume=True)
    result: dict[str, Any] = {"resumed": [digest(model) for model in (straight, again, broken)]}
    if library in CHECKPOINTS:
        dist.barrier()
        if dist.get_rank() == 1:
            Path(folder, CHECKPOINTS[library], "local-steps-1-of-2.pt").unlink()
        dist.barrier()
        try:
            train(RESUMED, folder, resume=True)
        except trainers.CheckpointError as error:
            result["missing"] = str(error)
    return result


def best_model(folder: str) -> list[Any]:
    """Return a digest of the model that the Trainer has loaded at the end, and of the best one."""
    from accelerate.state import AcceleratorState

    more = {"load_best_model_at_end": True, "bf16": True}
    model, _, evaluated, logged = by_trainer({}, folder, **more)
    AcceleratorState._reset_state()  # the precision of a process, otherwise
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    losses = {row["step"]: row["eval_loss"] for row in logged if "eval_loss" in row}
    step = min(losses, key=lambda at: losses[at])
    return [digest(model), dict(map(tuple, evaluated)).get(step)]


def by_trainer_twice(folder: str, **options: Any) -> list[str]:
    """Return digests of two trainings of one Trainer, with a model of its own for each."""
    from transformers import Trainer, TrainingArguments

    inputs, labels = points()
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = [{"x": x, "labels": y} for x, y in zip(inputs, labels)]

    def model_init() -> nn.Module:
        return network()

    trainer = Trainer(None, arguments, train_dataset=rows, model_init=model_init)
    training = trainers.local_steps(trainer, EVERY, **options)
    digests = []
    for _ in range(2):
        trainer.train()
        digests.append(f"{digest(trainer.model)} {training.optimizer.steps_made}")
    return digests


def main(folder: str, *libraries: str) -> None:
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for library in libraries or LIBRARIES:
        train, methods = LIBRARIES[library], {}
        for name, how in HOW.items():
            model, training, evaluated, logged = train(how, str(Path(folder, library, name)))
            exchanges = {3, 4, 6, 8} if library == "trainer" else {4, 8}
            rates = 2 if library == "accelerate" else 1  # of its scheduler, by ranks
            right = by_hand(how, places_of(library), exchanges, rates)
            optimizer = training.optimizer
            methods[name] = {
                "off": float((vector(model) - vector(right)).abs().max()),
                "moved": float((vector(model) - vector(network())).abs().max()),
                "digest": digest(model),
                "evaluated": evaluated,
                "steps": optimizer.steps_made,
                "ratio": optimizer.stats().ratio,
                "is_exchanged": optimizer.is_exchanged,
                "logged": [row for row in logged if "compression/bytes_sent" in row],
            }
        result[library] = {"methods": methods}
        result[library] |= checkpoints(library, train, str(Path(folder, library)))
        model, training, *_ = train({}, str(Path(folder, library, "scaled")), scaled=True)
        right = by_hand({}, places_of(library), exchanges, rates, scaled=True)
        result[library]["scaled"] = {
            "off": float((vector(model) - vector(right)).abs().max()),
            "digest": digest(model),
            "steps": training.optimizer.steps_made,
        }
        if library == "trainer":
            result[library]["twice"] = by_trainer_twice(str(Path(folder, "twice")))
            result[library]["best"] = best_model(str(Path(folder, "best")))
        print(library, "has trained", flush=True)
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(result))
    assert not [name for name in sys.modules if name.startswith("horovod.")]
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
