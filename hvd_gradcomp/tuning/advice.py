"""Recommendation of this package, by how communication-bound a step is: one table for all texts.

README.md and docs/which.md show it as `markdown` writes it. `hvd-gradcomp advise` recommends the
same settings, where it measures that they pay. They are those that `make worth` measured to reach a
loss soonest (docs/worth.md).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hvd_gradcomp.tuning.fewer_exchanges import EIGHTH_EVERY_5, QSGD, Setting


class Advice(NamedTuple):
    """Row of the recommendation.

    Attributes:
        above, below: bounds of the time of an uncompressed exchange, in steps without one.
        setting: what to use; None for an uncompressed exchange in each step.
        typed: what a user types.
        remark: what else to know.
    """

    above: float
    below: float
    setting: Setting | None
    typed: str
    remark: str

    @property
    def ratios(self) -> str:
        """Return the bounds in words."""
        if self.above == 0.0:
            return f"below {self.below:g}"
        if math.isinf(self.below):
            return f"{self.above:g} and more"
        return f"{self.above:g} to {self.below:g}"


LOCAL_STEPS = "tune the learning rate; from 14 hosts on add `compression=Int8Compressor()`"
TABLE = (
    Advice(0.0, 0.5, None, "no compression", "or ask `advise`: local steps gained a fifth at most"),
    Advice(0.5, 1.0, QSGD, "QSGDCompressor(bits=4)", "ask `advise`: it may not pay"),
    Advice(1.0, math.inf, EIGHTH_EVERY_5, "local_steps(...)", LOCAL_STEPS),
    Advice(
        1.0,
        math.inf,
        QSGD,
        "QSGDCompressor(bits=4)",
        "if replicas have to be equal after each step; it gains less",
    ),
)


def markdown() -> str:
    """Return the table in Markdown."""
    rows = ["| dense exchange / step | use | |", "|---|---|---|"]
    for advice in TABLE:
        typed = f"`{advice.typed}`" if advice.setting else advice.typed
        rows.append(f"| {advice.ratios} | {typed} | {advice.remark} |")
    return "\n".join(rows)
