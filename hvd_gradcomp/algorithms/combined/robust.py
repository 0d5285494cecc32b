"""Robust aggregation: a mean of the ranks' gradients that one rank alone cannot steer.

* `clip`: each contribution is scaled down to the median of the ranks' norms. Of the family of norm
  clipping (Sun et al. 2019, section 4; Karimireddy et al. 2021 clip around the last mean instead).
* `median`: coordinate by coordinate (Yin et al. 2018, section 4, option I).
* `trimmed`: the mean without the `trim` largest and smallest of each coordinate (ibid., option II).

A rule needs each rank's contribution by itself. So all payloads are gathered, and each is decoded
as its sender's would be in a world of one rank; no method knows of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_gradcomp.algorithms.combined.wrappers import part
from hvd_gradcomp.algorithms.dense import FP16Compressor, NoneCompressor
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.collectives import Allgather
from hvd_gradcomp.core.cost_model import Exchange
from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.composite import Composite
from hvd_gradcomp.method.compressor import Compressor, Context, Program, Report
from hvd_gradcomp.method.handover import Handover, inherited, residual_of
from hvd_gradcomp.method.wire import NOT_FINITE
from hvd_gradcomp.ops import NonFiniteGradientError, Ops, Tensor

RULES = ("clip", "median", "trimmed")
_LINEAR = (NoneCompressor, FP16Compressor)  # gathered here, where they are summed otherwise
_NOT_GATHERED = "ranks exchange more than payloads"


class RobustState(NamedTuple):
    """State of `Robust`."""

    inner: Any


@dataclass(frozen=True)
class Robust(Composite, Handover):
    """Robust aggregation of what a compressor sends; made by `robust`."""

    inner: Compressor
    rule: str = "clip"
    trim: int = 1

    def __post_init__(self) -> None:
        validate.one_of(self, "rule", RULES)
        validate.whole(self, "trim", low=1)
        if isinstance(self.inner, Robust):
            raise ValueError(f"robust goes around a compressor once, got {self.inner}")
        if self.inner.replicated or self.inner.uses_moments or self.inner.whole_model:
            raise ValueError(self._refused("ranks agree on what is sent"))

    def __str__(self) -> str:
        trim = f", trim={self.trim}" if self.rule == "trimmed" else ""
        return f"robust({self.inner}, {self.rule!r}{trim})"

    def _refused(self, reason: str) -> str:
        return (
            f"robust: with {self.inner} {reason}, so a rank's contribution cannot be told from the "
            "others'. Take a method that gathers payloads of a fixed size, such as "
            "ChunkedTopKCompressor, QSGDCompressor or Int8Compressor, not in two shots; or None"
        )

    @property
    def children(self) -> dict[str, Compressor]:
        return {"inner": self.inner}

    def of_layers(self, layers: Sequence[Layer], ranks: int) -> list[Compressor]:
        return [Robust(one, self.rule, self.trim) for one in self.inner.of_layers(layers, ranks)]

    def layer_bytes(self, shape: Sequence[int]) -> float | None:
        """Return None: no layer is left to an exchange that any rank can steer."""
        return None

    def exchange_of(self, layout: Layout, ranks: int) -> Exchange | None:
        """Return the allgather of the payload that the compressor makes for one rank alone.

        Raises:
            ValueError: the compressor does more than gather.
        """
        exchange = self.inner.exchange_of(layout, 1)
        if exchange is None:
            return None
        kinds = [kind for kind, _ in exchange.collectives]
        if kinds != ["allgather"] and not isinstance(self.inner, _LINEAR):
            raise ValueError(self._refused(_NOT_GATHERED))
        ((_, payload),) = exchange.collectives
        return Exchange("allgather", (("allgather", payload),))

    def start(self, ops: Ops, layout: Layout, ranks: int) -> RobustState:
        """Return the initial state.

        Raises:
            ValueError: the ranks are too few for `trim`, or the compressor does more than gather.
        """
        self._check_ranks(ranks)
        self._rehearse(ops, layout)
        return RobustState(self.inner.start(ops, layout, 1))

    def resized(self, ops: Ops, state: RobustState, step: Any, ranks: int) -> RobustState:
        """Return the same state: the compressor knows of one rank alone.

        Raises:
            ValueError: the ranks are too few for `trim`.
        """
        del ops, step
        self._check_ranks(ranks)
        return state

    def _check_ranks(self, ranks: int) -> None:
        if self.rule == "trimmed" and 1 < ranks <= 2 * self.trim:
            raise ValueError(f"{self} leaves nothing of {ranks} ranks: trim less, or use 'clip'")

    def _rehearse(self, ops: Ops, layout: Layout) -> None:
        """Check that the program of the compressor is one allgather."""
        request = next(self._alone(ops, Context(layout, 0, 1, 0)))
        if not isinstance(request, Allgather):
            raise ValueError(self._refused(_NOT_GATHERED))

    def _alone(self, ops: Ops, context: Context) -> Program:
        """Return a program that nothing is sent with, to decode what others have sent."""
        layout = context.layout
        state = self.inner.start(ops, layout, 1)
        return self._program(ops, context, ops.zeros((layout.size,), layout.dtype), state)

    def _program(self, ops: Ops, context: Context, gradient: Tensor, state: Any) -> Program:
        """Return the program of the compressor in a world of this rank alone."""
        if isinstance(self.inner, _LINEAR):
            return _gathered(self.inner, ops, context, gradient)
        alone = context._replace(size=1, prescale=1.0, postscale=1.0, owns_gradient=False)
        return self.inner.aggregate(ops, alone, gradient, state)

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: RobustState, **extra: Tensor
    ) -> Program:
        program = self._program(ops, context, gradient, state.inner)
        payloads = yield next(program)
        parts = [
            self._read(ops, context._replace(rank=rank), payloads[rank : rank + 1])
            for rank in range(context.size)
        ]
        total = self._combined(ops, _finite(ops, parts))
        _, inner = _end(program, payloads[context.rank : context.rank + 1])
        factor = context.prescale * context.postscale * context.size
        return total * factor, RobustState(inner)

    def _read(self, ops: Ops, context: Context, payload: Tensor) -> Tensor:
        """Decode the payload of `context.rank`, [1, bytes]."""
        reader = self._alone(ops, context)
        next(reader)
        return _end(reader, payload)[0]

    def _combined(self, ops: Ops, parts: list[Tensor]) -> Tensor:
        """Return the ranks' contributions combined by the rule, on the scale of a mean."""
        if self.rule == "clip":
            return _mean(_clipped(ops, parts))
        ordered = _sorted(ops, parts)
        if self.rule == "median":
            return _mean(ordered[(len(parts) - 1) // 2 : len(parts) // 2 + 1])
        return _mean(ordered[self.trim : len(parts) - self.trim] or ordered)

    def residual(self, state: RobustState) -> Tensor | None:
        return residual_of(self.inner, state.inner)

    def inherit(
        self, ops: Ops, state: RobustState, gradient: Tensor, residual: Tensor
    ) -> tuple[RobustState, Tensor]:
        inner, whole = inherited(self.inner, ops, state.inner, gradient, residual)
        return RobustState(inner), whole

    def report(self, layout: Layout, state: RobustState, steps: int, since: int = 0) -> Report:
        return self.inner.report(layout, state.inner, steps, since)


def _gathered(
    inner: NoneCompressor | FP16Compressor, ops: Ops, context: Context, gradient: Tensor
) -> Program:
    """Return the program of a linear compressor that gathers instead of summing."""
    codes = yield Allgather(inner.to_code(ops, gradient))
    row = inner.from_code(ops, context.layout, ops.reshape(codes, (context.layout.size,)))
    return row, ()


def _end(program: Program, reply: Tensor) -> tuple[Tensor, Any]:
    """Resume a program whose only collective was requested; return its result and state."""
    try:
        program.send(reply)
    except StopIteration as ended:
        result: tuple[Tensor, Any] = ended.value
        return result
    raise RuntimeError("robust: a program with a second collective; this is a bug in hvd_gradcomp")


def _finite(ops: Ops, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the contributions after a check that they are finite, whatever their headers say.

    Raises:
        NonFiniteGradientError: naming the ranks whose contribution is not.
    """
    small = [ops.sum(ops.abs(ops.cast(part, "float32")) * 1e-30) for part in parts]
    fact = ops.stack(small) < float("inf")
    known = ops.require({NOT_FINITE: fact}, NonFiniteGradientError)
    if known is None:
        return list(parts)
    return [
        ops.where(known[rank], part, ops.zeros(part.shape, _dtype(part)))
        for rank, part in enumerate(parts)
    ]


def _mean(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for one in parts[1:]:
        total = total + one
    return total * (1.0 / len(parts))


def _sorted(ops: Ops, parts: Sequence[Tensor]) -> list[Tensor]:
    """Sort each coordinate over the ranks, by odd-even transposition."""
    ordered = list(parts)
    for turn in range(len(ordered)):
        for low in range(turn % 2, len(ordered) - 1, 2):
            one, other = ordered[low], ordered[low + 1]
            ordered[low], ordered[low + 1] = ops.minimum(one, other), ops.maximum(one, other)
    return ordered


def _clipped(ops: Ops, parts: Sequence[Tensor]) -> list[Tensor]:
    """Scale down contributions whose norm is above the median of norms, the lower one of two."""
    rows = (ops.reshape(ops.square(ops.cast(part, "float32")), (1, -1)) for part in parts)
    # In float64, so that factors are the same on all frameworks to the bit.
    norms = [ops.sqrt(ops.cast(ops.sum_of_rows(row), "float64")) for row in rows]
    limit = _sorted(ops, norms)[(len(norms) - 1) // 2]
    factors = [ops.where(norm > limit, limit / norm, 1.0) for norm in norms]
    return [part * ops.cast(factor, _dtype(part)) for part, factor in zip(parts, factors)]


def _dtype(x: Tensor) -> str:
    return str(getattr(x.dtype, "name", x.dtype)).removeprefix("torch.")


def robust(compressor: Compressor | None, rule: str = "clip", trim: int = 1) -> Robust:
    """Aggregate what a compressor sends robustly, so that one rank alone cannot steer the mean.

    What travels: the compressor's payloads, gathered; with None the gradient itself, 4 bytes for
    each element from every rank to every rank. Each rank decodes every payload by itself: time and
    memory of a bucket grow with the ranks.

    Default: `robust(NoneCompressor(), "clip")`, as trained in docs/algorithms/robust.md.

    Args:
        compressor: whose payloads have a fixed size and are gathered in one round; None is no
            compression.
        rule: "clip" scales contributions down to the median of the ranks' norms, by bucket; the
            only rule for sparse methods, whose median is mostly zero. "median" is that of each
            coordinate, "trimmed" the mean without the `trim` largest and smallest of each.
        trim: ranks that "trimmed" withstands; less than half of all.

    Raises:
        TypeError: the compressor is none, or a partition; `robust` goes around its compressors.
        ValueError: the rule is unknown; the compressor is robust already, or does more than gather
            payloads of a fixed size (agreed levels, sums, two shots, learning); when the optimizer
            is made: too few ranks for `trim`.

    >>> print(robust(NoneCompressor(), "trimmed", trim=2))
    robust(NoneCompressor(), 'trimmed', trim=2)
    """
    return Robust(part("robust", compressor), rule, trim)
