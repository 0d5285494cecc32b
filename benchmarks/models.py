"""Parameter shapes of known models, without their frameworks."""

from __future__ import annotations

Shapes = list[tuple[str, tuple[int, ...]]]


def resnet50() -> Shapes:
    """The 161 parameters of ResNet-50 (He et al. 2016) for 1000 classes: 25,557,032 elements."""
    shapes: Shapes = [("conv1", (64, 3, 7, 7)), ("bn1.weight", (64,)), ("bn1.bias", (64,))]
    inputs = 64
    for stage, (blocks, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512)), start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            sizes = [(width, inputs, 1), (width, width, 3), (4 * width, width, 1)]
            for i, (out, into, kernel) in enumerate(sizes, start=1):
                shapes.append((f"{name}.conv{i}", (out, into, kernel, kernel)))
                shapes.append((f"{name}.bn{i}.weight", (out,)))
                shapes.append((f"{name}.bn{i}.bias", (out,)))
            if block == 0:
                shapes.append((f"{name}.downsample", (4 * width, inputs, 1, 1)))
                shapes.append((f"{name}.downsample.bn.weight", (4 * width,)))
                shapes.append((f"{name}.downsample.bn.bias", (4 * width,)))
            inputs = 4 * width
    return [*shapes, ("fc.weight", (1000, 2048)), ("fc.bias", (1000,))]
