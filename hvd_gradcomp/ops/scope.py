"""Scope in which the elements of a bucket compete: their layer, or the whole model."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Ops, Tensor


def layer_of(ops: Ops, layout: Layout, index: Tensor) -> Tensor:
    """Return the layer of each index; the sink counts to the last layer."""
    block, _ = ops.split_bits(index, layout.block_bits)
    return ops.gather(ops.table(layout, "layer_of_block"), block)


class Scope:
    """Scope in which elements compete: each layer, or the whole model.

    A *group* is a layer, or the one group of the model.

    Args:
        layout: of the bucket.
        whole: whether there is one group.
    """

    def __init__(self, layout: Layout, whole: bool) -> None:
        self.layout, self.whole = layout, whole
        self.count = 1 if whole else len(layout.names)

    @property
    def sizes(self) -> Sequence[int]:
        """Elements of each group."""
        return (self.layout.elements,) if self.whole else self.layout.sizes

    def slack(self, limits: Sequence[int]) -> list[int]:
        """Return the margin of error of a sampled number of elements beyond a bound, by group.

        Three standard deviations of what a sample of this size finds, and a few for small ones.
        """
        layout = self.layout
        strides = [max(layout.strides)] if self.whole else layout.strides
        return [0 if s == 1 else int(3 * (m * s) ** 0.5) + 4 * s for m, s in zip(limits, strides)]

    def of_layers(self, ops: Ops, groups: Tensor) -> Tensor:
        """Expand a value per group to one per layer."""
        if not self.whole:
            return groups
        return ops.gather(groups, ops.full((len(self.layout.names),), 0))

    def of_index(self, ops: Ops, index: Tensor) -> Tensor:
        """Return the group of each element."""
        return index * 0 if self.whole else layer_of(ops, self.layout, index)

    def count_of(self, ops: Ops, index: Tensor) -> Tensor:
        """Count the elements in each group; int64 [groups]."""
        if self.whole:
            return ops.words((ops.length(index),))
        ones = ops.full((ops.length(index),), 1)
        return ops.segment_sum(ones, self.of_index(ops, index), self.count)

    def starts(self) -> tuple[int, ...]:
        """Return by layer the offset to subtract from an index for its number within its group."""
        if not self.whole:
            return self.layout.offsets
        before = [sum(self.layout.sizes[:layer]) for layer in range(len(self.layout.names))]
        return tuple(offset - b for offset, b in zip(self.layout.offsets, before))
