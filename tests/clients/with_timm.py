"""timm: a model, an optimizer of its factory, its loss scaler and its ways to clip."""

from __future__ import annotations

import sys
from typing import Any

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.utils import NativeScaler, dispatch_clip_grad
from torch.nn.functional import cross_entropy

import hvd_gradcomp.torch as hvd
from tests.clients import cases


def transformer() -> torch.nn.Module:
    """The same on all ranks."""
    torch.manual_seed(1)
    size = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", num_classes=4, in_chans=1, **size)


def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A quarter of each is brighter."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 1, 8, 8, generator=generator) / 2
    y = torch.randint(0, 4, (count,), generator=generator)
    for image, quarter in zip(x, y.tolist()):
        down, right = divmod(quarter, 2)
        image[:, 4 * down : 4 * down + 4, 4 * right : 4 * right + 4] += 1
    return x, y


def train(
    compressor: hvd.Compressor | None,
    samples: Any,
    batch: int,
    *,
    name: str = "momentum",
    momentum: float = 0.9,
    clip: float | None = None,
    mode: str = "norm",
    half: bool = False,
) -> torch.nn.Module:
    """One epoch with an optimizer by name, clipped in one of timm's modes."""
    model = transformer()
    optimizer: Any = create_optimizer_v2(model, opt=name, lr=cases.RATE, momentum=momentum)
    if compressor is not None:
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), compression=compressor
        )
    scaler = None
    if half:
        scaler = NativeScaler("cpu")  # with a scale at which no batch of either size overflows
        scaler.load_state_dict({**scaler.state_dict(), "scale": 1024.0})
    for x, y in zip(*(s.split(batch) for s in samples)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=half):
            loss = cross_entropy(model(x), y)
        if scaler is not None:
            scaler(loss, optimizer, clip_grad=clip, clip_mode=mode, parameters=model.parameters())
            continue
        loss.backward()
        if clip is not None:
            dispatch_clip_grad(model.parameters(), clip, mode)
        optimizer.step()
    return model


def main(folder: str) -> None:
    hvd.init()
    samples, norm = images(64), {"clip": cases.CLIPPED}
    cases.compare(
        folder,
        train,
        transformer,
        samples,
        lambda model: cross_entropy(model(samples[0]), samples[1]),
        {
            "plain": ({}, {}),
            "norm": ({}, norm),
            "value": ({}, {"clip": 0.005, "mode": "value"}),
            "adaptive": ({}, {"clip": 0.01, "mode": "agc"}),
            "sgdw": ({"name": "sgdw"}, norm),
            "float16": ({"half": True}, norm),
        },
        norm,
    )


if __name__ == "__main__":
    main(sys.argv[1])
