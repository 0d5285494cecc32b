"""The Trainer, Lightning and Accelerate under torchrun: they wrap a model, which we compress.

Without compression the updates are those of `DistributedDataParallel`; with it replicas stay equal,
and the loss falls. What they have saved halfway goes on to the bit, and their logs tell how much
was sent. No Horovod.

torchrun --standalone --nproc-per-node 2 -m tests.clients.with_ddp FOLDER [LIBRARY ...]
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvd_gradcomp import (
    Compressor,
    NoneCompressor,
    QSGDCompressor,
    SparseGDCompressor,
    VarianceCompressor,
)
from hvd_gradcomp.torch import trainers

METHODS = (NoneCompressor(), QSGDCompressor(), VarianceCompressor(alpha=0.5, moments="step"))
SAMPLES, BATCH, RATE = 64, 4, 0.1
PASSES = 2  # for each step
STEPS = SAMPLES // (2 * BATCH * PASSES)  # on two ranks
RESUMED = SparseGDCompressor(density=0.1)  # of which a checkpoint has to have the residual
CLIPPED = 0.05
CHECKPOINTS = {"trainer": f"checkpoint-{STEPS // 2}", "accelerate": ""}  # with a file a rank


class Net(nn.Module):
    """Returns its loss beside its output, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layers(x)
        return {"loss": cross_entropy(y, labels), "logits": y}


class Tokens(Net):
    """Its loss is a sum over labels that count, divided by those of all passes and ranks."""

    accepts_loss_kwargs = True

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        y = self.layers(x)
        assert num_items_in_batch is not None
        return {"loss": cross_entropy(y, labels, reduction="sum") / num_items_in_batch, "logits": y}


def network(kind: type[Net] = Net) -> Net:
    torch.manual_seed(1)
    return kind()


def points() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, 8, generator=generator)
    return x, x[:, :4].argmax(1)


def by_trainer(
    compressor: Compressor | None,
    folder: str | None = None,
    resume: bool = False,
    kind: type[Net] = Net,
) -> tuple[nn.Module, Any, list[dict[str, float]]]:
    """Return the model, the state of its exchange, and what was logged."""
    from transformers import Trainer, TrainingArguments

    model, (inputs, labels) = network(kind), points()
    if kind is Tokens:  # ranks and passes have different numbers of labels that count
        labels[torch.arange(len(labels)) % 7 < 4] = -100
    arguments = TrainingArguments(
        output_dir=folder or "unused",
        use_cpu=True,
        ddp_backend="gloo",
        save_strategy="steps" if folder else "no",
        save_steps=STEPS // 2,
        report_to="none",
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=PASSES,
        max_grad_norm=CLIPPED,
        train_sampling_strategy="sequential",
        disable_tqdm=True,
        logging_steps=1,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"x": x, "labels": y} for x, y in zip(inputs, labels)],
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
    )
    training = None
    if compressor is not None:
        training = trainers.compress(trainer, compressor, backward_passes_per_step=PASSES)
    trainer.train(f"{folder}/checkpoint-{STEPS // 2}" if resume else None)
    return model, training and training.state, trainer.state.log_history


def by_lightning(
    compressor: Compressor | None, folder: str | None = None, resume: bool = False
) -> tuple[nn.Module, Any, list[dict[str, float]]]:
    """Return the model, the state of its exchange, and what was logged."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DDPStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, batch: Any) -> torch.Tensor:
            x, y = batch
            return self.model(x, y)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    module = Module()
    # Between epochs: within one it does not know which batches were there.
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    logger = CSVLogger(folder, version=int(resume)) if folder else False
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=2 if folder else 1,
        accumulate_grad_batches=PASSES,
        gradient_clip_val=CLIPPED,
        use_distributed_sampler=False,
        callbacks=[saving] if folder else [],
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    training = None
    if compressor is not None:
        training = trainers.compress(trainer, compressor, backward_passes_per_step=PASSES)
    data = TensorDataset(*points())
    rank, size = trainer.global_rank, trainer.world_size
    sampler = DistributedSampler(data, size, rank, shuffle=False)
    path = f"{folder}/epoch=0.ckpt" if resume else None
    trainer.fit(module, DataLoader(data, BATCH, sampler=sampler), ckpt_path=path)
    logged = []
    if folder and rank == 0:
        with Path(logger.log_dir, "metrics.csv").open() as stream:
            logged = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(stream)]
    return module.model, training and training.state, logged


def by_accelerate(
    compressor: Compressor | None, folder: str | None = None, resume: bool = False
) -> tuple[nn.Module, Any, list[dict[str, float]]]:
    """Return the model, the state of its exchange, and what was logged."""
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    class Rows(GeneralTracker):
        """Keeps what is logged."""

        name, requires_logging_directory, main_process_only = "rows", False, True
        tracker = None

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            pass

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            rows.append(values)

    rows: list[dict[str, float]] = []
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PASSES, log_with=Rows())
    training = None
    if compressor is not None:
        training = trainers.compress(accelerator, compressor, backward_passes_per_step=PASSES)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(TensorDataset(*points()), BATCH)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.init_trackers("test")
    if resume:
        accelerator.load_state(folder)
    for epoch in range(int(resume), 2 if folder else 1):
        for x, y in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(x, y)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), CLIPPED)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and training is not None:
                accelerator.log(training.statistics())
        if folder and epoch == 0:
            accelerator.save_state(folder)
    return model, training and training.state, rows


LIBRARIES: dict[str, Callable[..., tuple[nn.Module, Any, Any]]] = {
    "trainer": by_trainer,
    "lightning": by_lightning,
    "accelerate": by_accelerate,
}


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def digest(model: nn.Module) -> str:
    return hashlib.sha256(vector(model).numpy().tobytes()).hexdigest()


def loss(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(*points())["loss"])


def main(folder: str, *libraries: str) -> None:
    assert not isinstance(network(), DistributedDataParallel)
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for library in libraries or LIBRARIES:
        train = LIBRARIES[library]
        plain, _, _ = train(None)
        first, results = loss(network()), {}
        for compressor in METHODS:
            model, state, _ = train(compressor)
            moved = vector(model) - vector(network())
            results[repr(compressor)] = {
                "off": float((vector(model) - vector(plain)).abs().max()),
                "moved": float(moved.norm()),
                "losses": [first, loss(model)],
                "steps": state.steps,
                "ratio": state.stats().ratio,
                "digest": digest(model),
            }
        result[library] = {"methods": results}
        if library == "trainer":
            counted = [by_trainer(c, kind=Tokens)[0] for c in (None, NoneCompressor())]
            result[library]["tokens"] = float((vector(counted[0]) - vector(counted[1])).abs().max())
        place = str(Path(folder, library))
        straight, state, logged = train(RESUMED, place)
        again, resumed, _ = train(RESUMED, place, resume=True)
        result[library] |= {
            "resumed": [digest(straight), digest(again)],
            "steps": [state.steps, resumed.steps],
            "logged": [row for row in logged if "compression/ratio" in row],
        }
        if library in CHECKPOINTS:
            dist.barrier()
            if dist.get_rank() == 1:
                Path(place, CHECKPOINTS[library], "compressor-1-of-2.pt").unlink()
            dist.barrier()
            try:
                train(RESUMED, place, resume=True)
            except trainers.CheckpointError as error:
                result[library]["missing"] = str(error)
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(result))
    assert not [name for name in sys.modules if name.startswith("horovod.")]
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
