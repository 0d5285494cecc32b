"""Heavy-ball momentum on the mean gradient, as SGD applies it."""

from __future__ import annotations

import numpy as np

F = np.float32


class MomentumSGD:
    """`b = m*b + g`; the update is `b`, or with Nesterov `g + m*b`."""

    def __init__(self, size, momentum, nesterov=False):
        self.b, self.m, self.nesterov = np.zeros(size, F), F(momentum), nesterov

    def step(self, g):
        self.b = F(self.b * self.m) + g
        return F(self.b * self.m) + g if self.nesterov else self.b.copy()
