"""Choice of local steps: how many, and which compressor, by the time to a loss. Pure.

`LocalSteps` takes less time a step and more steps. How many more depends on what is trained; here
it is what one small transformer needed (`docs/worth.md`, `make worth`), from the quickest of three
seeds to the slowest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hvd_gradcomp.algorithms.quantized.narrow import Int8Compressor
from hvd_gradcomp.algorithms.sparse.chunked_topk import ChunkedTopKCompressor
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.tuning.recommend import WORTH, Span


class Setting(NamedTuple):
    """Local steps with a compressor.

    Attributes:
        compressor: of the changes that are exchanged.
        every: local steps between two exchanges.
        steps: that it needs to a loss, over those with an uncompressed exchange in each step.
    """

    compressor: Compressor
    every: int
    steps: Span


SETTINGS = (
    Setting(Int8Compressor(), 5, Span(450 / 420, 480 / 420, 510 / 420)),
    Setting(Int8Compressor(), 15, Span(480 / 420, 540 / 420, 570 / 420)),
    Setting(
        ChunkedTopKCompressor(k=512, values="int4", decay=1),
        5,
        Span(480 / 420, 510 / 420, 570 / 420),
    ),
)


class Choice(NamedTuple):
    """Recommended local steps.

    Attributes:
        setting: what to use.
        step: mean seconds of a step.
        sooner: at the same loss than with an uncompressed exchange in each step.
    """

    setting: Setting
    step: Span
    sooner: Span


def choose(
    exchanges: Mapping[Compressor, Span], dense: Span, plain: Span, compute: float
) -> Choice | None:
    """Choose the local steps that reach a loss soonest, or None.

    None where an uncompressed exchange takes no longer than forward and backward: fewer exchanges
    then save at most half of the time, and the steps that they cost may take it all.

    Args:
        exchanges: seconds of an exchange with each compressor that is known.
        dense: seconds of an uncompressed exchange.
        plain: seconds of a step with one.
        compute: seconds of forward and backward.
    """
    if dense.middle <= compute:
        return None
    choices = []
    for setting in SETTINGS:
        if setting.compressor in exchanges:
            step = Span(*(compute + x / setting.every for x in exchanges[setting.compressor]))
            longest, usual, shortest = (s * n for s, n in zip(step[::-1], setting.steps[::-1]))
            sooner = Span(plain.low / longest, plain.middle / usual, plain.high / shortest)
            choices.append(Choice(setting, step, sooner))
    sure = [choice for choice in choices if choice.sooner.low * WORTH >= 1]
    return max(sure, key=lambda choice: choice.sooner.middle, default=None)
