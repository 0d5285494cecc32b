"""Reductions, and ops that depend on the order of values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.interface.creation import Creation
from hvd_gradcomp.ops.interface.elementwise import Elementwise
from hvd_gradcomp.ops.interface.indexing import Indexing
from hvd_gradcomp.ops.tensors import Tensor


class Reduction(Creation, Elementwise, Indexing):
    """Reductions, and ops that depend on the order of values."""

    @abstractmethod
    def sum(self, x: Tensor, axis: int | None = None) -> Tensor: ...

    @abstractmethod
    def max(self, x: Tensor, axis: int | None = None) -> Tensor: ...

    @abstractmethod
    def min(self, x: Tensor, axis: int) -> Tensor: ...

    @abstractmethod
    def cumsum(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def sort(self, x: Tensor) -> Tensor:
        """Sort a non-negative int64 vector, ascending."""

    @abstractmethod
    def length(self, x: Tensor) -> Any:
        """Return the last axis: an int, or an int64 scalar if it is known only at run time."""

    @abstractmethod
    def count_below(self, ascending: Tensor, x: Tensor) -> Tensor:
        """Count the ascending int64 that are less than each of x; int64 of the shape of x."""

    @abstractmethod
    def largest(self, x: Tensor, k: int) -> Tensor:
        """Return the k largest of a float32 vector, descending."""

    @abstractmethod
    def top_of_rows(self, x: Tensor, k: int) -> Tensor:
        """Return the k largest of each row of int64 [rows, n], in any order; [rows, k]."""

    @abstractmethod
    def all_finite(self, x: Tensor) -> Any:
        """Return `finite` by plain ops."""

    @abstractmethod
    def nonzero(self, mask: Tensor) -> Tensor:
        """Return the indices where a bool vector is true, ascending. Needs `dynamic_shapes`."""

    @abstractmethod
    def segment_max(self, x: Tensor, segment: Tensor, count: int) -> Tensor:
        """Return the largest int64 of each segment; 0 for an empty one (x is not negative)."""

    @abstractmethod
    def segment_sum(self, x: Tensor, segment: Tensor, count: int) -> Tensor: ...

    # -- composite ops ---------------------------------------------------------------------

    def finite(self, x: Tensor) -> Any:
        """Return whether x has neither NaN nor infinity: a bool if known now, else a tensor."""
        if self.native is not None and self.traversable(x):
            return self.native("finite", (x,), (self.flag(),))
        return self.all_finite(x)

    def count(self, flags: Tensor) -> Tensor:
        """Count the set flags along the last axis, which has fewer than 2**24; int64."""
        return self.cast(self.sum(self.cast(flags, "float32"), -1), "int64")

    def sum_of_rows(self, x: Tensor) -> Tensor:
        """Sum each row, float32 [rows, n] to [rows], bit-identical on all backends.

        The order of a framework's own sum is unspecified, and rounding depends on it. So rows are
        folded in halves, elementwise.
        """
        length = x.shape[-1]
        while length > 1:
            half = length // 2
            folded = x[:, :half] + x[:, half : 2 * half]
            if length % 2:
                first = folded[:, :1] + x[:, length - 1 : length]
                folded = first if half == 1 else self.concat((first, folded[:, 1:]))
            x, length = folded, half
        return self.reshape(x, (-1,))

    def layer_histograms(self, layout: Layout, x: Tensor, bins: int) -> Tensor:
        """Count each layer's elements in equal bins between its extremes; int64 [bins, layers].

        An element belongs to the last bin whose lower edge, `low + number * width`, it reaches.
        Padding is zero: it is excluded from the extremes, and subtracted from the counts.
        """
        if self.native is not None and all(layout.sizes):
            pieces = zip(layout.offsets, layout.sizes)
            bands = [n for start, size in pieces for n in (start, 1, size)]
            counts = self.empty((bins, len(layout.sizes)), "int64")
            return self.native("layer_histograms", (self.numbers(bands), x), (counts,), (bins,))
        table, block, layers = self.table(layout, "layer_of_block"), layout.block, len(layout.names)
        last = layout.size // block - 1
        stops = [start + size for start, size in zip(layout.offsets, layout.sizes) if size]
        ends = [(stop - 1) // block for stop in stops]
        used = [stop - block * end for stop, end in zip(stops, ends)]
        if last not in ends:  # the sink's own block
            ends, used = [*ends, last], [*used, 0]
        edge = self.reshape(self.words(ends), (-1, 1))
        elements = self.arange(block)
        used_of_block = elements < self.reshape(self.words(used), (-1, 1))

        rows = self.reshape(x, (-1, block))
        cut = self.gather(x, self.reshape(edge * block + elements, (-1,)))
        cut = self.reshape(cut, (-1, block))

        def largest(of_blocks: Tensor, items: Tensor) -> Tensor:
            """Return layer maxima: bits of float32 sort like integers once the sign is folded."""
            of_ends = self.max(self.where(used_of_block, items, float("-inf")), -1)
            bits = self.float_bits(self.put(of_blocks, self.words(ends), of_ends))
            folded = self.where(bits >= 1 << 31, (1 << 32) - 1 - bits, bits + (1 << 31))
            top = self.segment_max(folded, table, layers)
            return self.bits_float(self.where(top >= 1 << 31, top - (1 << 31), (1 << 32) - 1 - top))

        high = largest(self.max(rows, -1), cut)
        low = 0.0 - largest(0.0 - self.min(rows, -1), 0.0 - cut)
        width = (high - low) / self.full((layers,), bins, "float32")
        sizes = self.words(layout.sizes)
        starts = [offset // block for offset in layout.offsets]
        padding = (
            self.words([block * (b - a) for a, b in zip(starts, [*starts[1:], last + 1])]) - sizes
        )
        above, counts = sizes, []
        for upper in range(1, bins):
            first = low + self.times(width, float(upper))  # of the bin
            flags = rows >= self.reshape(self.gather(first, table), (-1, 1))
            beyond = self.segment_sum(self.count(flags), table, layers)
            beyond = beyond - padding * self.cast(first <= 0.0, "int64")
            counts.append(above - beyond)
            above = beyond
        return self.stack([*counts, above])

    def largest_of_rows(self, x: Tensor, length: Any, k: Any) -> tuple[Tensor, Tensor]:
        """Return where each row's k largest |x| are, of equal ones the first, and x there.

        Args:
            x: float32 [size], rows of `length` one after another; zeros fill up the last.
            length: of a row; an integer, or a scalar of a graph, which is then that of x.
            k: at most `length`; rows * k is below 2**31. An integer, or a scalar of a graph.

        Returns:
            Places in a row, ascending, int64 [rows, k]; and values, float32 [rows, k].
        """
        if self.native is not None:
            outputs = self._chosen_of_rows(x, length, k)
            index, values = self.native("largest_of_rows", (x,), outputs, (length, k))
            return index, values
        fixed = isinstance(length, int)
        rows = -(-x.shape[0] // length) if fixed else 1
        missing = rows * length - x.shape[0] if fixed else 0
        padded = self.concat((x, self.zeros((missing,)))) if missing else x
        x = self.reshape(padded, (rows, length))
        first = self.reshape(self.arange(rows), (-1, 1)) * length
        index = length - 1 - self.top_of_rows(self.row_keys(x), k) % length
        ascending = self.sort(self.reshape(index + first, (-1,)))
        index = self.reshape(ascending, (rows, k)) - first
        return index, self.gather_rows(x, index)

    def accumulate_largest(
        self, x: Tensor, factor: float, y: Tensor, length: int, k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `factor * x + y`, and its `largest_of_rows`. Donating for y."""
        if self.native is not None:
            outputs = self.writable(y), *self._chosen_of_rows(x, length, k)
            total, index, values = self.native(
                "accumulate_largest", (x, y), outputs, (length, k), (factor,)
            )
            return total, index, values
        y = self.accumulate(y, x if factor == 1.0 else self.times(x, factor))
        return y, *self.largest_of_rows(y, length, k)

    def _chosen_of_rows(self, x: Tensor, length: Any, k: Any) -> tuple[Any, Any]:
        """Return the outputs for places in rows and values, of kernels."""
        size, of_row, k = self.extent(x.shape[0]), self.extent(length), self.extent(k)
        shape = (size + of_row - 1) // of_row, k
        return self.empty(shape, "int64"), self.empty(shape)

    def add_in_rows(
        self,
        base: Tensor | None,
        out: Tensor,
        length: int,
        index: Sequence[Tensor],
        values: Sequence[Tensor],
        weights: Tensor,
    ) -> Tensor:
        """Return `base + sum over ranks of weight * values` at their places in rows.

        What lies beyond its row, or beyond the last element, is left out.

        Args:
            base: float32 [size], rows of `length` one after another; None for zeros.
            out: where the result may be written; may be `base`. Donating.
            length: of a row; the last may be shorter.
            index: of each rank, places in a row, int64 [rows, k]; unique.
            values: of each rank, float32 [rows, k].
            weights: float32 [world].
        """
        if self.native is not None:
            ranks = [x for pair in zip(index, values) for x in pair]
            inputs = out if base is None else base, weights, *ranks
            ints = length, base is None
            return self.native("add_in_rows", inputs, (self.writable(out),), ints)
        total = self.clear(out) if base is None else self.overwrite(out, base)
        size = total.shape[0]
        for rank, (in_row, added) in enumerate(zip(index, values)):
            first = self.reshape(self.arange(in_row.shape[0]) * length, (-1, 1))
            place = in_row + first
            inside = self.reshape((in_row < length) & (place < size), (-1,))
            place = self.where(inside, self.reshape(place, (-1,)), size - 1)
            # Adding -0 changes nothing, a zero's sign neither.
            added = self.where(inside, self.reshape(added * weights[rank], (-1,)), -0.0)
            total = self.add_at(total, place, added)
        return total

    def merge_rows(self, index: Tensor, values: Tensor, sink: int) -> tuple[Tensor, Tensor]:
        """Add up the values at each place, in the order of rows; ascending places, each once.

        Args:
            index: int64 [rows, n], from 0 to `sink`; an element there counts for nothing.
            values: float32 [rows, n], 0 at the sink.
            sink: a number.

        Returns:
            Places and sums, int64 and float32 [rows * n]; behind them sinks, with sums of 0.
        """
        if self.native is not None:
            count = prod(map(self.extent, index.shape))
            outputs = self.empty((count,), "int64"), self.empty((count,))
            places, total = self.native("merge_rows", (index, values), outputs, (sink,))
            return places, total
        rows, n = index.shape
        every, count = self.reshape(index, (-1,)), rows * n
        bits = (count - 1).bit_length()
        keys = self.sort(every * 2**bits + self.arange(count))
        sorted_, slot = self.split_bits(keys, bits)
        new = self.cast(sorted_[1:] != sorted_[:-1], "int64")
        place = self.concat((self.words((0,)), self.cumsum(new)))  # in the result, of each key
        places, total = self.put(self.full((count,), 0), slot, place), self.zeros((count,))
        for row in range(rows):
            total = self.add_at(total, places[row * n : (row + 1) * n], values[row])
        return self.put(self.full((count,), sink), place, sorted_), total

    def row_keys(self, x: Tensor) -> Tensor:
        """Return unique numbers that sort a row by |x|, and equal ones from the last; int64."""
        n = self.length(x)
        _, magnitude = self.split_bits(self.float_bits(x), 31)
        return magnitude * n + (n - 1 - self.arange(n))

    def peaks(self, x: Tensor) -> Tensor:
        """Return the largest |x| of each row; float32 [rows, n] to [rows]."""
        if self.native is not None:
            return self.native("peaks", (self.rows(x),), (self.empty(x.shape[:1]),))
        return self.max(self.abs(x), -1)

    def shares(self, wanted: Tensor, limits: Sequence[int], capacity: Any) -> tuple[Tensor, Tensor]:
        """Return how many elements each group may send, int64 [groups], and the total wanted.

        If not all fit, each group gets one element, and the same fraction of the rest.

        Args:
            wanted: int64 [groups]; 0 for the limit.
            limits: of each group.
            capacity: elements that fit.
        """
        wanted = self.where(wanted > 0, wanted, self.words(limits))
        one = self.minimum(wanted, 1)
        total, least = self.sum(wanted), self.sum(one)
        share = (wanted - one) * (capacity - least) // self.maximum(total - least, 1)
        return self.where(total > capacity, one + share, wanted), total
