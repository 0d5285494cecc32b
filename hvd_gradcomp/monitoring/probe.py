"""Analyses of gradients from the papers, during training.

Quantities, with their sources:

    entropy, mutual information    of one layer's gradient on two ranks (Abrahamyan et al. 2021,
                                   section III, equation 1)
    PCA energy, compression loss   of slices of convolutions (Yu et al. 2018, Figures 4 and 5,
                                   equation 7)
    densities                      what Variance, EGC and DGC would send

A frontend samples a bounded number of elements of each gradient before the exchange and runs
`Probe.program`. A probed step is one allreduce of one buffer; other steps cost nothing.

What travels. Two ranks fill in their samples, all others zeros, so the sum is bit-identical to the
samples; recorded slices are averaged, as GradiVeQ compresses aggregated gradients; densities are
means over ranks. So neither the buffer nor the reply grows with the number of ranks. The buffer is
float64: Horovod fuses tensors of one dtype, and fusion could change the summation order of
gradients.

Cost of a probed step, for L layers, C recorded convolutions, S = `sample`, M the largest slice: in
the allreduce `16 (L S + C M)` bytes at most; on the host some 100 passes over L S elements, and for
each recorded convolution and slice size three eigenproblems of at most `history` rows. Memory:
`8 L S` bytes of state, `8 C M history` bytes of slices, and the readings of `keep` probed steps.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Generator, Sequence
from math import isfinite, log
from pathlib import Path
from typing import Any, NamedTuple

from hvd_gradcomp.codecs.low_rank import components
from hvd_gradcomp.codecs.topk import count_of
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.collectives import Allreduce, Collective
from hvd_gradcomp.core.layers import convolves
from hvd_gradcomp.monitoring import sampling
from hvd_gradcomp.monitoring.sampling import Plan
from hvd_gradcomp.ops import Ops, Tensor

_ROWS = 8  # minimum number of recorded steps for a basis


class Reading(NamedTuple):
    """Reading of one layer in one probed step; the same on all ranks.

    Slice sizes and ages come in pairs with their results. The tuples are empty if the layer is not
    a recorded convolution, or too few steps were recorded.
    """

    step: int
    layer: str
    size: int  # elements of the layer
    sampled: int  # sampled elements of the layer
    nonfinite: float  # NaNs and infinities among them and the slices, mean over ranks; taken as 0
    entropy: float  # bits, of the second rank of the pair (or of the only rank)
    mutual_information: float | None  # bits, between the pair; None with one rank
    chance: float | None  # the same with the second rank's elements permuted
    density_variance: float  # shares of elements to send, mean over ranks
    density_egc: float
    density_dgc: float
    rows: int  # probed steps that the figures below are computed from
    energy: tuple[tuple[int, float], ...]  # (slice size m, share in m / ratio components)
    slice_loss: tuple[tuple[int, float], ...]  # (slice size, loss of the neighbour's basis)
    age_loss: tuple[tuple[int, float], ...]  # (age in steps, loss), of the largest slice size


# -- information ---------------------------------------------------------------------------------


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
    rows, own = _one_row(ops, "entropy", x, bins)
    counts = _counts(ops, _binned(ops, rows, own, bins), own, bins)
    return _floats(_bits(ops, counts, corrected))[0]


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
    first, own = _one_row(ops, "mutual_information", x, bins)
    second, _ = _one_row(ops, "mutual_information", y, bins)
    if tuple(first.shape) != tuple(second.shape):
        raise ValueError(
            f"mutual_information: x and y must have one length, got {first.shape[1]} and "
            f"{second.shape[1]}"
        )
    places = _binned(ops, first, own, bins), _binned(ops, second, own, bins)
    return _floats(_shared(ops, *places, own, bins, corrected))[0]


def chance_bound(bins: int, samples: int) -> float:
    """Return the apparent mutual information of independent vectors, in bits, uncorrected.

    >>> round(chance_bound(32, 4096), 3)
    0.169
    """
    return (bins - 1) ** 2 / (2 * samples * log(2))


def _one_row(ops: Ops, what: str, x: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 2:
        raise ValueError(f"{what}: bins must be a whole number in [2, inf], got {bins!r}")
    rows = ops.reshape(ops.cast(x, "float64"), (1, -1))
    if not int(rows.shape[1]):
        raise ValueError(f"{what}: x must have at least one element, got none")
    if not isfinite(float(ops.sum(rows * 0.0))):
        raise ValueError(f"{what}: x must be finite, got a NaN or an infinity")
    return rows, rows == rows


def _binned(ops: Ops, rows: Tensor, own: Tensor, bins: int) -> Tensor:
    """Return the bin of each element in its row; [layers, n], valid where `own` is true."""
    high = ops.max(ops.where(own, rows, float("-inf")), -1)
    low = 0.0 - ops.max(ops.where(own, 0.0 - rows, float("-inf")), -1)
    span = high - low
    scale = ops.where(span > 0, bins / ops.where(span > 0, span, 1.0), 0.0)
    height = (rows - ops.reshape(low, (-1, 1))) * ops.reshape(scale, (-1, 1))
    return ops.minimum(ops.cast(ops.where(own, height, 0.0), "int64"), bins - 1)


def _counts(ops: Ops, cell: Tensor, own: Tensor, cells: int) -> Tensor:
    """Count each row's elements in each cell; float64 [layers, cells]."""
    layers = int(cell.shape[0])
    segment = cell + ops.reshape(ops.arange(layers), (-1, 1)) * cells
    segment = ops.reshape(ops.where(own, segment, layers * cells), (-1,))
    ones = ops.full((int(segment.shape[0]),), 1)
    counts = ops.segment_sum(ones, segment, layers * cells + 1)[: layers * cells]
    return ops.cast(ops.reshape(counts, (layers, cells)), "float64")


def _bits(ops: Ops, counts: Tensor, corrected: bool) -> Tensor:
    """Return the entropy of each row of counts."""
    total = ops.sum(counts, -1)
    share = counts / ops.reshape(total, (-1, 1))
    bits = 0.0 - ops.sum(share * ops.log2(ops.maximum(share, 1e-300)), -1)
    if corrected:
        occupied = ops.sum(ops.cast(counts > 0, "float64"), -1)
        bits = bits + (occupied - 1.0) / (total * (2 * log(2)))
    return bits


def _shared(ops: Ops, x: Tensor, y: Tensor, own: Tensor, bins: int, corrected: bool) -> Tensor:
    """Return the mutual information of each row, from the bins of its elements."""
    alone = [_bits(ops, _counts(ops, cell, own, bins), corrected) for cell in (x, y)]
    joint = _bits(ops, _counts(ops, x * bins + y, own, bins * bins), corrected)
    return ops.maximum(alone[0] + alone[1] - joint, 0.0)


# -- linear correlation --------------------------------------------------------------------------


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
    found = components(ops, samples)
    basis = found.vectors[:, max(int(found.energy.shape[0]) - dimension, 0) :]
    rest = whole - ops.reshape(found.mean, (1, -1))
    rest = rest - ops.matmul(ops.matmul(rest, basis), ops.transpose(basis, (1, 0)))
    lost, had = (_floats(ops.sum(ops.square(x), -1)) for x in (rest, whole))
    return [a / b if b > 0 else (float("inf") if a > 0 else 0.0) for a, b in zip(lost, had)]


def _check_samples(ops: Ops, what: str, samples: Tensor) -> None:
    if len(samples.shape) != 2 or not int(samples.shape[0]) or not int(samples.shape[1]):
        raise ValueError(
            f"{what}: samples must have the shape [T, m] with T, m of at least 1, got "
            f"{[int(extent) for extent in samples.shape]}"
        )
    if not isfinite(float(ops.sum(ops.cast(samples, "float64") * 0.0))):
        raise ValueError(f"{what}: samples must be finite, got a NaN or an infinity")


def _floats(vector: Tensor) -> list[float]:
    return [float(value) for value in vector]


# -- the probe -----------------------------------------------------------------------------------


class Probe:
    """Probe of a bounded part of all gradients, every `every` steps.

    At most `sample` elements of each layer are sampled, with a stride coprime to the layer's size,
    so that they are spread over the filters. Convolutions (by the class of the layer if the
    frontend knows it, otherwise three to five axes and no name of attention, embeddings or experts;
    `convolutions` of them, spread over the depth) are also recorded, over `history` probed steps:
    two neighbouring slices, flattened as in GradiVeQ: adjacent filters, then depth, then positions.

    The figures of a reading:

    * entropy and mutual information: histograms of `bins`, as in `entropy` and
      `mutual_information`. `chance` is the mutual information after rotating the second rank's
      elements by half: the bias of the sample size alone. Compare LGC's 80 % of the entropy
      with `(mutual_information - chance) / entropy`.
    * Variance: `r` and `v` exist for the sampled elements and probed steps only; elements that
      pass are reset. `q = g*g` as with `moments="step"`, unless second moments are given. With
      `every=1` this is the method itself; otherwise successive probed steps are `every` apart,
      which gives the density for independent gradients.
    * EGC: `H / K` of the histogram of 2 bins. DGC: `density`. Both at least one element.
    * energy: of all recorded steps, in `m / ratio` components; omitted unless there are more
      steps than that, since few samples always fit.
    * slice loss: a basis of the older half of the recorded first slices, applied to the second
      slices of the same steps; by slice size.
    * age loss: the same basis, applied to the newer half of the first slices.

    Args:
        layers: name and shape of each, in one order on all ranks; or of `Layer`.
        every: interval of probed steps, from the first step on; smaller costs more.
        sample: elements of a layer; more cost more and lower the bias of the information.
        bins: of the histograms; the joint one has their square.
        pair: the two ranks whose gradients are compared.
        slice_sizes: lengths m of slices; a convolution uses those that fit in it twice.
        history: number of probed steps to remember, at least 8.
        convolutions: maximum number of recorded convolutions.
        ratio: m / d, the compression ratio of PCA.
        alpha, zeta: of Variance.
        K: of EGC.
        density: of DGC.
        corrected: apply the correction of Miller and Madow to entropy and information.
        keep: number of probed steps whose readings are kept.
        filters_last: convolutions are [..., depth, filters] (TensorFlow) and not
            [filters, depth, ...] (PyTorch).

    Attributes:
        readings: of all layers, step by step, the newest last.

    Raises:
        ValueError: an argument is out of range, a name repeats, or there is nothing to probe.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        every: int = 50,
        *,
        sample: int = 4096,
        bins: int = 32,
        pair: tuple[int, int] = (0, 1),
        slice_sizes: Sequence[int] = (64, 128, 256, 512),
        history: int = 64,
        convolutions: int = 8,
        ratio: int = 8,
        alpha: float = 2.0,
        zeta: float = 0.999,
        K: float = 1024,
        density: float = 0.001,
        corrected: bool = True,
        keep: int = 1000,
        filters_last: bool = False,
    ) -> None:
        self.every, self.sample, self.bins, self.pair = every, sample, bins, pair
        self.slice_sizes, self.history, self.convolutions = slice_sizes, history, convolutions
        self.ratio, self.alpha, self.zeta, self.K, self.density = ratio, alpha, zeta, K, density
        self.corrected, self.keep, self.filters_last = corrected, keep, filters_last
        self._validate()
        self.readings: list[Reading] = []
        kernels = {one[0] for one in layers if convolves(one if len(one) == 3 else (*one, ""))}
        self._plans = sampling.planned(
            type(self).__name__,
            [(one[0], tuple(one[1])) for one in layers],
            kernels,
            sample=sample,
            slice_sizes=self.slice_sizes,
            convolutions=convolutions,
        )
        self._kept: deque[int] = deque()  # readings of each probed step
        self._state: tuple[Tensor, Tensor] | None = None  # r, v; float32 [samples of all layers]
        self._rows: list[deque[tuple[int, Tensor]]] = [deque(maxlen=history) for _ in self._plans]

    def _validate(self) -> None:
        whole = {"every": 1, "sample": 2, "bins": 2, "history": _ROWS, "ratio": 1, "keep": 1}
        for name, low in whole.items():
            validate.whole(self, name, low=low)
        validate.whole(self, "convolutions", low=0)
        validate.real(self, "alpha", low=0)
        validate.real(self, "zeta", low=0, high=1, closed="]")
        validate.real(self, "K", low=0)
        validate.real(self, "density", low=0, high=1, closed="]")
        validate.boolean(self, "corrected")
        validate.boolean(self, "filters_last")
        self.pair = tuple(self.pair)  # type: ignore[assignment]
        if len(self.pair) != 2 or self.pair[0] == self.pair[1] or not _naturals(self.pair, 0):
            raise ValueError(
                f"{type(self).__name__}: pair must be two different ranks in [0, ranks - 1], got "
                f"{self.pair!r}"
            )
        self.slice_sizes = tuple(self.slice_sizes)
        if not _naturals(self.slice_sizes, 2):
            raise ValueError(
                f"{type(self).__name__}: slice_sizes must be whole numbers in [2, inf], got "
                f"{self.slice_sizes!r}"
            )

    def require_pair(self, size: int) -> None:
        """Raise a ValueError unless `size` ranks include both of `pair`, or `size` is 1."""
        if size > 1 and max(self.pair) >= size:
            raise ValueError(
                f"{type(self).__name__}: pair must be two different ranks in [0, {size - 1}], got "
                f"{self.pair!r}"
            )

    # -- sampled elements --------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Return True if this step is probed."""
        return step % self.every == 0

    def places(self, layer: int) -> list[int]:
        """Return the indices to take of a layer's flat gradient: the sample, then the slices."""
        return self._plans[layer].places(self.filters_last)

    @property
    def taken(self) -> list[int]:
        """Numbers of elements taken of each layer; `program` gets them concatenated."""
        return [plan.taken for plan in self._plans]

    # -- one probed step ---------------------------------------------------------------------

    def program(
        self,
        ops: Ops,
        step: int,
        taken: Tensor,
        rank: int,
        size: int,
        moments: Tensor | None = None,
    ) -> Generator[Collective, Tensor, tuple[Reading, ...]]:
        """Run a probed step; return and keep its readings. Eager: it reads on the host.

        Args:
            ops: operations on the tensors, which should be on the host.
            step: the number of the step.
            taken: float32, this rank's own gradient at `places` of all layers.
            rank: of this process.
            size: the number of ranks.
            moments: the sums of squared sample gradients at the same places, for Variance.

        Raises:
            ValueError: a rank of `pair` does not exist, or `taken` has another length.
        """
        self.require_pair(size)
        expected = sum(self.taken)
        for given in (taken, moments):
            if given is not None and tuple(given.shape) != (expected,):
                raise ValueError(
                    f"{type(self).__name__}: {expected} elements are taken, got "
                    f"{[int(extent) for extent in given.shape]}"
                )
        finite = (taken - taken) == 0
        layer = sampling.numbered(ops, self.taken)
        wrong = ops.segment_sum(ops.cast(~finite, "int64"), layer, len(self._plans))
        taken = ops.where(finite, taken, 0.0)
        samples, slices = sampling.divided(self._plans, taken)
        mine = ops.concat(samples)
        own = sampling.own(ops, self._plans)
        passed = self._variance(ops, mine, moments)
        coarse = _binned(ops, sampling.padded(ops, self._plans, samples), own, 2)
        own_bits = _floats(_bits(ops, _counts(ops, coarse, own, 2), False))
        sent = [_egc_density(p.size, bits, self.K) for p, bits in zip(self._plans, own_bits)]
        figures = ops.concat(
            [ops.cast(x, "float64") for x in (wrong, passed, ops.cast(ops.reals(sent), "float64"))]
        )
        shared = ops.cast(ops.concat((*slices, ops.zeros((0,)))), "float64")
        pair = self.pair if size > 1 else (0,)
        wide = ops.cast(mine, "float64")
        shown = [wide if rank == one else wide * 0.0 for one in pair]
        means = ops.concat((shared, figures)) * (1.0 / size)
        total = yield Allreduce(ops.concat((*shown, means)))
        return self._read(ops, step, total, len(pair))

    def _variance(self, ops: Ops, gradient: Tensor, moments: Tensor | None) -> Tensor:
        """Count each layer's samples that Variance would send now; int64 [layers]."""
        r, v = self._state or (gradient * 0.0, gradient * 0.0)
        if moments is None:
            moment = ops.square(gradient)
        else:
            given = ops.concat(sampling.divided(self._plans, moments)[0])
            moment = ops.where((given - given) == 0, given, 0.0)
        r, v = r + gradient, v + moment
        wanted = ops.square(r) > ops.times(v, self.alpha)
        self._state = ops.where(wanted, 0.0, r), ops.where(wanted, 0.0, ops.times(v, self.zeta))
        layer = sampling.numbered(ops, [plan.sampled for plan in self._plans])
        return ops.segment_sum(ops.cast(wanted, "int64"), layer, len(self._plans))

    def _read(self, ops: Ops, step: int, total: Tensor, shown: int) -> tuple[Reading, ...]:
        """Compute the readings from the allreduced buffer."""
        length = sum(plan.sampled for plan in self._plans)
        ranks = [total[place * length : (place + 1) * length] for place in range(shown)]
        bits, *known = _information(ops, self._plans, ranks, self.bins, self.corrected)
        rest = total[shown * length :]
        wide = sum(plan.recorded for plan in self._plans)
        figures = _floats(rest[wide:])
        layers, start, readings = len(self._plans), 0, []
        for i, plan in enumerate(self._plans):
            if plan.recorded:
                row = rest[start : start + plan.recorded]
                self._rows[i].append((step, ops.cast(row, "float32")))
                start += plan.recorded
            readings.append(
                Reading(
                    step,
                    plan.name,
                    plan.size,
                    plan.sampled,
                    figures[i],
                    bits[i],
                    known[0][i] if known else None,
                    known[1][i] if known else None,
                    figures[layers + i] / plan.sampled,
                    figures[2 * layers + i],
                    count_of(plan.size, self.density) / plan.size,
                    *_correlation(ops, plan.sizes, self._rows[i], self.ratio),
                )
            )
        self._keep(readings)
        return tuple(readings)

    def _keep(self, readings: list[Reading]) -> None:
        self.readings += readings
        self._kept.append(len(readings))
        while len(self._kept) > self.keep:
            del self.readings[: self._kept.popleft()]

    # -- results -----------------------------------------------------------------------------

    def table(self) -> str:
        """Format the newest readings; in brackets the largest slice size or age in steps."""
        from tabulate import tabulate

        measured = ("H", "MI", "chance", "Variance", "EGC", "DGC")
        head = ("layer", "elements", *measured, "energy", "slice loss", "age loss")
        step = self.readings[-1].step if self.readings else None
        rows = [
            (
                reading.layer,
                f"{reading.size:,}",
                _shown(reading.entropy, ".2f"),
                _shown(reading.mutual_information, ".2f"),
                _shown(reading.chance, ".2f"),
                _shown(reading.density_variance, ".2%"),
                _shown(reading.density_egc, ".2%"),
                _shown(reading.density_dgc, ".2%"),
                *(
                    f"{found[-1][1]:.2f} ({found[-1][0]})" if found else ""
                    for found in (reading.energy, reading.slice_loss, reading.age_loss)
                ),
            )
            for reading in self.readings
            if reading.step == step
        ]
        alike = ("left", *["right"] * (len(head) - 1))
        lines = tabulate(rows, head, colalign=alike if rows else None, disable_numparse=True)
        return f"step {step}\n{lines}" if rows else str(lines)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write all readings as JSON lines, atomically."""
        target = Path(path)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with draft.open("w", encoding="utf-8") as stream:
                for reading in self.readings:
                    stream.write(json.dumps(reading._asdict()) + "\n")
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)


def _information(
    ops: Ops, plans: Sequence[Plan], ranks: Sequence[Tensor], bins: int, corrected: bool
) -> list[list[float]]:
    """Return the last rank's entropy by layer; for two ranks, mutual information and chance too."""
    counts, own = [plan.sampled for plan in plans], sampling.own(ops, plans)
    cells = []
    for flat in ranks:
        rows, start = [], 0
        for count in counts:
            rows.append(flat[start : start + count])
            start += count
        cells.append(_binned(ops, sampling.padded(ops, plans, rows), own, bins))
    found = [_floats(_bits(ops, _counts(ops, cells[-1], own, bins), corrected))]
    if len(ranks) == 2:
        sizes = ops.reshape(ops.words(counts), (-1, 1))
        halves = ops.reshape(ops.words([count // 2 for count in counts]), (-1, 1))
        turned = (ops.reshape(ops.arange(max(counts)), (1, -1)) + halves) % sizes
        for second in (cells[1], ops.gather_rows(cells[1], turned)):
            found.append(_floats(_shared(ops, cells[0], second, own, bins, corrected)))
    return found


def _correlation(
    ops: Ops, sizes: Sequence[int], rows: Sequence[tuple[int, Tensor]], ratio: int
) -> tuple[int, Any, Any, Any]:
    """Return the number of recorded (step, slices), their energy, slice loss and age loss."""
    if len(rows) < _ROWS:
        return len(rows), (), (), ()
    steps = [step for step, _ in rows]
    recorded = ops.stack([row for _, row in rows])
    half = len(rows) // 2
    energies, by_slice, by_age = [], [], []
    for m in sizes:
        d = max(m // ratio, 1)
        if d < len(rows) - 1:
            energies.append((m, energy(ops, recorded[:, :m])[d - 1]))
        losses = compression_loss(ops, recorded[:half, :m], recorded[:half, m : 2 * m], d)
        known = [loss for loss in losses if isfinite(loss)]
        if known:
            by_slice.append((m, sum(known) / len(known)))
    m = sizes[-1]
    losses = compression_loss(ops, recorded[:half, :m], recorded[half:, :m], max(m // ratio, 1))
    for step, loss in zip(steps[half:], losses):
        if isfinite(loss):
            by_age.append((step - steps[half - 1], loss))
    return len(rows), tuple(energies), tuple(by_slice), tuple(by_age)


def _egc_density(size: int, bits: float, K: float) -> float:
    """Return EGC's density: `n * H / K`, rounded and at least one element, over n."""
    return count_of(size, bits / K) / size


def _naturals(values: Sequence[Any], low: int) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) and v >= low for v in values)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
