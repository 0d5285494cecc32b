"""The Trainer of Hugging Face Transformers, which clips by norm unless told otherwise.

The optimizer is handed over ready, so that the Trainer makes none of its own. Each rank has its
share of the samples, and is to the Trainer a process alone.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.optimization import get_constant_schedule

import hvd_gradcomp.torch as hvd
from tests.clients import cases
from tests.clients.with_accelerate import alone


def gpt2() -> GPT2LMHeadModel:
    """The same on all ranks; far smaller than any that is published."""
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    """Each counts on from a number."""
    generator = torch.Generator().manual_seed(2)
    first = torch.randint(0, 16, (count, 1), generator=generator)
    ids = (first + torch.arange(8)) % 16
    return [{"input_ids": row, "labels": row} for row in ids]


class Early(Trainer):
    """For epochs whose last step has fewer passes: synchronizes before gradients are clipped."""

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **named)
        if self.accelerator.sync_gradients:
            self.optimizer.optimizer.synchronize()
        return loss


def train(
    compressor: hvd.Compressor | None,
    samples: Any,
    batch: int,
    *,
    momentum: float = 0.9,
    passes: int = 1,
    passes_known: int | None = None,
    early: bool = False,
    norm: float = 0.0,
    lora: bool = False,
    **settings: Any,
) -> torch.nn.Module:
    """One epoch, clipped by norm as the Trainer does it, accumulated over some passes."""
    model: Any = gpt2()
    if lora:
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=cases.RATE, momentum=momentum)
    if compressor is not None:
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            compression=compressor,
            backward_passes_per_step=passes_known or passes,
        )
    alone()
    arguments = TrainingArguments(
        output_dir="unused",
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        num_train_epochs=1,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=passes,
        max_grad_norm=norm,
        train_sampling_strategy="sequential",
        disable_tqdm=True,
        logging_strategy="no",
        **settings,
    )
    trainer = (Early if early and compressor is not None else Trainer)(
        model,
        arguments,
        train_dataset=samples,
        optimizers=(optimizer, get_constant_schedule(optimizer)),
    )
    trainer.train()
    return model


def loss(model: torch.nn.Module) -> torch.Tensor:
    """On the samples of all ranks."""
    ids = torch.stack([sample["input_ids"] for sample in sentences(64)])
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss


def main(folder: str) -> None:
    hvd.init()
    norm = {"norm": cases.CLIPPED}
    cases.compare(
        folder,
        train,
        gpt2,
        sentences(64),
        loss,
        {
            "plain": ({}, {}),
            "norm by default": ({}, {"norm": 1.0}),
            "norm": ({}, norm),
            "accumulated": ({"passes": 2}, norm),
            "odd": ({"passes": 3}, {"early": True, **norm}),
            "lora": ({"lora": True}, {"norm": 0.001}),
            "bfloat16": ({"bf16": True}, norm),
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
