"""Made-up data in the form that `make papers` reads, for machines without Debian's packages."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from benchmarks.papers.data import FILES, TEXT


def write(folder: Path, train: int, test: int) -> None:
    """Images of ten kinds that can be told apart, and a text."""
    random = np.random.default_rng(0)
    kinds = random.integers(0, 256, (10, 28 * 28))
    for name in FILES:
        count = train if name.startswith("train") else test
        labels = np.arange(count) % 10
        body = labels if "labels" in name else kinds[labels] // 2 + random.integers(0, 128, 784)
        head = bytes(8 if "labels" in name else 16)
        with gzip.open(folder / name, "wb", compresslevel=1) as stream:
            stream.write(head + body.astype(np.uint8).tobytes())
    verses = (
        f"Ge1:{i} In the beginning there were {i} of them, and then more." for i in range(3000)
    )
    (folder / TEXT).write_text("\n".join(verses))
