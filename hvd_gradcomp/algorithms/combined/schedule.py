"""EGC's automatic learning-rate correction (Kuang et al. 2019, section IV.B)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_gradcomp.core import validate


@dataclass
class EGCCorrection:
    """Schedule that divides rates by `1 + t * epoch` when the validation loss stops falling.

    After `patience` consecutive epochs without a new lowest loss, each rate becomes
    `max(rate / (1 + t * epoch), min_lr)`, and the count restarts. Epochs count from 1. A non-finite
    loss is never a new lowest. A rate never grows: a rate already below its `min_lr` stays.

    The paper's text and its Algorithm 2 differ; this follows the text: only consecutive epochs
    count, while the algorithm counts all of them, and each loss is compared with the lowest, while
    the algorithm compares with the last larger one. The paper gives no values; the defaults are
    ours.

    Args:
        patience: `n` in the paper; epochs, at least 1.
        t: rate of attenuation; positive.
        min_lr: lower limit of the learning rates, not negative; one for all or one for each.
        epoch: epochs seen.
        best: lowest loss seen.
        waited: epochs since the lowest loss or the last correction.

    Raises:
        ValueError: a parameter is out of range.

    >>> rule = EGCCorrection(patience=2, t=0.5)
    >>> [rule.step(loss, [1.0]) for loss in (3.0, 2.0, 2.0, 2.5)]
    [[1.0], [1.0], [1.0], [0.3333333333333333]]
    """

    patience: int = 3
    t: float = 0.1
    min_lr: float | Sequence[float] = 0.0
    epoch: int = 0
    best: float = math.inf
    waited: int = 0

    def __post_init__(self) -> None:
        validate.whole(self, "patience", low=1)
        validate.real(self, "t", low=0)
        if isinstance(self.min_lr, (list, tuple)):
            for i, low in enumerate(self.min_lr):
                validate.number(self, f"min_lr[{i}]", low, low=0, closed="[")
        else:
            validate.real(self, "min_lr", low=0, closed="[")

    def floors(self, count: int) -> list[float]:
        """Return the lower limits of `count` rates.

        Raises:
            ValueError: `min_lr` is a list of another length.
        """
        if not isinstance(self.min_lr, (list, tuple)):
            return [self.min_lr] * count  # type: ignore[list-item]
        if len(self.min_lr) != count:
            raise ValueError(
                f"EGCCorrection: min_lr must be a number or {count} of them, one for each "
                f"learning rate, got {self.min_lr!r}"
            )
        return list(self.min_lr)

    def step(self, loss: float, rates: Sequence[float]) -> list[float]:
        """Return the rates after an epoch that ended with this validation loss."""
        floors = self.floors(len(rates))
        self.epoch += 1
        if math.isfinite(loss) and loss < self.best:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        if self.waited < self.patience:
            return list(rates)
        self.waited = 0
        divisor = 1.0 + self.t * self.epoch
        return [min(rate, max(rate / divisor, low)) for rate, low in zip(rates, floors)]
