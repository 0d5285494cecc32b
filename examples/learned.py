"""Shared parts of both `learned` examples: methods that learn, curves, and the table.

GradiVeQ learns a basis, LGC an autoencoder, in phases by step. Every `EVERY` steps rank 0 notes
loss, bytes sent in a step and what the method loses; the curves are those notes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hvd_gradcomp import (
    Compressor,
    GradiVeQCompressor,
    LGCCompressor,
    NoneCompressor,
    ScaleComCompressor,
    after,
)
from hvd_gradcomp.monitoring.stats import CompressionStats

EVERY = 10
METHODS: dict[str, Callable[[argparse.Namespace], Compressor]] = {
    "none": lambda options: NoneCompressor(),
    "gradiveq": lambda options: GradiVeQCompressor(
        ratio=8,
        warmup_steps=options.full_steps,
        sample_steps=options.sample_steps,
        compress_steps=options.compress_steps,
    ),
    "gradiveq-feedback": lambda options: GradiVeQCompressor(
        ratio=8,
        warmup_steps=options.full_steps,
        sample_steps=options.sample_steps,
        compress_steps=options.compress_steps,
        feedback=True,
    ),
    "lgc-ring": lambda options: LGCCompressor(
        "ring_allreduce", full_steps=options.full_steps, train_steps=options.train_steps
    ),
    "lgc-ring-paper": lambda options: LGCCompressor(
        "ring_allreduce",
        full_steps=options.full_steps,
        train_steps=options.train_steps,
        feedback="paper",
    ),
    "lgc-ring-unsigned": lambda options: LGCCompressor(
        "ring_allreduce",
        full_steps=options.full_steps,
        train_steps=options.train_steps,
        signs=False,
        scale="model",
    ),
    "scalecom": lambda options: after(
        options.full_steps, None, ScaleComCompressor(density=0.001)
    ),  # what LGC's ring selects, and values instead of codes
    "lgc-server": lambda options: LGCCompressor(
        "parameter_server", full_steps=options.full_steps, train_steps=options.train_steps
    ),
    "lgc-server-paper": lambda options: LGCCompressor(
        "parameter_server",
        full_steps=options.full_steps,
        train_steps=options.train_steps,
        feedback="paper",
    ),
}


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cifar10", type=Path, help="folder of CIFAR-10; trains a ResNet there")
    parser.add_argument("--methods", default="none,gradiveq,lgc-ring,lgc-server")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--full-steps", type=int, default=200, help="before anything is left out")
    parser.add_argument("--train-steps", type=int, default=300, help="of LGC's autoencoder")
    parser.add_argument(
        "--sample-steps", type=int, default=GradiVeQCompressor.sample_steps, help="of GradiVeQ"
    )
    parser.add_argument(
        "--compress-steps", type=int, default=GradiVeQCompressor.compress_steps, help="of GradiVeQ"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="a rank")
    parser.add_argument("--learning-rate", type=float, default=0.02, help="of SGD, momentum 0.9")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--png", type=Path, help="where rank 0 draws the curves")
    parser.add_argument("--json", type=Path, help="where rank 0 writes rows and curves")
    options = parser.parse_args()
    options.methods = options.methods.split(",")
    unknown = [name for name in options.methods if name not in METHODS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(METHODS)}")
    return options


class Curves:
    """Notes of one run."""

    def __init__(self) -> None:
        self.notes: list[dict[str, float]] = []
        self._before = CompressionStats()

    def note(self, loss: float, stats: CompressionStats) -> None:
        """Takes down a step that is a multiple of `EVERY`."""
        span = stats - self._before
        self._before = stats
        if span.steps:
            self.notes.append(
                {
                    "step": stats.steps,
                    "loss": loss,
                    "bytes": span.bytes_sent / span.steps,
                    "dense": span.bytes_dense / span.steps,
                    **stats.losses,
                }
            )


def row(
    name: str, seed: int, accuracy: float, bytes_of_ranks: list[float], curves: Curves
) -> dict[str, Any]:
    """One run; `bytes_of_ranks` is what each rank sent in each of the last `EVERY` steps."""
    last = curves.notes[-1]
    losses = [key for key in last if key not in ("step", "loss", "bytes", "dense")]
    return {
        "method": name,
        "seed": seed,
        "accuracy": accuracy,
        "ratios": [last["dense"] / b for b in bytes_of_ranks],
        "whole": sum(n["dense"] for n in curves.notes) / sum(n["bytes"] for n in curves.notes),
        "lost": last[losses[0]] if losses else None,
        "curves": curves.notes,
    }


def report(title: str, options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Prints the table; writes rows and curves where asked."""
    table = Table(
        title=title, caption="byte ratios: of the last steps, by rank; of rank 0's whole run"
    )
    for head in ("method", "seed", "accuracy %", "byte ratio by rank", "whole run", "lost"):
        table.add_column(head, justify="left" if head == "method" else "right")
    for one in rows:
        table.add_row(
            one["method"],
            str(one["seed"]),
            f"{one['accuracy']:.2f}",
            ", ".join(f"{ratio:,.0f}" for ratio in one["ratios"]),
            f"{one['whole']:.2f}",
            "" if one["lost"] is None else f"{one['lost']:.2f}",
        )
    Console(width=110).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.png is not None:
        draw(rows, options.png)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Training loss, bytes a step, and what the method loses, over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(7, 8), sharex=True, layout="constrained")
    for one in rows:
        steps = [note["step"] for note in one["curves"]]
        for place, keys in enumerate((("loss",), ("bytes",), ("basis", "autoencoder"))):
            for key in keys:
                if any(key in note for note in one["curves"]):
                    values = [note.get(key, float("nan")) for note in one["curves"]]
                    axes[place].plot(steps, values, label=f"{one['method']}, {one['seed']}", lw=1)
    axes[0].set_ylabel("training loss")
    axes[1].set_ylabel("bytes a step, rank 0")
    axes[2].set_ylabel("share of the energy lost")
    axes[2].set_xlabel("step")
    for place in (0, 1):
        axes[place].set_yscale("log")
    for one in axes:
        one.grid(alpha=0.3)
    axes[1].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
