"""Entropy and mutual information of vectors, from histograms, as `monitoring.probe` reads them."""

from __future__ import annotations

from math import isfinite, log

from hvd_gradcomp.monitoring import probe
from hvd_gradcomp.ops import Ops, Tensor


def entropy(ops: Ops, x: Tensor, bins: int = 256, corrected: bool = False) -> float:
    """Return the entropy, in bits, of the histogram of x over equal bins of its range.

    The value depends on the bins as much as on x: compare only values of equal `bins`. N samples
    underestimate it by about `(occupied bins - 1) / (2 N ln 2)`. A constant has 0.

    Args:
        ops: operations on x.
        x: a vector, real and finite.
        bins: their number, at least 2.
        corrected: add that estimate of the error (Miller and Madow 1955).

    Raises:
        ValueError: x is empty or not finite, or `bins` is out of range.
    """
    row = _single_row(ops, "entropy", x, bins)
    return float(
        probe.entropies(ops, probe.bins_of(ops, row, row == row, bins), bins, corrected)[0]
    )


def mutual_information(
    ops: Ops, x: Tensor, y: Tensor, bins: int = 32, corrected: bool = False
) -> float:
    """Return the bits that x tells about y, `H(x) + H(y) - H(x, y)`, from histograms.

    Abrahamyan et al. 2021, section III, equation 1.

    Each vector is quantized separately, as in `entropy`; the joint histogram has `bins**2` cells.
    N samples overestimate it: independent vectors give up to about `chance_bound(bins, N)` bits
    (on average and to first order exactly that, if all cells are occupied).

    Args:
        ops: operations on both.
        x, y: vectors of one length, real and finite.
        bins: of each; the bias grows with their square, so the default is lower than `entropy`'s.
        corrected: subtract the bias estimated from the occupied cells (Miller and Madow 1955);
            negative results become 0.

    Raises:
        ValueError: the lengths differ, a vector is empty or not finite, `bins` is out of range.
    """
    first, second = (_single_row(ops, "mutual_information", v, bins) for v in (x, y))
    if tuple(first.shape) != tuple(second.shape):
        raise ValueError(
            f"mutual_information: x and y must have one length, got {first.shape[1]} and "
            f"{second.shape[1]}"
        )
    cells = [probe.bins_of(ops, row, row == row, bins) for row in (first, second)]
    return float(probe.mutual_information(ops, cells[0], cells[1], bins, corrected)[0])


def chance_bound(bins: int, samples: int) -> float:
    """Return the apparent mutual information of independent vectors, in bits, uncorrected.

    >>> round(chance_bound(32, 4096), 3)
    0.169
    """
    return (bins - 1) ** 2 / (2 * samples * log(2))


def _single_row(ops: Ops, caller: str, x: Tensor, bins: int) -> Tensor:
    """Check arguments, and return x as float64 [1, n]."""
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 2:
        raise ValueError(f"{caller}: bins must be a whole number in [2, inf], got {bins!r}")
    row = ops.reshape(ops.cast(x, "float64"), (1, -1))
    if not int(row.shape[1]):
        raise ValueError(f"{caller}: x must have at least one element, got none")
    if not isfinite(float(ops.sum(row * 0.0))):
        raise ValueError(f"{caller}: x must be finite, got a NaN or an infinity")
    return row
