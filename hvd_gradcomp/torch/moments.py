"""Second moments over samples, computed by module hooks while backward runs.

For a parameter `p` and a batch of samples `z`,

    q = sum over z of c_z**2,    c_z = what sample z contributes to p.grad,

the sum that Algorithm 1 of Tsuzuku et al. 2018 accumulates next to the gradient. With a loss that
is a mean over the batch, `c_z = grad_z / B`, as there; the output gradient that a hook sees already
carries the factor, so no batch size has to be known. The first axis of a module's input counts the
samples.

How. A forward hook passes the module's output through an identity. When the output's gradient
`delta` arrives there in backward, (module, input, delta) is noted as a *use* of the module's
parameters. A tensor hook would not do: where the output is a view (Linear on more than two axes),
an in-place activation after it takes the hook's node out of the graph. When a parameter's
gradient has been accumulated, its uses in this backward pass are complete: per-sample gradients of
all uses are added before they are squared, so shared modules and tied weights are exact. Samples of
further passes are further samples: moments add. A forward without backward leaves nothing behind.
What reaches a parameter around its module (`functional.linear(x, layer.weight)`, a penalty on the
weight) belongs to no sample and is left out; a parameter that nothing else has reached is an error.

Cost. A Linear on [batch, features] costs one GEMM more, `(delta**2)^T (x**2)`, about a third of its
backward. Everything else forms the gradients of `chunk` samples at a time: about as many
multiplications as the weight's own gradient, and memory for `chunk` times the parameter (for a
convolution also its unfolded input).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

PerSample = Callable[[Any, Tensor, Tensor], dict[str, Tensor]]


class Rule(NamedTuple):
    """How one kind of module contributes.

    `per_sample(module, x, delta)` gives [samples, *shape] for "weight" and "bias"; `squares`, where
    there is a shorter way for a module that is used once, the sum of squares or None.
    """

    dims: int | None  # of a batched input; None if any number will do
    per_sample: PerSample
    squares: Callable[[Any, str, Tensor, Tensor], Tensor | None] | None = None


class Use(NamedTuple):
    """One application of a module in the forward pass, with the gradient of its output."""

    module: nn.Module
    name: str  # of the parameter within the module
    x: Tensor
    delta: Tensor


@dataclass
class _Record:
    name: str
    chunk: int
    uses: list[Use] = field(default_factory=list)
    moment: Tensor | None = None
    bypassed: bool = False  # a gradient came that no use explains


_records: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


# -- rules -------------------------------------------------------------------------------------


def _linear(module: nn.Linear, x: Tensor, delta: Tensor) -> dict[str, Tensor]:
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    delta = delta.reshape(delta.shape[0], -1, delta.shape[-1])
    return {"weight": torch.bmm(delta.transpose(1, 2), x), "bias": delta.sum(1)}


def _linear_squares(module: nn.Linear, name: str, x: Tensor, delta: Tensor) -> Tensor | None:
    if x.dim() != 2:
        return None
    return delta.square().T @ x.square() if name == "weight" else delta.square().sum(0)


def _convolution(module: Any, x: Tensor, delta: Tensor) -> dict[str, Tensor]:
    """Patches of the padded input, times the output gradient, summed over places."""
    samples, groups = x.shape[0], module.groups
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = functional.pad(x, module._reversed_padding_repeated_twice, mode=mode).contiguous()
    places = delta.shape[2:]
    outer, inner = x.stride()[:2], x.stride()[2:]
    patches = x.as_strided(
        (samples, x.shape[1], *module.kernel_size, *places),
        (
            *outer,
            *(s * d for s, d in zip(inner, module.dilation)),
            *(s * d for s, d in zip(inner, module.stride)),
        ),
    )
    patches = patches.reshape(samples * groups, -1, places.numel())
    delta = delta.reshape(samples, groups, -1, places.numel())
    weight = torch.bmm(delta.flatten(0, 1), patches.transpose(1, 2))
    return {
        "weight": weight.reshape(samples, *module.weight.shape),
        "bias": delta.sum(-1).reshape(samples, -1),
    }


def _embedding(module: nn.Embedding, x: Tensor, delta: Tensor) -> dict[str, Tensor]:
    rows, values, _ = _embedding_rows(module, x, delta)
    weight = values.new_zeros(x.shape[0] * module.num_embeddings, module.embedding_dim)
    weight.index_add_(0, rows, values)
    return {"weight": weight.reshape(x.shape[0], *module.weight.shape)}


def _embedding_squares(module: nn.Embedding, name: str, x: Tensor, delta: Tensor) -> Tensor:
    """Adds up what each sample gives to each row, by sorting; never [samples, *weight]."""
    rows, values, _ = _embedding_rows(module, x, delta)
    order = torch.argsort(rows)
    rows, values = rows[order], values[order]
    run = torch.cumsum(functional.pad((rows[1:] != rows[:-1]).long(), (1, 0)), 0)
    total = torch.zeros_like(values).index_add_(0, run, values)
    row = torch.zeros_like(rows).index_put_((run,), rows % module.num_embeddings)
    squares = values.new_zeros(module.weight.shape)
    return squares.index_add_(0, row, total.square())


def _embedding_rows(
    module: nn.Embedding, x: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Row `sample * num_embeddings + token` and gradient of each token; padding has none."""
    samples = x.shape[0]
    token = x.reshape(samples, -1)
    sample = torch.arange(samples, device=x.device).reshape(-1, 1)
    values = delta.reshape(-1, module.embedding_dim)
    if module.padding_idx is not None:
        values = values * (token.reshape(-1, 1) != module.padding_idx)
    return (sample * module.num_embeddings + token).reshape(-1), values, token


def _layer_norm(module: nn.LayerNorm, x: Tensor, delta: Tensor) -> dict[str, Tensor]:
    shape = module.normalized_shape
    x = functional.layer_norm(x, shape, eps=module.eps)
    x, delta = (t.reshape(x.shape[0], -1, *shape) for t in (x, delta))
    return {"weight": (delta * x).sum(1), "bias": delta.sum(1)}


def _group_norm(module: nn.GroupNorm, x: Tensor, delta: Tensor) -> dict[str, Tensor]:
    return _per_channel(functional.group_norm(x, module.num_groups, eps=module.eps), delta)


def _batch_norm(module: Any, x: Tensor, delta: Tensor) -> dict[str, Tensor]:
    """The statistics count as constants: the contribution as the layer sees it."""
    return _per_channel(x, delta)  # `_inputs` has normalised x with the whole batch


def _per_channel(normalised: Tensor, delta: Tensor) -> dict[str, Tensor]:
    x, delta = (t.reshape(*t.shape[:2], -1) for t in (normalised, delta))
    return {"weight": (delta * x).sum(-1), "bias": delta.sum(-1)}


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: Rule(None, _linear, _linear_squares),
    nn.Conv1d: Rule(3, _convolution),
    nn.Conv2d: Rule(4, _convolution),
    nn.Conv3d: Rule(5, _convolution),
    nn.Embedding: Rule(None, _embedding, _embedding_squares),
    nn.LayerNorm: Rule(None, _layer_norm),
    nn.GroupNorm: Rule(None, _group_norm),
    nn.BatchNorm1d: Rule(None, _batch_norm),
    nn.BatchNorm2d: Rule(None, _batch_norm),
    nn.BatchNorm3d: Rule(None, _batch_norm),
}


def _rule(module: nn.Module) -> Rule | None:
    """The rule of a module whose forward is the one that the rule was written for."""
    for base in type(module).__mro__:
        if base in RULES:
            return RULES[base] if type(module).forward is base.forward else None
    return None


def _inputs(module: nn.Module, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Input and output gradient as the rule wants them: with a sample axis, in full precision."""
    rule = _rule(module)
    unbatched = rule is not None and rule.dims is not None and x.dim() == rule.dims - 1
    if isinstance(module, nn.Linear):
        unbatched = x.dim() == 1
    elif isinstance(module, nn.Embedding):
        unbatched = x.dim() == 0
    elif isinstance(module, nn.LayerNorm):
        unbatched = x.dim() == len(module.normalized_shape)
    if unbatched:
        x, delta = x.unsqueeze(0), delta.unsqueeze(0)
    wide = torch.float64 if delta.dtype == torch.float64 else torch.float32
    if x.is_floating_point():
        x = x.to(wide)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        batch = module.training or module.running_mean is None
        mean = None if batch else module.running_mean.to(wide)
        variance = None if batch else module.running_var.to(wide)
        x = functional.batch_norm(x, mean, variance, training=batch, eps=module.eps)
    return x, delta.to(wide)


# -- tracking ----------------------------------------------------------------------------------


class MomentTracker:
    """The hooks on one model; a context manager, `remove()` takes them off."""

    def __init__(self, handles: Sequence[Any], parameters: Sequence[nn.Parameter]) -> None:
        self._handles = list(handles)
        self._parameters = list(parameters)

    def remove(self) -> None:
        """Takes the hooks off; what was accumulated is dropped."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            _records.pop(parameter, None)
        self._handles, self._parameters = [], []

    def __enter__(self) -> MomentTracker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def track_moments(model: nn.Module, *, chunk: int = 16) -> MomentTracker:
    """Computes per-sample second moments of every trainable parameter from now on.

    Call it before `DistributedOptimizer`, which then finds them (`moments="auto"` or "sample").
    Modules: Linear (with any axes between samples and features), Conv1d to Conv3d, Embedding,
    LayerNorm, GroupNorm, BatchNorm1d to 3d. Cost: see the head of `hvd_gradcomp.torch.moments`.

    Args:
        model: its parameters that require a gradient are tracked.
        chunk: samples whose gradients are formed at a time; more is faster and takes more memory.

    Raises:
        TypeError: naming every module that has trainable parameters and no rule.
        ValueError: the model is tracked already, or `chunk` is not positive.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    handles: list[Any] = []
    owners: list[nn.Module] = []
    parameters: dict[nn.Parameter, str] = {}
    unsupported = []
    for name, module in model.named_modules():
        own = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
        if not own:
            continue
        ruled = _rule(module) is not None and own.keys() <= {"weight", "bias"}
        if not ruled or getattr(module, "scale_grad_by_freq", False):
            unsupported.append(f"{name or 'the model itself'} ({type(module).__name__})")
            continue
        owners.append(module)
        for n, p in own.items():
            parameters.setdefault(p, f"{name}.{n} ({type(module).__name__})".lstrip("."))
    if unsupported:
        raise TypeError(
            "no per-sample moments for: " + ", ".join(unsupported) + ". Replace these modules, "
            "freeze their parameters, or use moments='microbatch' or moments='step'"
        )
    if any(p in _records for p in parameters):
        raise ValueError("this model is tracked already; call remove() on its tracker first")
    for parameter, name in parameters.items():
        _records[parameter] = _Record(name, chunk)
        handles.append(_on_gradient(parameter))
    handles += [module.register_forward_hook(_watch) for module in owners]
    return MomentTracker(handles, list(parameters))


def is_tracked(parameter: nn.Parameter) -> bool:
    """Whether `track_moments` covers this parameter."""
    return parameter in _records


def take(parameter: nn.Parameter) -> Tensor | None:
    """The moment since the last `take`, float32 in the parameter's shape, and forgets it.

    None if the parameter is not tracked or nothing contributed to it.

    Raises:
        RuntimeError: a gradient came, but none of it through the forward of the parameter's module.
    """
    record = _records.get(parameter)
    if record is None:
        return None
    moment, bypassed = record.moment, record.bypassed
    record.moment, record.bypassed = None, False
    if moment is not None:
        return moment.to(torch.float32)
    if bypassed:
        raise RuntimeError(
            f"{record.name} has a gradient, but its module was not called, so there are no "
            "per-sample moments. Call the module instead of using its parameter directly, or use "
            "moments='microbatch' or moments='step'"
        )
    return None


def discard(parameter: nn.Parameter) -> None:
    """Forgets what was accumulated, as `zero_grad` does with the gradient."""
    record = _records.get(parameter)
    if record is not None:
        record.moment, record.bypassed = None, False
        record.uses.clear()


class _Noted(torch.autograd.Function):
    """A module's output as it is, without a copy; in backward, a use of its parameters."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return output.detach()  # no view to autograd, so that it may be overwritten

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        for name, parameter in ctx.module.named_parameters(recurse=False):
            record = _records.get(parameter)
            if record is not None and parameter.requires_grad:
                record.uses.append(Use(ctx.module, name, x, delta.detach()))
        return delta, None, None


def _watch(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    if not torch.is_grad_enabled() or not output.requires_grad:
        return output
    x = inputs[0].detach()
    if not module.weight.requires_grad:
        x = x.new_zeros(()).expand_as(x)  # a bias needs no values, and they may be overwritten
    return _Noted.apply(output, x, module)


@torch.no_grad()
def _on_gradient(parameter: nn.Parameter) -> Any:
    """Sees to it that uses are squared once a pass has given the whole gradient."""
    if hasattr(parameter, "register_post_accumulate_grad_hook"):  # from PyTorch 2.1 on
        return parameter.register_post_accumulate_grad_hook(lambda p: _flush(p, p.grad))
    there = weakref.ref(parameter)  # the hook belongs to the parameter and may not keep it
    return parameter.register_hook(lambda gradient: _flush(there(), gradient))


def _flush(parameter: Any, gradient: Tensor) -> None:
    record = _records.get(parameter)
    if record is None:
        return
    if not record.uses:
        # Zero is what `0 * p.sum()` gives, which reaches a parameter that is not used.
        record.bypassed |= bool(gradient.norm() != 0)
        return
    uses, record.uses = record.uses, []
    with torch.autocast(parameter.device.type, enabled=False):
        moment = _sum_of_squares(uses, record.chunk)
    record.moment = moment if record.moment is None else record.moment + moment


def _sum_of_squares(uses: Sequence[Use], chunk: int) -> Tensor:
    inputs = [_inputs(use.module, use.x, use.delta) for use in uses]
    samples = {x.shape[0] for x, _ in inputs}
    if len(samples) > 1:
        raise ValueError(
            f"{uses[0].name} of {type(uses[0].module).__name__} is shared between inputs of "
            f"{sorted(samples)} samples; the first axis must count the same samples everywhere. "
            "Use moments='microbatch' or moments='step'"
        )
    if len(uses) == 1:
        rule = _rule(uses[0].module)
        if rule is not None and rule.squares is not None:
            squares = rule.squares(uses[0].module, uses[0].name, *inputs[0])
            if squares is not None:
                return squares
    total: Tensor | None = None
    for start in range(0, samples.pop(), chunk):
        piece = slice(start, start + chunk)
        gradient = _contribution(uses, inputs, piece)
        squares = gradient.square().sum(0)
        total = squares if total is None else total + squares
    assert total is not None
    return total


def _contribution(
    uses: Sequence[Use], inputs: Sequence[tuple[Tensor, Tensor]], piece: slice
) -> Tensor:
    """What each sample of the piece contributes over all uses: [samples, *shape]."""
    gradient: Tensor | None = None
    for use, (x, delta) in zip(uses, inputs):
        rule = _rule(use.module)
        assert rule is not None
        part = rule.per_sample(use.module, x[piece], delta[piece])[use.name]
        gradient = part if gradient is None else gradient + part
    assert gradient is not None
    return gradient
