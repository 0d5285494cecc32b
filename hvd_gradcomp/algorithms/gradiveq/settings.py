"""Parameters of GradiVeQ, the layers it projects, their cuts, and the bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.algorithms.gradiveq.slices import Slices, sizes_of
from hvd_gradcomp.algorithms.qsgd import QSGDCompressor
from hvd_gradcomp.algorithms.wrappers import part
from hvd_gradcomp.codecs.clipping import Clipping
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.composite import Composite
from hvd_gradcomp.core.compressor import Compressor
from hvd_gradcomp.core.layers import Layer, convolves
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Tensor

_DEFAULT_LOSS = 0.01
_SAMPLES = 3  # for each dimension, if there are enough slices
_FILLED = 1.05  # limit of the padded size: the last slice's zeros are projected too
_LEAST_RATIO = 4  # smallest ratio that a loss_threshold may choose with few sampling steps
_DRAIN = 4.0  # residuals that a cycle's compressed steps could send
SAMPLING = {"none": NoneCompressor(), "qsgd": QSGDCompressor(bits=4)}


class GradiVeQState(NamedTuple):
    """State of one bucket. All but `sampling` and `r` is equal on all ranks."""

    samples: (
        Tensor  # float32 [sample_steps * sum over groups of (rows * length + 1)], the energy last
    )
    basis: Tensor  # float32 [sum over groups of length * room]
    offset: Tensor  # float32 [sum over groups of length], the mean's part outside the basis
    dimensions: Tensor  # int64 [groups], on the host
    start: Tensor  # int64 [] step at which the cycle began to sample, on the host
    drifted: Tensor  # int64 [] 1 if the loss of the last step asks for another cycle, on the host
    loss: Tensor  # float32 [] of the last compressed step, mean over ranks; NaN before one
    sent: Tensor  # int64 [layers]
    sampling: Any  # state of the compressor of the other steps
    r: Any  # float32 [size] with feedback, else ()


@dataclass(frozen=True, repr=False)
class GradiVeQSettings(Clipping, Composite, registered=False):
    """Base of `GradiVeQCompressor`: its fields, and sizes derived from them."""

    slice_size: int | None = None
    max_slice: int = 1024
    loss_threshold: float | None = None
    ratio: float | None = None
    reuse: int | None = None
    warmup_steps: int = 100
    sample_steps: int = 25
    compress_steps: int = 100
    resample_loss: float | None = None
    sampling: Any = "none"
    other: Any = None
    feedback: bool = False
    max_norm: float | None = None

    state_format = 2  # samples of all slices in turn, and their energy
    whole_model = False
    in_common = frozenset(
        {"samples", "basis", "offset", "dimensions", "start", "drifted", "loss", "sent"}
    )

    def __post_init__(self) -> None:
        for name, low in (("slice_size", 1), ("reuse", 1)):
            if getattr(self, name) is not None:
                validate.whole(self, name, low=low)
        validate.whole(self, "max_slice", low=1)
        if self.loss_threshold is not None and self.ratio is not None:
            raise ValueError(
                "GradiVeQCompressor: loss_threshold and ratio fix the same thing; give one, got "
                f"{self.loss_threshold!r} and {self.ratio!r}"
            )
        if self.ratio is not None:
            validate.real(self, "ratio", low=1, closed="[")
        else:
            if self.loss_threshold is None:
                validate.stands_for(self, "loss_threshold", _DEFAULT_LOSS)
            validate.real(self, "loss_threshold", low=0, high=1)
        validate.whole(self, "warmup_steps", low=0)
        validate.whole(self, "sample_steps", low=2)
        validate.whole(self, "compress_steps", low=1)
        if self.resample_loss is not None:
            validate.real(self, "resample_loss", low=0, high=1, closed="]")
        validate.boolean(self, "feedback")
        self.validate_max_norm()
        if isinstance(self.sampling, str):
            validate.one_of(self, "sampling", tuple(SAMPLING))
        for name in ("between", "others"):
            compressor = getattr(self, name)
            if compressor.correction is not None or compressor.uses_moments:
                raise TypeError(
                    "GradiVeQCompressor: what sampling= or other= names takes over momentum or "
                    "uses second moments; give it to the layers by hvd_gradcomp.partition instead. "
                    f"Got {compressor}"
                )

    @property
    def children(self) -> dict[str, Compressor]:
        return {"sampling": self.between}

    def check(self, layout: Layout) -> None:
        Compressor.check(self, layout)

    @property
    def between(self) -> Compressor:
        """Compressor of warm-up and sampling steps."""
        chosen = SAMPLING.get(self.sampling) if isinstance(self.sampling, str) else self.sampling
        return part("GradiVeQCompressor: sampling", chosen)

    @property
    def others(self) -> Compressor:
        """Compressor of layers that are not convolutions."""
        return part("GradiVeQCompressor: other", self.other)

    # -- sizes -------------------------------------------------------------------------------

    def of_layers(self, layers: Sequence[Layer], ranks: int) -> list[Compressor]:
        convolutions = list(map(convolves, layers))
        others = iter(
            self.others.of_layers([x for x, takes in zip(layers, convolutions) if not takes], ranks)
        )
        return [self if takes else next(others) for takes in convolutions]

    def _rows(self, length: int, members: int) -> int:
        """Return the number of slices that a sampling step records for each basis."""
        wanted = _SAMPLES * self.min_components(length) + 1
        return min(members, -(-wanted // self.sample_steps))

    def min_components(self, length: int) -> int:
        """Return the dimensions of a basis for slices of a length, if there are enough samples."""
        return max(1, int(length / (_LEAST_RATIO if self.ratio is None else self.ratio)))

    def steps_for(self, cut: Slices) -> int:
        """Return the sampling steps that give enough samples for `min_components`."""
        return self.min_components(cut.length) // cut.reuse + 1

    def _room(self, length: int, rows: int) -> int:
        """Return the maximum number of dimensions of a basis."""
        samples = rows * self.sample_steps
        if self.ratio is not None:
            return max(1, min(length, samples - 1, self.min_components(length)))
        fitted = self.fitted_steps * rows
        return max(
            1, min(length, fitted - 1, max(self.sample_steps - 1, self.min_components(length)))
        )

    @property
    def fitted_steps(self) -> int:
        """Sampling steps to fit a basis to; the others are held out to choose its dimension."""
        return self.sample_steps - self.sample_steps // 4

    def slices(self, layout: Layout) -> tuple[Slices, ...]:
        """Return the cut of each layer."""
        return _slices_of(self, layout)

    def slices_of(self, shape: tuple[int, ...], filters_last: bool, start: int = 0) -> Slices:
        """Return the cut of a layer of this shape."""
        axes, size = tuple(range(len(shape))), prod(shape)
        order = axes if filters_last else (*axes[2:], *axes[:2][::-1])
        filters = shape[order[-1]] if shape else 1
        depth = shape[order[-2]] if len(shape) > 1 else 1
        length = self._length(filters, depth, size)
        count = -(-size // length)
        reuse = max(1, min(self.reuse or count, count))
        rows = self._rows(length, reuse)
        room = self._room(length, rows)
        return Slices(start, size, shape, order, length, count, reuse, rows, room)

    def _length(self, filters: int, depth: int, size: int) -> int:
        """Return the length of a layer's slices."""
        if self.slice_size is not None or not size:
            return max(1, min(self.slice_size or 1, size))
        most = min(self.max_slice, size)
        if filters * depth < size and filters * depth <= most:
            most = filters * depth
        elif filters <= most:
            most = most // filters * filters
        lengths = range(most, 0, -min(filters, most))
        enough = [n for n in lengths if self._samples(-(-size // n)) > self.min_components(n)]
        full = [n for n in enough if -(-size // n) * n <= _FILLED * size]
        return (full or enough or lengths[-1:])[0]

    def _samples(self, slices: int) -> int:
        """Return the maximum number of samples of a basis in a cycle."""
        return self.sample_steps * min(self.reuse or slices, slices)

    @property
    def cycle_steps(self) -> int:
        """Steps of a cycle."""
        return self.sample_steps + self.compress_steps

    @property
    def drain(self) -> float:
        """Share of the residual that is added to each gradient."""
        return min(1.0, _DRAIN / self.compress_steps)

    def coefficient_bytes(self, layout: Layout, dimensions: Sequence[int] | None = None) -> int:
        """Return the bytes that a rank hands to the allreduce of a compressed step.

        Args:
            dimensions: of each basis; None for the maximum.
        """
        counts = iter(dimensions or [s.room for s in self.slices(layout) for _ in range(s.groups)])
        used = (s.members(g) * next(counts) for s in self.slices(layout) for g in range(s.groups))
        return 4 * (sum(used) + 2)

    def basis_bytes(self, layout: Layout) -> int:
        """Return the bytes of the broadcast at the end of a sampling phase."""
        sizes = sizes_of(self.slices(layout))
        return 4 * (sizes.basis + sizes.offset + sizes.groups)

    def layer_bytes(self, shape: Sequence[int]) -> float | None:
        if self.ratio is None:
            return None
        cut = self.slices_of(tuple(shape), filters_last=False)
        return 4 * cut.slices * cut.room


@lru_cache(maxsize=256)
def _slices_of(settings: GradiVeQSettings, layout: Layout) -> tuple[Slices, ...]:
    return tuple(
        settings.slices_of(shape, layout.filters_last, start)
        for start, shape in zip(layout.offsets, layout.shapes)
    )
