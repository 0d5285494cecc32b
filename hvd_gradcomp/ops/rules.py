"""What a method with a rule for each element does, in numbers: what a pass needs to know."""

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
