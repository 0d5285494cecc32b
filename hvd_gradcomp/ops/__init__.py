"""The tensor verbs: everything that an algorithm may do to a tensor, once a framework.

Rules of the house:

* A tensor is opaque to `algorithms/`, `codecs/` and `exchanges`. It takes Python's arithmetic,
  comparison and `&`, `|`, `~` operators, slicing, and the verbs below; nothing else.
* Integers are int64 (or uint8 for bytes), reals are float32. TensorFlow keeps int32 on the host
  even on a GPU, so int32 appears only where bytes are made and read.
* `+` after `*` is never fused by a verb: a fused multiply-add rounds once, and then one framework
  would send an element that the other keeps.
* A verb marked *donating* may write into its first argument. Use the result, never the argument.
* A verb whose result shape depends on values needs `dynamic_shapes`; `codecs.selection` offers
  the static twin for a GPU and for XLA.
"""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_gradcomp.foundation.layout import Layout
from hvd_gradcomp.ops.composites import Composites
from hvd_gradcomp.ops.tensors import Tensor as Tensor

LOGGER = logging.getLogger("hvd_gradcomp")


class PayloadError(RuntimeError):
    """What a rank sent cannot be decoded: damaged, foreign, or made for another model."""


class NonFiniteGradientError(FloatingPointError):
    """A rank's gradient has a NaN or an infinity: sent on, it would stay in every state."""


class Ops(Composites, ABC):
    """The verbs of one framework on one device.

    Attributes:
        dynamic_shapes: shapes may depend on values (a CPU, eager or in a TensorFlow graph).
            False on a GPU, where it would be a host read, and under XLA.
        word_passes: `passes.WordPasses`, or the like of another framework; None where there are
            none.
        largest_passes: the same of `passes.LargestPasses`.
        climb: what `Ladder.climb` does, at once; None where there is no better way than its verbs.
    """

    dynamic_shapes: bool
    word_passes: Any = None
    climb: Any = None
    largest_passes: Any = None

    # -- making ------------------------------------------------------------------------------

    @abstractmethod
    def zeros(self, shape: Sequence[Any], dtype: str = "float32") -> Tensor: ...

    @abstractmethod
    def full(self, shape: Sequence[Any], value: Any, dtype: str = "int64") -> Tensor: ...

    @abstractmethod
    def arange(self, count: Any) -> Tensor:
        """0, 1, ... count - 1 as int64; count may be a scalar tensor in a graph."""

    @abstractmethod
    def table(self, layout: Layout, field: str) -> Tensor:
        """A tuple of integers that the layout knows, as an int64 tensor (cached where possible)."""

    @abstractmethod
    def words(self, values: Sequence[Any]) -> Tensor:
        """Python integers and int64 scalars as one int64 vector."""

    @abstractmethod
    def reals(self, values: Sequence[float]) -> Tensor:
        """Python floats as a float32 vector."""

    @abstractmethod
    def host(self, value: Any) -> Tensor:
        """An int64 scalar that lives on the host: rungs and counters, never data."""

    # -- elementwise -------------------------------------------------------------------------

    @abstractmethod
    def abs(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def square(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def times(self, x: Tensor, factor: float) -> Tensor: ...

    @abstractmethod
    def log2(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def sqrt(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def maximum(self, x: Tensor, y: Any) -> Tensor: ...

    @abstractmethod
    def minimum(self, x: Tensor, y: Any) -> Tensor: ...

    @abstractmethod
    def where(self, condition: Tensor, x: Any, y: Any) -> Tensor: ...

    @abstractmethod
    def greater(self, x: Tensor, y: Any) -> Tensor:
        """`x > y` as bool. Donating: where a framework compares faster in place, it does."""

    @abstractmethod
    def accumulate(self, x: Tensor, y: Tensor) -> Tensor:
        """`x + y`. Donating."""

    @abstractmethod
    def clear(self, x: Tensor) -> Tensor:
        """x with every element 0. Donating."""

    @abstractmethod
    def scale(self, x: Tensor, factor: Any) -> Tensor:
        """`x * factor`. Donating."""

    @abstractmethod
    def cast(self, x: Tensor, dtype: Any) -> Tensor:
        """To a dtype by name, or by the framework's own."""

    @abstractmethod
    def split_bits(self, x: Tensor, low: int) -> tuple[Tensor, Tensor]:
        """`(x // 2**low, x % 2**low)` of int64 that is not negative."""

    @abstractmethod
    def shift_right(self, x: Tensor, amount: Tensor) -> Tensor:
        """`x // 2**amount` of int64 that is not negative; amount is int64."""

    @abstractmethod
    def xor(self, x: Tensor, y: Any) -> Tensor:
        """Bitwise, of int64."""

    @abstractmethod
    def float_bits(self, x: Tensor) -> Tensor:
        """The IEEE-754 bits of float32 as int64 in [0, 2**32)."""

    @abstractmethod
    def bits_float(self, bits: Tensor) -> Tensor:
        """The inverse of `float_bits`."""

    # -- shape and place ---------------------------------------------------------------------

    @abstractmethod
    def reshape(self, x: Tensor, shape: Sequence[Any]) -> Tensor: ...

    @abstractmethod
    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        """Along the last axis."""

    @abstractmethod
    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        """Along a new first axis."""

    @abstractmethod
    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        """`x[index]` for a vector x."""

    @abstractmethod
    def gather_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """`x[row, index[row]]` for x [rows, n] and index [rows, k]."""

    @abstractmethod
    def put(self, x: Tensor, index: Tensor, values: Any) -> Tensor:
        """`x[index] = values`. Donating. An index that repeats must repeat its value."""

    @abstractmethod
    def overwrite(self, x: Tensor, y: Tensor) -> Tensor:
        """y, in the place of x where a framework writes in place. Donating."""

    @abstractmethod
    def assemble(self, room: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """The pieces one after another, cut to the length of room. Donating for room.

        A piece may be the part of room where it belongs; or have several axes, in any order of
        memory, and then fit whole; or be what `lift` gave.
        """

    @abstractmethod
    def add_slice(self, x: Tensor, start: int, y: Tensor) -> Tensor:
        """`x[start:start + len(y)] += y` for vectors; y may reach beyond the end. Donating."""

    @abstractmethod
    def add_at(self, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        """`x[index] += values`. Donating. Indices are unique, but for the sink."""

    @abstractmethod
    def clear_last(self, x: Tensor) -> Tensor:
        """x with 0 as its last element. Donating."""

    # -- reductions and order ----------------------------------------------------------------

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
        """An int64 vector that is not negative, ascending."""

    @abstractmethod
    def count_below(self, ascending: Tensor, x: Tensor) -> Tensor:
        """How many of the ascending int64 are less than each of x; int64 of the shape of x."""

    @abstractmethod
    def largest(self, x: Tensor, k: int) -> Tensor:
        """The k largest of a float32 vector, descending."""

    @abstractmethod
    def find(self, x: Tensor, bound: Tensor) -> Tensor:
        """Indices, ascending, where `|x| >= bound` of the element's block and x is not 0.

        bound is [blocks], for blocks of one length. Needs `dynamic_shapes`.
        """

    @abstractmethod
    def finite(self, x: Tensor) -> Any:
        """Whether x has neither NaN nor infinity: a bool where it is known now, else a tensor."""

    @abstractmethod
    def nonzero(self, mask: Tensor) -> Tensor:
        """Where a bool vector is true, ascending. Needs `dynamic_shapes`."""

    @abstractmethod
    def segment_max(self, x: Tensor, segment: Tensor, count: int) -> Tensor:
        """The largest int64 of each segment; 0 for an empty one (x is not negative)."""

    @abstractmethod
    def segment_sum(self, x: Tensor, segment: Tensor, count: int) -> Tensor: ...

    # -- matrices ----------------------------------------------------------------------------
    #
    # Rounding is the framework's own affair here, and differs between frameworks.

    @abstractmethod
    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """[..., a, b] times [..., b, c]; leading axes are broadcast."""

    @abstractmethod
    def matmul_plus(self, x: Tensor, y: Tensor, row: Tensor) -> Tensor:
        """[a, b] times [b, c], and `row` [1, c] added to each row, in one walk where it can be."""

    @abstractmethod
    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum of all products, a scalar, in an order that is the framework's."""

    @abstractmethod
    def transpose(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Axis i of the result is axis `axes[i]` of x."""

    @abstractmethod
    def eigh(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues [n], ascending, and eigenvectors in columns [n, n] of a symmetric matrix."""

    @abstractmethod
    def orthogonalize(self, x: Tensor) -> Tensor:
        """Orthonormal columns that span what those of x [..., n, k] do, k <= n, in their order.

        The first j span what the first j of x do, and none points away from its own column. One
        that follows from those before it, or is 0, gives some direction that is left.
        """

    @abstractmethod
    def value_and_grad(
        self, function: Callable[..., tuple[Tensor, ...]], parameters: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """`function(*parameters)`, scalars, and the derivatives of the first by each parameter.

        No verb that donates may be used within.
        """

    # -- bytes -------------------------------------------------------------------------------

    @abstractmethod
    def to_bytes(self, x: Tensor, dtype: str) -> Tensor:
        """[..., n] as [..., n * itemsize] uint8, little-endian. "uint32" takes int64."""

    @abstractmethod
    def from_bytes(self, x: Tensor, dtype: str) -> Tensor:
        """The inverse of `to_bytes`; "uint32", "int8" and "uint8" come back as int64."""

    @abstractmethod
    def length(self, x: Tensor) -> Any:
        """The last axis: an int, or an int64 scalar where it is known only at run time."""

    # -- control and the host ----------------------------------------------------------------

    @abstractmethod
    def search(
        self,
        body: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
        donated: tuple[Tensor, ...],
        given: tuple[Tensor, ...],
        bound: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`body(*donated, *given) -> (flags, donated)`, elementwise, in pieces that stay in cache.

        With a bound, the body returns values instead of flags, and `find` says which count.

        Donating, for all of `donated`. Within `body` use the verbs instead of `*`, so that a
        backend can reuse memory.

        Returns:
            With `dynamic_shapes` the ascending indices of the true flags, else the flags; and
            the new `donated`.
        """

    @abstractmethod
    def sweep(
        self,
        body: Callable[..., tuple[Tensor, ...]],
        donated: tuple[Tensor, ...],
        given: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """`body(*donated, *given) -> donated`, like `search` without flags."""

    @abstractmethod
    def cond(self, dense: Any, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        """One of two branches. A Python bool chooses now, a tensor while the graph runs."""

    @abstractmethod
    def map_bytes(self, function: Callable[[bytes], bytes], data: Tensor) -> Tensor:
        """`function` of a uint8 vector's bytes, as a uint8 vector. Waits for the device."""

    @abstractmethod
    def warn(self, condition: Any, message: str) -> None:
        """Logs a warning where a condition, made of what `staged` gives, holds."""

    @abstractmethod
    def stage(self, x: Tensor) -> Tensor:
        """Starts to bring a small tensor to the host, without waiting for it."""

    @abstractmethod
    def staged(self, x: Tensor) -> Any:
        """A host scalar, or what `stage` brought: an int, or the scalar tensor in a graph."""

    @abstractmethod
    def pick(self, condition: Any, x: Any, y: Any) -> Any:
        """`x if condition else y` for what `staged` gives."""

    @abstractmethod
    def bisect(self, ascending: Sequence[int], x: Any) -> Any:
        """How many of the values are less than x, for an x that came from `staged`."""

    @abstractmethod
    def choice(self, values: Sequence[int], index: Any) -> Any:
        """`values[index]` for an index that came from `staged`."""

    @abstractmethod
    def require(self, facts: Mapping[str, Tensor], error: type[Exception] = PayloadError) -> Any:
        """Raises `error` if a fact does not hold for every rank; facts are bool [world].

        The key is the message; `{ranks}` in it becomes the ranks that fail. None if that was
        settled at once; otherwise bool [world], and what it is False for must not count: on a GPU
        the failure is raised one step later (see `ops.torch`), in a graph when it runs.
        """

    @abstractmethod
    def found_finite(self) -> Any:
        """Whether the gradients that `require` has looked at in this step are finite, all of them.

        True where it raises an error otherwise; one that is still on its way from a GPU, now.
        """


def of(tensor: Any) -> Ops:
    """The verbs for the framework that this tensor belongs to, without importing any other."""
    for base in type(tensor).__mro__:
        root = base.__module__.partition(".")[0]
        if root == "torch" and "torch" in sys.modules:
            from hvd_gradcomp.ops.torch import TorchOps

            return TorchOps(tensor.device)
        if root == "tensorflow" and "tensorflow" in sys.modules:
            from hvd_gradcomp.ops.tensorflow import TensorFlowOps

            return TensorFlowOps()
    raise TypeError(f"expected a torch or TensorFlow tensor, got {type(tensor).__name__}")
