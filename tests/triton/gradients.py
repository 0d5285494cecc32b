"""Worlds of ranks with kernels, and beside them with plain ops alone."""

from __future__ import annotations

import torch

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.kernels import assert_alike


def on(device: str, kernels: bool) -> TorchOps:
    return TorchOps(device, static=True, kernels=kernels)


def worlds(compressor, layout: Layout, ranks: int, device: str) -> tuple[World, World]:
    """With kernels, and with plain ops."""
    ours, theirs = (World(compressor, on(device, k), layout, ranks) for k in (True, False))
    return ours, theirs


def drawn(generator, world: World, scale: float, share: float, kind: str = "noise"):
    """Of all ranks: noise whose scale differs by layer; `share` of it is large."""
    flats = []
    for _ in range(world.size):
        layers = []
        for i, n in enumerate(world.layout.sizes):
            x = torch.randn(n, generator=generator)
            if kind == "ties":
                x = torch.round(x)
            elif kind == "equal":
                x = torch.full((n,), -0.5)
            elif kind == "heavy":
                x = x / torch.rand(n, generator=generator).clamp(min=1e-6)
            kept = (torch.rand(n, generator=generator) < share).float()
            layers.append((scale * 2.0**i * x * (kept + 1e-3)).to(world.ops.device))
        flats.append(world.flat(layers))
    return flats


def assert_step_alike(ours: World, theirs: World, gradients, **extra) -> None:
    """A step of both, to the bit: results, states and what was sent."""
    copies = {name: [x.clone() for x in xs] for name, xs in extra.items()}
    one, other = ours.step(gradients, **extra), theirs.step(gradients, **copies)
    assert all(map(torch.equal, one, other))
    assert_alike(ours, theirs)
    assert_left_clean(ours.ops)


def assert_left_clean(ops: TorchOps) -> None:
    """What the next step begins with is zeros."""
    families = ops.kernels, ops.threshold_kernels, ops.topk_kernels, ops.quantizers
    for passes in (*families, ops.word_kernels):
        for key, buffer in passes._memory.items():
            assert key[0] != "clean" or not bool(buffer.any()), key
