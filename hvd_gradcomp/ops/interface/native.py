"""Kernels in C behind the ops, and what a framework supplies to call them.

An op whose kernel is loaded says what that takes and gives, once for all frameworks: inputs,
outputs, integers, reals. Its plain ops below define the result to the bit, and run where there is
no kernel: on GPUs, in XLA, without a compiler. `c/calls.c` is the table of kernels; it checks each
call, so an output that is declared wrongly is an error, and nothing is written where it may not be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hvd_gradcomp.ops.tensors import Tensor


class Native(ABC):
    """Calls of kernels in C, and their inputs and outputs.

    Attributes:
        native: `native(name, inputs, outputs, ints, floats)` runs a kernel and returns its outputs,
            a single one by itself; None if kernels are not loaded, or do not reach the device.
            Inputs are tensors, or of `numbers`, `numbers_of` and `rows`; outputs are of the methods
            below.
        in_place: whether kernels write to memory that is donated (PyTorch); else results are new
            tensors, for which the framework may take an input's memory (TensorFlow).
    """

    native: Any = None
    in_place = False

    # -- inputs --------------------------------------------------------------------------------

    @abstractmethod
    def numbers(self, values: Sequence[Any]) -> Any:
        """Return integers, of which some may be scalars, as an input."""

    @abstractmethod
    def numbers_of(self, static: Any, field: str = "numbers") -> Any:
        """Return the integers in a field of a hashable object as an input, cached if possible."""

    @abstractmethod
    def rows(self, x: Tensor) -> Any:
        """Return as an input that need not be contiguous: rows are whole words apart."""

    @abstractmethod
    def traversable(self, x: Tensor) -> bool:
        """Return True if C can traverse a float32 tensor where it is."""

    # -- outputs -------------------------------------------------------------------------------

    @abstractmethod
    def extent(self, n: Any) -> Any:
        """Return an integer, to compute the shape of an output with.

        What a graph knows only when it runs (a scalar, or None as an axis of a tensor) becomes an
        unknown extent, without a node of the graph.
        """

    @abstractmethod
    def empty(self, shape: Sequence[Any], dtype: str = "float32") -> Any:
        """Return new memory as an output; extents may be unknown."""

    @abstractmethod
    def body(self, size: Any, front: Any = 0) -> Any:
        """Return the memory for the bytes of a payload as an output.

        Args:
            size: of the body, or of its last part.
            front: bytes of the parts before that, whole words, at most.
        """

    @abstractmethod
    def before(self, last: Tensor, size: Any) -> Any:
        """Return the newest `body` with `size` bytes in front as an output, if there are, or None.

        Args:
            last: what must be that body.
            size: whole words.
        """

    @abstractmethod
    def writable(self, x: Tensor) -> Any:
        """Return memory like x as an output: that of x, unless it is kept for a rollback."""

    @abstractmethod
    def flag(self) -> Any:
        """Return a bool as an output; it is one of Python's after an eager call."""

    @abstractmethod
    def number(self) -> Any:
        """Return an integer as an output, which an eager call of PyTorch returns as Python's."""
