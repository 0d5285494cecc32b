"""The network of the image rows."""

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
