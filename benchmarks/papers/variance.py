"""Tsuzuku et al. 2018, Table 1: a VGG-like network, Adam and momentum SGD."""

from __future__ import annotations

from typing import Any

from benchmarks.papers.parts import (
    AS_GOOD,
    FRACTION,
    NEAR,
    Claim,
    Measured,
    Part,
    Row,
    formatted,
    times,
)

Table = dict[str, tuple[float, float]]

# By optimizer: what Table 1 has, accuracy in percent and compression ratio.
PAPER: dict[str, Table] = {
    "adam": {
        "none": (88.1, 1),
        "strom-0.001": (62.8, 88.5),
        "strom-0.01": (85.0, 230.1),
        "strom-0.1": (88.0, 6942.8),
        "variance-1": (88.9, 120.7),
        "variance-1.5": (88.9, 453.3),
        "variance-2": (88.9, 913.4),
        "hybrid-0.01": (85.0, 1942.2),
        "hybrid-0.1": (88.2, 12822.4),
    },
    "sgd": {
        "none": (91.7, 1),
        "strom-0.001": (84.8, 6.5),
        "strom-0.01": (10.6, 990.7),
        "strom-0.1": (71.6, 8485.0),
        "variance-1": (90.3, 52.4),
        "variance-1.5": (89.6, 169.2),
        "variance-2": (88.4, 383.6),
        "hybrid-0.01": (87.6, 983.9),
        "hybrid-0.1": (87.1, 12396.8),
    },
}
NAMES = {"adam": "Adam", "sgd": "momentum SGD"}
RATES = {"adam": 0.001, "sgd": 0.05}


FEWER_BYTES = {  # of a method with this at its end
    "latest": ", capacity='latest'",
    "coded": ", capacity='latest', index_coding='elias_fano'",
}


def compressor(method: str) -> str:
    name, _, rest = method.partition("-")
    value, _, how = rest.partition("-")
    options = FEWER_BYTES.get(how, "")
    return {
        "none": "NoneCompressor()",
        "strom": f"StromCompressor(tau={value}{options})",
        "variance": f"VarianceCompressor(alpha={value}{options})",
        "hybrid": f"HybridCompressor(tau={value}, alpha=2.0{options})",
    }[name]


def rows() -> list[Row]:
    return [
        Row(
            key=f"{optimizer}/{method}",
            title=f"{NAMES[optimizer]}, `{compressor(method)}`",
            compressor=compressor(method),
            paper=f"{accuracy} %, {times(ratio) if ratio > 1 else '1x'}",
            optimizer=optimizer,
            rate=RATES[optimizer],
            schedule="halved" if optimizer == "sgd" else "constant",
            moments=method.startswith(("variance", "hybrid")),
            base=f"{optimizer}/none",
        )
        for optimizer, table in PAPER.items()
        for method, (accuracy, ratio) in with_fewer_bytes(optimizer, table).items()
    ]


def with_fewer_bytes(optimizer: str, table: Table) -> Table:
    """Add rows that send the same in fewer bytes, for which the paper has one row."""
    more = {"adam": ("variance-2",), "sgd": ("strom-0.1", "variance-2", "hybrid-0.1")}[optimizer]
    return table | {f"{method}-{how}": table[method] for method in more for how in FEWER_BYTES}


def grows(measured: Measured) -> str:
    """Describe how the ratio of the first Variance row with one changes in a training."""
    for optimizer in PAPER:
        for alpha in ("1", "1.5", "2"):
            for result in measured[f"{optimizer}/variance-{alpha}"]:
                if result.get("sent"):
                    first, last = result["sent"][0], result["sent"][-1]
                    return (
                        f" With {NAMES[optimizer]}, alpha {alpha} it was {times(first[1])} in the "
                        f"first {first[0]} steps, {times(last[1])} in the last {first[0]} of "
                        f"{last[0]}."
                    )
    return ""


def kept(measured: Measured) -> str:
    """List the rows whose accuracy is behind, as far as it was measured."""
    pairs = []
    for method in ("variance-2", "strom-0.01", "hybrid-0.01", "hybrid-0.1"):
        behind = measured.middle(f"sgd/{method}", "behind")
        if behind is not None:
            pairs.append(f"{behind:.1f} with `{compressor(method)}`")
    if not pairs:
        return ""
    return (
        "Accuracy: what a rank still keeps at the end is not in the model. On momentum SGD that "
        f"is, in norms of the gradient exchanged last: {', '.join(pairs)}. With Strom and Hybrid "
        "an element moves by tau a step, whatever it has gathered."
    )


def claims(measured: Measured) -> list[Claim]:
    every = []
    short = (
        "Ratios are averages over a whole training and grow with it, as gradients become "
        f"ambiguous; these trainings have {measured.length}, the paper's 300 epochs."
        + grows(measured)
    )
    for optimizer, table in PAPER.items():
        of = NAMES[optimizer]
        for alpha in ("1", "1.5", "2"):
            key, (accuracy, ratio) = f"{optimizer}/variance-{alpha}", table[f"variance-{alpha}"]
            gap, paper = measured.away(key), accuracy - table["none"][0]
            reached = measured.middle(key, "element_ratio")
            every.append(
                Claim(
                    f"Variance, alpha {alpha}, {of}: accuracy beside none",
                    f"{paper:+.1f} points",
                    formatted(gap, "{:+.1f} points"),
                    None if gap is None else gap >= min(paper, 0.0) - AS_GOOD,
                    kept(measured),
                    gap is not None and gap >= min(paper, 0.0) - NEAR,
                )
            )
            every.append(
                Claim(
                    f"Variance, alpha {alpha}, {of}: elements for one that is sent",
                    times(ratio),
                    times(reached),
                    None if reached is None else reached >= ratio / 2,
                    short,
                    reached is not None and reached >= ratio / FRACTION,
                )
            )
        ratios = [
            measured.middle(f"{optimizer}/variance-{a}", "element_ratio") for a in (1, 1.5, 2)
        ]
        known = [ratio for ratio in ratios if ratio is not None]
        every.append(
            Claim(
                f"a larger alpha compresses more, {of}",
                ", ".join(times(table[f"variance-{a}"][1]) for a in (1, 1.5, 2)),
                ", ".join(map(times, ratios)),
                None if len(known) < 3 else known == sorted(known),
            )
        )
        for tau in ("0.01", "0.1"):
            keys = f"{optimizer}/hybrid-{tau}", f"{optimizer}/strom-{tau}"
            ours = [measured.middle(key, "element_ratio") for key in keys]
            scores = [measured.middle(key) for key in keys]
            paper = [table[key.partition("/")[2]] for key in keys]
            every.append(
                Claim(
                    f"Hybrid sends less than Strom at tau {tau}, {of}, and is not less accurate",
                    f"{times(paper[0][1])} beside {times(paper[1][1])}, "
                    f"{paper[0][0] - paper[1][0]:+.1f} points",
                    f"{times(ours[0])} beside {times(ours[1])}, "
                    + formatted(
                        None if None in scores else scores[0] - scores[1], "{:+.1f} points"
                    ),
                    None
                    if None in (*ours, *scores)
                    else ours[0] > ours[1] and scores[0] >= scores[1] - AS_GOOD,
                    kept(measured),
                    None not in (*ours, *scores)
                    and ours[0] > ours[1]
                    and scores[0] >= scores[1] - NEAR,
                )
            )
    return every


def draw(measured: Measured, figure: Any) -> None:
    """Figure 3 of the paper: accuracy over compression ratio."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (optimizer, table) in zip(panels, PAPER.items()):
        for place, method in enumerate(("none", "strom", "variance", "hybrid")):
            keys = [name for name in table if name.partition("-")[0] == method]
            points = [
                (result["element_ratio"], result["score"])
                for name in keys
                for result in measured[f"{optimizer}/{name}"]
            ]
            if points:
                axes.plot(*zip(*points), "o", color=f"C{place}", label=method)
        axes.set_xscale("log")
        axes.set_title(NAMES[optimizer])
        axes.set_xlabel("elements / elements sent")
    panels[0].set_ylabel("test accuracy, %")


PART = Part(
    name="variance",
    title="Variance-based gradient compression (Tsuzuku et al. 2018), Table 1",
    settings=(
        "The paper: CIFAR-10, its VGG-like network with dropout, 300 epochs, 8 workers of 64 "
        "images each, medians of five runs. Moments are those of single samples in both."
    ),
    rows=tuple(rows()),
    claims=claims,
    draw=draw,
)
