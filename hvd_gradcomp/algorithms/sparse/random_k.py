"""Random-k (Stich, Cordonnier, Jaggi 2018): all ranks send the same elements, drawn anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from hvd_gradcomp.codecs.clipping import Clipping
from hvd_gradcomp.codecs.sparse import Residual
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.collectives import Allreduce
from hvd_gradcomp.core.cost_model import Exchange
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns
from hvd_gradcomp.method.compressor import Context, Program, Report
from hvd_gradcomp.method.handover import Handover
from hvd_gradcomp.ops import Ops, Tensor


@dataclass(frozen=True)
class RandomKCompressor(Clipping, Handover):
    """Sends one random element of each stretch of a layer (Stich et al. 2018, section 2).

    All ranks draw the same places from the step and a seed, so no index travels, and what is sent
    is added up on the way. A layer is cut into stretches of `1 / density` elements, the last one of
    what is left, with one place in each.

    What travels: 4 bytes for each stretch, by allreduce. State: `r`, 4 bytes for each element; none
    without feedback.

    Default: `RandomKCompressor(density=1 / 128)`, with feedback, as trained in docs/papers.md: 0.9
    nats behind no compression on a transformer.

    Args:
        density: 1 over a power of two from 2 to 65,536; smaller sends less.
        feedback: whether the elements that were not drawn are kept for the next step. Otherwise
            those drawn are multiplied by the length of their stretch, and the result is unbiased.
        seed: of the places.
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` before accumulating; positive; smaller clips more. None clips
            nothing.

    Differs from the paper: one place in each stretch, instead of any k.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> RandomKCompressor()
    RandomKCompressor(density=0.0078125, feedback=True, seed=0, max_norm=None)
    """

    density: float = 2.0**-7
    feedback: bool = True
    seed: int = 0
    max_norm: float | None = None

    def __post_init__(self) -> None:
        validate.one_of(self, "density", [2.0**-bits for bits in range(1, 17)])
        validate.boolean(self, "feedback")
        validate.whole(self, "seed", low=0)
        self.validate_max_norm()

    @property
    def block(self) -> int:  # type: ignore[override]
        """Return the length of a stretch: each layer begins with a stretch of its own."""
        return round(1 / self.density)

    def stretches(self, size: int) -> int:
        """Return the stretches of a layer; the last one may be shorter."""
        return -(-size // self.block)

    def layer_bytes(self, shape: Sequence[int]) -> float:
        return 4.0 * self.stretches(prod(shape))

    def exchange_of(self, layout: Layout, ranks: int) -> Exchange:
        count = sum(map(self.stretches, layout.sizes))
        return Exchange("allreduce", (("allreduce", 4.0 * (count + 1)),))

    def init(self, ops: Ops, layout: Layout) -> Any:
        return Residual(ops.zeros((layout.size,))) if self.feedback else ()

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: Any, **extra: Tensor
    ) -> Program:
        gradient, _ = self.clipped(ops, context, gradient, extra)
        finite, gradient = patterns.check_storable(ops, gradient)
        accumulated = ops.accumulate(gradient, state.r) if self.feedback else gradient
        index, length = self.places(ops, context)
        sent = ops.concat((ops.gather(accumulated, index), patterns.poison(ops, finite)))
        total = yield Allreduce(sent, context.prescale, context.postscale)
        total = patterns.strip_poison(ops, total)  # raises on all ranks, and the state is as it was
        if not self.feedback:
            total = total * ops.cast(length, "float32")
            return ops.put(ops.clear(accumulated), index, total), state
        kept = ops.put(accumulated, index, 0.0)
        r = ops.overwrite(state.r, kept)
        return ops.put(ops.clear(kept), index, total), Residual(r)

    def places(self, ops: Ops, context: Context) -> tuple[Tensor, Tensor]:
        """Return the indices that all ranks send in this step, and the lengths of their stretches.

        int64 [stretches], ascending.
        """
        layout = context.layout
        count = sum(map(self.stretches, layout.sizes))
        # The layout is in it so that buckets draw different places.
        words = ops.random_words(ops.key(context.step, self.seed ^ layout.digest), count)
        # Beside another method the bucket's blocks may be longer than a stretch.
        tight = replace(layout, block=self.block)
        layer = ops.table(tight, "layer_of_block")[:count]
        moved = ops.words([to - at for at, to in zip(tight.offsets, layout.offsets)])
        ends = ops.words([at + size for at, size in zip(tight.offsets, layout.sizes)])
        start = ops.arange(count) * self.block
        length = ops.minimum(ops.gather(ends, layer) - start, self.block)
        place, _ = ops.split_bits(words * length, 32)
        return start + place + ops.gather(moved, layer), length

    def report(self, layout: Layout, state: Any, steps: int, since: int = 0) -> Report:
        sent = [self.stretches(size) for size in layout.sizes]
        return Report([count * (steps - since) for count in sent], self.residual(state))

    def residual(self, state: Any) -> Tensor | None:
        return state.r if self.feedback else None
