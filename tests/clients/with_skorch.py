"""skorch: a net makes its optimizer itself, and steps it with a closure."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import GradientNormClipping
from torch.nn.functional import cross_entropy

import hvd_gradcomp.torch as hvd
from tests.clients import cases


def distributed(parameters: Any, compression: hvd.Compressor, **settings: Any) -> Any:
    """What the net takes for an optimizer's class."""
    return hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, **settings), compression=compression
    )


def train(
    compressor: hvd.Compressor | None,
    samples: Any,
    batch: int,
    *,
    momentum: float = 0.9,
    norm: float | None = None,
) -> torch.nn.Module:
    """One epoch, clipped by norm."""
    sgd: Any = torch.optim.SGD
    net = NeuralNetClassifier(
        cases.mlp(),
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=sgd if compressor is None else partial(distributed, compression=compressor),
        optimizer__momentum=momentum,
        lr=cases.RATE,
        batch_size=batch,
        max_epochs=1,
        train_split=None,
        callbacks=[GradientNormClipping(norm)],
        verbose=0,
    )
    return net.fit(*samples).module_


def main(folder: str) -> None:
    hvd.init()
    samples, norm = cases.points(64), {"norm": cases.CLIPPED}
    cases.compare(
        folder,
        train,
        cases.mlp,
        samples,
        lambda model: cross_entropy(model(samples[0]), samples[1]),
        {"plain": ({}, {}), "norm": ({}, norm)},
        norm,
    )


if __name__ == "__main__":
    main(sys.argv[1])
