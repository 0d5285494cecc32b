"""Models to measure with: four well-known ones, and any other by `module:factory`.

They are defined here to avoid a dependency on the packages that have them. Only shapes and the cost
of backward matter: data are random.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hvd_gradcomp.core import validate
from hvd_gradcomp.core.suggestions import did_you_mean

Loss = Callable[[], torch.Tensor]


class ModelError(ValueError):
    """Error: a model cannot be measured; the message says why."""


class Model(NamedTuple):
    """Model to measure with.

    Attributes:
        name: as requested.
        module: has the parameters.
        loss: returns the loss of a batch, for backward; None if only shapes are known.
        real: batches are real data, so their gradients are meaningful.
        optimizer: that trains it, if known.
    """

    name: str
    module: nn.Module
    loss: Loss | None
    real: bool
    optimizer: torch.optim.Optimizer | None = None


def load(name: str, shapes_only: bool = False, batch_size: int = 4) -> Model:
    """Load a model by its name.

    Args:
        name: one of `BUILT_IN`, or `module:factory`: a function without arguments, found from the
            current folder, that returns an `nn.Module`; or a pair of it and a function that
            returns the loss of the next batch; or these two and the optimizer.
        shapes_only: make a built-in model without memory and loss.
        batch_size: samples in a batch of a built-in model.

    Raises:
        ModelError: there is no such model, or the factory returns something else.
    """
    if name in BUILT_IN:
        network, batch = BUILT_IN[name]
        with torch.device("meta" if shapes_only else "cpu"):
            module = network()
        if shapes_only:
            return Model(name, module, None, real=False)
        inputs, target = batch(batch_size)
        return Model(name, module, lambda: _loss(module, inputs, target), real=False)
    made = _factory(name)()
    parts = made if isinstance(made, tuple) and len(made) in (2, 3) else (made,)
    module, loss, optimizer = (*parts, None, None)[:3]
    if not (
        isinstance(module, nn.Module)
        and (loss is None or callable(loss))
        and (optimizer is None or isinstance(optimizer, torch.optim.Optimizer))
    ):
        raise ModelError(
            f"{name} has to return a torch.nn.Module, or (module, loss) with a function loss() "
            "that returns the loss of the next batch, or (module, loss, optimizer) with one of "
            f"torch.optim; it returned {made!r}"
        )
    elsewhere = {str(p.device) for p in module.parameters() if p.device.type != "cpu"}
    if elsewhere:
        raise ModelError(f"{name} is on {', '.join(sorted(elsewhere))}; only a CPU can be measured")
    return Model(name, module, loss, loss is not None, optimizer)


def optimizer_of(name: str) -> torch.optim.Optimizer:
    """Make an optimizer by its class name, case-insensitive, for a parameter of its own.

    "sgd" has a momentum of 0.9.

    Raises:
        ModelError: `torch.optim` has none of that name.
    """
    kinds = {
        kind.lower(): optimizer
        for kind, optimizer in vars(torch.optim).items()
        if isinstance(optimizer, type)
        and issubclass(optimizer, torch.optim.Optimizer)
        and optimizer is not torch.optim.Optimizer
    }
    if name.lower() not in kinds:
        nearest, listed = did_you_mean(name, kinds) or ";", ", ".join(sorted(kinds))
        raise ModelError(f"no optimizer {name!r}{nearest} torch.optim has {listed}")
    parameters = [nn.Parameter(torch.zeros(1, 1))]
    if name.lower() == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    made: torch.optim.Optimizer = kinds[name.lower()](parameters)
    return made


def resnet50() -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of the 161 parameters of ResNet-50: 25,557,032 elements."""
    return shapes(load("resnet50", shapes_only=True).module)


def shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Return (name, shape) of each trainable parameter, in the model's order."""
    return [(name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad]


def _factory(name: str) -> Any:
    if ":" not in name:
        nearest = did_you_mean(name, BUILT_IN) or "."
        raise ModelError(
            f"no model {name!r}{nearest} There are {', '.join(BUILT_IN)}, and module:factory"
        )
    try:
        factory = validate.attribute(name, "factory")
    except validate.NoSuchNameError as error:
        raise ModelError(str(error)) from error
    if inspect.isbuiltin(factory) or not callable(factory) or not _takes_nothing(factory):
        raise ModelError(
            f"{name} is no function that can be called without arguments; write one, in Python, "
            "that returns a torch.nn.Module, or (module, loss)"
        )
    return factory


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # a class without a signature
        return True
    return True


def _loss(module: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    scores: torch.Tensor = module(inputs)
    return nn.functional.cross_entropy(scores.flatten(0, -2), target.flatten())


def _images(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 3, 224, 224), torch.randint(1000, (batch_size,))


def _tokens(words: int, length: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    def batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(words, (2, batch_size, length)).unbind()

    return batch


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        for i, (out, into, kernel, step) in enumerate(
            ((width, inputs, 1, 1), (width, width, 3, stride), (4 * width, width, 1, 1)), start=1
        ):
            self.add_module(f"conv{i}", nn.Conv2d(into, out, kernel, step, kernel // 2, bias=False))
            self.add_module(f"bn{i}", nn.BatchNorm2d(out))
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + self.downsample(x))


def resnet(blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 1000) -> nn.Module:
    """Build a ResNet of bottlenecks of He et al. 2016; ResNet-50 by default.

    Args:
        blocks: number of bottlenecks of each stage; ResNet-101 has 3, 4, 23, 3.
        classes: that it tells apart.
    """
    stages: list[nn.Module] = []
    inputs = 64
    for stage, (count, width) in enumerate(zip(blocks, (64, 128, 256, 512))):
        for block in range(count):
            stages.append(_Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    pools = nn.MaxPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(1)
    last = nn.Linear(2048, classes)
    return nn.Sequential(*stem, pools[0], *stages, pools[1], nn.Flatten(), last)


def _vgg16() -> nn.Module:
    """Build VGG-16 of Simonyan and Zisserman 2015, configuration D, 138,357,544 elements."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))


class _BERT(nn.Module):
    """BERT base of Devlin et al. 2019: 12 layers of 768, a language model with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30522, 768), nn.Embedding(512, 768)
        self.norm = nn.LayerNorm(768)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.encoder(self.norm(self.words(tokens) + self.places(places)))
        return x @ self.words.weight.T


class _LSTM(nn.Module):
    """LSTM, large, of Zaremba et al. 2014: two layers of 1500, ten thousand words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10_000, 1500)
        self.lstm = nn.LSTM(1500, 1500, num_layers=2, batch_first=True)
        self.scores = nn.Linear(1500, 10_000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.scores(self.lstm(self.words(tokens))[0])
        return scores


BUILT_IN: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "resnet50": (resnet, _images),
    "vgg16": (_vgg16, _images),
    "bert-base": (_BERT, _tokens(30522, 128)),
    "lstm": (_LSTM, _tokens(10_000, 35)),
}

USUAL_OPTIMIZERS = {"resnet50": "sgd", "vgg16": "sgd", "bert-base": "adamw", "lstm": "sgd"}
