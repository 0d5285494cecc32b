"""Tsuzuku et al. 2018, Algorithms 1 and 2, and Strom, element by element, as the paper prints them.

Arithmetic is float32 throughout, by NumPy scalars, so that comparisons fall as in the real code.
One layer, one rank; what a rank sends is a dict from element to value.
"""

from __future__ import annotations

import numpy as np

F = np.float32


class Variance:
    """Algorithm 1 with the quantization of section 4.2."""

    def __init__(self, size, alpha, zeta, feedback_rounding=False):
        self.alpha, self.zeta, self.feedback = F(alpha), F(zeta), feedback_rounding
        self.r = np.zeros(size, F)
        self.v = np.zeros(size, F)

    def step(self, gradient, moment):
        chosen = []
        for i in range(len(self.r)):
            self.r[i] = F(self.r[i] + gradient[i])
            self.v[i] = F(self.v[i] + moment[i])
            if F(self.r[i] * self.r[i]) > F(self.alpha * self.v[i]):
                chosen.append(i)
        sent = encode({i: self.r[i] for i in chosen})
        for i in range(len(self.r)):
            if i in sent:
                self.r[i] = F(self.r[i] - sent[i]) if self.feedback else F(0)
                self.v[i] = F(0)
            else:  # not chosen, or chosen and not encodable: here it stays
                self.v[i] = F(self.v[i] * self.zeta)
        return sent


def encode(values):
    """Section 4.2: one layer's values as signed powers of two; those with d > 7 are left out."""
    if not values:
        return {}
    largest = max(abs(x) for x in values.values())
    ceiling = int(np.floor(np.log2(np.float64(largest))))
    sent = {}
    for i, x in values.items():
        d = ceiling - rounded_exponent(abs(x), ceiling)
        if d <= 7:
            sent[i] = F(np.copysign(2.0 ** (ceiling - d), x))
    return sent


def rounded_exponent(magnitude, ceiling):
    """The closer power of two, ties to the larger one, at most 2**ceiling."""
    exponent = int(np.floor(np.log2(np.float64(magnitude))))
    if magnitude >= 1.5 * 2.0**exponent:
        exponent += 1
    return min(exponent, ceiling)


class Hybrid:
    """Algorithm 2, with the r from before the subtraction in the correction of v."""

    def __init__(self, size, tau, alpha, zeta):
        self.tau, self.alpha, self.zeta = F(tau), F(alpha), F(zeta)
        self.r = np.zeros(size, F)
        self.v = np.zeros(size, F)

    def step(self, gradient, moment):
        sent = {}
        for i in range(len(self.r)):
            self.r[i] = F(self.r[i] + gradient[i])
            self.v[i] = F(self.v[i] + moment[i])
            r = self.r[i]
            if abs(r) > self.tau and F(r * r) > F(self.alpha * self.v[i]):
                sent[i] = F(np.copysign(self.tau, r))
                corrected = F(
                    F(self.v[i] - F(abs(r) * F(2 * float(self.tau_exact))))
                    + F(self.tau_exact * self.tau_exact)
                )
                self.v[i] = max(corrected, F(0))
                self.r[i] = F(r - sent[i])
            self.v[i] = F(self.v[i] * self.zeta)
        return sent

    @property
    def tau_exact(self):
        """The threshold as the user wrote it; constants are formed before they are rounded."""
        return self._tau

    @classmethod
    def of(cls, size, tau, alpha, zeta):
        oracle = cls(size, tau, alpha, zeta)
        oracle._tau = tau
        return oracle


class Strom:
    """Strom 2015: the sign wherever the residual passes the threshold."""

    def __init__(self, size, tau):
        self.tau = F(tau)
        self.r = np.zeros(size, F)

    def step(self, gradient, moment):
        del moment
        sent = {}
        for i in range(len(self.r)):
            self.r[i] = F(self.r[i] + gradient[i])
            if abs(self.r[i]) > self.tau:
                sent[i] = F(np.copysign(self.tau, self.r[i]))
                self.r[i] = F(self.r[i] - sent[i])
        return sent
