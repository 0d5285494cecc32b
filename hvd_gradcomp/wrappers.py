"""Compressors made of compressors: one after another, and momentum after the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_gradcomp import validate
from hvd_gradcomp.aggregator import Compressor, Context, Program
from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.collectives import Switch
from hvd_gradcomp.layers import Layer
from hvd_gradcomp.layout import Layout
from hvd_gradcomp.ops import Ops, Tensor


class MomentumState(NamedTuple):
    """State of `MomentumAfter`."""

    inner: Any
    velocity: Tensor  # [size], replicated


@dataclass(frozen=True)
class MomentumAfter(Compressor):
    """The momentum of layers whose compressor does not correct it, applied to the exchanged mean.

    Where a model's optimizer has handed its momentum over, these layers get it back here:
    `u = m*u + mean`, and the result is `u` (with Nesterov `m*u + mean`). State: that of `inner` and
    4 bytes an element.

    Args:
        inner: what exchanges.
        momentum: in (0, 1).
        nesterov: the look-ahead variant.
    """

    inner: Compressor
    momentum: float
    nesterov: bool = False

    def __post_init__(self) -> None:
        validate.real(self, "momentum", low=0, high=1)
        validate.boolean(self, "nesterov")
        for name in ("block", "max_bucket", "native_dtypes", "whole_model", "uses_moments"):
            object.__setattr__(self, name, getattr(self.inner, name))
        object.__setattr__(self, "moments", getattr(self.inner, "moments", ""))
        inside = frozenset(f"inner.{name}" for name in self.inner.replicated)
        object.__setattr__(self, "replicated", inside | {"velocity"})
        anew = frozenset(f"inner.{name}" for name in self.inner.begins_anew)
        object.__setattr__(self, "begins_anew", anew)

    @property
    def correction(self) -> tuple[float | None, bool | None]:
        return self.momentum, self.nesterov

    def check(self, layout: Layout) -> None:
        self.inner.check(layout)

    def layer_bytes(self, shape: Sequence[int]) -> float | None:
        return self.inner.layer_bytes(shape)

    def init(self, ops: Ops, layout: Layout) -> MomentumState:
        return self.start(ops, layout, 1)

    def start(self, ops: Ops, layout: Layout, ranks: int) -> MomentumState:
        velocity = ops.zeros((layout.size,), layout.dtype)
        return MomentumState(self.inner.start(ops, layout, ranks), velocity)

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: Any, **extra: Tensor
    ) -> Program:
        program = self.inner.aggregate(ops, context, gradient, state.inner, **extra)
        mean, inner = yield from program
        velocity = ops.accumulate(ops.scale(state.velocity, self.momentum), mean)
        if self.nesterov:
            mean = ops.accumulate(ops.times(velocity, self.momentum), mean)
        else:
            mean = ops.overwrite(mean, velocity)
        return mean, MomentumState(inner, velocity)

    def velocity(self, state: Any) -> Tensor:
        return state.velocity

    def with_velocity(self, state: Any, velocity: Tensor) -> MomentumState:
        return state._replace(velocity=velocity)

    def losses(self, state: Any) -> dict[str, float]:
        return self.inner.losses(state.inner)

    def retrained(self, ops: Ops, state: Any, step: Any) -> MomentumState:
        return MomentumState(self.inner.retrained(ops, state.inner, step), state.velocity)

    def owner(self, path: str, step: int) -> int | None:
        return self.inner.owner(path.partition(".")[2], step)

    def resized(self, ops: Ops, state: Any, step: Any, ranks: int) -> MomentumState:
        inner = self.inner.resized(ops, state.inner, step, ranks)
        return state if inner is state.inner else MomentumState(inner, state.velocity)

    def elements_sent(self, layout: Layout, state: Any, steps: int) -> Sequence[int]:
        return self.inner.elements_sent(layout, state.inner, steps)

    def at_work(self, state: Any, steps: int) -> tuple[Compressor, Any]:
        return self.inner.at_work(state.inner, steps)

    def rung_changes(self, state: Any) -> int:
        return self.inner.rung_changes(state.inner)

    def residual(self, state: Any) -> Tensor | None:
        return self.inner.residual(state.inner)


class AfterState(NamedTuple):
    """State of `After`."""

    first: Any
    then: Any


@dataclass(frozen=True, repr=False)
class After(Compressor):
    """Two phases; made by `after`."""

    steps: int
    first: Compressor
    then: Compressor

    def __post_init__(self) -> None:
        validate.whole(self, "steps", low=1)
        both = (self.first, self.then)
        object.__setattr__(self, "block", max(c.block for c in both))
        object.__setattr__(self, "max_bucket", min(c.max_bucket for c in both))
        object.__setattr__(self, "whole_model", any(c.whole_model for c in both))
        object.__setattr__(self, "uses_moments", any(c.uses_moments for c in both))
        sources = [getattr(c, "moments", "") for c in both if c.uses_moments]
        object.__setattr__(self, "moments", sources[0] if sources else "")
        inside = [f"first.{name}" for name in self.first.replicated]
        inside += [f"then.{name}" for name in self.then.replicated]
        object.__setattr__(self, "replicated", frozenset(inside))
        anew = [f"first.{name}" for name in self.first.begins_anew]
        anew += [f"then.{name}" for name in self.then.begins_anew]
        object.__setattr__(self, "begins_anew", frozenset(anew))

    def __repr__(self) -> str:
        return f"after({self.steps}, {self.first!r}, {self.then!r})"

    @property
    def correction(self) -> tuple[float | None, bool | None] | None:
        return self.then.correction or self.first.correction

    def corrected(self, momentum: float, nesterov: bool) -> Compressor:
        both = (corrected(c, momentum, nesterov) for c in (self.first, self.then))
        return After(self.steps, *both)

    def check(self, layout: Layout) -> None:
        self.first.check(layout)
        self.then.check(layout)

    def layer_bytes(self, shape: Sequence[int]) -> float | None:
        return self.then.layer_bytes(shape)

    def init(self, ops: Ops, layout: Layout) -> AfterState:
        return self.start(ops, layout, 1)

    def start(self, ops: Ops, layout: Layout, ranks: int) -> AfterState:
        return AfterState(*(one.start(ops, layout, ranks) for one in (self.first, self.then)))

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: Any, **extra: Tensor
    ) -> Program:
        def before() -> Program:
            given = _wanted(self.first, extra)
            program = self.first.aggregate(ops, context, gradient, state.first, **given)
            mean, first = yield from program
            return mean, AfterState(first, state.then)

        def then(inherits: bool) -> Program:
            start, whole = state.then, gradient
            if inherits:
                residual = self.first.residual(state.first)
                if residual is not None:
                    start, whole = self.then.inherit(ops, start, whole, residual)
                velocity = self.first.velocity(state.first)
                if velocity is not None:
                    # A copy: a program may write to its state, and this one is the first phase's.
                    start = self.then.with_velocity(start, velocity * 1)
            program = self.then.aggregate(ops, context, whole, start, **_wanted(self.then, extra))
            mean, later = yield from program
            return mean, AfterState(state.first, later)

        phase = ops.bisect((self.steps, self.steps + 1), context.step + 1)
        return (yield Switch(phase, (before, lambda: then(True), lambda: then(False))))

    @property
    def needs_order(self) -> bool:
        return self.first.needs_order or self.then.needs_order

    def velocity(self, state: Any) -> Tensor | None:
        return self.first.velocity(state.first)

    def with_velocity(self, state: Any, velocity: Tensor) -> AfterState:
        return AfterState(self.first.with_velocity(state.first, velocity), state.then)

    def of_layers(self, layers: Sequence[Layer], ranks: int) -> list[Compressor]:
        both = (c.of_layers(layers, ranks) for c in (self.first, self.then))
        return [After(self.steps, first, then) for first, then in zip(*both)]

    def losses(self, state: Any) -> dict[str, float]:
        return {**self.first.losses(state.first), **self.then.losses(state.then)}

    def retrained(self, ops: Ops, state: Any, step: Any) -> AfterState:
        return AfterState(
            self.first.retrained(ops, state.first, step),
            self.then.retrained(ops, state.then, step),
        )

    def owner(self, path: str, step: int) -> int | None:
        phase, _, inside = path.partition(".")
        return (self.first if phase == "first" else self.then).owner(inside, step)

    def resized(self, ops: Ops, state: Any, step: Any, ranks: int) -> AfterState:
        first = self.first.resized(ops, state.first, step, ranks)
        then = self.then.resized(ops, state.then, step, ranks)
        same = first is state.first and then is state.then
        return state if same else AfterState(first, then)

    def elements_sent(self, layout: Layout, state: Any, steps: int) -> Sequence[int]:
        early = self.first.elements_sent(layout, state.first, min(steps, self.steps))
        late = self.then.elements_sent(layout, state.then, max(steps - self.steps, 0))
        return [a + b for a, b in zip(early, late)]

    def at_work(self, state: Any, steps: int) -> tuple[Compressor, Any]:
        if steps <= self.steps:
            return self.first.at_work(state.first, steps)
        return self.then.at_work(state.then, steps)

    def rung_changes(self, state: Any) -> int:
        return self.first.rung_changes(state.first) + self.then.rung_changes(state.then)


def after(steps: int, first: Compressor | None, then: Compressor | None) -> Compressor:
    """One compressor for so many steps, then another.

    What the first has kept back goes over into the second, so nothing is lost at the change; a
    velocity that all ranks have in common goes on as the second's.

    Args:
        steps: how long the first phase is, at least 1.
        first, then: compressors; None is no compression.

    Raises:
        ValueError: `steps` is no positive whole number.
        TypeError: a phase is no compressor; a partition is none, but its compressors may have
            phases.

    >>> after(200, None, NoneCompressor())
    after(200, NoneCompressor(), NoneCompressor())
    """
    return After(steps, part("after: a phase", first), part("after: a phase", then))


def part(what: str, compressor: Any) -> Compressor:
    """A compressor that another is made of; None is no compression.

    Raises:
        TypeError: it is no compressor, or a partition.
    """
    if compressor is None:
        return NoneCompressor()
    if isinstance(compressor, type) and issubclass(compressor, Compressor):
        compressor = compressor()
    if not isinstance(compressor, Compressor) or not compressor.runs:
        raise TypeError(f"{what} needs a compressor or None, got {compressor!r}")
    return compressor


def corrected(compressor: Compressor, momentum: float, nesterov: bool) -> Compressor:
    """A compressor that corrects this momentum, or is followed by it."""
    if isinstance(compressor, MomentumAfter):
        return compressor
    if compressor.correction is not None:
        return compressor.corrected(momentum, nesterov)
    return MomentumAfter(compressor, momentum, nesterov) if momentum else compressor


def take_over(
    compressor: Compressor, optimizer: str, own: tuple[float, bool] | None
) -> tuple[Compressor, bool]:
    """Decides who applies momentum: the compressor, or the optimizer that it is wrapped around.

    Args:
        compressor: as the user gave it.
        optimizer: the optimizer's class, for messages.
        own: (momentum, nesterov) of the optimizer; None where it has none that could be handed
            over, as Adam has not.

    Returns:
        The compressor with its momentum settled, and whether the optimizer has to give its up.

    Raises:
        ValueError: the optimizer cannot hand a momentum over, or has another.
    """
    if compressor.correction is None:
        return compressor, False
    momentum, nesterov = compressor.correction
    if momentum == 0:
        return compressor, False
    if own is None:
        raise ValueError(
            f"the compressor corrects momentum, and {optimizer} has none that it could take over: "
            "its own would be applied on top. Use SGD, or give the compressor momentum=0. Got "
            f"{compressor}"
        )
    if momentum is None:
        momentum = own[0]
    elif own[0] not in (0, momentum):
        raise ValueError(
            f"the compressor has another momentum than {optimizer}, {momentum} and {own[0]}: give "
            f"one of them only, or the same. Got {compressor}"
        )
    if nesterov is None:
        nesterov = own[1]
    settled = compressor.corrected(float(momentum), bool(nesterov and momentum))
    return settled, own[0] > 0


def _wanted(compressor: Compressor, extra: dict[str, Tensor]) -> dict[str, Tensor]:
    return extra if compressor.uses_moments else {}
