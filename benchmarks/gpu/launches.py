"""Part that counts: copies and launches of a step by method, and its extra memory.

A process of its own measures, as a kernel that touches other memory ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import codecs, points
from benchmarks.gpu.part import Part, Row, Setting
from benchmarks.gpu.ranks import measured, names_of
from benchmarks.gpu.replicas import ordered
from hvd_gradcomp.tuning.models import resnet50

STEPS = 9  # that are measured
SMALL = 30  # layers of ResNet-50, on a CPU


def launches(share: float) -> Part:
    """Return the part."""

    def names(setting: Setting) -> list[str]:
        return names_of(ordered(setting), [("gloo", 1)])

    def measure(setting: Setting, names: list[str], deadline: float) -> Iterator[Row]:
        return measured(setting, names, deadline, counted)

    return Part(share, names, measure)


def counted(setting: Setting, method: str) -> Row:
    """Return a row of `benchmarks.codecs`, whose first steps are looked at once."""
    (point,) = (point for point in points.every() if point.name == method)
    compressor, model = point.make(), resnet50()[: SMALL if setting.is_small else None]
    step, row = codecs.measure(
        lambda: codecs.Step(compressor, setting.device, model=model), STEPS, beginnings=1
    )
    return {**row, **codecs.costs(step)}
