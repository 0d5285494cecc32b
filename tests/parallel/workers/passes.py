"""Draws of a batch, and what single samples of them contribute: for both frameworks."""

from __future__ import annotations

import numpy as np

BATCH, DRAWS = 32, 200
PASSES = (2, 4, 8)


def loss_weights():
    """The layer that all draws are for; float32 [inputs, outputs]."""
    return np.random.default_rng(1).standard_normal((10, 6)).astype("f4")


def draws():
    """(x, y) of each batch; the loss is the mean over samples of ||x w - y||^2."""
    random = np.random.default_rng(2)
    for _ in range(DRAWS):
        x = random.standard_normal((BATCH, 10)).astype("f4")
        yield x, (0.5 * random.standard_normal((BATCH, 6)) + x[:, :6]).astype("f4")


def share_of_truth(moments):
    """The sum of moments [draw, inputs, outputs] over that of `sum_z (grad_z / B)**2`."""
    w, truth = loss_weights().astype("f8"), 0.0
    for x, y in draws():
        for sample, target in zip(x.astype("f8"), y.astype("f8")):
            gradient = np.outer(sample, 2 * (sample @ w - target))
            truth += ((gradient / BATCH) ** 2).sum()
    return float(moments.astype("f8").sum() / truth)
