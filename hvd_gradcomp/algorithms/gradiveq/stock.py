"""GradiVeQ with a fixed basis, for stock Horovod, which neither names layers nor samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hvd_gradcomp.ops as tensor_ops
from hvd_gradcomp.algorithms.gradiveq import basis, projection
from hvd_gradcomp.algorithms.gradiveq.settings import GradiVeQSettings
from hvd_gradcomp.core.compressor import Context
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Tensor


class FittedGradiVeQ:
    """GradiVeQ with a fixed basis for stock Horovod; made by `GradiVeQCompressor.fit`."""

    def __init__(
        self, compressor: GradiVeQSettings, samples: Sequence[Tensor], filters_last: bool
    ) -> None:
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for several in samples:
            shape = tuple(int(extent) for extent in several.shape[1:])
            shapes.setdefault(shape, []).append(several)
        self._known: dict[tuple[int, ...], tuple[GradiVeQSettings, Layout, Any]] = {}
        for shape, layers in shapes.items():
            self._known[shape] = _fitted(compressor, shape, layers, filters_last)

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor for stock Horovod's allreduce: coefficients if the shape is known."""
        shape = tuple(int(extent) for extent in tensor.shape)
        if shape not in self._known:
            return tensor, None
        ops = tensor_ops.of(tensor)
        compressor, layout, state = self._known[shape]
        code, _, _ = projection.encode(compressor, ops, layout, ops.reshape(tensor, (-1,)), state)
        return code, shape

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """Decode the mean gradient from the mean of the coefficients."""
        if context is None:
            return tensor
        compressor, layout, state = self._known[context]
        ops = tensor_ops.of(tensor)
        return ops.reshape(projection.decode(compressor, ops, layout, tensor, state), context)


def _fitted(
    compressor: GradiVeQSettings,
    shape: tuple[int, ...],
    layers: Sequence[Tensor],
    filters_last: bool,
) -> tuple[GradiVeQSettings, Layout, Any]:
    ops = tensor_ops.of(layers[0])
    count = sum(int(several.shape[0]) for several in layers)
    compressor = replace(compressor, sample_steps=count, sampling="none", feedback=False)
    layout = Layout(("tensor",), (shape,), block=1, filters_last=filters_last)
    state = compressor.init(ops, layout)
    row = 0
    for several in layers:
        for place in range(int(several.shape[0])):
            total = ops.reshape(ops.cast(several[place], "float32"), (layout.size,))
            state = basis.recorded(compressor, ops, layout, total, row, state)
            row += 1
    program = basis.learned(compressor, ops, Context(layout, 0, 1, 0), state)
    request: Any = next(program)
    try:
        program.send(request.tensor)
    except StopIteration as stop:
        state = stop.value
    return compressor, layout, state
