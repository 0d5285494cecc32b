"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvd_gradcomp.codecs import clipping
from hvd_gradcomp.codecs.momentum import MomentumCorrected, validate_momentum
from hvd_gradcomp.codecs.topk import count_of
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.collectives import Switch
from hvd_gradcomp.method.compressor import Context, Program, State
from hvd_gradcomp.ops import Ops, Tensor


@dataclass(frozen=True)
class DGCCompressor(MomentumCorrected):
    """DGC: sends the largest accumulated velocities of each layer (Lin et al. 2018).

    Each step: `u = m*u + g`, `r += u` (with Nesterov `r += m*u + g`); of each layer the
    `k = max(1, round(n * density))` largest `|r|` are sent, and `r = u = 0` there.

    What travels: values, float32 by default, and packed indices, by allgather; about
    `4 + (log2(1/density) + 2) / 8` bytes for each element sent. If a rank would receive more
    bytes than with dense gradients, 4 bytes for each element of the bucket, by allreduce.
    State: `r` and `u`, 8 bytes for each element.

    Default: `DGCCompressor(density=0.001)` without a warm-up, whose length depends on the training.
    Ask for one: in docs/papers.md the default lost 2.4 points in 400 steps, and nothing with
    `warmup_steps` of a fifth of them.

    Args:
        density: share of elements to send, in (0, 1]; smaller sends less. At 1 layers are sent
            dense and get their momentum after the allreduce.
        momentum: of the velocity, in [0, 1). None takes it over from the wrapped SGD, whose own
            momentum is then set to 0; 0 disables the correction.
        nesterov: the look-ahead variant; None takes it over as well.
        clip_norm: each rank clips the norm of each layer to `clip_norm / sqrt(ranks)` before
            accumulating; None clips nothing. Smaller clips more.
        masking: also clear the velocity of sent elements (momentum factor masking).
        warmup_epochs: epochs of the warm-up, divided equally among the densities of `warmup`; 0
            for none.
        steps_per_epoch: steps of an epoch; needed with `warmup_epochs`.
        warmup_steps: the length of the warm-up in steps, instead of the two above.
        warmup: densities of the warm-up, in (0, 1].
        index_coding: "elias_fano", packed, or "int32", plain.
        values: code of the sent values: "float32", "bfloat16", "int8", "int4", "int2" or "sign";
            fewer bits send less of a layer that sends many. What rounding takes stays in `r`.
            Neighbours in a layer, some 4,096 at most, share a scale or a codebook, which is sent
            too: of a layer that sends few, it may take more than the bits save.

    Differs from the paper: the selection is exact, not by a sampled threshold; zeros are not sent;
    no warm-up by default; `clip_norm` bounds the norm of each layer, while the paper's local
    clipping (section 3.2) bounds the global norm, since buckets are compressed as they become
    ready. So a model of L layers may have sqrt(L) times the paper's norm.

    Raises:
        ValueError: a hyper-parameter is out of range, or the warm-up has no length.

    >>> DGCCompressor(momentum=0.9).phases
    ()
    >>> DGCCompressor(warmup_steps=8).phases
    ((2, 0.25), (4, 0.0625), (6, 0.015625), (8, 0.004))
    """

    density: float = 0.001
    momentum: float | None = None
    nesterov: bool | None = None
    clip_norm: float | None = None
    warmup_epochs: float = 0
    steps_per_epoch: int | None = None
    warmup_steps: int | None = None
    warmup: Sequence[float] = (0.25, 0.0625, 0.015625, 0.004)
    masking: bool = True
    index_coding: str = "elias_fano"
    values: str = "float32"

    def __post_init__(self) -> None:
        validate.real(self, "density", low=0, high=1, closed="]")
        validate_momentum(self)
        if self.clip_norm is not None:
            validate.real(self, "clip_norm", low=0)
        validate.real(self, "warmup_epochs", low=0, closed="[")
        for name in ("steps_per_epoch", "warmup_steps"):
            if getattr(self, name) is not None:
                validate.whole(self, name, low=1)
        if self.warmup_epochs and (self.steps_per_epoch is None or self.warmup_steps is not None):
            raise ValueError(
                "DGCCompressor: warmup_epochs needs steps_per_epoch, and no warmup_steps; got "
                f"steps_per_epoch={self.steps_per_epoch!r}, warmup_steps={self.warmup_steps!r}"
            )
        validate.stands_for(self, "warmup", tuple(self.warmup))
        for density in self.warmup:
            validate.number(self, "warmup", density, low=0, high=1, closed="]")
        self.validate_codings()

    @property
    def phases(self) -> tuple[tuple[int, float], ...]:
        """Phases of the warm-up as (end step, exclusive; density)."""
        steps = self.warmup_steps or round(self.warmup_epochs * (self.steps_per_epoch or 0))
        parts = [density for density in self.warmup if density > self.density]
        ends = [round(steps * (i + 1) / len(parts)) for i in range(len(parts))]
        return tuple(zip(ends, parts)) if steps else ()

    def count(self, size: int) -> int:
        return count_of(size, self.density)

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: State, **extra: Tensor
    ) -> Program:
        del extra
        if self.clip_norm is not None:
            factor = clipping.shrinking(ops, context, gradient, self.clip_norm)
            gradient = clipping.scaled(ops, context, gradient, factor)
        steady = super().aggregate
        if not self.phases:
            return (yield from steady(ops, context, gradient, state))
        branches = [
            lambda d=density: replace(self, density=d, warmup=(), clip_norm=None).aggregate(
                ops, context, gradient, state
            )
            for _, density in self.phases
        ]
        phase = ops.bisect([end for end, _ in self.phases], context.step + 1)
        return (yield Switch(phase, (*branches, lambda: steady(ops, context, gradient, state))))
