"""What a method does with an element, in numbers: what a pass needs to know."""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """`gate`, `settle` and the quantizer of a `WordCompressor`, for those that are of this form.

    Each step and element: `r += g`, `v += q`. It is wanted where all that is asked for holds. What
    was sent is settled; elsewhere `v *= zeta`.

    Attributes:
        ambiguity: asks for `r*r > alpha*v`. Without it there is no v.
        large: asks for `|r| > tau`.
        powers: sends powers of two, as `PowerOfTwo` does; else plus or minus tau, as `Sign`.
        subtracts: what was sent is taken from r; else `r = 0`.
        corrects: `v = max(v - 2*|r|*tau + tau*tau, 0) * zeta` where sent; else `v = 0`.
    """

    ambiguity: bool = False
    large: bool = False
    powers: bool = False
    subtracts: bool = False
    corrects: bool = False
    alpha: float = 0.0
    tau: float = 0.0
    zeta: float = 1.0


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
        values: bytes before the values.
        places: of the indices.
    """

    size: int
    capacity: int
    values: int
    places: Places
