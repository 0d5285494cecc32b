"""The parts, in the order of the page."""

from __future__ import annotations

from benchmarks.papers import lgc, variance
from benchmarks.papers.parts import Part

PARTS: dict[str, Part] = {part.name: part for part in (lgc.PART, variance.PART)}
