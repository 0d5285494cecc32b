"""Local gradient clipping: each rank clips its own gradient before compression.

Deep Gradient Compression (Lin et al. 2018), section 3.2. Clipping after the exchange affects only
what was sent; the rest of an exploding gradient stays in the residual and inflates all later
steps. So methods that keep a residual can limit what goes into it.
"""

from __future__ import annotations

from typing import Any

from hvd_gradcomp.codecs.deterministic_sum import sum_of_layers
from hvd_gradcomp.core import validate
from hvd_gradcomp.method.compressor import Context
from hvd_gradcomp.ops import Ops, Tensor


class Clipping:
    """Mixin for compressors with `max_norm`, a field of their dataclass."""

    max_norm: float | None = None

    def validate_max_norm(self) -> None:
        """Raise a ValueError unless `max_norm` is None or a positive number."""
        if self.max_norm is not None:
            validate.real(self, "max_norm", low=0)

    def clipped(
        self, ops: Ops, context: Context, gradient: Tensor, extra: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Clip the gradient by layer and scale the second moments to match. Donating.

        Args:
            ops, context: of the bucket.
            gradient: float32 [size].
            extra: of `Compressor.aggregate`; "moment" is float32 [size].
        """
        if self.max_norm is None:
            return gradient, extra
        factor = shrinking(ops, context, gradient, self.max_norm)
        if "moment" in extra:
            moment = extra["moment"] * 1  # the caller owns it, so copy
            extra = {**extra, "moment": scaled(ops, context, moment, ops.square(factor))}
        return scaled(ops, context, gradient, factor), extra


def shrinking(ops: Ops, context: Context, gradient: Tensor, max_norm: float) -> Tensor:
    """Return the factor that limits each layer's norm to `max_norm / sqrt(ranks)`.

    float32 [layers], at most 1. The sum over ranks of uncorrelated gradients then has a norm of
    about `max_norm`.
    """
    norm = ops.sqrt(sum_of_layers(ops, context.layout, ops.square(gradient)))
    limit = max_norm / context.size**0.5
    return ops.cast(limit / ops.maximum(norm, limit), "float32")


def scaled(ops: Ops, context: Context, x: Tensor, factor: Tensor) -> Tensor:
    """Multiply each layer of a vector [size] by its factor in [layers]. Donating."""
    layout = context.layout
    of_block = ops.gather(factor, ops.table(layout, "layer_of_block"))
    rows = ops.scale(ops.reshape(x, (-1, layout.block)), ops.reshape(of_block, (-1, 1)))
    return ops.reshape(rows, (layout.size,))
