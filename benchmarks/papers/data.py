"""Real data from Debian: images of `dataset-fashion-mnist`, text of `bible-kjv`.

`install` brings what is missing, as root on Debian; elsewhere it says what to do. With `--data` a
folder takes the place of both packages: the four files of Fashion-MNIST, and `bible.txt`.
"""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
FASHION = Path("/usr/share/datasets/fashion-mnist")
TEXT = "bible.txt"
FILES = tuple(
    f"{part}-{what}-ubyte.gz"
    for part in ("train", "t10k")
    for what in ("images-idx3", "labels-idx1")
)
EVERYTHING = "Gen1:1-Rev22:21"


class DataError(RuntimeError):
    """Data is missing or is not what it should be; the message says what to do."""


def install(folder: Path | None, files: Sequence[str] = (*FILES, TEXT)) -> None:
    """Sees to it that the data is there.

    Args:
        folder: in the place of Debian's packages.
        files: that it has to have.

    Raises:
        DataError: it is not, and cannot be brought.
    """
    if folder is not None:
        missing = [name for name in files if not (folder / name).exists()]
        if missing:
            raise DataError(
                f"{folder} lacks {', '.join(missing)}. Put the files there, or leave --data out: "
                "then Debian's packages dataset-fashion-mnist and bible-kjv are used."
            )
        return
    if shutil.which("bible") and all((FASHION / name).exists() for name in FILES):
        return
    script = ROOT / "docker/install-system.sh"
    done = subprocess.run([script, "--data"], capture_output=True, text=True)
    if done.returncode != 0:
        raise DataError(f"The data cannot be installed. {done.stderr.strip()}")


def images(folder: Path | None, part: str, first: int, last: int) -> tuple[torch.Tensor, ...]:
    """Images `first` to `last` of the "train" or the "t10k" files.

    Returns:
        float32 [n, 1, 28, 28] of mean 0 and variance 1 over Fashion-MNIST, and labels int64 [n].
    """
    place = folder or FASHION
    pixels = _read(place / f"{part}-images-idx3-ubyte.gz", 16, 28 * 28, first, last)
    labels = _read(place / f"{part}-labels-idx1-ubyte.gz", 8, 1, first, last)
    scaled = (pixels.astype(np.float32) / 255 - 0.286) / 0.353
    return torch.from_numpy(scaled).view(-1, 1, 28, 28), torch.from_numpy(labels).long().flatten()


def _read(path: Path, head: int, size: int, first: int, last: int) -> np.ndarray:
    with gzip.open(path) as stream:
        stream.seek(head + first * size)
        items = np.frombuffer(stream.read((last - first) * size), np.uint8)
    if len(items) != (last - first) * size:
        raise DataError(
            f"{path} has fewer than {last} images; ask for fewer by --images, or install "
            "dataset-fashion-mnist anew"
        )
    return items.reshape(-1, size).copy()


def text(folder: Path | None) -> torch.Tensor:
    """The King James Bible without its verse numbers; ASCII codes, int64."""
    if folder is not None:
        raw = (folder / TEXT).read_text()
    else:
        raw = subprocess.run(
            ["bible", "-f", EVERYTHING], capture_output=True, text=True, check=True
        ).stdout
    plain = re.sub(r"^\S+:\d+ ", "", raw, flags=re.MULTILINE).encode("ascii", "ignore")
    return torch.frombuffer(bytearray(plain), dtype=torch.uint8).long()
