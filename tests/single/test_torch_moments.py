"""Per-sample second moments against a loop over single samples."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvd_gradcomp.torch import moments


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


@pytest.mark.parametrize("chunk", [1, 2, 100])
@pytest.mark.parametrize("case", CASES)
def test_equals_a_loop_over_samples(case, chunk):
    make, draw = CASES[case]
    model = prepared(make)
    x = draw()
    expected = looped(model, x)
    with moments.track_moments(model, chunk=chunk):
        loss_of(model, x).backward()
        for name, p in model.named_parameters():
            close(moments.take(p), expected[name])
            assert moments.take(p) is None


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
    with moments.track_moments(model):
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
    with moments.track_moments(model):
        loss_of(model, x).backward()
        close(moments.take(model.weight), expected["weight"])
        close(moments.take(model.bias), expected["bias"])


def test_samples_of_several_passes_add_up():
    model = prepared(lambda: nn.Linear(7, 4))
    xs = [images(7)() for _ in range(3)]
    expected = sum(looped(model, x)["weight"] for x in xs)
    with moments.track_moments(model):
        for x in xs:
            loss_of(model, x).backward()
        close(moments.take(model.weight), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_with_activation_checkpoints(reentrant):
    model = prepared(lambda: nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)))
    x = images(7)().requires_grad_()
    expected = looped(model, x)
    with moments.track_moments(model):
        loss_of(lambda x: checkpoint(model, x, use_reentrant=reentrant), x).backward()
        for name, p in model.named_parameters():
            close(moments.take(p), expected[name])


def test_in_place_activations():
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 2)
    )
    model = prepared(make)
    x = images(2, 6, 6)()
    expected = looped(model, x)
    with moments.track_moments(model):
        loss_of(model, x).backward()
        for name, p in model.named_parameters():
            close(moments.take(p), expected[name])


def test_a_bias_alone_lets_its_input_be_overwritten():
    model = prepared(lambda: nn.Linear(6, 6))
    model.weight.requires_grad_(False)

    def residual(x):
        y = x.clone()
        y += model(y)
        return y

    x = images(6)()
    with moments.track_moments(model):
        loss_of(residual, x).backward()
        got = moments.take(model.bias)
    expected = 0.0
    for z in range(len(x)):
        model.zero_grad()
        loss_of(residual, x[z : z + 1]).backward()
        expected = expected + (model.bias.grad / len(x)) ** 2
    close(got, expected)


def test_half_precision_is_squared_in_float32():
    model = nn.Linear(7, 4).to(torch.bfloat16)
    with moments.track_moments(model):
        model(torch.randn(5, 7).to(torch.bfloat16)).square().mean().backward()
        assert moments.take(model.weight).dtype == torch.float32


def test_complete_when_horovods_hook_runs():
    """Horovod hooks the node that accumulates the gradient."""
    model = prepared(lambda: nn.Linear(7, 4))
    node = model.weight.expand_as(model.weight).grad_fn.next_functions[0][0]
    seen = []
    node.register_hook(lambda *_: seen.append(moments.take(model.weight)))
    x = images(7)()
    expected = looped(model, x)
    seen.clear()
    with moments.track_moments(model):
        loss_of(model, x).backward()
    close(seen[0], expected["weight"])


def test_a_forward_without_backward_leaves_nothing():
    model = nn.Linear(7, 4)
    with moments.track_moments(model):
        x = torch.randn(5, 7)
        alive = weakref.ref(x)
        y = model(x)
        del x, y
        gc.collect()
        assert alive() is None
        with torch.no_grad():
            model(torch.randn(5, 7))
        assert moments.take(model.weight) is None


def test_discard_and_frozen_parameters():
    model = nn.Linear(7, 4)
    model.bias.requires_grad_(False)
    with moments.track_moments(model):
        model(torch.randn(5, 7)).sum().backward()
        moments.discard(model.weight)
        assert moments.take(model.weight) is None
        assert moments.is_tracked(model.weight) and not moments.is_tracked(model.bias)
    assert not moments.is_tracked(model.weight)


class Functional(nn.Module):
    """A layer whose weight is read around it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 4, bias=False)

    def forward(self, x):
        return nn.functional.linear(x, self.layer.weight)


def test_a_gradient_around_the_module_is_an_error():
    model = Functional()
    x = torch.randn(5, 7)
    with moments.track_moments(model):
        model(x).sum().backward()
        with pytest.raises(RuntimeError, match=r"layer\.weight .*moments='microbatch'"):
            moments.take(model.layer.weight)
        moments.discard(model.layer.weight)
        assert moments.take(model.layer.weight) is None
        model.layer.weight.square().sum().backward()  # a penalty, before the samples
        model.layer(x).sum().backward()
        assert moments.take(model.layer.weight) is not None


def test_a_gradient_of_zero_needs_no_module():
    """The usual way to give an unused parameter a gradient."""
    model = nn.Linear(7, 4)
    with moments.track_moments(model):
        sum(0.0 * p.sum() for p in model.parameters()).backward()
        assert moments.take(model.weight) is None


def test_unsupported_modules_are_all_named():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = nn.ModuleDict({"rnn": nn.LSTM(3, 3), "own": Own(2, 2), "fine": nn.Linear(2, 2)})
    model["extra"] = nn.Linear(2, 2)
    model["extra"].scale = nn.Parameter(torch.ones(2))
    named = r"rnn \(LSTM\), own \(Own\), extra \(Linear\).*moments='microbatch'"
    with pytest.raises(TypeError, match=named):
        moments.track_moments(model)


def test_tracking_twice_and_a_wrong_chunk():
    model = nn.Linear(2, 2)
    with moments.track_moments(model), pytest.raises(ValueError, match="tracked already"):
        moments.track_moments(model)
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        moments.track_moments(model, chunk=0)
