"""GradiVeQ with a fixed basis, for stock Horovod, which neither names layers nor samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvd_gradcomp.algorithms.gradiveq import basis, projection
from hvd_gradcomp.algorithms.gradiveq.slices import Slicing
from hvd_gradcomp.algorithms.gradiveq.state import GradiVeQState
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Tensor, ops_of


class Fitted(NamedTuple):
    """Basis for layers of one shape."""

    slicing: Slicing
    layout: Layout  # of one layer
    state: GradiVeQState


class FittedGradiVeQ:
    """GradiVeQ with a fixed basis for stock Horovod; made by `GradiVeQCompressor.fit`.

    Args:
        bases: by the layer's shape.
    """

    def __init__(self, bases: Mapping[tuple[int, ...], Fitted]) -> None:
        self._bases = dict(bases)

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor for stock Horovod's allreduce: coefficients if the shape is known."""
        shape = tuple(int(extent) for extent in tensor.shape)
        if shape not in self._bases:
            return tensor, None
        ops = ops_of(tensor)
        slicing, layout, state = self._bases[shape]
        code, _, _ = projection.encode(slicing, ops, layout, ops.reshape(tensor, (-1,)), state)
        return code, shape

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """Decode the mean gradient from the mean of the coefficients."""
        if context is None:
            return tensor
        slicing, layout, state = self._bases[context]
        ops = ops_of(tensor)
        return ops.reshape(projection.decode(slicing, ops, layout, tensor, state), context)


def fit(untrained: Fitted, layers: Sequence[Tensor]) -> Fitted:
    """Fit a basis to samples, as many as `sample_steps`.

    Args:
        untrained: with the initial state.
        layers: samples of each layer of the shape, [count, *shape].
    """
    slicing, layout, state = untrained
    ops = ops_of(layers[0])
    row = 0
    for several in layers:
        for place in range(int(several.shape[0])):
            total = ops.reshape(ops.cast(several[place], "float32"), (layout.size,))
            state = basis.recorded(slicing, ops, layout, total, row, state)
            row += 1
    return untrained._replace(state=basis.computed(slicing, ops, layout, state))
