"""Optimizers that train other parameters than those that are evaluated: schedule-free ones.

Defazio et al. 2024 ("The Road Less Scheduled") compute gradients at an interpolation of an average
and a fast iterate. Their package `schedulefree` has the interpolation in the model while it trains,
and the average behind `optimizer.eval()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MODE = "train_mode"  # of the optimizer's groups


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer has one mode to train in and another one to evaluate in."""
    switches = (getattr(optimizer, name, None) for name in ("train", "eval"))
    return all(map(callable, switches)) and any(_MODE in g for g in optimizer.param_groups)


@contextmanager
def evaluating(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let the model have the parameters to evaluate, and then those to train, if it had these.

    Args:
        optimizer: one that `has_modes`.
    """
    trains = any(group.get(_MODE) for group in optimizer.param_groups)
    if not trains:
        yield
        return
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
