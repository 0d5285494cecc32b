"""Elements that a rule selects, before it is known which of them fit.

Two representations with bit-identical results (a test checks it):

* `Indexed`, a short ascending list of indices: cheap on a CPU, needs data-dependent shapes;
* `Masked`, a flag for every element: static shapes, no host read, for a GPU and for XLA.

Layers are aligned to blocks, so per-layer reductions go over blocks first: the maxima of all
layers cost one reduction over the bucket, not one launch for each layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.scope import layer_of


class SentElements(NamedTuple):
    """Elements that are sent."""

    index: Tensor  # int64 [k]; may hold the sink, any number of times
    code: Tensor  # int64 [k]
    count: Any  # scalar
    per_layer: Tensor  # int64 [layers]


class Selection(ABC):
    """Selected elements of one bucket."""

    def __init__(self, ops: Ops, layout: Layout) -> None:
        self.ops = ops
        self.layout = layout

    @abstractmethod
    def count(self) -> Any:
        """Return the number of selected elements; a scalar."""

    @abstractmethod
    def take(self, x: Tensor) -> Tensor:
        """Return the items of x [size]; 0 for an item whose element is not selected."""

    @abstractmethod
    def largest_of_layer(self, items: Tensor) -> Tensor:
        """Return each layer's largest of non-negative int64 items; 0 for a layer without any."""

    @abstractmethod
    def sum_of_layer(self, items: Tensor) -> Tensor:
        """Return each layer's sum of int64 items; items of unselected elements must be 0."""

    @abstractmethod
    def index_of_items(self) -> Tensor:
        """Return the index of each item."""

    @abstractmethod
    def items_only(self, items: Tensor) -> Tensor:
        """Return the int64 items with 0 for elements that are not selected."""

    @abstractmethod
    def of_layer(self, values: Tensor) -> Tensor:
        """Return for each item its layer's value; `values` is [layers]."""

    @abstractmethod
    def only(self, kept: Tensor, code: Tensor) -> tuple[Selection, Tensor]:
        """Return the selection of the items for which `kept` is true, and their codes."""

    @abstractmethod
    def fitting(self, code: Tensor, capacity: Any, turn: Any) -> SentElements:
        """Return at most `capacity` elements, ascending, padded with the sink and code 0.

        If not all fit, a window of neighbours is sent. It starts elsewhere each step (`turn` is the
        step), so no position in the bucket waits more often than another.
        """

    @abstractmethod
    def spread(self, code: Tensor) -> tuple[Tensor, SentElements]:
        """Return `code + 1` at selected elements, else 0, for the dense level; int64 [size]."""


def select(ops: Ops, layout: Layout, passing: Tensor) -> Selection:
    """Wrap the result of `Ops.search` in the representation that suits the backend."""
    return (Indexed if ops.dynamic_shapes else Masked)(ops, layout, passing)


def window(pick: Callable[..., Any], count: Any, capacity: Any, turn: Any) -> tuple[Any, Any]:
    """Return (head, start): the elements below `head` are sent, and `capacity - head` from `start`.

    The window starts at a multiple of `capacity`, modulo `count`, and wraps round.
    """
    crowded = count > capacity
    start = pick(crowded, turn * capacity % pick(crowded, count, 1), 0)
    beyond = start + capacity - count
    return pick(crowded & (beyond > 0), beyond, 0), start


class Indexed(Selection):
    """Selection held as indices. Items are [k]."""

    def __init__(self, ops: Ops, layout: Layout, index: Tensor) -> None:
        super().__init__(ops, layout)
        self.index = index

    @cached_property
    def layer(self) -> Tensor:
        """Layer of each item."""
        return layer_of(self.ops, self.layout, self.index)

    def count(self) -> Any:
        return self.ops.length(self.index)

    def take(self, x: Tensor) -> Tensor:
        return self.ops.gather(x, self.index)

    def largest_of_layer(self, items: Tensor) -> Tensor:
        return self.ops.segment_max(items, self.layer, len(self.layout.names))

    def sum_of_layer(self, items: Tensor) -> Tensor:
        return self.ops.segment_sum(items, self.layer, len(self.layout.names))

    def index_of_items(self) -> Tensor:
        return self.index

    def items_only(self, items: Tensor) -> Tensor:
        return items

    def of_layer(self, values: Tensor) -> Tensor:
        return self.ops.gather(values, self.layer)

    def only(self, kept: Tensor, code: Tensor) -> tuple[Selection, Tensor]:
        items = self.ops.nonzero(kept)
        index = self.ops.gather(self.index, items)
        return Indexed(self.ops, self.layout, index), self.ops.gather(code, items)

    def _sent(self, index: Tensor, code: Tensor, count: Any) -> SentElements:
        layer = layer_of(self.ops, self.layout, index[:count])
        ones = self.ops.full((count,), 1)
        per_layer = self.ops.segment_sum(ones, layer, len(self.layout.names))
        return SentElements(index, code, count, per_layer)

    def fitting(self, code: Tensor, capacity: Any, turn: Any) -> SentElements:
        ops, count = self.ops, self.count()
        head, start = window(ops.pick, count, capacity, turn)
        stop = ops.pick(count < start + capacity, count, start + capacity)
        sent = head + stop - start
        padding = (capacity - sent,)
        index = ops.concat(
            (self.index[:head], self.index[start:stop], ops.full(padding, self.layout.sink))
        )
        code = ops.concat((code[:head], code[start:stop], ops.full(padding, 0)))
        return self._sent(index, code, sent)

    def spread(self, code: Tensor) -> tuple[Tensor, SentElements]:
        dense = self.ops.put(self.ops.zeros((self.layout.size,), "int64"), self.index, code + 1)
        return dense, self._sent(self.index, code, self.count())


class Masked(Selection):
    """Selection held as a mask. Items are [size]."""

    def __init__(self, ops: Ops, layout: Layout, mask: Tensor) -> None:
        super().__init__(ops, layout)
        self.mask = mask

    def count(self) -> Tensor:
        return self.ops.sum(self.ops.cast(self.mask, "int64"))

    def take(self, x: Tensor) -> Tensor:
        return self.ops.where(self.mask, x, 0.0)

    def _blocks(self, items: Tensor) -> Tensor:
        return self.ops.reshape(items, (self.layout.size // self.layout.block, self.layout.block))

    def largest_of_layer(self, items: Tensor) -> Tensor:
        blocks = self.ops.max(self._blocks(self.ops.where(self.mask, items, 0)), -1)
        table = self.ops.table(self.layout, "layer_of_block")
        return self.ops.segment_max(blocks, table, len(self.layout.names))

    def sum_of_layer(self, items: Tensor) -> Tensor:
        table = self.ops.table(self.layout, "layer_of_block")
        blocks = self.ops.sum(self._blocks(items), -1)
        return self.ops.segment_sum(blocks, table, len(self.layout.names))

    def index_of_items(self) -> Tensor:
        return self.ops.arange(self.layout.size)

    def items_only(self, items: Tensor) -> Tensor:
        return self.ops.where(self.mask, items, 0)

    def of_layer(self, values: Tensor) -> Tensor:
        of_block = self.ops.gather(values, self.ops.table(self.layout, "layer_of_block"))
        zeros = self.ops.zeros((1, self.layout.block), "int64")
        return self.ops.reshape(self.ops.reshape(of_block, (-1, 1)) + zeros, (self.layout.size,))

    def only(self, kept: Tensor, code: Tensor) -> tuple[Selection, Tensor]:
        return Masked(self.ops, self.layout, self.mask & kept), code

    def _sent(self, mask: Tensor, index: Tensor, code: Tensor) -> SentElements:
        flags = self.ops.cast(mask, "int64")
        blocks = self.ops.sum(self._blocks(flags), -1)
        table = self.ops.table(self.layout, "layer_of_block")
        per_layer = self.ops.segment_sum(blocks, table, len(self.layout.names))
        return SentElements(index, code, self.ops.sum(flags), per_layer)

    def fitting(self, code: Tensor, capacity: int, turn: Any) -> SentElements:
        ops, layout = self.ops, self.layout
        place = ops.cumsum(ops.cast(self.mask, "int64")) - 1
        head, start = window(ops.where, self.count(), capacity, turn)
        late = place >= start
        sent = self.mask & ((place < head) | (late & (place < start + capacity)))
        # Everything that is not sent goes to slot `capacity`, which is cut off.
        slot = ops.where(sent, ops.where(late, place - start + head, place), capacity)
        index = ops.put(
            ops.full((capacity + 1,), layout.sink),
            slot,
            ops.where(sent, ops.arange(layout.size), layout.sink),
        )
        codes = ops.put(ops.full((capacity + 1,), 0), slot, ops.where(sent, code, 0))
        return self._sent(sent, index[:capacity], codes[:capacity])

    def spread(self, code: Tensor) -> tuple[Tensor, SentElements]:
        ops, layout = self.ops, self.layout
        dense = ops.where(self.mask, code + 1, 0)
        index = ops.where(self.mask, ops.arange(layout.size), layout.sink)
        return dense, self._sent(self.mask, index, code)
