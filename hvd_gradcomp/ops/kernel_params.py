"""Parameters of fused kernels: the update rule of a method, and the capacity of a payload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.tensors import Tensor


class CapacityLevel(NamedTuple):
    """Capacity of one step: `capacity` elements, or all of them if `dense`.

    At a `summed` level, which is dense, an allreduce adds the values up in transit.
    """

    index: Any
    capacity: Any
    dense: Any
    summed: bool = False


class Rule(NamedTuple):
    """Parameters of `select_mask`, `commit` and the quantizer of a `ThresholdCompressor`.

    Each step and element: `r += g`, `v += q`. An element is selected if all enabled conditions
    hold. Sent elements are committed; all others get `v *= zeta`.

    Attributes:
        ambiguity: requires `r*r > alpha*v`. Without it there is no v.
        large: requires `|r| > tau`.
        powers: sends powers of two, as `PowerOfTwo` does; else plus or minus tau, as `Sign`.
        subtracts: the sent value is subtracted from r; else `r = 0`.
        corrects: `v = max(v - 2*|r|*tau + tau*tau, 0) * zeta` where sent, for signs only, not for
            powers; else `v = 0`.
    """

    ambiguity: bool = False
    large: bool = False
    powers: bool = False
    subtracts: bool = False
    corrects: bool = False
    alpha: float = 0.0
    tau: float = 0.0
    zeta: float = 1.0

    @property
    def flags(self) -> int:
        """The booleans as C takes them, from the lowest bit."""
        return sum(bool(flag) << place for place, flag in enumerate(self[:5]))

    @property
    def reals(self) -> tuple[float, ...]:
        """The numbers as C takes them."""
        return (*self[5:], 2 * self.tau, self.tau * self.tau)

    def side_bytes(self, layout: Layout) -> int:
        """Return the bytes before words or places: an exponent per layer if codes are powers."""
        return -(-len(layout.names) // 4) * 4 if self.powers else 0

    def body_bytes(self, layout: Layout, level: CapacityLevel) -> int:
        """Return the bytes of a body at a capacity level; `level.dense` is a Python bool."""
        places = layout.size if self.powers else layout.size // 4
        return self.side_bytes(layout) + (places if level.dense else 4 * level.capacity)


class Written(NamedTuple):
    """Payload of one rank, as a fused kernel writes it.

    Attributes:
        body: uint8 [bytes].
        sent: number of elements in the body.
        wanted: number of selected elements, including those that did not fit.
        per_layer: int64 [layers], elements sent in this step and all before.
        memory: with the gradient accumulated.
        commit: removes the sent elements from the memory, in place, if that is still to be done.
        hint: where to look first in the next step; float32 [groups], for top-k only.
        finite: False if the gradient was checked and is not finite: nothing else means anything.
    """

    body: Tensor
    sent: Any
    wanted: Any
    per_layer: Tensor
    memory: Sequence[Tensor]
    commit: Callable[[], None] = lambda: None
    hint: Tensor | None = None
    finite: bool = True


class Collecting(NamedTuple):
    """Parameters of `collect` and `commit` of a `TopKCompressor` of this form.

    Each step and element: `u = momentum*u + g` and `r += u`. Sent elements get `r = 0`.

    Attributes:
        momentum: 0 means that there is no u: `r += g`.
        nesterov: `r += momentum*u + g`, after u.
        masking: also `u = 0` where sent.
    """

    momentum: float = 0.0
    nesterov: bool = False
    masking: bool = False


class Form(NamedTuple):
    """Body of a `TopKCompressor` as fused kernels write it: float32 values, then 32-bit indices.

    Attributes:
        capacity: elements that it holds; an integer, or a scalar of a graph.
        valued: False for indices alone.
    """

    capacity: Any
    valued: bool = True

    @property
    def index(self) -> Any:
        """Bytes before the indices."""
        return 4 * self.capacity * self.valued

    @property
    def size(self) -> Any:
        """Bytes of the body."""
        return self.index + 4 * self.capacity

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The fields as C takes them."""
        return self.capacity, int(self.valued)
