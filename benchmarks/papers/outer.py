"""Outer momentum: with and without dense first steps, by embeddings and by schedule of the rate."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

from benchmarks.papers.parts import NOT_RUN, Claim, Measured, Part, Row, Scale, formatted
from hvd_gradcomp.cli import style

STEPS, EVERY, SHORTER, DENSE_FIRST = 600, 15, 100, 200
NEAR = 0.1  # nats
NESTEROV, AVERAGED = "OuterSGD(0.7, 0.9)", "OuterSGD(1, 0)"


class Recipe(NamedTuple):
    """Initial embeddings, and schedule of the inner rate."""

    title: str
    task: str
    schedule: str
    rate: float


class Way(NamedTuple):
    """Way to exchange."""

    title: str
    local: str = ""


EMBEDDINGS = {"0.02": "transformer", "1": "transformer-1"}
SCHEDULES = {"constant": ("constant rate", 0.001), "cosine": ("warm-up and cosine", 0.003)}
RECIPES = {
    f"{std}-{schedule}": Recipe(f"embeddings of {std}, {title}", task, schedule, rate)
    for (std, task), (schedule, (title, rate)) in product(EMBEDDINGS.items(), SCHEDULES.items())
}
WAYS = {
    "none": Way("gradients in each step"),
    "averaged": Way("averaged", f"every={EVERY}, outer={AVERAGED}"),
    "averaged-late": Way(
        f"averaged after {SHORTER} dense steps",
        f"every={EVERY}, outer={AVERAGED}, warmup_steps={SHORTER}",
    ),
    "nesterov": Way("Nesterov", f"every={EVERY}, outer={NESTEROV}"),
    "nesterov-late": Way(
        f"Nesterov after {SHORTER} dense steps",
        f"every={EVERY}, outer={NESTEROV}, warmup_steps={SHORTER}",
    ),
    "nesterov-later": Way(
        f"Nesterov after {DENSE_FIRST} dense steps",
        f"every={EVERY}, outer={NESTEROV}, warmup_steps={DENSE_FIRST}",
    ),
}


def rows() -> list[Row]:
    return [
        Row(
            key=f"{recipe_key}/{key}",
            title=f"{recipe.title}: {method.title}",
            task=recipe.task,
            optimizer="adamw",
            rate=recipe.rate,
            schedule=recipe.schedule,
            length=STEPS / Scale().steps,
            base=f"{recipe_key}/none",
            local=method.local,
        )
        for (recipe_key, recipe), (key, method) in product(RECIPES.items(), WAYS.items())
    ]


def _claim(measured: Measured, key: str, text: str, said_by: str, other: str, near: float) -> Claim:
    """Hold a row against another one: its loss is at most `near` above."""
    gap = measured.away(key, other)
    holds = None if gap is None else gap <= near
    return Claim(text, said_by, NOT_RUN if gap is None else formatted(gap, "{:+.3f}"), holds)


def claims(measured: Measured) -> list[Claim]:
    """Hold averaging and `diloco()`, and what `LocalSteps` warns of, to the trainings."""
    every = []
    for key, recipe in RECIPES.items():
        base = f"{key}/none"
        every += [
            _claim(
                measured,
                f"{key}/averaged",
                f"{recipe.title}: averaging is at most {NEAR} nats behind gradients in each step",
                "`OuterSGD()`",
                base,
                NEAR,
            ),
            _claim(
                measured,
                f"{key}/nesterov-later",
                f"{recipe.title}: Nesterov after {DENSE_FIRST} dense first steps, as `diloco()` "
                f"has it, is at most {NEAR} nats behind",
                "`diloco()`",
                base,
                NEAR,
            ),
            _claim(
                measured,
                f"{key}/nesterov-later",
                f"{recipe.title}: Nesterov loses less with dense first steps than without",
                "warning without them",
                f"{key}/nesterov",
                0.0,
            ),
        ]
    return every


def draw(measured: Measured, figure: Any) -> None:
    drawn = {}
    for axes, (key, recipe) in zip(figure.subplots(1, len(RECIPES), sharey=True), RECIPES.items()):
        for look, (way_key, method) in zip(style.lines(len(WAYS)), WAYS.items()):
            for result in measured[f"{key}/{way_key}"][:1]:
                steps, losses, _ = zip(*result["looks"])
                (drawn[method.title],) = axes.plot(steps, losses, markersize=4, **look)
        axes.set_title(recipe.title.replace(", ", "\n"), fontsize=9)
        axes.set_xlabel("step")
        axes.set_ylim(top=3.0)  # nats; the first steps from larger embeddings leave the frame
    figure.axes[0].set_ylabel("loss on held-out text, nats a character")
    # Ends are too near each other for labels.
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=3, fontsize=8)


PART = Part(
    name="outer",
    title="Outer momentum, and dense first steps",
    settings=(
        "Douillard et al. 2023, on the GPT and the text of the part about transformers: AdamW, "
        f"{STEPS} steps, two ranks with 8 windows each, an exchange every {EVERY} steps without "
        "compression. Embeddings begin with a standard deviation of 0.02 or 1; the inner rate is "
        "0.001 throughout, or has a linear warm-up to 0.003 for a tenth of the steps and falls to "
        "a tenth by a cosine. `averaged` has `OuterSGD()`; Nesterov's outer momentum "
        f"is 0.9 at a rate of 0.7, with {DENSE_FIRST} dense first steps as `diloco()` has them, "
        f"with {SHORTER}, or from the first step. `here` is the loss on the last tenth of the text "
        "after a last exchange, less is better. Rates were not tuned."
    ),
    rows=tuple(rows()),
    claims=claims,
    draw=draw,
    source="held to",
)
