"""Sums over layers that are bit-identical on every device and framework."""

from __future__ import annotations

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Ops, Tensor

_KEPT = 40  # bits kept below the largest summand; 2**22 summands fit in 63 bits


def sum_of_layers(ops: Ops, layout: Layout, x: Tensor) -> Tensor:
    """Sum each layer of non-negative float32 [size]; float64 [layers].

    Blocks are summed pairwise, and the block sums are added up as integers: exact to 2**-40 of the
    largest block's sum.
    """
    blocks = ops.sum_of_rows(ops.reshape(x, (-1, layout.block)))
    table, layers = ops.table(layout, "layer_of_block"), len(layout.names)
    exponent, _ = ops.split_bits(ops.float_bits(blocks), 23)
    top = ops.maximum(ops.segment_max(exponent, table, layers), 64)  # biased by 127
    up = ops.bits_float((254 - top) * (1 << 23))  # 2**(127 - top), in float32's range
    scaled = ops.cast(blocks, "float64") * ops.cast(ops.gather(up, table), "float64")
    whole = ops.segment_sum(ops.cast(scaled * 2.0**_KEPT, "int64"), table, layers)
    return ops.cast(whole, "float64") * 2.0**-_KEPT / ops.cast(up, "float64")
