"""What a pass needs to know, in numbers: what a method does with an element, and what has room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.tensors import Tensor


class CapacityLevel(NamedTuple):
    """The room of one step: `capacity` elements, or all of them if `dense`.

    What is sent on a `summed` rung, which is dense, is added up on the way.
    """

    index: Any
    capacity: Any
    dense: Any
    summed: bool = False


class Rule(NamedTuple):
    """`gate`, `settle` and the quantizer of a `WordCompressor`, for those that are of this form.

    Each step and element: `r += g`, `v += q`. It is wanted where all that is asked for holds. What
    was sent is settled; elsewhere `v *= zeta`.

    Attributes:
        ambiguity: asks for `r*r > alpha*v`. Without it there is no v.
        large: asks for `|r| > tau`.
        powers: sends powers of two, as `PowerOfTwo` does; else plus or minus tau, as `Sign`.
        subtracts: what was sent is taken from r; else `r = 0`.
        corrects: `v = max(v - 2*|r|*tau + tau*tau, 0) * zeta` where sent, which is of signs and not
            of powers; else `v = 0`.
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
    def numbers(self) -> tuple[float, ...]:
        """As C takes them."""
        return (*self, 2 * self.tau, self.tau * self.tau)

    def side_bytes(self, layout: Layout) -> int:
        """Bytes before words or places: an exponent for each layer, where codes are of powers."""
        return -(-len(layout.names) // 4) * 4 if self.powers else 0

    def body_bytes(self, layout: Layout, rung: CapacityLevel) -> int:
        """Bytes of a body on a rung; `rung.dense` is a Python bool."""
        places = layout.size if self.powers else layout.size // 4
        return self.side_bytes(layout) + (places if rung.dense else 4 * rung.capacity)


class Written(NamedTuple):
    """One rank's payload, as a pass gives it.

    Attributes:
        body: uint8 [bytes].
        sent: how many elements travel.
        wanted: how many would, had all fit.
        per_layer: int64 [layers], of those that travel, and of those of steps before.
        memory: with the gradient taken in.
        settle: takes what travels out of the memory, in place, where that is still to be done.
        hint: where to look first in the next step; float32 [groups], of the largest alone.
    """

    body: Tensor
    sent: Any
    wanted: Any
    per_layer: Tensor
    memory: Sequence[Tensor]
    settle: Callable[[], None] = lambda: None
    hint: Tensor | None = None


class Collecting(NamedTuple):
    """`collect` and `settle` of a `LargestCompressor`, for those that are of this form.

    Each step and element `u = momentum*u + g` and `r += u`. What was sent is settled by `r = 0`.

    Attributes:
        momentum: 0 goes without u: `r += g`.
        nesterov: `r += momentum*u + g`, after u.
        masking: also `u = 0` where sent.
    """

    momentum: float = 0.0
    nesterov: bool = False
    masking: bool = False


class Places(NamedTuple):
    """Where the indices of a payload lie in its body.

    Attributes:
        blocks: of packed differences; 0 for indices of 32 bits.
        room: words that the blocks have.
        first: bytes before the indices, or before the blocks' widths.
        deltas: bytes before the words.
    """

    blocks: int
    room: int
    first: int
    deltas: int


class Form(NamedTuple):
    """Where everything lies in the body of a `LargestCompressor`.

    Attributes:
        size: bytes of the body.
        capacity: elements that it holds.
        values: bytes before the values; those of the body where it has none.
        places: of the indices.
    """

    size: int
    capacity: int
    values: int
    places: Places

    @property
    def numbers(self) -> tuple[int, ...]:
        """As operations of TensorFlow take them."""
        return (self.size, self.capacity, self.values, *self.places)
