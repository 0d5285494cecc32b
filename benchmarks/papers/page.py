"""The page of the site and its figures, made of what was measured; no number is typed."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks.papers import phases_page
from benchmarks.papers.parts import (
    AT_LENGTH,
    FRACTION,
    NEAR,
    NOT_RUN,
    Claim,
    Measured,
    Part,
    Result,
    Row,
    Scale,
    middle,
    times,
)
from benchmarks.papers.phases import Phases
from benchmarks.papers.sizes import Sizes
from benchmarks.papers.sizes_page import TITLE, section, within
from hvd_gradcomp.cli import style

HOLDS = "holds"
VERDICTS = {True: HOLDS, False: "**does not hold**", None: NOT_RUN}
WEAKER = "in its direction"
HEAD = """---
hide-toc: true
---

# The papers' claims, {title}

"""
HOW = """Each of the four papers was trained again, on data that anyone can get: 60,000 images of
clothes (Debian's `dataset-fashion-mnist`) and the King James Bible (`bible-kjv`). What a paper says
stands beside what came out here. The page is written by the command below, from the rows that it
has measured; what was not run says so.

```{{code-block}} console
:class: target

$ make papers ARGS="{length}--list"
$ make papers ARGS="{length}--parts variance --seeds 3"
$ make papers{all}
```

{other}

"""


def write(parts: Iterable[Part], folder: Path, target: Path) -> None:
    """Writes the page, and draws a figure for each part that has rows."""
    every = [Measured(part, folder) for part in parts]
    target.parent.mkdir(parents=True, exist_ok=True)
    every = [measured for measured in every if measured.scale] or every
    for measured in every:
        if any(measured[row.key] for row in measured.part.rows):
            draw(measured, measured.path.with_suffix(".png"))
    figures = Path(os.path.relpath(folder, target.parent))
    target.write_text(text(every, figures, length_of(every)))


def draw(measured: Measured, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({**style.SETTINGS, "axes.titlesize": 10}):
        figure = pyplot.figure(figsize=(10, 4), layout="constrained")
        measured.part.draw(measured, figure)
        for axes in figure.axes:
            style.label_ends(axes)
        figure.savefig(path)
        pyplot.close(figure)


def text(every: Iterable[Measured], figures: Path, length: str = "") -> str:
    """Return the page.

    Args:
        every: what was measured.
        figures: where these are, from the page.
        length: the command's arguments for trainings of this length, and a space.
    """
    every = [*every]
    sections = "".join(_section(measured, figures, length) for measured in every)
    sizes = Sizes(every[0].path.parent)
    head = HEAD.format(title="at length" if length else "and what was measured")
    how = HOW.format(
        length=length,
        all=f' ARGS="{length.rstrip()}"' if length else "",
        other="The same in short trainings, and more of them: [the papers' claims](papers.md)."
        if length
        else "Some of it in 16 times as many steps: [at length](papers-long.md).",
    )
    timed = phases_page.section(Phases.beside(every[0].path.parent)) if not length else ""
    head += _summary(every, sizes) + how + _network(every)
    return head + sections + section(every, sizes) + timed


def length_of(every: Iterable[Measured]) -> str:
    """Return the command's argument for the length of what was measured, and a space."""
    return "--long " if any(measured.scale == AT_LENGTH for measured in every) else ""


# What the claims come down to, by part; how many hold is counted.
GISTS = {
    "variance": "accuracy holds with Adam and hardly with momentum SGD; trainings this short send "
    "several times more than the paper's",
    "egc": "it sends even less than it says, and here that costs accuracy; 2 bins are indeed best",
    "gradiveq": "accuracy holds, though a basis leaves out two fifths of what it projects; QSGD is "
    "0.9 points better at the same ratio",
    "lgc": "its code costs nothing beside what it selects, and selecting 0.1 % costs accuracy; in "
    "the paper's networks the ring sends less than ScaleCom, and a server more than the paper says",
    "transformer": "QSGD is level with no compression; Variance sends more and loses more",
    "local": "averaging every 15 steps is nearly free, 8-bit integers on top are; outer momentum "
    "at these rates costs most where rounds are short",
    "today": "8-bit floats and integers lose nothing at 4 times fewer bytes; of those that send "
    "far less, PowerSGD, Signum and DeMo lose least; Elias-Fano and 4 bits make 230 to 250 times "
    "fewer bytes of top-k's 75",
}
GISTS_AT_LENGTH: dict[str, str] = {
    "variance": "with momentum SGD all of Variance's hold; with Adam it sends twice as much as the "
    "paper says; Hybrid is 1 to 3 points behind Strom",
    "egc": "accuracy holds up to K = 1024, at 1,700 times fewer elements, and falls at 2048; it "
    "sends less than it says",
    "gradiveq": "within 0.8 points at ratios of 8 to 32; an eighth of the dimensions leaves half "
    "of this network's energy out",
    "lgc": "accuracy holds on 2, 4 and 8 ranks, by the ring and with a server; in the paper's "
    "networks the ring sends less than ScaleCom, and a server more than the paper says",
}


def _summary(every: list[Measured], sizes: Sizes) -> str:
    """Counts the claims that hold, by part, before all else."""
    lines, total = [], Counter[str]()
    for measured in every:
        verdicts = Counter(verdict(claim) for claim in measured.part.claims(measured))
        total += verdicts
        checked = verdicts.total() - verdicts[NOT_RUN]
        gist = (GISTS if measured.scale == Scale() else GISTS_AT_LENGTH).get(measured.part.name, "")
        anchor = re.sub(r"[^\w -]", "", measured.part.title.lower()).replace(" ", "-")
        title = measured.part.title.partition(" (")[0]
        if checked:
            text_ = f"{verdicts[HOLDS]} of {checked} hold" + _weaker(verdicts)
            text_ += f": {gist}" if gist else ""
            lines.append(f"- [{title}](#{anchor}): {text_}.\n")
    if not lines:
        return ""
    anchor = TITLE.lower().replace(" ", "-").replace("'", "")
    lines += [f"- [{TITLE}](#{anchor}): {text}.\n" for text in within(sizes)]
    steps = next(measured.scale.steps for measured in every if measured.scale)
    return (
        f"**In short.** Of {total.total() - total[NOT_RUN]} claims {total[HOLDS]} hold here"
        f"{_weaker(total)}, in trainings of small networks of {steps:,} steps. A claim holds in "
        f"its direction if accuracy is within {NEAR} points of it, or a ratio at least one part in "
        f"{FRACTION} of it.\n\n{''.join(lines)}\n"
    )


def verdict(claim: Claim) -> str:
    """Return what the page says of a claim."""
    return WEAKER if claim.holds is False and claim.weaker else VERDICTS[claim.holds]


def _weaker(verdicts: Counter[str]) -> str:
    return f", {verdicts[WEAKER]} in their direction" if verdicts[WEAKER] else ""


def _network(every: list[Measured]) -> str:
    """Describe how these trainings differ from those of all papers."""
    scale = next((measured.scale for measured in every if measured.scale), None)
    sizes = {
        measured.part.row(one["key"]).task: one["result"]["parameters"]
        for measured in every
        for one in measured.content["rows"]
        if one["key"] in [row.key for row in measured.part.rows]
    }
    if scale is None:
        return ""
    lines = [
        f"Images: a VGG-like network of {sizes.get('images', 0):,} parameters without dropout, "
        f"{scale.images:,} images, {scale.epochs} epochs, {scale.steps} steps of 64 images on all "
        "ranks together, accuracy on the 10,000 test images. "
    ]
    if "text" in sizes:
        lines.append(
            f"Text: an LSTM over characters of {sizes['text']:,} parameters, as many steps of 32 "
            "windows of 64 characters, perplexity a character on the last tenth of the text. "
        )
    lines.append(
        "All papers trained larger networks for far longer. Ratios are those of the whole run, "
        "means over ranks; bytes are counted where they are handed to Horovod, headers included; "
        "`behind` is the norm of what a rank still keeps at the end over that of the gradient that "
        "was exchanged last. "
        "Where there are several seeds, numbers are medians, and the spread is worst to best; with "
        "one seed a difference of a point means little. Ranks of one machine, over gloo, which did "
        "other things too: so there are no times but the processor's. Rows that name no "
        "`index_coding` were run before `elias_fano` was the default: their indices took 2 bits "
        "more each (LGC's 0.3), those of Variance, Hybrid and Strom 28 to 31 bits.\n\n"
    )
    return "".join(lines)


def _section(measured: Measured, figures: Path, length: str) -> str:
    part = measured.part
    done = [row for row in part.rows if measured[row.key]]
    seeds = {len(measured[row.key]) for row in done}
    several = " to ".join(str(n) for n in sorted({min(seeds), max(seeds)})) if seeds else "no"
    lines = [f"## {part.title}\n\n{part.settings}\n"]
    lines.append(
        f'`make papers ARGS="{length}--parts {part.name}"`: {len(done)} of {len(part.rows)} rows '
        f"were run, with {several} seed{'' if several == '1' else 's'}.\n"
    )
    claims = part.claims(measured)
    lines.append(f"| claim | {part.source} | here | |\n|---|---|---|---|")
    for claim in claims:
        ours = claim.ours if re.search(r"\d", claim.ours) or NOT_RUN not in claim.ours else NOT_RUN
        lines.append(f"| {claim.text} | {claim.paper} | {ours} | {verdict(claim)} |")
    reasons = dict.fromkeys(claim.why for claim in claims if claim.holds is False and claim.why)
    lines += [f"\n{why}" for why in reasons]
    heads = ["method", "ranks", *(["paper"] if _papers(part) else []), "here", "beside none"]
    heads += ["elements", "bytes", "behind", *(head for head, _ in part.columns)]
    lines.append(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    lines += [f"| {' | '.join(_cells(measured, row))} |" for row in part.rows]
    if done:
        lines.append(f"\n![{part.title}]({figures}/{part.name}.png)")
    return "\n".join(lines) + "\n\n"


# By task.
SCORES = {
    "images": "{:.2f} %",
    "text": "{:.2f}",
    "transformer": "{:.3f}",
    "transformer-1": "{:.3f}",
}


def _cells(measured: Measured, row: Row) -> list[str]:
    results = measured[row.key]
    first = [row.title, str(row.ranks), *([row.paper] if _papers(measured.part) else [])]
    if not results:
        return [*first, NOT_RUN, *[""] * (4 + len(measured.part.columns))]
    base = measured.middle(row.base) if row.base and row.base != row.key else None
    score = middle(results, "score")
    form = SCORES[row.task]
    shown = f"{form.format(score)}{_spread(results, row)}"
    signed = form.removesuffix(" %").replace(":", ":+")
    gap = "" if base is None else signed.format(score - base)
    ratios = [times(middle(results, name)) for name in ("element_ratio", "ratio")]
    behind = middle(results, "behind")
    ratios.append("" if behind is None else f"{behind:.1f}")
    return [*first, shown, gap, *ratios, *(column(results) for _, column in measured.part.columns)]


def _papers(part: Part) -> bool:
    """Tells whether a paper has numbers to stand beside those of the rows."""
    return any(row.paper for row in part.rows)


def _spread(results: list[Result], row: Row) -> str:
    scores = [result["score"] for result in results]
    form = SCORES[row.task].removesuffix(" %")
    ends = form.format(min(scores)), form.format(max(scores))
    return " ({} to {})".format(*ends) if len(scores) > 1 else ""
