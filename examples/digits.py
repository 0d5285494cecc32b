"""The handwritten digits that ship inside scikit-learn, and what the digit examples share."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from hvd_gradcomp import Compressor, HybridCompressor, NoneCompressor, VarianceCompressor
from hvd_gradcomp.monitoring.stats import CompressionStats

METHODS: dict[str, Compressor] = {
    "none": NoneCompressor(),
    "variance": VarianceCompressor(alpha=2.0),
    "hybrid": HybridCompressor(tau=0.1, alpha=2.0),
}


def load() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """1,257 images to train on and 540 to test: float32 [n, 8, 8, 1] in [0, 1], labels int64."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels.astype(np.int64), test_size=0.3, random_state=0, stratify=labels
    )
    return train_x, train_y, test_x, test_y


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


def shard(size: int, batch_size: int, rank: int, world: int, seed: int) -> np.ndarray:
    """This rank's batches of one epoch, [batches, batch_size]: all ranks cut one shuffled order."""
    order = np.random.default_rng(seed).permutation(size)
    batches = size // (batch_size * world)
    return order[: batches * batch_size * world].reshape(batches, world, batch_size)[:, rank]


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
