"""Principal components: the directions that hold the most energy of a few samples."""

from __future__ import annotations

from typing import NamedTuple

from hvd_gradcomp.ops import Ops, Tensor

_RANK = 1e-9  # energy, as a share of the first component's, below which a component is rounding


class Components(NamedTuple):
    """The components of samples, the strongest last."""

    mean: Tensor  # float64 [m]
    vectors: Tensor  # float64 [m, n] orthonormal columns; zeros for components without energy
    energy: Tensor  # float64 [n] ascending; their sum is the variance of the samples


def components(ops: Ops, samples: Tensor) -> Components:
    """All components of samples that there can be, `n = min(count, m)`.

    Args:
        samples: float32 [count, m].
    """
    count, length = samples.shape
    x = ops.cast(samples, "float64")
    mean = ops.reshape(ops.sum(x, 0), (1, length)) * (1.0 / count)
    x = x - mean
    across = ops.transpose(x, (1, 0))
    if count >= length:
        energy, vectors = ops.eigh(ops.matmul(across, x) * (1.0 / count))
        energy = ops.maximum(energy, 0.0)
        used = energy > energy[-1:] * _RANK
        vectors = ops.where(used, vectors, 0.0)
    else:  # the same from inner products of samples, of which there are fewer
        energy, mixtures = ops.eigh(ops.matmul(x, across) * (1.0 / count))
        energy = ops.maximum(energy, 0.0)
        used = energy > energy[-1:] * _RANK
        norm = ops.sqrt(ops.where(used, energy * float(count), 1.0))
        vectors = ops.matmul(across, ops.where(used, mixtures / norm, 0.0))
    return Components(ops.reshape(mean, (length,)), vectors, ops.where(used, energy, 0.0))


def dimension(ops: Ops, energy: Tensor, loss: float, most: int) -> Tensor:
    """The fewest components that leave out at most `loss` of the energy; int64 [1] in [1, most]."""
    left_out = ops.cumsum(energy) <= ops.sum(energy) * loss
    count = energy.shape[0] - ops.sum(ops.cast(left_out, "int64"))
    return ops.maximum(ops.minimum(ops.reshape(count, (1,)), most), 1)
