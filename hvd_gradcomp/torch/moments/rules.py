"""Per-sample gradients of the parameters of PyTorch's functions, one rule for each function.

A rule takes a function's arguments and returns a `PerSampleRule`, which computes contributions from
the input and the gradient of the output. Both have shape [samples, k, ...]: the k entries of a
sample along the sample axis, then the other axes. A function without a rule is run again for each
sample; see `Replay`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hvd_gradcomp.torch.moments.sample_axis import SampleAxis, samples_first, tensors_in


class PerSampleRule(NamedTuple):
    """Rule for the per-sample gradients of one function call.

    Attributes:
        inputs: the input, kept until backward.
        targets: the parameters, by the rule's names for them.
        rank: minimal number of axes of an input with a sample axis; with one less it is one sample.
        contribute: (name, x, delta) to the [samples, *shape] gradients of that target.
        squares: a faster sum of their squares; it returns None where it does not apply.
        prepare: maps the whole input, in full precision, to the `x` of `contribute`.
        why_not: the reason if there can be no per-sample gradients, else "".
    """

    inputs: Tensor
    targets: dict[str, Tensor]
    rank: int
    contribute: Callable[[str, Tensor, Tensor], Tensor]
    squares: Callable[[str, Tensor, Tensor], Tensor | None] | None = None
    prepare: Callable[[Tensor], Tensor] | None = None
    why_not: str = ""


def _named(**targets: Tensor | None) -> dict[str, Tensor]:
    return {name: t for name, t in targets.items() if t is not None}


# -- products ----------------------------------------------------------------------------------


def _features(t: Tensor) -> Tensor:
    """Reshape to [samples, places, features]."""
    return t.reshape(t.shape[0], -1, t.shape[-1])


def _product(name: str, x: Tensor, delta: Tensor) -> Tensor:
    delta = _features(delta)
    if name == "bias":
        return delta.sum(1)
    x = _features(x)
    if name == "transposed":
        return torch.bmm(x.transpose(1, 2), delta)
    return torch.bmm(delta.transpose(1, 2), x)


def _product_squares(name: str, x: Tensor, delta: Tensor) -> Tensor | None:
    """Return the product of the squares, exact if each sample has one place; else None."""
    x, delta = _features(x), _features(delta)
    if x.shape[1] != 1:
        return None
    x, delta = x[:, 0].square(), delta[:, 0].square()
    if name == "bias":
        return delta.sum(0)
    return x.T @ delta if name == "transposed" else delta.T @ x


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> PerSampleRule:
    return PerSampleRule(input, _named(weight=weight, bias=bias), 2, _product, _product_squares)


def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> PerSampleRule | None:
    """Handle GPT-2's `Conv1D`: the bias comes first, and the weight is transposed."""
    if beta != 1 or alpha != 1 or input.dim() != 1:
        return None
    return PerSampleRule(mat1, _named(transposed=mat2, bias=input), 2, _product, _product_squares)


def _matmul(input: Tensor, other: Tensor) -> PerSampleRule | None:
    if input.dim() < 2 or other.dim() != 2:
        return None
    return PerSampleRule(input, _named(transposed=other), 2, _product, _product_squares)


# -- convolutions ------------------------------------------------------------------------------


def _tuple(value: Any, axes: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values if len(values) == axes else values * axes


def _over_entries(
    of_entry: Callable[[str, Tensor, Tensor], Tensor],
) -> Callable[[str, Tensor, Tensor], Tensor]:
    """Adapt a rule for a single batch axis: apply it to each entry, then sum a sample's entries."""

    def contribute(name: str, x: Tensor, delta: Tensor) -> Tensor:
        samples, entries = x.shape[:2]
        each = of_entry(name, x.flatten(0, 1), delta.flatten(0, 1))
        return each if entries == 1 else each.unflatten(0, (samples, entries)).sum(1)

    return contribute


def _patches(x: Tensor, kernel: Any, stride: Any, dilation: Any, places: Sequence[int]) -> Tensor:
    """Return the patches of `x` as a view, [samples, channels, *kernel, *places]."""
    x = x.contiguous()
    outer, inner = x.stride()[:2], x.stride()[2:]
    return x.as_strided(
        (*x.shape[:2], *kernel, *places),
        (
            *outer,
            *(s * d for s, d in zip(inner, dilation)),
            *(s * d for s, d in zip(inner, stride)),
        ),
    )


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> PerSampleRule:
    """Multiply patches of the padded input by the output gradient, summed over places."""
    axes, shape = weight.dim() - 2, weight.shape
    kernel = shape[2:]
    stride, dilation = _tuple(stride, axes), _tuple(dilation, axes)
    if padding == "same":
        needed = [d * (k - 1) for d, k in zip(dilation, kernel)]
        sides = [(n // 2, n - n // 2) for n in needed]
    else:
        sides = [(p, p) for p in _tuple(0 if padding == "valid" else padding, axes)]

    def of_entry(name: str, x: Tensor, delta: Tensor) -> Tensor:
        if name == "bias":
            return delta.flatten(2).sum(2)
        samples, places = x.shape[0], delta.shape[2:]
        x = functional.pad(x, [n for pair in reversed(sides) for n in pair])
        patches = _patches(x, kernel, stride, dilation, places)
        patches = patches.reshape(samples * groups, -1, places.numel())
        delta = delta.reshape(samples * groups, -1, places.numel())
        return torch.bmm(delta, patches.transpose(1, 2)).reshape(samples, *shape)

    targets = _named(weight=weight, bias=bias)
    return PerSampleRule(input, targets, axes + 2, _over_entries(of_entry))


def _transposed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> PerSampleRule:
    """Swap the roles of input and output gradient of a convolution."""
    del output_padding  # delta is as large as it made the output
    axes, shape = weight.dim() - 2, weight.shape
    stride, dilation = _tuple(stride, axes), _tuple(dilation, axes)
    sides = [(p, p) for p in _tuple(padding, axes)]

    def of_entry(name: str, x: Tensor, delta: Tensor) -> Tensor:
        if name == "bias":
            return delta.flatten(2).sum(2)
        samples, places = x.shape[0], x.shape[2:]
        delta = functional.pad(delta, [n for pair in reversed(sides) for n in pair])
        patches = _patches(delta, shape[2:], stride, dilation, places)
        patches = patches.reshape(samples * groups, -1, places.numel())
        x = x.reshape(samples * groups, -1, places.numel())
        return torch.bmm(x, patches.transpose(1, 2)).reshape(samples, *shape)

    targets = _named(weight=weight, bias=bias)
    return PerSampleRule(input, targets, axes + 2, _over_entries(of_entry))


# -- tables ------------------------------------------------------------------------------------


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> PerSampleRule:
    del max_norm, norm_type, sparse
    rows, width = weight.shape
    if padding_idx is not None:
        padding_idx %= rows

    def entries(x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return row `sample * rows + token` and gradient of each token; zero for padding."""
        token = x.reshape(x.shape[0], -1)
        sample = torch.arange(x.shape[0], device=x.device).reshape(-1, 1)
        values = delta.reshape(-1, width)
        if padding_idx is not None:
            values = values * (token.reshape(-1, 1) != padding_idx)
        return (sample * rows + token).reshape(-1), values

    def contribute(name: str, x: Tensor, delta: Tensor) -> Tensor:
        del name
        places, values = entries(x, delta)
        total = values.new_zeros(x.shape[0] * rows, width)
        return total.index_add_(0, places, values).reshape(x.shape[0], rows, width)

    def squares(name: str, x: Tensor, delta: Tensor) -> Tensor:
        """Sum each sample's gradient of each row by sorting; no [samples, *weight] tensor."""
        del name
        places, values = entries(x, delta)
        order = torch.argsort(places)
        places, values = places[order], values[order]
        run = torch.cumsum(functional.pad((places[1:] != places[:-1]).long(), (1, 0)), 0)
        total = torch.zeros_like(values).index_add_(0, run, values)
        row = torch.zeros_like(places).index_put_((run,), places % rows)
        return values.new_zeros(rows, width).index_add_(0, row, total.square())

    why_not = "scale_grad_by_freq counts in the whole batch" if scale_grad_by_freq else ""
    return PerSampleRule(input, {"weight": weight}, 1, contribute, squares, why_not=why_not)


# -- normalisation -----------------------------------------------------------------------------


def _of_last_axes(
    input: Tensor, shape: Sequence[int], targets: dict[str, Tensor], prepare: Any
) -> PerSampleRule:
    def contribute(name: str, x: Tensor, delta: Tensor) -> Tensor:
        delta = delta.reshape(delta.shape[0], -1, *shape)
        return (delta if name == "bias" else delta * x.reshape(delta.shape)).sum(1)

    return PerSampleRule(input, targets, len(shape) + 1, contribute, prepare=prepare)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> PerSampleRule:
    del cudnn_enable
    shape = tuple(normalized_shape)
    prepare = lambda x: functional.layer_norm(x, shape, eps=eps)  # noqa: E731
    return _of_last_axes(input, shape, _named(weight=weight, bias=bias), prepare)


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> PerSampleRule:
    shape = tuple(normalized_shape)
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    prepare = lambda x: functional.rms_norm(x, shape, eps=eps)  # noqa: E731
    return _of_last_axes(input, shape, _named(weight=weight), prepare)


@_over_entries
def _per_channel(name: str, x: Tensor, delta: Tensor) -> Tensor:
    delta = delta.reshape(*delta.shape[:2], -1)
    return (delta if name == "bias" else delta * x.reshape(delta.shape)).sum(-1)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> PerSampleRule:
    del cudnn_enabled
    prepare = lambda x: functional.group_norm(x, num_groups, eps=eps)  # noqa: E731
    return PerSampleRule(input, _named(weight=weight, bias=bias), 2, _per_channel, prepare=prepare)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> PerSampleRule:
    """Treat the batch statistics as constants: contributions as the layer sees them."""
    del momentum

    def prepare(x: Tensor) -> Tensor:
        if training:
            return functional.batch_norm(x, None, None, training=True, eps=eps)
        assert running_mean is not None and running_var is not None
        mean, variance = running_mean.to(x.dtype), running_var.to(x.dtype)
        return functional.batch_norm(x, mean, variance, eps=eps)

    return PerSampleRule(input, _named(weight=weight, bias=bias), 2, _per_channel, prepare=prepare)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> PerSampleRule:
    del momentum

    def prepare(x: Tensor) -> Tensor:
        if use_input_stats:
            return functional.instance_norm(x, eps=eps)
        assert running_mean is not None and running_var is not None
        mean, variance = running_mean.to(x.dtype), running_var.to(x.dtype)
        return functional.batch_norm(x, mean, variance, eps=eps)

    return PerSampleRule(input, _named(weight=weight, bias=bias), 3, _per_channel, prepare=prepare)


RULES: dict[Any, Callable[..., PerSampleRule | None]] = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.mm: _matmul,
    **{f: _convolution for f in (torch.conv1d, torch.conv2d, torch.conv3d)},
    torch.conv_transpose1d: _transposed,
    torch.conv_transpose2d: _transposed,
    torch.conv_transpose3d: _transposed,
    functional.embedding: _embedding,
    functional.layer_norm: _layer_norm,
    functional.group_norm: _group_norm,
    functional.batch_norm: _batch_norm,
    functional.instance_norm: _instance_norm,
}
if hasattr(functional, "rms_norm"):  # from PyTorch 2.4 on
    RULES[functional.rms_norm] = _rms_norm


def _opened(func: Any) -> Any:
    """Copy a function without its `__torch_function__` dispatch, so that inner calls are seen."""
    everything = {**func.__globals__, "has_torch_function": lambda _: False}
    return types.FunctionType(
        func.__code__, everything, func.__name__, func.__defaults__, func.__closure__
    )


_attention = functional.multi_head_attention_forward
OPENED = {_attention: _opened(_attention)}
OPENED[_attention].__kwdefaults__ = _attention.__kwdefaults__


# -- anything else -----------------------------------------------------------------------------


@dataclass
class Replay:
    """Function call that is run again for each sample, to get the sample's own gradient.

    Exact if a sample's result depends on that sample alone, and is deterministic.

    Attributes:
        fill: makes the arguments from a list of their tensors.
        places: the sample axis of each of these; None for tensors that all samples share.
        out: the sample axis of each result.
    """

    func: Any
    fill: Callable[[Sequence[Tensor]], tuple[Any, dict[str, Any]]]
    places: Sequence[SampleAxis | None]
    out: Sequence[SampleAxis]

    def contribute(
        self, target: int, tensors: Sequence[Tensor], deltas: Sequence[Tensor], piece: range
    ) -> Tensor:
        """Return the gradients of one of the tensors for some samples, [samples, *shape]."""
        wide = deltas[0].dtype
        tensors = [t.to(wide) if t.is_floating_point() else t for t in tensors]
        gradients = []
        for sample in piece:
            arguments = [_of(sample, t, place) for t, place in zip(tensors, self.places)]
            leaf = arguments[target] = arguments[target].detach().requires_grad_()
            with torch.enable_grad():
                args, kwargs = self.fill(arguments)
                results = [t for t in tensors_in(self.func(*args, **kwargs)) if t.requires_grad]
            sample_deltas = [_of(sample, d, place) for d, place in zip(deltas, self.out)]
            gradients.append(torch.autograd.grad(results, leaf, sample_deltas)[0])
        return torch.stack(gradients)


def _of(sample: int, tensor: Tensor, place: SampleAxis | None) -> Tensor:
    """Return one sample's part of a tensor, with the sample axis kept."""
    if place is None:
        return tensor
    part = samples_first(tensor, place)[sample]
    return part.movedim(0, place.axis)


# -- recurrence --------------------------------------------------------------------------------


class Gates(NamedTuple):
    """Input of a weight of a recurrent layer, and the gradient of their product."""

    x: Tensor  # [time, samples, inputs]
    delta: Tensor  # [time, samples, outputs]


@dataclass(frozen=True)
class Recurrence:
    """LSTM, GRU or plain RNN that is run again for the gradients of its gates.

    Attributes:
        kind: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        per_layer: weights of a layer and direction: 2, with biases 4, with a projection one more.
        batch_sizes: of a packed sequence.
    """

    kind: str
    layers: int
    directions: int
    biases: bool
    per_layer: int
    batch_first: bool
    batch_sizes: Tensor | None = None

    def is_bias(self, place: int) -> bool:
        """Return True if the weight with this number is a bias."""
        return self.biases and place % self.per_layer in (2, 3)

    def gates(
        self, x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], deltas: list[Tensor]
    ) -> list[Gates]:
        """Return the `Gates` of each weight in turn; a bias has those of its weight."""
        active, x, deltas = self._padded(x, deltas)
        gates: list[Gates] = []
        products: list[tuple[Tensor, list[Tensor]]] = []
        lasts: list[list[Tensor]] = [[] for _ in state]
        with torch.enable_grad():
            for layer in range(self.layers):
                outputs = []
                for direction in range(self.directions):
                    place = layer * self.directions + direction
                    layer_weights = weights[place * self.per_layer : (place + 1) * self.per_layer]
                    begin = [s[place] for s in state]
                    output, last, made = self._run(x, begin, layer_weights, direction == 1, active)
                    products += made
                    outputs.append(output)
                    for kept, item in zip(lasts, last):
                        kept.append(item)
                x = torch.cat(outputs, -1)
            results = [x, *(torch.stack(kept) for kept in lasts)]
            flat = [y for _, ys in products for y in ys]
            gradients = iter(torch.autograd.grad(results, flat, deltas, allow_unused=True))
        for inputs, ys in products:
            layer_weights = [next(gradients) for _ in ys]
            pieces = [torch.zeros_like(y) if d is None else d for y, d in zip(ys, layer_weights)]
            delta = pieces[0] if len(pieces) == 1 and pieces[0].dim() == 3 else torch.stack(pieces)
            gates.append(Gates(inputs.detach(), delta))
        return gates

    def _run(
        self,
        x: Tensor,
        state: list[Tensor],
        weights: Sequence[Tensor],
        backwards: bool,
        active: Tensor | None,
    ) -> tuple[Tensor, list[Tensor], list[tuple[Tensor, list[Tensor]]]]:
        """Run a layer; return output, last state, and (input, products) of each weight."""
        biases = weights[2:4] if self.biases else (None, None)
        into = functional.linear(x, weights[0], biases[0])
        into = into if into.requires_grad else into.requires_grad_()
        befores, agains, outs, raws, ends = [], [], [], [], []
        for t in range(len(x))[:: -1 if backwards else 1]:
            before = state[0]
            again = functional.linear(before, weights[1], biases[1])
            again = again if again.requires_grad else again.requires_grad_()
            new = self._cell(into[t], again, state)
            if self.kind == "lstm" and self.per_layer % 2:
                raws.append(new[0])
                ends.append(functional.linear(new[0], weights[-1]))
                new[0] = ends[-1]
            if active is not None:
                on = active[t].unsqueeze(-1)
                new = [torch.where(on, a, b) for a, b in zip(new, state)]
            befores.append(before)
            agains.append(again)
            outs.append(new[0])
            state = new
        order = slice(None, None, -1 if backwards else 1)
        made = [(x, [into]), (torch.stack(befores[order]), agains[order])]
        if self.biases:
            made = [*made, *made]
        if raws:
            made.append((torch.stack(raws[order]), ends[order]))
        return torch.stack(outs[order]), state, made

    def _cell(self, into: Tensor, again: Tensor, state: list[Tensor]) -> list[Tensor]:
        if self.kind == "lstm":
            i, f, g, o = (into + again).chunk(4, -1)
            c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
            return [torch.sigmoid(o) * torch.tanh(c), c]
        if self.kind == "gru":
            (r, z, n), (s, u, m) = into.chunk(3, -1), again.chunk(3, -1)
            n = torch.tanh(n + torch.sigmoid(r + s) * m)
            z = torch.sigmoid(z + u)
            return [n + z * (state[0] - n)]
        both = into + again
        return [torch.tanh(both) if self.kind == "rnn_tanh" else torch.relu(both)]

    def _padded(
        self, x: Tensor, deltas: list[Tensor]
    ) -> tuple[Tensor | None, Tensor, list[Tensor]]:
        """Return mask, input and deltas with time first; packed sequences are zero-padded."""
        if self.batch_sizes is None:
            if not self.batch_first:
                return None, x, deltas
            return None, x.transpose(0, 1), [deltas[0].transpose(0, 1), *deltas[1:]]
        sizes = self.batch_sizes.to(x.device)
        active = torch.arange(int(sizes[0]), device=x.device) < sizes.unsqueeze(1)

        def spread(rows: Tensor) -> Tensor:
            return rows.new_zeros(*active.shape, rows.shape[-1]).index_put_((active,), rows)

        return active, spread(x), [spread(deltas[0]), *deltas[1:]]


def recurrence(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Recurrence, list[Tensor], str]:
    """Parse a call of a recurrent function: the `Recurrence`, its tensors, and why not, or "".

    The tensors are the input, the state or both its parts, and the weights.
    """
    del kwargs  # modules pass no arguments by name
    packed = isinstance(args[1], Tensor) and isinstance(args[3], (list, tuple))
    if packed:
        x, sizes, state, weights, biases, layers, dropout, training, both = args
        first = False
    else:
        x, state, weights, biases, layers, dropout, training, both, first = args
        sizes = None
    states = [state] if isinstance(state, Tensor) else list(state)
    directions = 2 if both else 1
    per_layer = len(weights) // (layers * directions)
    how = Recurrence(func.__name__, layers, directions, biases, per_layer, first, sizes)
    why_not = "its dropout cannot be drawn again" if dropout and training and layers > 1 else ""
    return how, [x, *states, *weights], why_not


RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
