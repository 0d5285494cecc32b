"""Second moments over samples for Keras 3 models on TensorFlow, inside `fit`.

For a weight and a batch of samples z, `q = sum over z of c_z**2`, where `c_z` is sample z's
contribution to the gradient of the loss (a mean over the batch), as in Algorithm 1 of Tsuzuku et
al. 2018. The training step's one backward pass computes the gradients of the weights and of every
layer's output before its activation; each layer's rule forms `q` from input and output gradient.

Cost. Dense on [batch, features]: one more matrix product, `(x**2)^T (delta**2)`. Dense over places
and convolutions form per-sample weight gradients: as many multiplications as the weight's
gradient, for as many samples at a time as fit in 64 MB (the weights and a convolution's patches),
at least one. Embedding: the memory of a dense gradient. Normalisation: next to nothing.

The gradient of a weight regulariser belongs to no sample and is left out of `q`.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import layers

from hvd_gradcomp.core import validate
from hvd_gradcomp.tensorflow.reduce.registry import distributed_in


class LayerUse(NamedTuple):
    """Call of a layer in the forward pass."""

    layer: Any
    x: tf.Tensor
    output: tf.Tensor  # before the activation


_CHUNK = 1 << 24  # elements of per-sample gradients and patches that exist at a time
OTHERS = ("error", "step")
_uses: list[LayerUse] | None = None  # of the step being traced


# -- rules: squares of each weight's contributions, summed over samples ---------------------------


def _dense(layer: Any, x: tf.Tensor, delta: tf.Tensor) -> dict[str, tf.Tensor]:
    del layer
    if x.shape.rank == 2:
        return {
            "kernel": tf.matmul(tf.square(x), tf.square(delta), transpose_a=True),
            "bias": tf.reduce_sum(tf.square(delta), 0),
        }
    kernel = _kernel_squares(x, delta, x.shape[-1], lambda piece: piece)
    return {"kernel": kernel, **_squares(bias=tf.reduce_sum(_places(delta), 1))}


def _convolution(layer: Any, x: tf.Tensor, delta: tf.Tensor) -> dict[str, tf.Tensor]:
    """Return squares of input patches times the output gradient, summed over places."""
    kernel, stride, dilation = layer.kernel_size, layer.strides, layer.dilation_rate
    padding = layer.padding.upper()
    if padding == "CAUSAL":
        x = tf.pad(x, ((0, 0), (dilation[0] * (kernel[0] - 1), 0), (0, 0)))
        padding = "VALID"
    if len(kernel) == 1:
        x = x[:, :, None, :]
        kernel, stride, dilation = (*kernel, 1), (*stride, 1), (*dilation, 1)

    def patches(piece: tf.Tensor) -> tf.Tensor:
        if len(kernel) == 3:
            return tf.extract_volume_patches(piece, (1, *kernel, 1), (1, *stride, 1), padding)
        return tf.image.extract_patches(
            piece, (1, *kernel, 1), (1, *stride, 1), (1, *dilation, 1), padding
        )

    squares = _kernel_squares(x, delta, prod(kernel) * x.shape[-1], patches)
    return {"kernel": squares, **_squares(bias=tf.reduce_sum(_places(delta), 1))}


def _kernel_squares(
    x: tf.Tensor, delta: tf.Tensor, rows: int, rows_of: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """Square each sample's sum over places of `row^T delta`, and add up; [rows, outputs].

    `rows_of` turns x into what the kernel is multiplied with at each place. A few samples at a
    time.
    """
    places = delta.shape[1:-1].num_elements() or 1
    chunk = max(1, _CHUNK // (rows * (places + delta.shape[-1])))

    def squares(x: tf.Tensor, delta: tf.Tensor) -> tf.Tensor:
        product = tf.einsum("bpi,bpo->bio", _places(rows_of(x)), _places(delta))
        return tf.reduce_sum(tf.square(product), 0)

    if x.shape[0] is not None and x.shape[0] <= chunk:
        return squares(x, delta)

    def add(start: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        end = start + chunk
        return end, total + squares(x[start:end], delta[start:end])

    zero = tf.zeros((rows, delta.shape[-1]), x.dtype)
    _, total = tf.while_loop(lambda start, _: start < tf.shape(x)[0], add, (0, zero))
    return total


def _embedding(layer: Any, x: tf.Tensor, delta: tf.Tensor) -> dict[str, tf.Tensor]:
    tokens = tf.cast(tf.reshape(x, (tf.shape(x)[0], -1)), tf.int64)
    sample = tf.range(tf.shape(tokens, tf.int64)[0])[:, None]
    key = tf.reshape(sample * layer.input_dim + tokens, (-1,))
    rows, run = tf.unique(key)
    values = tf.reshape(delta, (-1, layer.output_dim))
    total = tf.math.unsorted_segment_sum(values, run, tf.size(rows))
    squares = tf.math.unsorted_segment_sum(
        tf.square(total), rows % layer.input_dim, layer.input_dim
    )
    return {"embeddings": squares}


def _layer_normalization(layer: Any, x: tf.Tensor, delta: tf.Tensor) -> dict[str, tf.Tensor]:
    rank = x.shape.rank
    axis = layer.axis if isinstance(layer.axis, (list, tuple)) else (layer.axis,)
    axis = [a % rank for a in axis]
    if axis != list(range(rank - len(axis), rank)):
        raise ValueError(f"{layer.name}: only the last axes can be normalised here, got {axis}")
    mean, variance = tf.nn.moments(x, axis, keepdims=True)
    x = (x - mean) * tf.math.rsqrt(variance + layer.epsilon)
    extents = [x.shape[a] for a in axis]
    x, delta = (tf.reshape(t, (tf.shape(t)[0], -1, *extents)) for t in (x, delta))
    return _squares(gamma=tf.reduce_sum(x * delta, 1), beta=tf.reduce_sum(delta, 1))


def _batch_normalization(layer: Any, x: tf.Tensor, delta: tf.Tensor) -> dict[str, tf.Tensor]:
    """Return squares with the statistics as constants: the contribution as the layer sees it."""
    if layer.axis % x.shape.rank != x.shape.rank - 1:
        raise ValueError(f"{layer.name}: only axis=-1 can be tracked here, got {layer.axis}")
    mean, variance = tf.nn.moments(x, list(range(x.shape.rank - 1)))
    x = _places((x - mean) * tf.math.rsqrt(variance + layer.epsilon))
    delta = _places(delta)
    return _squares(gamma=tf.reduce_sum(x * delta, 1), beta=tf.reduce_sum(delta, 1))


def _places(x: tf.Tensor) -> tf.Tensor:
    """Reshape [batch, ..., channels] to [batch, places, channels]."""
    return tf.reshape(x, (tf.shape(x)[0], -1, x.shape[-1]))


def _squares(**contributions: tf.Tensor) -> dict[str, tf.Tensor]:
    return {name: tf.reduce_sum(tf.square(c), 0) for name, c in contributions.items()}


RULES: dict[type, Callable[[Any, tf.Tensor, tf.Tensor], dict[str, tf.Tensor]]] = {
    layers.Dense: _dense,
    layers.Conv1D: _convolution,
    layers.Conv2D: _convolution,
    layers.Conv3D: _convolution,
    layers.Embedding: _embedding,
    layers.LayerNormalization: _layer_normalization,
    layers.BatchNormalization: _batch_normalization,
}


def _supported(layer: Any) -> bool:
    if type(layer) not in RULES:
        return False
    if isinstance(layer, (layers.Conv1D, layers.Conv2D, layers.Conv3D)):
        plain = layer.groups == 1 and layer.data_format == "channels_last"
        return plain and (len(layer.kernel_size) < 3 or set(layer.dilation_rate) == {1})
    return True


# -- tracking --------------------------------------------------------------------------------------


def track_moments(model: keras.Model, *, others: str = "error") -> keras.Model:
    """Give a model a training step that computes per-sample second moments.

    Call it on the built model before `fit`; its optimizer must be a
    `DistributedOptimizer`, which takes the moments (`moments="auto"` or "sample"). Layers: Dense,
    Conv1D to Conv3D (channels last, one group; no dilation in 3D), Embedding, LayerNormalization,
    BatchNormalization (contribution per sample as the layer sees it). Cost: see the head of
    `hvd_gradcomp.tensorflow.keras.moments`.

    Args:
        model: its trainable weights are tracked.
        others: handling of weights in other layers, and in layers that are used twice in a step.
            "error": an error that names all of them. "step": the step counts as one sample for
            them, `q = g*g`.

    Returns:
        The model, for chaining.

    Raises:
        TypeError: naming every layer that has trainable weights and no rule, with `others="error"`,
            or if the model has a training step of its own.
        ValueError: the model is not built; `others` is unknown; while tracing, a layer is used
            twice in one step, with `others="error"`.
    """
    if others not in OTHERS:
        raise ValueError(f"others {validate.not_among(others, OTHERS)}")
    if not model.built:
        raise ValueError("build the model first: call it on a batch, or give its input shape")
    if type(model).train_step is not keras.Model.train_step:
        raise TypeError(
            f"{type(model).__name__} has its own train_step; compute moments there, or use "
            "moments='microbatch' or moments='step'"
        )
    owners = [x for x in _leaf_layers(model) if x.trainable_weights]
    unsupported = [f"{x.name} ({type(x).__name__})" for x in owners if not _supported(x)]
    if unsupported and others == "error":
        raise TypeError(
            "no per-sample moments for " + ", ".join(unsupported) + ". Replace these layers, "
            "freeze them, or use track_moments(model, others='step'), moments='microbatch' or "
            "moments='step'"
        )
    model._gradcomp_others = others
    for layer in owners:
        if _supported(layer) and not hasattr(layer, "_gradcomp_call"):
            _watch(layer)
    model.train_step = types.MethodType(_train_step, model)
    return model


def _leaf_layers(model: keras.Model) -> list[Any]:
    flat_layers = model._flatten_layers(include_self=False)
    return [x for x in flat_layers if not isinstance(x, keras.Model)]


def _watch(layer: Any) -> None:
    """Make `layer.call` record input and output before the activation, while a step is traced."""
    call = layer.call

    def watched(x: Any, *args: Any, **kwargs: Any) -> Any:
        if _uses is None:
            return call(x, *args, **kwargs)
        activation = getattr(layer, "activation", None)
        if activation is None:
            output = result = call(x, *args, **kwargs)
        else:
            layer.activation = keras.activations.linear
            try:
                output = call(x, *args, **kwargs)
            finally:
                layer.activation = activation
            result = activation(output)
        _uses.append(LayerUse(layer, tf.convert_to_tensor(x), output))
        return result

    layer._gradcomp_call = call
    layer.call = watched


@contextmanager
def _noting() -> Iterator[list[LayerUse]]:
    global _uses
    _uses = []
    try:
        yield _uses
    finally:
        _uses = None


def _train_step(model: Any, data: Any) -> Any:
    """Run Keras's own training step, and compute the gradients of layer outputs as well."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with tf.GradientTape() as tape:
        with _noting() as uses:
            predicted = model(x, training=True) if model._call_has_training_arg else model(x)
        loss = model._compute_loss(
            x=x, y=y, y_pred=predicted, sample_weight=sample_weight, training=True
        )
        samples = tf.shape(keras.tree.flatten(x)[0])[0]
        model._loss_tracker.update_state(loss, sample_weight=samples)
        loss = model.optimizer.scale_loss(loss)
    weights = model.trainable_weights
    sources = [w.value for w in weights], [use.output for use in uses]
    gradients, deltas = tape.gradient(loss, sources)
    squares = moments_of(weights, uses, deltas, model._gradcomp_others)
    if model._gradcomp_others == "step":
        squares = [
            q if g is None or q is not None else _squared(g) for q, g in zip(squares, gradients)
        ]
    distributed_in(model.optimizer)._moments = squares
    model.optimizer.apply_gradients(zip(gradients, weights))
    return model.compute_metrics(x, y, predicted, sample_weight=sample_weight)


def _squared(gradient: Any) -> tf.Tensor:
    return tf.square(tf.cast(tf.convert_to_tensor(gradient), tf.float32))


def moments_of(
    weights: Sequence[Any], uses: Sequence[LayerUse], deltas: Sequence[Any], others: str = "error"
) -> list[Any]:
    """Return each weight's moment from its layer's inputs and output gradients, or None."""
    moments: dict[int, tf.Tensor] = {}
    reached = [use for use, delta in zip(uses, deltas) if delta is not None]
    calls = Counter(id(use.layer) for use in reached)
    for use, delta in zip(reached, (delta for delta in deltas if delta is not None)):
        if calls[id(use.layer)] > 1:
            if others == "step":
                continue
            raise ValueError(
                f"{use.layer.name} is used more than once in a step, so its samples' "
                "contributions would have to be added first; use track_moments(model, "
                "others='step'), moments='microbatch' or 'step'"
            )
        x = use.x if use.x.dtype.is_integer else tf.cast(use.x, tf.float32)
        squares = RULES[type(use.layer)](use.layer, x, tf.cast(delta, tf.float32))
        for name, square in squares.items():
            weight = getattr(use.layer, name, None)
            if weight is not None:
                moments[id(weight)] = tf.reshape(square, weight.shape)
    return [moments.get(id(weight)) for weight in weights]
