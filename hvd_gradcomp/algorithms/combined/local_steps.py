"""Local steps with an outer optimizer: DiLoCo, SparseLoCo, Streaming DiLoCo.

Each rank trains alone for `every` steps, with an optimizer of its own, the inner one. Then the
change of its parameters travels as a gradient would: the *pseudogradient*, the parameters at the
last exchange minus those of now. The mean over ranks goes into the outer optimizer, which moves
the global parameters, and all ranks go on from these.

Sources: Douillard et al. 2023 (DiLoCo), Algorithm 1; Douillard et al. 2025 (Streaming DiLoCo),
Algorithm 2, for fragments and overlap; Sarfi et al. 2025 (SparseLoCo), Algorithm 1; Lin et al. 2020
(post-local SGD) for the steps that are exchanged one by one at the beginning. By default the outer
optimizer adds the mean change, as in McMahan et al. 2017 (FedAvg), which needs no tuning: DiLoCo's
outer momentum does.

Here is what a step is due to do, and the outer optimizer's settings. The frontends run it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hvd_gradcomp.algorithms.combined.round_length import (
    Every,
    QuadraticRule,
    Round,
    called,
    length_of,
)
from hvd_gradcomp.algorithms.sparse.chunked_topk import ChunkedTopKCompressor
from hvd_gradcomp.core import validate
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.method.handover import correction_of

LOGGER = logging.getLogger("hvd_gradcomp")


@dataclass(frozen=True)
class OuterSGD:
    """Outer optimizer: SGD with momentum on pseudogradients `D`, as PyTorch computes it.

    `v = momentum * v + D`; then `global -= lr * (D + momentum * v)` with Nesterov's momentum, or
    `global -= lr * v` without. `OuterSGD()` averages what ranks send, which needs no tuning, and on
    two ranks ended near dense gradients wherever it was measured. A momentum can end ahead of it,
    but only behind dense first steps: `diloco()` has both.

    Args:
        lr: learning rate, positive.
        momentum: in [0, 1).
        nesterov: None for Nesterov's wherever there is momentum.

    Raises:
        ValueError: a value is out of range, or Nesterov's momentum is asked for without any.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool | None = None

    def __post_init__(self) -> None:
        validate.real(self, "lr", low=0)
        validate.real(self, "momentum", low=0, high=1, closed="[")
        if self.nesterov is None:
            validate.stands_for(self, "nesterov", self.momentum > 0)
        validate.boolean(self, "nesterov")
        if self.nesterov and not self.momentum:
            raise ValueError("OuterSGD: nesterov=True needs a momentum above 0")


AVERAGING = OuterSGD()
"""Averages what ranks send; the default of `LocalSteps`."""

EIGHTH = ChunkedTopKCompressor(k=512, values="int4", decay=1)
"""Sends one element in 8 of a change, in 4 bits, and keeps what is not sent: the default compressor
of `LocalSteps`. With every 5 steps it reached a loss soonest in docs/worth.md."""

DILOCO = OuterSGD(lr=0.7, momentum=0.9)
"""Settings of Douillard et al. 2023: Nesterov's momentum 0.9, learning rate 0.7."""


@dataclass(frozen=True)
class LocalSchedule:
    """Schedule of local steps: when which part of the parameters is exchanged.

    Steps count from 1. After those of the warm-up come rounds. In each round every fragment is sent
    once, one after another, `length / fragments` steps apart, so that traffic is even.

    Args:
        every: steps of a round: a number, at least 1; a `QuadraticRule`; or a function that is
            given the steps so far when a round begins, and returns its steps. It is called when
            the step before the round ends, and has to return the same on all ranks. Steps that
            `exchange()` has cut off a round count as made.
        warmup_steps: first steps, in which the ranks average their gradients in every step, dense,
            as without local steps.
        fragments: parts that are exchanged in turn, at most as many as a round has steps.
        delay: steps between sending a fragment and applying the result, fewer than a round has. The
            exchange overlaps with them.
        blend: weight of a rank's own parameters where a result is applied:
            `blend * own + (1 - blend) * global`, in [0, 1). None for 0.5 with a delay, as in
            Streaming DiLoCo, and for 0 without.
        deadline: seconds, more than 0, that ranks go on for those that have made fewer steps, so
            that they make different numbers of steps; None to exchange after as many on all. It
            may change between a save and a load, so `repr` leaves it out.

    Raises:
        ValueError: a value is out of range; fragments or a delay, which count steps, and a
            deadline; a deadline and a rule that follows the learning rate, which differs between
            ranks that have made different numbers of steps.

    >>> schedule, round_ = LocalSchedule(every=4, fragments=2, delay=1), Round(begun=0, length=4)
    >>> [(step, schedule.sends(step, round_), schedule.applies(step, round_)) for step in (2, 3, 4)]
    [(2, [0], []), (3, [], [0]), (4, [1], [])]
    >>> schedule.applies(5, Round(begun=4, length=4, before=4))
    [1]
    >>> LocalSchedule(lambda step: 5 if step < 1000 else 15)
    LocalSchedule(every=<lambda>, warmup_steps=0, fragments=1, delay=0, blend=0.0)
    """

    every: Every = 5
    warmup_steps: int = 0
    fragments: int = 1
    delay: int = 0
    blend: float | None = None
    deadline: float | None = None

    def __repr__(self) -> str:
        values = {**vars(self), "every": called(self.every)}
        del values["deadline"]
        return f"LocalSchedule({', '.join(f'{name}={value}' for name, value in values.items())})"

    def __post_init__(self) -> None:
        if isinstance(self.every, type) or (not callable(self.every) and not self.follows_rate):
            validate.whole(self, "every", low=1)
        validate.whole(self, "warmup_steps", low=0)
        fewest = self._fewest_steps
        validate.whole(self, "fragments", low=1, high=fewest)
        validate.whole(self, "delay", low=0, high=fewest - 1)
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
        if self.follows_rate:
            raise ValueError(
                "deadline= lets ranks make different numbers of steps, so that their learning "
                f"rates differ, and every={self.every} follows the rate: give every= a number or "
                "a function of the step with a deadline"
            )

    @property
    def _fewest_steps(self) -> int | float:
        """Return the fewest steps of a round that are known before it begins."""
        if isinstance(self.every, QuadraticRule):
            return self.every.base
        return self.every if isinstance(self.every, int) else math.inf

    @property
    def is_constant(self) -> bool:
        """Return True if all rounds have as many steps."""
        return isinstance(self.every, int)

    @property
    def follows_rate(self) -> bool:
        """Return True if the learning rate decides the steps of a round."""
        return isinstance(self.every, QuadraticRule)

    def length(self, step: int, rate: float, last_rate: float) -> int:
        """Return the steps of the round that begins after a step.

        Args:
            step: the number of the step.
            rate: the inner optimizer's learning rate; any if the rule does not follow it.
            last_rate: the rate of the round before; negative for the first round.

        Raises:
            ValueError: the user's function returns no such number.
        """
        shortest = max(self.fragments, self.delay + 1)
        return length_of(self.every, step, rate, last_rate, shortest)

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

    def sends(self, step: int, round_: Round) -> list[int]:
        """Return the fragments that are sent at the end of a step of a round."""
        at = step - round_.begun
        if at < 1:
            return []
        parts = range(self.fragments)
        return [f for f in parts if (f + 1) * round_.length // self.fragments == at]

    def applies(self, step: int, round_: Round) -> list[int]:
        """Return the fragments whose result is applied at the end of a step of a round.

        They may have been sent in the round before.
        """
        sent = step - self.delay
        if sent <= round_.begun:
            round_ = Round(round_.begun - round_.before, round_.before)
        return self.sends(sent, round_)


def warn_of_settings(
    momentum: float, compressor: Compressor, schedule: LocalSchedule, keeps_unsent: bool, ranks: int
) -> None:
    """Log warnings of settings that do not go together.

    An outer momentum loses if it begins with the first step of a training, and if few elements are
    sent: every 15 steps it ended 0.28 nats behind dense gradients by the default compressor, and
    0.09 by `Int8Compressor()` (docs/worth.md). With a delay the rank's own parameters are blended
    in. They have what the compressor has not sent and keeps, so it would count twice.

    Args:
        momentum: of the outer optimizer.
        compressor: of the pseudogradients, which may apply a momentum in its place.
        schedule: of the exchanges.
        keeps_unsent: whether the compressor has a residual.
        ranks: how many exchange.
    """
    applied = momentum or (correction_of(compressor) or (0.0, False))[0]
    if applied and not schedule.warmup_steps:
        LOGGER.warning(
            "an outer momentum of %g with warmup_steps=0: a model that was not trained before can "
            "end far behind dense gradients. Give warmup_steps=200 or more, as diloco() does, or "
            "average parameters: leave outer= and the compressor's momentum= out",
            applied,
        )
    if momentum and compressor == EIGHTH:
        LOGGER.warning(
            "an outer momentum of %g with the default compressor, which sends one element in 8, "
            "can end far behind dense gradients: give compression=None, as diloco() does, or "
            "Int8Compressor()",
            momentum,
        )
    if ranks == 1 and keeps_unsent:
        LOGGER.warning(
            "one rank alone exchanges with nobody, and what the compressor does not send at once "
            "waits all the same: give compression=None there. It is %s",
            compressor,
        )
    if schedule.delay and schedule.blend and keeps_unsent:
        LOGGER.warning(
            "delay=%d with a compressor that keeps what it does not send: the rank's own "
            "parameters, which are blended in, have it too, so it counts twice. Give "
            "compression=None, Int8Compressor() or blend=0. It is %s",
            schedule.delay,
            compressor,
        )


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


def diloco(every: Every = 15, warmup_steps: int = 200) -> dict[str, Any]:
    """Return the arguments of `LocalSteps` for DiLoCo: dense, outer Nesterov of 0.7 and 0.9.

    Douillard et al. 2023 exchange every 500 steps of a large training; shorter ones need shorter
    rounds, and 15 is what was measured. They begin with a pretrained model. Here the first steps
    average gradients instead: without them the momentum harms a model with small embeddings for
    good, where averaging is safe from the first step on (docs/fewer-exchanges.md has the
    trainings).

    Default: `diloco()`, as trained in docs/papers.md, in 600 steps.

    Args:
        every: as in `LocalSteps`.
        warmup_steps: dense first steps, a sixth to a third of a short training; 0 for a model that
            was trained before.

    >>> sorted(diloco(every=100))
    ['compression', 'every', 'outer', 'warmup_steps']
    >>> diloco()["outer"], diloco()["warmup_steps"]
    (OuterSGD(lr=0.7, momentum=0.9, nesterov=True), 200)
    """
    return {"every": every, "outer": DILOCO, "compression": None, "warmup_steps": warmup_steps}


def sparse_loco(every: Every = 4, chunk: int = 4096, k: int = 64) -> dict[str, Any]:
    """Return the arguments of `LocalSteps` for SparseLoCo (Sarfi et al. 2025).

    Chunked top-k with 2-bit values and a residual that decays by 0.95; the outer optimizer is SGD
    of learning rate 1 without momentum, since the residual acts as one.

    Default: `sparse_loco()` exchanges every 4 steps, as trained in docs/papers.md. Every 15 it sent
    4 times fewer bytes and was 4 times as far behind.

    >>> sparse_loco()["outer"]
    OuterSGD(lr=1.0, momentum=0.0, nesterov=False)
    """
    compressor = ChunkedTopKCompressor(chunk=chunk, k=k, values="int2", decay=0.95)
    return {"every": every, "outer": AVERAGING, "compression": compressor}
