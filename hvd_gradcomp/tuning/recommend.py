"""Choice of an exchange method from measurements and predictions. Pure: nothing is run here.

Every number is a `Span`, and a verdict must hold over whole spans:

- measured exchanges take precedence; then the cost model only predicts how much of them overlaps
  with backward;
- without them the cost model's own error is taken to be `ERROR`, and `BEYOND` among more hosts;
- a method is recommended only if in its worst case it saves a tenth of the best-case step without
  it, and only on links slower than its worst-case break-even;
- no compression is recommended if even in the best case no method saves a tenth; between the two
  the answer is "cannot say".

Time is not everything: `decide` can prefer methods over faster ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from hvd_gradcomp.core.cost_model import break_even

ROUNDS = 5  # with fewer the spread of rounds says too little of the median
SURE = 0.9  # probability that a median lies within its span
WORTH = 0.9  # of the dense step's time: a method that takes more is not worth it
ERROR = 0.3  # of a prediction: of 27 between shaped hosts (docs/speed.md) 26 were within
BEYOND = 0.5  # of one for more hosts than are here: of 27 (docs/measured/extrapolation.json) 18


class Span(NamedTuple):
    """Estimate with its lower and upper bounds."""

    low: float
    middle: float
    high: float


class Case(NamedTuple):
    """Times of an exchange method, in seconds.

    Attributes:
        name: of the method.
        predicted: time of an exchange.
        hidden: the part of that predicted to overlap with backward.
        measured: times of whole exchanges, at least `ROUNDS`; or none.
        step_at: maps a link's bits per second to the predicted step time.
        compute: forward and backward.
        backward: the time that an exchange can overlap with.
        error: of the predictions, as a share of them.
        every: steps for each exchange.
    """

    name: str
    predicted: float
    hidden: float
    measured: Sequence[float]
    step_at: Callable[[float], float]
    compute: float = 0.0
    backward: float = 0.0
    error: float = ERROR
    every: int = 1


class Estimate(NamedTuple):
    """Estimate for a method.

    Attributes:
        name: of the method.
        exchange, step: seconds.
        faster: speedup of a step over dense gradients.
        pays_below: bits per second below which it saves time; 0 if nowhere.
    """

    name: str
    exchange: Span
    step: Span
    faster: Span
    pays_below: Span


class Verdict(NamedTuple):
    """Recommendation.

    Attributes:
        answer: "use", "none" or "cannot say".
        best: the estimate that the answer is about: the one to use, or the one that comes closest;
            None if there is nothing but dense gradients.
        faster: a method faster than `best`, but not preferred.
    """

    answer: str
    best: Estimate | None
    faster: Estimate | None = None


def median(samples: Sequence[float]) -> Span:
    """Return the sample median, and the order statistics that bound the true one at level `SURE`.

    The true median lies outside of the k-th smallest and the k-th largest of n samples with
    probability `2 * P(Binomial(n, 1/2) < k)`: no distribution of the noise is assumed.

    >>> median([3.0, 1.0, 2.0, 9.0, 4.0])
    Span(low=1.0, middle=3.0, high=9.0)
    """
    if len(samples) < ROUNDS:
        raise ValueError(f"{len(samples)} rounds say nothing of the error: take {ROUNDS} or more")
    ordered, n, outside, left_out = sorted(samples), len(samples), 2 * 0.5 ** len(samples), 0
    while True:
        outside += 2 * math.comb(n, left_out + 1) * 0.5**n
        if outside > 1 - SURE:
            break
        left_out += 1
    return Span(ordered[left_out], statistics.median(ordered), ordered[n - 1 - left_out])


def exchange_of(case: Case) -> Span:
    """Return the time of an exchange: measured if there are samples, else predicted, +- error."""
    if case.measured:
        return median(case.measured)
    low, high = 1 - case.error, 1 + case.error
    return Span(low * case.predicted, case.predicted, high * case.predicted)


def step_of(case: Case) -> Span:
    """Return the time of forward, backward, and the exchange that does not overlap with it.

    The mean over steps, if not all exchange.
    """

    def step(exchange: float, hidden: float) -> float:
        exposed = max(exchange - min(hidden, case.backward), 0.0)
        return case.compute + exposed / case.every

    took, hidden = exchange_of(case), case.hidden
    return Span(
        step(took.low, (1 + case.error) * hidden),
        step(took.middle, hidden),
        step(took.high, (1 - case.error) * hidden),
    )


def estimate(case: Case, dense: Case, bandwidth: float) -> Estimate:
    """Compare a method with dense gradients, on a link of `bandwidth` bits per second."""
    step, base = step_of(case), step_of(dense)

    def below(step_time: float, other: float) -> float:
        compressed, without = (
            _on_links(case, step_time, bandwidth),
            _on_links(dense, other, bandwidth),
        )
        return break_even(lambda speed: without(speed) - compressed(speed))

    return Estimate(
        case.name,
        exchange_of(case),
        step,
        Span(base.low / step.high, base.middle / step.middle, base.high / step.low),
        Span(*sorted(map(below, step[::-1], base))),  # sorted already, except for rounding
    )


def _on_links(case: Case, step: float, here: float) -> Callable[[float], float]:
    """Return a function from bandwidth to step time, for a method that takes `step` on this link.

    For a measured method the model is off by the same seconds on all links; for a predicted one, by
    the same factor of the time that it adds to forward and backward.
    """
    predicted = case.step_at(here)
    added = predicted - case.compute
    if case.measured or added <= 0:
        return lambda other: step + case.step_at(other) - predicted
    share = (step - case.compute) / added
    return lambda other: case.compute + share * (case.step_at(other) - case.compute)


def decide(methods: Sequence[Estimate], bandwidth: float, first: Collection[str] = ()) -> Verdict:
    """Decide whether to compress, and by which method.

    Args:
        methods: estimates of all methods that compress.
        bandwidth: of the link, in bits per second.
        first: names of methods to prefer over faster ones, if they pay off.
    """
    if not methods:
        return Verdict("none", None)
    sure = [method for method in methods if pays(method, bandwidth)]
    if sure:
        fastest = min(sure, key=lambda method: method.step.middle)
        ahead = [method for method in sure if method.name in first] or [fastest]
        best = min(ahead, key=lambda method: method.step.middle)
        return Verdict("use", best, None if fastest is best else fastest)
    best = max(methods, key=lambda method: method.faster.middle)
    if all(method.faster.high * WORTH <= 1 for method in methods):
        return Verdict("none", best)
    return Verdict("cannot say", max(methods, key=lambda method: method.faster.high))


def pays(method: Estimate, bandwidth: float) -> bool:
    """Return True if it saves a tenth of a step in the worst case, and pays off on this link."""
    return method.faster.low * WORTH >= 1 and bandwidth < method.pays_below.low
