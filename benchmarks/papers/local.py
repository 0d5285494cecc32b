"""Fewer exchanges: loss against bytes by the number of local steps, dense and compressed."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.papers.parts import NOT_RUN, Claim, Measured, Part, Row, Scale, formatted, times
from hvd_gradcomp.cli import style


class Way(NamedTuple):
    """Compressor of what travels after some local steps, and the outer optimizer."""

    title: str
    compressor: str
    outer: str


WAYS = {
    "averaged": Way("parameters averaged", "NoneCompressor()", "OuterSGD(1, 0)"),
    "dense": Way("DiLoCo", "NoneCompressor()", "OuterSGD(0.7, 0.9)"),
    "int8": Way("averaged, 8-bit integers", "Int8Compressor()", "OuterSGD(1, 0)"),
    "sparse": Way("SparseLoCo", "ChunkedTopKCompressor()", "OuterSGD(1, 0)"),
}
EVERY = (1, 4, 15, 30, 100)
STEPS, USUAL = 1200, 15
NEAR = 0.05  # nats
STREAMED, BASE = "streamed-15", "none"
MOMENTA = {"onebit": "OneBitCompressor()", "sparse-gd": "SparseGDCompressor(density=0.01)"}


def _row(key: str, title: str, compressor: str = "NoneCompressor()", **how: str) -> Row:
    return Row(
        key=key,
        title=title,
        compressor=compressor,
        task="transformer",
        optimizer="adamw",
        rate=0.001,
        schedule="constant",
        length=STEPS / Scale().steps,
        base=BASE,
        **how,
    )


def rows() -> list[Row]:
    every = [_row(BASE, "none, gradients in each step")]
    for key, method in WAYS.items():
        for steps in EVERY:
            local = f"every={steps}, outer={method.outer}"
            every.append(_row(f"{key}-{steps}", _title(key, steps), method.compressor, local=local))
    every.append(
        _row(
            STREAMED,
            f"averaged every {USUAL} steps, 3 fragments in turn, applied 2 steps later",
            local=f"every={USUAL}, outer=OuterSGD(1, 0), fragments=3, delay=2",
        )
    )
    for key, compressor in MOMENTA.items():
        late = f"after({STEPS // 5}, None, {compressor})"
        every.append(_row(f"gradients-{key}", f"gradients, `{late}`", late))
        title = f"momenta, `{compressor}`, the same steps dense"
        momenta = f"warmup_steps={STEPS // 5}"
        every.append(_row(f"momenta-{key}", title, compressor, momenta=momenta))
    return every


def _title(key: str, steps: int) -> str:
    return f"{WAYS[key].title}, every {'step' if steps == 1 else f'{steps} steps'}"


def _beside(
    measured: Measured, text: str, expected: str, key: str, other: str, near: float
) -> Claim:
    """Hold a row against another one: its loss is at most `near` above."""
    gap, ratios = (
        measured.away(key, other),
        [measured.middle(each, "ratio") for each in (key, other)],
    )
    ours = f"{formatted(gap, '{:+.3f}')} at {times(ratios[0])} beside {times(ratios[1])}"
    holds = None if gap is None else gap <= near
    return Claim(text, expected, NOT_RUN if gap is None else ours, holds)


def claims(measured: Measured) -> list[Claim]:
    """The papers' order of things, and what is advised."""
    every = []
    for key in ("averaged", "dense"):
        every += [
            _beside(
                measured,
                f"{_title(key, steps)}: at most {NEAR} nats behind gradients in each step",
                "DiLoCo: level with data-parallel training, after 500 steps each",
                f"{key}-{steps}",
                BASE,
                NEAR,
            )
            for steps in EVERY[1:]
        ]
    every += [
        _beside(
            measured,
            f"{_title('sparse', steps)}, is no worse than DiLoCo",
            "SparseLoCo: better than DiLoCo",
            f"sparse-{steps}",
            f"dense-{steps}",
            0.0,
        )
        for steps in EVERY[1:]
    ]
    more = [
        (
            f"{_title('int8', USUAL)}, loses nothing beside float32: at most 0.02 nats",
            "Streaming DiLoCo: 4 bits lose nothing",
            f"int8-{USUAL}",
            f"averaged-{USUAL}",
            0.02,
        ),
        (
            f"Nesterov's momentum outside is better than averaging, every {USUAL} steps",
            "DiLoCo: Nesterov is the best of the outer optimizers",
            f"dense-{USUAL}",
            f"averaged-{USUAL}",
            0.0,
        ),
        (
            f"fragments in turn with a delay lose at most {NEAR} nats",
            "Streaming DiLoCo: level with DiLoCo",
            STREAMED,
            f"averaged-{USUAL}",
            NEAR,
        ),
    ]
    for key, compressor in MOMENTA.items():
        text = f"`{compressor}` of momenta loses less than of gradients"
        more.append((text, "1-bit Adam", f"momenta-{key}", f"gradients-{key}", 0.0))
    return [*every, *(_beside(measured, *each) for each in more)]


def draw(measured: Measured, figure: Any) -> None:
    points, curves = figure.subplots(1, 2)
    for look, (key, method) in zip(style.lines(len(WAYS)), WAYS.items()):
        known = [steps for steps in EVERY if measured[f"{key}-{steps}"]]
        ratios = [measured.middle(f"{key}-{steps}", "ratio") for steps in known]
        scores = [measured.middle(f"{key}-{steps}") for steps in known]
        points.plot(ratios, scores, label=method.title, **look)
        for steps, ratio, score in zip(known, ratios, scores) if key != "int8" else ():
            points.annotate(
                str(steps),
                (ratio, score),
                (0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=look["color"],
            )
    base = measured.middle(BASE)
    if base is not None:
        points.axhline(base, color=style.INK, linewidth=1, label="gradients in each step")
    points.set_xscale("log")
    points.set_title("nats a character, by steps between exchanges")
    points.set_xlabel("times fewer bytes")
    names = {f"{key}-{USUAL}": method.title for key, method in WAYS.items()}
    names[STREAMED] = "averaged in 3 fragments"
    looks = dict(zip(names, style.lines(len(names))))
    looks[BASE], names[BASE] = {"color": style.INK}, "gradients in each step"
    for key, name in names.items():
        for result in measured[key][:1]:
            steps, losses, _ = zip(*result["looks"])
            curves.plot(steps, losses, label=name, **looks[key])
    curves.set_title(f"nats a character, exchanges every {USUAL} steps")
    curves.set_xlabel("step")


PART = Part(
    name="local",
    title="Fewer exchanges: local steps, dense and compressed",
    settings=(
        "Douillard et al. 2023 and 2025, Sarfi et al. 2025, on the GPT and the text of the part "
        f"about transformers: AdamW at a constant rate of 0.001, {STEPS:,} steps, two ranks with "
        "8 windows each. `here` is the loss on the last tenth of the text after a last exchange, "
        "less is better. DiLoCo: outer Nesterov of rate 0.7 and momentum 0.9, which in the end "
        "makes seven times the inner steps; the others have an outer rate of 1 and no momentum. "
        "SparseLoCo: 64 of 4,096 elements in 2 bits. The last rows exchange in each step: "
        "compressed gradients, and Adam's momentum (Tang et al. 2021). Rates were not tuned. The "
        "papers train models of 60 million parameters and more for 16,000 steps and more."
    ),
    rows=tuple(rows()),
    claims=claims,
    draw=draw,
)
