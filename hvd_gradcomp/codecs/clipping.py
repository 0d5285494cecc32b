"""Limits a rank's own gradient before it is compressed: local gradient clipping.

Deep Gradient Compression (Lin et al. 2018), section 3.2. What is clipped after the exchange is what
was sent; the rest of a gradient that is far too large stays in the residual, and makes all later
ones too large as well. So methods that keep a residual can limit what goes into it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hvd_gradcomp.codecs.deterministic_sum import sum_of_layers
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.compressor import Context
from hvd_gradcomp.ops import Ops, Tensor


class Clipping:
    """A method with `max_norm`, a field of the dataclasses that have it.

    Its `repr` leaves the field out where it limits nothing: states and payloads go by that text,
    and are the same as without it.
    """

    max_norm: float | None = None

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)  # type: ignore[arg-type]
            if field.repr and (field.name != "max_norm" or self.max_norm is not None)
        ]
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def validate_max_norm(self) -> None:
        """Raises a ValueError unless `max_norm` is None or a positive number."""
        if self.max_norm is not None:
            validate.real(self, "max_norm", low=0)

    def clipped(
        self, ops: Ops, context: Context, gradient: Tensor, extra: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """The gradient with its layers limited, and second moments with them. Donating.

        Args:
            ops, context: of the bucket.
            gradient: float32 [size].
            extra: of `Compressor.aggregate`; "moment" is float32 [size].
        """
        if self.max_norm is None:
            return gradient, extra
        factor = shrinking(ops, context, gradient, self.max_norm)
        if "moment" in extra:
            own = extra["moment"] * 1  # it is only lent
            extra = {**extra, "moment": scaled(ops, context, own, ops.square(factor))}
        return scaled(ops, context, gradient, factor), extra


def shrinking(ops: Ops, context: Context, gradient: Tensor, max_norm: float) -> Tensor:
    """What each layer is multiplied with so that its norm is at most `max_norm / sqrt(ranks)`.

    float32 [layers], at most 1. The sum over ranks of gradients that do not agree is then about
    `max_norm`.
    """
    norm = ops.sqrt(sum_of_layers(ops, context.layout, ops.square(gradient)))
    limit = max_norm / context.size**0.5
    return ops.cast(limit / ops.maximum(norm, limit), "float32")


def scaled(ops: Ops, context: Context, x: Tensor, factor: Tensor) -> Tensor:
    """Each layer of a vector [size] times its own factor, of [layers]. Donating."""
    layout = context.layout
    of_block = ops.gather(factor, ops.table(layout, "layer_of_block"))
    rows = ops.scale(ops.reshape(x, (-1, layout.block)), ops.reshape(of_block, (-1, 1)))
    return ops.reshape(rows, (layout.size,))
