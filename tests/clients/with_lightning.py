"""Lightning: `configure_optimizers` returns Horovod's optimizer; the rest of a module stays.

Each rank has a Trainer for one device, on its share of the samples. Lightning runs backward, and
clips, inside of the closure that it hands to `optimizer.step`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hvd_gradcomp.torch as hvd
from tests.clients import cases


class Automatic(lightning.LightningModule):
    """Lightning does backward and step."""

    def __init__(self, compressor: hvd.Compressor | None, momentum: float, passes: int) -> None:
        super().__init__()
        self.model = cases.mlp()
        self.compressor, self.momentum, self.passes = compressor, momentum, passes

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=cases.RATE, momentum=self.momentum)
        if self.compressor is None:
            return optimizer
        return hvd.DistributedOptimizer(
            optimizer,
            self.named_parameters(),
            compression=self.compressor,
            backward_passes_per_step=self.passes,
        )


class Early(Automatic):
    """For epochs whose last step has fewer passes: synchronizes before gradients are clipped."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.compressor is not None:
            optimizer.synchronize()


class Manual(Automatic):
    """The module does backward and step, and clips itself."""

    automatic_optimization = False

    def training_step(self, batch: Any) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch))
        self.clip_gradients(optimizer, cases.CLIPPED, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()


def train(
    compressor: hvd.Compressor | None,
    samples: Any,
    batch: int,
    *,
    module: type[Automatic] = Automatic,
    momentum: float = 0.9,
    passes: int = 1,
    passes_known: int | None = None,
    half: bool = False,
    **settings: Any,
) -> torch.nn.Module:
    """One epoch, clipped as the settings of the Trainer say."""
    model = module(compressor, momentum, passes_known or passes)
    plugins: list[Any] = [LightningEnvironment()]  # under mpirun it would see all ranks
    if half:
        plugins.append(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=passes,
        plugins=plugins,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(model, DataLoader(TensorDataset(*samples), batch))
    return model.model


def main(folder: str) -> None:
    hvd.init()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    samples = cases.points(64)
    norm = {"gradient_clip_val": cases.CLIPPED}
    cases.compare(
        folder,
        train,
        cases.mlp,
        samples,
        lambda model: cross_entropy(model(samples[0]), samples[1]),
        {
            "plain": ({}, {}),
            "norm": ({}, norm),
            "value": ({}, {"gradient_clip_val": 0.005, "gradient_clip_algorithm": "value"}),
            "accumulated": ({"passes": 2}, norm),
            "odd": ({"passes": 3}, {"module": Early, **norm}),
            "manual": ({}, {"module": Manual}),
            "bfloat16": ({"precision": "bf16-mixed"}, norm),
            "float16": ({"half": True}, norm),
        },
        norm,
        {
            "odd": {"passes": 3, **norm},
            "not told": {"passes": 2, "passes_known": 1, **norm},
            "told more": {"passes_known": 2, **norm},
        },
    )


if __name__ == "__main__":
    main(sys.argv[1])
