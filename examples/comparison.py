"""Shared parts of both `compare` examples: methods with settings for the task, and the table."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hvd_gradcomp import (
    Compressor,
    DGCCompressor,
    EGCCompressor,
    FP16Compressor,
    GradientDroppingCompressor,
    HybridCompressor,
    NoneCompressor,
    OneBitCompressor,
    QSGDCompressor,
    ScaleComCompressor,
    SparseGDCompressor,
    StromCompressor,
    TernGradCompressor,
    VarianceCompressor,
    after,
)
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.planning.description import brief

# By name: the compressor for a warm-up of so many steps. Methods that leave out a thousand elements
# for one that they send begin with a warm-up, as their papers do.
METHODS: dict[str, Callable[[int], Compressor]] = {
    "none": lambda warmup: NoneCompressor(),
    "fp16": lambda warmup: FP16Compressor(),
    "variance": lambda warmup: VarianceCompressor(alpha=1.0),
    "hybrid": lambda warmup: HybridCompressor(tau=0.003, alpha=1.0),
    "strom": lambda warmup: StromCompressor(tau=0.003),
    "sparse_gd": lambda warmup: after(warmup, None, SparseGDCompressor(density=0.001)),
    "gradient_dropping": lambda warmup: GradientDroppingCompressor(ratio=0.99),
    "scalecom": lambda warmup: ScaleComCompressor(density=0.01),
    "dgc": lambda warmup: DGCCompressor(density=0.001, warmup_steps=warmup),
    "egc": lambda warmup: after(warmup, None, EGCCompressor(K=1024)),
    "qsgd": lambda warmup: QSGDCompressor(bits=4),
    "terngrad": lambda warmup: TernGradCompressor(),
    "onebit": lambda warmup: OneBitCompressor(),
}
WARM = ("sparse_gd", "dgc", "egc")


def arguments(description: str, tasks: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--task", choices=tasks, default=tasks[0])
    parser.add_argument("--methods", default=",".join(METHODS), help="names, with commas")
    parser.add_argument("--epochs", type=int, default=60, help="of digits, or of 100 LSTM steps")
    parser.add_argument("--warmup", type=int, default=6, help="epochs, for methods that have one")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each; medians are shown")
    parser.add_argument("--batch-size", type=int, default=32, help="a rank")
    parser.add_argument("--learning-rate", type=float, help="of SGD with momentum 0.9")
    parser.add_argument("--width", type=int, default=1024, help="of the hidden layers")
    parser.add_argument("--json", type=Path, help="where rank 0 writes the rows")
    options = parser.parse_args()
    options.methods = options.methods.split(",")
    unknown = [name for name in options.methods if name not in METHODS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(METHODS)}")
    if not 0 < options.warmup < options.epochs:
        parser.error(f"--warmup must be between 0 and --epochs, got {options.warmup}")
    return options


def row(
    name: str,
    compressor: Compressor,
    score: float,
    stats: CompressionStats,
    early: CompressionStats | None,
    seconds: float,
) -> dict[str, Any]:
    """One run. `early` is a reading at the end of the warm-up, which the ratios leave out."""
    counted = stats - early if early is not None and name in WARM else stats
    return {
        "method": name,
        "compressor": brief(compressor),
        "score": score,
        "element_ratio": counted.element_ratio,
        "ratio": counted.ratio,
        "bytes_a_step": counted.bytes_sent / counted.steps,
        "milliseconds": 1e3 * seconds / stats.steps,
    }


def report(title: str, unit: str, options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Prints the table of all runs: medians over seeds, and the spread of the score."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for one in rows:
        runs.setdefault(one["method"], []).append(one)
    reference = [r["score"] for r in runs.get("none", [])]
    table = Table(
        title=title,
        caption=f"{len(rows) // len(runs)} seed(s), {options.epochs} epochs; the ratios of "
        f"{', '.join(WARM)} leave out a warm-up of {options.warmup} epochs",
    )
    table.add_column("method")
    for head in (unit, "difference", "spread", "elements", "bytes", "bytes a step", "ms a step"):
        table.add_column(head, justify="right")
    for several in runs.values():
        middle = {
            key: statistics.median(r[key] for r in several)
            for key in ("score", "element_ratio", "ratio", "bytes_a_step", "milliseconds")
        }
        scores = [r["score"] for r in several]
        away = middle["score"] - statistics.median(reference) if reference else float("nan")
        table.add_row(
            several[0]["compressor"],
            f"{middle['score']:.2f}",
            f"{away:+.2f}",
            f"{max(scores) - min(scores):.2f}",
            f"{middle['element_ratio']:.1f}",
            f"{middle['ratio']:.1f}",
            f"{middle['bytes_a_step']:,.0f}",
            f"{middle['milliseconds']:.2f}",
        )
    Console(width=130).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
