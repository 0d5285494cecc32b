"""The parts, in the order of the page."""

from __future__ import annotations

from benchmarks.papers import egc, gradiveq, lgc, local, outer, today, transformer, variance
from benchmarks.papers.parts import Part

PARTS: dict[str, Part] = {
    paper.PART.name: paper.PART
    for paper in (variance, egc, gradiveq, lgc, transformer, today, local, outer)
}
