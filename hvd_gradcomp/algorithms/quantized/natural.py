"""Natural compression (Horvath, Ho, Horvath, Sahu, Canini, Richtarik 2019): powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hvd_gradcomp.codecs.quantized import EXCHANGES, Accumulator, Payload, QuantizedCompressor
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.row_groups import RowGroups
from hvd_gradcomp.ops import Ops, Tensor


@dataclass(frozen=True)
class NaturalCompressor(QuantizedCompressor):
    """Rounds elements at random to a power of two, unbiased (Horvath et al. 2019, Definition 1).

    The result is the sign and the exponent of a float32: an element between `2**e` and `2**(e+1)`
    becomes one of both, with probabilities that keep its mean. The variance is at most an eighth
    of the square.

    What travels: 9 bits for each element, by allgather; by alltoall and allgather (two-shot) if
    that moves fewer bytes. State: none.

    Default: `NaturalCompressor()`, as trained in docs/papers.md, where it lost nothing.

    Args:
        exchange: "allgather", "two_shot", or "auto": the one that moves fewer bytes; for a few
            elements that is an uncompressed allreduce.
        seed: of the private random numbers, which also depend on step, rank and bucket.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> NaturalCompressor()
    NaturalCompressor(exchange='auto', seed=0)
    """

    exchange: str = "auto"
    seed: int = 0

    bits = 9
    side = ()

    def __post_init__(self) -> None:
        validate.one_of(self, "exchange", EXCHANGES)
        validate.whole(self, "seed", low=0)

    def rows(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return ((1, prod(shape)),)

    def encode(self, ops: Ops, row_groups: RowGroups, x: Tensor, key: Tensor) -> Payload:
        del row_groups
        return {"codes": ops.encode_powers(x, key)}

    def add_decoded(
        self, ops: Ops, row_groups: RowGroups, payload: Payload, accumulator: Accumulator
    ) -> Tensor:
        del row_groups
        base, scratch, weights = accumulator
        return ops.add_powers(base, scratch, payload["codes"], weights)
