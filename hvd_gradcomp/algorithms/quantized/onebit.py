"""1-bit SGD (Seide, Fu, Droppo, Li, Yu 2014): signs, two means per column, error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hvd_gradcomp.codecs.quantized import EXCHANGES, Accumulator, FeedbackCompressor, Payload
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.row_groups import RowGroups
from hvd_gradcomp.ops import Ops, Tensor


@dataclass(frozen=True)
class OneBitCompressor(FeedbackCompressor):
    """1-bit SGD: sends signs and two means for each column (Seide et al. 2014).

    Each step: `r += g`; an element is sent as the mean of the elements of its column with the same
    sign, and `r` keeps the difference. A column holds the weights of one output: one index of the
    first axis of PyTorch's weights or of the last of TensorFlow's (one row of an embedding table);
    a layer with one axis is one column. TensorFlow's weights are copied to the bucket in PyTorch's
    order, so both frameworks send the same codes.

    What travels: 1 bit for each element and two float32 for each column, by allgather; by alltoall
    and allgather (two-shot) if that moves fewer bytes. State: `r`, 4 bytes for each element, in
    bucket order.

    Default: `OneBitCompressor()`, as trained in docs/papers.md.

    Args:
        exchange: "allgather", "two_shot", or "auto": the one that moves fewer bytes; for a few
            elements that is an uncompressed allreduce. The two-shot exchange quantizes the sum of
            a shard by the shard's columns.
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` before accumulating, so that a bad batch does not fill the
            residual; positive; smaller clips more. None clips nothing.

    Differs from the paper: only in the exchange.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> OneBitCompressor()
    OneBitCompressor(exchange='auto', max_norm=None)
    """

    exchange: str = "auto"
    max_norm: float | None = None

    outputs_first = True
    bits = 1
    side = ("above", "below")
    seed = 0

    def __post_init__(self) -> None:
        validate.one_of(self, "exchange", EXCHANGES)
        self.validate_max_norm()

    def rows(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        columns = shape[0] if len(shape) > 1 else 1
        return ((columns, prod(shape) // max(columns, 1)),)

    def encode(self, ops: Ops, row_groups: RowGroups, x: Tensor, key: Tensor) -> Payload:
        del key
        above, below, codes = ops.encode_signs(row_groups, x)
        return {"above": above, "below": below, "codes": codes}

    def add_decoded(
        self, ops: Ops, row_groups: RowGroups, payload: Payload, accumulator: Accumulator
    ) -> Tensor:
        base, scratch, weights = accumulator
        codes, above, below = payload["codes"], payload["above"], payload["below"]
        return ops.add_signs(row_groups, base, scratch, codes, above, below, weights)
