"""Local steps from the papers' pseudo-code: DiLoCo, Streaming DiLoCo, SparseLoCo.

Everything in float64 on whole vectors; `inner(rank, step, x)` returns x after one inner step.
"""

from __future__ import annotations

import numpy as np

from tests.oracles.today import codebook, largest


def diloco(start, inner, ranks, steps, every, lr, momentum):
    """Algorithm 1 of Douillard et al. 2023, with Nesterov's momentum as PyTorch computes it."""
    outer, v = start.astype(np.float64), np.zeros(len(start))
    local = [outer.copy() for _ in range(ranks)]
    for t in range(1, steps + 1):
        local = [inner(rank, t, x) for rank, x in enumerate(local)]
        if t % every == 0:
            delta = np.mean([outer - x for x in local], axis=0)
            v = momentum * v + delta
            outer = outer - lr * (delta + momentum * v)
            local = [outer.copy() for _ in range(ranks)]
    return outer, local


def streaming(start, inner, ranks, steps, every, lr, momentum, parts, delay, blend):
    """Algorithm 2 of Douillard et al. 2025: fragments in turn, sent at t, applied at t + delay."""
    outer, v = start.astype(np.float64), np.zeros(len(start))
    local = [outer.copy() for _ in range(ranks)]
    travelling = {}
    for t in range(1, steps + 1):
        local = [inner(rank, t, x) for rank, x in enumerate(local)]
        for number, part in enumerate(parts):
            place = (number + 1) * every // len(parts)
            if (t - place) % every == 0:
                delta = np.mean([outer[part] - x[part] for x in local], axis=0)
                travelling[t + delay, number] = delta
            if (t, number) in travelling:
                delta = travelling.pop((t, number))
                v[part] = momentum * v[part] + delta
                outer[part] -= lr * (delta + momentum * v[part])
                for x in local:
                    x[part] = blend * x[part] + (1 - blend) * outer[part]
    return outer, local


def sparse_loco(start, inner, ranks, steps, every, chunk, k, bits, decay):
    """Algorithm 1 of Sarfi et al. 2025: the residual decays, what is sent is taken out of it.

    One codebook for the values of all chunks, as this suite reads it.
    """
    outer = start.astype(np.float64)
    local = [outer.copy() for _ in range(ranks)]
    residual = [np.zeros(len(start)) for _ in range(ranks)]
    for t in range(1, steps + 1):
        local = [inner(rank, t, x) for rank, x in enumerate(local)]
        if t % every:
            continue
        sent = []
        for rank, x in enumerate(local):
            residual[rank] = decay * residual[rank] + (outer - x)
            chunks = np.pad(residual[rank], (0, -len(start) % chunk)).reshape(-1, chunk)
            places = [at * chunk + i for at, row in enumerate(chunks) for i in largest(row, k)]
            mean_momentum = np.zeros(len(start))
            mean_momentum[places] = codebook(residual[rank][places].astype(np.float32), bits)
            residual[rank] = residual[rank] - mean_momentum
            sent.append(mean_momentum)
        outer = outer - np.mean(sent, axis=0)
        local = [outer.copy() for _ in range(ranks)]
    return outer, residual
