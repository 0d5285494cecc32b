"""Local steps with an outer optimizer: DiLoCo, SparseLoCo, Streaming DiLoCo.

Each rank trains alone for `every` steps, with an optimizer of its own, the inner one. Then the
change of its parameters travels as a gradient would: the *pseudogradient*, the parameters at the
last exchange minus those of now. The mean over ranks goes into the outer optimizer, which moves
the global parameters, and all ranks go on from these.

Sources: Douillard et al. 2023 (DiLoCo), Algorithm 1; Douillard et al. 2025 (Streaming DiLoCo),
Algorithm 2, for fragments and overlap; Sarfi et al. 2025 (SparseLoCo), Algorithm 1; Lin et al. 2020
(post-local SGD) for the steps that are exchanged one by one at the beginning. `LocalSteps` averages
by default, as in McMahan et al. 2017 (FedAvg), which needs no tuning: DiLoCo's outer momentum does.

Here is what a step is due to do, and the outer optimizer's settings. The frontends run it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from hvd_gradcomp.algorithms.sparse.chunked_topk import ChunkedTopKCompressor
from hvd_gradcomp.core import validate
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.method.handover import correction_of

LOGGER = logging.getLogger("hvd_gradcomp")


@dataclass(frozen=True)
class OuterSGD:
    """Outer optimizer: SGD with momentum on pseudogradients `D`, as PyTorch computes it.

    `v = momentum * v + D`; then `global -= lr * (D + momentum * v)` with Nesterov's momentum, or
    `global -= lr * v` without. `OuterSGD(lr=1.0, momentum=0.0)` averages the ranks' parameters.

    Args:
        lr: learning rate, positive.
        momentum: in [0, 1).
        nesterov: None for Nesterov's wherever there is momentum.

    Raises:
        ValueError: a value is out of range, or Nesterov's momentum is asked for without any.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool | None = None

    def __post_init__(self) -> None:
        validate.real(self, "lr", low=0)
        validate.real(self, "momentum", low=0, high=1, closed="[")
        if self.nesterov is None:
            validate.stands_for(self, "nesterov", self.momentum > 0)
        validate.boolean(self, "nesterov")
        if self.nesterov and not self.momentum:
            raise ValueError("OuterSGD: nesterov=True needs a momentum above 0")


AVERAGING = OuterSGD(lr=1.0, momentum=0.0)
"""Averages the ranks' parameters; the default of `LocalSteps`."""

DILOCO = OuterSGD(lr=0.7, momentum=0.9)
"""Settings of Douillard et al. 2023: Nesterov's momentum 0.9, learning rate 0.7."""


def warn_without_warmup(momentum: float, compressor: Compressor, warmup_steps: int) -> None:
    """Log a warning if an outer momentum begins with the first step of a training.

    Args:
        momentum: of the outer optimizer.
        compressor: of the pseudogradients, which may apply a momentum in its place.
        warmup_steps: dense first steps.
    """
    applied = momentum or (correction_of(compressor) or (0.0, False))[0]
    if applied and not warmup_steps:
        LOGGER.warning(
            "an outer momentum of %g with warmup_steps=0: a model that was not trained before can "
            "end far behind dense gradients. Give warmup_steps=200 or more, as diloco() does, or "
            "average parameters: leave outer= and the compressor's momentum= out",
            applied,
        )


@dataclass(frozen=True)
class LocalSchedule:
    """Schedule of local steps: when which part of the parameters is exchanged.

    Steps count from 1. With several fragments, one after another is sent, `every / fragments` steps
    apart, so that traffic is even; each is sent once in `every` steps.

    Args:
        every: steps between two exchanges of the same parameters, at least 1.
        warmup_steps: first steps, in which the ranks average their gradients in every step, dense,
            as without local steps.
        fragments: parts that are exchanged in turn, at most `every`.
        delay: steps between sending a fragment and applying the result, less than `every`. The
            exchange overlaps with them.
        blend: weight of a rank's own parameters where a result is applied:
            `blend * own + (1 - blend) * global`, in [0, 1). None for 0.5 with a delay, as in
            Streaming DiLoCo, and for 0 without.
        deadline: seconds, more than 0, that ranks go on for those that have made fewer steps, so
            that they make different numbers of steps; None to exchange after as many on all. It
            may change between a save and a load, so `repr` leaves it out.

    Raises:
        ValueError: a value is out of range; fragments or a delay, which count steps, and a
            deadline.

    >>> schedule = LocalSchedule(every=4, fragments=2, delay=1)
    >>> [(step, schedule.sends(step), schedule.applies(step)) for step in range(2, 6)]
    [(2, [0], []), (3, [], [0]), (4, [1], []), (5, [], [1])]
    """

    every: int = 15
    warmup_steps: int = 0
    fragments: int = 1
    delay: int = 0
    blend: float | None = None
    deadline: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        validate.whole(self, "every", low=1)
        validate.whole(self, "warmup_steps", low=0)
        validate.whole(self, "fragments", low=1, high=self.every)
        validate.whole(self, "delay", low=0, high=self.every - 1)
        if self.blend is None:
            validate.stands_for(self, "blend", 0.5 if self.delay else 0.0)
        validate.real(self, "blend", low=0, high=1, closed="[")
        if self.deadline is not None:
            self._check_deadline()

    def _check_deadline(self) -> None:
        seconds = self.deadline
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
            raise ValueError(f"deadline= takes seconds, more than 0, or None, got {seconds!r}")
        if self.fragments > 1 or self.delay:
            raise ValueError(
                "deadline= lets ranks make different numbers of steps, which fragments= and delay= "
                "count: leave them out with a deadline"
            )

    def check_averages_in_hosts(self) -> None:
        """Check that ranks of a host can average their gradients in every step.

        Raises:
            ValueError: they make different numbers of steps.
        """
        if self.deadline is not None:
            raise ValueError(
                "deadline= lets ranks make different numbers of steps, and those of a host average "
                "their gradients in each, by hierarchical=True or DistributedDataParallel over a "
                "host: use one of the two"
            )

    def warms_up(self, step: int) -> bool:
        """Return True if gradients are averaged in this step."""
        return step <= self.warmup_steps

    def sends(self, step: int) -> list[int]:
        """Return the fragments that are sent at the end of a step."""
        alone = step - self.warmup_steps
        if alone < 1:
            return []
        return [f for f in range(self.fragments) if (alone - self._place(f)) % self.every == 0]

    def applies(self, step: int) -> list[int]:
        """Return the fragments whose result is applied at the end of a step."""
        return self.sends(step - self.delay) if step > self.delay else []

    def _place(self, fragment: int) -> int:
        return (fragment + 1) * self.every // self.fragments


def cut(sizes: Sequence[int], fragments: int) -> list[range]:
    """Cut a list of layers into consecutive fragments of about as many elements each.

    Args:
        sizes: elements of each layer.
        fragments: number of parts; not more than layers.

    Raises:
        ValueError: there are fewer layers than fragments.

    >>> cut([10, 10, 30, 10], 2)
    [range(0, 2), range(2, 4)]
    """
    if fragments > len(sizes):
        raise ValueError(f"fragments={fragments}, and there are {len(sizes)} layers to cut")
    ends = list(accumulate(sizes))
    starts = [0]
    for fragment in range(1, fragments):
        least, last = starts[-1] + 1, len(sizes) - (fragments - fragment)
        goal = ends[-1] * fragment / fragments
        starts.append(min(range(least, last + 1), key=lambda at: abs(ends[at - 1] - goal)))
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(sizes)])]


def diloco(every: int = 30, warmup_steps: int = 200) -> dict[str, Any]:
    """Return the arguments of `LocalSteps` for DiLoCo: dense, outer Nesterov of 0.7 and 0.9.

    Douillard et al. 2023 exchange every 500 steps of a large training; shorter ones need shorter
    rounds. They begin with a pretrained model. Here the first steps average gradients instead:
    without them the momentum harms a model with small embeddings for good (docs/fewer-exchanges.md
    has the trainings).

    Args:
        every: steps between two exchanges.
        warmup_steps: dense first steps, a sixth to a third of a short training; 0 for a model that
            was trained before.

    >>> sorted(diloco(every=100))
    ['compression', 'every', 'outer', 'warmup_steps']
    >>> diloco()["outer"], diloco()["warmup_steps"]
    (OuterSGD(lr=0.7, momentum=0.9, nesterov=True), 200)
    """
    return {"every": every, "outer": DILOCO, "compression": None, "warmup_steps": warmup_steps}


def sparse_loco(every: int = 15, chunk: int = 4096, k: int = 64) -> dict[str, Any]:
    """Return the arguments of `LocalSteps` for SparseLoCo (Sarfi et al. 2025).

    Chunked top-k with 2-bit values and a residual that decays by 0.95; the outer optimizer is SGD
    of learning rate 1 without momentum, since the residual acts as one.

    >>> sparse_loco()["outer"]
    OuterSGD(lr=1.0, momentum=0.0, nesterov=False)
    """
    compressor = ChunkedTopKCompressor(chunk=chunk, k=k, values="int2", decay=0.95)
    return {"every": every, "outer": AVERAGING, "compression": compressor}
