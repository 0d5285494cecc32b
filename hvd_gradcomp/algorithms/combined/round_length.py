"""Lengths of rounds of local steps: a number, a rule that follows the learning rate, a function."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Union

from hvd_gradcomp.core import validate

_LONGEST = 2**31 - 1
_SLACK = 1e-6  # so that a rate of half the peak gives four times as many steps, and not one fewer


@dataclass(frozen=True)
class QuadraticRule:
    """Rounds that grow as the learning rate falls: `(alpha / rate)**2` steps, at least `base`.

    Gu, Lyu, Arora, Li 2024, "A Quadratic Synchronization Rule for Distributed Deep Learning",
    Algorithm 2. With `alpha = peak * base**0.5` a round has `base` steps at the largest rate, 4
    times as many at half of it, and 100 times as many at a tenth.

    A round gets its length when it begins, from the inner optimizer's rate in the step before, the
    largest one of its groups. While the rate rises, in a warm-up, a round has `base` steps, and so
    has the first one.

    Args:
        alpha: positive; larger is rarer. The authors take 2 to 4 times the peak rate.
        base: fewest steps of a round, at least 1.
        longest: most steps of a round, at least `base`: rates that end near 0 would end the
            exchanges.

    Raises:
        ValueError: a value is out of range.

    >>> rule = QuadraticRule(alpha=0.012, base=4)
    >>> [rule.length(rate, 0.006) for rate in (0.006, 0.003, 0.0006, 0.0)]
    [4, 16, 400, 1000]
    >>> rule.length(0.003, last_rate=0.002)
    4
    """

    alpha: float
    base: int = 4
    longest: int = 1000

    def __post_init__(self) -> None:
        validate.real(self, "alpha", low=0)
        validate.whole(self, "base", low=1, high=_LONGEST)
        validate.whole(self, "longest", low=self.base, high=_LONGEST)

    def length(self, rate: float, last_rate: float) -> int:
        """Return the steps of a round.

        Args:
            rate: the learning rate when the round begins.
            last_rate: the same of the round before; negative for the first round.
        """
        if rate > last_rate:
            return self.base
        if self.alpha >= math.sqrt(self.longest) * rate:
            return self.longest
        return min(self.longest, max(self.base, int((self.alpha / rate) ** 2 + _SLACK)))


Every = Union[int, QuadraticRule, Callable[[int], int]]
"""Steps of a round: a number, a rule, or a function of the steps that the schedule has counted."""


class Round(NamedTuple):
    """Place of a round among the steps that a schedule counts.

    Attributes:
        begun: steps before it.
        length: its steps; 0 before the first round.
        before: steps of the round before it; 0 for none.
        rate: the learning rate that decided its length; negative if none did.
    """

    begun: int = 0
    length: int = 0
    before: int = 0
    rate: float = -1.0


FIRST = Round()
"""Place of a schedule whose first round has not begun."""


def called(every: Every) -> str:
    """Return a name of what decides lengths, which is the same in all processes.

    >>> called(15), called(QuadraticRule(0.01)), called(called)
    ('15', 'QuadraticRule(alpha=0.01, base=4, longest=1000)', '<called>')
    """
    if isinstance(every, (int, QuadraticRule)):
        return repr(every)
    name = getattr(every, "__qualname__", type(every).__qualname__)
    return f"<{name.rpartition('<locals>.')[2].strip('<>')}>"


def length_of(every: Every, step: int, rate: float, last_rate: float, shortest: int) -> int:
    """Return the steps of the round that begins.

    Args:
        every: decides.
        step: steps that the schedule has counted.
        rate, last_rate: see `QuadraticRule.length`.
        shortest: fewest steps that a round may have.

    Raises:
        ValueError: a function returns something else than that many steps, or more.
    """
    if isinstance(every, int):
        return every
    if isinstance(every, QuadraticRule):
        return every.length(rate, last_rate)
    returned = every(step)
    try:
        length = operator.index(returned)
    except TypeError:
        length = 0
    if isinstance(returned, bool) or not shortest <= length <= _LONGEST:
        raise ValueError(
            f"every={called(every)} returns {returned!r} after {step} steps, and a round takes a "
            f"whole number of steps, at least {shortest}: as many as fragments=, more than delay="
        )
    return length
