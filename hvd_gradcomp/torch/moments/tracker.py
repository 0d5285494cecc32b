"""Second moments over samples, computed while backward runs.

For a parameter `p` and a batch of samples `z`,

    q = sum over z of c_z**2,    c_z = what sample z contributes to p.grad,

the sum that Algorithm 1 of Tsuzuku et al. 2018 accumulates next to the gradient. With a loss that
is a mean over the batch, `c_z = grad_z / B`, as there; the gradient that arrives in backward
already has the factor. The first axis of the model's first input tensor counts the samples; other
inputs with a first axis of that length have their samples there too, and all others are independent
of samples.

How. While the model, or a submodule called by itself, runs forward, a `TorchFunctionMode` sees each
PyTorch function. `sample_axis` follows the samples. When a parameter, or a value computed from
parameters alone (a looked-up position table, a standardised weight), meets a tensor that depends on
samples, the function is handled in one of these ways:

* It has a rule (`rules.RULES`: products, convolutions, tables, normalisation; and recurrent
  layers): its input is kept, and the output passes through an identity, where `delta` arrives in
  backward.
* It is elementwise, or expands: the parameter is expanded first, so that backward computes the
  gradient of each sample before it is summed.
* Anything else: the arguments are kept, and the function is run again for each sample.

When a parameter's gradient has been accumulated, its uses in this backward pass are complete. The
contributions of all uses are added before they are squared, so shared modules and tied weights are
exact. Samples of further passes are further samples: moments add. A forward without backward leaves
nothing behind. Contributions from outside the model's forward (a penalty on the weight) belong to
no sample and are ignored; a parameter with no other contribution is an error.

PyTorch before 2.4 hides indexing from a `TorchFunctionMode`: samples would be lost silently, so
`track_moments` refuses it.

Exact up to rounding, except for batch normalisation, where the batch's statistics are treated as
constants: the contribution as the layer sees it.

Cost. A Linear on [batch, features] costs one GEMM more, `(delta**2)^T (x**2)`, about a third of its
backward. Other products and convolutions compute the gradients of `chunk` samples at a time: about
as many multiplications as the weight's own gradient, and memory for `chunk` times the parameter
(for a convolution also its unfolded input). Recurrent layers are run again. Each function in
forward costs a few microseconds.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_gradcomp.core import validate
from hvd_gradcomp.planning.description import tracked
from hvd_gradcomp.torch.interop import dynamo
from hvd_gradcomp.torch.moments import sample_axis
from hvd_gradcomp.torch.moments.rules import (
    OPENED,
    RECURRENT,
    RULES,
    Gates,
    PerSampleRule,
    Recurrence,
    Replay,
    recurrence,
)
from hvd_gradcomp.torch.moments.sample_axis import (
    ELEMENTWISE,
    LOST,
    Notes,
    SampleAxis,
    mapped,
    samples_first,
    tensors_in,
)

LOGGER = logging.getLogger("hvd_gradcomp")
OTHERS = ("error", "step", "dense")
ADVICE = (
    "Freeze these parameters, or use track_moments(model, others='step'), moments='microbatch' or "
    "moments='step'"
)
_EXPANDS = frozenset({"expand", "broadcast_to", "repeat", "tile"})
_WHERE_UNSEEN = (
    "What happens inside torch.compile or torch.func, in an autograd.Function of your own, or "
    "outside of the model's forward is not seen"
)


_EAGER = (
    "torch.compile: a model whose moments are tracked runs eagerly while it trains, since what "
    "single samples contribute cannot be seen in compiled code. Take moments='microbatch' or "
    "moments='step' instead of track_moments to train it compiled"
)


class Step:
    """Result of `take` if the step has to count as one sample: `q = g*g`."""


STEP = Step()


class ParamUse(NamedTuple):
    """Use of a parameter in the forward pass, recorded when its backward has run."""

    task: int  # the backward pass
    samples: int
    contribute: Callable[[range], Tensor]  # to [samples, *shape]
    squares: Callable[[], Tensor | None] | None = None


@dataclass
class _Record:
    name: str
    owner: str
    chunk: int
    others: str
    uses: list[ParamUse] = field(default_factory=list)
    moment: Tensor | None = None
    bypassed: bool = False  # a gradient arrived without a recorded use
    ways: dict[str, None] = field(default_factory=dict)  # seen so far, in order
    why_not: str = ""
    hook: Any = None


_records: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_dense: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_frozen: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tracked once they train
_running = threading.local()  # the observer of this thread


# -- values without samples --------------------------------------------------------------------


class DerivedParam:
    """Value that a function has computed from parameters alone, independent of samples.

    Args:
        func, args, kwargs: the function call.
        index: the number of the value among the function's results.
    """

    _serials = itertools.count()

    def __init__(self, func: Any, args: Any, kwargs: Any, index: int) -> None:
        self.func, self.index, self.serial = func, index, next(self._serials)
        self.parents: list[Source] = []
        self.values: list[Tensor] = []
        self.fill = _filling(args, kwargs, self._keep)
        self.behind = tuple(dict.fromkeys(p for parent in self.parents for p in _behind(parent)))

    def _keep(self, tensor: Tensor) -> int:
        source = _source(tensor)
        if source is None:
            source = tensor.detach()
        self.parents.append(source)
        self.values.append(tensor.detach())
        return len(self.values) - 1

    def back(self, place: int, c: Tensor) -> Tensor | None:
        """Backpropagate contributions from this value to one of its parents."""
        values = list(self.values)
        leaf = values[place] = values[place].detach().requires_grad_()
        with torch.enable_grad():
            args, kwargs = self.fill(values)
            out = list(tensors_in(self.func(*args, **kwargs)))[self.index]
        (contribution,) = torch.autograd.grad(
            out, leaf, c.to(out.dtype), is_grads_batched=True, allow_unused=True
        )
        return None if contribution is None else contribution.to(c.dtype)


Source = Union[nn.Parameter, DerivedParam, Tensor]  # a plain tensor is a constant


def _source(tensor: Tensor) -> Source | None:
    """Return the tracked parameter, or the `DerivedParam`, that a tensor is; else None."""
    made = _made.of(tensor)
    if made is not None:
        return made
    if tensor.requires_grad and tensor.is_leaf and tensor in _records:
        return tensor
    return None


_made: Notes[DerivedParam] = Notes()


def _behind(source: Source) -> Sequence[nn.Parameter]:
    """Return the parameters that a source is computed from."""
    if isinstance(source, DerivedParam):
        return source.behind
    return (source,) if source.requires_grad else ()


def _back_to(parameter: nn.Parameter, source: Source, c: Tensor) -> Tensor | None:
    """Backpropagate contributions from a source to a parameter, in reverse order of creation."""
    if not isinstance(source, DerivedParam):
        return c if source is parameter else None
    total: Tensor | None = None
    rest = {source: c}
    while rest:
        made = max(rest, key=lambda m: m.serial)
        c = rest.pop(made)
        for place, parent in enumerate(made.parents):
            if not any(p is parameter for p in _behind(parent)):
                continue
            part = made.back(place, c)
            if part is None:
                continue
            if isinstance(parent, DerivedParam):
                rest[parent] = rest[parent] + part if parent in rest else part
            else:
                total = part if total is None else total + part
    return total


def _filling(
    args: Any, kwargs: Any, keep: Callable[[Tensor], int]
) -> Callable[[Sequence[Tensor]], tuple[Any, dict[str, Any]]]:
    """Number the tensors of arguments by `keep`; return a function that puts tensors back."""

    class Hole(NamedTuple):
        number: int

    shape = mapped((args, kwargs), lambda t: Hole(keep(t)))

    def fill(value: Any, tensors: Sequence[Tensor]) -> Any:
        if isinstance(value, Hole):
            return tensors[value.number]
        if isinstance(value, dict):
            return {key: fill(item, tensors) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(fill(item, tensors) for item in value)
        return value

    return lambda tensors: fill(shape, tensors)


def _add_use(
    source: Source,
    samples_: int,
    contribute: Callable[[range], Tensor],
    squares: Callable[[], Tensor | None] | None = None,
) -> None:
    task = _task()
    for parameter in _behind(source):
        record = _records.get(parameter)
        if record is None:
            continue
        if source is parameter:
            record.uses.append(ParamUse(task, samples_, contribute, squares))
            continue

        def through(piece: range, parameter: nn.Parameter = parameter) -> Tensor:
            c = contribute(piece)
            in_parameter = _back_to(parameter, source, c)
            return (
                c.new_zeros(len(piece), *parameter.shape) if in_parameter is None else in_parameter
            )

        record.uses.append(ParamUse(task, samples_, through))


def _transforms() -> bool:
    """Return True inside a torch.func transform, whose tensors are not the model's."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _task() -> int:
    """Return the id of the running backward pass."""
    return int(torch._C._current_graph_task_id())


# -- in backward -------------------------------------------------------------------------------


class _Noted(torch.autograd.Function):
    """Identity on a function's results, without a copy; in backward it records a use."""

    @staticmethod
    def forward(ctx: Any, call: Any, count: int, *tensors: Tensor) -> Any:
        ctx.call, ctx.count = call, count
        ctx.save_for_backward(*tensors[count:])
        # Not views for autograd, so that they may be modified in place.
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor) -> Any:
        kept = ctx.saved_tensors
        ctx.call([d.detach() for d in deltas], kept)
        return (None, None, *deltas, *(None for _ in kept))


class _Spread(torch.autograd.Function):
    """Expansion of a sample-independent value; in backward it records a use of its parameters."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, shape: torch.Size, place: SampleAxis, source: Source
    ) -> Tensor:
        ctx.value, ctx.place, ctx.source = value.shape, place, source
        return value.detach().expand(shape)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None, None, None]:
        shape, place = ctx.value, ctx.place
        whole, extra = _wide(delta.detach()), delta.dim() - len(shape)
        axis = place.axis - extra  # the value's own axis that counts samples
        if axis >= 0 and shape[axis] != 1:
            whole = whole.sum_to_size(shape)
            sample = torch.arange(shape[axis], device=delta.device) // place.inner % place.samples
            sample = sample.reshape(-1, *(1 for _ in shape[axis + 1 :]))

            def contribute(piece: range) -> Tensor:
                return torch.stack([whole * (sample == z) for z in piece])

        else:
            # [samples, k, other axes in order], with k moved back to the sample axis
            each = samples_first(whole, place).movedim(1, place.axis + 1)
            axes = [a + 1 for a in range(delta.dim()) if a < extra or shape[a - extra] == 1]
            each = (each.sum(axes) if axes else each).reshape(place.samples, *shape)

            def contribute(piece: range) -> Tensor:
                return each[piece.start : piece.stop]

        _add_use(ctx.source, place.samples, contribute)
        return delta.sum_to_size(shape), None, None, None


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.to(torch.float32)


def _by_rule(
    form: PerSampleRule, x: SampleAxis, out: SampleAxis
) -> Callable[[list[Tensor], Any], None]:
    """Return a callback that records a use, for a function with a rule."""

    def note(deltas: list[Tensor], kept: tuple[Tensor, ...]) -> None:
        delta, inputs = _wide(deltas[0]), kept[0]

        @cache  # once for all parameters of the function
        def both() -> tuple[Tensor, Tensor]:
            full = inputs.to(delta.dtype) if inputs.is_floating_point() else inputs
            if form.prepare is not None:
                full = form.prepare(full)
            return _entries(full, x), _entries(delta, out)

        for name, target in form.targets.items():
            source = _source(target)
            if source is None:
                continue

            def contribute(piece: range, name: str = name) -> Tensor:
                inputs, gradients = both()
                part = slice(piece.start, piece.stop)
                return form.contribute(name, inputs[part], gradients[part])

            def squares(name: str = name) -> Tensor | None:
                return None if form.squares is None else form.squares(name, *both())

            _add_use(source, x.samples, contribute, squares)

    return note


def _entries(t: Tensor, place: SampleAxis) -> Tensor:
    return samples_first(
        t.unsqueeze(0) if place.axis < 0 else t, place._replace(axis=max(place.axis, 0))
    )


def _by_gates(
    how: Recurrence, states: int, weights: Sequence[Source | None], samples_: int
) -> Callable[[list[Tensor], Any], None]:
    """Return a callback that records a use, for a recurrent layer."""

    def note(deltas: list[Tensor], kept: tuple[Tensor, ...]) -> None:
        @cache
        def gates() -> list[Gates]:
            wide = [_wide(d) for d in deltas]
            x, *rest = (t.to(wide[0].dtype) for t in kept)
            return how.gates(x, rest[:states], rest[states:], wide)

        for place, source in enumerate(weights):
            if source is None:
                continue

            def contribute(piece: range, place: int = place) -> Tensor:
                x, delta = (t[:, piece.start : piece.stop] for t in gates()[place])
                if how.is_bias(place):
                    return delta.sum(0)
                return torch.einsum("tso,tsi->soi", delta, x)

            _add_use(source, samples_, contribute)

    return note


def _by_replay(replay: Replay, targets: dict[int, Source], samples_: int) -> Any:
    """Return a callback that records a use, for any other function."""

    def note(deltas: list[Tensor], kept: tuple[Tensor, ...]) -> None:
        wide = [_wide(d) for d in deltas]
        for place, source in targets.items():

            def contribute(piece: range, place: int = place) -> Tensor:
                try:
                    return replay.contribute(place, kept, wide, piece)
                except (RuntimeError, ValueError, IndexError) as error:
                    raise RuntimeError(
                        f"no per-sample moments for parameters of {replay.func.__name__}: it "
                        f"cannot be run again for one sample. {ADVICE}"
                    ) from error

            _add_use(source, samples_, contribute)

    return note


# -- in forward --------------------------------------------------------------------------------


class _Observer(TorchFunctionMode):
    """Observer of each function call while a model runs forward.

    Args:
        module: the module that was called first.
        count: number of samples.
    """

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.module, self.samples, self.depth = module, count, 1
        self.troubles: dict[str, str] = {}
        self.paused: Any = None  # the argument of `dynamo.resume`

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func in OPENED:
            with self:
                return OPENED[func](*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        if not tensors or _transforms():
            return func(*args, **kwargs)
        made, hanging = [], False
        for t in tensors:
            if _source(t) is not None:
                made.append(t)
            elif sample_axis.noted(t) is not None:
                hanging = True
            elif t.requires_grad and not t.is_leaf:  # its origin was not observed
                sample_axis.mark(t, sample_axis.inferred(t, self.samples))
                hanging = True
        if made and torch.is_grad_enabled():
            out = self._meet(func, args, kwargs, made, hanging)
        else:
            out = func(*args, **kwargs)
        if hanging:
            sample_axis.follow(func, args, kwargs, out)
        return out

    def _meet(self, func: Any, args: Any, kwargs: Any, made: list[Tensor], hanging: bool) -> Any:
        """Run a function with parameters, or values computed from them, among its arguments."""
        name = func.__name__
        if not hanging and name not in RECURRENT:
            out = func(*args, **kwargs)
            if name in _EXPANDS and isinstance(out, Tensor) and _source(args[0]) is not None:
                return self._expanded(func, args, kwargs, out)
            for index, result in enumerate(tensors_in(out)):
                if name.endswith("_") and not name.endswith("__") and result is args[0]:
                    if not result.is_leaf:
                        self._cannot(made, func, "it changes in place what is made of parameters")
                elif result.requires_grad and not result.is_leaf:
                    _made.put(result, DerivedParam(func, args, kwargs, index))
            return out
        if name in ELEMENTWISE:
            return self._elementwise(func, args, kwargs, made)
        if func is functional.scaled_dot_product_attention:
            return self._attention(func, args, kwargs, made)
        if name in RECURRENT:
            return self._recurrent(func, args, kwargs)
        rule = RULES.get(func)
        form = None if rule is None else rule(*args, **kwargs)
        if form is not None and all(any(m is t for t in form.targets.values()) for m in made):
            return self._by_rule(func, args, kwargs, form)
        return self._replayed(func, args, kwargs, made)

    def _saw(self, tensors: Sequence[Tensor], handling: str) -> None:
        for t in tensors:
            for p in _behind(_source(t)):
                if p in _records:
                    _records[p].ways[handling] = None

    def _cannot(self, tensors: Sequence[Tensor], func: Any, why: str) -> None:
        for t in tensors:
            for p in _behind(_source(t)):
                record = _records.get(p)
                if record is not None:
                    record.why_not = record.why_not or f"{func.__name__}: {why}"
                    if record.others != "step":
                        self.troubles[f"{record.name} ({record.owner})"] = record.why_not

    def _expanded(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        """Handle a value that is expanded to the number of samples, e.g. a class token."""
        value = args[0]
        shape = (1,) * (out.dim() - value.dim()) + tuple(value.shape)
        axes = [a for a, n in enumerate(out.shape) if shape[a] == 1 and n == self.samples]
        if not axes or (len(axes) > 1 and axes[0] > 0):
            _made.put(out, DerivedParam(func, args, kwargs, 0))
            return out
        place = SampleAxis(self.samples, axes[0])
        wide = (*shape[: place.axis], self.samples, *shape[place.axis + 1 :])
        spread = _Spread.apply(value, torch.Size(wide), place, _source(value))
        self._saw([value], "expanded")
        if func.__name__ in ("repeat", "tile"):
            out = spread.repeat(*(n // m for n, m in zip(out.shape, wide)))
        else:
            out = spread.expand(out.shape)
        sample_axis.mark(out, place)
        return out

    def _elementwise(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Any:
        tensors = list(tensors_in((args, kwargs)))
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        return self._spread(func, args, kwargs, made, shape)

    def _attention(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Any:
        """Handle an attention bias that the samples share, as in T5."""
        query, key = args[0], args[1]
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        if [id(t) for t in made] != [id(mask)]:
            return self._replayed(func, args, kwargs, made)
        return self._spread(func, args, kwargs, made, (*query.shape[:-1], key.shape[-2]))

    def _spread(
        self, func: Any, args: Any, kwargs: Any, made: list[Tensor], shape: Sequence[int]
    ) -> Any:
        """Expand sample-independent arguments, so that each sample has its own gradient."""
        place: SampleAxis | None = None
        for t in tensors_in((args, kwargs)):
            noted = sample_axis.noted(t)  # None for parameters and derived values
            if isinstance(noted, SampleAxis) and noted.samples == 1:
                place = noted
            elif isinstance(noted, SampleAxis) and place is None:
                axis = noted.axis + len(shape) - t.dim()
                if t.shape[noted.axis] == shape[axis]:
                    place = noted._replace(axis=axis)
        if place is None:
            self._cannot(made, func, "no axis counts its samples")
            return func(*args, **kwargs)
        spread = {id(t): _Spread.apply(t, torch.Size(shape), place, _source(t)) for t in made}
        self._saw(made, func.__name__.strip("_"))
        args, kwargs = mapped((args, kwargs), lambda t: spread.get(id(t), t))
        return func(*args, **kwargs)

    def _by_rule(self, func: Any, args: Any, kwargs: Any, form: PerSampleRule) -> Any:
        targets = [t for t in form.targets.values() if _source(t) is not None]
        out = func(*args, **kwargs)
        x = form.inputs
        place: Any = SampleAxis(1, -1)  # one sample without an axis
        out_axis = place
        if x.dim() != form.rank - 1:
            sample_axis.follow(func, args, kwargs, out)
            place, out_axis = sample_axis.noted(x), sample_axis.noted(out)
        if (
            form.why_not
            or not isinstance(place, SampleAxis)
            or not isinstance(out_axis, SampleAxis)
        ):
            self._cannot(targets, func, form.why_not or "no axis counts the samples of its input")
            return out
        self._saw(targets, func.__name__)
        if all(t is form.targets.get("bias") for t in targets):
            x = x.detach().new_zeros(()).expand_as(x)  # not needed, and may be overwritten
        return self._noting(_by_rule(form, place, out_axis), out, [x])

    def _noting(self, note: Any, out: Any, kept: Sequence[Tensor]) -> Any:
        results = [out] if isinstance(out, Tensor) else list(out)
        kept = [t.detach() for t in kept]
        noted = _Noted.apply(note, len(results), *results, *kept)
        for old, new in zip(results, noted):
            axis = sample_axis.noted(old)
            if axis is not None:
                sample_axis.mark(new, axis)
        return noted[0] if isinstance(out, Tensor) else type(out)(noted)

    def _recurrent(self, func: Any, args: Any, kwargs: Any) -> Any:
        how, tensors, why_not = recurrence(func, args, kwargs)
        out = func(*args, **kwargs)
        axis = 0 if how.batch_first else 1
        place = sample_axis.noted(tensors[0])
        if how.batch_sizes is not None:
            count = int(how.batch_sizes[0])
        else:
            count = tensors[0].shape[axis]
            if count not in (1, self.samples) or (
                isinstance(place, SampleAxis) and place.axis != axis and count > 1
            ):
                why_not = why_not or "its batch is not where the model has its samples"
        states = len(tensors) - 1 - len(args[3 if how.batch_sizes is not None else 2])
        weights = tensors[1 + states :]
        made = [w for w in weights if _source(w) is not None]
        for index, result in enumerate(out):
            if index or how.batch_sizes is None:
                sample_axis.mark(result, SampleAxis(count, 1 if index else axis))
            else:
                sample_axis.mark(result, LOST)
        if why_not:
            self._cannot(made, func, why_not)
            return out
        self._saw(made, func.__name__)
        note = _by_gates(how, states, [_source(w) for w in weights], count)
        return self._noting(note, out, tensors)

    def _replayed(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Any:
        tensors: list[Tensor] = []

        def keep(t: Tensor) -> int:
            tensors.append(t)
            return len(tensors) - 1

        fill = _filling(args, kwargs, keep)
        places: list[Any] = [sample_axis.noted(t) for t in tensors]  # None if derived
        out = func(*args, **kwargs)
        sample_axis.follow(func, args, kwargs, out)
        results = [t for t in tensors_in(out) if t.requires_grad]
        result_axes: list[Any] = [sample_axis.noted(t) for t in results]
        counted = [p for p in (*places, *result_axes) if p is not None]
        if (
            func.__name__.endswith("_")
            or not all(isinstance(p, SampleAxis) for p in counted)
            or len({p.samples for p in counted if isinstance(p, SampleAxis)}) != 1
            or len(result_axes) != len(list(tensors_in(out)))
        ):
            self._cannot(made, func, "it has no rule, and no axis counts the samples")
            return out
        replay = Replay(func, fill, places, result_axes)
        targets = {i: _source(t) for i, t in enumerate(tensors) if any(t is m for m in made)}
        self._saw(made, func.__name__)
        return self._noting(_by_replay(replay, targets, self.samples), out, tensors)


# -- tracking ----------------------------------------------------------------------------------


class MomentTracker:
    """Handle of the hooks on one model, and a context manager; `remove()` removes the hooks.

    `str()` returns the table of `describe`.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        parameters: Mapping[str, nn.Parameter],
        owners: Mapping[nn.Parameter, str],
    ) -> None:
        self._handles = list(handles)
        self._parameters, self._owners = dict(parameters), dict(owners)

    def remove(self) -> None:
        """Remove the hooks, and drop accumulated moments."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters.values():
            record = _records.pop(parameter, None)
            if record is not None and record.hook is not None:
                record.hook.remove()
            _frozen.pop(parameter, None)
            _dense.pop(parameter, None)
        self._handles, self._parameters = [], {}

    def describe(self) -> str:
        """Return a table of each parameter's shape, module, and how its moments are found.

        The last is known once the model has used the parameter with gradients enabled.
        """
        return tracked(
            (name, tuple(p.shape), self._owners[p], how(p)) for name, p in self._parameters.items()
        )

    def __str__(self) -> str:
        return self.describe()

    def __enter__(self) -> MomentTracker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def track_moments(model: nn.Module, *, chunk: int = 16, others: str = "error") -> MomentTracker:
    """Compute per-sample second moments of every trainable parameter from now on.

    Call it before `DistributedOptimizer`, which then finds them (`moments="auto"` or "sample").
    Parameters that are unfrozen later, by `requires_grad_(True)`, are tracked from then on. For
    supported models and the cost, see the head of `hvd_gradcomp.torch.moments.tracker`.

    Args:
        model: its parameters are tracked. The first axis of its first input tensor counts samples.
        chunk: samples whose gradients are computed at a time; more is faster and takes more memory.
        others: policy for parameters whose samples cannot be told apart (dropout inside an LSTM,
            rows gathered from several samples). "error": an error that names all of them: here, if
            the module tells, otherwise at the end of the forward pass that shows it. "step": the
            step counts as one sample for them, `q = g*g`. "dense": unsupported modules are sent
            without compression; cases that only a forward pass shows are an error.

    Raises:
        TypeError: with `others="error"`, naming every unsupported module with trainable parameters.
        ValueError: the model is tracked already; `chunk` is not positive; `others` is unknown; a
            module has parameters that are not initialised.
        RuntimeError: PyTorch is older than 2.4.
    """
    if torch.__version__ < (2, 4):
        raise RuntimeError(
            f"track_moments needs PyTorch 2.4, this is {torch.__version__}: it does not show what "
            "a model indexes (x[:, 0]), so moments would be wrong. Update PyTorch, or take "
            "moments='microbatch' or moments='step' instead of track_moments"
        )
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if others not in OTHERS:
        raise ValueError(f"others {validate.not_among(others, OTHERS)}")
    parameters: dict[str, nn.Parameter] = {}
    unknown: dict[str, str] = {}  # modules, and why
    apart: dict[nn.Parameter, str] = {}
    modules = [
        (name.replace("_orig_mod.", ""), module)
        for name, module in model.named_modules()
        if not hasattr(module, "_orig_mod")  # torch.compile's wrapper
    ]
    for name, module in modules:
        direct = list(module.named_parameters(recurse=False))
        why_not = _no_way(module) if direct else ""
        if why_not and any(p.requires_grad for _, p in direct):
            unknown[f"{name or 'the model itself'} ({type(module).__name__})"] = why_not
        for n, p in direct:
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise ValueError(
                    f"{name}.{n} is not initialised yet: call the model once before track_moments"
                )
            if p in _records or p in _dense:
                raise ValueError(
                    "this model is tracked already; call remove() on its tracker first"
                )
            if why_not:
                apart[p] = why_not
            if all(p is not other for other in parameters.values()):
                parameters[f"{name}.{n}".lstrip(".")] = p
    if unknown and others == "error":
        listed = ", ".join(f"{name}: {why}" for name, why in unknown.items())
        raise TypeError(f"no per-sample moments for {listed}. {ADVICE}")
    owners = {
        p: type(m).__name__ for _, m in reversed(modules) for p in m.parameters(recurse=False)
    }
    for name, p in parameters.items():
        record = _Record(name, owners[p], chunk, others, why_not=apart.get(p, ""))
        if others == "dense" and p in apart:
            _dense[p] = record
        else:
            _records[p] = record
        if not p.requires_grad:
            _frozen[p] = record
        elif p in _records:
            _hook(p, record)
    handles: list[Any] = []
    for _, module in modules:
        handles.append(module.register_forward_pre_hook(_enter, with_kwargs=True))
        handles.append(module.register_forward_hook(_leave, always_call=True))
    return MomentTracker(handles, parameters, owners)


def _no_way(module: nn.Module) -> str:
    """Return the reason why a module cannot have per-sample moments, or "" if none is known."""
    if getattr(module, "scale_grad_by_freq", False):
        return "scale_grad_by_freq counts in the whole batch"
    if isinstance(module, nn.SyncBatchNorm):
        return "its own autograd.Function hides what samples contribute"
    if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
        return "its dropout cannot be drawn again"
    if isinstance(module, torch.jit.ScriptModule):
        return "a script cannot be looked into"
    return ""


def is_tracked(parameter: nn.Parameter) -> bool:
    """Return True if `track_moments` tracks this parameter, and it is trainable."""
    return parameter.requires_grad and parameter in _records


def is_sent_dense(parameter: nn.Parameter) -> bool:
    """Return True if `track_moments(..., others="dense")` excludes it from compression."""
    return parameter in _dense


def how(parameter: nn.Parameter) -> str:
    """Describe how a parameter's moments are found, as far as known; for tables."""
    if parameter in _dense:
        return f"none, sent dense: {_dense[parameter].why_not}"
    record = _records.get(parameter)
    if record is None:
        return "not tracked"
    if not parameter.requires_grad:
        return "frozen"
    if record.why_not:
        return f"of the step: {record.why_not}"
    return f"per sample: {', '.join(record.ways)}" if record.ways else "not used yet"


def take(parameter: nn.Parameter, gradient: Tensor | None = None) -> Tensor | Step | None:
    """Return and reset the moment since the last `take`, float32 in the parameter's shape.

    `STEP` if the step has to count as one sample. None if the parameter is not tracked or nothing
    contributed to it.

    Args:
        gradient: the gradient that the moment belongs to; lets `take` detect one set by hand.

    Raises:
        RuntimeError: there is a gradient, but no use of the parameter in the model's forward.
    """
    record = _records.get(parameter)
    if record is None:
        return None
    moment, bypassed = record.moment, record.bypassed
    record.moment, record.bypassed = None, False
    if moment is None and gradient is not None:
        bypassed |= bool(gradient.norm() > 0)  # set by hand
    if record.others == "step" and (record.why_not or (bypassed and moment is None)):
        return STEP
    if moment is not None:
        return moment.to(torch.float32)
    if bypassed:
        raise RuntimeError(
            f"{record.name} ({record.owner}) has a gradient, but nothing was seen of how the model "
            f"uses it, so there are no per-sample moments. {_WHERE_UNSEEN}. {ADVICE}"
        )
    return None


def supply(parameter: nn.Parameter, moment: Tensor) -> None:
    """Set the result of the next `take`, for a parameter without a model; for measurements."""
    if parameter not in _records:
        _records[parameter] = _Record("", "", 0, "error")
    _records[parameter].moment = moment


def discard(parameter: nn.Parameter) -> None:
    """Drop the accumulated moment, as `zero_grad` drops the gradient."""
    record = _records.get(parameter)
    if record is not None:
        record.moment, record.bypassed = None, False
        record.uses.clear()


# -- hooks -------------------------------------------------------------------------------------


@dynamo.outside(_EAGER)
def _enter(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Start to observe, at the outermost module call."""
    paused = dynamo.pause()  # compiled code cannot be observed
    try:
        begun = _begin(module, args, kwargs)
    except Exception:
        dynamo.resume(paused)
        raise
    if not begun:
        dynamo.resume(paused)
        return
    _running.observer.paused = paused
    if paused and not _running.__dict__.setdefault("warned", False):
        _running.warned = True
        LOGGER.warning(_EAGER)


def _begin(module: nn.Module, args: Any, kwargs: Any) -> bool:
    observer: _Observer | None = getattr(_running, "observer", None)
    if observer is not None and observer.module is module:
        observer.depth += 1  # it calls itself
    if observer is not None or not torch.is_grad_enabled():
        return False
    for parameter in list(_frozen):
        if parameter.requires_grad:
            _hook(parameter, _frozen.pop(parameter))
    inputs = [t for t in tensors_in((args, kwargs)) if _source(t) is None]
    first = next((t for t in inputs if t.dim()), None)
    before = None if first is None else sample_axis.noted(first)
    count = 1 if first is None else first.shape[0]
    count = before.samples if isinstance(before, SampleAxis) else count
    if count == 0:  # an empty batch has no samples whose squares would count
        return False
    for t in inputs:
        axis = sample_axis.noted(t)
        if isinstance(axis, SampleAxis) and axis.samples == count:
            continue
        if count == 1 or (t.dim() and t.shape[0] == count):
            sample_axis.mark(t, SampleAxis(count, 0))
        elif axis is not None:
            sample_axis.mark(t, LOST)
    _running.observer = _Observer(module, count)
    _running.observer.__enter__()
    return True


@dynamo.outside(_EAGER)
def _leave(module: nn.Module, args: Any, output: Any) -> None:
    del args, output
    observer: _Observer | None = getattr(_running, "observer", None)
    if observer is None or observer.module is not module:
        return
    observer.depth -= 1
    if observer.depth:
        return
    _running.observer = None
    observer.__exit__(None, None, None)
    dynamo.resume(observer.paused)
    if observer.troubles:
        listed = ", ".join(f"{name}: {why}" for name, why in observer.troubles.items())
        raise RuntimeError(f"no per-sample moments for {listed}. {ADVICE}")


def _hook(parameter: nn.Parameter, record: _Record) -> None:
    """Register the hook that squares uses once a pass has accumulated the whole gradient."""
    record.hook = parameter.register_post_accumulate_grad_hook(_flush)


@torch.no_grad()
def _flush(parameter: Any) -> None:
    record = _records.get(parameter)
    if record is None:
        return
    task = _task()  # drop uses that other passes have left, such as `autograd.grad`
    uses, record.uses = [use for use in record.uses if use.task == task], []
    if not uses:
        # Ignore a zero gradient, as from `0 * p.sum()` for an unused parameter.
        record.bypassed |= bool(parameter.grad.norm() != 0)
        return
    if record.others == "step" and record.why_not:
        return
    with torch.autocast(parameter.device.type, enabled=False):
        moment = _sum_of_squares(record, uses)
    record.moment = moment if record.moment is None else record.moment + moment


def _sum_of_squares(record: _Record, uses: Sequence[ParamUse]) -> Tensor:
    counts = {use.samples for use in uses}
    if len(counts) > 1:
        raise ValueError(
            f"{record.name} ({record.owner}) is shared between inputs of {sorted(counts)} samples; "
            f"the first axis must count the same samples everywhere. {ADVICE}"
        )
    if len(uses) == 1 and uses[0].squares is not None:
        squares = uses[0].squares()
        if squares is not None:
            return squares
    total: Tensor | None = None
    count = counts.pop()
    for start in range(0, count, record.chunk):
        piece = range(start, min(start + record.chunk, count))
        gradient: Tensor | None = None
        for use in uses:
            part = use.contribute(piece)
            gradient = part if gradient is None else gradient + part
        assert gradient is not None
        squares = gradient.square().sum(0)
        total = squares if total is None else total + squares
    assert total is not None
    return total
