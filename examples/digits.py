"""The handwritten digits that ship inside scikit-learn, and what the digit examples share."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

from hvd_gradcomp import Compressor, HybridCompressor, NoneCompressor, VarianceCompressor
from hvd_gradcomp.cli.digits import load, shard
from hvd_gradcomp.monitoring.stats import CompressionStats

__all__ = ["METHODS", "arguments", "load", "process_sets", "report", "say", "shard"]

METHODS: dict[str, Compressor] = {
    "none": NoneCompressor(),
    "variance": VarianceCompressor(alpha=2.0),
    "hybrid": HybridCompressor(tau=0.1, alpha=2.0),
}


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--method", choices=sorted(METHODS), default="variance")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32, help="a rank")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of Adam")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(  # horovodrun would take "--hierarchical" for an abbreviation of its own
        "--two-level", dest="hierarchical", action="store_true", help="compress between hosts only"
    )
    parser.add_argument("--json", action="store_true", help="rank 0 prints its row as JSON")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return options


def process_sets(options: argparse.Namespace) -> str | None:
    """Return the `process_sets` for `hvd.init`."""
    return "dynamic" if options.hierarchical else None


def say(epoch: int, epochs: int) -> None:
    """Rank 0's line after each epoch; the demo turns these lines into a progress bar."""
    print(f"epoch {epoch + 1}/{epochs}", flush=True)


def report(
    options: argparse.Namespace,
    framework: str,
    accuracy: float,
    stats: CompressionStats,
    seconds: float,
) -> None:
    """Rank 0's row for the table of the demo; accuracy in [0, 1], seconds of the training."""
    row: dict[str, Any] = {
        "framework": framework,
        "method": options.method,
        "accuracy": 100 * accuracy,
        "element_ratio": stats.element_ratio,
        "ratio": stats.ratio,
        "bytes_sent": stats.bytes_sent,
        "steps": stats.steps,
        "seconds_per_step": seconds / stats.steps,
    }
    if options.json:
        print(json.dumps(row), flush=True)
        return
    print(
        f"{row['framework']} {row['method']}: accuracy {row['accuracy']:.2f} %, one element in "
        f"{row['element_ratio']:.1f} sent, bytes / {row['ratio']:.1f}, "
        f"{1e3 * row['seconds_per_step']:.2f} ms a step"
    )
