"""QSGD, TernGrad and 1-bit SGD, one rank and element by element, as their papers print them.

A layer comes as a matrix whose rows are the groups that share a scale.
"""

from __future__ import annotations

import math

import numpy as np

F = np.float32


def noise(first, second, i):
    """Number i of a key, in [0, 1)."""

    def mix(x):
        for _ in range(2):
            x = (x ^ (x >> 16)) * 0x45D9F3B % 2**32
        return x ^ (x >> 16)

    return F((mix(mix((i + first) % 2**32) ^ second) >> 8) / 2**24)


def rounded(x, scale, levels, chance):
    """`scale * sign(x) * level / levels`, with the level rounded up with the right probability."""
    if scale == 0:
        return F(0)
    height = F(abs(x) * F(F(levels) / scale))
    level = min(math.floor(F(height + chance)), levels)
    return F(F(np.copysign(level, x)) * F(scale / F(levels)))


def qsgd(group, bits, norm, chances):
    """Section 3.1: the levels of the bucket's norm."""
    scale = np.abs(group).max() if norm == "max" else F(math.sqrt(float((group**2).sum())))
    levels = 2 ** (bits - 1) - 1
    return [rounded(x, F(scale), levels, c) for x, c in zip(group, chances)]


def terngrad(layer, clip, chances):
    """Algorithm 1 with the clipping of section 4: three levels of the largest magnitude."""
    sigma = math.sqrt(float((layer.astype(np.float64) ** 2).mean()))
    bound = F(clip * sigma)
    clipped = np.clip(layer, -bound, bound)
    scale = np.abs(clipped).max()
    return [rounded(x, scale, 1, c) for x, c in zip(clipped, chances)]


class OneBit:
    """Section 2: the mean of each side of a column, and what that leaves is kept."""

    def __init__(self, rows, length):
        self.r = np.zeros((rows, length), F)

    def step(self, gradient):
        self.r = self.r + gradient
        sent = np.zeros_like(self.r)
        for i, column in enumerate(self.r):
            for side in (column >= 0, column < 0):
                if side.any():
                    sent[i, side] = column[side].mean(dtype=np.float64)
        self.r = self.r - sent
        return sent
