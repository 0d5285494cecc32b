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


def label_ends(axes: Any, fontsize: float = 7) -> None:
    """Write each line's label beside its last point, in its colour; labels never overlap.

    Call it when everything is plotted, since it settles the layout.
    """
    axes.figure.draw_without_rendering()
    texts = []
    for line in axes.get_lines():
        xs, ys = (list(values) for values in line.get_data())
        if xs and not line.get_label().startswith("_"):
            last = max(range(len(xs)), key=lambda place: xs[place])
            text = axes.annotate(
                line.get_label(),
                (xs[last], ys[last]),
                (6, 0),
                xycoords=line.get_transform(),
                textcoords="offset points",
                verticalalignment="center",
                color=line.get_color(),
                fontsize=fontsize,
                annotation_clip=False,
            )
            texts.append((text, text.get_window_extent()))
    columns: list[list[tuple[Any, Any]]] = []
    right = float("-inf")
    for text, box in sorted(texts, key=lambda labelled: labelled[1].x0):
        if box.x0 >= right + box.height:  # the layout moves them a little yet
            columns.append([])
        columns[-1].append((text, box))
        right = max(right, box.x1)
    for column in columns:
        column.sort(key=lambda labelled: labelled[1].y0)
        gap = 1.05 * max(box.height for _, box in column)
        places = apart([box.y0 for _, box in column], gap)
        for (text, box), place in zip(column, places):
            text.set_position((6, (place - box.y0) * 72 / axes.figure.dpi))


def apart(places: list[float], gap: float) -> list[float]:
    """Return ascending places moved by as little as gives each a gap to the next.

    >>> apart([0, 1, 8], gap=2)
    [-0.5, 1.5, 8.0]
    """
    blocks: list[list[float]] = []  # of places that touch
    for place in places:
        block = [place]
        while blocks and _first(block, gap) < _first(blocks[-1], gap) + gap * len(blocks[-1]):
            block = blocks.pop() + block
        blocks.append(block)
    return [_first(block, gap) + gap * at for block in blocks for at in range(len(block))]


def _first(block: list[float], gap: float) -> float:
    """Return the first place of a block, which is centred at the mean of its places."""
    return sum(block) / len(block) - gap * (len(block) - 1) / 2
