"""Public class of GradiVeQ: its parameters, the layers it projects, and the phases of a cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hvd_gradcomp.algorithms.combined.wrappers import part
from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.algorithms.gradiveq import basis, projection, stock
from hvd_gradcomp.algorithms.gradiveq.slices import Slicing, sizes_of
from hvd_gradcomp.algorithms.gradiveq.state import GradiVeQState
from hvd_gradcomp.algorithms.quantized.qsgd import QSGDCompressor
from hvd_gradcomp.codecs.clipping import Clipping
from hvd_gradcomp.codecs.linear import LinearCompressor
from hvd_gradcomp.codecs.quantized import Keeping, LevelsCompressor
from hvd_gradcomp.codecs.sparse import Residual
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.collectives import Allreduce, Switch
from hvd_gradcomp.core.cost_model import Course
from hvd_gradcomp.core.layers import Layer, convolves
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns
from hvd_gradcomp.method.composite import Composite
from hvd_gradcomp.method.compressor import Compressor, Context, Program, Report
from hvd_gradcomp.method.handover import Handover, correction_of
from hvd_gradcomp.ops import Ops, Tensor, ops_of

_DEFAULT_RATIO = 8
_DRAIN = 4.0  # residuals that a cycle's compressed steps could send
SAMPLING = {"none": NoneCompressor(), "qsgd": QSGDCompressor(bits=4)}


@dataclass(frozen=True)
class GradiVeQCompressor(Clipping, Composite, Handover):
    """GradiVeQ: projects slices of convolutions onto principal components (Yu et al. 2018).

    A layer is flattened so that the gradients of all filters at one position are adjacent, then
    along depth, width and height, and cut into slices `s`. After `warmup_steps` uncompressed steps,
    cycles of two phases follow. For `sample_steps` the full mean gradient is exchanged and a few
    slices of every `reuse` are recorded each step, in turn. Each rank computes the mean `mu` of
    these samples, which are the same on all ranks, and the principal components `U` of their
    covariance. For `compress_steps` each rank sends only `z = U^T s`; the ranks' mean of `z` is
    decoded to `U (z - U^T mu) + mu`.

    What travels: while compressing, 4 bytes for each coefficient (`d` for each slice) and 8 bytes
    for each bucket, by allreduce; while sampling, the payload of `sampling`; once per cycle
    8 bytes that compare the ranks' bases, and only if these differ, with a warning, a broadcast of
    `4 * (length * (d + 1) + 1)` bytes for each basis, with its maximum `d`. State,
    besides that of `sampling`: a basis, `4 * length * (d + 1)` bytes, and its samples, two or
    three times as much (at least a slice for each of `sample_steps`); with `feedback` 4 bytes for
    each element. Memory and time do not depend on the number of ranks.

    Default: `GradiVeQCompressor(ratio=8)`, as trained in docs/papers-long.md and docs/papers.md,
    with `warmup_steps` of a fifth of each training. docs/algorithms/gradiveq.md measures what the
    bases leave out, beside other `max_slice` and `sample_steps`.

    Args:
        slice_size: elements of a slice. None takes blocks of `filters * depth` elements, as the
            paper does: as many as divide the kernel's positions, make at most `max_slice` elements,
            and leave more samples than a basis has dimensions. Where one block is too long for
            that, a slice is an equal part of it along the depth, or of the filters at one depth.
            Nothing is padded.
        max_slice: the longest slice; blocks that are longer are cut into parts of at most a quarter
            of it. Larger finds more correlation and costs more: time grows linearly, state with the
            square: at a ratio of 8 64 by 64 filters take 8 MB for the basis and 15 MB for samples.
        loss_threshold: the share of the samples' energy that a basis may lose, in (0, 1). Each
            cycle `d` is the smallest for which a basis of the first three quarters of the samples
            loses no more of the last quarter; then all samples make the basis. At most
            `length / 4` or `sample_steps - 1` dimensions, whichever is more. Larger sends less.
        ratio: fixes `d = max(1, length // ratio)` instead; at least 1, and 8 unless a
            `loss_threshold` is given. Larger sends less. If `slice_size` or `reuse` leave too few
            samples, `d` is one less than their number, and a warning at the first step says so.
        reuse: slices that share a basis. None for one basis a layer, or where blocks are cut, for
            one for each part of a block: slices at the same filters and inputs share it, whatever
            their position in the kernel. Parts beside each other share one where a layer would
            have more than 16, or these would take more than `max_slice**2 / 4` bytes.
        warmup_steps: steps before the first cycle, at least 0.
        sample_steps: sampling steps of a cycle, at least 2.
        compress_steps: compressed steps of a cycle, at least 1. More: fewer bytes and older bases.
        resample_loss: the next cycle starts early when the mean over ranks of the local loss
            `||s - s'||^2 / ||s||^2` exceeds this, in (0, 1]; None disables this.
        sampling: compressor of warm-up and sampling steps: "none", "qsgd" (4 bits), or a
            compressor.
        other: the compressor of layers that are not convolutions; None sends them dense. PyTorch's
            and Keras's layers are recognized by their class, others by name and number of axes.
            Use `partition` to choose the layers yourself.
        feedback: keep the projection error of each rank in a residual `r`, and add
            `4 / compress_steps` of `r` to each gradient that is compressed. Since a basis never
            captures its own projection error, `r` grows through a cycle and drains into the next
            cycle's basis; adding all of it at once would destabilize the training. Sampling steps
            send nothing of `r`; the quantization error of QSGD or TernGrad in these steps is added
            to it, and FP16's rounding error of each rank (not of the sum, which no rank knows).
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` before accumulating, so that a bad batch does not fill the
            residual; positive; smaller clips more. None clips nothing.

    Differs from the paper: samples come from all slices that share a basis, not only the first,
    and each sampling step has the same weight, whatever its energy; slices are capped; the
    eigenvectors come from the inner products of samples where these are fewer than elements of a
    slice, without a covariance; the dimension is chosen on held-out samples; the loss is measured
    per bucket; where the ranks' bases differ in a bit, those of one go to all; feedback (off by
    default). Weights of transposed convolutions are cut as if they were stored like others.
    The framework rounds products, so the coefficients of PyTorch and TensorFlow differ in the
    last bits.

    Raises:
        ValueError: a hyper-parameter is out of range, or both `loss_threshold` and `ratio` are
            given.
        TypeError: `sampling` or `other` is not a compressor, or one that takes momentum over.

    >>> cut = GradiVeQCompressor(ratio=8).slicing.slices_of((64, 16, 3, 3), filters_last=False)
    >>> cut.slices, cut.length, cut.max_dimensions
    (9, 1024, 128)
    """

    slice_size: int | None = None
    max_slice: int = 4096
    loss_threshold: float | None = None
    ratio: float | None = None
    reuse: int | None = None
    warmup_steps: int = 100
    sample_steps: int = 100
    compress_steps: int = 400
    resample_loss: float | None = None
    sampling: Any = "none"
    other: Any = None
    feedback: bool = False
    max_norm: float | None = None

    compresses = True  # whatever the compressor of its sampling steps does
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
        if self.loss_threshold is not None:
            validate.real(self, "loss_threshold", low=0, high=1)
        else:
            if self.ratio is None:
                validate.stands_for(self, "ratio", _DEFAULT_RATIO)
            validate.real(self, "ratio", low=1, closed="[")
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
            if correction_of(compressor) is not None or compressor.uses_moments:
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

    def exchange_of(self, layout: Layout, ranks: int) -> None:
        """Return None: a cycle has steps of three kinds, see `course`."""
        del layout, ranks

    @property
    def between(self) -> Compressor:
        """Compressor of warm-up and sampling steps."""
        chosen = SAMPLING.get(self.sampling) if isinstance(self.sampling, str) else self.sampling
        return part("GradiVeQCompressor: sampling", chosen)

    @property
    def others(self) -> Compressor:
        """Compressor of layers that are not convolutions."""
        return part("GradiVeQCompressor: other", self.other)

    @cached_property
    def slicing(self) -> Slicing:
        """Cuts of layers into slices."""
        return Slicing(
            self.slice_size,
            self.max_slice,
            self.loss_threshold,
            self.ratio,
            self.reuse,
            self.sample_steps,
        )

    @property
    def cycle_steps(self) -> int:
        """Steps of a cycle."""
        return self.sample_steps + self.compress_steps

    @property
    def drain(self) -> float:
        """Share of the residual that is added to each gradient."""
        return min(1.0, _DRAIN / self.compress_steps)

    # -- which layers it takes ---------------------------------------------------------------

    def of_layers(self, layers: Sequence[Layer], ranks: int) -> list[Compressor]:
        convolutions = list(map(convolves, layers))
        others = iter(
            self.others.of_layers([x for x, takes in zip(layers, convolutions) if not takes], ranks)
        )
        return [self if takes else next(others) for takes in convolutions]

    def layer_bytes(self, shape: Sequence[int]) -> float | None:
        if self.ratio is None:
            return None
        cut = self.slicing.slices_of(tuple(shape), filters_last=False)
        return 4 * cut.slices * cut.max_dimensions

    # -- whether it pays -----------------------------------------------------------------------

    def course(self, layout: Layout, ranks: int) -> Course:
        """Return the bytes of a cycle; a lower bound if gradients decide the dimensions."""
        dense = 4.0 * layout.elements
        groups = sum(cut.groups for cut in self.slicing.slices(layout))
        least = None if self.loss_threshold is None else [1] * groups
        sampling = 4.0 * layout.elements if self.between.is_linear else 0.0
        learning = self.sample_steps * sampling + 8.0
        return Course(learning, self.slicing.coefficient_bytes(layout, least), dense)

    def drawbacks(self, layouts: Sequence[Layout], ranks: int) -> list[str]:
        """Return warnings if learning, again in each cycle, does not pay, or a basis is small."""
        courses = [self.course(layout, ranks) for layout in layouts]
        learning, step, dense = Course.total(courses)
        mean = (learning + self.compress_steps * step) / self.cycle_steps
        texts = self._fewer_dimensions(layouts)
        if mean < dense:
            return texts
        return [
            f"GradiVeQ sends no less than dense gradients on these convolutions: {mean:,.0f} bytes "
            f"a step and rank, the mean over a cycle of {self.cycle_steps} steps ({step:,.0f} in a "
            f"compressed one, {learning:,.0f} in all to learn the bases), where dense ones take "
            f"{dense:,.0f}. Raise ratio= or compress_steps=, or use another method. It is {self}",
            *texts,
        ]

    def _fewer_dimensions(self, layouts: Sequence[Layout]) -> list[str]:
        """Return a warning if a basis cannot have as many dimensions as `ratio` asks for."""
        fewer = [
            (f"{name} {cut.length / cut.max_dimensions:.3g}", self.slicing.steps_for(cut))
            for layout in layouts
            for name, cut in zip(layout.names, self.slicing.slices(layout))
            if cut.max_dimensions < self.slicing.min_components(cut.length)
        ]
        if not fewer:
            return []
        listed = ", ".join(name for name, _ in fewer[:8]) + (", ..." if len(fewer) > 8 else "")
        return [
            f"GradiVeQ compresses {len(fewer)} layers by more than ratio={self.ratio!r}: {listed}. "
            "A basis has fewer dimensions than samples: ask for sample_steps="
            f"{max(n for _, n in fewer)}, a smaller slice_size=, or more slices that share a basis "
            f"(reuse=). It is {self}"
        ]

    def idle(self, methods: Sequence[Compressor]) -> bool:
        """Return True if it projects no layer, whatever compresses the others."""
        return all(method.working != self for method in methods)

    def idle_reason(self, names: Sequence[str], dense: int) -> str:
        listed = ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")
        return (
            f"GradiVeQ compresses nothing: none of {len(names)} layers is a convolution that takes "
            f"fewer bytes so, {dense:,} dense: {listed}. Use another method; these all go to "
            f"other={self.others}"
        )

    # -- one step ----------------------------------------------------------------------------

    def start(self, ops: Ops, layout: Layout, ranks: int) -> GradiVeQState:
        cuts = self.slicing.slices(layout)
        sizes = sizes_of(cuts)
        dimensions = [s.max_dimensions for s in cuts for _ in range(s.groups)]
        return GradiVeQState(
            samples=ops.zeros((self.sample_steps * sizes.samples,)),
            basis=ops.zeros((sizes.basis,)),
            offset=ops.zeros((sizes.offset,)),
            dimensions=ops.stage(ops.words(dimensions)),
            start=ops.host(self.warmup_steps),
            drifted=ops.host(0),
            loss=ops.full((), float("nan"), "float32"),
            sent=ops.zeros((len(layout.names),), "int64"),
            sampling=self.between.start(ops, layout, ranks),
            r=ops.zeros((layout.size,)) if self.feedback else (),
        )

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: GradiVeQState, **extra: Tensor
    ) -> Program:
        gradient, _ = self.clipped(ops, context, gradient, extra)
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
            return total, basis.recorded(self.slicing, ops, context.layout, total, elapsed, after)

        def learn() -> Program:
            total, after = yield from sample()
            return total, (yield from basis.learned(self.slicing, ops, context, after))

        def compress() -> Program:
            return self._compressed(ops, context, gradient, state)

        return (yield Switch(phase, (whole, sample, learn, compress)))

    def _whole(self, ops: Ops, context: Context, gradient: Tensor, state: GradiVeQState) -> Program:
        between = self.between
        state = state._replace(sent=state.sent + ops.words(context.layout.sizes))
        if self.feedback and isinstance(between, LevelsCompressor):  # it has no residual itself
            keeping = Keeping(between).aggregate(ops, context, gradient, Residual(state.r))
            total, kept = yield from keeping
            return total, state._replace(r=kept.r)
        r = state.r
        if self.feedback and isinstance(between, LinearCompressor) and between.itemsize < 4:
            rounded = between.from_code(ops, context.layout, between.to_code(ops, gradient))
            missed = gradient - rounded
            # The allreduced sum reveals non-finite values.
            r = r + ops.where(missed - missed == 0, missed, 0.0)
        total, inner = yield from between.aggregate(ops, context, gradient, state.sampling)
        return total, state._replace(sampling=inner, r=r)

    def _compressed(
        self, ops: Ops, context: Context, gradient: Tensor, state: GradiVeQState
    ) -> Program:
        layout, weight = context.layout, context.prescale * context.postscale
        finite, gradient = patterns.check_finite(ops, gradient)
        if self.feedback:
            gradient = ops.accumulate(gradient, state.r * self.drain)
        code, energy, lost = projection.encode(self.slicing, ops, layout, gradient, state)
        loss = ops.where(energy > 0, lost / ops.where(energy > 0, energy, 1.0), 0.0)
        sent = ops.concat((code, ops.reshape(loss, (1,)), patterns.poison(ops, finite)))
        total = yield Allreduce(sent, context.prescale, context.postscale)
        total = patterns.strip_poison(ops, total)
        loss = ops.reshape(total[-1:], ()) * (1.0 / (weight * context.size))
        if self.resample_loss is not None:
            drifted = ops.stage(ops.cast(loss > self.resample_loss, "int64"))
            state = state._replace(drifted=drifted)
        if self.feedback:
            share = 1.0 / (weight * context.size)
            missed = gradient - projection.decode(self.slicing, ops, layout, code, state, share)
            state = state._replace(r=state.r * (1.0 - self.drain) + missed)
        mean = projection.decode(self.slicing, ops, layout, total[:-1], state, out=gradient)
        sent = state.sent + projection.coefficients(self.slicing, ops, layout, state)
        return mean, state._replace(loss=loss, sent=sent)

    # -- optional hooks ----------------------------------------------------------------------

    def report(self, layout: Layout, state: GradiVeQState, steps: int, since: int = 0) -> Report:
        sent = [int(n) for n in state.sent]
        return Report(sent, self.residual(state), {"basis": float(state.loss)})

    def residual(self, state: GradiVeQState) -> Tensor | None:
        return state.r if self.feedback else None

    def retrained(self, ops: Ops, state: GradiVeQState, step: Any) -> GradiVeQState:
        return state if step < self.warmup_steps else state._replace(start=ops.host(step))

    def rehearsed(self, ops: Ops, layout: Layout, state: GradiVeQState, step: int) -> GradiVeQState:
        bases: list[Tensor] = []
        for cut in self.slicing.slices(layout):
            shape = cut.length, cut.max_dimensions
            for _ in range(cut.groups):
                noise = (
                    ops.uniform(ops.key(step, len(bases)), cut.length * cut.max_dimensions) - 0.5
                )
                bases.append(ops.reshape(ops.orthogonalize(ops.reshape(noise, shape)), (-1,)))
        return state._replace(start=ops.host(step - self.sample_steps), basis=ops.concat(bases))

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        raise TypeError(
            "the compressor has no basis yet: inside stock Horovod nothing could be sampled. Pass "
            "compression=compressor.fit(samples), with samples [count, *shape] of the gradients of "
            "each convolution; or import hvd_gradcomp.torch (or .tensorflow) as hvd. Got "
            f"{self}"
        )

    def fit(
        self, samples: Sequence[Tensor], filters_last: bool | None = None
    ) -> stock.FittedGradiVeQ:
        """Fit a stock Horovod `Compressor`, with a basis for each shape, to earlier gradients.

        Args:
            samples: float32 [count, *shape] of each layer, at least 2 of each. Stock Horovod does
                not name layers, so layers of one shape share a basis.
            filters_last: see `Layout`; None for the convention of the tensors' framework.

        Returns:
            A compressor for `hvd.DistributedOptimizer(compression=)` of stock Horovod. It projects
            tensors whose shape is in the samples and passes others through.

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
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for several in samples:
            shapes.setdefault(tuple(int(n) for n in several.shape[1:]), []).append(several)
        bases = {}
        for shape, layers in shapes.items():
            count = sum(int(several.shape[0]) for several in layers)
            compressor = replace(self, sample_steps=count, sampling="none", feedback=False)
            layout = Layout(("tensor",), (shape,), block=1, filters_last=filters_last)
            state = compressor.init(ops_of(layers[0]), layout)
            bases[shape] = stock.fit(stock.Fitted(compressor.slicing, layout, state), layers)
        return stock.FittedGradiVeQ(bases)
