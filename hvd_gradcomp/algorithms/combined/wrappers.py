"""Composed compressors: one after another, and momentum after the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.collectives import Switch
from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.composite import Composite
from hvd_gradcomp.method.compressor import Compressor, Context, Program, Report, derived
from hvd_gradcomp.method.handover import (
    Correction,
    Handover,
    correction_of,
    inherited,
    residual_of,
)
from hvd_gradcomp.ops import Ops, Tensor


class MomentumState(NamedTuple):
    """State of `MomentumAfter`."""

    inner: Any
    velocity: Tensor  # [size], replicated


@dataclass(frozen=True)
class MomentumAfter(Composite, Handover):
    """Momentum on the exchanged mean, for layers whose compressor does not correct it.

    If the optimizer has handed its momentum over, these layers apply it here: `u = m*u + mean`, and
    the result is `u` (with Nesterov `m*u + mean`). State: that of `inner` and 4 bytes for each
    element.

    Args:
        inner: the compressor that exchanges.
        momentum: in (0, 1).
        nesterov: the look-ahead variant.
    """

    inner: Compressor
    momentum: float
    nesterov: bool = False

    in_common = frozenset({"velocity"})

    def __post_init__(self) -> None:
        validate.real(self, "momentum", low=0, high=1)
        validate.boolean(self, "nesterov")

    @property
    def children(self) -> dict[str, Compressor]:
        return {"inner": self.inner}

    @derived
    def native_dtypes(self) -> frozenset[str]:
        return self.inner.native_dtypes

    @property
    def working(self) -> Compressor:
        return self.inner.working

    @property
    def correction(self) -> Correction:
        return self.momentum, self.nesterov

    def start(self, ops: Ops, layout: Layout, ranks: int) -> MomentumState:
        velocity = ops.zeros((layout.size,), layout.dtype)
        return MomentumState(self.inner.start(ops, layout, ranks), velocity)

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: MomentumState, **extra: Tensor
    ) -> Program:
        program = self.inner.aggregate(ops, context, gradient, state.inner, **extra)
        mean, inner = yield from program
        velocity = ops.accumulate(ops.scale(state.velocity, self.momentum), mean)
        if self.nesterov:
            mean = ops.accumulate(ops.times(velocity, self.momentum), mean)
        else:
            mean = ops.overwrite(mean, velocity)
        return mean, MomentumState(inner, velocity)

    def velocity(self, state: MomentumState) -> Tensor:
        return state.velocity

    def with_velocity(self, state: MomentumState, velocity: Tensor) -> MomentumState:
        return state._replace(velocity=velocity)

    def residual(self, state: MomentumState) -> Tensor | None:
        return residual_of(self.inner, state.inner)

    def report(self, layout: Layout, state: MomentumState, steps: int, since: int = 0) -> Report:
        return self.inner.report(layout, state.inner, steps, since)


class AfterState(NamedTuple):
    """State of `After`."""

    first: Any
    then: Any


@dataclass(frozen=True)
class After(Composite, Handover):
    """Two phases; made by `after`."""

    steps: int
    first: Compressor
    then: Compressor

    def __post_init__(self) -> None:
        validate.whole(self, "steps", low=1)

    @property
    def children(self) -> dict[str, Compressor]:
        return {"first": self.first, "then": self.then}

    def __str__(self) -> str:
        return f"after({self.steps}, {self.first}, {self.then})"

    @property
    def working(self) -> Compressor:
        return self.then.working

    @property
    def correction(self) -> Correction | None:
        return correction_of(self.then) or correction_of(self.first)

    def corrected(self, momentum: float, nesterov: bool) -> Compressor:
        both = (corrected(c, momentum, nesterov) for c in (self.first, self.then))
        return After(self.steps, *both)

    def of_layers(self, layers: Sequence[Layer], ranks: int) -> list[Compressor]:
        both = (c.of_layers(layers, ranks) for c in (self.first, self.then))
        return [After(self.steps, first, then) for first, then in zip(*both)]

    def start(self, ops: Ops, layout: Layout, ranks: int) -> AfterState:
        both = (c.start(ops, layout, ranks) for c in (self.first, self.then))
        return AfterState(*both)

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: AfterState, **extra: Tensor
    ) -> Program:
        def before() -> Program:
            arguments = _moments_for(self.first, extra)
            program = self.first.aggregate(ops, context, gradient, state.first, **arguments)
            mean, first = yield from program
            return mean, AfterState(first, state.then)

        def then(inherits: bool) -> Program:
            start, whole = state.then, gradient
            if inherits and isinstance(self.first, Handover):
                residual = self.first.residual(state.first)
                if residual is not None:
                    start, whole = inherited(self.then, ops, start, whole, residual)
                velocity = self.first.velocity(state.first)
                if velocity is not None and isinstance(self.then, Handover):
                    # Copy: a program may write to its state, and the first phase owns this tensor.
                    start = self.then.with_velocity(start, velocity * 1)
            program = self.then.aggregate(
                ops, context, whole, start, **_moments_for(self.then, extra)
            )
            mean, later = yield from program
            return mean, AfterState(state.first, later)

        phase = ops.bisect((self.steps, self.steps + 1), context.step + 1)
        return (yield Switch(phase, (before, lambda: then(True), lambda: then(False))))

    def velocity(self, state: AfterState) -> Tensor | None:
        return self.first.velocity(state.first) if isinstance(self.first, Handover) else None

    def with_velocity(self, state: AfterState, velocity: Tensor) -> AfterState:
        if not isinstance(self.first, Handover):
            return state
        return state._replace(first=self.first.with_velocity(state.first, velocity))

    def report(self, layout: Layout, state: AfterState, steps: int, since: int = 0) -> Report:
        boundary = self.steps
        first = self.first.report(layout, state.first, min(steps, boundary), min(since, boundary))
        then = self.then.report(
            layout, state.then, max(steps - boundary, 0), max(since - boundary, 0)
        )
        return Report(
            [a + b for a, b in zip(first.sent, then.sent)],
            then.residual if steps > boundary else first.residual,
            {**first.losses, **then.losses},
            first.level_changes + then.level_changes,
        )


def after(steps: int, first: Compressor | None, then: Compressor | None) -> Compressor:
    """Use one compressor for the first steps, then another.

    The second takes over the first one's residual, so nothing is lost at the change; a velocity
    that is replicated on all ranks becomes the second's.

    Args:
        steps: length of the first phase, at least 1.
        first, then: compressors; None is no compression.

    Raises:
        ValueError: `steps` is not a positive integer.
        TypeError: a phase is not a compressor; a partition is none either, but its compressors
            may have phases.

    >>> print(after(200, None, NoneCompressor()))
    after(200, NoneCompressor(), NoneCompressor())
    """
    return After(steps, part("after: a phase", first), part("after: a phase", then))


def part(what: str, compressor: Any) -> Compressor:
    """Validate a compressor that is part of another; None is no compression.

    Raises:
        TypeError: it is not a compressor, or it is a partition.
    """
    if compressor is None:
        return NoneCompressor()
    if isinstance(compressor, type) and issubclass(compressor, Compressor):
        compressor = compressor()
    if not isinstance(compressor, Compressor) or not compressor.runs:
        raise TypeError(f"{what} needs a compressor or None, got {compressor!r}")
    return compressor


def corrected(compressor: Compressor, momentum: float, nesterov: bool) -> Compressor:
    """Return a compressor that corrects this momentum, or wrap it in `MomentumAfter`."""
    if isinstance(compressor, Handover) and compressor.correction is not None:
        return compressor.corrected(momentum, nesterov)
    return MomentumAfter(compressor, momentum, nesterov) if momentum else compressor


def take_over(
    compressor: Compressor, optimizer: str, original: tuple[float, bool] | None
) -> tuple[Compressor, bool]:
    """Decide whether the compressor or the wrapped optimizer applies momentum.

    Args:
        compressor: as the user gave it.
        optimizer: the optimizer's class, for messages.
        original: (momentum, nesterov) of the optimizer; None if it has none, like Adam.

    Returns:
        The compressor with its momentum decided, and True if the optimizer must give its
        momentum up.

    Raises:
        ValueError: the optimizer has no momentum to hand over, or a different one.
    """
    if not isinstance(compressor, Handover) or compressor.correction is None:
        return compressor, False
    momentum, nesterov = compressor.correction
    if momentum == 0:
        return compressor, False
    if original is None:
        raise ValueError(
            f"the compressor corrects momentum, and {optimizer} has none that it could take over: "
            "its own would be applied on top. Use SGD, or give the compressor momentum=0. Got "
            f"{compressor}"
        )
    if momentum is None:
        momentum = original[0]
    elif original[0] not in (0, momentum):
        raise ValueError(
            f"the compressor has another momentum than {optimizer}, {momentum} and {original[0]}: "
            f"give one of them only, or the same. Got {compressor}"
        )
    if nesterov is None:
        nesterov = original[1]
    decided = compressor.corrected(float(momentum), bool(nesterov and momentum))
    return decided, original[0] > 0


def _moments_for(compressor: Compressor, extra: dict[str, Tensor]) -> dict[str, Tensor]:
    return extra if compressor.uses_moments else {}
