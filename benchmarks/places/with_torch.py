"""Trainings with PyTorch: `by_PLACE(method, clock)` trains by the lines that README has."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.moments import GPT
from benchmarks.places.clock import LENGTH, RATE, STEPS, WIDTH, WINDOWS, WORDS, Clock
from hvd_gradcomp import QSGDCompressor
from hvd_gradcomp.torch import ddp, fsdp, trainers


class WithLoss(GPT):
    """GPT that returns its loss if it is given labels, as a model of Transformers does."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        scores = super().forward(tokens)
        if labels is None:
            return scores
        return {"loss": functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


def gpt() -> nn.Module:
    torch.manual_seed(1)
    return WithLoss(WIDTH, WORDS, LENGTH)


def windows() -> Any:
    return torch.randint(0, WORDS, (WINDOWS, LENGTH))


def loop(model: Any, optimizer: Any, clock: Clock) -> None:
    """Train as everybody does."""
    for _ in range(STEPS):
        tokens = windows()
        optimizer.zero_grad()
        model(tokens, tokens)["loss"].backward()
        optimizer.step()
        clock.step()


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def alone(place: str) -> tuple[float, int]:
    """Return the milliseconds of a step without an exchange, and the number of parameters."""
    model, clock = gpt(), Clock()
    parameters = sum(p.numel() for p in model.parameters())
    if place == "fsdp":
        shard(model, mesh_of_hosts()["inside"])
    loop(model, adamw(model), clock)
    return clock.ms, parameters


def mesh_of_hosts() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("hosts", "inside"))


def shard(model: Any, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def by_ddp(method: str, clock: Clock) -> None:
    model = DistributedDataParallel(gpt())
    optimizer = adamw(model)
    if method == "qsgd":
        ddp.compress(model, QSGDCompressor(bits=4))
    elif method == "local":
        optimizer = ddp.local_steps(model, optimizer)
    loop(model, optimizer, clock)


def by_fsdp(method: str, clock: Clock) -> None:
    mesh, model = mesh_of_hosts(), gpt()
    shard(model, mesh if method == "own" else mesh["inside"])
    optimizer = adamw(model)
    if method == "qsgd":
        fsdp.compress(model, QSGDCompressor(), mesh=mesh)
    elif method == "local":
        optimizer = fsdp.local_steps(model, optimizer, mesh=mesh)
    loop(model, optimizer, clock)


def add_to(trainer: Any, method: str) -> None:
    """Add README's line."""
    if method == "qsgd":
        trainers.compress(trainer, QSGDCompressor())
    elif method == "local":
        trainers.local_steps(trainer)


def by_trainer(method: str, clock: Clock) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.step()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            max_steps=STEPS,
            per_device_train_batch_size=WINDOWS,
            learning_rate=RATE,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        samples = [{"tokens": row, "labels": row} for _ in range(100) for row in windows()]
        trainer = Trainer(gpt(), arguments, train_dataset=samples, callbacks=[Watch()])
        add_to(trainer, method)
        trainer.train()


def by_accelerate(method: str, clock: Clock) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    add_to(accelerator, method)
    model = gpt()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for _ in range(STEPS):
        tokens = windows()
        accelerator.backward(model(tokens, tokens)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        clock.step()


def by_lightning(method: str, clock: Clock) -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt()

        def training_step(self, tokens: Any) -> Any:
            return self.model(tokens, tokens)["loss"]

        def configure_optimizers(self) -> Any:
            return adamw(self)

    class Watch(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            clock.step()

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=dist.get_world_size(),
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=STEPS,
        callbacks=[Watch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    add_to(trainer, method)
    samples = [row for _ in range(100) for row in windows()]
    trainer.fit(Module(), DataLoader(samples, WINDOWS))


def by_horovod(method: str, clock: Clock) -> None:
    import hvd_gradcomp.torch as hvd

    model = gpt()
    optimizer = adamw(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    named = model.named_parameters()
    if method == "local":
        optimizer = hvd.LocalSteps(optimizer, named)
    else:
        compressor = hvd.QSGDCompressor() if method == "qsgd" else None
        optimizer = hvd.DistributedOptimizer(optimizer, named, compression=compressor)
    loop(model, optimizer, clock)
