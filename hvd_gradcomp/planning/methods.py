"""Methods of exchange that commands compare: in each step gradients or momenta, or local steps.

"dgc", "QSGDCompressor(bits=4)"                 gradients, during backward
"local()", "local(Int8Compressor(), every=15)"  `LocalSteps`
"momentum(OneBitCompressor())"                  `MomentumExchange`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_gradcomp.algorithms.combined.local_steps import (
    AVERAGING,
    EIGHTH,
    LocalSchedule,
    OuterSGD,
)
from hvd_gradcomp.algorithms.dense import as_compressor
from hvd_gradcomp.core import validate
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.method.handover import correction_of
from hvd_gradcomp.planning.description import brief


@dataclass(frozen=True)
class ExchangeMethod:
    """Method that exchanges gradients in each step, during backward.

    Args:
        compression: a compressor; None for none.

    Attributes:
        keyword: argument by which a training is told of the method; "" for gradients.
        every: steps for each exchange.
        overlaps: the exchange overlaps with backward.

    Raises:
        TypeError: `compression` is no compressor.
    """

    compression: Any = None

    keyword = ""
    every = 1
    overlaps = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "compression", as_compressor(self.compression, None))

    @property
    def compressor(self) -> Compressor:
        """Return the compressor of what is exchanged."""
        compressor: Compressor = self.compression
        return compressor

    @property
    def name(self) -> str:
        """Return the name for tables, without settings of default value."""
        return brief(self.compressor)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the arguments of `LocalSteps` or `MomentumExchange`, besides compression."""
        return {}


@dataclass(frozen=True)
class Local(ExchangeMethod):
    """Method that exchanges the change of the parameters every so many steps: `LocalSteps`.

    Args:
        compression: of the changes; by default that of `LocalSteps`, None for none.
        every: steps between two exchanges, at least 1.
        warmup_steps: first steps, in which gradients are averaged, dense.
        outer: the outer optimizer's settings.

    Raises:
        TypeError: `compression` is no compressor, or `outer` no `OuterSGD`.
        ValueError: a value is out of range.

    >>> Local(None, every=30).name
    'local(None(), every=30)'
    """

    compression: Any = EIGHTH
    every: int = 5
    warmup_steps: int = 0
    outer: OuterSGD = AVERAGING

    keyword = "local"
    overlaps = False

    def __post_init__(self) -> None:
        super().__post_init__()
        LocalSchedule(self.every, self.warmup_steps)
        if not isinstance(self.outer, OuterSGD):
            raise TypeError(f"outer= takes an OuterSGD, got {self.outer!r}")

    @property
    def name(self) -> str:
        more = "" if self.outer == AVERAGING else f", outer={self.outer}"
        more += f", warmup_steps={self.warmup_steps}" if self.warmup_steps else ""
        return f"local({super().name}, every={self.every}{more})"

    @property
    def settings(self) -> dict[str, Any]:
        return {"every": self.every, "warmup_steps": self.warmup_steps, "outer": self.outer}


@dataclass(frozen=True)
class Momentum(ExchangeMethod):
    """Method that exchanges Adam's momentum after backward, in each step: `MomentumExchange`.

    Args:
        compression: of the momenta; None for none.
        warmup_steps: first steps, in which gradients are averaged, dense; at least 1.

    Raises:
        TypeError: `compression` is no compressor.
        ValueError: a value is out of range, or the compressor corrects momentum itself.

    >>> Momentum(None, warmup_steps=20).name
    'momentum(None(), warmup_steps=20)'
    """

    warmup_steps: int = 100

    keyword = "momentum"
    overlaps = False

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.whole(self, "warmup_steps", low=1)
        momentum, _ = correction_of(self.compressor) or (0.0, False)
        if momentum != 0.0:
            raise ValueError(
                f"{self.compressor} corrects momentum, and here momenta are exchanged: give it "
                "momentum=0"
            )

    @property
    def name(self) -> str:
        more = "" if self.warmup_steps == 100 else f", warmup_steps={self.warmup_steps}"
        return f"momentum({super().name}{more})"

    @property
    def settings(self) -> dict[str, Any]:
        return {"warmup_steps": self.warmup_steps}
