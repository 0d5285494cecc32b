"""The methods of today, one rank and element by element, as ALGORITHMS and their papers say."""

from __future__ import annotations

import math

import numpy as np

F = np.float32
# Every e4m3 number that is not NaN: sign, 4 bits of exponent with bias 7, 3 bits of mantissa.
E4M3 = sorted(
    (1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6
    for e in range(16)
    for m in range(8)
    if (e, m) != (15, 7)
)


def bfloat16(x):
    """The nearest number whose last 16 bits are 0; of two as near the one with an even last bit."""
    (bits,) = np.array([x], F).view(np.uint32).tolist()
    below = bits & 0xFFFF0000
    near = [np.array([b], np.uint32).view(F)[0] for b in (below, below + 0x10000)]
    apart = [abs(float(x) - float(n)) for n in near]
    if apart[0] == apart[1]:
        return near[(below >> 16) % 2]
    return near[apart[1] < apart[0]]


def e4m3(block):
    """A block over its largest magnitude / 448, each element the nearest e4m3 number, and back."""
    unit = F(np.abs(block).max() * F(1 / 448))
    if unit < 2.0**-100:
        return np.zeros_like(block)
    chosen_ = []
    for x in block:
        y = abs(float(F(x * F(1 / unit))))
        place = min(range(len(E4M3)), key=lambda i: (abs(E4M3[i] - y), i % 2))
        chosen_.append(F(math.copysign(E4M3[place], x)) * unit)
    return np.array(chosen_, F)


def int8(block):
    """A block over its largest magnitude / 127, rounded to the nearest, and back."""
    scale = np.abs(block).max()
    if scale < 2.0**-100:
        return np.zeros_like(block)
    levels = [math.floor(F(abs(x) * F(127 / scale)) + 0.5) for x in block]
    unit = F(scale * F(1 / 127))
    return np.array([F(math.copysign(level, x)) * unit for level, x in zip(levels, block)], F)


def largest(chunk, k):
    """Return the places of the k largest magnitudes, ascending; of equal ones the first."""
    return sorted(sorted(range(len(chunk)), key=lambda i: (-abs(chunk[i]), i))[:k])


class OwnedChunks:
    """Chunked top-k where each chunk has an owner, after Ok-Topk (Li and Hoefler 2022); float32.

    All send the owner their k largest of it. The owner adds up in the order of ranks, and sends all
    of them the k largest of the sum; what is left of the sum it adds to its own residual.
    """

    def __init__(self, size, ranks, chunk, k, decay):
        self.chunk, self.k, self.decay = chunk, k, decay
        self.residual = np.zeros((ranks, size), F)

    def owner(self, place, chunks):
        """Which rank owns a chunk: runs of chunks in the order of ranks, of nearly one length."""
        ranks = len(self.residual)
        return next(r for r in range(ranks) if place < (r + 1) * chunks // ranks)

    def step(self, gradients):
        """The mean of what is sent, and how often an element of a rank was sent at first."""
        self.residual = self.residual * F(self.decay) + np.array(gradients, F)
        ranks, size = self.residual.shape
        result, chunks = np.zeros(size, F), -(-size // self.chunk)
        for place in range(chunks):
            span = slice(place * self.chunk, min((place + 1) * self.chunk, size))
            total = np.zeros(span.stop - span.start, F)
            for rank in range(ranks):
                residual = self.residual[rank, span]
                for i in largest(residual, self.k):
                    total[i] += residual[i]
                    residual[i] = 0
            for i in largest(total, self.k):
                result[span.start + i] = total[i]
                total[i] = 0
            self.residual[self.owner(place, chunks), span] += total
        return result * F(1 / ranks)


class OkTopK:
    """Ok-Topk of one bucket, after Li and Hoefler 2022, element by element; float32.

    All send the owner of a region those of their k largest that lie there and fit. The owner adds
    up in the order of ranks, and sends all of them the largest of the sums that fit; what is left
    it adds to its own residual.
    """

    def __init__(self, size, end, ranks, k, slack, knots):
        self.k, self.capacity = k, min(k, math.ceil(slack * k / ranks))
        self.end, self.steps, self.left = end, 0, 0
        self.residual = np.zeros((ranks, size), F)
        self.knots = [knot * end // knots for knot in range(knots + 1)]

    def cuts(self):
        """The ends of regions: of as many stretches each, or of parts of a stretch."""
        ranks, stretches = len(self.residual), len(self.knots) - 1
        parts = []
        for rank in range(ranks):
            low, rest = divmod(rank * stretches, ranks)
            step = self.knots[low + 1] - self.knots[low]
            parts.append(self.knots[low] + step * rest // ranks)
        return [*parts, self.end]

    def step(self, gradients):
        """The mean of what is sent."""
        self.residual = self.residual + np.array(gradients, F)
        ranks, size = self.residual.shape
        result, cuts = np.zeros(size, F), self.cuts()
        loads, back = [0] * ranks, [[] for _ in range(ranks)]
        chosen = [[i for i in largest(r, self.k) if r[i] != 0] for r in self.residual]
        for owner, (start, end) in enumerate(zip(cuts, cuts[1:])):
            sums = {}
            for rank, residual in enumerate(self.residual):
                in_part = [i for i in chosen[rank] if start <= i < end]
                loads[owner] += len(in_part)
                first = (
                    self.steps * self.capacity % len(in_part) if len(in_part) > self.capacity else 0
                )
                fits = [
                    in_part[(first + n) % len(in_part)]
                    for n in range(min(len(in_part), self.capacity))
                ]
                self.left += len(in_part) - len(fits)
                for i in fits:
                    sums[i] = sums.get(i, F(0)) + residual[i]
                    residual[i] = 0
            places = sorted(sums)
            for n in largest([sums[i] for i in places], self.capacity):
                if sums[places[n]] != 0:
                    back[owner].append(places[n])
                    result[places[n]] = sums.pop(places[n])
            for i, value in sums.items():
                self.residual[owner, i] += value
        self.steps += 1
        self.balance(cuts, loads, back)
        return result * F(1 / ranks)

    def balance(self, cuts, loads, back):
        """New ends of stretches: the n-th of as many parts of all that were chosen ends there."""
        total, parts = sum(loads), len(self.knots) - 1
        for knot in range(1, parts) if total else ():
            before, owner = knot * total // parts, 0
            while before >= loads[owner]:
                before, owner = before - loads[owner], owner + 1
            kept = back[owner]
            number = before * len(kept) // loads[owner]
            self.knots[knot] = kept[number] if kept else cuts[owner]


def codebook(values, bits):
    """Bins of equal width over mu +- 3 s; each value becomes the mean of its bin."""
    mu, bins = float(np.mean(values, dtype=np.float64)), 1 << bits
    s = math.sqrt(float(np.mean((values.astype(np.float64) - mu) ** 2)))
    if s == 0:
        return np.full_like(values, mu)
    code = np.clip(np.floor((values - mu) / (6 * s / bins) + bins / 2), 0, bins - 1)
    return np.array([values[code == c].mean(dtype=np.float64) for c in code], F)


def elias_fano_bits(k, n):
    """`k * floor(log2(n / k)) + k + (n >> low)`."""
    low = math.floor(math.log2(n / k))
    return k * low + k + (n >> low)


class PowerSGD:
    """Algorithm 1 of Vogels et al. 2019, of one matrix on several ranks, with Gram-Schmidt."""

    def __init__(self, rows, columns, ranks, q):
        self.r = [np.zeros((rows, columns)) for _ in range(ranks)]
        self.q = q.astype(np.float64)

    def step(self, gradients):
        accumulated = [r + g for r, g in zip(self.r, gradients)]
        p = orthonormal(sum(m @ self.q for m in accumulated) / len(accumulated))
        products = [m.T @ p for m in accumulated]
        self.q = sum(products) / len(products)
        self.r = [m - p @ q.T for m, q in zip(accumulated, products)]
        return p @ self.q.T


class ACPSGD:
    """Zhang et al. 2023: one factor a step, the other one from the step before."""

    def __init__(self, rows, columns, ranks, q):
        self.r = [np.zeros((rows, columns)) for _ in range(ranks)]
        self.p, self.q, self.steps = None, q.astype(np.float64), 0

    def step(self, gradients):
        accumulated = [r + g for r, g in zip(self.r, gradients)]
        if self.steps % 2 == 0:
            self.q = orthonormal(self.q)
            products = [m @ self.q for m in accumulated]
            self.p = sum(products) / len(products)
            self.r = [m - p @ self.q.T for m, p in zip(accumulated, products)]
        else:
            self.p = orthonormal(self.p)
            products = [m.T @ self.p for m in accumulated]
            self.q = sum(products) / len(products)
            self.r = [m - self.p @ q.T for m, q in zip(accumulated, products)]
        self.steps += 1
        return self.p @ self.q.T


def orthonormal(x):
    """Modified Gram-Schmidt."""
    x = x.copy()
    for i in range(x.shape[1]):
        x[:, i] /= np.linalg.norm(x[:, i])
        for j in range(i + 1, x.shape[1]):
            x[:, j] -= x[:, i] * (x[:, i] @ x[:, j])
    return x


class DeMo:
    """Peng et al. 2024, of one matrix on several ranks, before the sign is taken."""

    def __init__(self, shape, ranks, chunk, k, beta):
        self.m = [np.zeros(shape) for _ in range(ranks)]
        self.chunk, self.k, self.beta = chunk, k, beta

    def step(self, gradients):
        from scipy.fft import dctn, idctn

        rows, columns = self.m[0].shape
        totals, counts = np.zeros((rows, columns)), np.zeros((rows, columns))
        for rank, g in enumerate(gradients):
            self.m[rank] = self.beta * self.m[rank] + g
            for a in range(0, rows, self.chunk):
                for b in range(0, columns, self.chunk):
                    tile = slice(a, a + self.chunk), slice(b, b + self.chunk)
                    whole = dctn(self.m[rank][tile], norm="ortho")
                    sent = np.zeros(whole.size)
                    chosen = largest(whole.ravel(), self.k)
                    sent[chosen] = whole.ravel()[chosen]
                    sent = sent.reshape(whole.shape)
                    self.m[rank][tile] -= idctn(sent, norm="ortho")
                    totals[tile] += sent
                    counts[tile] += sent != 0
        mean = totals / np.maximum(counts, 1)
        for a in range(0, rows, self.chunk):
            for b in range(0, columns, self.chunk):
                tile = slice(a, a + self.chunk), slice(b, b + self.chunk)
                mean[tile] = idctn(mean[tile], norm="ortho")
        return mean
