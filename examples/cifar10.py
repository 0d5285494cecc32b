"""CIFAR-10 as its authors distribute the python version."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np


class _Arrays(pickle.Unpickler):
    """Reads arrays and what Python has, and nothing that could run."""

    _KNOWN = ("_reconstruct", "_frombuffer", "ndarray", "dtype", "scalar")

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in self._KNOWN:
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):  # by which Python 3 writes bytes for Python 2
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in CIFAR-10")


def load(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images float32 [n, 32, 32, 3] in [0, 1], labels int64: training, then test."""

    def read(name: str) -> tuple[np.ndarray, np.ndarray]:
        with (folder / name).open("rb") as file:
            batch = _Arrays(file, encoding="bytes").load()
        images = np.asarray(batch[b"data"], np.float32).reshape(-1, 3, 32, 32) / 255
        return images.transpose(0, 2, 3, 1), np.asarray(batch[b"labels"], np.int64)

    names = [f"data_batch_{i}" for i in range(1, 6)]
    missing = [n for n in [*names, "test_batch"] if not (folder / n).is_file()]
    if missing:
        sys.exit(
            f"{folder} lacks {', '.join(missing)}: unpack the python version of CIFAR-10 there"
        )
    parts = [read(name) for name in names]
    images, labels = (np.concatenate(x) for x in zip(*parts))
    return (images, labels, *read("test_batch"))
