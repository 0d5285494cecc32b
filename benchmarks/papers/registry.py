"""The parts, in the order of the page."""

from __future__ import annotations

from benchmarks.papers import egc, gradiveq, lgc, transformer, variance
from benchmarks.papers.parts import Part

PARTS: dict[str, Part] = {
    part.name: part for part in (variance.PART, egc.PART, gradiveq.PART, lgc.PART, transformer.PART)
}
