"""The autoencoder of LGC, of one-dimensional convolutions.

Abrahamyan et al. 2021, section IV.C, Tables I and II.

Written once for all frameworks: a convolution of width 3 concatenates three shifted copies of its
input and multiplies by a matrix; a transposed one multiplies first, then shifts and adds.
Vectors are [rows, length, channels], so a shift along the length is a slice of the row.

Parameters are flat vectors, layer after layer: the weight matrix, then the bias.

*Initial parameters.* Every network starts by passing a signal on: encoders send the mean of four
neighbours, four means to a code position, and decoders spread them out again, but the decoders'
last layer starts at zero. So the loss starts at 1, and a scale is learned first. Other channels
start with small noise. From noise alone, a few hundred steps of plain gradient descent learn
hardly anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from hvd_gradcomp.ops import Ops, Tensor

STRIDE = 16  # elements for each position of a code
SLOPE = 0.01  # of the leaky ReLU
_CHANNELS = 4  # of a code
_NOISE = 0.1  # initial, as a share of the width that preserves the variance
_SHIFT = 8.0  # keeps a code of about unit variance on the positive side of the ReLU
_PASS = 1.0 / (1.0 + SLOPE)  # signal = this * the difference of two rectified channels
_HALF = 0.5**0.5


class Layer(NamedTuple):
    """A convolution: channels in and out, taps, stride."""

    inputs: int
    outputs: int
    taps: int
    stride: int

    @property
    def size(self) -> int:
        """Number of parameters."""
        return (self.taps * self.inputs + 1) * self.outputs


ENCODER = (
    Layer(1, 64, 3, 2),
    Layer(64, 128, 3, 2),
    Layer(128, 256, 3, 2),
    Layer(256, 64, 3, 2),
    Layer(64, _CHANNELS, 1, 1),
)
# The first layer has stride 1: five layers of stride 2, as printed, would double the length.
DECODER = (
    Layer(_CHANNELS, 4, 3, 1),
    Layer(4, 32, 3, 2),
    Layer(32, 64, 3, 2),
    Layer(64, 128, 3, 2),
    Layer(128, 32, 3, 2),
)
ENCODER_SIZE = sum(layer.size for layer in ENCODER)


def last_layer(innovation: bool) -> Layer:
    """Return a decoder's last convolution; the innovation is one more input channel."""
    return Layer(DECODER[-1].outputs + innovation, 1, 1, 1)


def decoder_size(innovation: bool) -> int:
    """Return the number of parameters of a decoder."""
    return sum(layer.size for layer in DECODER) + last_layer(innovation).size


def padded(length: int) -> int:
    """Return the length that a vector is padded to."""
    return -(-length // STRIDE) * STRIDE


def code_length(length: int) -> int:
    """Return the number of elements of a vector's code."""
    return padded(length) // STRIDE * _CHANNELS


def encode(ops: Ops, parameters: Tensor, x: Tensor) -> Tensor:
    """Encode vectors: [rows, length] to [rows, length / 4]. The length is a multiple of 16."""
    rows, length = x.shape
    signal = ops.reshape(x, (rows, length, 1))
    for layer, weight, bias in _cut(ops, parameters, ENCODER, transposed=False):
        if layer.taps == 1:
            signal = ops.matmul(signal, weight) + bias
        else:
            signal = ops.leaky_relu(_halved(ops, signal, weight) + bias, SLOPE)
    return ops.reshape(signal, (rows, length // STRIDE * _CHANNELS))


def decode(ops: Ops, parameters: Tensor, code: Tensor, innovation: Tensor | None = None) -> Tensor:
    """Decode vectors, with one decoder for each row or one for all.

    Args:
        parameters: float32 [heads, size].
        code: [rows, length / 4]. Rows and heads are equally many, or one of them is 1.
        innovation: [heads, length]; None for decoders without it.

    Returns:
        [rows, length]; [heads, length] for a single code.
    """
    rows = max(parameters.shape[0], code.shape[0])
    positions = code.shape[1] // _CHANNELS
    signal = ops.reshape(code, (code.shape[0], positions, _CHANNELS))
    layers = (*DECODER, last_layer(innovation is not None))
    if parameters.shape[0] == 1:  # one product for all rows
        parameters = ops.reshape(parameters, (-1,))
    for layer, weight, bias in _cut(ops, parameters, layers, transposed=True):
        if layer.taps == 1:
            if innovation is not None:
                beside = ops.reshape(innovation, (rows, positions * STRIDE, 1))
                signal = ops.concat((signal, beside))
            signal = ops.matmul(signal, weight) + bias
        else:
            spread = _doubled if layer.stride == 2 else _smoothed
            signal = ops.leaky_relu(spread(ops, signal, weight) + bias, SLOPE)
    return ops.reshape(signal, (rows, positions * STRIDE))


def _cut(
    ops: Ops, parameters: Tensor, layers: tuple[Layer, ...], transposed: bool
) -> Iterator[tuple[Layer, Any, Any]]:
    """Yield each layer with its matrix [..., taps * inputs, outputs] and bias [..., 1, outputs].

    A transposed convolution's matrix is [..., inputs, taps * outputs].
    """
    head = tuple(parameters.shape[:-1])
    start = 0
    for layer in layers:
        weights = layer.taps * layer.inputs * layer.outputs
        flat = parameters[..., start : start + weights]
        bias = parameters[..., start + weights : start + layer.size]
        rows = layer.inputs if transposed and layer.taps > 1 else layer.taps * layer.inputs
        yield (
            layer,
            ops.reshape(flat, (*head, rows, weights // rows)),
            ops.reshape(bias, (*head, 1, layer.outputs)),
        )
        start += layer.size


def _shifted(ops: Ops, x: Tensor, by: int) -> Tensor:
    """Shift x by 1 or -1 along the length, with zeros beyond the ends: `x[:, i - by]` at i."""
    rows, length, channels = x.shape
    flat = ops.reshape(x, (rows, length * channels))
    nothing = ops.zeros((rows, channels))
    pieces = (nothing, flat[:, :-channels]) if by > 0 else (flat[:, channels:], nothing)
    return ops.reshape(ops.concat(pieces), (rows, length, channels))


def _halved(ops: Ops, x: Tensor, weight: Tensor) -> Tensor:
    """Convolve with stride 2: position i sees 2i - 1, 2i and 2i + 1."""
    rows, length, channels = x.shape
    pairs = ops.reshape(x, (rows, length // 2, 2 * channels))
    before = _shifted(ops, pairs[:, :, channels:], 1)
    return ops.matmul(ops.concat((before, pairs)), weight)


def _doubled(ops: Ops, x: Tensor, weight: Tensor) -> Tensor:
    """Apply a transposed convolution of stride 2: position i adds to 2i - 1, 2i and 2i + 1."""
    spread = ops.matmul(x, weight)
    rows, length, outputs = spread.shape[0], spread.shape[1], spread.shape[2] // 3
    odd = spread[:, :, 2 * outputs :] + _shifted(ops, spread[:, :, :outputs], -1)
    pairs = ops.concat((spread[:, :, outputs : 2 * outputs], odd))
    return ops.reshape(pairs, (rows, 2 * length, outputs))


def _smoothed(ops: Ops, x: Tensor, weight: Tensor) -> Tensor:
    """Apply a transposed convolution of stride 1: position i adds to i - 1, i and i + 1."""
    spread = ops.matmul(x, weight)
    outputs = spread.shape[2] // 3
    middle = spread[:, :, outputs : 2 * outputs]
    left = _shifted(ops, spread[:, :, :outputs], -1)
    return middle + left + _shifted(ops, spread[:, :, 2 * outputs :], 1)


# -- initial parameters ------------------------------------------------------------------------


def initial_encoder(ops: Ops, seed: int) -> Tensor:
    """Return an encoder's initial parameters; float32 [ENCODER_SIZE]."""
    weights = {}
    for layer in (0, 1):  # means of two positions, as a pair of channels with both signs
        for tap in (1, 2):
            for source, sign in ((0, 1.0),) if layer == 0 else ((0, _PASS), (1, -_PASS)):
                weights[layer, tap, source, 0] = sign * _HALF
                weights[layer, tap, source, 1] = -sign * _HALF
    for layer, signals in ((2, 1), (3, 2)):  # two positions become adjacent channels
        for tap in (1, 2):
            for signal in range(signals):
                target = 2 * (signals * (tap - 1) + signal)
                for source, sign in ((2 * signal, _PASS), (2 * signal + 1, -_PASS)):
                    weights[layer, tap, source, target] = sign
                    weights[layer, tap, source, target + 1] = -sign
    for signal in range(_CHANNELS):
        weights[4, 0, 2 * signal, signal] = _PASS
        weights[4, 0, 2 * signal + 1, signal] = -_PASS
    places = {
        _place(ENCODER, layer, tap * ENCODER[layer].inputs + source, target): value
        for (layer, tap, source, target), value in weights.items()
    }
    return _filled(ops, ENCODER, places, seed)


def initial_decoder(ops: Ops, innovation: bool, seed: int) -> Tensor:
    """Return a decoder's initial parameters; float32 [decoder_size(innovation)]."""
    layers = (*DECODER, last_layer(innovation))
    weights = {(0, 1, signal, signal): 1.0 for signal in range(_CHANNELS)}
    for tap in (1, 2):
        for signal in range(2):  # two signals at each of the two positions
            weights[1, tap, 2 * (tap - 1) + signal, 2 * signal] = 1.0
            weights[1, tap, 2 * (tap - 1) + signal, 2 * signal + 1] = -1.0
        for layer in (2, 3, 4):  # then one signal at each position; then it is repeated
            first = 2 * (tap - 1) if layer == 2 else 0
            for source, sign in ((first, _PASS), (first + 1, -_PASS)):
                weights[layer, tap, source, 0] = sign
                weights[layer, tap, source, 1] = -sign
    places = {
        _place(layers, layer, source, tap * layers[layer].outputs + target, 3): value
        for (layer, tap, source, target), value in weights.items()
    }
    ends = [sum(layer.size for layer in layers[: i + 1]) for i in range(2)]
    for signal in range(_CHANNELS):
        places[ends[0] - _CHANNELS + signal] = _SHIFT
        places[ends[1] - layers[1].outputs + signal] = -_SHIFT if signal % 2 == 0 else _SHIFT
    return _filled(ops, layers, places, seed, silent=True)


def _place(layers: tuple[Layer, ...], layer: int, row: int, column: int, wide: int = 1) -> int:
    """Return the index of an element of a layer's matrix in the flat vector."""
    before = sum(layer_shape.size for layer_shape in layers[:layer])
    return before + row * layers[layer].outputs * wide + column


def _filled(
    ops: Ops,
    layers: tuple[Layer, ...],
    places: dict[int, float],
    seed: int,
    silent: bool = False,
) -> Tensor:
    """Return noise overwritten at `places`; biases are zero, with `silent` the last layer too."""
    key = ops.key(0, seed)
    key = ops.words(key) if isinstance(key, tuple) else key  # a tuple of integers with kernels
    pieces, start = [], 0
    for number, layer in enumerate(layers):
        weights = prod((layer.taps, layer.inputs, layer.outputs))
        quiet = silent and number == len(layers) - 1
        width = 0.0 if quiet else _NOISE * (6.0 / (layer.taps * layer.inputs)) ** 0.5
        noise = ops.uniform(key + start, weights) * (2.0 * width) - width
        pieces += [noise, ops.zeros((layer.outputs,))]
        start += layer.size
    at = sorted(places)
    return ops.put(ops.concat(pieces), ops.words(at), ops.reals([places[i] for i in at]))
