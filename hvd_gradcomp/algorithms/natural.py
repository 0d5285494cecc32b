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
        whole, mantissa = ops.split_bits(ops.float_bits(x), 23)
        noise = ops.cast(ops.uniform(key, x.shape[0]) * 2.0**23, "int64")
        code = whole + ops.cast(mantissa + noise >= 1 << 23, "int64")
        return {"codes": ops.to_bytes(ops.pack(code, 9), "uint32")}

    def add_decoded(
        self, ops: Ops, row_groups: RowGroups, payload: Payload, accumulator: Accumulator
    ) -> Tensor:
        del row_groups
        base, scratch, weights = accumulator
        total = ops.clear(scratch) if base is None else ops.overwrite(scratch, base)
        for rank, packed in enumerate(payload["codes"]):
            code = ops.unpack(ops.from_bytes(packed, "uint32"), 9)[: total.shape[0]]
            value = ops.bits_float(code * (1 << 23))
            total = ops.accumulate(total, ops.scale(value, weights[rank]))
        return total
