"""The top-k methods, layer by layer and rank by rank, as their papers print them.

`step(gradients)` takes [rank][layer] vectors and returns [layer] means over the ranks. Arithmetic
is float32, each product rounded before it is added.
"""

from __future__ import annotations

import math

import numpy as np

F = np.float32


def largest(r, k, step):
    """The k largest |r|, zeros excepted; of equal ones those at `step * k` and after first."""
    n = len(r)
    ranked = sorted(range(n), key=lambda i: (-abs(r[i]), (i - step * k) % n))
    return [i for i in ranked[:k] if r[i] != 0]


def count(n, density):
    return min(n, max(1, math.floor(n * density + 0.5)))


class TopK:
    """Sparse GD: a residual, and a share of each layer. The others differ in single steps."""

    def __init__(self, sizes, ranks, density=0.01):
        self.sizes, self.ranks, self.density = sizes, ranks, density
        self.r = [[np.zeros(n, F) for n in sizes] for _ in range(ranks)]
        self.u = [[np.zeros(n, F) for n in sizes] for _ in range(ranks)]
        self.steps = 0

    def step(self, gradients):
        means = [np.zeros(n, F) for n in self.sizes]
        for rank in range(self.ranks):
            for layer, n in enumerate(self.sizes):
                g = self.prepared(gradients[rank][layer])
                self.collect(rank, layer, g)
                k = self.number(rank, layer, gradients[rank][layer], n)
                for i in largest(self.r[rank][layer], k, self.steps):
                    value = self.r[rank][layer][i]
                    means[layer][i] += F(value * F(1 / self.ranks))
                    self.r[rank][layer][i] = self.u[rank][layer][i] = 0
        self.steps += 1
        return means

    def prepared(self, g):
        return g

    def collect(self, rank, layer, g):
        self.r[rank][layer] += g

    def number(self, rank, layer, g, n):
        return count(n, self.density)


class DGC(TopK):
    """Momentum correction and factor masking; local clipping at c / sqrt(N)."""

    def __init__(self, sizes, ranks, density, momentum, nesterov=False, clip_norm=None):
        super().__init__(sizes, ranks, density)
        self.m, self.nesterov, self.clip_norm = F(momentum), nesterov, clip_norm

    def prepared(self, g):
        if self.clip_norm is None:
            return g
        limit = self.clip_norm / self.ranks**0.5
        norm = math.sqrt(sum(float(x) ** 2 for x in g))
        return F(g * F(limit / norm)) if norm > limit else g

    def collect(self, rank, layer, g):
        u = F(self.u[rank][layer] * self.m) + g
        self.u[rank][layer] = u
        self.r[rank][layer] += F(u * self.m) + g if self.nesterov else u


class EGC(DGC):
    """How much is sent follows the entropy of the gradient's histogram."""

    def __init__(self, sizes, ranks, K, bins, entropy_interval, momentum):
        super().__init__(sizes, ranks, None, momentum)
        self.K, self.bins, self.interval = K, bins, entropy_interval
        self.known = {}

    def number(self, rank, layer, g, n):
        if self.steps % self.interval == 0:
            k = math.floor(n * self.entropy(g) / self.K + 0.5)
            self.known[rank, layer] = min(n, max(1, k))
        return self.known[rank, layer]

    def entropy(self, g):
        low, high = g.min(), g.max()
        if low == high:
            return 0.0
        width = F(high - low) / F(self.bins)
        edges = [F(low + F(width * F(i))) for i in range(1, self.bins)]
        counts = [0] * self.bins
        for x in g:
            counts[sum(x >= edge for edge in edges)] += 1
        shares = [c / len(g) for c in counts if c]
        return -sum(p * math.log2(p) for p in shares)


class GradientDropping:
    """One threshold over all layers: the model as one layer."""

    def __init__(self, sizes, ranks, ratio):
        self.sizes = sizes
        self.whole = TopK((sum(sizes),), ranks, 1 - ratio)

    def step(self, gradients):
        (mean,) = self.whole.step([[np.concatenate(g)] for g in gradients])
        return np.split(mean, np.cumsum(self.sizes)[:-1])

    @property
    def r(self):
        return [np.split(r, np.cumsum(self.sizes)[:-1]) for (r,) in self.whole.r]


class ScaleCom:
    """CLT-k: the cyclic leader's k largest of each layer are where all ranks send."""

    def __init__(self, sizes, ranks, density, beta):
        self.sizes, self.ranks, self.density, self.beta = sizes, ranks, density, F(beta)
        self.r = [[np.zeros(n, F) for n in sizes] for _ in range(ranks)]
        self.steps = 0

    def step(self, gradients):
        means = [np.zeros(n, F) for n in self.sizes]
        leader = self.steps % self.ranks
        for layer, n in enumerate(self.sizes):
            accumulated = [
                self.r[rank][layer] + gradients[rank][layer] for rank in range(self.ranks)
            ]
            where = largest(accumulated[leader], count(n, self.density), self.steps)
            for rank in range(self.ranks):
                sent = np.zeros(n, F)
                sent[where] = accumulated[rank][where]
                means[layer] += sent / F(self.ranks)
                r = self.r[rank][layer]
                self.r[rank][layer] = F((1 - self.beta) * r) + F(
                    self.beta * (accumulated[rank] - sent)
                )
        self.steps += 1
        return means
