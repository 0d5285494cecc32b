"""Style of figures: readable on white and black, in print, and by colour-blind readers.

The background is transparent, and text is grey, which reads on both. Lines differ in colour, stroke
and marker, so that all methods in one figure can be distinguished.
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

INK = "#7d7d7d"  # equal contrast to white and to the site's black
COLOURS = ("#2a7fc9", "#e0602a", "#1f9e77", "#c2559d", "#b58900", "#8567d6", "#4aa5b8")
STROKES = ("-", "--", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p", "h", "d", "8", "H")

SETTINGS: dict[str, Any] = {
    "axes.prop_cycle": f"cycler('color', {[*COLOURS]})",
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "figure.facecolor": "none",
    "font.size": 9,
    "grid.alpha": 0.3,
    "grid.color": INK,
    "legend.facecolor": "none",
    "legend.framealpha": 0.0,
    "legend.labelcolor": INK,
    "savefig.dpi": 150,
    "savefig.facecolor": "none",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def lines(count: int) -> list[dict[str, Any]]:
    """Return `count` distinct line styles for matplotlib's `plot`.

    >>> len({tuple(line.values()) for line in lines(21)})
    21
    """
    strokes = [stroke for stroke in STROKES for _ in COLOURS]
    drawn = zip(cycle(COLOURS), cycle(strokes), cycle(MARKS))
    return [dict(zip(("color", "linestyle", "marker"), one)) for one in islice(drawn, count)]
