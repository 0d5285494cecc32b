"""Momentum correction: velocity is accumulated instead of the gradient.

Deep Gradient Compression (Lin et al. 2018), section 3.2.

A delayed gradient enters the optimizer's momentum late and so counts for less. So each rank takes
the momentum over from the optimizer and applies it before compression; ranks send velocity, and
the optimizer only adds it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from hvd_gradcomp.codecs.sparse import Memory, Residual
from hvd_gradcomp.codecs.topk import TopKCompressor
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor, State, derived
from hvd_gradcomp.method.handover import Correction
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.kernel_params import Collecting


class Velocity(NamedTuple):
    """Accumulated velocity that was not sent yet, and the velocity itself."""

    r: Tensor  # float32 [size]
    u: Tensor  # float32 [size]


def validate_momentum(compressor: Any) -> None:
    """Raise a ValueError unless its fields `momentum`, `nesterov` and `masking` are usable."""
    if compressor.momentum is not None:
        validate.real(compressor, "momentum", low=0, high=1, closed="[")
    if compressor.nesterov is not None:
        validate.boolean(compressor, "nesterov")
    if compressor.nesterov and compressor.momentum == 0:
        raise ValueError(f"{type(compressor).__name__}: nesterov needs a momentum above 0")
    validate.boolean(compressor, "masking")


class MomentumCorrected(TopKCompressor):
    """Base of EGC and DGC. Subclasses are dataclasses with these fields."""

    momentum: float | None
    nesterov: bool | None
    masking: bool

    @property
    def correction(self) -> Correction:
        return self.momentum, self.nesterov

    def corrected(self, momentum: float, nesterov: bool) -> Compressor:
        return replace(self, momentum=momentum, nesterov=nesterov)  # type: ignore[type-var]

    def init_memory(self, ops: Ops, layout: Layout) -> Memory:
        r = ops.zeros((layout.size,))
        return Velocity(r, ops.zeros((layout.size,))) if self.momentum else Residual(r)

    def collect(self, ops: Ops, memory: Memory, gradient: Tensor) -> Memory:
        if not self.momentum:
            return Residual(ops.accumulate(memory.r, gradient))
        nesterov = bool(self.nesterov)
        return Velocity(*ops.advance(memory.r, memory.u, gradient, self.momentum, nesterov))

    def commit(self, ops: Ops, memory: Memory, index: Tensor) -> Memory:
        """Clear sent elements; with `masking` their velocity too (ibid., section 3.3)."""
        r = ops.put(memory.r, index, 0.0)
        if not self.momentum:
            return Residual(r)
        return Velocity(r, ops.put(memory.u, index, 0.0) if self.masking else memory.u)

    @derived
    def rule(self) -> Collecting:
        return Collecting(self.momentum or 0.0, bool(self.nesterov), self.masking)

    def with_velocity(self, state: State, velocity: Tensor) -> State:
        if not self.momentum:
            return state
        return state._replace(memory=state.memory._replace(u=velocity))
