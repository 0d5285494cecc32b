"""Kuang et al. 2019, Tables I to IV, Figures 2 and 3: images and a language model."""

from __future__ import annotations

from typing import Any

from benchmarks.papers.parts import (
    FRACTION,
    NEAR,
    NOT_RUN,
    Claim,
    Measured,
    Part,
    Row,
    formatted,
    times,
)

KS = {256: (0.7457, 269), 512: (0.7446, 524), 1024: (0.7462, 1041), 2048: (0.7056, 2077)}
RANKS = {  # Table III: baseline, Gradient Dropping, EGC, and the ratio of EGC
    2: (72.92, 73.34, 74.40, 1038),
    4: (71.30, 71.22, 72.62, 1041),
    8: (69.17, 69.96, 70.03, 1044),
}
DROPPING = "GradientDroppingCompressor(ratio=0.99)"


def egc(K: int = 1024) -> str:
    return f"EGCCompressor(K={K}, entropy_interval=100)"


def image_rows() -> list[Row]:
    rows = []
    for ranks, (none, dropping, ours, reached) in RANKS.items():
        rows += [
            Row(
                key=f"{name}-{ranks}",
                title=title,
                compressor=compressor,
                paper=f"{paper:.2f} %, {ratio}",
                ranks=ranks,
                schedule="corrected",
                base=f"none-{ranks}",
            )
            for name, title, compressor, paper, ratio in (
                ("none", "none", "NoneCompressor()", none, "1x"),
                ("dropping", f"`{DROPPING}`", DROPPING, dropping, "100x"),
                ("egc", f"`{egc()}`", egc(), ours, f"{reached}x"),
            )
        ]
    return rows


def k_rows() -> list[Row]:
    """By K on two ranks."""
    return [
        Row(
            key=_key(K),
            title=f"`{egc(K)}`",
            compressor=egc(K),
            paper=f"{100 * accuracy:.2f} %, {ratio}x",
            schedule="corrected",
            base="none-2",
        )
        for K, (accuracy, ratio) in KS.items()
        if K != 1024  # that row is there by the number of ranks
    ]


def _key(K: int) -> str:
    return "egc-2" if K == 1024 else f"k-{K}"


ROWS = (
    *(row for row in image_rows() if row.ranks == 2),
    *k_rows(),
    Row(
        key="constant",
        title=f"`{egc()}`, learning rate not corrected",
        compressor=egc(),
        schedule="constant",
        base="none-2",
    ),
    Row(
        key="entropy",
        title="none, the entropy of gradients by bins",
        schedule="corrected",
        watch="entropy",
        base="none-2",
    ),
    *(
        Row(
            key=f"text-{name}",
            title=f"LSTM, {title}",
            compressor=compressor,
            paper=paper,
            task="text",
            rate=1.0,
            schedule="corrected",
            base="text-none",
        )
        for name, title, compressor, paper in (
            ("none", "none", "NoneCompressor()", "69.48, 1x"),
            ("dropping", f"`{DROPPING}`", DROPPING, "67.84, 100x"),
            ("egc", f"`{egc()}`", egc(), "69.40, 1098x"),
        )
    ),
    *(row for row in image_rows() if row.ranks > 2),
)


def claims(measured: Measured) -> list[Claim]:
    return [*_by_k(measured), *_by_ranks(measured), *_text(measured), *_others(measured)]


def _by_k(measured: Measured) -> list[Claim]:
    every = []
    for K, (_, ratio) in KS.items():
        reached = measured.middle(_key(K), "element_ratio")
        every.append(
            Claim(
                f"K = {K}: about K elements for one that is sent (Table I)",
                f"{ratio}x",
                times(reached),
                None if reached is None else K * 0.8 <= reached <= K * 1.25,
                "The density is the entropy over K."
                + _entropy(measured)
                + " On the other side each "
                "layer sends an element at least, and most layers here have fewer than K.",
                reached is not None and reached >= ratio / FRACTION,
            )
        )
    scores = [measured.middle(_key(K)) for K in KS]
    paper = [100 * accuracy for accuracy, _ in KS.values()]
    known = None not in scores
    every.append(
        Claim(
            "accuracy is the same up to K = 1024 and falls at 2048 (Table I, Figure 3)",
            ", ".join(f"{accuracy:.1f}" for accuracy in paper),
            ", ".join(formatted(score, "{:.1f}") for score in scores),
            max(scores[:3]) - min(scores[:3]) <= 1.0 and scores[3] < min(scores[:3])
            if known
            else None,
            weaker=known and max(scores[:3]) - min(scores[:3]) <= NEAR and scores[3] < scores[0],
        )
    )
    return every


def _entropy(measured: Measured) -> str:
    """Bits of two bins, which the ratio follows."""
    seen = [result["seen"] for result in measured["entropy"]]
    return f" It was {seen[0][0][1]:.2f} bits here (2 bins)." if seen else ""


def _kept(measured: Measured) -> str:
    """Why accuracy is behind."""
    kept = [measured.middle(f"{name}-2", "behind") for name in ("egc", "dropping")]
    if None in kept:
        return ""
    return (
        f"Accuracy: on 2 ranks a rank still keeps {kept[0]:.0f} times the norm of an exchanged "
        f"gradient at the end with EGC, {kept[1]:.0f} times with Gradient Dropping. That is not in "
        f"the model yet, and these trainings have {measured.length}."
    )


def _by_ranks(measured: Measured) -> list[Claim]:
    every = []
    for ranks, (none, dropping, ours, _) in RANKS.items():
        gaps = [measured.away(f"egc-{ranks}"), measured.away(f"egc-{ranks}", f"dropping-{ranks}")]
        every.append(
            Claim(
                f"more accurate than none and than Gradient Dropping, {ranks} ranks (Table III)",
                f"{ours - none:+.2f} and {ours - dropping:+.2f} points",
                " and ".join(formatted(gap, "{:+.2f}") for gap in gaps),
                None if None in gaps else min(gaps) >= 0.0,
                _kept(measured),
                None not in gaps and min(gaps) >= -NEAR,
            )
        )
    return every


def _text(measured: Measured) -> list[Claim]:
    here = measured.away("text-egc")
    ratio = measured.middle("text-egc", "element_ratio")
    return [
        Claim(
            "an LSTM's perplexity matches that of none (Table IV)",
            "69.40 beside 69.48, a word, at 1,098x",
            f"{formatted(measured.middle('text-egc'), '{:.2f}')} beside "
            f"{formatted(measured.middle('text-none'), '{:.2f}')}, a character, at {times(ratio)}",
            None
            if here is None
            else measured.middle("text-egc") <= 1.05 * measured.middle("text-none"),
            f"Perplexity: an LSTM over characters is still learning after {measured.length} "
            "(see the figure), and what is not sent yet is missing.",
            here is not None and measured.middle("text-egc") <= 1.15 * measured.middle("text-none"),
        )
    ]


def _others(measured: Measured) -> list[Claim]:
    seen = [result["seen"] for result in measured["entropy"]]
    gap = measured.away("egc-2", "constant")
    rates = [measured.middle(key, "rate") for key in ("egc-2", "constant")]
    return [
        Claim(
            "the entropy is smallest with 2 bins (Figure 2)",
            "N = 2",
            ", ".join(f"{bits:.2f} bits at {bins}" for bins, bits in seen[0]) if seen else NOT_RUN,
            seen[0][0][1] == min(bits for _, bits in seen[0]) if seen else None,
        ),
        Claim(
            "correcting the learning rate by the validation loss helps",
            "no number",
            f"{formatted(gap, '{:+.2f} points')}, rate {formatted(rates[0], '{:.4f}')} at the end "
            f"instead of {formatted(rates[1], '{:.4f}')}",
            None if gap is None else gap >= 0.0,
        ),
    ]


def draw(measured: Measured, figure: Any) -> None:
    by_k, by_ranks, text = figure.subplots(1, 3)
    for K in KS:
        for result in measured[_key(K)][:1]:
            by_k.plot([x for x, *_ in result["looks"]], [y for *_, y in result["looks"]], label=K)
    by_k.set_title("accuracy on held-out images by K, %")
    by_k.set_xlabel("step")
    for place, name in enumerate(("none", "dropping", "egc")):
        points = [(r, measured.middle(f"{name}-{r}")) for r in RANKS]
        known = [(ranks, score) for ranks, score in points if score is not None]
        if known:
            by_ranks.plot(*zip(*known), "o-", color=f"C{place}", label=name)
        for result in measured[f"text-{name}"][:1]:
            steps, _, scores = zip(*result["looks"])
            text.plot(steps, scores, color=f"C{place}", label=name)
    by_ranks.set_title("test accuracy by ranks, %")
    by_ranks.set_xlabel("ranks")
    text.set_title("perplexity on held-out text")
    text.set_xlabel("step")
    text.set_yscale("log")


PART = Part(
    name="egc",
    title="Entropy-based gradient compression (Kuang et al. 2019), Tables I to IV, Figures 2 and 3",
    settings=(
        "The paper: AlexNet on CIFAR-10 with 4 nodes by K, and with 2, 4 and 8; a two-layer LSTM "
        "over words of the Penn Treebank with 2. Here the batch of all ranks together stays the "
        "same, in the paper that of each rank. All rows but one correct the learning rate (section "
        "IV.B), by the loss on held-out data ten times a training; the entropy is taken anew every "
        "100 steps."
    ),
    rows=ROWS,
    claims=claims,
    draw=draw,
)
