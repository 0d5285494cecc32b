"""What is asked of every client: the updates are plain PyTorch's on the mean gradient.

A client is a function `train(compressor, samples, batch, ...)` that returns the trained model. With
None for the compressor it trains as if there were no Horovod, and on all samples: what two ranks
have to equal, each on its half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as hooks

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.method.handover import correction_of
from tests.parallel.workers.results import digest, errors_of, write

RATE = 0.1  # of all that SGD trains
BATCH = 4  # of a rank
CLIPPED = 0.05  # a norm that all gradients here exceed
METHODS: tuple[hvd.Compressor, ...] = (
    hvd.VarianceCompressor(alpha=0.5, moments="step"),
    hvd.DGCCompressor(density=0.1, momentum=0.9),
    hvd.EGCCompressor(K=20, momentum=0.9),
    hvd.QSGDCompressor(),
)


def mlp() -> nn.Module:
    """The same on all ranks."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def points(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of four classes, which a model can learn."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 8, generator=generator)
    return x, x[:, :4].argmax(1)


def of_this_rank(samples: Any) -> Any:
    """This rank's share: with batches in order, a step of all ranks is one of the whole."""
    if isinstance(samples, tuple):
        return tuple(of_this_rank(x) for x in samples)
    return samples[hvd.rank() :: hvd.size()]


@contextmanager
def watched() -> Iterator[list[float]]:
    """The norm of each update that any optimizer makes meanwhile."""
    norms: list[float] = []
    before: list[torch.Tensor] = []

    def trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [p.detach() for group in optimizer.param_groups for p in group["params"]]

    def pre(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        before[:] = [p.clone() for p in trained(optimizer)]

    def post(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        moved = [(a - b).norm() for a, b in zip(trained(optimizer), before)]
        norms.append(float(torch.stack(moved).norm()))

    handles = (
        hooks.register_optimizer_step_pre_hook(pre),
        hooks.register_optimizer_step_post_hook(post),
    )
    try:
        yield norms
    finally:
        for handle in handles:
            handle.remove()


def difference(a: nn.Module, b: nn.Module) -> float:
    """The largest of any two parameters."""
    pairs = zip(a.parameters(), b.parameters())
    return max(float((p - q).detach().float().abs().max()) for p, q in pairs)


def compare(
    folder: str,
    train: Callable[..., nn.Module],
    build: Callable[[], nn.Module],
    samples: Any,
    loss: Callable[[nn.Module], torch.Tensor],
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]],
    clipped: dict[str, Any],
    refused: dict[str, dict[str, Any]] | None = None,
) -> None:
    """Trains with a client and writes what became of it.

    Args:
        folder: where to.
        train: the client; see above.
        build: makes the model that it trains.
        samples: of all ranks.
        loss: of a model, on all samples.
        cases: settings in which `NoneCompressor` has to equal plain PyTorch; of each those that
            clip come second.
        clipped: settings in which updates of plain SGD have at most the norm CLIPPED * RATE, which
            the other compressors have to keep to.
        refused: settings that cannot be honoured.
    """
    result: dict[str, Any] = {"cases": {}, "methods": {}}
    first = float(loss(build()))
    for name, (settings, clips) in cases.items():
        free = train(None, samples, BATCH * hvd.size(), **settings)
        plain = train(None, samples, BATCH * hvd.size(), **settings, **clips)
        ours = train(hvd.NoneCompressor(), of_this_rank(samples), BATCH, **settings, **clips)
        result["cases"][name] = {
            "off": difference(ours, plain),
            "effect": difference(plain, free),
            "digest": digest(p.detach().numpy() for p in ours.parameters()),
        }
    for compressor in METHODS:
        momentum = (correction_of(compressor) or (0.0,))[0]
        with watched() as norms:
            model = train(compressor, of_this_rank(samples), BATCH, momentum=momentum, **clipped)
        result["methods"][repr(compressor)] = {
            "norms": norms,
            "losses": [first, float(loss(model))],
            "digest": digest(p.detach().numpy() for p in model.parameters()),
        }
    result["errors"] = errors_of(
        {
            name: partial(train, hvd.NoneCompressor(), of_this_rank(samples), BATCH, **settings)
            for name, settings in (refused or {}).items()
        }
    )
    write(folder, hvd.rank(), result)
