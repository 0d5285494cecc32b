"""Which way of exchanging to use, by what was measured and predicted. Pure: nothing is run here.

Every number is a `Span`, and only what holds over whole spans is said:

- where whole exchanges were measured they count, and the model only says how much of them hides
  behind backward;
- without them the model's own error is taken to be `ERROR`;
- a method is recommended only if at worst it saves a tenth of the step that is the best case
  without it, and only on links slower than its own break-even at worst;
- none is, if at best no method saves a tenth; between the two it cannot be said.

Time is not all: `decide` may be told of ways that go before faster ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from hvd_gradcomp.core.cost_model import break_even

ROUNDS = 5  # with fewer the spread of rounds says too little of the median
SURE = 0.9  # that a median lies within its span
WORTH = 0.9  # of the dense step's time: what takes more is not worth another method
ERROR = 0.3  # of a prediction: of 27 between shaped hosts (docs/speed.md) 26 were within


class Span(NamedTuple):
    """An estimate, and from where to where it may lie."""

    low: float
    middle: float
    high: float


class Case(NamedTuple):
    """A way to exchange, in seconds.

    Attributes:
        name: what it is called.
        predicted: of an exchange.
        hidden: how much of that is predicted to hide behind backward.
        measured: whole exchanges, `ROUNDS` and more; or none.
        step_at: the predicted step, by bits a second of a link.
        compute: forward and backward.
        backward: that an exchange can hide behind.
    """

    name: str
    predicted: float
    hidden: float
    measured: Sequence[float]
    step_at: Callable[[float], float]
    compute: float = 0.0
    backward: float = 0.0


class Estimate(NamedTuple):
    """What came out for a way.

    Attributes:
        name: of the way.
        exchange, step: seconds.
        faster: how many times faster than without compression a step is.
        pays_below: bits a second below which it saves anything; 0 if nowhere.
    """

    name: str
    exchange: Span
    step: Span
    faster: Span
    pays_below: Span


class Verdict(NamedTuple):
    """What to do.

    Attributes:
        answer: "use", "none" or "cannot say".
        best: the estimate that the answer is about: the one to use, or the one that comes closest;
            None if there is nothing but dense gradients.
        faster: what is faster than `best`, and comes behind it.
    """

    answer: str
    best: Estimate | None
    faster: Estimate | None = None


def median(samples: Sequence[float]) -> Span:
    """The median, and between which order statistics that of all rounds lies, nine times of ten.

    The median of whatever is drawn lies outside of the k-th least and the k-th most of n samples
    with a chance of `2 * P(Binomial(n, 1/2) < k)`: no form of noise is assumed.

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
    """What an exchange takes: measured if it was, else predicted and the error of that."""
    if case.measured:
        return median(case.measured)
    return Span((1 - ERROR) * case.predicted, case.predicted, (1 + ERROR) * case.predicted)


def step_of(case: Case) -> Span:
    """Forward, backward, and as much of the exchange as does not hide behind backward."""

    def step(exchange: float, hidden: float) -> float:
        return case.compute + max(exchange - min(hidden, case.backward), 0.0)

    took, hidden = exchange_of(case), case.hidden
    return Span(
        step(took.low, (1 + ERROR) * hidden),
        step(took.middle, hidden),
        step(took.high, (1 - ERROR) * hidden),
    )


def estimate(case: Case, dense: Case, bandwidth: float) -> Estimate:
    """A way beside dense gradients, on a link of so many bits a second."""
    step, base = step_of(case), step_of(dense)

    def below(mine: float, other: float) -> float:
        way, without = _on_links(case, mine, bandwidth), _on_links(dense, other, bandwidth)
        return break_even(lambda there: without(there) - way(there))

    return Estimate(
        case.name,
        exchange_of(case),
        step,
        Span(base.low / step.high, base.middle / step.middle, base.high / step.low),
        Span(*sorted(map(below, step[::-1], base))),  # in order, but for rounding
    )


def _on_links(case: Case, step: float, here: float) -> Callable[[float], float]:
    """A step by the bandwidth of a link, of a way that takes so long on this one.

    What was measured differs from the model by as many seconds on all links; what was not, since
    it is the model that errs, by the same share of what it adds to forward and backward.
    """
    predicted = case.step_at(here)
    added = predicted - case.compute
    if case.measured or added <= 0:
        return lambda there: step + case.step_at(there) - predicted
    share = (step - case.compute) / added
    return lambda there: case.compute + share * (case.step_at(there) - case.compute)


def decide(ways: Sequence[Estimate], bandwidth: float, first: Collection[str] = ()) -> Verdict:
    """Whether to compress, and by which way.

    Args:
        ways: all that compress.
        bandwidth: of the link, in bits a second.
        first: names of ways that go before others, however fast, where they pay.
    """
    if not ways:
        return Verdict("none", None)
    sure = [way for way in ways if pays(way, bandwidth)]
    if sure:
        fastest = min(sure, key=lambda way: way.step.middle)
        ahead = [way for way in sure if way.name in first] or [fastest]
        best = min(ahead, key=lambda way: way.step.middle)
        return Verdict("use", best, None if fastest is best else fastest)
    best = max(ways, key=lambda way: way.faster.middle)
    if all(way.faster.high * WORTH <= 1 for way in ways):
        return Verdict("none", best)
    return Verdict("cannot say", max(ways, key=lambda way: way.faster.high))


def pays(way: Estimate, bandwidth: float) -> bool:
    """Whether it saves a tenth of a step at worst, and this link is one that it pays on."""
    return way.faster.low * WORTH >= 1 and bandwidth < way.pays_below.low
