"""Quantizers: the value of a sent element to a code of a few bits, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from hvd_gradcomp.codecs.compaction import Selection
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.wire import Part
from hvd_gradcomp.ops import Ops, Tensor

_SIGN = 31  # position of float32's sign bit, and the number of bits below it
_EXPONENT = 23  # position of the exponent's lowest bit
_HALF = 1 << _EXPONENT - 1  # the mantissa's top bit


class Quantizer(ABC):
    """Codes of `bits` bits, with side values for each layer.

    Attributes:
        bits: of a code; the index gets the other `32 - bits` of a word.
        dense_bits: of `code + 1` on the dense level, where 0 is "not sent": 1, 2, 4 or 8.
    """

    bits: ClassVar[int]
    dense_bits: ClassVar[int]

    @abstractmethod
    def side_parts(self, layout: Layout) -> dict[str, Part]:
        """Return the parts that are sent once for each layer."""

    @abstractmethod
    def encode(
        self, ops: Ops, selection: Selection, value: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return (code, encodable, side) of the selected values: int64, bool, the side parts."""

    @abstractmethod
    def decode(self, ops: Ops, code: Tensor, layer_side: Mapping[str, Tensor]) -> Tensor:
        """Decode codes to float32 values, given the side values of each code's layer."""


class PowerOfTwo(Quantizer):
    """Sign and three bits of exponent below the layer's largest (Tsuzuku et al. 2018, section 4.2).

    Per layer, `e = floor(log2 M)` with `M` the largest magnitude to be sent; magnitudes above
    `2**e` become `2**e`, others the closer power of two; the code is `d = e - log2` and the sign.
    An element with `d > 7` is not encodable. Rounding is the paper's bit trick (section 4.4): add
    one to the top bit of the mantissa and drop the mantissa, integers only.

    Denormal magnitudes are not encodable.
    """

    bits = 4
    dense_bits = 8

    def side_parts(self, layout: Layout) -> dict[str, Part]:
        return {"exponent": Part("int8", len(layout.names))}

    def encode(
        self, ops: Ops, selection: Selection, value: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        negative, magnitude = ops.split_bits(ops.float_bits(value), _SIGN)
        floor, _ = ops.split_bits(magnitude, _EXPONENT)
        top = ops.minimum(selection.largest_of_layer(floor), 254)  # [layers], biased by 127
        ceiling = selection.of_layer(top)
        nearest, _ = ops.split_bits(magnitude + _HALF, _EXPONENT)
        rounded = ops.minimum(nearest, ceiling)
        below = ceiling - rounded
        encodable = (below <= 7) & (rounded > 0)
        return negative * 8 + below, encodable, {"exponent": top - 127}

    def decode(self, ops: Ops, code: Tensor, layer_side: Mapping[str, Tensor]) -> Tensor:
        negative, below = ops.split_bits(code, 3)
        exponent = ops.maximum(layer_side["exponent"] + 127 - below, 0)
        return ops.bits_float(exponent * (1 << _EXPONENT) + negative * (1 << _SIGN))


class Sign(Quantizer):
    """One bit: plus or minus a threshold that all ranks know (Strom 2015).

    Args:
        threshold: magnitude of a decoded element.
    """

    bits = 1
    dense_bits = 2

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def side_parts(self, layout: Layout) -> dict[str, Part]:
        del layout
        return {}

    def encode(
        self, ops: Ops, selection: Selection, value: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        del selection
        code, _ = ops.split_bits(ops.float_bits(value), _SIGN)
        return code, code >= 0, {}

    def decode(self, ops: Ops, code: Tensor, layer_side: Mapping[str, Tensor]) -> Tensor:
        del layer_side
        return ops.cast(1 - 2 * code, "float32") * self.threshold
