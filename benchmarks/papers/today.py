"""Bytes against loss of old methods and of those that people pick today, at equal steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.papers.parts import NOT_RUN, Claim, Measured, Part, Row, Scale, formatted, times
from hvd_gradcomp.cli import style


@dataclass(frozen=True)
class Method:
    """Compressor and the optimizer that its gradients go to.

    Attributes:
        compressor: an expression of hvd_gradcomp's names.
        signs: whether its result is a sign, for SGD without momentum.
        hook_rank: of PyTorch's PowerSGD hook, in the place of a compressor.
    """

    compressor: str = "NoneCompressor()"
    signs: bool = False
    hook_rank: int = 0

    @property
    def title(self) -> str:
        if self.hook_rank:
            return f"PyTorch's `powerSGD_hook`, rank {self.hook_rank}"
        return f"`{self.compressor}`" + (", signs" if self.signs else "")


METHODS = {
    "none": Method(),
    "bf16": Method("BF16Compressor()"),
    "fp8": Method("FP8Compressor()"),
    "int8": Method("Int8Compressor()"),
    "natural": Method("NaturalCompressor()"),
    "qsgd": Method("QSGDCompressor(bits=4)"),
    "terngrad": Method("TernGradCompressor()"),
    "onebit": Method("OneBitCompressor()"),
    "ef-sign": Method("EFSignSGDCompressor()"),
    "power": Method("PowerSGDCompressor(rank=4)"),
    "power-late": Method("after(10, None, PowerSGDCompressor(rank=4))"),  # as PyTorch's hook
    "power-hook": Method(hook_rank=4),
    "acp": Method("ACPSGDCompressor(rank=4)"),
    "random-k": Method("RandomKCompressor(density=2**-7)"),
    "variance": Method("VarianceCompressor(alpha=1, capacity='latest', index_coding='elias_fano')"),
    "egc": Method("EGCCompressor(K=1024, momentum=0, index_coding='elias_fano')"),
    "sparse-gd": Method("SparseGDCompressor(density=0.01)"),
    "sparse-gd-int4": Method(
        "SparseGDCompressor(density=0.01, index_coding='elias_fano', values='int4')"
    ),
    "chunked": Method("ChunkedTopKCompressor()"),
    "chunked-lossless": Method("ChunkedTopKCompressor(values='int8', decay=1)"),
    "signum": Method("SignumCompressor()", signs=True),
    "demo": Method("DeMoCompressor()", signs=True),
}
EIGHT = "8/"  # at the beginning of a key: on 8 ranks
ON_EIGHT = {
    "none": Method(),
    "chunked": Method("ChunkedTopKCompressor()"),
    "owned": Method("ChunkedTopKCompressor(exchange='two_shot')"),
    "owned-denser": Method("ChunkedTopKCompressor(k=256, exchange='two_shot')"),
    "owned-lossless": Method("ChunkedTopKCompressor(values='int8', decay=1, exchange='two_shot')"),
}
STEPS = 300  # of the transformer, at the scale of the other parts
NARROW = ("bf16", "fp8", "int8", "natural", "qsgd")
NEAR = {"": 0.02, "vgg/": 0.5}  # nats; points of accuracy
VGG = "vgg/"  # at the beginning of a key


def rows() -> list[Row]:
    transformers = [
        Row(
            key=key,
            title=method.title,
            compressor=method.compressor,
            task="transformer",
            optimizer="plain" if method.signs else "adamw",
            rate=0.001,
            schedule="constant",
            length=STEPS / Scale().steps,
            base="none",
            hook_rank=method.hook_rank,
        )
        for key, method in METHODS.items()
    ]
    networks = [
        Row(
            key=VGG + key,
            title=f"VGG, {method.title}",
            compressor=method.compressor,
            optimizer="plain" if method.signs else "sgd",
            rate=0.001 if method.signs else 0.05,
            base=VGG + "none",
            hook_rank=method.hook_rank,
        )
        for key, method in METHODS.items()
    ]
    on_eight = [
        replace(
            transformers[0],
            key=EIGHT + key,
            title=method.title,
            compressor=method.compressor,
            ranks=8,
            base=EIGHT + "none",
        )
        for key, method in ON_EIGHT.items()
    ]
    return transformers + networks + on_eight


def _behind(measured: Measured, key: str, other: str, expected: str, where: str = "") -> Claim:
    """Hold a method against another that it is expected to be no worse than."""
    here, base = measured.away(where + key), measured.away(where + other)
    ratios = measured.middle(where + key, "ratio"), measured.middle(where + other, "ratio")
    form = "{:+.2f}" if where else "{:+.3f}"
    holds = None
    if here is not None and base is not None:
        holds = here >= base if where else here <= base  # accuracy, or loss
    return Claim(
        f"{_on(where)}{METHODS[key].title} loses no more than {METHODS[other].title}",
        expected,
        f"{formatted(here, form)} at {times(ratios[0])} beside "
        f"{formatted(base, form)} at {times(ratios[1])}",
        holds,
    )


def _on(where: str) -> str:
    return "VGG: " if where else ""


def claims(measured: Measured) -> list[Claim]:
    """What `which.md` says of these methods, each way that it could be wrong."""
    every = []
    for where, near in NEAR.items():
        form, unit = ("{:+.2f}", "points") if where else ("{:+.3f}", "nats")
        for key in NARROW:
            gap, ratio = measured.away(where + key), measured.middle(where + key, "ratio")
            lost = gap if gap is None or not where else -gap
            every.append(
                Claim(
                    f"{_on(where)}{METHODS[key].title} loses nothing: at most {near} {unit}",
                    "free of loss",
                    NOT_RUN if gap is None else f"{form.format(gap)} at {times(ratio)}",
                    None if lost is None else lost <= near,
                )
            )
        fewer, more = "fewer bytes, as little loss", "more bytes, less loss"
        every.append(_behind(measured, "chunked", "sparse-gd", fewer, where))
        every.append(_behind(measured, "sparse-gd-int4", "sparse-gd", fewer, where))
        late, hook = "power-late", "power-hook"
        claim = _behind(measured, late, hook, "the same method", where)
        gap = measured.away(where + late, where + hook)
        every.append(
            replace(
                claim,
                text=f"{_on(where)}{METHODS[late].title} is within {near} {unit} of "
                f"{METHODS[hook].title}",
                holds=None if gap is None else abs(gap) <= near,
            )
        )
        every.append(_behind(measured, "power", "chunked", more, where))
        every.append(_behind(measured, "acp", "power", fewer, where))
        every.append(_behind(measured, "sparse-gd", "random-k", more, where))
    for key, expected in (
        ("owned", "a quarter of the bytes received, as little loss"),
        ("owned-denser", "as many bytes received, as little loss"),
    ):
        losses = [measured.away(EIGHT + each) for each in (key, "chunked")]
        every.append(
            Claim(
                f"{ON_EIGHT[key].title} is within 0.02 nats of {ON_EIGHT['chunked'].title} on 8 "
                "ranks",
                expected,
                f"{formatted(losses[0], '{:+.3f}')} beside {formatted(losses[1], '{:+.3f}')}",
                None if None in losses else losses[0] <= losses[1] + NEAR[""],
            )
        )
    return every


DRAWN = {
    "int8": "Int8",
    "qsgd": "QSGD, 4 bits",
    "power": "PowerSGD, rank 4",
    "signum": "Signum",
    "demo": "DeMo",
    "chunked": "chunked top-k",
}


def draw(measured: Measured, figure: Any) -> None:
    """Draw the medians of six methods, and from the worst to the best seed."""
    names = {
        "": f"transformer: nats a character after {STEPS} steps, less is better",
        VGG: "VGG: accuracy on images, percent, more is better",
    }
    for axes, (where, name) in zip(figure.subplots(1, 2), names.items()):
        for look, (key, label) in zip(style.lines(len(DRAWN)), DRAWN.items()):
            results = measured[where + key]
            if results:
                ratio, scores = measured.middle(where + key, "ratio"), [r["score"] for r in results]
                axes.vlines(ratio, min(scores), max(scores), color=look["color"])
                axes.plot([ratio], [measured.middle(where + key)], label=label, **look)
        base = measured.middle(where + "none")
        if base is not None:
            axes.axhline(base, color=style.INK, linewidth=1, label="none")
        axes.set_xscale("log")
        axes.set_title(name)
        axes.set_xlabel("times fewer bytes than float32")


PART = Part(
    name="today",
    title="Old methods and those of today on a transformer and a VGG",
    settings=(
        "No paper: the GPT and the text of the part before, and the VGG-like network on images, "
        "equal steps for all. AdamW at a constant rate of 0.001 on text, SGD with momentum 0.9 at "
        "0.05 on images, the rate halved at each fifth; methods whose result is a sign with SGD "
        "without momentum at 0.001 on both, not clipped. `here` is the loss on the last tenth of "
        "the text, less is better, or the accuracy on the test images. Rates were not tuned. "
        "Short: what a method keeps back at the end counts for much of so few steps. PyTorch's "
        "hook runs behind DDP over gloo; its first 10 steps are not compressed."
    ),
    rows=tuple(rows()),
    claims=claims,
    draw=draw,
    source="expected",
)
