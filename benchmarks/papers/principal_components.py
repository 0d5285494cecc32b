"""Linear correlation of gradients, by principal components (Yu et al. 2018).

energy              of slices of convolutions in the first components (Figures 4 and 5)
compression_loss    of a basis that was fitted to other slices (equation 7)
"""

from __future__ import annotations

from math import isfinite

from hvd_gradcomp.codecs.principal_components import components
from hvd_gradcomp.ops import Ops, Tensor


def energy(ops: Ops, samples: Tensor) -> list[float]:
    """Return the share of the variance in the first 1, 2, ... principal components.

    At most T - 1 components of T samples have variance; if T < m, the Gram matrix [T, T] is
    diagonalized. For constant samples all shares are 1.

    Args:
        ops: operations on the samples.
        samples: [T, m], finite.

    Returns:
        min(T, m) shares, ascending to 1.
    """
    _check_samples(ops, "energy", samples)
    parts = _floats(components(ops, samples).energy)[::-1]
    total, reached, shares = sum(parts), 0.0, []
    for part in parts:
        reached += part
        shares.append(min(reached / total, 1.0) if total > 0 else 1.0)
    return shares


def compression_loss(ops: Ops, samples: Tensor, later: Tensor, dimension: int) -> list[float]:
    """Return a linear compressor's loss on other slices: `||s - s'||**2 / ||s||**2`.

    Yu et al. 2018, equation 7. The compressor is GradiVeQ's: the mean `mu` of the samples and the
    first `dimension` principal components `U`; `s' = U U^T (s - mu) + mu`. T samples have at most
    T - 1 components, so a larger `dimension` has no effect. A random basis loses about
    `1 - dimension / m`. The loss of a zero slice is 0 if `s'` is zero too, else infinite.

    Args:
        ops: operations on both.
        samples: [T, m] to fit the compressor to.
        later: [n, m] to apply it to.
        dimension: number of components, 1 to m.

    Returns:
        The loss of each of the n slices.

    Raises:
        ValueError: `dimension` is out of range, or the shapes do not fit.
    """
    _check_samples(ops, "compression_loss", samples)
    width = int(samples.shape[1])
    if isinstance(dimension, bool) or not isinstance(dimension, int):
        raise ValueError(f"compression_loss: dimension must be a whole number, got {dimension!r}")
    if not 1 <= dimension <= width:
        raise ValueError(
            f"compression_loss: dimension must be a whole number in [1, {width}], got {dimension}"
        )
    if len(later.shape) != 2 or int(later.shape[1]) != width:
        raise ValueError(
            f"compression_loss: later must have the shape [n, {width}], got "
            f"{[int(extent) for extent in later.shape]}"
        )
    whole = ops.cast(later, "float64")
    fitted = components(ops, samples)
    basis = fitted.vectors[:, max(int(fitted.energy.shape[0]) - dimension, 0) :]
    rest = whole - ops.reshape(fitted.mean, (1, -1))
    rest = rest - ops.matmul(ops.matmul(rest, basis), ops.transpose(basis, (1, 0)))
    lost, had = (_floats(ops.sum(ops.square(x), -1)) for x in (rest, whole))
    return [a / b if b > 0 else (float("inf") if a > 0 else 0.0) for a, b in zip(lost, had)]


def _check_samples(ops: Ops, caller: str, samples: Tensor) -> None:
    if len(samples.shape) != 2 or not int(samples.shape[0]) or not int(samples.shape[1]):
        raise ValueError(
            f"{caller}: samples must have the shape [T, m] with T, m of at least 1, got "
            f"{[int(extent) for extent in samples.shape]}"
        )
    if not isfinite(float(ops.sum(ops.cast(samples, "float64") * 0.0))):
        raise ValueError(f"{caller}: samples must be finite, got a NaN or an infinity")


def _floats(vector: Tensor) -> list[float]:
    return [float(value) for value in vector]
