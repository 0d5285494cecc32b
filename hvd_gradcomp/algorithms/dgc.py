"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvd_gradcomp.codecs import clipping
from hvd_gradcomp.codecs.momentum import MomentumCorrected
from hvd_gradcomp.codecs.topk import count_of
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.collectives import Switch
from hvd_gradcomp.core.compressor import Context, Program, State
from hvd_gradcomp.ops import Ops, Tensor


@dataclass(frozen=True)
class DGCCompressor(MomentumCorrected):
    """Sends the largest accumulated velocities of each layer (Lin et al. 2018).

    Each step: `u = m*u + g`, `r += u` (with Nesterov `r += m*u + g`); of each layer the
    `k = max(1, round(n * density))` largest `|r|` are sent, and `r = u = 0` there.

    What travels: float32 values and packed indices, by allgather; about
    `4 + (log2(1/density) + 3) / 8` bytes an element sent. Where that would bring a
    rank more than dense gradients, 4 bytes an element of the bucket, by allreduce.
    State: `r` and `u`, 8 bytes an element.

    Args:
        density: share of elements to send, in (0, 1]; smaller sends less. At 1 layers are sent
            dense and get their momentum after the allreduce.
        momentum: of the velocity, in [0, 1). None takes it over from the wrapped SGD, whose own
            is then 0; 0 goes without correction.
        nesterov: the look-ahead variant; None takes it over as well.
        clip_norm: before accumulating, a layer whose norm exceeds `clip_norm / sqrt(ranks)` is
            scaled down to it; None clips nothing. Smaller clips more.
        masking: also stop the velocity of what was sent (momentum factor masking).
        warmup_epochs: epochs over which the densities of `warmup` are gone through, in equal
            parts; 0 for none.
        steps_per_epoch: steps of an epoch; needed with `warmup_epochs`.
        warmup_steps: the length of the warm-up in steps, instead of the two above.
        warmup: densities of the warm-up, in (0, 1].
        index_coding: "delta", packed, or "int32", plain.

    Differs from the paper: the selection is exact, not by a sampled threshold; zeros are not sent;
    no warm-up unless asked for; `clip_norm` bounds the norm of each layer by itself, where the
    paper's local clipping (section 3.2) bounds that of all gradients together, since buckets are
    compressed as they come. A model of L layers may so have sqrt(L) times the paper's norm.

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
    index_coding: str = "delta"

    def __post_init__(self) -> None:
        validate.real(self, "density", low=0, high=1, closed="]")
        self._validate_momentum()
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
        validate.one_of(self, "index_coding", validate.INDEX_CODINGS)

    @property
    def phases(self) -> tuple[tuple[int, float], ...]:
        """The warm-up as (the step it ends before, its density)."""
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
