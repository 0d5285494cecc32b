"""Yu et al. 2018: eight times less and beyond, slice lengths (Figure 5), how long a basis lasts."""

from __future__ import annotations

from typing import Any

from benchmarks.papers import phases_page
from benchmarks.papers.parts import NEAR, NOT_RUN, Claim, Measured, Part, Row, formatted, lost
from benchmarks.papers.phases import Phases

RATIOS = (8, 16, 32)


def compressor(ratio: int, more: str = "") -> str:
    return f"GradiVeQCompressor(ratio={ratio}, warmup_steps={{0}}{more})"


ROWS = (
    Row(key="none", title="none", paper="67.6 %", base="none"),
    Row(
        key="qsgd",
        title="`QSGDCompressor(bits=4)`",
        compressor="QSGDCompressor(bits=4)",
        paper="66.7 %, 8x",
        base="none",
    ),
    *(
        Row(
            key=f"ratio-{ratio}",
            title=f"GradiVeQ at {ratio}",
            compressor=compressor(ratio),
            paper="66.6 %, 8x" if ratio == 8 else "",
            phases=(0.2,),
            base="none",
        )
        for ratio in RATIOS
    ),
    Row(
        key="ratio-8-qsgd",
        title="GradiVeQ at 8, QSGD while sampling",
        compressor=compressor(8, ', sampling="qsgd"'),
        paper="66.6 %, 8x",
        phases=(0.2,),
        base="none",
    ),
    Row(key="slices", title="none, slices of gradients compared", watch="slices", base="none"),
)


def seen(measured: Measured) -> dict[str, Any] | None:
    results = measured["slices"]
    return results[0]["seen"] if results else None


def dips(measured: Measured) -> list[tuple[str, int, float, float]]:
    """Return for each layer the loss at F * D, and the mean of its neighbours on both sides."""
    every = []
    for layer in (seen(measured) or {"slices": []})["slices"]:
        block, curve = layer["filters x depth"], dict(layer["curve"])
        near = [curve.get(block * 3 // 4), curve.get(block * 5 // 4)]
        if block in curve and None not in near:
            every.append((layer["layer"], block, curve[block], sum(near) / 2))
    return every


def aged(measured: Measured) -> list[tuple[float, float]]:
    """Age and loss of a basis, means over the youngest and over the oldest quarter."""
    ages = (seen(measured) or {"ages": []})["ages"]
    quarter = len(ages) // 4
    if not quarter:
        return []
    ends = (ages[:quarter], ages[-quarter:])
    return [
        (sum(age for age, _ in e) / quarter, sum(loss for _, loss in e) / quarter) for e in ends
    ]


def _lasting(measured: Measured) -> list[Claim]:
    ages, loss = aged(measured), measured.middle("ratio-8", "lost")
    why = (
        "Energy: an eighth of the dimensions does not hold the gradients of this network: the "
        "figure has what the basis of one slice leaves out of others, in the steps that it was "
        "made of."
    )
    if ages:
        why += f" Age adds little: {ages[0][1]:.2f} are lost at first, {ages[1][1]:.2f} later."
    return [
        Claim(
            "correlation evolves slowly: the loss of a basis as it ages",
            "cycles of 400 steps",
            ", ".join(f"{loss:.2f} after {age:.0f} steps" for age, loss in ages) or NOT_RUN,
            ages[1][1] <= ages[0][1] + 0.1 if ages else None,
        ),
        Claim(
            "next to no energy is lost at a ratio of 8",
            "negligible",
            formatted(loss, "{:.2f}"),
            None if loss is None else loss <= 0.1,
            why,
        ),
    ]


def claims(measured: Measured) -> list[Claim]:
    every = []
    for ratio in RATIOS:
        key = f"ratio-{ratio}"
        gap, loss = measured.away(key), measured.middle(key, "lost")
        every.append(
            Claim(
                f"convolutions {ratio} times smaller: accuracy beside none",
                "-1.0 points" if ratio == 8 else "not tried",
                f"{formatted(gap, '{:+.2f} points')}, {formatted(loss, '{:.2f}')} of the energy "
                "lost",
                None if gap is None else gap >= -1.0,
                weaker=gap is not None and gap >= -1.0 - NEAR,
            )
        )
    better = None
    if None not in (measured.away("ratio-8"), measured.away("qsgd")):
        better = abs(measured.middle("ratio-8") - measured.middle("qsgd")) <= 1.0
    every.append(
        Claim(
            "as accurate as 4-bit QSGD at the same ratio",
            "-0.1 points",
            formatted(
                None if better is None else measured.middle("ratio-8") - measured.middle("qsgd"),
                "{:+.2f} points",
            ),
            better,
        )
    )
    found_dips = dips(measured)
    every.append(
        Claim(
            "the loss of another slice's basis drops at multiples of filters x depth (Figure 5)",
            "dramatically",
            "; ".join(
                f"{name} at {block}: {here:.2f}, beside it {near:.2f}"
                for name, block, here, near in found_dips
            )
            or NOT_RUN,
            all(here < 0.9 * near for _, _, here, near in found_dips) if found_dips else None,
        )
    )
    every += _lasting(measured)
    every.append(phases_page.aggregation(Phases.beside(measured.path.parent)))
    return every


def draw(measured: Measured, figure: Any) -> None:
    length, age, accuracy = figure.subplots(1, 3)
    look = seen(measured)
    if look is not None:
        for place, layer in enumerate(look["slices"]):
            sizes, losses = zip(*layer["curve"])
            block = layer["filters x depth"]
            length.plot(sizes, losses, ".-", color=f"C{place}", label=f"{layer['layer']}, {block}")
            if block <= max(sizes):
                length.axvline(block, color=f"C{place}", linestyle=":", linewidth=1)
        if look["ages"]:
            age.plot(*zip(*look["ages"]))
    length.set_title("loss by slice length")
    length.set_xscale("log")
    age.set_title("loss by age of the basis")
    age.set_xlabel("steps")
    for row in measured.part.rows:
        for result in measured[row.key][:1] if row.key != "slices" else ():  # trains as "none"
            steps, _, scores = zip(*result["looks"])
            accuracy.plot(steps, scores, label=row.key)
    accuracy.set_title("accuracy on held-out images, %")
    accuracy.set_xlabel("step")


PART = Part(
    name="gradiveq",
    title="GradiVeQ (Yu et al. 2018), Figures 4, 5 and 7",
    settings=(
        "The paper: ResNet-32 on CIFAR-100, 6 nodes, cycles of 100 steps of samples and 400 "
        "compressed ones, one basis a layer. Here the same cycles after a fifth of the steps, with "
        "our default slices. Layers that are no convolutions are sent whole, so the ratio of all "
        "bytes is far below that of the convolutions; `lost` is the median over steps."
    ),
    rows=ROWS,
    claims=claims,
    draw=draw,
    columns=(("lost", lost),),
)
