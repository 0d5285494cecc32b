"""GradiVeQ (Yu et al. 2018; 002): a linear projection that commutes with the sum over ranks.

slices   of a layer, so that gradients of one input lie together
sample   what the ranks' mean was, for some steps, a few slices of each in turn
basis    its principal components, computed by one rank and given to all
encode   coefficients, whose sum over ranks is all that the ranks exchange
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from hvd_gradcomp import exchanges, validate
from hvd_gradcomp import ops as verbs
from hvd_gradcomp.aggregator import Compressor, Context, Program
from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.algorithms.qsgd import QSGDCompressor
from hvd_gradcomp.codecs.linear import LinearCompressor
from hvd_gradcomp.codecs.pca import Components, components, dimension
from hvd_gradcomp.codecs.quantized import Keeping, LevelsCompressor
from hvd_gradcomp.codecs.sparse import Residual
from hvd_gradcomp.collectives import Allreduce, Broadcast, Switch
from hvd_gradcomp.layers import Layer, convolves
from hvd_gradcomp.layout import Layout
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.wrappers import part

_DEFAULT_LOSS = 0.01
_SAMPLES = 3  # for each dimension, where there are so many
_FILLED = 1.05  # zeros that fill up the last slice are projected too
_LEAST_RATIO = 4  # that a loss_threshold has room for at once
_DRAIN = 4.0  # times that the residual could be sent in a cycle
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
    drifted: (
        Tensor  # int64 [] whether the loss of the last step asks for another cycle, on the host
    )
    loss: Tensor  # float32 [] of the last compressed step, mean over ranks; NaN before one
    sent: Tensor  # int64 [layers]
    sampling: Any  # state of the compressor of the other steps
    r: Any  # float32 [size] with feedback, else ()


class Slices(NamedTuple):
    """How one layer is cut."""

    start: int  # in the bucket
    size: int  # elements
    shape: tuple[int, ...]  # as the framework stores them
    order: tuple[int, ...]  # of axes, so that filters come last and depth before them
    length: int  # of a slice
    slices: int  # the last one filled up with zeros
    reuse: int  # neighbours that share a basis
    rows: int  # slices of each basis that a sampling step records
    room: int  # the most dimensions that a basis may have

    @property
    def groups(self) -> int:
        """How many bases there are."""
        return -(-self.slices // self.reuse)

    def members(self, group: int) -> int:
        """Slices that share a basis."""
        return min(self.reuse, self.slices - group * self.reuse)

    def turned(self, ops: Ops, bucket: Tensor) -> Tensor:
        """The layer's axes in the order of slices, and zeros after these; for `ops.project`."""
        layer = bucket[self.start : self.start + self.size]
        if self.order != tuple(range(len(self.order))):
            layer = ops.transpose(ops.reshape(layer, self.shape), self.order)
        missing = self.slices * self.length - self.size
        if missing:
            layer = ops.concat((ops.reshape(layer, (self.size,)), ops.zeros((missing,))))
        return layer

    def cut(self, ops: Ops, bucket: Tensor) -> Tensor:
        """The layer's slices; [count, length]."""
        return ops.reshape(self.turned(ops, bucket), (self.slices, self.length))


@dataclass(frozen=True)
class GradiVeQCompressor(Compressor):
    """Projects slices of convolutions onto their principal components (Yu et al. 2018).

    A layer is flattened so that the gradients of all filters at one place lie together, then along
    depth, width and height, and cut into slices `s`. After `warmup_steps` uncompressed steps,
    cycles of two phases follow. For `sample_steps` the mean gradient is exchanged whole and slices
    of it are recorded, a few of every `reuse` each step, in turn. One rank computes the samples'
    mean `mu` and principal components `U`, of the covariance over all these slices, and broadcasts
    them. For `compress_steps` each rank sends `z = U^T s` only; the ranks' mean of `z` gives back
    `U (z - U^T mu) + mu`.

    What travels: while compressing, 4 bytes a coefficient (`d` of them a slice) and 8 bytes a
    bucket, by allreduce; while sampling, what `sampling` sends; once a cycle a broadcast of
    `4 * (length * (d + 1) + 1)` bytes a basis, `d` being the most that it may have. State, besides
    that of `sampling`: a basis, `4 * length * (d + 1)` bytes, and its samples, about three times as
    much (at least a slice for each of `sample_steps`); with `feedback` 4 bytes an element. Memory
    and time do not depend on the number of ranks.

    Args:
        slice_size: elements of a slice; None takes `filters * depth` if that is at most `max_slice`
            and not the whole layer (a 1x1 kernel), else the largest multiple of the filters that
            is at most `max_slice`; shorter, down to the filters, where a basis would have fewer
            samples than dimensions, or zeros would fill up more than a twentieth.
            Of a layer with fewer elements, all.
        max_slice: see there. Larger finds more correlation and costs more: time in proportion,
            state with the square.
        loss_threshold: the share of the samples' energy that a basis may leave out, in (0, 1). Each
            cycle `d` is the smallest for which a basis of the first three quarters of the samples
            leaves out no more of the last quarter; then the basis is made of all. At most
            `length / 4` or `sample_steps - 1` dimensions, whichever is more. Larger sends less.
            0.01 unless a `ratio` is given.
        ratio: fixes `d = max(1, length // ratio)` instead, at least 1. Larger sends less. Where
            `slice_size` or `reuse` leave fewer samples than that, `d` is one less than these, and a
            warning at the first step says so.
        reuse: slices that share a basis; None for one basis a layer.
        warmup_steps: steps before the first cycle, at least 0.
        sample_steps: sampling steps of a cycle, at least 2.
        compress_steps: compressed steps of a cycle, at least 1. More: fewer bytes and older bases.
        resample_loss: the next cycle starts early once the mean over ranks of the local loss
            `||s - s'||^2 / ||s||^2` exceeds this, in (0, 1]; None never.
        sampling: how warm-up and sampling steps are exchanged: "none", "qsgd" (4 bits), or a
            compressor.
        other: the compressor of layers that are no convolution; None sends them dense. PyTorch's
            and Keras's layers are known by their class; of others the name and the number of axes
            decide. `partition` decides as its user likes.
        feedback: keep on each rank what its projection left out, `r`, and add `4 / compress_steps`
            of `r` to each gradient that is compressed. Since a basis never takes what it leaves
            out, `r` grows through a cycle and drains into the next one's basis; all of it at once
            would throw the model off. Sampling sends nothing of `r`; what the codes of QSGD or
            TernGrad miss there is added to it, and what FP16 rounds off on each rank (not what it
            rounds off in their sum: that no rank knows).

    Differs from the paper: samples come from all slices that share a basis, not from the first
    only, and each sampling step counts alike, whatever its energy. So 25 samples are enough, and
    cycles are a quarter as long (the paper has 100 and 400), which leaves out about half as much;
    slices are capped; the dimension is chosen on samples that were held out; the loss is measured
    by bucket; one rank computes the basis, so that all have the same bits; feedback (off by
    default). Weights of transposed convolutions are cut as if they were stored like others.
    Products are rounded as the framework does it, so PyTorch and TensorFlow send the same
    coefficients but for the last bits.

    Raises:
        ValueError: a hyper-parameter is out of range, or both `loss_threshold` and `ratio` are
            given.
        TypeError: `sampling` or `other` is no compressor, or one that takes momentum over.

    >>> cut = GradiVeQCompressor(ratio=8).slices_of((64, 16, 3, 3), filters_last=False)
    >>> cut.slices, cut.length, cut.room
    (9, 1024, 128)
    """

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

    state_format = 2  # the samples of all slices in turn, and their energy

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
                object.__setattr__(self, "loss_threshold", _DEFAULT_LOSS)
            validate.real(self, "loss_threshold", low=0, high=1)
        validate.whole(self, "warmup_steps", low=0)
        validate.whole(self, "sample_steps", low=2)
        validate.whole(self, "compress_steps", low=1)
        if self.resample_loss is not None:
            validate.real(self, "resample_loss", low=0, high=1, closed="]")
        validate.boolean(self, "feedback")
        if isinstance(self.sampling, str):
            validate.one_of(self, "sampling", tuple(SAMPLING))
        for name in ("between", "others"):
            one = getattr(self, name)
            if one.correction is not None or one.uses_moments:
                raise TypeError(
                    "GradiVeQCompressor: what sampling= or other= names takes over momentum or "
                    "uses second moments; give it to the layers by hvd_gradcomp.partition instead. "
                    f"Got {one}"
                )
        object.__setattr__(self, "block", self.between.block)
        object.__setattr__(self, "max_bucket", self.between.max_bucket)
        inside = frozenset(f"sampling.{name}" for name in self.between.replicated)
        mine = {"samples", "basis", "offset", "dimensions", "start", "drifted", "loss", "sent"}
        object.__setattr__(self, "replicated", inside | mine)
        anew = frozenset(f"sampling.{name}" for name in self.between.begins_anew)
        object.__setattr__(self, "begins_anew", anew)

    @property
    def between(self) -> Compressor:
        """The compressor of steps that are not projected."""
        chosen = SAMPLING.get(self.sampling) if isinstance(self.sampling, str) else self.sampling
        return part("GradiVeQCompressor: sampling", chosen)

    @property
    def others(self) -> Compressor:
        """The compressor of layers that are no convolutions."""
        return part("GradiVeQCompressor: other", self.other)

    # -- sizes -------------------------------------------------------------------------------

    def of_layers(self, layers: Sequence[Layer], ranks: int) -> list[Compressor]:
        convolutions = list(map(convolves, layers))
        others = iter(
            self.others.of_layers([x for x, mine in zip(layers, convolutions) if not mine], ranks)
        )
        return [self if mine else next(others) for mine in convolutions]

    def _rows(self, length: int, members: int) -> int:
        """How many slices a sampling step records of those that share a basis."""
        wanted = _SAMPLES * self.asked(length) + 1
        return min(members, -(-wanted // self.sample_steps))

    def asked(self, length: int) -> int:
        """Dimensions of a basis for slices of a length, if there are samples enough."""
        return max(1, int(length / (_LEAST_RATIO if self.ratio is None else self.ratio)))

    def steps_for(self, cut: Slices) -> int:
        """Sampling steps that give so many samples."""
        return self.asked(cut.length) // cut.reuse + 1

    def _room(self, length: int, rows: int) -> int:
        """The most dimensions of a basis."""
        samples = rows * self.sample_steps
        if self.ratio is not None:
            return max(1, min(length, samples - 1, self.asked(length)))
        fitted = self._fitted_steps * rows
        return max(1, min(length, fitted - 1, max(self.sample_steps - 1, self.asked(length))))

    @property
    def _fitted_steps(self) -> int:
        """Sampling steps that a basis is fitted to before its dimension is chosen on the others."""
        return self.sample_steps - self.sample_steps // 4

    def slices(self, layout: Layout) -> tuple[Slices, ...]:
        """How each layer is cut."""
        return _slices_of(self, layout)

    def slices_of(self, shape: tuple[int, ...], filters_last: bool, start: int = 0) -> Slices:
        """How a layer of a shape is cut."""
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
        """Of a layer's slices."""
        if self.slice_size is not None or not size:
            return max(1, min(self.slice_size or 1, size))
        most = min(self.max_slice, size)
        if filters * depth < size and filters * depth <= most:
            most = filters * depth
        elif filters <= most:
            most = most // filters * filters
        lengths = range(most, 0, -min(filters, most))
        enough = [n for n in lengths if self._samples(-(-size // n)) > self.asked(n)]
        full = [n for n in enough if -(-size // n) * n <= _FILLED * size]
        return (full or enough or lengths[-1:])[0]

    def _samples(self, slices: int) -> int:
        """How many a basis can have in a cycle."""
        return self.sample_steps * min(self.reuse or slices, slices)

    @property
    def cycle_steps(self) -> int:
        """Steps of a whole cycle."""
        return self.sample_steps + self.compress_steps

    @property
    def drain(self) -> float:
        """The share of the residual that is added to a gradient."""
        return min(1.0, _DRAIN / self.compress_steps)

    def coefficient_bytes(self, layout: Layout, dimensions: Sequence[int] | None = None) -> int:
        """Bytes that a rank hands to the allreduce of a compressed step.

        Args:
            dimensions: of each basis; None for all that there is room for.
        """
        given = iter(dimensions or [s.room for s in self.slices(layout) for _ in range(s.groups)])
        used = (s.members(g) * next(given) for s in self.slices(layout) for g in range(s.groups))
        return 4 * (sum(used) + 2)

    def basis_bytes(self, layout: Layout) -> int:
        """Bytes of the broadcast at the end of a sampling phase."""
        return 4 * sum(s.groups * (s.length * (s.room + 1) + 1) for s in self.slices(layout))

    def layer_bytes(self, shape: Sequence[int]) -> float | None:
        if self.ratio is None:
            return None
        cut = self.slices_of(tuple(shape), filters_last=False)
        return 4 * cut.slices * cut.room

    # -- one step ----------------------------------------------------------------------------

    def init(self, ops: Ops, layout: Layout) -> GradiVeQState:
        return self.start(ops, layout, 1)

    def start(self, ops: Ops, layout: Layout, ranks: int) -> GradiVeQState:
        cuts = self.slices(layout)
        lengths = sum(s.groups * s.length for s in cuts)
        recorded = sum(s.groups * (s.rows * s.length + 1) for s in cuts)
        dimensions = [s.room for s in cuts for _ in range(s.groups)]
        return GradiVeQState(
            samples=ops.zeros((self.sample_steps * recorded,)),
            basis=ops.zeros((sum(s.groups * s.length * s.room for s in cuts),)),
            offset=ops.zeros((lengths,)),
            dimensions=ops.stage(ops.words(dimensions)),
            start=ops.host(self.warmup_steps),
            drifted=ops.host(0),
            loss=ops.full((), float("nan"), "float32"),
            sent=ops.zeros((len(layout.names),), "int64"),
            sampling=self.between.start(ops, layout, ranks),
            r=ops.zeros((layout.size,)) if self.feedback else (),
        )

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: Any, **extra: Tensor
    ) -> Program:
        del extra
        start, drifted = ops.staged(state.start), ops.staged(state.drifted)
        over = (context.step - start >= self.cycle_steps) | (drifted > 0)
        start = ops.pick(over, context.step, start)
        state = state._replace(start=ops.host(start), drifted=ops.host(0))
        elapsed, last = context.step - start, self.sample_steps - 1
        phase = ops.bisect((-1, last - 1, last), elapsed)

        def whole() -> Program:
            return self._whole(ops, context, gradient, state)

        def sample() -> Program:
            total, after = yield from self._whole(ops, context, gradient, state)
            return total, self._recorded(ops, context.layout, total, elapsed, after)

        def learn() -> Program:
            total, after = yield from sample()
            return total, (yield from self._learned(ops, context, after))

        def compress() -> Program:
            return self._compressed(ops, context, gradient, state)

        return (yield Switch(phase, (whole, sample, learn, compress)))

    def _whole(self, ops: Ops, context: Context, gradient: Tensor, state: Any) -> Program:
        between = self.between
        state = state._replace(sent=state.sent + ops.words(context.layout.sizes))
        if self.feedback and isinstance(between, LevelsCompressor):  # which keeps nothing itself
            keeping = Keeping(between).aggregate(ops, context, gradient, Residual(state.r))
            total, kept = yield from keeping
            return total, state._replace(r=kept.r)
        r = state.r
        if self.feedback and isinstance(between, LinearCompressor) and between.itemsize < 4:
            there = between.decode(ops, context.layout, between.encode(ops, gradient))
            missed = gradient - there
            # What is not finite is found in the sum.
            r = r + ops.where(missed - missed == 0, missed, 0.0)
        total, inner = yield from between.aggregate(ops, context, gradient, state.sampling)
        return total, state._replace(sampling=inner, r=r)

    def _recorded(self, ops: Ops, layout: Layout, total: Tensor, row: Any, state: Any) -> Any:
        """The state with some slices of each basis of this step's result, and their energy."""
        pieces: list[Any] = []
        for cut in self.slices(layout):
            slices = cut.cut(ops, total)
            for group in range(cut.groups):
                first, members = group * cut.reuse, cut.members(group)
                turn = (ops.arange(cut.rows) + row * cut.rows) % members * cut.length
                place = ops.reshape(turn, (-1, 1)) + ops.reshape(ops.arange(cut.length), (1, -1))
                mine = ops.reshape(slices[first : first + members], (-1,))
                pieces.append(ops.gather(mine, ops.reshape(place, (-1,))))
                pieces.append(ops.reshape(ops.inner(mine, mine), (1,)))
        taken = ops.concat(pieces)
        taken = ops.where(taken - taken == 0, taken, 0.0)  # one that is not finite says nothing
        place = ops.arange(taken.shape[0]) + row * taken.shape[0]
        return state._replace(samples=ops.put(state.samples * 1, place, taken))

    def _learned(self, ops: Ops, context: Context, state: Any) -> Program:
        """One rank computes the bases; all get the same bits."""
        layout = context.layout
        size, root = self.basis_bytes(layout) // 4, layout.digest % context.size
        mine = self._bases(ops, layout, state) if context.rank == root else ops.zeros((size,))
        flat = yield Broadcast(mine, root)
        cuts = self.slices(layout)
        lengths = sum(s.groups * s.length for s in cuts)
        groups = sum(s.groups for s in cuts)
        dimensions = ops.cast(flat[size - groups :], "int64")
        return state._replace(
            basis=flat[: size - groups - lengths] * 1,
            offset=flat[size - groups - lengths : size - groups] * 1,
            dimensions=ops.stage(dimensions),
        )

    def _bases(self, ops: Ops, layout: Layout, state: Any) -> Tensor:
        """All bases, then the offsets, then the dimensions; float32."""
        samples = ops.reshape(state.samples, (self.sample_steps, -1))
        bases, offsets, dimensions = [], [], []
        start = 0
        for cut in self.slices(layout):
            for _ in range(cut.groups):
                end = start + cut.rows * cut.length
                mine, energy = samples[:, start:end], samples[:, end]
                start = end + 1
                found, used = self._basis(ops, cut, mine, ops.cast(energy, "float64"))
                count = found.energy.shape[0]
                basis = found.vectors[:, count - cut.room :]  # [length, room], the strongest last
                column = ops.arange(cut.room) >= cut.room - used
                basis = ops.where(column, basis, 0.0)
                mean = ops.reshape(found.mean, (1, cut.length))
                inside = ops.matmul(ops.matmul(mean, basis), ops.transpose(basis, (1, 0)))
                bases.append(ops.reshape(ops.cast(basis, "float32"), (-1,)))
                offsets.append(ops.reshape(ops.cast(mean - inside, "float32"), (-1,)))
                dimensions.append(ops.cast(used, "float32"))
        return ops.concat((*bases, *offsets, *dimensions))

    def _basis(
        self, ops: Ops, cut: Slices, samples: Tensor, energy: Tensor
    ) -> tuple[Components, Tensor]:
        """Components of samples [steps, rows * length], and how many of them are used.

        Each step counts alike, whatever its energy: what shall be small is the share left out.
        """
        weight = ops.where(energy > 0, 1.0 / ops.where(energy > 0, energy, 1.0), 0.0)

        def part(first: int, last: int) -> tuple[Tensor, Tensor]:
            rows = ops.reshape(samples[first:last], (-1, cut.length))
            each = ops.reshape(weight[first:last], (-1, 1)) * ops.full(
                (1, cut.rows), 1.0, "float64"
            )
            return rows, ops.reshape(each, (-1,))

        everything = components(ops, *part(0, self.sample_steps))
        if self.loss_threshold is None:
            return everything, ops.full((1,), cut.room)
        fitted = self._fitted_steps
        found = components(ops, *part(0, fitted))
        held = part(fitted if fitted < self.sample_steps else 0, self.sample_steps)
        return everything, dimension(ops, found, *held, self.loss_threshold, cut.room)

    def _compressed(self, ops: Ops, context: Context, gradient: Tensor, state: Any) -> Program:
        layout, weight = context.layout, context.prescale * context.postscale
        finite, gradient = exchanges.checked(ops, gradient)
        if self.feedback:
            gradient = ops.accumulate(gradient, state.r * self.drain)
        code, energy, lost = self.encode(ops, layout, gradient, state)
        loss = ops.where(energy > 0, lost / ops.where(energy > 0, energy, 1.0), 0.0)
        said = ops.concat((code, ops.reshape(loss, (1,)), exchanges.poison(ops, finite)))
        total = yield Allreduce(said, context.prescale, context.postscale)
        total = exchanges.unpoisoned(ops, total)
        loss = ops.reshape(total[-1:], ()) * (1.0 / (weight * context.size))
        if self.resample_loss is not None:
            drifted = ops.stage(ops.cast(loss > self.resample_loss, "int64"))
            state = state._replace(drifted=drifted)
        if self.feedback:
            share = 1.0 / (weight * context.size)
            missed = gradient - self.decode(ops, layout, code, state, share)
            state = state._replace(r=state.r * (1.0 - self.drain) + missed)
        mean = self.decode(ops, layout, total[:-1], state, room=gradient)
        sent = state.sent + self._coefficients(ops, layout, state)
        return mean, state._replace(loss=loss, sent=sent)

    def _groups(
        self, ops: Ops, layout: Layout, state: Any
    ) -> list[tuple[Slices, int, Any, Any, Any]]:
        """(cut, group, dimension, basis [length, dimension], offset [1, length]) of each group."""
        found = []
        start = offset = number = 0
        for cut in self.slices(layout):
            for group in range(cut.groups):
                basis = state.basis[start : start + cut.length * cut.room]
                basis = ops.reshape(basis, (cut.length, cut.room))
                used: Any = cut.room
                if self.loss_threshold is not None and ops.dynamic_shapes:
                    used = ops.staged(state.dimensions[number])
                    basis = basis[:, cut.room - used :]
                beside = ops.reshape(state.offset[offset : offset + cut.length], (1, cut.length))
                found.append((cut, group, used, basis, beside))
                start += cut.length * cut.room
                offset += cut.length
                number += 1
        return found

    def encode(
        self, ops: Ops, layout: Layout, gradient: Tensor, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The coefficients, linear in the gradient; its energy; what of it the basis leaves out.

        The local loss needs no projection back: with `c` the offset, which is orthogonal to `U`,
        `||s - U U^T s - c||^2 = ||s||^2 - ||U^T s||^2 - 2 c.s + ||c||^2`.
        """
        codes: list[Any] = []
        energy = lost = ops.zeros(())
        slices: Any = None
        of_layer = None
        for cut, group, _, basis, offset in self._groups(ops, layout, state):
            if cut.groups > 1 and cut is not of_layer:
                slices, of_layer = cut.cut(ops, gradient), cut
            first, members = group * cut.reuse, cut.members(group)
            mine = cut.turned(ops, gradient) if cut.groups == 1 else slices[first : first + members]
            code, whole, beside = ops.project(mine, basis, offset)
            codes.append(ops.reshape(code, (-1,)))
            beside = beside * 2.0 - ops.inner(offset, offset) * float(members)
            energy = energy + whole
            lost = lost + ops.maximum(whole - ops.inner(code, code) - beside, 0.0)
        return ops.concat(codes), energy, lost

    def decode(
        self,
        ops: Ops,
        layout: Layout,
        code: Tensor,
        state: Any,
        share: float = 1.0,
        room: Tensor | None = None,
    ) -> Tensor:
        """What coefficients stand for; with a `share` of the mean's part outside the basis.

        Args:
            room: where the result may lie; donating. None for nowhere yet.
        """
        pieces: list[Any] = []
        rows: list[Any] = []
        done, start = 0, 0
        for cut, group, used, basis, offset in self._groups(ops, layout, state):
            members = cut.members(group)
            mine = ops.reshape(code[start : start + members * used], (members, used))
            start = start + members * used
            if group == 0 and cut.start > done:
                pieces.append(ops.zeros((cut.start - done,)))
            if cut.groups == 1:
                pieces.append(ops.lift(mine, basis, offset * share, cut.shape, cut.order))
            else:
                back = ops.matmul_plus(mine, ops.transpose(basis, (1, 0)), offset * share)
                rows.append(ops.reshape(back, (-1,)))
            if rows and group == cut.groups - 1:
                pieces.append(ops.unturned(ops.concat(rows), cut.shape, cut.order))
                rows = []
            done = cut.start + cut.size
        if layout.size > done:
            pieces.append(ops.zeros((layout.size - done,)))
        return ops.assemble(ops.zeros((layout.size,)) if room is None else room, pieces)

    def _coefficients(self, ops: Ops, layout: Layout, state: Any) -> Tensor:
        """How many each layer sends; int64 [layers]."""
        counts: list[Any] = []
        for cut, group, used, _, _ in self._groups(ops, layout, state):
            if group == 0:
                counts.append(0)
            counts[-1] = counts[-1] + cut.members(group) * used
        return ops.words(counts)

    # -- what users ask ----------------------------------------------------------------------

    def elements_sent(self, layout: Layout, state: Any, steps: int) -> Sequence[int]:
        del layout, steps
        return [int(n) for n in state.sent]

    def losses(self, state: Any) -> dict[str, float]:
        return {"basis": float(state.loss)}

    def residual(self, state: Any) -> Tensor | None:
        return state.r if self.feedback else None

    def retrained(self, ops: Ops, state: Any, step: Any) -> Any:
        return state if step < self.warmup_steps else state._replace(start=ops.host(step))

    def owner(self, path: str, step: int) -> int | None:
        return self.between.owner(path.partition(".")[2], step)

    def resized(self, ops: Ops, state: Any, step: Any, ranks: int) -> Any:
        inner = self.between.resized(ops, state.sampling, step, ranks)
        return state if inner is state.sampling else state._replace(sampling=inner)

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        raise TypeError(
            "the compressor has no basis yet: inside stock Horovod nothing could be sampled. Pass "
            "compression=compressor.fit(samples), with samples [count, *shape] of the gradients of "
            "each convolution; or import hvd_gradcomp.torch (or .tensorflow) as hvd. Got "
            f"{self}"
        )

    def fit(self, samples: Sequence[Tensor], filters_last: bool | None = None) -> FittedGradiVeQ:
        """A stock Horovod `Compressor` with a basis for each shape, from gradients seen before.

        Args:
            samples: float32 [count, *shape] of each layer, at least 2 of each. Stock Horovod names
                no layers, so those of one shape share a basis.
            filters_last: see `Layout`; None for what the tensors' framework does.

        Returns:
            What `hvd.DistributedOptimizer(compression=)` of stock Horovod takes. It projects
            tensors whose shape it has seen and passes on others.

        Raises:
            ValueError: there are no samples, or fewer than 2 of a layer.
        """
        if not samples or any(len(x.shape) < 2 or x.shape[0] < 2 for x in samples):
            raise ValueError(
                "fit needs samples [count, *shape] with at least 2 of each layer, got shapes "
                f"{[tuple(x.shape) for x in samples]}"
            )
        if filters_last is None:
            filters_last = type(samples[0]).__module__.partition(".")[0] == "tensorflow"
        return FittedGradiVeQ(self, samples, filters_last)


class FittedGradiVeQ:
    """GradiVeQ whose basis is set, for stock Horovod; made by `GradiVeQCompressor.fit`."""

    def __init__(
        self, compressor: GradiVeQCompressor, samples: Sequence[Tensor], filters_last: bool
    ) -> None:
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for several in samples:
            shape = tuple(int(extent) for extent in several.shape[1:])
            shapes.setdefault(shape, []).append(several)
        self._known: dict[tuple[int, ...], tuple[GradiVeQCompressor, Layout, Any]] = {}
        for shape, layers in shapes.items():
            self._known[shape] = _fitted(compressor, shape, layers, filters_last)

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """What stock Horovod shall allreduce: coefficients, where the shape is known."""
        shape = tuple(int(extent) for extent in tensor.shape)
        if shape not in self._known:
            return tensor, None
        ops = verbs.of(tensor)
        compressor, layout, state = self._known[shape]
        code, _, _ = compressor.encode(ops, layout, ops.reshape(tensor, (-1,)), state)
        return code, shape

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """The mean gradient from the mean of coefficients."""
        if context is None:
            return tensor
        compressor, layout, state = self._known[context]
        ops = verbs.of(tensor)
        return ops.reshape(compressor.decode(ops, layout, tensor, state), context)


def _fitted(
    compressor: GradiVeQCompressor,
    shape: tuple[int, ...],
    layers: Sequence[Tensor],
    filters_last: bool,
) -> tuple[GradiVeQCompressor, Layout, Any]:
    ops = verbs.of(layers[0])
    count = sum(int(several.shape[0]) for several in layers)
    compressor = replace(compressor, sample_steps=count, sampling="none", feedback=False)
    layout = Layout(("tensor",), (shape,), block=1, filters_last=filters_last)
    state = compressor.init(ops, layout)
    row = 0
    for several in layers:
        for place in range(int(several.shape[0])):
            total = ops.reshape(ops.cast(several[place], "float32"), (layout.size,))
            state = compressor._recorded(ops, layout, total, row, state)
            row += 1
    program = compressor._learned(ops, Context(layout, 0, 1, 0), state)
    request: Any = next(program)
    try:
        program.send(request.tensor)
    except StopIteration as stop:
        state = stop.value
    return compressor, layout, state


@lru_cache(maxsize=256)
def _slices_of(compressor: GradiVeQCompressor, layout: Layout) -> tuple[Slices, ...]:
    return tuple(
        compressor.slices_of(shape, layout.filters_last, start)
        for start, shape in zip(layout.offsets, layout.shapes)
    )
