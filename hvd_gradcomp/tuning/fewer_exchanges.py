"""Choice of fewer exchanges, or smaller ones, by the time to a loss. Pure.

Fewer exchanges make a step shorter, and a training needs more of them. How many more is a law that
was measured (`LAW`; docs/worth.md, `make worth`): by the compressor, by the steps between two
exchanges, and by the number of hosts. `beyond` names what is out of its range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from hvd_gradcomp.algorithms.combined.local_steps import EIGHTH
from hvd_gradcomp.algorithms.quantized.narrow import Int8Compressor
from hvd_gradcomp.algorithms.quantized.qsgd import QSGDCompressor
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.tuning.recommend import WORTH, Span

HOSTS, PARAMETERS = (2, 8), (0.8e6, 0.9e6)  # of the trainings that the law was measured on


class Setting(NamedTuple):
    """Compressor, and steps for each exchange.

    Attributes:
        compressor: of what is exchanged.
        every: steps for each exchange.
        lengths: steps that a training needs to a loss, over those with an uncompressed exchange in
            each; by the number of hosts.
    """

    compressor: Compressor
    every: int
    lengths: Mapping[int, Span]

    def length(self, hosts: int) -> Span | None:
        """Return the length on so many hosts: between those that were measured by their logarithm.

        None where it was measured on fewer hosts only; beyond the law's range, that of its end.
        """
        known = sorted(self.lengths)
        place = min(max(hosts, HOSTS[0]), HOSTS[1])
        if not known[0] <= place <= known[-1]:
            return None
        above = next(n for n in known if n >= place)
        below = max(n for n in known if n <= place)
        if above == below:
            return self.lengths[above]
        share = math.log(place / below) / math.log(above / below)
        low, high = self.lengths[below], self.lengths[above]
        return Span(*(a + share * (b - a) for a, b in zip(low, high)))


QSGD = Setting(
    QSGDCompressor(bits=4),
    1,
    {2: Span(1.0, 1.0, 1.04), 4: Span(1.0, 1.0, 1.0), 8: Span(1.0, 1.02, 1.06)},
)
INT8_EVERY_5 = Setting(
    Int8Compressor(),
    5,
    {2: Span(1.05, 1.08, 1.11), 4: Span(1.19, 1.22, 1.26), 8: Span(1.49, 1.54, 1.6)},
)
INT8_EVERY_15 = Setting(Int8Compressor(), 15, {2: Span(1.19, 1.21, 1.24), 4: Span(1.65, 1.7, 1.76)})
EIGHTH_EVERY_5 = Setting(
    EIGHTH,
    5,
    {2: Span(1.04, 1.07, 1.11), 4: Span(1.22, 1.25, 1.28), 8: Span(1.51, 1.56, 1.62)},
)
LAW = (QSGD, INT8_EVERY_5, INT8_EVERY_15, EIGHTH_EVERY_5)


class Choice(NamedTuple):
    """Recommended setting.

    Attributes:
        setting: what to use.
        step: mean seconds of a step.
        length: see `Setting`.
        sooner: at the same loss than with an uncompressed exchange in each step.
    """

    setting: Setting
    step: Span
    length: Span
    sooner: Span


def choose(
    exchanges: Mapping[Compressor, Span],
    steps: Mapping[Compressor, Span],
    plain: Span,
    compute: float,
    hosts: int,
) -> Choice | None:
    """Choose what reaches a loss soonest, or None.

    None where nothing is at least a tenth sooner at worst, and where the soonest is a compressor
    that exchanges in each step.

    Args:
        exchanges: seconds of an exchange that overlaps with nothing, with each compressor.
        steps: seconds of a step in which each compressor exchanges.
        plain: seconds of a step with an uncompressed exchange.
        compute: seconds of forward and backward.
        hosts: that exchange.
    """
    choices = []
    for setting in LAW:
        length, compressor = setting.length(hosts), setting.compressor
        if length is None:
            continue
        if setting.every == 1 and compressor in steps:
            step = steps[compressor]
        elif setting.every > 1 and compressor in exchanges:
            step = Span(*(compute + x / setting.every for x in exchanges[compressor]))
        else:
            continue
        longest, usual, shortest = (s * n for s, n in zip(step[::-1], length[::-1]))
        sooner = Span(plain.low / longest, plain.middle / usual, plain.high / shortest)
        choices.append(Choice(setting, step, length, sooner))
    sure = [choice for choice in choices if choice.sooner.low * WORTH >= 1]
    best = max(sure, key=lambda choice: choice.sooner.middle, default=None)
    return None if best is None or best.setting.every == 1 else best


def beyond(hosts: int, parameters: int) -> str:
    """Return the hosts and parameters that are out of the law's range, in words; empty for none."""
    unlike = []
    if not HOSTS[0] <= hosts <= HOSTS[1]:
        unlike.append(f"{hosts} hosts")
    if not PARAMETERS[0] <= parameters <= PARAMETERS[1]:
        unlike.append(f"{parameters:,} parameters")
    return " and ".join(unlike)
