"""The network of the image rows, and one whose shape alone is used."""

from __future__ import annotations

from torch import nn

WIDTHS, HIDDEN = (16, 32, 64), 256


def vgg(widths: tuple[int, ...] = WIDTHS, hidden: int = HIDDEN) -> nn.Sequential:
    """Like VGG, as Tsuzuku et al. have it (appendix D), but for 28 x 28 pixels, without dropout.

    The first convolution goes two pixels a step, which saves three quarters of all work.
    """
    layers: list[nn.Module] = []
    depth = 1
    for width in widths:
        layers += [] if depth == 1 else [nn.MaxPool2d(2)]
        for _ in range(2):
            stride = 2 if depth == 1 else 1
            convolution = nn.Conv2d(depth, width, 3, stride, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
            depth = width
    last = 28 >> len(widths)
    layers += [nn.Flatten(), nn.Linear(last * last * depth, hidden, bias=False)]
    layers += [nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 10)]
    return nn.Sequential(*layers)


def vgg_of_the_paper() -> nn.Sequential:
    """The network of Tsuzuku et al. 2018, appendix D, for 32 x 32 pixels, without dropout."""
    layers: list[nn.Module] = []
    depth = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            convolution = nn.Conv2d(depth, width, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
            depth = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(512, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10, bias=False))
