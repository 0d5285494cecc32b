"""Gradient dropping (Aji and Heafield 2017): one threshold over the whole model."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_gradcomp.algorithms.sparse.sparse_gd import ResidualTopK
from hvd_gradcomp.codecs.topk import count_of
from hvd_gradcomp.core import validate


@dataclass(frozen=True)
class GradientDroppingCompressor(ResidualTopK):
    """Gradient dropping: sends the model's largest elements (Aji and Heafield 2017, Algorithm 1).

    Each step: `r += g`; the `k = max(1, round(n * (1 - ratio)))` largest `|r|` of the whole model
    are sent as they are, and `r = 0` there. "Dropped" elements stay in the residual.

    What travels: values, float32 by default, and packed indices, by one allgather; about
    `4 + (log2(1/(1 - ratio)) + 2) / 8` bytes for each element sent. If a rank would receive more
    bytes than with dense gradients, 4 bytes for each element of the model, by allreduce.
    State: `r`, 4 bytes for each element.
    The model is one bucket, so the exchange does not overlap with backward.

    Default: `GradientDroppingCompressor(ratio=0.99)`, the paper's, as trained in docs/papers.md and
    docs/papers-long.md.

    Args:
        ratio: share of elements to drop, in (0, 1); larger sends less. The paper uses 0.99.
        index_coding: "elias_fano", packed, or "int32", plain.
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` before accumulating, so that a bad batch does not fill the
            residual; positive; smaller clips more. None clips nothing.
        values: code of the sent values: "float32", "bfloat16", "int8", "int4", "int2" or "sign";
            fewer bits send less of a layer that sends many. What rounding takes stays in `r`.
            Neighbours in a layer, some 4,096 at most, share a scale or a codebook, which is sent
            too: of a layer that sends few, it may take more than the bits save.

    Differs from the paper: the threshold is exact, not sampled; zeros are not sent; layer
    normalisation, which makes one global threshold fair, is left to the model.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> print(GradientDroppingCompressor(ratio=0.98))
    GradientDroppingCompressor(ratio=0.98)
    """

    ratio: float = 0.99
    index_coding: str = "elias_fano"
    max_norm: float | None = None
    values: str = "float32"

    whole_model = True
    of_model = True

    def __post_init__(self) -> None:
        validate.real(self, "ratio", low=0, high=1)
        self.validate_codings()
        self.validate_max_norm()

    def count(self, size: int) -> int:
        return count_of(size, 1 - self.ratio)
