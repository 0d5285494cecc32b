"""Bytes against loss of the methods that people pick today, at equal steps, on one transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.papers.parts import NOT_RUN, Claim, Found, Part, Row, Scale, said, times
from hvd_gradcomp.cli import style


@dataclass(frozen=True)
class Method:
    """Compressor and the optimizer that its gradients go to.

    Attributes:
        compressor: an expression of hvd_gradcomp's names.
        optimizer: "adamw", or "plain", SGD without momentum, for methods whose result is a sign.
    """

    compressor: str
    optimizer: str = "adamw"


METHODS = {
    "none": Method("NoneCompressor()"),
    "bf16": Method("BF16Compressor()"),
    "fp8": Method("FP8Compressor()"),
    "int8": Method("Int8Compressor()"),
    "natural": Method("NaturalCompressor()"),
    "qsgd": Method("QSGDCompressor(bits=4)"),
    "ef-sign": Method("EFSignSGDCompressor()"),
    "power": Method("PowerSGDCompressor(rank=4)"),
    "acp": Method("ACPSGDCompressor(rank=4)"),
    "random-k": Method("RandomKCompressor(density=2**-7)"),
    "sparse-gd": Method("SparseGDCompressor(density=0.01)"),
    "chunked": Method("ChunkedTopKCompressor()"),
    "chunked-lossless": Method("ChunkedTopKCompressor(values='int8', decay=1)"),
    "signum": Method("SignumCompressor()", "plain"),
    "demo": Method("DeMoCompressor()", "plain"),
}
STEPS = 300  # at the scale of the other parts
NARROW = ("bf16", "fp8", "int8", "natural", "qsgd")
NEAR = 0.02  # nats


def rows() -> list[Row]:
    return [
        Row(
            key=key,
            title=f"`{method.compressor}`" + (", signs" if method.optimizer == "plain" else ""),
            compressor=method.compressor,
            task="transformer",
            optimizer=method.optimizer,
            rate=0.001,
            schedule="constant",
            length=STEPS / Scale().steps,
            base="none",
        )
        for key, method in METHODS.items()
    ]


def _behind(found: Found, key: str, other: str, expected: str) -> Claim:
    """Hold a method against another that it is expected to be no worse than."""
    here, there = found.away(key), found.away(other)
    ratios = found.middle(key, "ratio"), found.middle(other, "ratio")
    return Claim(
        f"`{METHODS[key].compressor}` loses no more than `{METHODS[other].compressor}`",
        expected,
        f"{said(here, '{:+.3f}')} at {times(ratios[0])} beside "
        f"{said(there, '{:+.3f}')} at {times(ratios[1])}",
        None if here is None or there is None else here <= there,
    )


def claims(found: Found) -> list[Claim]:
    """What `which.md` says of these methods, each way that it could be wrong."""
    every = []
    for key in NARROW:
        gap, ratio = found.away(key), found.middle(key, "ratio")
        every.append(
            Claim(
                f"`{METHODS[key].compressor}` loses nothing: at most {NEAR} nats",
                "free of loss",
                NOT_RUN if gap is None else f"{gap:+.3f} at {times(ratio)}",
                None if gap is None else gap <= NEAR,
            )
        )
    fewer, more = "fewer bytes, as little loss", "more bytes, less loss"
    every.append(_behind(found, "chunked", "sparse-gd", fewer))
    every.append(_behind(found, "power", "chunked", more))
    every.append(_behind(found, "acp", "power", fewer))
    every.append(_behind(found, "sparse-gd", "random-k", more))
    return every


def draw(found: Found, figure: Any) -> None:
    axes = figure.subplots()
    for look, (key, method) in zip(style.lines(len(METHODS)), METHODS.items()):
        results = found[key]
        if results:
            ratios = [result["ratio"] for result in results]
            scores = [result["score"] for result in results]
            axes.plot(ratios, scores, label=method.compressor, **{**look, "linestyle": ""})
    axes.set_xscale("log")
    axes.set_title(f"loss on held-out text after {STEPS} steps, nats a character")
    axes.set_xlabel("times fewer bytes than float32")


PART = Part(
    name="today",
    title="Methods of today on a transformer",
    settings=(
        "No paper: the GPT and the text of the part before, equal steps for all. AdamW at a "
        "constant rate of 0.001; methods whose result is a sign with SGD without momentum at the "
        "same rate, not clipped. `here` is the loss on the last tenth of the text: less is better. "
        "Rates were not tuned. Short: what a method keeps back at the end counts for much of 300 "
        "steps."
    ),
    rows=tuple(rows()),
    claims=claims,
    draw=draw,
    source="expected",
)
