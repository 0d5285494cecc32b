"""Random-k (Stich, Cordonnier, Jaggi 2018): all ranks send the same few elements, drawn anew.

A method outside of the package; docs/extending.md walks through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from hvd_gradcomp.core import validate
from hvd_gradcomp.core.collectives import Allreduce
from hvd_gradcomp.method import patterns
from hvd_gradcomp.method.compressor import Report
from hvd_gradcomp.method.handover import Handover
from hvd_gradcomp.ops import Tensor


class Kept(NamedTuple):
    r: Tensor  # float32 [size], what was not sent yet; rank-local


@dataclass(frozen=True)
class RandomStretchCompressor(Handover):
    """Sends one element of each stretch of a layer, and keeps the others for later.

    All ranks draw the same places from the step and a seed, so no index travels, and what is sent
    is added up on the way.

    What travels: 4 bytes for each stretch, by allreduce. State: 4 bytes an element.

    Args:
        every: the length of a stretch, a power of two; larger sends less.
        seed: of the places.
    """

    every: int = 128
    seed: int = 0

    def __post_init__(self):
        validate.one_of(self, "every", [2**bits for bits in range(1, 17)])
        validate.whole(self, "seed", low=0)

    @property
    def block(self):
        return self.every  # each layer begins with a stretch of its own

    def init(self, ops, layout):
        return Kept(ops.zeros((layout.size,)))

    def aggregate(self, ops, context, gradient, state, **extra):
        del extra
        finite, gradient = patterns.check_storable(ops, gradient)
        accumulated = ops.accumulate(gradient, state.r)
        index = self.places(ops, context)
        sent = ops.concat((ops.gather(accumulated, index), patterns.poison(ops, finite)))
        total = yield Allreduce(sent, context.prescale, context.postscale)
        total = patterns.strip_poison(ops, total)  # raises on all ranks, and the state is as it was
        kept = ops.put(accumulated, index, 0.0)
        r = ops.overwrite(state.r, kept)
        return ops.put(ops.clear(kept), index, total), Kept(r)

    def places(self, ops, context):
        """Return the places that all ranks send in this step; int64 [stretches]."""
        layout = context.layout
        count = sum(map(self.stretches, layout.sizes))
        # The layout is in it so that buckets draw different places.
        noise = ops.uniform(ops.key(context.step, self.seed ^ layout.digest), count)
        start = ops.arange(count) * self.every
        ends = ops.words([o + size for o, size in zip(layout.offsets, layout.sizes)])
        left = ops.gather(ends, ops.table(layout, "layer_of_block")[:count]) - start
        length = ops.cast(ops.minimum(left, self.every), "float32")
        return start + ops.cast(noise * length, "int64")

    def stretches(self, size):
        """Return the number of stretches of a layer; the last one may be shorter."""
        return -(-size // self.every)

    def layer_bytes(self, shape):
        return 4 * self.stretches(prod(shape))

    def report(self, layout, state, steps, since=0):
        sent = [self.stretches(size) for size in layout.sizes]
        return Report([count * (steps - since) for count in sent], state.r)

    def residual(self, state):
        return state.r
