"""1-bit Adam from Algorithm 1 of Tang et al. 2021, on whole vectors, with any compression.

`compress(x)` returns what travels of x. As there, but the server's second compression is left out:
its mean travels as it is.
"""

from __future__ import annotations

import numpy as np


def train(start, gradient, ranks, steps, warmup, compress, rate, betas, eps, decay):
    """Return the parameters, the momentum and each rank's error."""
    (b1, b2), x = betas, start.astype(np.float64)
    m, v = np.zeros(len(x)), np.zeros(len(x))
    error = [np.zeros(len(x)) for _ in range(ranks)]
    for t in range(1, steps + 1):
        gradients = [gradient(rank, t, x) for rank in range(ranks)]
        if t <= warmup:
            mean = np.mean(gradients, axis=0)
            m, v = b1 * m + (1 - b1) * mean, b2 * v + (1 - b2) * mean**2
            unbiased = v / (1 - b2**t)
        else:
            sent = []
            for rank, g in enumerate(gradients):
                corrected = b1 * m + (1 - b1) * g + error[rank]
                sent.append(compress(corrected))
                error[rank] = corrected - sent[rank]
            m = np.mean(sent, axis=0)
            unbiased = v / (1 - b2**warmup)
        x = x - rate * decay * x - rate * m / (1 - b1**t) / (np.sqrt(unbiased) + eps)
    return x, m, error
