"""Entropy, mutual information and densities of gradients, during training.

    entropy, mutual information    of one layer's gradient on two ranks (Abrahamyan et al. 2021,
                                   section III, equation 1)
    densities                      what Variance, EGC and DGC would send

A frontend samples a bounded number of elements of each gradient before the exchange and runs
`Probe.program`. A probed step is one allreduce of one buffer; other steps cost nothing.

What travels. Two ranks fill in their samples, all others zeros, so the sum is bit-identical to the
samples; densities are means over ranks. So neither the buffer nor the reply grows with the number
of ranks. The buffer is float64: Horovod fuses tensors of one dtype, and fusion could change the
summation order of gradients.

Cost of a probed step, for L layers and S = `sample`: in the allreduce `16 L S` bytes at most; on
the host some 100 passes over L S elements. Memory: `8 L S` bytes of state, and the readings of
`keep` probed steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Sequence
from itertools import accumulate
from math import gcd, log, prod
from pathlib import Path
from typing import Any, NamedTuple

from hvd_gradcomp.codecs.topk import count_of
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.collectives import Allreduce, Collective
from hvd_gradcomp.ops import Ops, Tensor


class Reading(NamedTuple):
    """Reading of one layer in one probed step; the same on all ranks."""

    step: int
    layer: str
    size: int  # elements of the layer
    sampled: int  # sampled elements of the layer
    nonfinite: float  # NaNs and infinities among them, mean over ranks; taken as 0
    entropy: float  # bits, of the second rank of the pair (or of the only rank)
    mutual_information: float | None  # bits, between the pair; None with one rank
    chance: float | None  # the same with the second rank's elements permuted
    density_variance: float  # shares of elements to send, mean over ranks
    density_egc: float
    density_dgc: float


# -- information ---------------------------------------------------------------------------------


def bins_of(ops: Ops, rows: Tensor, valid: Tensor, bins: int) -> Tensor:
    """Return the bin of each element in its row; int64 [layers, n], -1 where it is not valid."""
    high = ops.max(ops.where(valid, rows, float("-inf")), -1)
    low = 0.0 - ops.max(ops.where(valid, 0.0 - rows, float("-inf")), -1)
    span = high - low
    scale = ops.where(span > 0, bins / ops.where(span > 0, span, 1.0), 0.0)
    height = (rows - ops.reshape(low, (-1, 1))) * ops.reshape(scale, (-1, 1))
    bin_index = ops.minimum(ops.cast(ops.where(valid, height, 0.0), "int64"), bins - 1)
    return ops.where(valid, bin_index, -1)


def entropies(ops: Ops, cell: Tensor, cells: int, corrected: bool) -> Tensor:
    """Return the entropy, in bits, of each row's histogram; negative cells are not counted.

    N samples underestimate it by about `(occupied cells - 1) / (2 N ln 2)`, which `corrected` adds
    (Miller and Madow 1955).
    """
    layers = int(cell.shape[0])
    segment = cell + ops.reshape(ops.arange(layers), (-1, 1)) * cells
    segment = ops.reshape(ops.where(cell < 0, layers * cells, segment), (-1,))
    ones = ops.full((int(segment.shape[0]),), 1)
    counts = ops.segment_sum(ones, segment, layers * cells + 1)[: layers * cells]
    counts = ops.cast(ops.reshape(counts, (layers, cells)), "float64")
    total = ops.sum(counts, -1)
    share = counts / ops.reshape(total, (-1, 1))
    bits = 0.0 - ops.sum(share * ops.log2(ops.maximum(share, 1e-300)), -1)
    if corrected:
        occupied = ops.sum(ops.cast(counts > 0, "float64"), -1)
        bits = bits + (occupied - 1.0) / (total * (2 * log(2)))
    return bits


def mutual_information(ops: Ops, x: Tensor, y: Tensor, bins: int, corrected: bool) -> Tensor:
    """Return the bits that x tells about y in each row: `H(x) + H(y) - H(x, y)` of their bins.

    Abrahamyan et al. 2021, section III, equation 1. N samples overestimate it: independent vectors
    give up to about `(bins - 1)**2 / (2 N ln 2)` bits. `corrected` subtracts the bias estimated
    from the occupied cells; negative results become 0.
    """
    joint = ops.where(x < 0, -1, x * bins + y)
    separate = entropies(ops, x, bins, corrected) + entropies(ops, y, bins, corrected)
    return ops.maximum(separate - entropies(ops, joint, bins * bins, corrected), 0.0)


def _floats(vector: Tensor) -> list[float]:
    return [float(value) for value in vector]


# -- the probe -----------------------------------------------------------------------------------


class Sample(NamedTuple):
    """Sample of one layer: the elements `0, stride, 2 stride, ...` of its flat gradient."""

    name: str
    size: int
    stride: int

    @property
    def taken(self) -> int:
        """Number of sampled elements."""
        return -(-self.size // self.stride)


class Probe:
    """Probe of a bounded part of all gradients, every `every` steps.

    At most `sample` elements of each layer are sampled, with a stride coprime to the layer's size,
    so that they are spread over the filters. The figures of a reading:

    * entropy and mutual information: from histograms of `bins` equal bins of a layer's range; the
      values depend on the bins as much as on the gradient. `chance` is the mutual information
      after rotating the second rank's elements by half: the bias of the sample size alone.
      Compare LGC's 80 % of the entropy with `(mutual_information - chance) / entropy`.
    * Variance: `r` and `v` exist for the sampled elements and probed steps only; elements that
      pass are reset. `q = g*g` as with `moments="step"`, unless second moments are given. With
      `every=1` this is the method itself; otherwise successive probed steps are `every` apart,
      which gives the density for independent gradients.
    * EGC: `H / K` of the histogram of 2 bins. DGC: `density`. Both at least one element.

    Args:
        layers: name and shape of each, in one order on all ranks.
        every: interval of probed steps, from the first step on; smaller costs more.
        sample: elements of a layer; more cost more and lower the bias of the information.
        bins: of the histograms; the joint one has their square.
        pair: the two ranks whose gradients are compared.
        alpha, zeta: of Variance.
        K: of EGC.
        density: of DGC.
        corrected: apply the correction of Miller and Madow to entropy and information.
        keep: number of probed steps whose readings are kept.

    Attributes:
        samples: the sampled elements of each layer.
        readings: of all layers, step by step, the newest last.

    Raises:
        ValueError: an argument is out of range, a name repeats, or there is nothing to probe.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, Sequence[int]]],
        every: int = 50,
        *,
        sample: int = 4096,
        bins: int = 32,
        pair: tuple[int, int] = (0, 1),
        alpha: float = 2.0,
        zeta: float = 0.999,
        K: float = 1024,
        density: float = 0.001,
        corrected: bool = True,
        keep: int = 1000,
    ) -> None:
        self.every, self.sample, self.bins, self.pair = every, sample, bins, tuple(pair)
        self.alpha, self.zeta, self.K, self.density = alpha, zeta, K, density
        self.corrected, self.keep = corrected, keep
        for name, low in {"every": 1, "sample": 2, "bins": 2, "keep": 1}.items():
            validate.whole(self, name, low=low)
        validate.real(self, "alpha", low=0)
        validate.real(self, "zeta", low=0, high=1, closed="]")
        validate.real(self, "K", low=0)
        validate.real(self, "density", low=0, high=1, closed="]")
        validate.boolean(self, "corrected")
        self.require_pair(None)
        self.samples = _samples(type(self).__name__, layers, sample)
        self.readings: list[Reading] = []
        self._state: tuple[Tensor, Tensor] | None = None  # r, v; float32 [samples of all layers]

    def require_pair(self, size: int | None) -> None:
        """Raise a ValueError unless `size` ranks (None: any number) include both of `pair`."""
        if size == 1:
            return
        last = "ranks - 1" if size is None else size - 1
        for rank in self.pair:
            whole = isinstance(rank, int) and not isinstance(rank, bool)
            if not whole or rank < 0 or (size is not None and rank >= size):
                break
        else:
            if len(self.pair) == len(set(self.pair)) == 2:
                return
        raise ValueError(
            f"{type(self).__name__}: pair must be two different ranks in [0, {last}], got "
            f"{self.pair!r}"
        )

    def due(self, step: int) -> bool:
        """Return True if this step is probed."""
        return step % self.every == 0

    def program(
        self,
        ops: Ops,
        step: int,
        samples: Tensor,
        rank: int,
        size: int,
        moments: Tensor | None = None,
    ) -> Generator[Collective, Tensor, tuple[Reading, ...]]:
        """Run a probed step; return and keep its readings. Eager: it reads on the host.

        Args:
            ops: operations on the tensors, which should be on the host.
            step: the number of the step.
            samples: float32, the samples of this rank's own gradients of all layers.
            rank: of this process.
            size: the number of ranks.
            moments: the sums of squared sample gradients of the same elements, for Variance.

        Raises:
            ValueError: a rank of `pair` does not exist, or `samples` has another length.
        """
        self.require_pair(size)
        counts = [sample.taken for sample in self.samples]
        for vector in (samples, moments):
            if vector is not None and tuple(vector.shape) != (sum(counts),):
                raise ValueError(
                    f"{type(self).__name__}: {sum(counts)} elements are sampled, got "
                    f"{[int(extent) for extent in vector.shape]}"
                )
        finite = _finite(samples)
        samples = ops.where(finite, samples, 0.0)
        layer = ops.concat([ops.full((count,), i) for i, count in enumerate(counts)])
        sums = [
            ops.segment_sum(ops.cast(flags, "int64"), layer, len(counts))
            for flags in (~finite, self._passed(ops, samples, moments))
        ]
        wide = ops.cast(samples, "float64")
        coarse = bins_of(ops, *_padded(ops, wide, counts), 2)
        egc = [
            count_of(sample.size, bits / self.K) / sample.size
            for sample, bits in zip(self.samples, _floats(entropies(ops, coarse, 2, False)))
        ]
        figures = ops.concat([ops.cast(x, "float64") for x in (*sums, ops.reals(egc))])
        pair = self.pair if size > 1 else (0,)
        shown = [wide if rank == member else wide * 0.0 for member in pair]
        total = yield Allreduce(ops.concat((*shown, figures * (1.0 / size))))
        readings = tuple(self._readings(ops, step, total, len(pair)))
        self.readings += readings
        del self.readings[: -self.keep * len(readings)]
        return readings

    def _passed(self, ops: Ops, gradient: Tensor, moments: Tensor | None) -> Tensor:
        """Return the samples that Variance would send now; bool."""
        if moments is None:
            moments = ops.square(gradient)
        r, v = self._state or (gradient * 0.0, gradient * 0.0)
        r, v = r + gradient, v + ops.where(_finite(moments), moments, 0.0)
        passed = ops.square(r) > ops.times(v, self.alpha)
        self._state = ops.where(passed, 0.0, r), ops.where(passed, 0.0, ops.times(v, self.zeta))
        return passed

    def _readings(self, ops: Ops, step: int, total: Tensor, ranks: int) -> list[Reading]:
        """Compute the readings from the allreduced buffer."""
        counts = [sample.taken for sample in self.samples]
        length = sum(counts)
        shown = [total[i * length : (i + 1) * length] for i in range(ranks)]
        cells = [bins_of(ops, *_padded(ops, x, counts), self.bins) for x in shown]
        bits = _floats(entropies(ops, cells[-1], self.bins, self.corrected))
        shared: list[Sequence[float | None]] = [[None] * len(counts)] * 2
        if ranks == 2:
            rotated = ops.gather_rows(cells[1], _rotation(ops, counts))
            shared = [
                _floats(mutual_information(ops, cells[0], other, self.bins, self.corrected))
                for other in (cells[1], rotated)
            ]
        figures = iter(_floats(total[ranks * length :]))
        nonfinite, passed, egc = ([next(figures) for _ in counts] for _ in range(3))
        return [
            Reading(
                step,
                sample.name,
                sample.size,
                sample.taken,
                nonfinite[i],
                bits[i],
                shared[0][i],
                shared[1][i],
                passed[i] / sample.taken,
                egc[i],
                count_of(sample.size, self.density) / sample.size,
            )
            for i, sample in enumerate(self.samples)
        ]

    # -- results -----------------------------------------------------------------------------

    def table(self) -> str:
        """Format the newest readings."""
        from tabulate import tabulate

        head = ("layer", "elements", "H", "MI", "chance", "Variance", "EGC", "DGC")
        step = self.readings[-1].step if self.readings else None
        rows = []
        for r in self.readings:
            if r.step == step:
                bits = (r.entropy, r.mutual_information, r.chance)
                shares = (r.density_variance, r.density_egc, r.density_dgc)
                shown = ["" if x is None else f"{x:.2f}" for x in bits]
                rows.append((r.layer, f"{r.size:,}", *shown, *(f"{x:.2%}" for x in shares)))
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


def _samples(caller: str, layers: Sequence[Any], limit: int) -> list[Sample]:
    """Choose at most `most` elements of each layer.

    Raises:
        ValueError: a name repeats, a layer is empty, or there is none.
    """
    names, sizes = [layer[0] for layer in layers], [prod(layer[1]) for layer in layers]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{caller}: names must be unique, got {repeated} again")
    empty = [name for name, size in zip(names, sizes) if not size]
    if empty or not layers:
        raise ValueError(
            f"{caller}: layers must have elements, got none" + (f" in {empty}" if empty else "")
        )
    samples = []
    for name, size in zip(names, sizes):
        stride = -(-size // limit)
        while gcd(stride, size) > 1:
            stride += 1
        samples.append(Sample(name, size, stride))
    return samples


def _finite(x: Tensor) -> Tensor:
    return (x - x) == 0


def _padded(ops: Ops, flat: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Cut a vector into one row for each layer; return the rows and the mask of their elements."""
    lengths, ends = (ops.reshape(ops.words(x), (-1, 1)) for x in (counts, [*accumulate(counts)]))
    column = ops.reshape(ops.arange(max(counts)), (1, -1))
    index = ops.minimum(ends - lengths + column, sum(counts) - 1)
    rows = ops.gather(flat, ops.reshape(index, (-1,)))
    return ops.reshape(rows, (len(counts), -1)), column < lengths


def _rotation(ops: Ops, counts: Sequence[int]) -> Tensor:
    """Return indices that rotate the elements of each padded row by half of them."""
    lengths = ops.reshape(ops.words(counts), (-1, 1))
    halves = ops.reshape(ops.words([count // 2 for count in counts]), (-1, 1))
    column = ops.reshape(ops.arange(max(counts)), (1, -1))
    return ops.where(column < lengths, (column + halves) % lengths, column)
