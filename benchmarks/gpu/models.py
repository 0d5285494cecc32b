"""Models that are trained on noise: what a step costs does not depend on what it learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.fsdp import LENGTH, Transformer
from benchmarks.gpu.part import Setting


class Task(NamedTuple):
    """A model, the loss of its next batch, and the learning rate of SGD."""

    model: nn.Module
    loss: Callable[[nn.Module], torch.Tensor]
    rate: float


def small(setting: Setting) -> Task:
    """Two layers."""
    device = setting.device
    layers = nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10)
    generator = torch.Generator(device).manual_seed(dist.get_rank())

    def loss(model: nn.Module) -> torch.Tensor:
        inputs = torch.randn(32, 512, generator=generator, device=device)
        return model(inputs).square().mean()

    return Task(nn.Sequential(*layers).to(device), loss, 0.05)


def sizes(setting: Setting) -> tuple[int, int]:
    """Return the width and the layers of the transformer: 19 million parameters, or 0.1."""
    return (64, 2) if setting.is_small else (512, 6)


def transformer(setting: Setting) -> Task:
    """Transformer over eight windows."""
    device, (width, layers) = setting.device, sizes(setting)
    generator = torch.Generator(device).manual_seed(dist.get_rank())

    def loss(model: nn.Module) -> torch.Tensor:
        x = torch.randn(8, LENGTH, width, generator=generator, device=device)
        return model(x).square().mean()

    return Task(Transformer(layers, width).to(device), loss, 1e-3)


def resnet50(setting: Setting) -> Task:
    """ResNet-50 on 64 images, under autocast to bfloat16; on a CPU `transformer` in its place."""
    if setting.is_small:
        return transformer(setting)
    from torchvision.models import resnet50 as built

    device = setting.device
    model = built().to(device, memory_format=torch.channels_last)
    images = torch.randn(64, 3, 224, 224, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.arange(len(images), device=device)

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            return nn.functional.cross_entropy(model(images), labels)

    return Task(model, loss, 1e-3)
