"""Layers as the ranks compare them: names without numbers, shapes, and what convolves."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.core.layers import Layer, Weight, convolving
from hvd_gradcomp.runtime.live_objects import live_callables
from hvd_gradcomp.tensorflow.interop.variables import plain_variable

_NARROW = ("float16", "bfloat16")  # dtypes whose global variables are float32


def named_layers(sources: Sequence[Any], names: Sequence[str | None] | None = None) -> list[Layer]:
    """Return each source's (name, shape, dtype), equal on all ranks; `names` take precedence.

    Keras numbers layers as they are made (`dense_7`), so ranks that made different models before
    would disagree: the numbers are left out, and the place makes names unique. A model that was
    loaded from a file calls its layers without its own name, so only the last two parts count.
    """
    layers: list[Layer] = []
    seen: set[str] = set()
    for place, source in enumerate(sources):
        path = (names[place] if names else None) or getattr(source, "path", None)
        name = str(path or getattr(source, "name", None) or "source")
        name = re.sub(r"_\d+(?=/|$)", "", name.partition(":")[0])
        name = "/".join(name.split("/")[-2:])
        if name in seen:
            name = f"{name}.{place}"
        seen.add(name)
        shape = tf.TensorShape(source.shape)
        if not shape.is_fully_defined():
            raise ValueError(f"{name} has shape {shape}; a fixed one is needed")
        layers.append((name, tuple(shape.as_list()), tf.as_dtype(source.dtype).name))
    return with_kernels(layers, sources)


def with_kernels(layers: Sequence[Layer], sources: Sequence[Any]) -> list[Layer]:
    """Return the layers with `convolves` set for each source that a Keras layer holds."""
    kernels = _kernels([s for s, (_, shape, _) in zip(sources, layers) if len(shape) > 2])
    marked: list[Layer] = []
    for layer, source in zip(layers, sources):
        known = kernels.get(id(plain_variable(source)))
        marked.append(layer if known is None else Weight(*layer, convolves=known))
    return marked


@tf.autograph.experimental.do_not_convert
def _kernels(sources: Sequence[Any]) -> dict[int, bool]:
    """Return for each source that a Keras layer holds if it belongs to a convolution.

    Tapes and optimizers do not know layers, so all live layers are searched for them.
    """
    convolving_kernels: dict[int, bool] = {}
    keras = sys.modules.get("keras")
    wanted = {id(plain_variable(source)) for source in sources}
    if keras is None or not wanted:
        return convolving_kernels
    for layer in live_callables(keras.layers.Layer):
        if getattr(layer, "_layers", None):
            continue  # a container's weights are its layers'
        known = convolving(type(layer))
        for weight in () if known is None else getattr(layer, "weights", ()):
            place = id(plain_variable(weight))
            if place in wanted:
                convolving_kernels[place] = known or convolving_kernels.get(place, False)
    return convolving_kernels


def widened(layer: Layer) -> Layer:
    """Return a layer in the precision of its global variable."""
    name, shape, dtype = layer
    wide = "float32" if dtype in _NARROW else dtype
    if isinstance(layer, Weight):
        return Weight(name, shape, wide, layer.convolves)
    return name, shape, wide
