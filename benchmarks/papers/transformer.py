"""Checks on a small transformer of what README advises for Adam and its kind."""

from __future__ import annotations

from typing import Any

from benchmarks.papers.parts import NOT_RUN, Claim, Measured, Part, Row, Scale, formatted, times
from hvd_gradcomp.cli import style

# By key: the compressor, and whether moments are those of single samples.
METHODS = {
    "none": ("NoneCompressor()", False),
    "qsgd": ("QSGDCompressor(bits=4)", False),
    "terngrad": ("TernGradCompressor()", False),
    "onebit": ("OneBitCompressor()", False),
    "variance-1": ("VarianceCompressor(alpha=1)", False),
    "variance-2": ("VarianceCompressor(alpha=2)", False),
    "variance-2-samples": ("VarianceCompressor(alpha=2)", True),
    "hybrid-0.1": ("HybridCompressor(tau=0.1, alpha=2)", False),
    "hybrid-0.01": ("HybridCompressor(tau=0.01, alpha=2)", False),
    "sparse-gd": ("SparseGDCompressor(density=0.01)", False),
    "egc": ("EGCCompressor(K=1024, momentum=0)", False),
}
SHORT, LONG = 300, 1200  # steps, at the scale of the other parts
LONGER = ("none", "qsgd", "variance-1", "sparse-gd")
NEAR = 0.05  # nats
FAST, SLOW = "transformers, 1 Gb/s", "transformers, 100 Mb/s"  # the advice
QUANTIZERS, OTHERS = ("qsgd", "terngrad", "onebit"), ("hybrid-0.1", "sparse-gd", "egc")


def rows() -> list[Row]:
    lengths = [(SHORT, method) for method in METHODS] + [(LONG, method) for method in LONGER]
    return [
        Row(
            key=f"{method}-{steps}",
            title=f"`{METHODS[method][0]}`{_moments(method)}, {steps:,} steps",
            compressor=METHODS[method][0],
            task="transformer",
            optimizer="adamw",
            rate=0.001,
            schedule="constant",
            moments=METHODS[method][1],
            length=steps / Scale().steps,
            base=f"none-{steps}",
        )
        for steps, method in lengths
    ]


def _moments(method: str) -> str:
    if not method.startswith(("variance", "hybrid")):
        return ""
    return ", moments of samples" if METHODS[method][1] else ", moments of steps"


def claims(measured: Measured) -> list[Claim]:
    """The advice for a link of 1 Gb/s and for slow ones, each way that it could be wrong."""
    every = []
    for steps, method in [(SHORT, "qsgd"), (LONG, "qsgd"), (SHORT, "terngrad")]:
        key = f"{method}-{steps}"
        gap, ratio = measured.away(key), measured.middle(key, "ratio")
        every.append(
            Claim(
                f"`{METHODS[method][0]}` loses at most {NEAR} nats in {steps:,} steps",
                SLOW if method == "terngrad" else FAST,
                f"{formatted(gap, '{:+.3f}')} at {times(ratio)} fewer bytes",
                None if gap is None else gap <= NEAR,
                "TernGrad has half the bytes of QSGD and 3 levels, not 15: more noise."
                if method == "terngrad"
                else "",
            )
        )
    for steps, method in [
        (SHORT, "variance-1"),
        (SHORT, "variance-2-samples"),
        (LONG, "variance-1"),
    ]:
        key, other = f"{method}-{steps}", f"qsgd-{steps}"
        gaps = measured.away(key), measured.away(other)
        ratios = measured.middle(key, "ratio"), measured.middle(other, "ratio")
        every.append(
            Claim(
                f"QSGD comes before `{METHODS[method][0]}`{_moments(method)}, {steps:,} steps: it "
                "sends fewer bytes and loses less",
                FAST,
                " beside ".join(
                    f"{formatted(gap, '{:+.3f}')} at {times(ratio)}"
                    for gap, ratio in zip(gaps, ratios)
                ),
                None if None in (*gaps, *ratios) else gaps[1] < gaps[0] and ratios[1] > ratios[0],
            )
        )
    gaps = {method: measured.away(f"{method}-{SHORT}") for method in (*QUANTIZERS, *OTHERS)}
    known = None not in gaps.values()
    others = ", ".join(f"`{METHODS[method][0]}`" for method in OTHERS)
    every.append(
        Claim(
            f"all quantizers lose less than {others}, {SHORT} steps",
            SLOW,
            f"{_listed(gaps, QUANTIZERS)} beside {_listed(gaps, OTHERS)}" if known else NOT_RUN,
            max(gaps[q] for q in QUANTIZERS) < min(gaps[o] for o in OTHERS) if known else None,
        )
    )
    return every


def _listed(gaps: dict[str, float], methods: tuple[str, ...]) -> str:
    return ", ".join(f"{gaps[method]:+.3f}" for method in methods)


DRAWN = {
    "qsgd": "QSGD, 4 bits",
    "terngrad": "TernGrad",
    "onebit": "1-bit",
    "variance-1": "Variance",
    "sparse-gd": "Sparse GD at 1 %",
    "egc": "EGC",
}


def draw(measured: Measured, figure: Any) -> None:
    curves, points = figure.subplots(1, 2)
    looks = dict(zip(("none", *DRAWN), style.lines(1 + len(DRAWN))))
    names = {"none": "none", **DRAWN}
    for method in LONGER:
        for result in measured[f"{method}-{LONG}"][:1]:
            steps, losses, _ = zip(*result["looks"])
            colour = looks[method]["color"]
            curves.plot(steps, losses, color=colour, label=names[method])
    curves.set_title("loss on held-out text, nats a character")
    curves.set_xlabel("step")
    for method, name in DRAWN.items():
        for result in measured[f"{method}-{SHORT}"][:1]:
            points.plot([result["ratio"]], [result["score"]], label=name, **looks[method])
    base = measured.middle(f"none-{SHORT}")
    if base is not None:
        points.axhline(base, color=looks["none"]["color"], linewidth=1, label="none")
    points.set_xscale("log")
    points.set_title(f"loss after {SHORT} steps, nats a character")
    points.set_xlabel("times fewer bytes")


PART = Part(
    name="transformer",
    title="A transformer and AdamW: what is advised for Adam and its kind",
    settings=(
        "No paper: a GPT of 0.8 million parameters (4 blocks of width 128, pre-norm, tied "
        "embedding) over the characters of the Bible, 16 windows of 32 characters a step on all "
        "ranks together, AdamW at a constant rate of 0.001, weight decay 0.01, the norm clipped at "
        "1. `here` is the loss on the last tenth of the text, in nats a character: less is better."
    ),
    rows=tuple(rows()),
    claims=claims,
    draw=draw,
    source="advice",
)
