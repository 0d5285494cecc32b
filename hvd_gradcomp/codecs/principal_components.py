"""Principal components: the directions with the most energy of a few samples."""

from __future__ import annotations

from typing import NamedTuple

from hvd_gradcomp.ops import Ops, Tensor

_RANK = 1e-9  # a component below this share of the first one's energy is rounding error


class Components(NamedTuple):
    """Principal components of samples, the strongest last."""

    mean: Tensor  # float64 [m]
    vectors: Tensor  # float64 [m, n] orthonormal columns; zeros for components without energy
    energy: Tensor  # float64 [n] ascending; their sum is the variance that they hold


def components(
    ops: Ops, samples: Tensor, weights: Tensor | None = None, limit: int | None = None
) -> Components:
    """Return the `n` strongest components of samples.

    Fewer samples than elements never make a matrix [m, m]: their inner products, [count, count],
    have the same eigenvalues, and the eigenvectors are the mixtures of samples that make the
    components.

    Args:
        samples: float32 [count, m].
        weights: float64 [count], not negative; None for equal weights.
        limit: how many; None, or more than there are, for all `min(count, m)`.
    """
    count, length = samples.shape
    rank = min(count, length)
    first = rank - min(rank if limit is None else limit, rank)
    x = ops.cast(samples, "float64")
    if weights is None:
        weights = ops.full((count,), 1.0 / count, "float64")
    else:
        total = ops.sum(weights)
        weights = weights / ops.where(total > 0, total, 1.0)
    weights = ops.reshape(weights, (count, 1))
    mean = ops.reshape(ops.sum(x * weights, 0), (1, length))
    x = (x - mean) * ops.sqrt(weights)
    across = ops.transpose(x, (1, 0))
    if count >= length:
        energy, vectors = ops.eigh(ops.matmul(across, x))
        energy, vectors = ops.maximum(energy[first:], 0.0), vectors[:, first:]
        used = energy > energy[-1:] * _RANK
        vectors = ops.where(used, vectors, 0.0)
    else:
        energy, mixtures = ops.eigh(ops.matmul(x, across))
        energy, mixtures = ops.maximum(energy[first:], 0.0), mixtures[:, first:]
        used = energy > energy[-1:] * _RANK
        norm = ops.sqrt(ops.where(used, energy, 1.0))
        vectors = ops.matmul(across, ops.where(used, mixtures / norm, 0.0))
    return Components(ops.reshape(mean, (length,)), vectors, ops.where(used, energy, 0.0))


def dimension(
    ops: Ops, pca: Components, samples: Tensor, weights: Tensor, loss: float, limit: int
) -> Tensor:
    """Return the fewest components that lose at most `loss` of samples; int64 [1] in [1, limit].

    Args:
        pca: components fitted to other samples.
        samples: float32 [count, m].
        weights: float64 [count].
    """
    x, weights = ops.cast(samples, "float64"), ops.reshape(weights, (-1, 1))
    whole = ops.sum(x * x * weights)
    x = x - ops.reshape(pca.mean, (1, -1))
    projections = ops.matmul(x, pca.vectors)
    energy = ops.sum(projections * projections * weights, 0)  # of components, strongest last
    left_out = ops.sum(x * x * weights) - ops.sum(energy) + ops.cumsum(energy)
    weak = ops.sum(ops.cast(left_out <= whole * loss, "int64"))
    count = ops.reshape(energy.shape[0] - weak, (1,))
    return ops.maximum(ops.minimum(count, limit), 1)
