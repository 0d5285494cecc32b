"""Per-sample second moments against a loop over single samples."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvd_gradcomp.torch.moments import rules, sample_axis
from hvd_gradcomp.torch.moments import tracker as moments_tracker
from tests.single.older import leaves_tracked_eager, tracks_moments

pytestmark = tracks_moments


class Tied(nn.Module):
    """One weight that is an embedding and a projection."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.table(tokens).mean(1))


class Twice(nn.Module):
    """One layer, used twice in a forward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Residual(nn.Module):
    """A sum that overwrites the layer's output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        y = self.layer(x)
        y += x
        return y


class First(nn.Sequential):
    """The first result of a recurrent layer, and its last states too."""

    def forward(self, x):
        out, last = self[0](x)
        last = last if isinstance(last, tuple) else (last,)
        out = out if self[0].batch_first else out.transpose(0, 1)
        return torch.cat([out.flatten(1), *(h.transpose(0, 1).flatten(1) for h in last)], 1)


class TimeFirst(First):
    """The same for a layer that wants time first."""

    def forward(self, x):
        return super().forward(x.transpose(0, 1))


class Packed(nn.Module):
    """Sequences of several lengths, not in order of length."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        lengths = (x[:, 0, 0].abs() * 10).long() % 4 + 1  # of each sample, whoever is with it
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = self.layer(packed)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=4)[0]


class Attention(nn.Module):
    """`nn.MultiheadAttention`, which calls no module of its own."""

    def __init__(self, **options):
        super().__init__()
        self.layer = nn.MultiheadAttention(6, 2, **options)

    def forward(self, x):
        if self.layer.batch_first:
            return self.layer(x, x, x, need_weights=False)[0]
        x = x.transpose(0, 1)
        return self.layer(x, x.flip(0), x)[0].transpose(0, 1)


class Swapped(nn.Module):
    """GPT-2's `Conv1D` of transformers: a Linear whose weight is the other way round."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(7, 4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, 7), self.weight).view(*x.shape[:-1], 4)


class RootMeanSquare(nn.Module):
    """As Llama's and T5's own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class OverChannels(nn.LayerNorm):
    """timm's `LayerNorm2d`."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Standardised(nn.Conv2d):
    """timm's `StdConv2d`: what is multiplied is made of the weight."""

    def forward(self, x):
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(x, w, self.bias, self.stride, self.padding)


class Tokens(nn.Module):
    """The first layers of a vision transformer, and a layer scale."""

    def __init__(self, repeat=False):
        super().__init__()
        self.repeat = repeat
        self.patches = nn.Conv2d(2, 6, 2, stride=2)
        self.first = nn.Parameter(torch.zeros(1, 1, 6))
        self.places = nn.Parameter(torch.zeros(1, 5, 6))
        self.gamma = nn.Parameter(torch.ones(6))

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        first = (
            self.first.repeat(len(x), 1, 1) if self.repeat else self.first.expand(len(x), -1, -1)
        )
        x = torch.cat([first, x], 1) + self.places
        return (x + torch.tanh(x).mul(self.gamma))[:, 0]


class Sentence(nn.Module):
    """Positions that no sample owns: GPT-2's, BERT's, T5's; all tied to one table of words."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(12, 6), nn.Embedding(9, 6)
        self.kinds, self.bias = nn.Embedding(2, 6), nn.Embedding(5, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("kind", torch.zeros(1, 9, dtype=torch.long))

    def forward(self, tokens):
        count, length = tokens.shape
        x = self.words(tokens) + self.places(torch.arange(length)[None])
        x = x + self.kinds(self.kind[:, :length].expand(count, -1))
        q = x.view(count, length, 2, 3).transpose(1, 2)
        steps = torch.arange(length)
        bias = self.bias((steps[:, None] - steps).clamp(-2, 2) + 2).permute(2, 0, 1).unsqueeze(0)
        y = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=bias * self.scale.exp())
        scores = q @ q.transpose(-1, -2)
        scores += bias
        y = y + scores.softmax(-1) @ q
        y = y.transpose(1, 2).reshape(count, length, 6)
        return nn.functional.linear(y, self.words.weight)


class Windows(nn.Module):
    """Swin's: rows of several windows a sample, turned, and turned back."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        count = len(x)
        x = torch.roll(x, (-1, -1), (1, 2)).view(count, 2, 2, 2, 2, 3).transpose(2, 3)
        x = self.layer(x.reshape(-1, 4, 3)).view(count, 2, 2, 2, 2, 3).transpose(2, 3)
        return self.layer(torch.roll(x.reshape(count, 4, 4, 3), (1, 1), (1, 2)).flatten(0, 2)).view(
            count, -1
        )


class Pair(nn.Module):
    """Two views of each sample, one after the other along the first axis."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        a, b = self.layer(torch.cat([x, x.flip(1)])).chunk(2)
        return a * b


class Last(nn.Module):
    """What a text ends with, as CLIP and GPT-2's classifier take it."""

    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(12, 6), nn.Linear(6, 3)

    def forward(self, tokens):
        x = torch.tanh(self.words(tokens))
        return self.last(x[torch.arange(len(x)), tokens.argmax(-1)])


class Crossed(nn.Module):
    """What has no rule of its own."""

    def __init__(self):
        super().__init__()
        self.slope, self.cross = nn.PReLU(6), nn.Bilinear(6, 6, 3)

    def forward(self, x):
        x = self.slope(x)
        return self.cross(x, x.flip(1))


def images(*shape):
    return lambda: torch.randn(5, *shape, dtype=torch.float64)


def tokens(*shape):
    return lambda: torch.randint(0, 12, (5, *shape))


CASES = {
    "linear": (lambda: nn.Linear(7, 4), images(7)),
    "linear without bias": (lambda: nn.Linear(7, 4, bias=False), images(7)),
    "linear over time": (lambda: nn.Linear(7, 4), images(3, 2, 7)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), images(4, 11)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, padding=1), images(3, 6, 7)),
    "conv2d groups": (
        lambda: nn.Conv2d(4, 6, 3, groups=2, dilation=2, bias=False),
        images(4, 8, 9),
    ),
    "conv2d same": (lambda: nn.Conv2d(2, 3, (4, 3), padding="same"), images(2, 6, 5)),
    "conv2d valid": (lambda: nn.Conv2d(2, 3, 3, padding="valid"), images(2, 6, 5)),
    "conv2d circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        images(2, 6, 5),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, (2, 3, 2), stride=(1, 2, 1)), images(2, 4, 6, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), images(4, 6, 6)),
    "embedding": (lambda: nn.Embedding(12, 5), tokens(6)),
    "embedding padded": (lambda: nn.Embedding(12, 5, padding_idx=3), tokens(6)),
    "embedding of one token": (lambda: nn.Embedding(12, 5), tokens()),
    "layer norm": (lambda: nn.LayerNorm(7), images(3, 7)),
    "layer norm of two axes": (lambda: nn.LayerNorm((3, 7)), images(3, 7)),
    "group norm": (lambda: nn.GroupNorm(2, 6), images(6, 3, 4)),
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        images(4, 3, 4),
    ),
    "transposed 1-D": (lambda: nn.ConvTranspose1d(2, 3, 4, dilation=2), images(2, 5)),
    "transposed 3-D": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), images(2, 2, 3, 2)),
    "instance norm": (lambda: nn.InstanceNorm2d(6, affine=True), images(6, 3, 4)),
    "bag": (lambda: nn.EmbeddingBag(12, 5, mode="sum"), tokens(6)),
    "lstm": (lambda: First(nn.LSTM(4, 3, batch_first=True)), images(6, 4)),
    "lstm of all kinds": (
        lambda: TimeFirst(nn.LSTM(4, 3, num_layers=2, bidirectional=True, proj_size=2)),
        images(6, 4),
    ),
    "gru": (
        lambda: First(nn.GRU(4, 3, num_layers=2, bidirectional=True, batch_first=True)),
        images(6, 4),
    ),
    "rnn": (lambda: TimeFirst(nn.RNN(4, 3, bias=False)), images(6, 4)),
    "rnn relu": (lambda: First(nn.RNN(4, 3, 2, "relu", batch_first=True)), images(6, 4)),
    "packed lstm": (
        lambda: Packed(nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)),
        images(4, 4),
    ),
    "packed gru": (lambda: Packed(nn.GRU(4, 3, batch_first=True)), images(4, 4)),
    "attention": (lambda: Attention(batch_first=True), images(5, 6)),
    "attention, time first": (lambda: Attention(bias=False), images(5, 6)),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
        images(5, 6),
    ),
    "conv1d of transformers": (Swapped, images(3, 7)),
    "rms norm": (RootMeanSquare, images(3, 7)),
    "layer norm over channels": (lambda: OverChannels(4), images(4, 3, 5)),
    "standardised": (lambda: Standardised(2, 3, 3), images(2, 5, 5)),
    "tokens": (Tokens, images(2, 4, 4)),
    "tokens repeated": (lambda: Tokens(repeat=True), images(2, 4, 4)),
    "sentence": (Sentence, tokens(5)),  # as long as there are samples
    "windows": (Windows, images(4, 4, 3)),
    "pair": (Pair, images(6)),
    "one place of each": (Last, tokens(5)),
    "no rule": (Crossed, images(6)),
    "tied": (Tied, tokens(4)),
    "twice": (Twice, images(6)),
    "linear 2-D + in-place add": (Residual, images(6)),
    "linear over time + in-place add": (Residual, images(3, 6)),
    "linear over time + inplace ReLU": (
        lambda: nn.Sequential(nn.Linear(7, 4), nn.ReLU(inplace=True)),
        images(3, 2, 7),
    ),
    "embedding + inplace op": (
        lambda: nn.Sequential(nn.Embedding(12, 5), nn.ELU(inplace=True)),
        tokens(6),
    ),
    "conv + inplace ReLU": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)),
        images(3, 6, 7),
    ),
}


def loss_of(model, x):
    """A mean over samples in which each counts differently."""
    y = model(x)
    y = y.reshape(y.shape[0], -1)
    weights = torch.linspace(0.5, 2.0, y.shape[1], dtype=y.dtype)
    return (torch.sin(y) * weights).sum(1).mean()


def looped(model, x):
    """The definition: the gradient of each sample alone, divided by the batch, squared, added."""
    totals = {name: 0.0 for name, _ in model.named_parameters()}
    for z in range(len(x)):
        model.zero_grad()
        loss_of(model, x[z : z + 1]).backward()
        for name, p in model.named_parameters():
            gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
            totals[name] = totals[name] + (gradient / len(x)) ** 2
    model.zero_grad()
    return totals


def prepared(make):
    torch.manual_seed(0)
    model = make().double()
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def close(q, expected):
    assert q.dtype == torch.float32
    error = (q.double() - expected).abs()
    assert (error <= 1e-5 * expected.abs() + 1e-7 * expected.abs().max()).all()


if hasattr(nn.utils.parametrizations, "weight_norm"):
    normalised = nn.utils.parametrizations.weight_norm
    CASES["weight norm"] = (lambda: normalised(nn.Linear(7, 4)), images(3, 7))
if hasattr(nn, "RMSNorm"):
    CASES["rms norm of PyTorch"] = (lambda: nn.RMSNorm((3, 7)), images(2, 3, 7))


@pytest.mark.parametrize("chunk", [1, 2, 100])
@pytest.mark.parametrize("case", CASES)
def test_equals_a_loop_over_samples(case, chunk):
    make, draw = CASES[case]
    model = prepared(make)
    x = draw()
    expected = looped(model, x)
    with moments_tracker.track_moments(model, chunk=chunk):
        loss_of(model, x).backward()
        for name, p in model.named_parameters():
            close(moments_tracker.take(p), expected[name])
            assert moments_tracker.take(p) is None


@pytest.mark.parametrize("case", CASES)
def test_changes_neither_output_nor_gradients(case):
    make, draw = CASES[case]
    model = prepared(make)
    x = draw()

    def results():
        model.zero_grad()
        y = model(x)
        y.sin().mean().backward()
        return [y.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = results()
    with moments_tracker.track_moments(model):
        assert all(torch.equal(a, b) for a, b in zip(results(), expected))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.BatchNorm1d, (6, 4)), (nn.BatchNorm2d, (6, 4, 3)), (nn.BatchNorm3d, (6, 2, 3, 2))],
)
def test_batch_norm_as_the_layer_sees_it(layer, shape, training):
    """Statistics held constant: normalise first, then loop over samples of the affine part."""
    torch.manual_seed(0)
    model = layer(6).double().train(training)
    nn.init.normal_(model.weight)
    nn.init.normal_(model.bias)
    model.running_mean.normal_()
    model.running_var.uniform_(0.5, 2.0)
    x = torch.randn(5, *shape, dtype=torch.float64)
    axes = [0, *range(2, x.dim())]
    mean = x.mean(axes) if training else model.running_mean.clone()
    variance = x.var(axes, unbiased=False) if training else model.running_var.clone()
    broadcast = (1, 6) + (1,) * (x.dim() - 2)
    normalised = (x - mean.view(broadcast)) / (variance.view(broadcast) + model.eps).sqrt()

    class Affine(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(model.weight.detach().clone())
            self.bias = nn.Parameter(model.bias.detach().clone())

        def forward(self, n):
            return n * self.weight.view(broadcast) + self.bias.view(broadcast)

    expected = looped(Affine(), normalised)
    with moments_tracker.track_moments(model):
        loss_of(model, x).backward()
        close(moments_tracker.take(model.weight), expected["weight"])
        close(moments_tracker.take(model.bias), expected["bias"])


def test_samples_of_several_passes_add_up():
    model = prepared(lambda: nn.Linear(7, 4))
    xs = [images(7)() for _ in range(3)]
    expected = sum(looped(model, x)["weight"] for x in xs)
    with moments_tracker.track_moments(model):
        for x in xs:
            loss_of(model, x).backward()
        close(moments_tracker.take(model.weight), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_with_activation_checkpoints(reentrant):
    model = prepared(lambda: nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)))
    x = images(7)().requires_grad_()
    expected = looped(model, x)
    with moments_tracker.track_moments(model):
        loss_of(lambda x: checkpoint(model, x, use_reentrant=reentrant), x).backward()
        for name, p in model.named_parameters():
            close(moments_tracker.take(p), expected[name])


def test_in_place_activations():
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 2)
    )
    model = prepared(make)
    x = images(2, 6, 6)()
    expected = looped(model, x)
    with moments_tracker.track_moments(model):
        loss_of(model, x).backward()
        for name, p in model.named_parameters():
            close(moments_tracker.take(p), expected[name])


def test_a_bias_alone_lets_its_input_be_overwritten():
    model = prepared(lambda: nn.Linear(6, 6))
    model.weight.requires_grad_(False)

    def residual(x):
        y = x.clone()
        y += model(y)
        return y

    x = images(6)()
    with moments_tracker.track_moments(model):
        loss_of(residual, x).backward()
        got = moments_tracker.take(model.bias)
    expected = 0.0
    for z in range(len(x)):
        model.zero_grad()
        loss_of(residual, x[z : z + 1]).backward()
        expected = expected + (model.bias.grad / len(x)) ** 2
    close(got, expected)


def test_half_precision_is_squared_in_float32():
    model = nn.Linear(7, 4).to(torch.bfloat16)
    with moments_tracker.track_moments(model):
        model(torch.randn(5, 7).to(torch.bfloat16)).square().mean().backward()
        assert moments_tracker.take(model.weight).dtype == torch.float32


def test_complete_when_horovods_hook_runs():
    """Horovod hooks the node that accumulates the gradient."""
    model = prepared(lambda: nn.Linear(7, 4))
    node = model.weight.expand_as(model.weight).grad_fn.next_functions[0][0]
    seen = []
    node.register_hook(lambda *_: seen.append(moments_tracker.take(model.weight)))
    x = images(7)()
    expected = looped(model, x)
    seen.clear()
    with moments_tracker.track_moments(model):
        loss_of(model, x).backward()
    close(seen[0], expected["weight"])


def test_a_forward_without_backward_leaves_nothing():
    model = nn.Linear(7, 4)
    with moments_tracker.track_moments(model):
        x = torch.randn(5, 7)
        alive = weakref.ref(x)
        y = model(x)
        del x, y
        gc.collect()
        assert alive() is None
        with torch.no_grad():
            model(torch.randn(5, 7))
        assert moments_tracker.take(model.weight) is None


def test_discard_and_frozen_parameters():
    model = nn.Linear(7, 4)
    model.bias.requires_grad_(False)
    with moments_tracker.track_moments(model):
        model(torch.randn(5, 7)).sum().backward()
        moments_tracker.discard(model.weight)
        assert moments_tracker.take(model.weight) is None
        assert moments_tracker.is_tracked(model.weight) and not moments_tracker.is_tracked(
            model.bias
        )
    assert not moments_tracker.is_tracked(model.weight)


def test_a_gradient_around_the_model_is_an_error():
    model = nn.ModuleDict({"layer": nn.Linear(7, 4, bias=False)})
    layer = model["layer"]
    x = torch.randn(5, 7)
    with moments_tracker.track_moments(model):
        nn.functional.linear(x, layer.weight).sum().backward()
        with pytest.raises(RuntimeError, match=r"layer\.weight .*moments='microbatch'"):
            moments_tracker.take(layer.weight)
        moments_tracker.discard(layer.weight)
        assert moments_tracker.take(layer.weight) is None
        layer.weight.square().sum().backward()  # a penalty, before the samples
        layer(x).sum().backward()
        assert moments_tracker.take(layer.weight) is not None


def test_a_weight_may_be_read_around_its_module():
    """As `Sentence` does with its words, and `nn.MultiheadAttention` with its projection."""

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(7, 4, bias=False)

        def forward(self, x):
            return nn.functional.linear(x, self.layer.weight)

    model, x = prepared(Functional), images(7)()
    expected = looped(model, x)
    with moments_tracker.track_moments(model):
        loss_of(model, x).backward()
        close(moments_tracker.take(model.layer.weight), expected["layer.weight"])


def test_a_gradient_of_zero_needs_no_module():
    """The usual way to give an unused parameter a gradient."""
    model = nn.Linear(7, 4)
    with moments_tracker.track_moments(model):
        sum(0.0 * p.sum() for p in model.parameters()).backward()
        assert moments_tracker.take(model.weight) is None


class Gathered(nn.Module):
    """A layer that is given some rows, of whatever samples, and another as it should be."""

    def __init__(self):
        super().__init__()
        self.expert, self.fine = nn.Linear(7, 7), nn.Linear(7, 2)

    def forward(self, x):
        chosen = x[..., 0] > 0
        y = x.clone()
        y[chosen] = self.expert(x[chosen])
        return self.fine(y)


def five_of_fifteen():
    """As many rows are chosen as there are samples, which does not make them samples."""
    x = torch.randn(5, 3, 7)
    x[..., 0] = -1
    x[:2, :2, 0] = x[4, 1, 0] = 1
    return x


def unfit():
    """Modules that tell by themselves that they cannot."""
    return nn.ModuleDict(
        {
            "rnn": nn.LSTM(3, 3, num_layers=2, dropout=0.5),
            "table": nn.Embedding(4, 3, scale_grad_by_freq=True),
            "fine": nn.Linear(2, 2),
        }
    )


def test_unfit_modules_are_all_named():
    named = r"rnn \(LSTM\): .*dropout.*, table \(Embedding\): .*others='step'.*moments='microbatch'"
    with pytest.raises(TypeError, match=named):
        moments_tracker.track_moments(unfit())
    model = unfit()
    for name in ("rnn", "table"):
        model[name].requires_grad_(False)
    moments_tracker.track_moments(model).remove()
    with pytest.raises(
        ValueError, match="others must be one of 'error', 'step', 'dense', got 'none'"
    ):
        moments_tracker.track_moments(model, others="none")


@pytest.mark.parametrize("others", ["error", "dense"])
def test_what_only_forward_shows_is_an_error_of_forward(others):
    model = Gathered()
    with moments_tracker.track_moments(model, others=others):
        with pytest.raises(
            RuntimeError, match=r"expert\.weight \(Linear\): linear: .*expert\.bias"
        ):
            model(five_of_fifteen())
        model.expert.requires_grad_(False)
        model(torch.randn(5, 3, 7)).sum().backward()
        assert moments_tracker.take(model.fine.weight) is not None


def test_others_count_the_step_as_one_sample():
    model, x = prepared(Gathered), images(3, 7)()
    expected = looped(model, x)
    with moments_tracker.track_moments(model, others="step") as tracker:
        assert "not used yet" in str(tracker)
        loss_of(model, x).backward()
        assert moments_tracker.take(model.expert.weight) is moments_tracker.STEP
        assert moments_tracker.take(model.expert.weight) is moments_tracker.STEP
        close(moments_tracker.take(model.fine.weight), expected["fine.weight"])
        rows = str(tracker).splitlines()[2:]
        assert ["of the step: linear" in row for row in rows] == [True, True, False, False]
        assert ["per sample: linear" in row for row in rows] == [False, False, True, True]
    with moments_tracker.track_moments(unfit(), others="step") as tracker:
        assert "rnn.weight_ih_l0  12x3     LSTM       of the step: " in str(tracker)


def test_others_may_be_sent_dense():
    model = unfit()
    with moments_tracker.track_moments(model, others="dense") as tracker:
        assert "table.weight      4x3      Embedding  none, sent dense: scale_" in str(tracker)
        assert moments_tracker.is_sent_dense(model["table"].weight)
        assert not moments_tracker.is_tracked(model["table"].weight)
        assert not moments_tracker.is_sent_dense(model["fine"].weight)
        with pytest.raises(ValueError, match="tracked already"):
            moments_tracker.track_moments(model, others="dense")
    assert not moments_tracker.is_sent_dense(model["table"].weight)


def test_a_layer_that_thaws_is_tracked_from_then_on():
    model = prepared(lambda: nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)))
    x = images(7)()
    expected = looped(model, x)
    model[0].requires_grad_(False)
    with moments_tracker.track_moments(model) as tracker:
        loss_of(model, x).backward()
        assert moments_tracker.take(model[0].weight) is None and "frozen" in str(tracker)
        model[0].requires_grad_(True)
        assert moments_tracker.is_tracked(model[0].weight)
        moments_tracker.discard(model[2].weight)
        loss_of(model, x).backward()
        for name, p in model.named_parameters():
            if name != "2.bias":
                close(moments_tracker.take(p), expected[name])
    assert not moments_tracker.is_tracked(model[0].weight)


def test_uses_of_another_pass_are_not_this_ones():
    """`autograd.grad`, as a gradient penalty calls it, accumulates nothing."""
    model = prepared(lambda: nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)))
    x = images(7)().requires_grad_()
    expected = looped(model, x)
    with moments_tracker.track_moments(model):
        torch.autograd.grad(loss_of(model, x), x)
        loss_of(model, x).backward()
        close(moments_tracker.take(model[0].weight), expected["0.weight"])


def test_a_gradient_set_by_hand_is_an_error():
    model = nn.Linear(7, 4)
    with moments_tracker.track_moments(model):
        values = {name: p.detach() for name, p in model.named_parameters()}

        def loss(values):
            return torch.func.functional_call(model, values, torch.ones(5, 7)).sum()

        gradient = torch.func.grad(loss)(values)["weight"]
        assert moments_tracker.take(model.weight, torch.zeros(4, 7)) is None
        with pytest.raises(RuntimeError, match=r"weight \(Linear\) has a gradient.*torch\.func"):
            moments_tracker.take(model.weight, gradient)


def test_functional_call_with_the_models_own_parameters():
    model, x = prepared(lambda: nn.Linear(7, 4)), images(7)()
    expected = looped(model, x)
    direct = dict(model.named_parameters())
    with moments_tracker.track_moments(model):
        loss_of(lambda x: torch.func.functional_call(model, direct, (x,)), x).backward()
        close(moments_tracker.take(model.weight), expected["weight"])


def test_nothing_is_left_on_tensors():
    """Buffers that a model sets as it runs are saved with it."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(7, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            y = self.layer(x)
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            return y - self.mean

    gc.collect()
    before = len(sample_axis._places._notes)
    model = Mean()
    with moments_tracker.track_moments(model):
        y = model(torch.randn(5, 7))
        assert not vars(y) and not vars(model.mean)
        y.sum().backward()
        del y
    model.mean = torch.zeros(4)
    gc.collect()
    assert len(sample_axis._places._notes) <= before


def test_samples_that_are_mixed_are_an_error_where_they_are_used():
    """What is made of all pairs has no axis of samples, though two are as long."""

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 1)

        def forward(self, x):
            x = self.layer(x)
            return self.last(x[:, None] * x[None])

    model = Pairs()
    with (
        moments_tracker.track_moments(model),
        pytest.raises(RuntimeError, match=r"for last\.weight \(Linear\): linear: no axis counts"),
    ):
        model(torch.randn(5, 6))


def test_parts_of_a_model_called_by_themselves():
    """As GANs and autoencoders are trained: the parts are called, not the whole."""
    model = prepared(lambda: nn.ModuleDict({"a": nn.Linear(6, 5), "b": nn.Linear(5, 3)}))
    x = images(4, 6)()

    def both(x):
        return model["b"](torch.tanh(model["a"](x)).flatten(0, 1)).view(len(x), -1)

    both.named_parameters, both.zero_grad = model.named_parameters, model.zero_grad
    expected = looped(both, x)
    with moments_tracker.track_moments(model):
        loss_of(both, x).backward()
        for name, p in model.named_parameters():
            if name.startswith("a."):
                close(moments_tracker.take(p), expected[name])


def test_an_error_of_forward_ends_what_it_began():
    model = nn.Sequential(nn.Linear(7, 4))
    with moments_tracker.track_moments(model):
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.randn(5, 6))
        model(torch.randn(5, 7)).sum().backward()
        assert moments_tracker.take(model[0].weight) is not None
    assert torch.overrides._len_torch_function_stack() == 0


def test_under_autocast():
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    x = torch.randn(5, 7)
    expected = looped(model, x)
    with moments_tracker.track_moments(model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, x)
        loss.float().backward()
        for name, p in model.named_parameters():
            moment = moments_tracker.take(p)
            assert moment.dtype == torch.float32
            assert (moment - expected[name]).norm() < 0.1 * expected[name].norm()


@leaves_tracked_eager
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("order", ["before", "after", "of the compiled", "in place"])
def test_compiled(backend, order, caplog):
    torch._dynamo.reset()
    vars(moments_tracker._running).pop("warned", None)
    model = prepared(lambda: Tokens())
    x = images(2, 4, 4)()
    expected = looped(model, x)
    if order == "after":
        compiled = torch.compile(model, backend=backend)
        loss_of(compiled, x).backward()
    tracker = moments_tracker.track_moments(
        model if order != "of the compiled" else torch.compile(model, backend=backend)
    )
    if order == "in place":
        model.compile(backend=backend)
        compiled = model
    elif order != "after":
        compiled = torch.compile(model, backend=backend)
    with tracker:
        for _ in range(2):
            loss_of(compiled, x).backward()
            for name, p in model.named_parameters():
                close(moments_tracker.take(p), expected[name])
        with torch.no_grad():
            assert torch.allclose(compiled(x), model(x))
    assert len([m for m in caplog.messages if m.startswith("torch.compile: ")]) == 1


@leaves_tracked_eager
def test_compiled_whole_is_an_error_that_says_why():
    torch._dynamo.reset()
    model = nn.Linear(7, 4)
    with (
        moments_tracker.track_moments(model),
        pytest.raises(torch._dynamo.exc.Unsupported, match="moments are tracked"),
    ):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(5, 7))


def test_the_sites_table_is_of_what_there_is():
    page = (Path(__file__).resolve().parents[2] / "docs" / "moments.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    known = {f.__name__ for f in (*rules.RULES, *rules.OPENED)} | rules.RECURRENT
    documented = {name for first, _, _ in rows for name in re.findall(r"`(\w+)`", first)}
    assert documented == known | {"expand", "repeat"}
    for name in re.findall(r"`nn\.(\w+)", page):
        assert hasattr(nn, name), name


def test_tracking_twice_and_a_wrong_chunk():
    model = nn.Linear(2, 2)
    with moments_tracker.track_moments(model), pytest.raises(ValueError, match="tracked already"):
        moments_tracker.track_moments(model)
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        moments_tracker.track_moments(model, chunk=0)
