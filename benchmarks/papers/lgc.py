"""Abrahamyan et al. 2021, Tables IV to VI, Figures 3 and 13: learned codes, by ring and server."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.papers import phases_page
from benchmarks.papers.models import WIDTHS
from benchmarks.papers.parts import (
    AS_GOOD,
    FRACTION,
    NEAR,
    NOT_RUN,
    Claim,
    Measured,
    Part,
    Result,
    Row,
    formatted,
    lost,
    middle,
    times,
)
from benchmarks.papers.phases import Phases
from benchmarks.papers.sizes import CASES, Sizes

FULL, TRAINED = 0.2, 0.5  # shares of all steps after which something is left out, and codes travel
FIRST = 9 * WIDTHS[0]  # weights of the first layer
LINK = "[bytes at the papers' sizes](papers.md#bytes-at-the-papers-sizes)"
TRAINING = "full_steps={0}, train_steps={1}"
RING = f'LGCCompressor("ring_allreduce", {TRAINING})'
SERVER = f'LGCCompressor("parameter_server", {TRAINING})'
VALUES = 'LGCCompressor("ring_allreduce", full_steps={0}, train_steps=10**6)'
PAPERS = (
    f'LGCCompressor("ring_allreduce", {TRAINING}, signs=False, scale="model", feedback="paper")'
)
SCALECOM = "after({0}, None, ScaleComCompressor(density=0.001))"
DGC = "after({0}, None, DGCCompressor(density=0.001))"
SPARSE = "after({0}, None, SparseGDCompressor(density=0.001))"


def method(name: str, title: str, compressor: str, ranks: int, paper: str = "") -> Row:
    return Row(
        key=f"{name}-{ranks}",
        title=title,
        compressor=compressor,
        paper=paper,
        ranks=ranks,
        phases=() if compressor == "NoneCompressor()" else (FULL, TRAINED),
        base=f"none-{ranks}",
    )


ROWS = (
    method("none", "none", "NoneCompressor()", 2, "91.88 %"),
    method("server", "LGC, parameter server", SERVER, 2, "93.27 %, 5709x / 8616x"),
    method("ring", "LGC, ring", RING, 2, "91.4 %, 3193x"),
    method("dgc", "DGC", DGC, 2, "93.2 %, 1000x"),
    method("sparse", "Sparse GD", SPARSE, 2, "91.82 %, 1000x"),
    Row(
        key="information",
        title="none, gradients of two ranks compared",
        watch="information",
        base="none-2",
    ),
    Row(
        key="fixed",
        title="0.1 % from the first step (Figure 13)",
        compressor="DGCCompressor(density=0.001)",
        phases=(FULL, TRAINED),
        base="none-2",
    ),
    Row(
        key="exponential",
        title="density falls exponentially to 0.1 % (Figure 13)",
        compressor="DGCCompressor(density=0.001, warmup_steps={0})",
        phases=(FULL, TRAINED),
        base="none-2",
    ),
    method("none", "none", "NoneCompressor()", 4, "93.75 %"),
    method("ring", "LGC, ring", RING, 4, "93.07 %, 2297x"),
    method("values", "the same leader and momentum, values in place of codes", VALUES, 4),
    method("scalecom", "ScaleCom", SCALECOM, 4),
    method("dgc", "DGC", DGC, 4, "93.87 %, 1000x"),
    method("server", "LGC, parameter server", SERVER, 4, "93.57 %, 8095x / 17000x"),
    method("paper", "LGC, ring, the paper's form", PAPERS, 4),
    method("none", "none", "NoneCompressor()", 8, "75.98 %"),
    method("ring", "LGC, ring", RING, 8, "75.91 %, 202x"),
    method("scalecom", "ScaleCom", SCALECOM, 8, "75.98 %, 96x"),
)


def beside_none(measured: Measured, key: str, what: str, paper: float, ratio: float) -> list[Claim]:
    gap, at_size = measured.away(key), reached_at_size(measured, key)
    reached = at_size[0] if at_size else measured.middle(key, "late_ratio")
    row = measured.part.row(key)
    return [
        Claim(
            f"{what}, {row.ranks} ranks: accuracy beside none",
            f"{paper:+.2f} points",
            formatted(gap, "{:+.2f} points"),
            None if gap is None else gap >= min(paper, 0.0) - AS_GOOD,
            _parted(measured),
            gap is not None and gap >= min(paper, 0.0) - NEAR,
        ),
        Claim(
            f"{what}, {row.ranks} ranks: bytes while codes travel",
            row.paper.partition(", ")[2],
            (by_rank(measured[key]) or NOT_RUN) + shown_at_size(at_size, key),
            None if reached is None else reached >= ratio / 2,
            _first(measured) if key.startswith("ring") else _server(measured[key]),
            reached is not None and reached >= ratio / FRACTION,
        ),
    ]


def reached_at_size(measured: Measured, key: str) -> tuple[float, ...]:
    """Return the ratios in the paper's network; empty if the row was not run, or not counted."""
    known = measured[key] and any(case.key == key for case in CASES)
    return Sizes.beside(measured.path.parent).of_workers(key) if known else ()


def shown_at_size(ratios: tuple[float, ...], key: str) -> str:
    """Say in which network a step has these ratios."""
    if not ratios:
        return ""
    network = next(case.network for case in CASES if case.key == key).partition(",")[0]
    return f"; in {network} {' / '.join(times(ratio) for ratio in ratios)}"


def _parted(measured: Measured) -> str:
    """Attribute the accuracy that the ring loses on four ranks to its causes."""
    steps = [
        measured.away("ring-4"),
        measured.away("dgc-4"),
        measured.away("values-4", "dgc-4"),
        measured.away("ring-4", "values-4"),
    ]
    if None in steps:
        return ""
    whole, sparse, leader, code = (f"{step:+.2f}" for step in steps)
    text = (
        f"Accuracy: of the {whole} points of the ring on 4 ranks {sparse} come with sending 0.1 % "
        f"at all (DGC, where each rank selects), {leader} with one rank that selects for all, "
        f"{code} with codes in place of values."
    )
    scalecom = measured.away("scalecom-4")
    if scalecom is not None:
        text += f" ScaleCom, one rank for all without momentum correction: {scalecom:+.2f}."
    return text


def _first(measured: Measured) -> str:
    """Why the ratio of bytes stays behind the paper's."""
    reached = measured.middle("ring-2", "late_ratio")
    if reached is None:
        return ""
    sent = 4 * measured["ring-2"][0]["parameters"] / reached
    return (
        f"Bytes: by the ring on 2 ranks a rank sends {sent:,.0f} a step in the small network, of "
        f"which {4 * FIRST} are the first layer's, which is sent whole (ScaleCom selects there "
        f"too). In the paper's networks: {LINK}."
    )


def _server(results: list[Result]) -> str:
    """Return why the ratio of bytes stays behind the paper's with a server."""
    if not results:
        return ""
    one = results[0]
    sent = sorted(4 * one["parameters"] / ratio for ratio in one["by_rank"])
    return (
        f"Bytes with a server, {len(sent)} ranks: {sent[0]:,.0f} to {sent[-1]:,.0f} a step in the "
        f"small network, of which {4 * FIRST} are the first layer's, which is sent whole. The most "
        "is that of the rank that is the server, whose answer to the others counts. In the paper's "
        f"networks, of the worker with a code and of the others, without the answer: {LINK}."
    )


def by_rank(results: list[Result]) -> str:
    """Byte ratios of the last phase, of the first seed's ranks, each once."""
    if not results:
        return ""
    return " / ".join(dict.fromkeys(f"{ratio:,.0f}x" for ratio in results[0]["by_rank"]))


def phases(results: list[Result]) -> str:
    """CPU time of a step in each phase."""
    spans = [span for span in zip(*(result["cpu_ms"] for result in results))]
    return ", ".join(f"{sorted(span)[len(span) // 2]:.0f}" for span in spans)


def shares(measured: Measured) -> tuple[float, float, float, float] | None:
    """Return shares of entropy: mutual information at 4 bits, by chance, the same at 32."""
    seen = [result["seen"] for result in measured["information"]]
    if not seen:
        return None
    levels = {bits: (entropy, mi, chance) for bits, entropy, mi, chance in seen[0]["levels"]}
    coarse, fine = levels[4], levels[32]
    return coarse[1] / coarse[0], coarse[2] / coarse[0], fine[1] / fine[0], fine[2] / fine[0]


def claims(measured: Measured) -> list[Claim]:
    ring = "LGC by the ring"
    every = [
        *beside_none(measured, "server-2", "LGC with a server", 93.27 - 91.88, 5709),
        *beside_none(measured, "ring-2", ring, 91.4 - 91.88, 3193),
        *beside_none(measured, "ring-4", ring, 93.07 - 93.75, 2297),
        *beside_none(measured, "server-4", "LGC with a server", 93.57 - 93.75, 8095),
        *beside_none(measured, "ring-8", ring, 75.91 - 75.98, 202),
    ]
    every += [
        _compared(measured, f"ring-{ranks}", f"scalecom-{ranks}", ranks, paper)
        for ranks, paper in ((4, ""), (8, "202x beside 96x, -0.07 points"))
    ]
    every += _costs(measured) + _information(measured) + _warmup(measured)
    every.append(phases_page.iterations(Phases.beside(measured.path.parent)))
    return every


def _compared(measured: Measured, ring: str, other: str, ranks: int, paper: str) -> Claim:
    gap = measured.away(ring, other)
    ratios = [measured.middle(key, "late_ratio") for key in (ring, other)]
    at_size = [*reached_at_size(measured, ring), *reached_at_size(measured, other)]
    small = f"{times(ratios[0])} beside {times(ratios[1])}"
    if len(at_size) == 2 and None not in ratios:
        ratios = at_size
        network = next(case.network for case in CASES if case.key == ring).partition(",")[0]
        small += f"; in {network} {times(ratios[0])} beside {times(ratios[1])}"
    holds = None if gap is None else ratios[0] > ratios[1] and gap >= -AS_GOOD
    return Claim(
        f"the ring sends less than ScaleCom and is as accurate, {ranks} ranks",
        paper or "no number",
        f"{small}, {formatted(gap, '{:+.2f} points')}",
        holds,
        _first(measured),
        gap is not None and ratios[0] > ratios[1] and gap >= -NEAR,
    )


def _costs(measured: Measured) -> list[Claim]:
    """Compare the loss by one leader's selection with that by the code."""
    selection = measured.away("values-4", "dgc-4")
    code = measured.away("ring-4", "values-4")
    form = measured.away("paper-4", "ring-4")
    return [
        Claim(
            "what one rank selects serves all, 4 ranks (values of its choice beside DGC's)",
            "no number",
            formatted(selection, "{:+.2f} points"),
            None if selection is None else selection >= -AS_GOOD,
            weaker=selection is not None and selection >= -NEAR,
        ),
        Claim(
            "a code in place of the same values costs nothing, 4 ranks",
            "no number",
            formatted(code, "{:+.2f} points"),
            None if code is None else code >= -AS_GOOD,
            weaker=code is not None and code >= -NEAR,
        ),
        Claim(
            "the paper's form of the code (no signs, one scale, its feedback) is as good as ours",
            "no number",
            formatted(form, "{:+.2f} points"),
            None if form is None else form >= -AS_GOOD,
            weaker=form is not None and form >= -NEAR,
        ),
    ]


def _information(measured: Measured) -> list[Claim]:
    share = shares(measured)
    ours = NOT_RUN
    if share is not None:
        ours = (
            f"{100 * share[0]:.0f} % at 16 levels, {100 * share[1]:.0f} % by chance; "
            f"{100 * share[2]:.0f} % at 2^32 levels, {100 * share[3]:.0f} % by chance"
        )
    return [
        Claim(
            "four fifths of the entropy of a gradient are common to two ranks (Figures 3 and 4)",
            "80 % at 2^32 levels",
            ours,
            None if share is None else share[0] - share[1] >= 0.5,
            "The share of mutual information is a matter of the quantizer: with so many levels "
            "nearly every element has one to itself, and a gradient whose elements were shuffled "
            "shares as much. `by chance` is that. With few levels, which leave several elements to "
            "each, little is common beyond chance.",
        )
    ]


def _warmup(measured: Measured) -> list[Claim]:
    """Figure 13: the loss falls faster where the first steps are whole."""
    keys = "dgc-2", "exponential", "fixed"
    ends = [_last_loss(measured[key]) for key in keys]
    known = None not in ends
    return [
        Claim(
            "training loss at the end is lower with whole gradients first than with exponential or "
            "fixed density (Figure 13)",
            "visibly",
            ", ".join(formatted(end, "{:.3f}") for end in ends),
            (ends[0] <= min(ends[1], ends[2])) if known else None,
            _uncertain([measured[key] for key in keys]) if known else "",
        )
    ]


def _tail(result: Result) -> list[float]:
    """Return the training loss in five stretches of the last tenth."""
    return [loss for _, loss in result["curve"][-5:]]


def _uncertain(every: list[list[Result]]) -> str:
    """Return the standard errors of the losses at the end, from the first seed."""
    tails = [_tail(results[0]) for results in every]
    errors = [statistics.stdev(tail) / len(tail) ** 0.5 for tail in tails]
    shown = ", ".join(f"{error:.3f}" for error in errors)
    return (
        f"Losses are means over the last tenth of one seed, with standard errors of {shown} over "
        "its five fifths."
    )


def _last_loss(results: list[Result]) -> float | None:
    """The mean over the last tenth, the median of seeds."""
    means = [{"loss": statistics.fmean(_tail(result))} for result in results]
    return middle(means, "loss")


def draw(measured: Measured, figure: Any) -> None:
    loss, share, code = figure.subplots(1, 3)
    for key, label in (
        ("none-2", "none"),
        ("fixed", "fixed"),
        ("exponential", "exponential"),
        ("dgc-2", "whole first"),
    ):
        for result in measured[key][:1]:
            loss.plot(*zip(*result["curve"]), label=label)
    loss.set_title("Figure 13: training loss")
    loss.set_xlabel("step")
    loss.set_yscale("log")
    for result in measured["information"][:1]:
        bits, entropy, mutual, chance = zip(*result["seen"]["levels"])
        share.plot(bits, [m / h for m, h in zip(mutual, entropy)], "o-", label="two ranks")
        share.plot(bits, [c / h for c, h in zip(chance, entropy)], "x--", label="by chance")
    share.set_title("mutual information / entropy")
    share.set_xlabel("bits of the quantizer")
    share.set_ylim(0, 1.05)
    for key in ("none-4", "dgc-4", "scalecom-4", "values-4", "ring-4", "paper-4"):
        for result in measured[key][:1]:
            code.plot([x for x, *_ in result["looks"]], [y for *_, y in result["looks"]], label=key)
    code.set_title("accuracy on held-out images, %")
    code.set_xlabel("step")


PART = Part(
    name="lgc",
    title="Learned gradient compression (Abrahamyan et al. 2021), Tables IV to VI, Figures 3, 13",
    settings=(
        "The paper: ResNet-50 on CIFAR-10 with 2 nodes, ResNet-101 with 4 (Table VI), ResNet-50 on "
        "ImageNet with 8 (Table IV), SGD with momentum; 200 whole steps and 300 that train the "
        "autoencoder, a tenth of all. Here a fifth of the steps is whole and three tenths train. "
        "`lost` is the share of the energy that the autoencoder misses, the median over steps; "
        "bytes by rank are those of the last phase; CPU is that of one rank's step by phase, on a "
        "machine that does other things too."
    ),
    rows=ROWS,
    claims=claims,
    draw=draw,
    columns=(("bytes by rank", by_rank), ("lost", lost), ("CPU ms by phase", phases)),
)
